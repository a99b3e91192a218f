import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from itertools import pairwise

import page_samples
import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_samples import DENSE, SAMPLES, Shape

from kvferry.cli.plan.page.blocks import strips
from kvferry.cli.plan.page.drawing import draw
from kvferry.cli.plan.page.html import page
from kvferry.cli.plan.page.matrix import ALL, Tokens, boxes_of, tokens_of
from kvferry.cli.units import format_bytes, format_count, format_seconds

VOID = {"meta", "br", "link", "img", "input", "hr"}
SVG = "{http://www.w3.org/2000/svg}"


class Outline(HTMLParser):
    """Ids, tags and references of a page; fails on tags that are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.tags, self.links = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.tags.append(tag)
        self.ids += [named["id"]] if "id" in named else []
        self.links += [value for name, value in attributes if name in ("href", "src", "xlink:href", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def svgs(text):
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


@pytest.fixture(params=SAMPLES)
def facts(request):
    return SAMPLES[request.param]()


def test_a_page_is_well_formed_and_its_ids_are_unique(facts):
    outline = Outline(page(facts))
    assert len(outline.ids) == len(set(outline.ids))
    assert {link[1:] for link in outline.links} <= set(outline.ids)
    assert all(drawing.find(f"{SVG}title") is not None for drawing in svgs(page(facts)))


def test_a_page_refers_to_nothing_outside_itself(facts):
    text = page(facts)
    assert set(re.findall(r"https?://[^\"' <]*", text)) == {"http://www.w3.org/2000/svg"}
    assert all(link.startswith("#") for link in Outline(text).links)
    assert not re.search(r"@import|url\((?!#)", text)


def test_every_pair_and_every_rank_is_drawn_told_and_listed(facts):
    text = page(facts)
    ids, drawing = set(Outline(text).ids), next(svg for svg in svgs(text) if svg.get("id") == "drawing")
    drawn = {link.get("data-detail") for link in drawing.iter(f"{SVG}a")}
    pairs = {f"pair-{pair['source_rank']}-{pair['target_rank']}" for pair in facts["pairs"]}
    ranks = {f"{side}-{rank['rank']}" for side in ("source", "target") for rank in facts[side]["ranks"]}
    assert drawn == pairs | ranks
    assert pairs | ranks <= ids
    assert len(re.findall(r'<th scope="row">', text)) == len(pairs)


def test_a_page_is_small(facts):
    assert len(page(facts).encode()) < 300_000


@pytest.mark.parametrize("key", ["model", "command"])
def test_what_users_write_is_never_markup(key):
    evil = "</title><script>alert(1)</script>\" onload='x' {{ 7 * 7 }} &"
    facts = {**SAMPLES["four-to-two"](), key: evil}
    facts["pairs"][0]["reason"] = facts["verdict"]["text"] = facts["groups"][0]["name"] = evil
    facts["pairs"][0]["strategy"] = facts["source"]["words"] = facts["pairs"][0]["boxes"][0] = evil
    facts["fields"][0]["name"] = facts["fields"][0]["value"] = evil
    for rank in facts["source"]["ranks"]:
        rank["axes"], rank["tokens"] = {evil: [0, 2]}, evil
    outline = Outline(page(facts))
    assert outline.tags.count("script") == 1
    assert "&lt;script&gt;alert(1)" in page(facts)
    assert len(svgs(page(facts))) == 1


def test_in_a_target_every_part_has_the_colour_of_the_source_that_fills_it():
    drawing = draw(SAMPLES["four-to-two"]())
    target = next(card for card in drawing.cards if (card.side, card.rank) == ("target", 1))
    assert [(region.source, region.fill) for region in target.regions] == [(2, "var(--c2)"), (3, "var(--c3)")]
    assert target.regions[0].label_x < target.regions[1].label_x


def test_ribbons_are_as_wide_as_their_bytes_and_no_wider_than_a_card():
    facts = SAMPLES["latent"]()
    facts["pairs"][0]["bytes"] //= 2
    widths = {(ribbon.pair["source_rank"], ribbon.pair["target_rank"]): ribbon.width for ribbon in draw(facts).ribbons}
    assert widths[0, 0] * 2 == pytest.approx(widths[1, 1])
    assert 2 * widths[1, 1] < 82


def test_stages_are_bands_beside_their_ranks():
    drawing = draw(SAMPLES["eight-to-four-stages"]())
    assert [stage.label for stage in drawing.stages] == [
        "stage 0 · layers 0–39",  # noqa: RUF001
        "stage 1 · layers 40–79",  # noqa: RUF001
    ]
    assert not draw(SAMPLES["four-to-two"]()).stages


def test_alternating_tokens_are_stripes_that_fill_a_target_together():
    drawing = draw(SAMPLES["context"]())
    target = next(card for card in drawing.cards if card.side == "target")
    assert {region.fill for region in target.regions} == {"url(#stripes-0-2-0-1)", "url(#stripes-2-2-1-2)"}
    assert {"stripes-0-2-0-1", "stripes-2-2-1-2"} <= {pattern[0] for pattern in drawing.patterns}


def test_sources_that_share_the_states_of_one_box_are_all_seen():
    facts = SAMPLES["one-to-one"]()
    second = {**facts["source"]["ranks"][0], "rank": 1}
    facts["source"]["ranks"].append(second)
    facts["pairs"].append({**facts["pairs"][0], "source_rank": 1})
    target = draw(facts).cards[-1]
    assert [region.fill for region in target.regions] == ["url(#stripes-0-2-0-1)", "url(#stripes-1-2-1-2)"]
    assert target.regions[0].label_y < target.regions[1].label_y


def test_a_row_is_what_follows_without_a_gap_on_both_sides():
    facts = SAMPLES["four-to-two"]()
    ((source, target),) = strips(facts)
    first = facts["pairs"][0]
    assert source.row_words == target.row_words == f"one row: {first['bytes'] // first['rows_before_merge']} B"
    num_cells = target.row_percent / 100 * sum(cell.width for cell in target.cells)
    assert num_cells == pytest.approx(2)
    assert [cell.source for cell in target.cells[:8]] == [0, 0, 1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize("name", ["one-to-one", "latent", "context", "eight-to-four-stages", "sixteen-to-eight-stages"])
def test_the_row_that_is_drawn_is_the_row_that_is_counted(name):
    facts = SAMPLES[name]()
    first = facts["pairs"][0]
    assert strips(facts)[0][0].row_words == f"one row: {format_bytes(first['bytes'] / first['rows_before_merge'])}"


@given(
    source=st.builds(Shape, st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 5), st.sampled_from([1, 2, 4])),
    target=st.builds(
        Shape, st.sampled_from([1, 2, 4, 8]), st.integers(1, 3), st.just(1), st.sampled_from([1, 16, 256])
    ),
    groups=st.sampled_from([page_samples.DENSE, page_samples.MLA, page_samples.HYBRID]),
)
def test_any_plan_is_drawn_inside_its_frame(source, target, groups):
    drawing = draw(page_samples.facts(source, target, groups))
    for card in drawing.cards:
        assert card.area.x >= 0
        assert card.area.x + card.area.width <= drawing.width
        assert card.area.y >= 0
        assert card.area.y + card.area.height <= drawing.height
    for side in ("source", "target"):
        areas = [card.area for card in drawing.cards if card.side == side]
        assert all(upper.y + upper.height < lower.y for upper, lower in pairwise(areas))


def test_a_plan_that_moves_nothing_still_has_a_page():
    facts = {**page_samples.facts(Shape(), Shape(), DENSE), "pairs": [], "bytes": 0, "rows": 0, "rows_before_merge": 0}
    facts |= {"predicted_s": 0.0, "groups": [], "layouts": {"source": [], "target": []}}
    facts["verdict"] = {"pays": False, "text": "", "break_even_tokens_per_s": None, "prefill_tokens_per_s": None}
    assert "does not pay" in page(facts)


def test_a_verdict_that_nobody_can_give_is_not_given():
    facts = SAMPLES["four-to-two"]()
    facts["verdict"] |= {"pays": None, "prefill_tokens_per_s": 0.0}
    assert "unknown<small>say --prefill-speed" in page(facts)


def test_merged_rows_stand_in_the_headline():
    facts = {**SAMPLES["four-to-two"](), "rows": 81920}
    assert "5.24 million → 81,920" in page(facts)


@pytest.mark.parametrize(
    ("words", "expected"),
    [("all", ALL), ("t % 8 in [0, 1)", Tokens(8, 0, 1)), ("t % 0 in [0, 0)", ALL), ("something else", ALL)],
)
def test_tokens_are_read_from_their_words(words, expected):
    assert tokens_of(words) == expected


def test_places_of_a_context_parallel_rank_are_tokens():
    tokens = Tokens(8, 2, 4)
    assert [tokens.nth(index) for index in range(5)] == [2, 3, 10, 11, 18]
    assert all(tokens.nth(index) in tokens for index in range(20))


def test_boxes_are_read_from_their_words():
    assert boxes_of(["head [0, 2), channel [4, 8)", "x"]) == [("head", 0, 2), ("channel", 4, 8)]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_bytes(512), "512 B"),
        (format_bytes(1023), "1,023 B"),
        (format_bytes(8192), "8 KiB"),
        (format_bytes(2684354560), "2.50 GiB"),
        (format_bytes(1000 * 2**20), "0.98 GiB"),
        (format_seconds(0.0537), "53.7 ms"),
        (format_seconds(0.0000004), "0.40 µs"),
        (format_seconds(2), "2 s"),
        (format_count(655360), "655,360"),
        (format_count(5242880), "5.24 million"),
    ],
)
def test_numbers_are_short(shown, expected):
    assert shown == expected
