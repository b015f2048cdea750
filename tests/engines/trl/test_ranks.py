"""Two ranks (gloo, torchrun) give what one gives; groups lie on both. One launch for all cases."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import two_ranks
from trl_harness import (
    CASES,
    ROWS,
    distance,
    policy,
    reference_gradient,
    surrogate_of,
)

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
OTHERS = (
    "unequal", "tools", "unscored", "truncated", "iterations", "dapo", "refilled", "listener",
    "rewards", "evaluation",
)  # fmt: skip


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    path = tmp_path_factory.mktemp("one") / "out.pt"
    two_ranks.main(str(path))
    return torch.load(path, weights_only=False)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    path = tmp_path_factory.mktemp("two") / "out.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    done = subprocess.run(
        [*command, "2", str(HERE / "two_ranks.py"), str(path)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out = torch.load(path, weights_only=False)
    assert out["world"] == 2
    return out


@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_on_the_credit(two, case, micro_batch):
    found = two[f"{case}-{micro_batch}"]
    (told,) = found["events"]
    assert told["mask"].shape[0] == ROWS
    wanted = reference_gradient(policy(), told, surrogate_of(case))
    assert distance(found["gradients"][0], wanted) < 1e-5


@pytest.mark.parametrize(
    "name", [f"{case}-{micro_batch}" for case in CASES for micro_batch in (1, 4)] + list(OTHERS)
)
def test_one_rank_and_two_agree(one, two, name):
    first, second = one[name], two[name]
    assert len(first["gradients"]) == len(second["gradients"]) >= 1
    for a, b in zip(second["gradients"], first["gradients"], strict=True):
        assert distance(a, b) < 1e-5
    assert first["items"] == second["items"]
    assert first["shown"] == pytest.approx(second["shown"], abs=1e-5)
    for a, b in zip(first["events"], second["events"], strict=True):
        # Rows in global order, without a trace of padding or of who sampled them.
        for key in ("prompts", "responses", "prompt_ids", "response_ids", "rewards", "step"):
            assert a[key] == b[key], key
        for key in ("mask", "in_loss", "real", "truncated"):
            assert torch.equal(a[key], b[key]), key
        assert (a["advantage"] - b["advantage"]).abs().max() < 1e-5
    credit = [k for k in first["log"][0] if k.startswith("credit/")]
    assert len(credit) > 5
    for key in credit:
        assert first["log"][0][key] == pytest.approx(second["log"][0][key], abs=1e-5), key


def test_unequal_lengths_are_really_unequal(two):
    told = two["unequal"]["events"][0]
    lengths = [len(ids) for ids in told["response_ids"]]
    assert max(lengths[:12]) < max(lengths[12:])
    assert two["unequal"]["width"] < told["mask"].shape[1] == two["unequal"]["last"].shape[1]


def test_the_first_step_check_ends_every_rank(two):
    """One rank's loss is wrong; both must stop with the message, neither may wait for the other."""
    assert "no longer uses token-level advantages" in two["check"]


def test_each_credit_is_told_once(two):
    assert [e["step"] for e in two["listener"]["events"]] == [0, 1]


def test_evaluation_is_gathered_too(two):
    """Four groups of four over two batches of eight: eight rows an event, from both ranks."""
    train, *evaluations = two["evaluation"]["events"]
    assert [e["mask"].shape[0] for e in (train, *evaluations)] == [ROWS, 8, 8]


def test_a_run_in_two_halves_sees_the_prompts_of_a_whole_one(one, two):
    """Resumed inside the second epoch, where its order is not the first one's."""
    for out in (one, two):
        whole, halves = out["resumed"]["whole"], out["resumed"]["halves"]
        assert len(whole) == 6 and halves == whole
        assert whole[0:2] != whole[2:4]
    assert one["resumed"] == two["resumed"]


def test_groups_give_their_place_across_ranks(two):
    """Three groups on two ranks: the second lies on both."""
    assert any(line.get("credit/sampling_rounds", 0) > 0 for line in two["refilled"]["log"])
    for event in two["refilled"]["events"]:
        assert not {"3 + 4 =", "5 ="} & set(event["prompts"])
