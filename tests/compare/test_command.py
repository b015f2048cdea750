"""``tokencredit compare``, on a file that `tokencredit train` wrote and on made ones."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tokencredit import InputError
from tokencredit.cli.main import main
from tokencredit.compare import compare, read_rollouts

# 4 groups of 8 from `tokencredit train --lab --credit datc --max_steps 3 --record_every 1`, the
# last of them all right or all wrong. DATC's trainer records no entropies.
REAL = Path(__file__).parent / "datc_run.jsonl.gz"


def write(path: Path, groups: int = 3, **changes: Any) -> Path:
    lines: list[str] = []
    for group in range(groups):
        for k, reward in enumerate((1.0, 1.0, 0.0, 0.0)):
            record = {
                "schema": 1,
                "group": group,
                "tokens": ["a", "b"],
                "mask": [1, 1],
                "reward": reward,
                "signals": {"entropy": [1.0 + k, 2.0 + group]},
            }
            values = {n: v(group, k) if callable(v) else v for n, v in changes.items()}
            lines.append(json.dumps(record | values))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["compare", *map(str, argv)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_a_real_file(run: Any, tmp_path: Path) -> None:
    code, out, err = run(REAL, "-o", tmp_path)
    assert code == 0 and err == ""
    assert out.startswith("32 responses, 4 groups, ")
    for line in ("grpo ", "datc "):
        assert f"\n{line}" in out
    assert "need entropy\n    entropy: " in out and "BROKEN" not in out
    assert f"report: {tmp_path / 'compare.html'}" in out
    page = (tmp_path / "compare.html").read_text()
    assert "chain-qwen3" in page and "<script" not in page
    numbers = json.loads((tmp_path / "comparison.json").read_text())
    datc = next(m for m in numbers["methods"] if m["name"] == "datc")
    assert all(law["passed"] is not False for law in datc["laws"])
    # What the trainer recorded is what the comparison is about; TRL adds 1e-4 to the base's std.
    read = read_rollouts(REAL)
    with gzip.open(REAL, "rt") as lines:
        records = [json.loads(line) for line in lines]
    from tokencredit import assign

    credit = assign(read.rollouts, "datc")
    for row, record in enumerate(records):
        want = record["credit"]["datc"]["advantage"]
        assert credit.advantage[row, : len(want)].tolist() == pytest.approx(want, rel=1e-3)
    assert datc["diagnostics"]["effective_tokens"] == pytest.approx(
        credit.diagnostics["effective_tokens"]
    )


def test_methods_and_options(run: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "rollouts.jsonl")
    argv = ("--credit", "gtpo, grpo_s,datc", "--set", "gtpo.alpha2=0", "grpo_s.beta2=0.5")
    code, out, _ = run(path, *argv)
    assert code == 0 and "report" not in out
    assert [line.split()[0] for line in out.splitlines()[4:6]] == ["gtpo", "grpo_s"]
    # Without alpha2 GTPO is GRPO of tokens, here of equal lengths.
    assert out.splitlines()[4].split()[1:4] == ["1.000", "0.000", "0.000"]
    assert out.splitlines()[5].split()[2] != "0.000"
    assert "datc needs work" in out
    assert not list(tmp_path.glob("*.html"))


def test_standard_input(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = write(tmp_path / "rollouts.jsonl").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    code, out, _ = run("-", "--credit", "grpo")
    assert code == 0 and out.startswith("12 responses")


def test_a_limit_takes_whole_groups(run: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "rollouts.jsonl")
    for limit, responses in ((11, 8), (8, 8), (1, 4), (12, 12)):
        code, out, _ = run(path, "--credit", "grpo", "--limit", limit)
        assert code == 0 and out.startswith(f"{responses} responses"), limit
        assert ("(--limit)" in out) == (responses < 12)


def test_steps(run: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "rollouts.jsonl", step=lambda group, k: 10 * group)
    code, out, _ = run(path, "--credit", "gtpo", "--step", 10)
    assert code == 0 and out.startswith("4 responses, 1 groups")
    wide = ("--credit", "gtpo", "--set", "gtpo.share_over=batch")
    code, _, err = run(path, *wide)
    assert code == 2 and "has 3 steps" in err and "--step 0" in err
    assert run(path, *wide, "--step", 20)[0] == 0


def test_many_chunks_are_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(
        tmp_path / "rollouts.jsonl",
        tokens=lambda group, k: ["a"] * (1 + group),
        mask=lambda group, k: [1] * (1 + group),
        signals=lambda group, k: {"entropy": [1.0 + k] * (1 + group)} if group else {},
        token_ids=lambda group, k: [7] * (1 + group),
        keep=lambda group, k: bool(k),
    )
    whole = read_rollouts(path).rollouts
    monkeypatch.setattr("tokencredit.compare.reading.AT_ONCE", 4)
    pieces = read_rollouts(path).rollouts
    assert whole.mask.shape == pieces.mask.shape == (12, 3)
    for name in ("rewards", "group", "mask", "success", "real", "keep", "token_ids"):
        assert getattr(whole, name).tolist() == getattr(pieces, name).tolist(), name
    assert repr(whole.signals["entropy"]) == repr(pieces.signals["entropy"])
    assert compare(whole, ["grpo", "gtpo"]).to_dict() == compare(pieces, ["grpo", "gtpo"]).to_dict()
    assert not read_rollouts(path, signals=["work"]).rollouts.signals


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--credit", "gtop"), ["unknown method 'gtop'", "did you mean 'gtpo'"]),
        (("--credit", "grpo,grpo"), ["grpo is given twice"]),
        (("--credit", ","), ["names no method"]),
        (("--credit", "datc"), ["no method is left", "datc needs work"]),
        (("--set", "alpha2=1"), ["expected name.key=value", "alpha2=1"]),
        (("--credit", "grpo", "--set", "gtpo.alpha2=1"), ["'gtpo' is not compared"]),
        (("--set", "gtpo.alhpa2=1"), ["alhpa2", "did you mean 'alpha2'"]),
        (("--set", "gtpo.alpha2=-1"), ["gtpo", "alpha2", ">= 0"]),
        (("--limit", "0"), ["limit must be at least 1"]),
        (("--limit", "x"), ["--limit"]),
        (("--step", "7"), ["holds no records of step 7"]),
        (("-o", "rollouts.jsonl"), ["rollouts.jsonl: is not a folder"]),
    ],
)
def test_wrong_arguments_are_one_line(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: Any, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rollouts.jsonl")
    code, out, err = run("rollouts.jsonl", *argv)
    assert code == 2 and out == "" and err.count("\n") == 1
    for word in words:
        assert word in err
    assert [p.name for p in tmp_path.iterdir()] == ["rollouts.jsonl"]


def test_wrong_files_are_one_line(run: Any, tmp_path: Path) -> None:
    code, _, err = run(tmp_path / "gone.jsonl")
    assert code == 2 and "gone.jsonl: cannot be read" in err
    (tmp_path / "empty.jsonl").write_text("")
    assert "holds no records" in run(tmp_path / "empty.jsonl")[2]
    path = write(tmp_path / "some.jsonl", success=lambda group, k: True if group < 2 else None)
    code, _, err = run(path)
    assert code == 2 and "some.jsonl:9: field 'success': is missing here" in err
    path = write(tmp_path / "unscored.jsonl", reward=None)
    assert "no token is in the loss" in run(path)[2]
    with pytest.raises(InputError, match="limit"):
        read_rollouts(path, limit=0)


def test_a_report_is_replaced_only_when_asked(run: Any, tmp_path: Path) -> None:
    path, out = write(tmp_path / "rollouts.jsonl"), tmp_path / "out"
    assert run(path, "-o", out)[0] == 0
    code, _, err = run(path, "-o", out)
    assert code == 2 and "compare.html: exists already" in err and "--overwrite" in err
    assert run(path, "-o", out, "--overwrite")[0] == 0


def test_it_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0 and "\n  compare " in capsys.readouterr().out
    assert main(["compare", "--help"]) == 0
    assert "usage: tokencredit compare" in capsys.readouterr().out
