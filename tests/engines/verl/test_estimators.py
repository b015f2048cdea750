"""The estimators in verl's real `compute_advantage`, against `assign` on the same rollouts."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: `make verl` makes its environment")

from verl.trainer.ppo import core_algos
from verl_harness import (
    LENGTHS,
    SCORES,
    UIDS,
    advantages,
    algorithm,
    at_the_end,
    batch,
    entropies,
    mask_of,
)

from tokencredit import InputError, MissingSignalError, Rollouts, assign
from tokencredit.engines.verl.estimators import Beside, register_estimators

METHODS = ["grpo", "dr_grpo", "dapo", "gtpo", "grpo_s"]
MASK = mask_of(LENGTHS)


def expected(method: str, entropy: torch.Tensor, **options) -> torch.Tensor:
    rollouts = Rollouts(torch.tensor(SCORES), UIDS, MASK, entropy=entropy)
    return assign(rollouts, method, **options).advantage


def test_verl_loads_the_plugin_by_itself():
    code = (
        "import verl, sys; from verl.trainer.ppo import core_algos as c; "
        "assert 'tokencredit.engines.verl.plugin' in sys.modules; "
        "c.get_adv_estimator_fn('tokencredit_gtpo'); c.get_adv_estimator_fn('grpo_s'); "
        "c.get_policy_loss_fn('tokencredit_sequence_arithmetic')"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=300)


def test_verls_own_names_stay_verls():
    assert core_algos.get_adv_estimator_fn("grpo") is core_algos.compute_grpo_outcome_advantage
    assert register_estimators() == register_estimators()
    assert "grpo" not in register_estimators()


@pytest.mark.parametrize("name", [*(f"tokencredit_{m}" for m in METHODS), *METHODS[1:]])
def test_the_same_numbers_as_assign(name):
    entropy = entropies()
    got = advantages(batch(), name, beside=Beside(entropy=entropy))
    want = expected(name.removeprefix("tokencredit_"), entropy)
    assert torch.allclose(got, want, atol=1e-6)
    assert bool((got[MASK == 0] == 0).all()) and bool((got != 0).any())


def test_grpo_is_verls_grpo():
    # verl adds 1e-6 to the standard deviation, so the fifth digit is the last that agrees.
    ours = advantages(batch(), "tokencredit_grpo")
    assert torch.allclose(ours, advantages(batch(), "grpo"), atol=1e-5)


def test_gtpo_by_hand():
    # One position, two right with entropies 3 and 1, one wrong: rewards 1.15, 1.05, -1.1
    # (1 + .1 * 2 * 3/4, 1 + .1 * 2 * 1/4, -1 - .1); mean 11/30, std of the three.
    rewards = torch.tensor([1.15, 1.05, -1.1])
    want = (rewards - rewards.mean()) / rewards.std()
    data = batch([1.0, 1.0, 0.0], ["p"] * 3, [1, 1, 1])
    entropy = torch.tensor([[3.0], [1.0], [2.0]]).expand(3, 4)
    got = advantages(data, "tokencredit_gtpo", beside=Beside(entropy=entropy))
    assert torch.allclose(got[:, 0], want, atol=1e-6)
    assert not got[:, 1:].any()


@pytest.mark.parametrize("method", METHODS)
def test_padding_rows_are_inert(method):
    """verl's: an all-zero mask, reward 0, one uid for all of them."""
    entropy = entropies()
    alone = advantages(batch(), f"tokencredit_{method}", beside=Beside(entropy=entropy))
    padded = batch(SCORES + [0.0] * 3, UIDS + ["pad0"] * 3, LENGTHS + [0] * 3)
    more = torch.cat([entropy, torch.full((3, 4), float("nan"))])
    got = advantages(padded, f"tokencredit_{method}", beside=Beside(entropy=more))
    assert torch.equal(got[:8], alone) and not got[8:].any()


@pytest.mark.parametrize("method", METHODS)
def test_rows_keep_their_order(method):
    entropy, order = entropies(), [5, 2, 7, 0, 3, 6, 1, 4]
    straight = advantages(batch(), f"tokencredit_{method}", beside=Beside(entropy=entropy))
    shuffled = batch([SCORES[i] for i in order], [UIDS[i] for i in order],
                     [LENGTHS[i] for i in order])  # fmt: skip
    got = advantages(shuffled, f"tokencredit_{method}", beside=Beside(entropy=entropy[order]))
    assert torch.allclose(got, straight[order], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_dtype_is_the_rewards_and_entropies_are_read_in_float32(dtype):
    entropy = entropies().to(torch.bfloat16)
    data = batch([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.25, 0.0], dtype=dtype)
    got = advantages(data, "tokencredit_gtpo", beside=Beside(entropy=entropy))
    assert got.dtype == dtype
    want = expected("gtpo", entropy.float()).to(dtype)
    assert torch.allclose(got, want, atol=1e-6 if dtype != torch.bfloat16 else 1e-2)


def test_options_arrive_and_bad_ones_are_named():
    entropy = entropies()
    got = advantages(
        batch(), "tokencredit_gtpo", algorithm(alpha2=0.7, entropy_range=[0.5, 2.0]),
        Beside(entropy=entropy),
    )  # fmt: skip
    want = expected("gtpo", entropy, alpha2=0.7, entropy_range=(0.5, 2.0))
    assert torch.allclose(got, want, atol=1e-6)
    with pytest.raises(InputError, match=r"algorithm\.tokencredit\.alpa2"):
        advantages(batch(), "tokencredit_gtpo", algorithm(alpa2=0.7), Beside(entropy=entropy))


def test_missing_entropies_name_the_setting():
    for name in ("tokencredit_gtpo", "grpo_s"):
        with pytest.raises(MissingSignalError, match=r"bypass_mode=False"):
            advantages(batch(), name)


def test_success_is_a_field_of_the_reward_functions_result():
    entropy, right = entropies(), [0, 1, 1, 0, 0, 0, 1, 1]
    config = algorithm(success_from="acc")
    data = batch(acc=[bool(r) for r in right])  # the legacy trainer's place for it
    got = advantages(data, "tokencredit_gtpo", config, Beside(entropy=entropy))
    rollouts = Rollouts(
        torch.tensor(SCORES), UIDS, MASK, success=torch.tensor(right).bool(), entropy=entropy
    )
    assert torch.allclose(got, assign(rollouts, "gtpo").advantage, atol=1e-6)
    # V1's place: a mapping a row. Padding rows need not have the field.
    info = [{"acc": r} for r in right]
    got = advantages(
        batch(), "tokencredit_gtpo", config, Beside(entropy=entropy, reward_info=lambda: info)
    )
    assert torch.allclose(got, assign(rollouts, "gtpo").advantage, atol=1e-6)


def test_a_response_without_a_verdict_is_in_no_statistic():
    entropy = entropies()
    acc = [1, 0, None, 1, 1, 1, 0, 0]
    got = advantages(
        batch(acc=acc), "tokencredit_gtpo", algorithm(success_from="acc"), Beside(entropy=entropy)
    )
    rows = [0, 1, 3, 4, 5, 6, 7]
    rollouts = Rollouts(
        torch.tensor(SCORES)[rows],
        [UIDS[i] for i in rows],
        MASK[rows],
        success=[bool(acc[i]) for i in rows],
        entropy=entropy[rows],
    )
    assert torch.allclose(got[rows], assign(rollouts, "gtpo").advantage, atol=1e-6)
    assert not got[2].any()


def test_a_field_that_is_not_there_or_no_verdict_is_refused():
    beside = Beside(entropy=entropies())
    with pytest.raises(
        InputError, match=r"success_from=ac: .*did you mean 'acc'.*fields: uid, acc"
    ):
        advantages(batch(acc=[1] * 8), "gtpo", algorithm(success_from="ac"), beside)
    with pytest.raises(InputError, match=r"success_from=acc: must be true, false or a number"):
        advantages(batch(acc=["yes"] * 8), "gtpo", algorithm(success_from="acc"), beside)


def test_success_is_read_before_the_kl_penalty():
    entropy, data = entropies(), batch()
    # The penalty takes every reward below one half; the scores stay.
    data.batch["token_level_rewards"] = at_the_end([s - 0.8 for s in SCORES], MASK)
    got = advantages(data, "tokencredit_gtpo", beside=Beside(entropy=entropy))
    assert torch.allclose(got, expected("gtpo", entropy), atol=1e-6)


def test_rejected_tokens_count_in_the_statistics():
    """verl's rejection sampling shrinks the mask it passes; the taps hand on the whole one."""
    entropy, data = entropies(), batch()
    data.batch["response_mask"] = MASK * (torch.arange(4) != 1)
    got = advantages(data, "tokencredit_gtpo", beside=Beside(entropy=entropy, mask=MASK))
    assert torch.allclose(got, expected("gtpo", entropy), atol=1e-6)


def test_without_uids_there_are_no_groups():
    data = batch()
    data.non_tensor_batch.pop("uid")
    with pytest.raises(InputError, match="no uid"):
        advantages(data, "tokencredit_grpo")


def test_the_credit_is_reported():
    seen = []
    advantages(batch(), "tokencredit_gtpo", beside=Beside(entropy=entropies(), report=seen.append))
    assert seen[0].diagnostics["responses"] == 8 and seen[0].diagnostics["groups"] == 2


# -- found by trying to break it ---------------------------------------------------------------


def test_bare_names_stand_in_nobodys_way():
    """Another plugin's, or a program's, estimator of that name is registered and is used."""
    assert not {"gtpo", "dapo", "grpo_s"} & set(core_algos.ADV_ESTIMATOR_REGISTRY)
    assert register_estimators()["dapo"] == "dapo"

    def theirs(token_level_rewards, **_):
        same = token_level_rewards * 0 + 42.0
        return same, same

    core_algos.register_adv_est("dapo")(theirs)
    try:
        assert core_algos.get_adv_estimator_fn("dapo") is theirs
        assert "dapo" not in register_estimators()
        assert (advantages(batch(), "dapo") == 42.0).all()
        assert not (advantages(batch(), "tokencredit_dapo") == 42.0).any()
    finally:
        del core_algos.ADV_ESTIMATOR_REGISTRY["dapo"]
    assert register_estimators()["dapo"] == "dapo"
    with pytest.raises(ValueError, match="Unknown advantage estimator"):
        core_algos.get_adv_estimator_fn("nobodys")


def test_a_module_that_took_the_function_before_the_plugin_came():
    """A trainer of the user's, loaded by VERL_USE_EXTERNAL_MODULES: ahead of verl's plugins."""
    code = (
        "import sys, types; mine = types.ModuleType('mine'); sys.modules['mine'] = mine\n"
        "import os; os.environ['VERL_USE_EXTERNAL_PLUGINS'] = 'none'\n"
        "from verl.trainer.ppo import ray_trainer\n"
        "mine.compute_advantage = ray_trainer.compute_advantage\n"
        "import tokencredit.engines.verl.plugin\n"
        "assert mine.compute_advantage is ray_trainer.compute_advantage\n"
        "assert hasattr(mine.compute_advantage, '_tokencredit_tap')"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=300)


def test_a_penalty_in_the_reward_never_decides_success():
    """Where the score before it does not reach the estimator, that is said."""
    data = batch()
    config = algorithm()
    config.use_kl_in_reward = True
    function = core_algos.get_adv_estimator_fn("tokencredit_dapo")
    arguments = {
        "token_level_rewards": data.batch["token_level_rewards"],
        "response_mask": data.batch["response_mask"],
        "index": data.non_tensor_batch["uid"],
        "config": config,
    }
    with pytest.raises(InputError, match="did not reach the estimator"):
        function(**arguments)
    config.use_kl_in_reward = False
    assert function(**arguments)[0].shape == MASK.shape


@pytest.mark.parametrize(
    ("infos", "words"),
    [
        ([{"acc": 1}] * 3 + [{}] * 5, r"response 3 has no such field, which 3 other responses"),
        ([{"acc": [[0.0] * 3] * 3}] * 8, r"got \[\[0\.0, 0\.0.*for response 0"),
        ([{"acc": 10**400}] * 8, r"for response 0"),
    ],
)
def test_odd_results_of_reward_functions(infos, words):
    beside = Beside(entropy=entropies(), reward_info=lambda: infos)
    with pytest.raises(InputError, match=words) as error:
        advantages(batch(), "tokencredit_gtpo", algorithm(success_from="acc"), beside)
    assert "\n" not in str(error.value)
