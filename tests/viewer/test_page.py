"""The page as a file: what it holds, and that nothing in it can be taken for markup."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from looking import NASTY, named, saved, two_methods, unpacked

import tokencredit
from tokencredit import GTPO, InputError, MissingSignalError, Rollouts, assign
from tokencredit.records import CreditRecord, Record, assign_file, read_records
from tokencredit.viewer import Page, save_page, view
from tokencredit.viewer.page import write_page


class Elements(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def near(values: Any, expected: Any) -> bool:
    return all(
        math.isnan(a) if b is None else a == pytest.approx(b, rel=1e-7)
        for a, b in zip(values, expected, strict=True)
    )


def test_every_number_is_there():
    records = two_methods()
    index, groups = unpacked(view(records).html)
    assert [g["lengths"] for g in groups] == [[6, 6, 6]] * 3
    for number, group in enumerate(groups):
        mine = records[3 * number : 3 * number + 3]
        ids = [index["vocabulary"][code][2] for code in group["codes"]]
        assert ids == [i for r in mine for i in r.token_ids or ()]
        texts = [index["vocabulary"][code][0] for code in group["codes"]]
        assert texts == [t for r in mine for t in r.tokens or ()]
        assert group["mask"] == [m for r in mine for m in r.mask]
        for rule in ("gtpo", "grpo_s"):
            advantage = [v for r in mine for v in r.credit[rule].advantage or ()]
            assert near(group["values"][f"credit:{rule}.advantage"], advantage)
        entropy = [v for r in mine for v in r.signals["entropy"]]
        assert near(group["values"]["signal:entropy"], entropy)
        shaped = [1.5 if m else None for r in mine for m in r.mask]
        assert near(group["values"]["credit:grpo_s.reward"], shaped)
    assert index["rows"]["reward"] == [1.0, 0.0, 0.0, 1.0, 0.0, None, 1.0, 0.0, 0.0]
    assert index["rows"]["length"] == [5] * 9
    assert index["rows"]["truncated"] == [False, True, False] * 3
    assert index["rewards"] == [["exact", [1.0, 0.0, 0.0] * 3], ["format", [0.5] * 9]]
    assert [g["key"] for g in index["groups"]] == ["g0", "g1", "g2"]
    # Inside the mask: .5 -2 0 1 .1 with base 1: (3.6)^2 / 5.26, and one token against the base.
    gtpo = index["rules"]["gtpo"]
    assert gtpo["effective"][0] == pytest.approx(3.6**2 / 5.26)
    assert gtpo["flips"][:3] == [1, 3, 3]
    assert index["rules"]["grpo_s"]["reward"] == [1.5] * 9
    assert index["facts"] == [
        ["steps", "0 .. 2"], ["model", "tiny"], ["temperature", "0.7"],
        ["recorded by tokencredit", "0.1.0"], ["gtpo", "alpha2=0.2 (tokencredit 0.1.0)"],
        ["grpo_s", "options not recorded"],
    ]  # fmt: skip


def test_effective_tokens_and_flips_are_those_of_credit():
    seed = torch.Generator().manual_seed(0)
    rollouts = Rollouts(
        (torch.rand(8, generator=seed) < 0.5).float(),
        [k // 4 for k in range(8)],
        torch.rand(8, 12, generator=seed) < 0.8,
        entropy=torch.rand(8, 12, generator=seed),
    )
    credit = assign(rollouts, "gtpo")
    index, _ = unpacked(view(rollouts, credit={"gtpo": credit}).html)
    effective = [v for v in index["rules"]["gtpo"]["effective"] if v > 0]
    assert sum(effective) / len(effective) == pytest.approx(
        credit.diagnostics["effective_tokens"], rel=1e-5
    )
    tokens = int((rollouts.mask & credit.in_loss.unsqueeze(1)).sum())
    flips = sum(index["rules"]["gtpo"]["flips"]) / tokens
    assert flips == pytest.approx(credit.diagnostics["sign_flips"], rel=1e-5)


def test_what_a_response_lacks_is_unknown_and_said():
    with_entropy, without = two_methods(1)[:2]
    without = dataclasses.replace(without, signals={}, credit={})
    later = dataclasses.replace(with_entropy, signals={"work": [1.0] * 6}, credit={})
    _, [group] = unpacked(view([with_entropy, without, later]).html)
    assert group["has"]["signal:entropy"] == [0] and group["has"]["signal:work"] == [2]
    assert near(group["values"]["signal:entropy"][6:], [None] * 12)
    assert near(group["values"]["signal:work"], [None] * 12 + [1.0] * 6)


@pytest.mark.parametrize("text", NASTY)
def test_texts_are_data(text: str):
    base = two_methods(1)[0]
    record = dataclasses.replace(
        base,
        group=text,
        prompt=[{"role": text, "content": text}],
        prompt_id=text,
        response=text,
        tokens=[text] * 6,
        rewards={text: 1.0},
        signals={text: [1.0] * 6},
        credit={text: CreditRecord(base=1.0, advantage=[1.0] * 6)},
        meta={"model": text, "temperature": text, "credit": {text: {"options": {text: text}}}},
    )
    page = view([record], title=text)
    page.html.encode("utf-8")  # no lone surrogate
    assert "\x00" not in page.html
    parsed, plain = Elements(page.html).found, Elements(view([base]).html).found
    assert [tag for tag, _ in parsed] == [tag for tag, _ in plain]
    index, [group] = unpacked(page.html)
    assert {index["vocabulary"][code][0] for code in group["codes"]} != set()
    assert text in named(series["key"] for series in index["series"])


def test_one_script_may_run_and_nothing_is_fetched():
    html = view(two_methods()).html
    elements = Elements(html).found
    scripts = re.findall(r"<script>(.*?)</script>", html, flags=re.S)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    policy = next(a["content"] for t, a in elements if t == "meta" and "http-equiv" in a) or ""
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy
    assert not any({"src", "href"} & set(attributes) for _, attributes in elements)
    assert not re.search(r"url\(|@import", html)
    # Addresses are names of XML only.
    assert set(re.findall(r"https?://[^\"'` ]+", html)) <= {
        "http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML",
        "http://www.w3.org/1999/xhtml",
    }  # fmt: skip


def test_what_is_bundled_is_named_with_its_licence():
    folder = Path(tokencredit.__file__).parent / "viewer" / "assets"
    text = (folder / "LICENSES.txt").read_text(encoding="utf-8")
    for name in ("preact", "@tanstack/virtual-core", "@tanstack/react-virtual"):
        assert re.search(rf"^{name} \d", text, flags=re.M)
    assert text.count("MIT") >= 3


def test_a_file_a_folder_records_and_a_batch_show_the_same(tmp_path: Path):
    records = two_methods()
    path = saved(tmp_path / "rollouts.jsonl", records)
    pages = [view(source, title="x").html for source in (records, path, str(path), tmp_path)]
    assert len(set(pages)) == 1
    file = io.BytesIO()
    groups = [records[k : k + 3] for k in (0, 3, 6)]
    write_page(groups, file, title="x")
    assert file.getvalue().decode() == pages[0]


def test_rules_are_assigned_as_the_verb_assign_does(tmp_path: Path):
    plain = [dataclasses.replace(record, credit={}, meta={}) for record in two_methods()]
    path = saved(tmp_path / "r.jsonl", plain)
    assign_file(path, tmp_path / "a.jsonl", "gtpo")
    assign_file(tmp_path / "a.jsonl", tmp_path / "b.jsonl", "grpo")
    wanted = view(list(read_records(tmp_path / "b.jsonl")), title="x").html
    assert view(path, credit=["gtpo", "grpo"], title="x").html == wanted
    assert view(plain, credit=[GTPO(), "grpo"], title="x").html == wanted
    with pytest.raises(MissingSignalError, match="work"):
        view(plain, credit="datc")


def test_a_batch():
    rollouts = Rollouts(
        torch.tensor([1.0, 0.0, 0.0, math.nan]),
        ["b", "a", "b", "a"],
        torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]]),
        entropy=torch.rand(4, 3),
        token_ids=torch.arange(12).reshape(4, 3),
    )
    index, groups = unpacked(tokencredit.view(rollouts, credit="gtpo").html)
    # Groups stand together; the row that is not real is left out, and padding is.
    assert index["rows"]["reward"] == [1.0, 0.0, 0.0]
    assert [g["lengths"] for g in groups] == [[2, 1], [3]]
    assert [index["vocabulary"][c][0] for c in groups[0]["codes"]] == ["⟨0⟩", "⟨1⟩", "⟨6⟩"]
    expected = assign(rollouts, "gtpo").advantage
    assert groups[0]["values"]["credit:gtpo.advantage"] == [
        *expected[0, :2].tolist(),
        float(expected[2, 0]),
    ]
    with pytest.raises(InputError, match="credit 'mine' has shape"):
        view(
            rollouts,
            credit={"mine": assign(Rollouts(torch.ones(1), [0], torch.ones(1, 2)), "grpo")},
        )
    with pytest.raises(InputError, match=r"tokens has 1 rows for 4"):
        view(rollouts, tokens=[["a"]])


def test_limit_and_step():
    records = two_methods()
    for options, rows in (
        ({"limit": 4}, [1.0, 0.0, 0.0]),
        ({"limit": 1}, [1.0, 0.0, 0.0]),
        ({"limit": 6}, [1.0, 0.0, 0.0, 1.0, 0.0, None]),
        ({"step": 1}, [1.0, 0.0, None]),
    ):
        index, _ = unpacked(view(records, **options).html)
        assert index["rows"]["reward"] == rows
    with pytest.raises(InputError, match="no records of step 7"):
        view(records, step=7)
    with pytest.raises(InputError, match="at least 1 response"):
        view(records, limit=0)
    with pytest.raises(InputError, match="no records"):
        view([])


def test_choices_for_the_start():
    index, _ = unpacked(view(two_methods(), by="entropy", against="grpo_s").html)
    assert (index["by"], index["against"]) == ("signal:entropy", "credit:grpo_s.advantage")
    index, _ = unpacked(view(two_methods()).html)
    assert (index["by"], index["against"]) == ("credit:gtpo.advantage", None)
    bare = Record(group=0, tokens=["a"], mask=[1], reward=1.0)
    assert unpacked(view([bare]).html)[0]["by"] is None
    with pytest.raises(InputError, match="'wrok'"):
        view(two_methods(), by="wrok")


@pytest.mark.parametrize("number", [1e39, -1e300, 1e-60, 0.0, -0.0])
def test_numbers_beyond_float32(number: float):
    record = Record(group=0, tokens=["a"], mask=[1], reward=number, signals={"s": [number]},
                    credit={"r": CreditRecord(base=number, advantage=[number])})  # fmt: skip
    index, [group] = unpacked(view([record]).html)
    largest = torch.finfo(torch.float32).max
    single = torch.tensor(number, dtype=torch.float64).clamp(-largest, largest).float().item()
    assert group["values"]["signal:s"] == [single]
    assert all(math.isfinite(series["range"]) for series in index["series"])


def test_empty_responses():
    records = [
        Record(group=0, tokens=[], mask=[], reward=1.0, signals={"entropy": []}),
        Record(group=0, tokens=["a"], mask=[0], reward=0.0, signals={"entropy": [1.0]}),
    ]
    index, [group] = unpacked(view(records).html)
    assert (group["lengths"], index["rows"]["length"]) == ([0, 1], [0, 0])


def test_notebooks_show_the_page_in_a_frame():
    page = view(two_methods())
    shown = page._repr_html_()
    [(tag, attributes)] = Elements(shown).found
    assert (tag, attributes["srcdoc"]) == ("iframe", page.html)
    assert attributes["sandbox"] == "allow-scripts"
    assert "DOCTYPE" not in repr(page)


def test_saving(tmp_path: Path):
    page = view(two_methods())
    assert isinstance(page, Page)
    path = page.save(tmp_path / "page.html")
    assert path.read_text(encoding="utf-8") == page.html
    with pytest.raises(InputError, match="exists already"):
        page.save(path)
    page.save(path, overwrite=True)
    with pytest.raises(InputError, match="is a folder"):
        page.save(tmp_path, overwrite=True)
    with pytest.raises(InputError, match="cannot be written"):
        page.save(tmp_path / "nowhere" / "page.html")


def test_nothing_is_left_of_a_page_that_fails(tmp_path: Path):
    path = saved(tmp_path / "r.jsonl", two_methods())
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(InputError, match=r"r\.jsonl:10"):
        save_page(path, tmp_path / "page.html")
    assert [p.name for p in tmp_path.iterdir()] == ["r.jsonl"]


# -- batches --------------------------------------------------------------------------------


def test_padding_on_the_left_is_left_out():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 1]])
    ids = torch.tensor([[0, 0, 5, 6, 7], [5, 6, 8, 9, 7]])
    work = torch.rand(2, 5)
    rollouts = Rollouts(torch.tensor([1.0, 0.0]), [0, 0], mask, work=work, token_ids=ids)
    credit = assign(rollouts, "datc")
    _, [group] = unpacked(view(rollouts, credit={"mine": credit}).html)
    assert group["lengths"] == [3, 5] and group["mask"] == [1, 1, 1, 1, 1, 1, 0, 1]
    for key, values in (
        ("credit:mine.advantage", credit.advantage),
        ("credit:mine.weight", credit.weight),
        ("signal:work", work),
    ):
        assert values is not None
        expected = [*values[0, 2:].tolist(), *values[1].tolist()]
        if key != "signal:work":  # outside the mask there is no weight, and the advantage is 0
            expected[6] = None if key.endswith("weight") else 0.0
        assert near(group["values"][key], expected)


def test_names_of_your_own():
    rollouts = Rollouts(torch.tensor([1.0, 0.0]), [0, 0], torch.ones(2, 2),
                        entropy=torch.tensor([[0.1, 2.0], [0.2, 1.0]]))  # fmt: skip
    credit = {"weak": GTPO(), "strong": GTPO(alpha2=2.0), "plain": "grpo"}
    index, _ = unpacked(view(rollouts, credit=credit).html)
    assert set(index["rules"]) == {"weak", "strong", "plain"}
    facts = dict(map(tuple, index["facts"]))
    assert facts["strong"].startswith("rule gtpo, ") and "alpha2=2.0" in facts["strong"]
    with pytest.raises(InputError, match=r"two of the rules are called 'gtpo'.*credit="):
        view(rollouts, credit=[GTPO(), GTPO(alpha2=2.0)])


def test_recorded_credit_stays(tmp_path: Path):
    records = two_methods(1)
    path = saved(tmp_path / "r.jsonl", records)
    for source in (path, records):
        index, [group] = unpacked(view(source, credit=["gtpo", "grpo", "gtpo"]).html)
        assert set(index["rules"]) == {"gtpo", "grpo_s", "gtpo*", "grpo", "gtpo**"}
        own = [v for r in records for v in r.credit["gtpo"].advantage or ()]
        assert near(group["values"]["credit:gtpo.advantage"], own)
        assert not near(group["values"]["credit:gtpo*.advantage"], own)


def test_errors_name_what_the_user_named(tmp_path: Path):
    plain = [dataclasses.replace(record, credit={}) for record in two_methods()]
    path = saved(tmp_path / "mine.jsonl", plain)
    with pytest.raises(MissingSignalError, match=r"mine\.jsonl: .*needs 'work'") as caught:
        view(path, credit=["grpo", "datc"])
    assert "tokencredit-" not in str(caught.value)
    mixed = [dataclasses.replace(plain[0], success=None), *plain[1:]]
    with pytest.raises(InputError, match="success") as caught:
        view(mixed, credit="grpo")
    assert "tokencredit-" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (([{"group": 0}],), {}, "rollouts must be Rollouts, records, or a path, got list"),
        ((two_methods(1)[0],), {}, "got Record"),
        ((b"path",), {}, "got bytes"),
        ((two_methods(1),), {"credit": None}, "credit must be rules"),
        ((two_methods(1),), {"credit": GTPO}, "credit must be rules"),
        ((two_methods(1),), {"credit": {"a": "gtpo"}}, "for a batch of Rollouts"),
        ((two_methods(1),), {"tokens": [["a"]]}, "for a batch of Rollouts"),
        ((two_methods(1),), {"title": 7}, "title must be a text"),
        ((two_methods(1),), {"by": GTPO()}, "by must be a text"),
        ((two_methods(1),), {"limit": "3"}, "limit must be an integer"),
        ((two_methods(1),), {"step": 1.5}, "step must be an integer"),
        (([*two_methods(2), *two_methods(1)],), {}, "group 'g0' reappears"),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], options: dict[str, Any], words: str):
    with pytest.raises(InputError, match=words):
        view(*arguments, **options)


def test_steps_within_a_group():
    one, two, _ = two_methods(1)
    records = [dataclasses.replace(one, step=1), dataclasses.replace(two, step=2)]
    for step, reward in ((1, 1.0), (2, 0.0)):
        index, _ = unpacked(view(records, step=step).html)
        assert index["rows"]["reward"] == [reward]
    with pytest.raises(InputError, match="no records of step 0; there are 1, 2"):
        view(records, step=0)


def test_numbers_beyond_javascript_are_spelt_out():
    record = Record(group=0, token_ids=[2**53 + 1], mask=[1], reward=1.0, step=2**70)
    index, _ = unpacked(view([record]).html)
    assert index["vocabulary"][0][2] == str(2**53 + 1)
    assert index["groups"][0]["step"] == str(2**70)


def test_facts_and_rules_of_one_name():
    record = dataclasses.replace(
        two_methods(1)[0], credit={"model": CreditRecord(base=1.0, advantage=[1.0] * 6)}
    )
    index, _ = unpacked(view([record]).html)
    assert ["model", "tiny"] in index["facts"] and ["model", "options not recorded"] in index[
        "facts"
    ]
