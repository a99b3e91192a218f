"""The documentation as a site: every page has its place, and no page is wider than a screen."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from itertools import pairwise
from urllib.parse import unquote

import pytest
from docs_pages import DOCS, FENCE, ROOT

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
DEADLINE_S = 120
PHONE = 390
MARKDOWN = [path.relative_to(DOCS).as_posix() for path in sorted(DOCS.rglob("*.md"))]
# What sticks out of the window and cannot be scrolled into view by itself.
PROBE = """
<script>
addEventListener("load", () => {
  const scrolls = (e) => !e.matches(".md-content") && (["auto", "scroll"].includes(getComputedStyle(e).overflowX)
    || scrolls(e.parentElement));
  const out = [...document.querySelectorAll(".md-content *")].filter((e) => {
    const box = e.getBoundingClientRect();
    return box.width && box.right > innerWidth + 1 && !scrolls(e);
  }).map((e) => e.tagName + "." + e.className);
  const found = document.querySelector(".md-content") ? out : ["nothing", ...out];
  parent.postMessage([decodeURIComponent(location.href), innerWidth, ...found], "*");
});
</script>
"""
# Many pages in one browser, each in a frame of its own: what each has told, in the title.
FRAMES = """
<script>
  const told = [];
  addEventListener("message", (event) => {
    told.push(event.data);
    document.title = "told " + JSON.stringify(told);
  });
</script>
"""


def places(entry):
    """The pages of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in places(part)]


def test_every_page_has_one_place_in_the_navigation():
    navigation = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    assert sorted(places(navigation)) == sorted(MARKDOWN)


def test_every_decision_is_in_the_index_under_its_number():
    decisions = sorted((DOCS / "decisions").glob("0*.md"))
    index = (DOCS / "decisions/index.md").read_text()
    assert re.findall(r"^\| \[(\d+) - [^\]]+\]\((\S+)\)", index, re.MULTILINE) == [
        (path.name[:4], path.name) for path in decisions
    ]
    assert [path.name for path in decisions if not path.read_text().startswith(f"# {path.name[:4]} - ")] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


LIST = re.compile(r"^(\* |\d+\. )")


@pytest.mark.parametrize("page", MARKDOWN)
def test_lists_are_lists_on_the_site(page):
    """Forges take what Zensical does not: a list right after a line of text, and one inside another by two blanks."""
    lines = FENCE.sub(lambda block: "\n" * block[0].count("\n"), (DOCS / page).read_text()).splitlines()
    wrong = [
        line
        for before, line in pairwise(lines)
        if re.match(r"^ {1,3}(\* |\d+\. )", line)
        or (LIST.match(line) and before.strip() and not LIST.match(before) and not before.startswith("  "))
    ]
    assert wrong == []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built strictly."""
    if find_spec("zensical") is None:
        pytest.skip("needs the extra docs: make docs")
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(DOCS, folder / "docs")
    (folder / "src").symlink_to(ROOT / "src")
    shutil.copy(ROOT / "zensical.toml", folder)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "build/site"


@pytest.mark.slow
def test_no_page_asks_another_host(site):
    """Neither by itself, nor because the theme's script finds something on it that another host's script shows."""
    loads = re.compile(
        r"<(?:script|link|img|iframe|source|embed|object)\b[^>]*\b(?:src|data|rel=\"?stylesheet[^>]*href)="
        r"[\"']?(?:https?:)?//[^>]*>|class=\"?[^\">]*\b(?:mermaid|glightbox|pyodide)\b"
    )
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    assert {page.name: found for page in pages if (found := loads.findall(page.read_text()))} == {}


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason=f"needs a browser: none of {', '.join(NAMES)} is installed")
def test_no_page_is_wider_than_a_phone(site, tmp_path):
    probed = {}
    for page in MARKDOWN:
        file = (site / page).with_suffix(".html")
        probed[page] = file.with_name(f"probed-{file.name}")
        probed[page].write_text(file.read_text().replace("</body>", PROBE + "</body>"))
    frames = "".join(
        f'<iframe width="{PHONE}" height="900" src="{file.as_uri()}"></iframe>' for file in probed.values()
    )
    (site / "frames.html").write_text(f"<!doctype html><title></title>{FRAMES}{frames}")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    command = [BROWSER, *flags, f"--user-data-dir={tmp_path}", (site / "frames.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    title = re.search(r"<title>told (.*?)</title>", done.stdout)
    told = json.loads(html.unescape(title[1])) if title else []
    told = {where: found for where, *found in told}
    assert {page: told.get(unquote(file.as_uri())) for page, file in probed.items()} == {
        page: [PHONE] for page in probed
    }
