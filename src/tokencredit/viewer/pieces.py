"""What is shown for a token: its text made visible, or its part of a character."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from tokencredit.records.schema import Record
from tokencredit.texts import printable

__all__ = ["Piece", "parting", "pieces", "prompt_text"]

Kind = Literal["text", "special", "part", "broken"]

# What tokenizers write for tokens that are not text: <|im_end|>, <eos>, </s>, [PAD], DeepSeek's
# fullwidth bars.
_SPECIAL = re.compile(r"<[|\uff5c].+[|\uff5c]>|</?[A-Za-z_]\w*>|\[[A-Z]{2,}\]")
_PART = "\u00b7"
# Letters and symbols by name, and yet nothing to be seen.
_BLANK = frozenset("\u115f\u1160\u2800\u3164\uffa0")
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
    if all(unicodedata.category(c).startswith("M") for c in text):
        return "\u25cc" + text  # marks that sit on the character before, which is another token's
    if text.isprintable() and _BLANK.isdisjoint(text):
        return text
    parts = [_spelt(part) for part in text.replace("\t", "\u21e5").split("\n")]
    return "\u21b5\n".join(parts)


def _spelt(text: str) -> str:
    return "".join(f"\\u{ord(c):04x}" if c in _BLANK else printable(c) for c in text)


def _decoded(run: Sequence[bytes]) -> list[Piece]:
    """A run of tokens of bytes; each character goes to the token of its first byte."""
    if not run:
        return []
    joined = b"".join(run)
    texts = [""] * len(run)
    shown = [""] * len(run)
    broken: set[int] = set()
    owner = [i for i, token in enumerate(run) for _ in token]
    at = 0

    def show(i: int) -> None:
        if texts[i]:
            shown[i] += _visible(texts[i])
            texts[i] = ""

    while at < len(joined):
        i, length = owner[at], _character(joined, at)
        if length:
            texts[i] += joined[at : at + length].decode()
        else:
            show(i)
            shown[i] += f"\\x{joined[at]:02x}"
            broken.add(i)
        at += max(length, 1)
    for i in range(len(run)):
        show(i)
    return [
        Piece(text or (_PART if token else _NOTHING), _kind(text, i in broken))
        for i, (text, token) in enumerate(zip(shown, run, strict=True))
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


def parting(one: Record, other: Record) -> int | None:
    """The place of the first token that differs, or where the shorter response ends.

    Tokens are the same if their ids are, or their texts where one has no ids. None if it cannot
    be told, or if there is no such place.

    Example:
        >>> a, b = (Record(group=0, token_ids=i, mask=[1] * 3, reward=None)
        ...         for i in ([5, 6, 7], [5, 8, 7]))
        >>> parting(a, b), parting(a, a)
        (1, None)
    """
    for place in range(min(one.length, other.length)):
        if one.token_ids is not None and other.token_ids is not None:
            same = one.token_ids[place] == other.token_ids[place]
        elif one.tokens is not None and other.tokens is not None and one.tokens[place]:
            same = one.tokens[place] == other.tokens[place]
        else:
            return None
        if not same:
            return place
    return None if one.length == other.length else min(one.length, other.length)


def prompt_text(record: Record) -> str:
    """The prompt as it is shown: text, or messages one below the other."""
    prompt = record.prompt
    if prompt is None or isinstance(prompt, str):
        return _lines(prompt or "")
    parts: list[str] = []
    for message in prompt:
        content = message.get("content")
        rest = {k: v for k, v in message.items() if k not in ("role", "content") and v is not None}
        text = content if isinstance(content, str) else ""
        if content is not None and not isinstance(content, str):
            text = json.dumps(content, ensure_ascii=False)
        if rest:
            text += " " + json.dumps(rest, ensure_ascii=False)
        parts.append(f"{message.get('role')}: {text.strip()}")
    return _lines("\n".join(parts))


def _lines(text: str) -> str:
    return "\n".join(printable(line.expandtabs(4)) for line in text.split("\n"))
