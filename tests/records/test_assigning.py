"""Credit for a whole file: the same whatever the batches."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from tokencredit import GTPO, assign
from tokencredit.cli.main import main
from tokencredit.errors import InputError, MissingSignalError
from tokencredit.records import (
    AssignProgress,
    Record,
    RecordWriter,
    assign_file,
    read_records,
    rollouts_from_records,
)


def rollouts(groups: int = 12, seed: int = 0) -> list[Record]:
    """Groups of 3 to 5 responses with 1 to 9 tokens, two groups a step."""
    chance = random.Random(seed)
    records: list[Record] = []
    for group in range(groups):
        for _ in range(chance.randint(3, 5)):
            length = chance.randint(1, 9)
            records.append(
                Record(
                    group=f"g{group}",
                    step=group // 2,
                    token_ids=[chance.randint(0, 99) for _ in range(length)],
                    mask=[1, *(chance.randint(0, 1) for _ in range(length - 1))],
                    reward=float(chance.randint(0, 1)),
                    signals={"entropy": [chance.random() for _ in range(length)]},
                )
            )
    return records


def written(path: Path, records: list[Record]) -> Path:
    with RecordWriter(path, overwrite=True) as writer:
        for record in records:
            writer.write(record)
    return path


def advantages(path: Path, name: str) -> torch.Tensor:
    values = [value for record in read_records(path) for value in record.credit[name].advantage]
    return torch.tensor(values)


@pytest.mark.parametrize("rule", ["grpo", "dapo", "gtpo", "grpo_s"])
def test_batches_do_not_show(tmp_path: Path, rule: str):
    records = rollouts()
    source = written(tmp_path / "in.jsonl", records)
    credit = assign(rollouts_from_records(records), rule)
    expected = torch.cat([credit.advantage[i, : r.length] for i, r in enumerate(records)])
    summaries = []
    for tokens in (1, 100, 10**9):
        target = tmp_path / "out.jsonl.gz"
        summaries.append(assign_file(source, target, rule, batch_tokens=tokens, overwrite=True))
        torch.testing.assert_close(advantages(target, rule), expected, atol=1e-6, rtol=1e-6)
        bare = [dataclasses.replace(r, credit={}, meta={}) for r in read_records(target)]
        assert bare == records
    for summary in summaries:
        assert (summary.responses, summary.groups) == (len(records), 12)
        assert summary.tokens == sum(sum(record.mask) for record in records)
        assert summary.diagnostics.keys() == credit.diagnostics.keys()
        for name in ("responses", "groups", "tokens", "groups_skipped", "sign_flips"):
            assert summary.diagnostics[name] == pytest.approx(credit.diagnostics[name], abs=1e-6)
        largest = [name for name in credit.diagnostics if name.startswith("largest")]
        for name in largest:
            assert summary.diagnostics[name] == pytest.approx(credit.diagnostics[name], abs=1e-5)


def test_the_record_says_how_its_credit_came_about(tmp_path: Path):
    source = written(tmp_path / "in.jsonl", rollouts(2))
    target = tmp_path / "out.jsonl"
    assign_file(source, target, "gtpo", options={"alpha2": 0.2})
    summary = assign_file(target, target, GTPO(alpha2=0.4), name="strong", overwrite=True)
    assert summary.name == "strong" and summary.rule == GTPO(alpha2=0.4)
    for record in read_records(target):
        assert list(record.credit) == ["gtpo", "strong"]
        kept = record.meta["credit"]
        assert kept["gtpo"]["options"]["alpha2"] == 0.2
        assert kept["strong"]["options"]["alpha2"] == 0.4
        assert kept["strong"]["rule"] == "gtpo" and kept["strong"]["version"]


def test_a_batch_is_a_step_for_rules_that_pool_over_it(tmp_path: Path):
    records = rollouts()
    source = written(tmp_path / "in.jsonl", records)
    target = tmp_path / "out.jsonl"
    rule = GTPO(normalise_over="batch")
    assign_file(source, target, rule, batch_tokens=1)
    parts = []
    for step in range(6):
        batch = [record for record in records if record.step == step]
        credit = assign(rollouts_from_records(batch), rule)
        parts += [credit.advantage[i, : r.length] for i, r in enumerate(batch)]
    torch.testing.assert_close(advantages(target, "gtpo"), torch.cat(parts), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([1, 1, None, 1], "in.jsonl:3: field 'step': is missing, but the rule has a statistic"),
        ([1, 1, 1, 2], "in.jsonl:4: field 'step': is 2, but line 3 of the same group has 1"),
        ([1, 1, 2, 2, 1, 1], "in.jsonl:5: field 'step': step 1 began on line 1 and reappears"),
    ],
)
def test_a_step_must_be_whole(tmp_path: Path, steps: list[int | None], says: str):
    records = [
        Record(
            group=i // 2, step=step, token_ids=[1], mask=[1], reward=i % 2,
            signals={"entropy": [1.0]},
        )
        for i, step in enumerate(steps)
    ]  # fmt: skip
    source = written(tmp_path / "in.jsonl", records)
    assign_file(source, tmp_path / "out.jsonl", "gtpo")  # steps are nothing to it otherwise
    with pytest.raises(InputError, match=says):
        assign_file(source, tmp_path / "batch.jsonl", "gtpo", options={"share_over": "batch"})
    assert not (tmp_path / "batch.jsonl").exists()


def test_a_missing_signal_is_named_with_the_file_and_what_to_write(tmp_path: Path):
    records = [dataclasses.replace(record, signals={}) for record in rollouts(2)]
    source = written(tmp_path / "in.jsonl", records)
    with pytest.raises(MissingSignalError) as caught:
        assign_file(source, tmp_path / "out.jsonl", "gtpo")
    message = str(caught.value)
    assert message.startswith(f"{source}: field 'signals': gtpo needs 'entropy'")
    assert '"signals": {"entropy": [1.5, null]}' in message and "\n" not in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_the_file_must_agree_with_itself(tmp_path: Path):
    first, last = rollouts(2), [r for r in rollouts(3) if r.group == "g2"]

    def refused(changes: dict, says: str, line: int = len(first) + 1) -> None:
        records = [*first, *(dataclasses.replace(record, **changes) for record in last)]
        source = written(tmp_path / "in.jsonl", records)
        for tokens in (1, 10**9):
            with pytest.raises(InputError, match=f"in.jsonl:{line}: field {says}"):
                assign_file(source, tmp_path / "out.jsonl", "grpo", batch_tokens=tokens)

    refused({"success": True}, "'success': is given here, but not on line 1")
    late = {"signals": {"work": [0.0] * 9}}
    last = [dataclasses.replace(last[0], token_ids=[1] * 9, mask=[1] * 9, signals={})]
    refused(late, "'signals.work': appears here first")
    refused({"token_ids": None, "tokens": ["x"] * 9}, "'token_ids': is missing here")


def test_a_signal_that_is_missing_later_is_unknown_there(tmp_path: Path):
    records = rollouts(4)
    records = [dataclasses.replace(r, signals={}) if r.group == "g3" else r for r in records]
    source = written(tmp_path / "in.jsonl", records)
    results = []
    for tokens in (1, 10**9):
        target = tmp_path / "out.jsonl"
        summary = assign_file(source, target, "gtpo", batch_tokens=tokens, overwrite=True)
        results.append(advantages(target, "gtpo"))
        assert summary.diagnostics["unknown_tokens"] > 0
    torch.testing.assert_close(*results)


def test_progress_and_an_empty_file(tmp_path: Path):
    source = written(tmp_path / "in.jsonl", rollouts())
    seen: list[AssignProgress] = []
    summary = assign_file(
        source, tmp_path / "out.jsonl", "grpo", batch_tokens=40, on_progress=seen.append
    )
    assert len(seen) > 2 and seen[-1] == AssignProgress(summary.responses, 1.0)
    assert [p.fraction for p in seen] == sorted(p.fraction for p in seen)
    empty = written(tmp_path / "empty.jsonl", [])
    with pytest.raises(InputError, match="holds no records"):
        assign_file(empty, tmp_path / "none.jsonl", "grpo")


@pytest.mark.parametrize(
    ("rule", "reward", "success", "guessed"),
    [
        ("gtpo", 1.3, None, True),  # a sum of rewards, or a reward model's score
        ("gtpo", 1.3, True, False),
        ("gtpo", 1.0, None, False),
        ("gtpo", -1.0, None, False),
        ("grpo", 1.3, None, False),
    ],
)
def test_a_verdict_that_nobody_gave_is_pointed_out(
    tmp_path: Path,
    rule: str,
    reward: float,
    success: bool | None,
    guessed: bool,
    capsys: pytest.CaptureFixture[str],
):
    records = [
        dataclasses.replace(r, reward=reward * r.reward, success=success and bool(r.reward))
        for r in rollouts()
        if r.reward is not None
    ]
    source, target = written(tmp_path / "in.jsonl", records), tmp_path / "out.jsonl"
    assert assign_file(source, target, rule).success_guessed is guessed
    assert main(["assign", str(source), "--credit", rule, "-o", str(target), "--overwrite"]) == 0
    assert ("went by reward > 0.5" in capsys.readouterr().err) is guessed


def test_wrong_rules_and_options_are_told_before_anything_is_written(tmp_path: Path):
    source = written(tmp_path / "in.jsonl", rollouts(2))
    with pytest.raises(InputError, match="did you mean 'gtpo'"):
        assign_file(source, tmp_path / "out.jsonl", "gtop")
    with pytest.raises(InputError, match="alpha2"):
        assign_file(source, tmp_path / "out.jsonl", "gtpo", options={"alpha2": -1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]
