"""The view in a terminal."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from looking import NASTY, two_methods

from tokencredit.errors import InputError
from tokencredit.records import Record
from tokencredit.viewer import print_responses


def printed(records: list[Record], *, colour: bool = False, **options: str) -> str:
    file = io.StringIO()
    groups = [[r for r in records if r.group == g] for g in dict.fromkeys(r.group for r in records)]
    assert print_responses(groups, file=file, width=100, colour=colour, **options) == len(records)
    return file.getvalue()


def test_what_is_printed():
    text = printed(two_methods(1))
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[:2] == ["rollouts", "step: 0"]
    assert "gtpo: alpha2=0.2 (tokencredit 0.1.0)" in lines
    assert any(
        line.startswith("gtpo advantage: [-10] is -2, [+10] is 2 (98% of the values other than 0")
        for line in lines
    )
    start = lines.index("group g0  step 0")
    assert lines[start + 1 :] == [
        "question 0: 4 + 2",
        "#1  reward 1  right  base (gtpo) 1  tokens 5",
        "  so[+3] 4[-10] + [-]2 = 0[+5]<eos>[+1]",
        "#2  reward 0  wrong  truncated  kept out of the loss  base (gtpo) -1  tokens 5",
        "  so[+3] 4[-10] + [-]2◆ = 1[+5]<eos>[+1]",
        "#3  reward 0  wrong  base (gtpo) -1  tokens 5",
        "  so[+3] 4[-10] + [-]2◆ = 2[+5]<eos>[+1]",
    ]


def test_two_methods_and_their_difference():
    text = printed(two_methods(1)[:1], by="gtpo", against="grpo_s")
    titles = [line.strip() for line in text.splitlines() if re.match(r"  \w+ advantage", line)]
    assert titles == ["gtpo advantage", "grpo_s advantage", "gtpo advantage - grpo_s advantage"]
    # .5 - .4, -2 - .4, masked, 0 - .4, 1 - .4, .1 - .4 on a scale of 2.4.
    assert "so[+1] 4[-10] + [-]2[-2] = 0[+3]<eos>[-2]" in text
    # Things of two kinds have two scales and no difference; one thing twice is one.
    assert printed(two_methods(1)[:1], by="gtpo", against="entropy").count("is ") == 4
    assert printed(two_methods(1)[:1], by="gtpo", against="gtpo").count("is ") == 2


def test_prompts_of_messages_are_printed():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    record = dataclasses.replace(
        two_methods(1)[0], prompt=[{"role": "user", "content": "hi\x1b"}, call]
    )
    text = printed([record])
    assert "user: hi\\x1b\n" in text and 'assistant: {"tool_calls": [{"name": "add"}]}' in text


@pytest.mark.parametrize("columns", ["0", "1", "x"])
def test_a_terminal_without_room(columns: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", columns)
    file = io.StringIO()
    assert print_responses([two_methods(1)[:1]], file=file) == 1
    assert "so" in file.getvalue()


def test_sixteen_colours(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"TERM": "xterm", "FORCE_COLOR": "1", "COLORTERM": ""}.items():
        monkeypatch.setenv(name, value)
    file = io.StringIO()
    print_responses([two_methods(1)[:1]], file=file, width=100)
    # Weak ones colour the letters, strong ones the ground: no pale ground is the loudest.
    assert "\x1b[34mso" in file.getvalue() and "\x1b[30;43m 4" in file.getvalue()


def test_colours():
    # Values .5 -2 masked 0 1 .1 on a scale of 2: shades 3, -10, none, none, 5, 1.
    text = printed(two_methods(1)[:1], colour=True)
    line = next(line for line in text.splitlines() if "<eos>" in line)
    styled = re.findall(r"\x1b\[([\d;]+)m([^\x1b]*)", line)
    codes = {word: code for code, word in styled if word.strip()}
    assert "48;2;213;94;0" in codes[" 4"]  # the strongest orange, white or black on it
    assert re.fullmatch(r"2;9", codes[" + "])  # masked: dim and struck through
    assert codes["2"] == "0"  # exactly zero: no style of its own
    blue = [
        tuple(map(int, re.findall(r"48;2;(\d+);(\d+);(\d+)", codes[w])[0])) for w in ("so", " = 0")
    ]
    assert blue[0][0] > blue[1][0] > 0 and all(b[2] > b[0] for b in blue)
    unknown = printed(
        [dataclasses.replace(two_methods(1)[0], credit={})], colour=True, by="entropy"
    )
    assert re.search(r"\x1b\[3;4m 4", unknown)


@pytest.mark.parametrize("text", NASTY)
def test_texts_cannot_move_the_cursor(text: str):
    record = dataclasses.replace(
        two_methods(1)[0], group=text, prompt=text, tokens=[text] * 6,
        meta={"model": text, "credit": {}}, signals={text: [1.0] * 6},
    )  # fmt: skip
    shown = printed([record], title=text, by=text)
    assert all(c.isprintable() or c == "\n" for c in shown)
    shown.encode("utf-8")


def test_nothing_to_print_or_to_colour_by():
    with pytest.raises(InputError, match="no records"):
        print_responses([])
    with pytest.raises(InputError, match="neither credit nor signals"):
        print_responses([[Record(group=0, tokens=["a"], mask=[1], reward=1.0)]])
    with pytest.raises(InputError, match="'wrok'"):
        printed(two_methods(1), by="wrok")
