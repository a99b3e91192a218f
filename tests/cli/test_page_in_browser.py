"""The page in a real browser: nothing sticks out, and the script lights what the address names."""

import re
import shutil
import subprocess

import pytest
from page_samples import SAMPLES

from kvferry.cli.plan.page.html import page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
DEADLINE_S = 120
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(BROWSER is None, reason=f"needs a browser: none of {', '.join(NAMES)} is installed"),
]

# Reports into the title what a person would see as broken: sideways scrolling, cut text, text over text in a card.
PROBE = """
<script>
addEventListener("load", () => {
  const wide = document.documentElement.scrollWidth - innerWidth;
  const out = [...document.querySelectorAll("body *")].filter((e) => {
    const box = e.getBoundingClientRect();
    return box.width && !e.closest("table") && (box.right > innerWidth + 1 || box.left < -1);
  }).map((e) => e.tagName + "." + (e.className.baseVal ?? e.className));
  const cut = [];
  for (const card of document.querySelectorAll(".card")) {
    const frame = card.querySelector(".frame").getBoundingClientRect();
    const matrices = [...card.querySelectorAll(".matrix")].map((e) => e.getBoundingClientRect());
    for (const text of card.querySelectorAll("text:not(.number)")) {
      const box = text.getBoundingClientRect();
      const inside = box.left >= frame.left && box.right <= frame.right && box.bottom <= frame.bottom + 1;
      const free = matrices.every((m) => box.right <= m.left + 1 || box.left >= m.right - 1);
      if (!inside || !free) cut.push(text.textContent);
    }
  }
  for (const svg of document.querySelectorAll("svg")) {
    const frame = svg.getBoundingClientRect();
    for (const text of svg.querySelectorAll("text")) {
      const box = text.getBoundingClientRect();
      if (box.left < frame.left - 1 || box.right > frame.right + 1) cut.push(text.textContent);
    }
  }
  document.title = JSON.stringify({ wide, out, cut });
});
</script>
"""


def look(tmp_path, text, width, fragment="", probe=True):
    """The page as the browser has it after its scripts ran, at a width in pixels."""
    file = tmp_path / "plan.html"
    # The page's own policy allows only its own script: for the probe alone it is taken away.
    loosened = re.sub(r"<meta http-equiv[^>]*>", "", text).replace("</body>", PROBE + "</body>")
    file.write_text(loosened if probe else text, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={tmp_path / 'plan.png'}", "--dump-dom"]
    command = [BROWSER, *flags, f"--window-size={width},1600", file.as_uri() + fragment]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return done.stdout


def lit(dom):
    return {name for name in re.findall(r'<a class="[^"]*\blit\b[^"]*"[^>]*data-detail="([^"]+)"', dom)}


@pytest.mark.parametrize("width", [1280, 800])
@pytest.mark.parametrize("name", SAMPLES)
def test_nothing_sticks_out_and_no_label_is_cut(tmp_path, name, width):
    dom = look(tmp_path, page(SAMPLES[name]()), width)
    assert re.search(r"<title>(\{.*?\})</title>", dom).group(1) == '{"wide":0,"out":[],"cut":[]}'


def test_an_address_with_a_pair_lights_the_pair_and_shows_its_prices(tmp_path):
    dom = look(tmp_path, page(SAMPLES["context"]()), 1280, "#pair-0-1", probe=False)
    assert 'data-shown="pair-0-1"' in dom
    assert lit(dom) == {"pair-0-1", "source-0", "target-1"}
    assert re.findall(r'<article class="detail shown" id="([^"]+)"', dom) == ["pair-0-1"]


def test_an_address_with_a_rank_lights_everything_that_reaches_it(tmp_path):
    dom = look(tmp_path, page(SAMPLES["context"]()), 1280, "#target-1", probe=False)
    assert lit(dom) == {"pair-0-1", "pair-2-1", "source-0", "source-2", "target-1"}


def test_an_address_with_anything_else_lights_nothing(tmp_path):
    dom = look(tmp_path, page(SAMPLES["context"]()), 1280, "#pair-7-7", probe=False)
    assert 'class="scripted"' in dom
    assert not lit(dom)
