"""Check a run of ``train.yaml``: is the credit in its records what the rule gives?

    python examples/smollm2/check.py [RUN_FOLDER]      (default: the newest of runs/smollm2-base-*)

Reads the records back, assigns once more with the options they name, and compares; recomputes
the rewards from the texts; checks that responses end where their masks say; and looks whether
metrics, report and weights are there. Exit code 0 if all is well.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from rewards import right, score

from tokencredit import assign
from tokencredit.records import Record, read_records, rollouts_from_records

HERE = Path(__file__).parent


def main() -> None:
    """Print one line a check."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else newest()
    records = list(read_records(folder / "rollouts.jsonl"))
    steps = sorted({int(record.step or 0) for record in records})
    check(f"{len(records)} records of {len(steps)} steps", bool(records))
    check("tokens, texts, masks and entropies agree in length", all(map(aligned, records)))
    check("entropies are known, finite and not negative", all(map(sound_entropies, records)))
    rewards_agree(records)
    for step in steps:
        credit_agrees([record for record in records if record.step == step], step)
    files_are_there(folder, len(steps))
    print(f"{folder}: all is well")


def newest() -> Path:
    """The run that was made last."""
    runs = sorted(Path("runs").glob("smollm2-base-*"), key=lambda path: path.stat().st_mtime)
    if not runs:
        sys.exit("check.py: no runs/smollm2-base-* here; give the run's folder")
    return runs[-1]


def check(what: str, good: bool) -> None:
    """Say it, and stop at the first that fails."""
    print(f"  {'ok' if good else 'WRONG'}  {what}")
    if not good:
        sys.exit(1)


def aligned(record: Record) -> bool:
    """One text, mask and entropy for each token."""
    ids = record.token_ids or ()
    lengths = (record.tokens or (), record.mask, record.signals["entropy"])
    return len(ids) > 0 and all(len(each) == len(ids) for each in lengths)


def sound_entropies(record: Record) -> bool:
    """In nats, between 0 and the logarithm of the vocabulary."""
    limit = math.log(49152) + 1e-3
    return all(h is not None and -1e-4 <= h <= limit for h in record.signals["entropy"])


def rewards_agree(records: list[Record]) -> None:
    """The rewards follow from the recorded texts and the prompts' columns."""
    lines = (HERE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    rows = {row["prompt"][0]["content"]: row for row in map(json.loads, lines)}
    asked = [rows[content(record.prompt)] for record in records]
    columns: dict[str, Any] = {
        "completions": [record.response for record in records],
        "letter": [row["letter"] for row in asked],
        "words": [row["words"] for row in asked],
    }
    close = all(
        record.reward is not None
        and abs(record.reward - value) < 1e-6
        and record.success == (verdict > 0.5)
        for record, value, verdict in zip(records, score(**columns), right(**columns), strict=True)
    )
    check(f"rewards and success follow from the texts ({sum(right(**columns)):.0f} right)", close)


def content(prompt: Any) -> str:
    """What the user said."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def credit_agrees(records: list[Record], step: int) -> None:
    """Assigning again gives the recorded advantages and shaped rewards."""
    (name,) = records[0].credit
    about: Any = records[0].meta["credit"]
    credit = assign(rollouts_from_records(records), name, **about[name]["options"])
    largest, moved = 0.0, 0
    for row, record in enumerate(records):
        n = len(record.mask)
        saved = record.credit[name]
        for mine, theirs in ((credit.advantage, saved.advantage), (credit.reward, saved.reward)):
            assert mine is not None and isinstance(theirs, (list, tuple))
            gap = mine[row, :n] - torch.tensor(theirs, dtype=torch.float32)
            largest = max(largest, float(gap.abs().max()))
        moved += int(credit.advantage[row].count_nonzero())
    check(
        f"step {step}: {name} again, largest difference {largest:.1e}, {moved} tokens moved",
        largest < 1e-5,
    )


def files_are_there(folder: Path, steps: int) -> None:
    """Metrics of each step, a report with a picture, weights that load."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    logged = [json.loads(line) for line in lines]
    with_credit = [row for row in logged if any(key.startswith("credit/") for key in row)]
    check(f"metrics: credit/... of {len(with_credit)} steps", len(with_credit) >= steps)
    report = folder / "report.md"
    check("a report with a picture", report.is_file() and bool(list(folder.glob("*.png"))))
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        names = list(weights.keys())
        finite = all(bool(weights.get_tensor(each).isfinite().all()) for each in names)
    check(f"{len(names)} finite tensors in model.safetensors", finite)


if __name__ == "__main__":
    main()
