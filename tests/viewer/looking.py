"""Records to look at, and how to read a page without a browser."""

from __future__ import annotations

import json
import re
import struct
import zlib
from base64 import b64decode
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokencredit.records import CreditRecord, Record, RecordWriter

NASTY = [
    "</script><script>document.title='broken'</script>",
    "<img src=x onerror=\"document.title='broken'\">",
    "<!-- <script>",
    "'\"`${1}&amp;&lt;",
    "nul\x00bell\x07",
    "\u202eright to left\u2066",
    "lone \ud800 surrogate",
    "עברית العربية",
    "line\nfeed\r\ttab\u2028separator",
    "]]>\u200b\ufeff",
    "__proto__",
]
"""Texts that break pages which take data for markup."""


def two_methods(groups: int = 3) -> list[Record]:
    """Groups of three responses: two methods, entropies with an unknown one, a masked token."""
    records: list[Record] = []
    for group in range(groups):
        for k in range(3):
            words = ["so", " 4", " + ", "2", f" = {k}", "<eos>"]
            size = 1.0 + group
            records.append(
                Record(
                    group=f"g{group}",
                    step=group,
                    prompt=f"question {group}: 4 + 2",
                    token_ids=[7, 8, 9, 10, 20 + k, 1],
                    tokens=words,
                    mask=[1, 1, 0, 1, 1, 1],
                    reward=None if k == 2 and group == 1 else float(k == 0),
                    rewards={"exact": float(k == 0), "format": 0.5},
                    success=k == 0,
                    truncated=k == 1,
                    keep=k != 1,
                    signals={"entropy": [0.5, None, 3.0, 0.0, 1.0, 0.25]},
                    credit={
                        "gtpo": CreditRecord(
                            base=size if k == 0 else -size,
                            advantage=[0.5, -2.0, 0.0, 0.0, size, 0.1],
                            reward=[1.0, 1.1, None, 0.9, 1.0, 1.0],
                        ),
                        "grpo_s": CreditRecord(base=1.0, reward=1.5, advantage=[0.4] * 6),
                    },
                    meta={
                        "model": "tiny",
                        "temperature": 0.7,
                        "tokencredit": "0.1.0",
                        "credit": {"gtpo": {"options": {"alpha2": 0.2}, "version": "0.1.0"}},
                    },
                )
            )
    return records


def unpacked(html: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The index of a page and its groups, read as the script reads them."""
    index = re.search(r'<script type="application/json" id="index">(.*?)</script>', html)
    assert index is not None
    groups: list[dict[str, Any]] = []
    for block in re.findall(r'<script type="text/plain" class="group">(.*?)</script>', html):
        data = zlib.decompress(b64decode(block))
        (size,) = struct.unpack_from("<I", data)
        header = json.loads(data[4 : 4 + size])
        total, offset = sum(header["lengths"]), 4 + size

        def numbers(kind: str, data: bytes = data, total: int = total, at: int = 0) -> list[Any]:
            planes = data[at : at + 4 * total]
            raw = bytes(planes[k * total + i] for i in range(total) for k in range(4))
            return list(struct.unpack(f"<{total}{kind}", raw))

        codes = numbers("I", at=offset)
        offset += 4 * total
        mask = list(data[offset : offset + total])
        offset += total + -total % 4
        values = {
            key: numbers("f", at=offset + 4 * total * k) for k, key in enumerate(header["series"])
        }
        has = dict(zip(header["series"], header["has"], strict=True))
        groups.append({"lengths": header["lengths"], "codes": codes, "mask": mask,
                       "values": values, "has": has})  # fmt: skip
    return json.loads(index[1]), groups


def named(keys: Iterable[str]) -> list[str]:
    """The names of series, without what tells credit from signals."""
    return [key.partition(":")[2] for key in keys]


def saved(path: Path, records: Sequence[Record]) -> Path:
    with RecordWriter(path, overwrite=True) as writer:
        for record in records:
            writer.write(record)
    return path
