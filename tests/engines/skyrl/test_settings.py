"""What a configuration says, what a rule needs of it, what stands in the way: without SkyRL."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tokencredit import GTPO, InputError
from tokencredit.engines.skyrl import (
    Setting,
    needed_overrides,
    obstacles,
    recommended_overrides,
    setting_of,
)
from tokencredit.engines.skyrl.settings import estimator_names, notes


def config(
    estimator: str = "tokencredit_gtpo",
    strategy: str = "fsdp",
    n: int = 8,
    step_wise: bool = False,
    **algorithm: Any,
) -> Any:
    defaults = {
        "advantage_estimator": estimator,
        "tokencredit": {},
        "policy_loss_type": "regular",
        "advantage_batch_normalize": False,
        "use_kl_in_reward": False,
        "grpo_norm_by_std": True,
    }
    return SimpleNamespace(
        trainer=SimpleNamespace(
            algorithm=SimpleNamespace(**(defaults | algorithm)), strategy=strategy
        ),
        generator=SimpleNamespace(n_samples_per_prompt=n, step_wise_trajectories=step_wise),
    )


def found(cfg: Any) -> list[str]:
    setting = setting_of(cfg.trainer.algorithm)
    assert setting is not None
    return obstacles(cfg, setting)


def test_skyrls_own_names_stay_skyrls():
    names = estimator_names()
    assert names["tokencredit_grpo"] == "grpo" and "grpo" not in names
    assert names["gtpo"] == names["tokencredit_gtpo"] == "gtpo"
    assert not any(name.startswith("datc") for name in names)
    assert setting_of(SimpleNamespace(advantage_estimator="grpo")) is None


def test_options_arrive_and_bad_ones_are_named():
    algorithm = config(tokencredit={"alpha2": "0.2"}).trainer.algorithm
    assert setting_of(algorithm) == Setting("tokencredit_gtpo", GTPO(alpha2=0.2))
    with pytest.raises(InputError, match=r"trainer\.algorithm\.tokencredit\.alpa2"):
        setting_of(config(tokencredit={"alpa2": 0.2}).trainer.algorithm)
    with pytest.raises(InputError, match=r"trainer\.algorithm\.tokencredit: .*alpha2"):
        setting_of(config(tokencredit={"alpha2": "much"}).trainer.algorithm)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"policy_loss_type": "gspo"}, "set trainer.algorithm.policy_loss_type=regular"),
        ({"policy_loss_type": "tokencredit_tokn"}, "did you mean 'tokencredit_token'"),
        ({"policy_loss_type": "dppo"}, "leaves out with this loss"),
        ({"policy_loss_type": "rollout_is"}, "leaves out with this loss"),
        ({"policy_loss_type": "cross_entropy"}, "reads no advantages; set"),
        ({"strategy": "megatron"}, "set trainer.strategy=fsdp"),
        ({"step_wise": True}, "set it to false, or use SkyRL's own grpo"),
        ({"advantage_batch_normalize": True}, "set it to false"),
        ({"n": 1}, "generator.n_samples_per_prompt=1: a group needs several"),
        ({"estimator": "grpo_s"}, "policy_loss_type=tokencredit_sequence_arithmetic"),
    ],
)
def test_what_stands_in_the_way(changes, words):
    lines = found(config(**changes))
    assert len(lines) == 1 and words in lines[0] and "\n" not in lines[0]


@pytest.mark.parametrize(
    "cfg",
    [
        config(),
        config("gtpo", policy_loss_type="tokencredit_token"),
        config("grpo_s", policy_loss_type="tokencredit_sequence_arithmetic"),
        config("grpo_s", policy_loss_type="gspo", tokencredit={"ratio": "geometric"}),
        # No entropies, no such needs.
        config("tokencredit_grpo", strategy="megatron"),
        config("dr_grpo", policy_loss_type="dppo"),
    ],
)
def test_what_does_not(cfg):
    assert found(cfg) == []


def test_what_is_needed_and_recommended():
    grpo_s = setting_of(config("tokencredit_grpo_s").trainer.algorithm)
    assert grpo_s is not None
    assert needed_overrides(grpo_s) == [
        "trainer.algorithm.advantage_estimator=tokencredit_grpo_s",
        "trainer.algorithm.policy_loss_type=tokencredit_sequence_arithmetic",
    ]
    dapo = setting_of(config("dapo").trainer.algorithm)
    assert dapo is not None
    lines = recommended_overrides(dapo)
    assert "trainer.algorithm.eps_clip_high=0.28" in lines
    assert "trainer.algorithm.dynamic_sampling.type=filter" in lines
    assert "generator.apply_overlong_filtering=true" in lines


def test_what_has_no_effect_is_noted():
    def noted(cfg: Any) -> list[str]:
        return notes(cfg, setting_of(cfg.trainer.algorithm))

    assert noted(config()) == [] == noted(config("grpo", tokencredit=None))
    (line,) = noted(config(use_kl_in_reward=True))
    assert "penalty does nothing; trainer.algorithm.use_kl_loss=true" in line
    assert noted(config("dapo", use_kl_in_reward=True)) == []
    (line,) = noted(config("tokencredit_grpo", grpo_norm_by_std=False))
    assert "tokencredit_dr_grpo does not divide" in line
    (line,) = noted(config("grpo", tokencredit={"alpha2": 5}))
    assert "advantage_estimator=grpo is not tokencredit's" in line
    assert "tokencredit_grpo" in line


def test_names_with_our_prefix_exist_or_are_refused():
    for name, words in (
        ("tokencredit_gtop", "did you mean 'gtpo'"),
        ("tokencredit_datc", "datc needs work, which SkyRL does not give"),
        ("tokencredit_mine", "once its module is imported"),
    ):
        with pytest.raises(InputError, match=words):
            setting_of(config(name).trainer.algorithm)


def test_dr_grpos_budget_is_among_what_is_recommended():
    setting = setting_of(config("dr_grpo").trainer.algorithm)
    assert setting is not None
    assert any("max_seq_len=" in line for line in recommended_overrides(setting))
