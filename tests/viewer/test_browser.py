"""The page in a real browser: what is drawn, the pointer, the keys, print, and hostile texts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
from looking import NASTY, two_methods

from tokencredit.records import CreditRecord, Record
from tokencredit.viewer import view

Open = Callable[..., Any]


def classes(page: Any, column: int = 0) -> list[str]:
    """The classes of a column's tokens, but for those that all have."""
    found: list[str] = (
        page.locator(".tokens")
        .nth(column)
        .locator(".t")
        .evaluate_all("spans => spans.map(s => s.className)")
    )
    return [" ".join(sorted(set(name.split()) - {"t", "current"})) for name in found]


def texts(page: Any, column: int = 0) -> list[str]:
    return (
        page.locator(".tokens")
        .nth(column)
        .locator(".t")
        .evaluate_all("spans => spans.map(s => s.textContent)")
    )


def numbers(page: Any) -> dict[str, str]:
    pairs = page.locator(".inspector .pair")
    return dict(zip(pairs.locator("dt").all_text_contents(),
                    pairs.locator("dd").all_text_contents(), strict=True))  # fmt: skip


def choose(page: Any, label: str, value: str) -> None:
    page.get_by_label(label, exact=True).select_option(value)


def listed(page: Any) -> list[str]:
    """The numbers of the listed responses, top down."""
    cells = page.locator(".rows .row").evaluate_all(
        "rows => rows.map(r => [r.getBoundingClientRect().top, r.firstChild.textContent])"
    )
    return [re.sub(r"\D", "", text) for _, text in sorted(cells)]


def test_tokens_are_coloured(opened: Open):
    page = opened(view(two_methods(1)).html)
    assert texts(page) == ["so", " 4", " + ", "2", " = 0", "<eos>"]
    # Values .5 -2 masked 0 1 .1; five are off zero or not, the quantile is the largest, 2.
    assert classes(page) == ["p3", "n10", "m", "z", "p5 parting", "k1 p1"]
    choose(page, "colour by", "entropy")
    # .5, unknown, masked, 0, 1, .25 of at most 1.
    assert classes(page) == ["p5", "u", "m", "z", "p10 parting", "k1 p3"]
    assert "nats" in page.locator(".legend").text_content()
    kinds = page.locator(".kinds .t")
    looks = [
        kinds.nth(k).evaluate(
            "e => { const s = getComputedStyle(e); "
            "return s.backgroundImage + s.textDecorationLine + s.borderLeftWidth }"
        )
        for k in range(5)
    ]  # fmt: skip
    assert len(set(looks[:3])) == 3  # zero, unknown, outside the mask


def test_siblings_stand_side_by_side(opened: Open):
    page = opened(view(two_methods(2)).html)
    columns = page.locator(".column")
    assert columns.count() == 3
    boxes = [columns.nth(k).bounding_box() for k in range(3)]
    assert len({box["y"] for box in boxes}) == 1 and boxes[0]["x"] < boxes[1]["x"] < boxes[2]["x"]
    assert page.locator(".divide").first.text_content() == "4 tokens shared by all"
    # The first token after what is shared is on one line everywhere.
    tops = {round(page.locator(f"#t-{row}-a-4").bounding_box()["y"]) for row in range(3)}
    assert len(tops) == 1
    for row in range(3):
        assert page.locator(f"#t-{row}-a-4").evaluate("e => e.classList.contains('parting')")
    facts = columns.nth(1).locator("dl").inner_text()
    assert re.search(r"base\s+-1", facts) and re.search(r"reward\s+0", facts)
    assert "truncated, kept out of the loss" in columns.nth(1).text_content()
    assert "question 0" in page.locator(".prompt").text_content()
    choose(page, "show", "response")
    assert page.locator(".column").count() == 1 and page.locator(".divide").count() == 0


def test_two_methods_and_their_difference(opened: Open):
    page = opened(view(two_methods(1), by="gtpo", against="grpo_s").html)
    titles = page.locator(".column .lane").all_text_contents()
    assert titles[:3] == [
        "gtpo advantage",
        "grpo_s advantage",
        "gtpo advantage \u2212 grpo_s advantage",
    ]
    page.locator("#t-0-d-1").hover()
    # -2 - .4 on the common scale of 2.
    assert classes(page, 2)[1] == "n10" and classes(page, 1)[1] == "p2"
    choose(page, "beside", "entropy")
    assert page.locator(".column .lane").all_text_contents()[:2] == ["gtpo advantage", "entropy"]
    assert page.locator(".scale").count() == 2


def test_every_number_of_a_token(opened: Open):
    page = opened(view(two_methods(1)).html)
    page.locator("#t-0-a-1").hover()
    assert numbers(page) == {
        "gtpo advantage": "-2", "gtpo shaped reward": "1.1", "grpo_s advantage": "0.4",
        "grpo_s shaped reward": "1.5", "entropy": "unknown", "gtpo base": "1", "grpo_s base": "1",
    }  # fmt: skip
    told = page.locator(".inspector .token").text_content()
    assert "response 1, token 2 of 6, position 1, id 8" in told
    page.locator("#t-0-a-2").hover()
    assert "outside the mask" in page.locator(".inspector .token").text_content()
    assert numbers(page)["gtpo shaped reward"] == "unknown"


def test_keys(opened: Open):
    page = opened(view(two_methods(3)).html)
    page.keyboard.press("t")
    told = page.locator(".inspector .token")
    assert "response 1, token 1 of 6" in told.text_content()
    for key, token in (
        ("ArrowRight", 2),
        ("End", 6),
        ("ArrowLeft", 5),
        ("Home", 1),
        ("ArrowLeft", 1),
    ):
        page.keyboard.press(key)
        assert f"token {token} of 6" in told.text_content()
    page.keyboard.press("Tab")
    assert "response 2, token 1 of 6" in told.text_content()
    page.keyboard.press("l")
    for key, row in (("ArrowDown", 2), ("End", 9), ("ArrowUp", 8), ("Home", 1)):
        page.keyboard.press(key)
        assert page.locator(".rows [aria-selected=true]").get_attribute("id") == f"row-{row - 1}"
    page.keyboard.press("/")
    page.keyboard.type("question 2")
    assert listed(page) == ["7", "8", "9"]


def test_lines_up_and_down(opened: Open):
    words = [f"word{k} " for k in range(60)]
    record = Record(group=0, tokens=words, mask=[1] * 60, reward=1.0, signals={"s": [1.0] * 60})
    page = opened(view([record]).html)
    page.keyboard.press("t")
    page.keyboard.press("ArrowDown")
    box = page.locator(".t.current").bounding_box()
    first = page.locator("#t-0-a-0").bounding_box()
    assert box["y"] > first["y"] + 10 and abs(box["x"] - first["x"]) < 30
    page.keyboard.press("ArrowUp")
    assert page.locator(".t.current").get_attribute("id") == "t-0-a-0"


def test_sorting_and_filtering(opened: Open):
    page = opened(view(two_methods(3)).html)
    assert listed(page) == list("123456789")
    page.locator(".head .reward").click()  # down first; what is not scored comes last
    assert listed(page) == list("147235896")
    page.locator(".head .reward").click()
    assert listed(page) == list("235891476")
    page.locator(".head .effective").click()
    assert page.locator(".head .effective").get_attribute("aria-pressed") == "true"
    page.locator(".head .order").click()
    choose(page, "outcome", "right")
    assert listed(page) == list("147")
    choose(page, "outcome", "unscored")
    assert listed(page) == ["6"]
    choose(page, "outcome", "all")
    page.locator(".filter summary").click()
    page.get_by_label("flips at least").fill("3")
    assert set(listed(page)) == set("235689")
    page.get_by_label("reward at most").fill("-1")
    assert listed(page) == []
    assert page.locator(".count").text_content() == "0 of 9 responses; none fits"
    page.locator(".rows").focus()
    page.keyboard.press("ArrowDown")  # nothing to go to


def test_where_it_comes_from(opened: Open):
    page = opened(view(two_methods(2), title="run 7").html)
    assert page.title() == "run 7 - tokencredit"
    page.locator(".facts summary").first.click()
    facts = page.locator(".facts").first.locator("dl").inner_text()
    for word in ("tiny", "0.7", "alpha2=0.2 (tokencredit 0.1.0)", "0 .. 1"):
        assert word in facts


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(opened: Open, scheme: str):
    """Ink on the strongest shades, both ways, keeps a contrast of 4.5 (WCAG AA)."""
    page = opened(view(two_methods(1)).html, color_scheme=scheme)
    ratio = page.evaluate(
        """() => {
          const canvas = document.createElement("canvas")
            .getContext("2d", {willReadFrequently: true});
          const rgb = (...layers) => {
            canvas.clearRect(0, 0, 1, 1);
            for (const layer of layers) { canvas.fillStyle = layer; canvas.fillRect(0, 0, 1, 1); }
            return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
          };
          const light = (c) => c.map((v) => v / 255)
            .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
            .reduce((sum, v, k) => sum + v * [0.2126, 0.7152, 0.0722][k], 0);
          const body = getComputedStyle(document.body);
          return [...document.querySelectorAll(".swatch")].map((s) => {
            const [a, b] = [light(rgb(body.color)),
                            light(rgb(body.backgroundColor, getComputedStyle(s).backgroundColor))];
            return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
          });
        }"""
    )
    assert len(ratio) == 21 and min(ratio) > 4.5


def test_themes(opened: Open):
    page = opened(view(two_methods(1)).html, color_scheme="light")
    paper = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    choose(page, "theme", "dark")
    assert page.evaluate(paper) != light
    choose(page, "theme", "light")
    assert page.evaluate(paper) == light


def test_printing_shows_the_whole_group(opened: Open):
    records = [dataclasses.replace(two_methods(1)[k % 3], reward=float(k)) for k in range(12)]
    page = opened(view(records).html)
    assert page.locator(".column").count() < 12
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert page.locator(".column").count() == 12
    tops = [box["y"] for k in range(12) if (box := page.locator(".column").nth(k).bounding_box())]
    assert tops == sorted(set(tops)) and len(tops) == 12  # below one another
    assert not page.locator("nav").is_visible() and page.locator(".legend").is_visible()
    assert len(page.pdf()) > 10_000
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    assert page.locator(".column").count() < 12


@pytest.mark.parametrize("text", NASTY)
def test_hostile_texts_are_shown_as_text(opened: Open, text: str):
    base = two_methods(1)[0]
    record = dataclasses.replace(
        base, group=text, prompt=text, prompt_id=text, response=text, tokens=[text] * 6,
        rewards={text: 1.0, "b": 0.5}, signals={text: [1.0] * 6},
        credit={text: CreditRecord(base=1.0, advantage=[1.0] * 6)},
        meta={"model": text, "credit": {text: {"options": {text: text}}}},
    )  # fmt: skip
    page = opened(view([record, record], title=text, by=text).html)
    assert "broken" not in page.title() or "</script>" in page.title() or "<img" in page.title()
    assert len(texts(page)) == 6 and len(set(texts(page))) == 1
    page.locator("#t-0-a-0").hover()
    assert page.locator(".inspector .pair").count() >= 2
    assert page.locator("img").count() == 0
    # Nothing reverses or hides its neighbours.
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200b\ufeff\x00\x07]",
                         page.locator("main").inner_text())  # fmt: skip


def test_many_long_responses(opened: Open):
    """Only what is on the screen is drawn."""
    length = 600
    records = [
        Record(group=k // 8, token_ids=[(k * j) % 97 for j in range(length)], mask=[1] * length,
               reward=float(k % 2), signals={"entropy": [0.01 * (j % 50) for j in range(length)]})
        for k in range(1200)
    ]  # fmt: skip
    page = opened(view(records).html)
    assert page.locator(".rows .row").count() < 80
    assert page.locator(".t").count() < 8 * length
    page.locator(".rows").focus()
    page.keyboard.press("End")
    page.locator("#row-1199").wait_for()
    page.locator("#t-1199-a-0").wait_for()
    assert page.locator("#row-1199").get_attribute("aria-selected") == "true"


def test_a_very_long_response_is_drawn_in_parts(opened: Open):
    record = Record(group=0, token_ids=[5] * 9000, mask=[1] * 9000, reward=1.0)
    page = opened(view([record]).html)
    assert page.locator(".tokens .t").count() == 4000
    page.locator(".more").click()
    page.locator("#t-0-text-7999").wait_for()
    assert page.locator(".more").text_content() == "1000 more tokens"


def test_nothing_recorded_but_texts(opened: Open):
    page = opened(view([Record(group=0, tokens=["a", "b"], mask=[1, 0], reward=None)]).html)
    assert classes(page) == ["", "m"]
    assert page.get_by_label("colour by", exact=True).input_value() == ""


def test_an_empty_response(opened: Open):
    empty = Record(group=0, tokens=[], mask=[], reward=1.0, signals={"s": []})
    page = opened(
        view([empty, dataclasses.replace(empty, tokens=["a"], mask=[1], signals={})]).html
    )
    page.keyboard.press("t")
    page.keyboard.press("ArrowRight")
    assert page.locator(".column").count() == 2


def test_in_a_notebook_s_frame(opened: Open, browser: Any):
    context = browser.new_context()
    outer = context.new_page()
    errors: list[str] = []
    outer.on("pageerror", lambda error: errors.append(str(error)))
    outer.set_content(view(two_methods(1))._repr_html_())
    frame = outer.frame_locator("iframe")
    frame.locator("#t-0-a-1").hover()
    assert "token 2 of 6" in frame.locator(".inspector").text_content()
    context.close()
    assert errors == []


# -- the pointer and the keyboard -----------------------------------------------------------


def long_response(length: int = 3000) -> Record:
    words = [f"w{k} " for k in range(length)]
    return Record(group=0, tokens=words, mask=[1] * length, reward=1.0,
                  signals={"e": [1.0] * length})  # fmt: skip


def test_a_click_picks_its_own_token_and_nothing_moves(opened: Open):
    page = opened(view([long_response()]).html)
    page.evaluate("document.querySelector('.columns').scrollTop = 4000")
    found = page.evaluate(
        "() => { const e = document.elementFromPoint(600, 500);"
        " const b = e.getBoundingClientRect();"
        " return [e.id, b.x + b.width / 2, b.y + b.height / 2] }"
    )
    page.mouse.click(found[1], found[2])
    assert page.evaluate("document.querySelector('.columns').scrollTop") == 4000
    assert page.locator(".tokens").get_attribute("aria-activedescendant") == found[0]
    assert (
        f"token {int(found[0].split('-')[-1]) + 1} of" in page.locator(".inspector").text_content()
    )


def test_a_pointer_that_rests_picks_nothing(opened: Open):
    page = opened(view([long_response()]).html)
    page.mouse.move(600, 500)
    page.keyboard.press("t")
    for _ in range(40):
        page.keyboard.press("ArrowDown")
    page.wait_for_timeout(200)
    active = page.locator(".tokens").get_attribute("aria-activedescendant") or ""
    assert f"token {int(active.split('-')[-1]) + 1} of" in page.locator(".inspector").text_content()
    assert page.locator(".t.current").get_attribute("id") == active


def test_the_chosen_response_is_found_from_anywhere(opened: Open):
    records = [dataclasses.replace(two_methods(1)[0], reward=float(k)) for k in range(20)]
    page = opened(view(records).html)
    page.evaluate("document.querySelector('.columns').scrollLeft = 6000")
    page.locator("#t-14-a-0").wait_for()
    page.keyboard.press("t")
    page.locator("#t-0-a-0.current").wait_for()
    assert page.evaluate("document.activeElement.className") == "tokens"


def test_the_end_of_a_very_long_response(opened: Open):
    page = opened(view([long_response(5100)]).html)
    page.keyboard.press("t")
    page.keyboard.press("End")
    assert "token 5100 of 5100" in page.locator(".inspector").text_content()
    assert page.evaluate("document.activeElement.className") == "tokens"


def test_the_outline_stays_with_its_token(opened: Open):
    page = opened(view(two_methods(2)).html)
    page.locator("#t-1-a-1").hover()
    choose(page, "colour by", "entropy")
    assert page.locator(".t.current").get_attribute("id") == "t-1-a-1"
    page.locator("#row-4").click()
    page.locator("#t-4-a-0").wait_for()
    assert page.locator(".t.current").count() == 0


def test_escape_leaves_the_search(opened: Open):
    page = opened(view(two_methods(2)).html)
    page.keyboard.press("/")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.className") == "rows"


def test_another_order_begins_at_its_top(opened: Open):
    records = [Record(group=k, tokens=["a"], mask=[1], reward=float(k % 7)) for k in range(300)]
    page = opened(view(records).html)
    page.locator(".rows").focus()
    page.keyboard.press("End")
    page.locator("#row-299").wait_for()
    page.locator(".head .reward").click()
    page.locator("#row-6").wait_for()
    assert page.evaluate("document.querySelector('.rows').scrollTop") == 0


def test_the_list_tells_how_long_it_is(opened: Open):
    records = [Record(group=k, tokens=["a"], mask=[1], reward=1.0) for k in range(300)]
    page = opened(view(records).html)
    first = page.locator("#row-0")
    assert (first.get_attribute("aria-setsize"), first.get_attribute("aria-posinset")) == (
        "300",
        "1",
    )
    assert page.locator(".rows").get_attribute("aria-activedescendant") == "row-0"
    page.evaluate("document.querySelector('.rows').scrollTop = 5000")
    page.locator("#row-200").wait_for()
    # What is not drawn cannot be the active one.
    assert page.locator(".rows").get_attribute("aria-activedescendant") is None


# -- room -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(400, 700), (320, 568), (800, 500), (1000, 700), (1300, 800)])
@pytest.mark.parametrize("columns", ["medium", "wide"])
def test_there_is_room_for_the_tokens(opened: Open, size: tuple[int, int], columns: str):
    records = [dataclasses.replace(two_methods(1)[0], reward=float(k)) for k in range(6)]
    page = opened(view(records).html, viewport={"width": size[0], "height": size[1]})
    choose(page, "columns", columns)
    page.locator(".facts summary").first.click()
    box = page.locator(".columns").bounding_box()
    assert box["height"] >= 120
    # The first column is whole: it begins where one begins to read, and fits.
    page.wait_for_timeout(200)
    assert page.evaluate("document.querySelector('.columns').scrollLeft") == 0
    column = page.locator(".column").first.bounding_box()
    assert column["x"] >= box["x"] - 1 and column["width"] <= box["width"] + 1


def test_reading_numbers_moves_nothing(opened: Open):
    signals = {f"a signal of some length {k}": [float(k)] * 3 for k in range(40)}
    record = Record(group=0, tokens=["a", "b", "c"], mask=[1] * 3, reward=1.0, signals=signals)
    page = opened(view([record]).html)
    before = page.locator(".inspector").bounding_box()
    page.locator("#t-0-a-1").hover()
    assert page.locator(".inspector .pair").count() == 40
    assert page.locator(".inspector").bounding_box() == before


def test_siblings_are_aligned_whatever_is_said_of_them(opened: Open):
    one, other = two_methods(1)[:2]
    bare = dataclasses.replace(
        other, credit={"grpo_s": CreditRecord(advantage=[0.1] * 6)}, truncated=False, keep=True
    )
    for against in (None, "grpo_s"):
        html = view([one, bare], by="grpo_s" if against is None else "gtpo", against=against).html
        page = opened(html, viewport={"width": 2200, "height": 800})
        choose(page, "columns", "wide")
        tops = {
            round(box["y"])
            for k in range(page.locator(".column").count())
            if (box := page.locator(".column").nth(k).locator(".t").first.bounding_box())
        }
        assert len(tops) == 1


# -- paper and contrast ---------------------------------------------------------------------


@pytest.mark.parametrize("dark", ["by the system", "by choice"])
def test_a_dark_page_is_printed_light(opened: Open, dark: str):
    scheme = "dark" if dark == "by the system" else "light"
    page = opened(view(two_methods(1)).html, color_scheme=scheme)
    if dark == "by choice":
        choose(page, "theme", "dark")
    page.emulate_media(media="print", color_scheme=scheme)
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(29, 33, 38)"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_long_responses_are_printed_whole(opened: Open):
    page = opened(view([long_response(5100)]).html)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert page.locator(".t").count() >= 5100


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_kind_of_token_can_be_read(opened: Open, scheme: str):
    euro = "€".encode()
    tokens = ["a", "<eos>", euro[:1], euro[1:], b"\xff", "b"]
    record = Record(group=0, tokens=tokens, mask=[1] * 5 + [0], reward=1.0, truncated=True,
                    signals={"s": [9.0, -9.0, 9.0, -9.0, 9.0, 0.0]})  # fmt: skip
    page = opened(view([record]).html, color_scheme=scheme)
    seen = page.evaluate(
        """() => [...document.querySelectorAll(".column .t, .marks, .column dt")].map((e) => {
          let opacity = 1;
          for (let p = e; p; p = p.parentElement) opacity *= getComputedStyle(p).opacity;
          const style = getComputedStyle(e);
          return [e.className, opacity, style.color];
        })"""
    )
    ink = page.evaluate("getComputedStyle(document.body).color")
    dim = page.evaluate("getComputedStyle(document.querySelector('.note')).color")
    assert {opacity for _, opacity, _ in seen} == {1}
    for name, _, colour in seen:
        on_shade = re.search(r"\b[pn]\d", name)
        assert colour == ink if on_shade or "marks" in name else colour in (ink, dim), name


def test_forced_colours_keep_the_scale(opened: Open):
    page = opened(view(two_methods(1)).html, forced_colors="active")
    grounds = page.locator(".swatch").evaluate_all(
        "all => all.map(e => getComputedStyle(e).backgroundColor)"
    )
    assert len(set(grounds)) == 21


# -- what is claimed ------------------------------------------------------------------------


def partings(page: Any) -> list[list[int]]:
    """The places of the bars, column by column."""
    return [
        [k for k, name in enumerate(classes(page, column)) if "parting" in name]
        for column in range(page.locator(".tokens").count())
    ]


def of(*responses: dict[str, Any]) -> str:
    records = [
        Record(group=0, mask=[1] * len(r.get("token_ids", r.get("tokens", ()))), reward=1.0, **r)
        for r in responses
    ]
    return view(records).html


def test_parts_of_characters_differ_by_their_bytes(opened: Open):
    # What is shown at the first token depends on the second one; the token is the same.
    page = opened(of(
        {"token_ids": [5, 6, 7], "tokens": [b"\xe2\x82", b"\xac", "x"]},
        {"token_ids": [5, 8, 7], "tokens": [b"\xe2\x82", b"\xad", "x"]},
    ))  # fmt: skip
    assert partings(page) == [[1], [1]]
    assert page.locator(".divide").first.text_content() == "1 token shared by all"


def test_ids_and_texts_beside_one_another(opened: Open):
    page = opened(of(
        {"token_ids": [5, 6, 7], "tokens": ["p", "q", "r"]},
        {"token_ids": [5, 6, 8]},
        {"tokens": ["p", "q", "s"]},
    ))  # fmt: skip
    assert partings(page) == [[2], [2], [2]]


def test_nothing_is_claimed_of_unknown_tokens(opened: Open):
    page = opened(of({"tokens": ["", ""]}, {"tokens": ["", ""]}))
    assert partings(page) == [[], []] and page.locator(".divide").count() == 0


def test_a_long_shared_beginning_is_counted_whole(opened: Open):
    page = opened(of({"token_ids": [5] * 5000 + [6] * 50}, {"token_ids": [5] * 5000 + [7] * 50}))
    assert page.locator(".divide").count() == 0  # not drawn so far
    page.keyboard.press("t")
    page.keyboard.press("End")
    assert page.locator(".divide").first.text_content() == "5000 tokens shared by all"


def test_a_signal_called_like_credit(opened: Open):
    record = Record(group=0, tokens=["a"], mask=[1], reward=1.0, signals={"gtpo.advantage": [7.0]},
                    credit={"gtpo": CreditRecord(base=1.0, advantage=[0.5])})  # fmt: skip
    page = opened(view([record]).html)
    page.locator("#t-0-a-0").hover()
    assert numbers(page) == {"gtpo advantage": "0.5", "gtpo.advantage": "7", "gtpo base": "1"}


def test_a_signal_without_a_name_can_be_put_away(opened: Open):
    record = Record(group=0, tokens=["a"], mask=[1], reward=1.0,
                    signals={"": [1.0], "entropy": [2.0]})  # fmt: skip
    page = opened(view([record], by="entropy").html)
    assert page.locator(".column").count() == 1
    choose(page, "beside", '""')
    assert page.locator(".column").count() == 2
    choose(page, "beside", "nothing")
    assert page.locator(".column").count() == 1


def test_unknown_statistics_are_not_zero(opened: Open):
    records = [
        Record(group=0, tokens=["a", "b"], mask=[1, 1], reward=1.0,
               credit={"r": CreditRecord(base=base, advantage=advantage)})
        for base, advantage in ((None, [0.5, -0.5]), (1.0, [None, None]), (1.0, [0.5, -0.5]))
    ]  # fmt: skip
    page = opened(view(records).html)
    facts = [page.locator(".column").nth(k).locator("dl").inner_text() for k in range(3)]
    assert re.search(r"flips\s+unknown", facts[0]) and re.search(r"effective\s+2", facts[0])
    assert re.search(r"flips\s+unknown", facts[1]) and re.search(r"effective\s+unknown", facts[1])
    page.locator(".filter summary").click()
    page.get_by_label("flips at most").fill("5")
    assert listed(page) == ["3"]


def test_a_verdict_without_a_score_is_a_verdict(opened: Open):
    record = Record(group=0, tokens=["a"], mask=[1], reward=None, success=False)
    page = opened(view([record]).html)
    choose(page, "outcome", "wrong")
    assert listed(page) == ["1"]


def test_the_difference_has_a_scale_and_numbers_of_its_own(opened: Open):
    page = opened(view(two_methods(1), by="gtpo", against="grpo_s").html)
    page.locator("#t-0-a-1").hover()
    assert numbers(page)["gtpo advantage \u2212 grpo_s advantage"] == "-2.4"
    scales = page.locator(".scale").all_text_contents()
    assert len(scales) == 2 and scales[0].startswith("gtpo advantage, grpo_s advantage")
    assert "-2.4" in scales[1] and "this group" in scales[1]
    facts = page.locator(".column").nth(2).locator("dl").inner_text()
    assert "reward" in facts and "base" not in facts and "flips" not in facts


def test_legends(opened: Open):
    record = Record(group=0, tokens=["a", "b"], mask=[1, 1], reward=1.0,
                    signals={"entropy": [0.0, 1.0]},
                    credit={"r": CreditRecord(base=1.0, advantage=[1.0, -1.0], weight=[4.0, 0.5]),
                            "q": CreditRecord(base=1.0, weight=[1.0004, 0.9996])})  # fmt: skip
    page = opened(view([record], by="r", against="entropy").html)
    scales = page.locator(".scale")
    # Equal ranges of two kinds are two scales; a series on one side of 0 has half of the shades.
    assert scales.count() == 2
    assert [scales.nth(k).locator(".swatch").count() for k in range(2)] == [21, 11]
    assert scales.nth(1).locator(".number").all_text_contents() == ["0", "1"]
    choose(page, "beside", "nothing")
    choose(page, "colour by", "r weight")
    assert scales.first.locator(".number").all_text_contents() == ["0.25", "4"]
    assert "all from 0.5 to 4" in scales.first.text_content()
    assert classes(page) == ["p10", "n5"]
    choose(page, "colour by", "q weight")
    assert scales.first.locator(".number").all_text_contents() == ["0.9996", "1.0004"]
