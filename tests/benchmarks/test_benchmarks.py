"""Each benchmark runs, at tiny sizes, and gives finite numbers. No test looks at a time."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=300,
    )


def tables(name: str, folder: Path) -> dict[str, list[list[Any]]]:
    done = benchmarks(name, "--quick", "--json", f"{folder}/a.json", "--markdown", f"{folder}/a.md")
    assert done.returncode == 0, done.stderr
    (report,) = json.loads((folder / "a.json").read_text())
    assert report["name"] == name
    assert {"cores", "threads", "torch"} <= set(report["machine"])
    text = (folder / "a.md").read_text()
    assert text.strip() in done.stdout
    for table in report["tables"]:
        assert table["title"] in text
        for row in table["rows"]:
            assert len(row) == len(table["columns"])
            numbers = [value for value in row if not isinstance(value, str)]
            assert all(math.isfinite(value) and value >= 0 for value in numbers)
    return {table["title"]: table["rows"] for table in report["tables"]}


def test_without_a_name_they_are_listed() -> None:
    done = benchmarks()
    assert done.returncode == 0
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == ["assign", "token_statistics", "view", "scale", "trl_step"]


def test_an_unknown_name_is_refused() -> None:
    done = benchmarks("asign")
    assert done.returncode == 2
    assert "asign" in done.stderr and "assign" in done.stderr


def test_scale(tmp_path: Path) -> None:
    found = tables("scale", tmp_path)
    times = found["Seconds a step, responses of 2 to 8 tokens"]
    assert [row[0] for row in times] == ["16", "64"]
    law = {row[0]: row[1:] for row in found["The law, carried on"]}
    assert set(law) == {"grpo", "gtpo", "grpo_s", "datc"}
    assert all(row[2] >= row[1] for row in law.values())  # more responses, no less time


def test_a_power_law_is_found() -> None:
    sys.path.insert(0, str(ROOT))
    from benchmarks.scale import power

    tokens = [10**3, 10**4, 10**6]
    factor, exponent = power(tokens, [3e-6 * n**0.9 for n in tokens])
    assert (factor, exponent) == pytest.approx((3e-6, 0.9))


def test_view(tmp_path: Path) -> None:
    found = tables("view", tmp_path)
    [[size, records, page, *_]] = found["Making the page"]
    assert size == "16 x 20" and records > 0 and page > 0.05
    for row in found.get("Opening it in Chromium", []):  # where there is one
        assert row[1] > 0 and row[4] > 0


def test_assign(tmp_path: Path) -> None:
    found = tables("assign", tmp_path)
    sizes = [rows for title, rows in found.items() if "milliseconds" in title]
    variants = [rows for title, rows in found.items() if "variants" in title]
    assert sizes and all(len(rows) == 4 for rows in sizes)
    assert variants and all(rows[1][0] == "shuffled groups" for rows in variants)


def test_trl_step(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    found = tables("trl_step", tmp_path)
    parts = {title: rows for title, rows in found.items() if title.startswith("What DATC adds")}
    assert len(parts) == 2 and len(found) == 4
    for title, rows in found.items():
        assert all(row[1] > 0 for row in rows)
        if title not in parts:
            assert [row[0] for row in rows] == ["GRPOTrainer", "gtpo", "datc"]


def test_token_statistics(tmp_path: Path) -> None:
    found = tables("token_statistics", tmp_path)
    assert len(found) == 3
    for title, rows in found.items():
        if title.startswith("log-probability"):
            names = [row[2] for row in rows]
            assert names[0] == "materialised float32" and "tokencredit" in names
            (ours,) = [row for row in rows if row[2] == "tokencredit"]
            assert float(ours[6]) < 1e-4 and float(ours[7]) < 1e-4
