"""What is shown for a token: its text made visible, or its part of a character."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from tokencredit.records.schema import Record
from tokencredit.texts import printable

__all__ = ["Piece", "pieces"]

Kind = Literal["text", "special", "part", "broken"]

# What tokenizers write for tokens that are not text: <|im_end|>, <eos>, </s>, [PAD], DeepSeek's
# fullwidth bars.
_SPECIAL = re.compile(r"<[|\uff5c].+[|\uff5c]>|</?[A-Za-z_]\w*>|\[[A-Z]{2,}\]")
_PART = "\u00b7"
_NOTHING = "\u2205"


@dataclass(frozen=True)
class Piece:
    r"""What is shown for one token.

    Attributes:
        text: Never empty, and nothing in it can hide, move or reverse other text. A line feed is
            written as ``↵`` before it, a tab as ``⇥``, other characters that do not print as
            escapes (``\u202e``).
        kind: "text"; "special" for a token that stands for no text; "part" for one that only goes
            on with the bytes of a character begun before; "broken" if bytes of it are not UTF-8
            even with its neighbours.
    """

    text: str
    kind: Kind = "text"


def pieces(record: Record) -> list[Piece]:
    r"""The tokens of a response as they are shown, one `Piece` a token.

    Tokens of bytes are decoded together with the bytes next to them: a character is shown at the
    token of its first byte.

    Example:
        >>> euro = "€".encode()
        >>> record = Record(group=0, tokens=["a\n", euro[:2], euro[2:], b"\xff", "<eos>"],
        ...                 mask=[1] * 5, reward=None)
        >>> [(piece.text, piece.kind) for piece in pieces(record)]  # doctest: +NORMALIZE_WHITESPACE
        [('a↵\n', 'text'), ('€', 'text'), ('·', 'part'), ('\\xff', 'broken'),
         ('<eos>', 'special')]
        >>> pieces(Record(group=0, token_ids=[17], mask=[1], reward=None))
        [Piece(text='⟨17⟩', kind='text')]
    """
    if record.tokens is None:
        return [Piece(f"\u27e8{token}\u27e9") for token in record.token_ids or ()]
    shown: list[Piece] = []
    run: list[bytes] = []
    for token in record.tokens:
        if isinstance(token, bytes):
            run.append(token)
            continue
        shown += _decoded(run)
        run = []
        shown.append(_of_text(token))
    return shown + _decoded(run)


@lru_cache(maxsize=1 << 17)  # a vocabulary
def _of_text(token: str) -> Piece:
    kind: Kind = "special" if _SPECIAL.fullmatch(token) else "text"
    return Piece(_visible(token), kind)


def _visible(text: str) -> str:
    if not text:
        return _NOTHING
    if text.isprintable():
        return text
    parts = [printable(part) for part in text.replace("\t", "\u21e5").split("\n")]
    return "\u21b5\n".join(parts)


def _decoded(run: Sequence[bytes]) -> list[Piece]:
    """A run of tokens of bytes; each character goes to the token of its first byte."""
    if not run:
        return []
    joined = b"".join(run)
    texts = [""] * len(run)
    broken: set[int] = set()
    owner = [i for i, token in enumerate(run) for _ in token]
    at = 0
    while at < len(joined):
        length = _character(joined, at)
        if length:
            texts[owner[at]] += _visible(joined[at : at + length].decode())
        else:
            texts[owner[at]] += f"\\x{joined[at]:02x}"
            broken.add(owner[at])
        at += max(length, 1)
    return [
        Piece(text or (_PART if token else _NOTHING), _kind(text, i in broken))
        for i, (text, token) in enumerate(zip(texts, run, strict=True))
    ]


def _kind(text: str, broken: bool) -> Kind:
    if broken:
        return "broken"
    return "text" if text else "part"


def _character(data: bytes, at: int) -> int:
    """How many bytes the UTF-8 character at this place has; 0 if there is none."""
    for length in range(1, 5):
        try:
            data[at : at + length].decode()
        except UnicodeDecodeError:
            continue
        return min(length, len(data) - at)
    return 0
