"""Where a command draws its page."""

from __future__ import annotations

from pathlib import Path

from kvferry.errors import ConfigurationError

PAGES = (".html", ".htm")


def page_file(path: str) -> Path | None:
    """The file to draw, if one is named. Raises ConfigurationError, before anything is computed or measured, for one
    that would be no page or in no folder."""
    if not path:
        return None
    page = Path(path)
    if page.suffix.lower() not in PAGES:
        hint = "for another format, open the page in a browser and print it"
        raise ConfigurationError(
            "the page must be an HTML file", found=path, expected="a name that ends in .html", hint=hint
        )
    if not page.absolute().parent.is_dir():
        hint = "create the folder first"
        raise ConfigurationError("the folder does not exist", found=str(page.absolute().parent), hint=hint)
    return page
