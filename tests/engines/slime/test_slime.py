"""The function that slime calls: against `assign`, on one rank and on several, and its refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from slime_harness import SIZE, arguments, hook, make_batch, rank_data

from tokencredit import InputError, MissingSignalError
from tokencredit.engines import slime

BATCH = make_batch()
EVERYTHING = list(range(len(BATCH.lengths)))
PATH = "tokencredit.engines.slime."


def advantages(method: str = "gtpo", indices: list[int] = EVERYTHING, **changes):
    data = rank_data(BATCH, indices)
    hook(arguments(custom_advantage_function_path=PATH + method, **changes), data)
    return data


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "dapo", "gtpo"])
def test_the_same_numbers_as_assign(method):
    got, want = advantages(method)["advantages"], BATCH.expected(method)
    for i, one in enumerate(got):
        assert torch.allclose(one, want[i, : BATCH.lengths[i]], atol=1e-6)
    assert all(bool((one != 0).any()) for one in got[:3])
    assert not got[5].any()  # its loss mask is empty


def test_gtpo_by_hand():
    # One position, two right with entropies 3 and 1, one wrong: rewards 1.15, 1.05, -1.1
    # (1 + .1 * 2 * 3/4, 1 + .1 * 2 * 1/4, -1 - .1); mean 11/30, std of the three.
    rewards = torch.tensor([1.15, 1.05, -1.1])
    want = (rewards - rewards.mean()) / rewards.std()
    data = {
        "rewards": [1.0, 1.0, 0.0],
        "response_lengths": [1, 1, 1],
        "total_lengths": [3, 3, 3],
        "loss_masks": [torch.ones(1)] * 3,
        "sample_indices": [3, 4, 5],
        "log_probs": [torch.zeros(1)] * 3,
        "entropy": [torch.tensor([e]) for e in (3.0, 1.0, 2.0)],
    }
    hook(arguments(n_samples_per_prompt=3), data)
    assert torch.allclose(torch.cat(data["advantages"]), want, atol=1e-6)


def test_grpo_s_with_the_ratio_that_slime_has():
    options = {"ratio": "geometric"}
    got = advantages("grpo_s", advantage_estimator="gspo", tokencredit=options)["advantages"]
    want = BATCH.expected("grpo_s", **options)
    for i, one in enumerate(got):
        assert torch.allclose(one, want[i, : BATCH.lengths[i]], atol=1e-6)


def test_the_order_of_samples_does_not_matter():
    straight = advantages()["advantages"]
    order = EVERYTHING[::-1]
    for i, one in zip(order, advantages(indices=order)["advantages"], strict=True):
        assert torch.allclose(one, straight[i], atol=1e-6)


def test_options_arrive_and_bad_ones_are_named():
    got = advantages(tokencredit={"alpha2": 0.7, "entropy_range": [0.5, 2.0]})["advantages"]
    want = BATCH.expected("gtpo", alpha2=0.7, entropy_range=(0.5, 2.0))
    assert torch.allclose(got[0], want[0, : BATCH.lengths[0]], atol=1e-6)
    with pytest.raises(InputError, match=r"tokencredit\.alpa2: gtpo has no such option"):
        advantages(tokencredit={"alpa2": 0.7})
    with pytest.raises(InputError, match=r"tokencredit: .*alpha2"):
        advantages(tokencredit={"alpha2": "much"})
    with pytest.raises(InputError, match="tokencredit must hold options"):
        advantages(tokencredit=0.7)


def test_the_diagnostics_are_lists_that_slime_can_average():
    data = advantages()
    names = [name for name in data if name.startswith("credit/")]
    assert "credit/sign_flips" in names
    for name in names:
        assert len(data[name]) == len(EVERYTHING) and isinstance(data[name][0], float)


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, changes, words",
    [
        ("gtpo", {"rewards_normalization": True}, "add --disable-rewards-normalization"),
        ("grpo", {"normalize_advantages": True}, "--normalize-advantages would shift"),
        ("gtpo", {"use_critic": True}, "set --advantage-estimator grpo"),
        ("gtpo", {"n_samples_per_prompt": 1}, "--n-samples-per-prompt=1: a group needs several"),
        ("gtpo", {"advantage_estimator": "gspo"}, "set --advantage-estimator grpo"),
        ("grpo_s", {}, "set ratio: geometric under tokencredit"),
        ("grpo_s", {"tokencredit": {"ratio": "geometric"}}, "set --advantage-estimator gspo"),
    ],
)  # fmt: skip
def test_arguments_that_make_it_another_method_are_refused(method, changes, words):
    with pytest.raises(InputError, match=words) as error:
        advantages(method, **changes)
    assert PATH + method in str(error.value) and "\n" not in str(error.value)


def test_a_loss_of_ones_own_is_ones_own():
    data = advantages("grpo_s", loss_type="custom_loss")
    assert len(data["advantages"]) == len(EVERYTHING)


def test_the_reuse_trap_is_named_and_the_cure():
    """One optimiser step a rollout: slime leaves out the pass that forms entropies."""
    data = rank_data(BATCH, EVERYTHING, reused=True)
    with pytest.raises(MissingSignalError, match="can_reuse_log_probs_in_loss") as error:
        hook(arguments(), data)
    assert "--get-mismatch-metrics --custom-tis-function-path " + PATH in str(error.value)
    with pytest.raises(MissingSignalError, match="add --use-rollout-entropy"):
        hook(arguments(use_rollout_entropy=False), data)
    with pytest.raises(MissingSignalError, match="--use-rollout-logprobs it runs no"):
        hook(arguments(use_rollout_logprobs=True), data)


def test_rules_that_need_no_entropies_do_without_that_pass():
    data = rank_data(BATCH, EVERYTHING, reused=True)
    hook(arguments(custom_advantage_function_path=PATH + "dapo"), data)
    want = BATCH.expected("dapo")
    assert torch.allclose(data["advantages"][0], want[0, : BATCH.lengths[0]], atol=1e-6)


@pytest.mark.parametrize("key", ["sample_indices", "rollout_ids"])
def test_several_samples_of_one_rollout_are_refused(key):
    data = rank_data(BATCH, EVERYTHING)
    data[key] = [*EVERYTHING[:-1], EVERYTHING[0]]
    with pytest.raises(InputError, match="several samples come from one rollout"):
        hook(arguments(), data)


def test_data_that_do_not_fit_are_refused():
    data = rank_data(BATCH, EVERYTHING)
    data["loss_masks"][2] = torch.ones(BATCH.lengths[2] + 1)
    with pytest.raises(InputError, match=r"sample 2 of .* tokens"):
        hook(arguments(), data)


def test_names_are_looked_up_as_slime_does():
    assert slime.gtpo.__name__ == "gtpo"
    with pytest.raises(AttributeError, match=r"no method 'gpto' \(did you mean 'gtpo'\?\)"):
        slime.gpto  # noqa: B018
    with pytest.raises(AttributeError, match="no method 'datc'"):
        slime.datc  # noqa: B018


def test_the_function_that_forces_the_pass_changes_nothing():
    loss, masks = torch.tensor([1.0, -2.0]), [torch.ones(2)]
    got = slime.keep_loss(
        arguments(), pg_loss=loss, loss_masks=masks,
        train_log_probs=[torch.zeros(2)], rollout_log_probs=[torch.ones(2)],
        total_lengths=[4], response_lengths=[2],
    )  # fmt: skip
    assert got[0] is loss and got[1] is masks and got[2] == {}


# -- several ranks -----------------------------------------------------------------------------


def ranks(*flags: str) -> str:
    script = str(Path(__file__).with_name("slime_ranks.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "4", script, *flags],
        text=True, capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_numbers_do_not_depend_on_the_split():
    """Data parallelism with groups on several ranks, context parallelism, and both."""
    assert f"in groups of {SIZE}" in ranks()


@pytest.mark.slow
def test_with_megatrons_groups_and_a_forks_functions():
    for package in ("megatron.core", "miles"):
        pytest.importorskip(package, reason=f"{package} is not installed: `make slime` has it")
    assert f"in groups of {SIZE}" in ranks("--megatron")
