"""What is shown for a token."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokencredit.records import Record
from tokencredit.viewer.pieces import pieces


def shown(*tokens: str | bytes) -> list[tuple[str, str]]:
    record = Record(group=0, tokens=list(tokens), mask=[1] * len(tokens), reward=None)
    return [(piece.text, piece.kind) for piece in pieces(record)]


def test_a_character_stands_at_the_token_of_its_first_byte():
    fox = "🦊".encode()
    assert shown(fox[:1], fox[1:3], fox[3:] + b"!") == [
        ("🦊", "text"),
        ("·", "part"),
        ("!", "text"),
    ]
    # Two characters that share a token, and a run that text ends.
    assert shown("é".encode()[:1], "é".encode()[1:] + "ü".encode()[:1], "ü".encode()[1:], "x") == [
        ("é", "text"), ("ü", "text"), ("·", "part"), ("x", "text"),
    ]  # fmt: skip


def test_bytes_that_are_no_character_are_spelt_out():
    assert shown(b"\xff", b"\xe2\x82", "a") == [
        ("\\xff", "broken"), ("\\xe2\\x82", "broken"), ("a", "text"),
    ]  # fmt: skip
    # Text between two halves keeps them apart.
    assert [kind for _, kind in shown(b"\xe2\x82", "a", b"\xac")] == ["broken", "text", "broken"]


def test_what_cannot_be_seen_is_written():
    assert shown("a\n", "\t", "\r", "\u202e", "\ud800", "", b"", " b") == [
        ("a↵\n", "text"), ("⇥", "text"), ("\\r", "text"), ("\\u202e", "text"),
        ("\\ud800", "text"), ("∅", "text"), ("∅", "part"), (" b", "text"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "token",
    [
        "<eos>",
        "<|im_end|>",
        "</s>",
        "[PAD]",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<pad>",
        "<unk>",
    ],
)
def test_special_tokens(token: str):
    assert shown(token) == [(token, "special")]


@pytest.mark.parametrize("token", ["<", "< a>", "[0]", "[a]", "<1>", "a<b>", "<|", "|>", "x[PAD]"])
def test_no_special_tokens(token: str):
    assert shown(token) == [(token, "text")]


@given(st.lists(st.one_of(st.text(st.characters(), max_size=4), st.binary(max_size=5)), max_size=8))
def test_every_token_has_a_piece_that_can_be_seen(tokens: list[str | bytes]):
    found = shown(*tokens)
    assert len(found) == len(tokens)
    for text, _ in found:
        assert text
        assert all(c.isprintable() or c == "\n" for c in text)
        assert not any(unicodedata.bidirectional(c) in ("RLO", "LRO", "RLE", "RLI") for c in text)


@given(st.text(st.characters(exclude_categories=("C", "Z")), max_size=20), st.data())
def test_a_text_cut_anywhere_into_bytes_is_the_text(text: str, data: st.DataObject):
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    parts = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    found = shown(*[part for part in parts if part])
    assert "".join(text for text, kind in found if kind == "text") == text
    assert {kind for _, kind in found} <= {"text", "part"}
