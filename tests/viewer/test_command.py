"""``tokencredit view``: the command."""

from __future__ import annotations

import dataclasses
import gzip
import io
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from looking import saved, two_methods, unpacked

from tokencredit.cli.main import main

REAL = Path(__file__).parents[1] / "compare" / "datc_run.jsonl.gz"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["view", *map(str, argv)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return saved(tmp_path / "rollouts.jsonl", two_methods())


def rows(page: Path) -> int:
    index, groups = unpacked(page.read_text(encoding="utf-8"))
    assert len(groups) == len(index["groups"])
    return len(index["rows"]["reward"])


def test_a_real_file(run: Any, tmp_path: Path):
    page = tmp_path / "page.html"
    code, out, err = run(REAL, "-o", page, "--credit", "grpo,datc_flipped", "--by", "datc.weight")
    assert (code, err) == (0, "")
    assert out.startswith(f"{page}: 32 responses, 4 groups, ")
    index, _ = unpacked(page.read_text(encoding="utf-8"))
    assert set(index["rules"]) == {"datc", "grpo", "datc_flipped"}
    assert index["by"] == "credit:datc.weight"
    assert next(s for s in index["series"] if s["key"] == "credit:datc.weight")["factor"]


def test_where_the_page_goes(run: Any, path: Path):
    assert run(path)[0] == 0
    assert rows(path.with_name("rollouts.html")) == 9
    assert run(path.parent)[0] == 0  # as a run folder
    assert rows(path.with_name("view.html")) == 9
    packed = path.with_name("packed.jsonl.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert run(packed)[0] == 0
    assert rows(path.with_name("packed.html")) == 9


def test_an_existing_page_stays(run: Any, path: Path):
    page = path.with_name("rollouts.html")
    page.write_text("mine")
    code, _, err = run(path)
    assert code == 2 and "exists already; give --overwrite" in err and page.read_text() == "mine"
    assert run(path, "--overwrite", "--limit", 3)[0] == 0
    assert rows(page) == 3


def test_standard_input(run: Any, path: Path, monkeypatch: pytest.MonkeyPatch):
    class Stdin:
        buffer = io.BytesIO(path.read_bytes())

    monkeypatch.setattr(sys, "stdin", Stdin())
    code, _, err = run("-")
    assert code == 2 and "name the page by -o" in err
    assert run("-", "-o", path.with_name("in.html"))[0] == 0
    assert rows(path.with_name("in.html")) == 9


def test_terminal(run: Any, path: Path):
    code, out, err = run(path, "--terminal", "--step", 1, "--by", "gtpo", "--against", "grpo_s")
    assert (code, err) == (0, "")
    assert out.count("#") == 3 and "gtpo advantage - grpo_s advantage" in out
    assert not path.with_name("rollouts.html").exists()
    saved(path, two_methods(9))
    code, out, _ = run(path, "--terminal")
    assert code == 0 and out.count("\n#") == 15  # at most 16, in whole groups


def test_bad_input(run: Any, path: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing.jsonl").write_text("")
    for argv, words in (
        (("nowhere.jsonl",), "nowhere.jsonl: cannot be read"),
        ((tmp_path / "empty",), "is a folder without rollouts.jsonl"),
        ((tmp_path / "nothing.jsonl",), "holds no records"),
        ((path, "--by", "entropi"), "no 'entropi' (did you mean 'entropy'?)"),
        ((path, "--against", "x"), "no 'x'"),
        ((path, "--terminal", "--by", "x"), "no 'x'"),
        ((path, "--terminal", "-o", "p.html"), "--terminal prints"),
        ((path, "--credit", "gpto"), "did you mean 'gtpo'"),
        ((path, "--credit", "datc"), "needs 'work'"),
        ((path, "--limit", "0"), "at least 1 response"),
        ((path, "--step", "77"), "no records of step 77"),
        ((path, "-o", tmp_path), "is a folder"),
        ((path, "-o", tmp_path / "no" / "page.html"), "cannot be written"),
    ):
        before = sorted(p.name for p in tmp_path.iterdir())
        code, out, err = run(*argv)
        assert (code, out) == (2, ""), argv
        assert words in err and err.count("\n") == 1, err
        assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_without_rich(run: Any, path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    code, _, err = run(path, "--terminal")
    assert code == 2 and "tokencredit[terminal]" in err
    assert run(path)[0] == 0


def test_the_records_are_never_the_page(run: Any, path: Path, tmp_path: Path):
    before = path.read_bytes()
    (tmp_path / "link.html").symlink_to(path)
    for argv in ((path, "-o", path), (tmp_path, "-o", path), (path, "-o", tmp_path / "link.html")):
        code, _, err = run(*argv, "--overwrite")
        assert code == 2 and "holds the records" in err
    assert path.read_bytes() == before


def test_odd_paths(run: Any, path: Path, tmp_path: Path):
    page = tmp_path / "p.html"
    for argv in (
        ("x" * 300,),
        (path, "-o", "x" * 300),
        (path, "-o", path / "below.html"),
        (path, "-o", "a\0b"),
        ("a\0b", "-o", page),
    ):
        code, out, err = run(*argv)
        assert (code, out) == (2, "") and err.count("\n") == 1, err
    name = tmp_path / ("n" * 245 + ".html")
    assert run(path, "-o", name)[0] == 0 and rows(name) == 9


def test_a_pipe_in_place_of_a_file(run: Any, path: Path, tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code, _, err = run(pipe)
    assert code == 2 and "name the page by -o" in err
    for argv in (("--credit", "grpo"), ()):
        writer = threading.Thread(target=lambda: pipe.write_bytes(path.read_bytes()))
        writer.start()
        assert run(pipe, "-o", tmp_path / "p.html", "--overwrite", *argv)[0] == 0
        writer.join()
        assert rows(tmp_path / "p.html") == 9


def spawned(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[bytes]:
    python = f"{sys.executable} -m tokencredit"
    source = Path(__file__).parents[2] / "src"
    return subprocess.run(
        ["bash", "-c", command.replace("TOKENCREDIT", python)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(source)} | variables,
        capture_output=True,
        timeout=120,
    )


def test_output_that_cannot_be_written(path: Path):
    saved(path, two_methods(300))
    many = "TOKENCREDIT view rollouts.jsonl --terminal --limit 900"
    done = spawned(f"{many} | head -1; echo ${{PIPESTATUS[0]}}", path.parent)
    assert done.stdout.split() == [b"rollouts.jsonl", b"0"] and done.stderr == b""
    done = spawned(f"{many} > /dev/full", path.parent)
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1, done.stderr
    assert b"No space left" in done.stderr


def test_a_terminal_that_cannot_show_everything(path: Path):
    saved(path, [dataclasses.replace(two_methods(1)[0], tokens=["é↵", "b", "c", "d", "e", "f"])])
    done = spawned(
        "TOKENCREDIT view rollouts.jsonl --terminal; TOKENCREDIT view rollouts.jsonl -o é.html",
        path.parent,
        PYTHONIOENCODING="ascii",
        PYTHONUTF8="0",
    )
    assert done.returncode == 0, done.stderr
    assert b"\\xe9" in done.stdout and (path.parent / "é.html").exists()


def test_errors_cannot_move_the_cursor(run: Any, path: Path):
    nasty = "\x1b[2J\x1b]0;pwned\x07e"
    saved(path, [dataclasses.replace(two_methods(1)[0], signals={nasty: [1.0] * 6})])
    for argv in ((path, "--by", "x"), (f"{nasty}.jsonl",)):
        code, _, err = run(*argv)
        assert code == 2 and "\\x1b[2J" in err
        assert all(c.isprintable() or c == "\n" for c in err)
