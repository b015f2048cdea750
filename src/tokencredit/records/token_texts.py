"""The texts of tokens, from a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["token_texts"]


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str | bytes]:
    """The text that each token stands for; bytes where they are no text on their own.

    Vocabularies write their pieces in different ways: byte-level ones one printable character a
    byte, SentencePiece's a mark for the space and ``<0x0A>`` for a lone byte.

    Args:
        tokenizer: of transformers.
        ids: token ids of one response.

    Returns:
        One text or ``bytes`` a token, as `Record.tokens` holds them. Special tokens are written as
        the tokenizer writes them; an id that it does not know is an empty text.

    Example:
        >>> from tokencredit import lab
        >>> tokenizer = lab.tokenizer_for(lab.setting("chain-qwen3").task)
        >>> token_texts(tokenizer, tokenizer("6 - 4 =").input_ids)
        ['6', '-', '4', '=']
    """
    pieces = tokenizer.convert_ids_to_tokens(list(ids))
    special = set(tokenizer.all_special_tokens)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    byte_level = "ByteLevel" in repr(getattr(backend, "decoder", None))
    return [
        "" if piece is None
        else piece if piece in special
        else _from_bytes(piece) if byte_level
        else _from_sentencepiece(piece)
        for piece in pieces
    ]  # fmt: skip


def _table() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for 256, 257, ..."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    table = {chr(b): b for b in printable}
    table.update({chr(256 + n): b for n, b in enumerate(sorted(set(range(256)) - printable))})
    return table


_BYTE_OF = _table()


def _from_bytes(piece: str) -> str | bytes:
    if not all(c in _BYTE_OF for c in piece):
        return piece  # an added token, written as it is
    raw = bytes(_BYTE_OF[c] for c in piece)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def _from_sentencepiece(piece: str) -> str | bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        byte = bytes([int(piece[3:5], 16)])
        return byte.decode() if byte < b"\x80" else byte
    return piece.replace("\u2581", " ")
