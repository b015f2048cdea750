"""One self-contained HTML page of rollouts: nothing to serve, nothing to fetch.

The page holds one compressed block a group and an index of all responses; its script unpacks a
group when it is looked at. Whatever comes from the records stands in it as base64 or as JSON of
ASCII characters without ``<``, and the script puts it on the screen as text only; a policy in the
head forbids every script but that one, and every address.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, BinaryIO

import torch
from torch import Tensor

from tokencredit.errors import InputError
from tokencredit.records.schema import Record
from tokencredit.texts import printable
from tokencredit.viewer.pieces import pieces, prompt_text
from tokencredit.viewer.provenance import Provenance
from tokencredit.viewer.series import (
    LEVELS,
    QUANTILE,
    Scale,
    Series,
    chosen,
    first_choice,
    floats,
    token_values,
)

__all__ = ["PageSummary", "write_page"]

_KINDS = ("text", "special", "part", "broken")
_EXACT = 1 << 53
"""From here on JavaScript's numbers are not exact."""


@dataclass(frozen=True)
class PageSummary:
    """What is on a page.

    Attributes:
        responses: how many.
        groups: how many.
        tokens: how many, masked or not.
        size: the page's bytes.
    """

    responses: int
    groups: int
    tokens: int
    size: int


def write_page(
    groups: Iterable[Sequence[Record]],
    file: BinaryIO,
    *,
    title: str = "rollouts",
    by: str | None = None,
    against: str | None = None,
) -> PageSummary:
    """Write the page as the groups come; one group is in memory, and what the index says of it.

    Args:
        groups: the responses of a prompt together.
        file: where to, opened for writing bytes.
        title: what the rollouts are called.
        by: what the tokens are coloured by at first, as in `chosen`. Default: the first.
        against: what is shown beside it at first. Default: nothing.

    Raises:
        InputError: no records, or `by` or `against` is none of what they hold.
    """
    page = _Page()
    size = file.write(_head(title))
    for group in groups:
        size += file.write(b'<script type="text/plain" class="group">')
        size += file.write(base64.b64encode(page.add(group)))
        size += file.write(b"</script>\n")
    if not page.responses:
        raise InputError(f"{title}: holds no records")
    size += file.write(b'<script type="application/json" id="index">')
    size += file.write(_json(page.index(title, by, against)))
    size += file.write(b"</script>\n<script>")
    size += file.write(_asset("page.js"))
    size += file.write(b"</script>\n</body>\n</html>\n")
    return PageSummary(page.responses, len(page.groups), page.tokens, size)


class _Page:
    """What the index says, gathered group by group."""

    def __init__(self) -> None:
        self.responses = 0
        self.tokens = 0
        self.groups: list[dict[str, Any]] = []
        self._rows: dict[str, list[Any]] = {}
        self._rules: dict[str, dict[str, list[Any]]] = {}
        self._rewards: dict[str, list[Any]] = {}
        self._scales: dict[Series, Scale] = {}
        self._vocabulary: dict[tuple[int | None, str | bytes | None, str], int] = {}
        self._texts: dict[str | bytes, int] = {}
        self._pieces: list[list[Any]] = []
        self._provenance = Provenance()

    def add(self, group: Sequence[Record]) -> bytes:
        """One group; its block."""
        first = group[0]
        self.groups.append(
            {
                "key": printable(str(first.group)),
                "step": None if first.step is None else str(first.step),
                "id": None if first.prompt_id is None else printable(str(first.prompt_id)),
                "prompt": prompt_text(first),
                "first": self.responses,
                "count": len(group),
            }
        )
        codes = array("I")
        masks = bytearray()
        columns: dict[Series, array[float]] = {}
        has: dict[Series, list[int]] = {}
        for row, record in enumerate(group):
            self._provenance.add(record)
            codes.extend(self._codes(record))
            masks.extend(record.mask)
            mask = torch.tensor(record.mask, dtype=torch.bool)
            measures: dict[str, tuple[float | None, int | None]] = {}
            for series, values in token_values(record).items():
                column = columns.setdefault(series, array("f"))
                # What earlier responses of the group do not have is unknown there.
                column.extend([float("nan")] * (len(codes) - record.length - len(column)))
                own = floats(values)
                column.extend(own)
                has.setdefault(series, []).append(row)
                known = _tensor(own)[mask]
                self._scales.setdefault(series, Scale(series.factor)).add(known)
                if series.kind == "advantage" and series.rule is not None:
                    measures[series.rule] = _measures(known, record.credit[series.rule].base)
            self._describe(record, measures)
            self.responses += 1
            self.tokens += record.length
        for column in columns.values():
            column.extend([float("nan")] * (len(codes) - len(column)))
        header = {
            "lengths": [record.length for record in group],
            "series": [series.id for series in columns],
            "has": list(has.values()),
        }
        return _packed(header, codes, masks, list(columns.values()))

    def index(self, title: str, by: str | None, against: str | None) -> dict[str, Any]:
        known = list(self._scales)
        # Without credit or signals there is nothing to choose, and the texts alone are shown.
        first = chosen(by, known) if by is not None else first_choice(known)
        second = chosen(against, known) if against is not None else None
        return {
            "title": printable(title),
            "facts": [[printable(k), printable(v)] for k, v in self._provenance.facts()],
            "quantile": QUANTILE,
            "levels": LEVELS,
            "series": [
                {
                    "key": series.id,
                    "kind": f"credit:{series.kind}" if series.rule else series.id,
                    "rule": series.rule,
                    "title": series.title,
                    "unit": series.unit,
                    "factor": series.factor,
                    "range": scale.range,
                    "least": scale.least,
                    "most": scale.most,
                }
                for series, scale in self._scales.items()
            ],
            "by": None if first is None else first.id,
            "against": None if second is None else second.id,
            "vocabulary": self._pieces,
            "groups": self.groups,
            "rows": self._rows,
            "rewards": [[printable(name), column] for name, column in self._rewards.items()],
            "rules": self._rules,
            "titles": {rule: printable(rule) for rule in self._rules},
        }

    def _codes(self, record: Record) -> list[int]:
        ids: Sequence[int | None] = record.token_ids or [None] * record.length
        texts: Sequence[str | bytes | None] = record.tokens or [None] * record.length
        codes: list[int] = []
        for token, text, piece in zip(ids, texts, pieces(record), strict=True):
            key = (token, text, piece.text)
            code = self._vocabulary.get(key)
            if code is None:
                code = self._vocabulary[key] = len(self._pieces)
                raw = [*text] if isinstance(text, bytes) else None
                # Whether two tokens are the same is told by ids, else by texts; an empty text
                # alone tells nothing.
                same = self._texts.setdefault(text, len(self._texts)) if text else None
                spelt = token if token is None or token < _EXACT else str(token)
                self._pieces.append([piece.text, _KINDS.index(piece.kind), spelt, raw, same])
            codes.append(code)
        return codes

    def _describe(
        self, record: Record, measures: Mapping[str, tuple[float | None, int | None]]
    ) -> None:
        row: dict[str, Any] = {
            "group": len(self.groups) - 1,
            "reward": record.reward,
            "success": record.success,
            "keep": record.keep,
            "truncated": record.truncated,
            "length": sum(record.mask),
        }
        for name, value in row.items():
            self._rows.setdefault(name, []).append(value)
        _append(self._rewards, dict(record.rewards), self.responses)
        for rule, credit in record.credit.items():
            effective, flips = measures.get(rule, (None, None))
            reward = None if isinstance(credit.reward, Sequence) else credit.reward
            entry = {"base": credit.base, "reward": reward, "effective": effective, "flips": flips}
            _append(self._rules.setdefault(rule, {}), entry, self.responses)


def _append(columns: dict[str, list[Any]], entry: Mapping[str, Any], row: int) -> None:
    """Columns may be shorter than the rows; what is missing is unknown."""
    for name, value in entry.items():
        column = columns.setdefault(name, [])
        column.extend([None] * (row - len(column)))
        column.append(value)


def _measures(advantage: Tensor, base: float | None) -> tuple[float | None, int | None]:
    """Effective tokens, as in `tokencredit.Credit`, and tokens of the opposite sign of the base."""
    known = advantage[~advantage.isnan()].double()
    if len(advantage) and not len(known):
        return None, None
    square = float(known.square().sum())
    effective = float(known.abs().sum()) ** 2 / square if square > 0 else 0.0
    return effective, None if base is None else int((known * base < 0).sum())


def _tensor(values: array[float]) -> Tensor:
    return torch.frombuffer(values, dtype=torch.float32) if len(values) else torch.empty(0)


def _packed(
    header: Mapping[str, Any],
    codes: array[int],
    mask: bytes | bytearray,
    columns: list[array[float]],
) -> bytes:
    """Length and JSON header, then codes, mask and columns, little-endian, each 4-byte aligned.

    Of numbers the first bytes come first, then the second ones and so on, which packs better.
    """
    head = json.dumps(header).encode("ascii")
    head += b" " * (-len(head) % 4)
    parts = [struct.pack("<I", len(head)), head, _planes(codes), bytes(mask)]
    parts.append(bytes(-len(mask) % 4))
    parts += map(_planes, columns)
    return zlib.compress(b"".join(parts), 6)


def _planes(values: array[Any]) -> bytes:
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    data = values.tobytes()
    return b"".join(data[k::4] for k in range(4))


def _json(value: Any) -> bytes:
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").encode("ascii")


def _asset(name: str) -> bytes:
    return resources.files("tokencredit.viewer").joinpath("assets", name).read_bytes()


def _head(title: str) -> bytes:
    digest = base64.b64encode(hashlib.sha256(_asset("page.js")).digest()).decode("ascii")
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )
    name = printable(title).replace("&", "&amp;").replace("<", "&lt;")
    return b"".join(
        [
            b'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'.encode(),
            b'<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            f"<title>{name} - tokencredit</title>\n<style>\n".encode("utf-8", "backslashreplace"),
            _asset("page.css"),
            b'</style>\n</head>\n<body>\n<div id="page"><p class="wait">Unpacking ...</p></div>\n',
            b"<noscript>This page needs JavaScript; it fetches nothing.</noscript>\n",
        ]
    )
