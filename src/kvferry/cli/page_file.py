"""The HTML file that a command is asked to write."""

from __future__ import annotations

from pathlib import Path

from kvferry.errors import ConfigurationError

PAGES = (".html", ".htm")


def page_file(path: str) -> Path | None:
    """Its path, or None if none is named; to be called before anything is computed or measured. Raises
    ConfigurationError when the file is not HTML or its folder does not exist."""
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
