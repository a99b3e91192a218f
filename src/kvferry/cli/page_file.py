"""Where a command draws its page."""

from __future__ import annotations

from pathlib import Path

from kvferry.errors import ConfigurationError

__all__ = ["page_file"]

PAGES = (".html", ".htm")


def page_file(path: str) -> Path | None:
    """The file to draw, if one is named. Raises ConfigurationError, before anything is computed or measured, for one
    that would be no page or in no folder."""
    if not path:
        return None
    page = Path(path)
    if page.suffix.lower() not in PAGES:
        hint = "open the page in a browser: that prints or saves it in other formats, or each drawing by itself"
        raise ConfigurationError("what is drawn is a page", found=path, expected="a name in .html", hint=hint)
    if not page.absolute().parent.is_dir():
        hint = "name a file in a folder that is there"
        raise ConfigurationError("there is no such folder", found=str(page.absolute().parent), hint=hint)
    return page
