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
    with pytest.raises(InputError, match=r"sample 2 of this rank: .* tokens"):
        hook(arguments(), data)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rewards", {"acc": 1.0, "format": 0.0}, "dictionary of acc, format: set --reward-key"),
        ("rewards", None, "its reward must be a number, got None"),
        ("sample_indices", None, "its index must be a number"),
        ("sample_indices", 2**53, "too large"),
        ("rollout_ids", "r0", "its rollout id must be a number, got 'r0'"),
        ("loss_masks", None, "sample 1 of this rank"),
        ("loss_masks", torch.ones(2, 2), "loss mask have shapes"),
        ("entropy", None, "sample 1 of this rank"),
        ("entropy", torch.ones(3, 1), "entropy and loss mask have shapes"),
    ],
)
def test_odd_data_are_one_line_that_names_the_sample(key, value, words):
    data = rank_data(BATCH, EVERYTHING)
    data[key] = [value if i == 1 else one for i, one in enumerate(data[key])]
    with pytest.raises(InputError, match=words) as error:
        hook(arguments(), data)
    assert "\n" not in str(error.value) and "sample 1 of this rank" in str(error.value)


@pytest.mark.parametrize("key", ["rewards", "loss_masks", "entropy", "sample_indices"])
def test_lists_of_another_length_are_refused(key):
    data = rank_data(BATCH, EVERYTHING)
    data[key] = [*data[key], data[key][0]]
    with pytest.raises(InputError, match=f"20 samples, and {key} has 21"):
        hook(arguments(), data)


def test_samples_that_another_group_size_has_numbered_are_refused():
    """A resume with another --n-samples-per-prompt: groups would mix prompts."""
    data = rank_data(BATCH, EVERYTHING)
    data["sample_indices"] = data["rollout_ids"] = [i + 2 for i in EVERYTHING]
    with pytest.raises(InputError, match="different prompts fall into one group"):
        hook(arguments(), data)
    hook(arguments(), rank_data(BATCH, EVERYTHING[:-2]))  # a group may have lost samples
    data = rank_data(BATCH, EVERYTHING)
    data["tokens"] = [tokens + i for i, tokens in enumerate(data["tokens"])]
    hook(arguments(), data)  # and whole groups prompts that differ, such as examples drawn anew


def test_a_rule_of_ones_own_that_reads_entropies_without_needing_them(monkeypatch):
    from dataclasses import dataclass

    from tokencredit import GRPO, register
    from tokencredit.methods import registry

    seen = []

    @dataclass(frozen=True)
    class Reads(GRPO):
        name = "reads_entropy_in_slime"
        reads = ("entropy",)

        def credit(self, rollouts):
            seen.append(sorted(rollouts.signals))
            return super().credit(rollouts)

    register(Reads)
    try:
        for reused in (False, True):
            data = rank_data(BATCH, EVERYTHING, reused=reused)
            hook(arguments(custom_advantage_function_path=PATH + Reads.name), data)
    finally:
        registry._METHODS.pop(Reads.name)
    assert seen == [["entropy"], []]


def test_advantages_and_returns_are_tensors_of_their_own():
    data = advantages()
    data["advantages"][0].zero_()
    assert data["returns"][0].any()


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
