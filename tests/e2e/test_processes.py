"""The command as users start it: in processes of its own, killed, piped, on several ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from tiny_runs import TINY_LAB, Place, environment, same_history, steps

from tokencredit.errors import InputError
from tokencredit.records import read_records

OFFLINE = """
import socket

def refuse(self, address, *rest):
    if self.family in (socket.AF_INET, socket.AF_INET6):
        with open("connections", "a") as file:
            print(address, file=file)
        raise OSError("no network here")

socket.socket.connect = refuse
socket.socket.connect_ex = refuse
_lookup = socket.getaddrinfo

def getaddrinfo(host, *rest, **more):
    with open("connections", "a") as file:
        print(host, file=file)
    return _lookup(host, *rest, **more)

socket.getaddrinfo = getaddrinfo
"""
LAB_RUN = ("train", *TINY_LAB, "--max_steps=8", "--save_steps=2", "--record_every=1")


def start(place: Place, *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tokencredit", *argv],
        cwd=place.path,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def shell(place: Place, command: str) -> subprocess.CompletedProcess[str]:
    python = f"{sys.executable} -m tokencredit"
    return subprocess.run(
        ["bash", "-c", command.replace("TOKENCREDIT", python)],
        cwd=place.path,
        env=environment(),
        text=True,
        capture_output=True,
        timeout=120,
    )


def launch(place: Place, *argv: str, module: str = "torch.distributed.run") -> tuple[int, str]:
    process = subprocess.Popen(
        [sys.executable, "-m", module, *argv],
        cwd=place.path,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=100)
    finally:
        if process.poll() is None:  # with every process that it launched
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, text


def ours(text: str) -> list[str]:
    return [line for line in text.splitlines() if "tokencredit" in line and ": " in line
            and line.lstrip("[rank01]: ").startswith("tokencredit")]  # fmt: skip


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error(place: Place):
    done = shell(place, "TOKENCREDIT methods | true; echo ${PIPESTATUS[0]}; ")
    assert (done.stdout.strip(), done.stderr) == ("0", "")
    done = shell(place, "TOKENCREDIT train --help | head -1; echo ${PIPESTATUS[0]}")
    assert done.stdout.splitlines()[-1] == "0" and done.stderr == ""


@pytest.mark.slow
def test_training_whose_output_is_closed_says_so(place: Place):
    place.config()
    done = shell(place, "TOKENCREDIT train --config run.yaml | true; echo ${PIPESTATUS[0]}")
    assert done.stdout.strip() == "141"
    assert done.stderr.strip() == "tokencredit: stopped, as nobody reads its output any more"


@pytest.mark.slow
def test_a_killed_lab_run_ends_like_an_undisturbed_one(place: Place):
    (place.path / "offline").mkdir()
    place.write("offline/sitecustomize.py", OFFLINE)
    command = [sys.executable, "-m", "tokencredit", *LAB_RUN, "--output_dir=undisturbed"]
    variables = environment()
    del variables["HF_HUB_OFFLINE"]
    variables["PYTHONPATH"] = f"{place.path / 'offline'}{os.pathsep}{variables['PYTHONPATH']}"
    subprocess.run(command, cwd=place.path, env=variables, check=True, capture_output=True)
    assert not (place.path / "connections").exists(), (place.path / "connections").read_text()

    for number, stop in enumerate((signal.SIGKILL, signal.SIGINT)):
        name = f"stopped{number}"
        metrics = place.path / name / "metrics.jsonl"
        process = start(place, *LAB_RUN, f"--output_dir={name}")
        deadline = time.monotonic() + 100
        while not (metrics.exists() and len(metrics.read_bytes().splitlines()) >= 4 + number):
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(stop)
        _, err = process.communicate(timeout=60)
        assert process.returncode == (-9 if stop == signal.SIGKILL else 130)
        if stop == signal.SIGINT:
            assert "Traceback" not in err and "--resume --output_dir" in err
        before = (place.path / name / "evaluation.json").read_text()
        outcome = place.run("train", "--resume", "--output_dir", name)
        assert outcome.code == 0, outcome.err
        assert before.rstrip("}\n") in (place.path / name / "evaluation.json").read_text()
        assert steps(metrics) == list(range(1, 9))
        same_history(place.path / "undisturbed", place.path / name)
        both = [(place.path / f / "rollouts.jsonl").read_bytes() for f in ("undisturbed", name)]
        assert both[0] == both[1]


@pytest.mark.slow
def test_two_ranks_make_one_run(place: Place):
    lab = [a.replace("=16", "=8") if "batch" in a else a for a in TINY_LAB]
    argv = ("--standalone", "--nproc_per_node=2", "-m", "tokencredit", "train", *lab,
            "--max_steps=4", "--save_steps=2", "--record_every=1", "--output_dir=out")  # fmt: skip
    code, text = launch(place, *argv)
    assert code == 0, text
    assert text.count("held-out accuracy before") == text.count("; report ") == 1
    out = place.path / "out"
    assert steps(out / "metrics.jsonl") == [1, 2, 3, 4]
    recorded = list(read_records(out / "rollouts.jsonl"))
    # Two ranks of 8 responses, groups of 8: the second rank's are there too.
    assert [r.step for r in recorded] == [step for step in range(4) for _ in range(16)]
    assert len(list((out / "checkpoint-4").glob("rng_state_*.pth"))) == 2
    assert len(list(out.glob("report.md"))) == 1 and not list(out.glob("error*"))
    for path in (*out.glob("checkpoint-4/*"), out / "report.md"):
        path.unlink()
    code, text = launch(place, *argv, "--resume")
    assert code == 0, text
    assert "going on from checkpoint-2" in text
    assert steps(out / "metrics.jsonl") == [1, 2, 3, 4]
    assert recorded == list(read_records(out / "rollouts.jsonl"))


@pytest.mark.slow
def test_an_input_error_on_one_rank_ends_all_with_a_clear_line(place: Place):
    place.write(
        "bad_here.py",
        "import os\ndef f(completions, **_):\n    assert os.environ['RANK'] != '1', 'only there'\n"
        "    return [1.0, 0.0]\n",
    )
    path = place.config(reward_funcs=["bad_here.f"], per_device_train_batch_size=2, credit="gtpo")
    begin = time.monotonic()
    code, text = launch(
        place, "--standalone", "--nproc_per_node=2", "-m", "tokencredit", "train", "--config", path
    )
    assert code != 0 and time.monotonic() - begin < 90
    lines = ours(text)
    said = "tokencredit (rank 1): reward function 'f' raised AssertionError: only there"
    assert any(said in line for line in lines), text
    assert "fault" not in " ".join(lines)
    # The one of torchrun itself, which says which process failed.
    assert text.count("Traceback (most recent") == 1, text
    assert not (place.path / "out").exists()


def test_several_ranks_need_a_folder_by_name(place: Place, monkeypatch: pytest.MonkeyPatch):
    from tokencredit.engines.trl.arguments import parse_train_arguments
    from tokencredit.engines.trl.training import _folder_of

    arguments = parse_train_arguments(["--config", place.config(output_dir=...)])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="--output_dir"):
        _folder_of(arguments)


@pytest.mark.slow
def test_accelerate_launches_it(place: Place):
    code, text = launch(
        place, "launch", "--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=no",
        "--dynamo_backend=no", "-m", "tokencredit", "train", "--config", place.config(),
        module="accelerate.commands.accelerate_cli",
    )  # fmt: skip
    assert code == 0, text
    assert steps(place.path / "out/metrics.jsonl") == [1, 2]


@pytest.mark.slow
def test_trl_s_own_command_runs_the_same_yaml_to_the_same_weights(place: Place):
    mixture = [{"path": "json", "data_files": "prompts.jsonl"}]
    path = place.config(dataset_name=..., datasets=mixture, max_steps=3, output_dir="trl")
    code, text = launch(place, "--config", path, module="trl.scripts.grpo")
    assert code == 0, text
    outcome = place.run("train", "--config", path, "--output_dir", "ours")
    assert outcome.code == 0, outcome.err
    weights = [(place.path / f / "model.safetensors").read_bytes() for f in ("trl", "ours")]
    assert weights[0] == weights[1]


def test_the_module_is_the_command(place: Place):
    outcome = place.spawn("methods", "gtop")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("tokencredit: methods: unknown method 'gtop'")
    assert outcome.err.count("\n") == 1
    assert place.spawn("--version").code == 0


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("TOKENCREDIT assign - --credit grpo -o out.jsonl <&-", 2, "standard input is closed"),
        ("TOKENCREDIT methods gtpo >&-", 0, ""),
        ("TOKENCREDIT methods gtop >&-", 2, "unknown method"),
    ],
)
def test_streams_that_are_closed_from_the_start(place: Place, command: str, code: int, words: str):
    done = shell(place, command)
    assert done.returncode == code and words in done.stderr
    assert "Traceback" not in done.stderr
