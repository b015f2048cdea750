"""What is set, what is recommended, and what is refused with a way out."""

import logging
from dataclasses import dataclass

import pytest
import torch
import trl
from trl import GRPOTrainer
from trl_harness import CASES, TASK, Run, config, dataset, parity, policy, recommended

from tokencredit import DAPO, GRPO, GRPO_S, GTPO, InputError, Recipe, Rule, Surrogate, finish
from tokencredit.engines.trl import CreditGRPOTrainer, TokenCreditMixin, apply_requirements
from tokencredit.engines.trl.guards import check_trainer, check_versions, recommended_config
from tokencredit.lab import tokenizer_for


def test_a_sequence_ratio_averages_token_credit_away_and_is_refused():
    with pytest.raises(InputError, match=r"gtpo: importance_sampling_level must be 'token'.*away"):
        Run(GTPO(), importance_sampling_level="sequence")


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo"])
def test_response_level_rules_leave_the_ratio_to_the_user(name):
    run = Run(name, importance_sampling_level="sequence").train()
    assert run.trainer.importance_sampling_level == "sequence"


@pytest.mark.parametrize("ratio", ["arithmetic", "geometric"])
def test_grpo_s_sets_the_sequence_level_and_says_so(caplog, ratio):
    with caplog.at_level(logging.INFO, logger="tokencredit"):
        run = Run(GRPO_S(ratio=ratio))
    assert run.trainer.importance_sampling_level == "sequence"
    assert run.trainer.args.importance_sampling_level == "sequence"
    lines = [r.message for r in caplog.records]
    assert lines == ["tokencredit: importance_sampling_level=sequence (required by grpo_s)"]


def test_explicit_settings_are_refused_not_changed():
    args = config()
    with pytest.raises(InputError, match="grpo_s: importance_sampling_level must be 'sequence'"):
        apply_requirements(args, GRPO_S(), explicit={"importance_sampling_level"})
    assert args.importance_sampling_level == "token"
    assert apply_requirements(args, GRPO_S()) and args.importance_sampling_level == "sequence"
    assert apply_requirements(args, GRPO_S()) == []
    assert apply_requirements(config(), GTPO(), explicit={"importance_sampling_level"}) == []


REFUSED = {
    "beta": {"beta": 0.04},
    "cispo": {"loss_type": "cispo"},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "top_entropy_quantile": {"top_entropy_quantile": 0.2},
    "off_policy_mask_threshold": {"off_policy_mask_threshold": 0.5},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_compose_with_the_arithmetic_ratio(name):
    args = config(**REFUSED[name])
    with pytest.raises(InputError, match=rf"{name}.*GRPO_S\(ratio='geometric'\)"):
        apply_requirements(args, GRPO_S())
    apply_requirements(config(**REFUSED[name]), GRPO_S(ratio="geometric"))
    with pytest.raises(InputError, match=name):
        apply_requirements(config(importance_sampling_level="sequence", **REFUSED[name]), GRPO_S())


def test_a_rule_that_wants_gspo_token_is_refused():
    @dataclass(frozen=True)
    class Other(Rule):
        name = "other"

        def credit(self, rollouts):
            return finish(rollouts, self, advantage=rollouts.rewards, base=rollouts.rewards)

        @property
        def recipe(self):
            return Recipe(Surrogate(ratio="gspo_token"))

    with pytest.raises(InputError, match="TRL has no gspo_token ratio"):
        apply_requirements(config(), Other())


@pytest.mark.parametrize("found", ["0.24.0", "1.0.0", "1.13.0"])
def test_old_releases_are_refused(monkeypatch, found):
    monkeypatch.setattr(trl, "__version__", found)
    with pytest.raises(InputError, match=rf"needs trl>=1.14, found {found}: pip install"):
        Run(GTPO())


def test_1_15_0_is_refused_without_a_gpu(monkeypatch):
    monkeypatch.setattr(trl, "__version__", "1.15.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"trl 1.15.0 cannot run GRPO without a GPU"):
        check_versions()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_versions()
    for good in ("1.14.0", "1.14.2", "1.15.1", "1.16.0", "2.0.0"):
        monkeypatch.setattr(trl, "__version__", good)
        check_versions()


def test_trainers_with_a_loss_of_their_own_are_refused():
    class GMPOTrainer(GRPOTrainer):
        pass

    class Mixed(TokenCreditMixin, GMPOTrainer):
        pass

    class UnslothGRPOTrainer(GRPOTrainer):
        pass

    class Fast(TokenCreditMixin, UnslothGRPOTrainer):
        pass

    with pytest.raises(InputError, match="GMPOTrainer has a loss of its own"):
        Run("gtpo", trainer=Mixed, more={"credit": "gtpo"})
    with pytest.raises(InputError, match="import trl without unsloth"):
        Run("gtpo", trainer=Fast, more={"credit": "gtpo"})
    check_trainer(object.__new__(CreditGRPOTrainer))


def test_trls_own_gmpo_is_the_class_that_is_meant():
    from trl.experimental.gmpo import GMPOTrainer

    class Mixed(TokenCreditMixin, GMPOTrainer):
        pass

    with pytest.raises(InputError, match="GMPOTrainer"):
        check_trainer(object.__new__(Mixed))


def test_a_mixin_over_a_subclass_runs():
    class Mine(GRPOTrainer):
        pass

    class Mixed(TokenCreditMixin, Mine):
        pass

    run = Run("gtpo", trainer=Mixed, more={"credit": "gtpo"}, loss_type="dapo").train()
    assert run.trainer.last_credit is not None


def test_unknown_names_are_refused_before_a_model_is_touched():
    with pytest.raises(InputError, match=r"unknown method 'gpto' \(did you mean 'gtpo'\?\)"):
        Run("gpto")
    with pytest.raises(InputError, match="must be a method's name or a rule object"):
        Run(0.5)


def test_recommendations():
    found = recommended_config(GTPO())
    assert (found["loss_type"], found["epsilon"], found["beta"]) == ("dapo", 0.2, 0.0)
    assert found.get("epsilon_high", 0.2) == 0.2
    assert recommended_config(DAPO())["epsilon_high"] == 0.28
    assert recommended_config(DAPO())["mask_truncated_completions"] is True
    assert recommended_config(GRPO())["loss_type"] == "grpo"
    for name, options in CASES.values():
        rule, fields = recommended(name, **options)
        assert apply_requirements(config(**fields), rule) is not None


@pytest.mark.parametrize("loss_type", ["vespo", "luspo"])
def test_losses_of_one_advantage_a_response_are_warned_of(caplog, loss_type):
    apply_requirements(config(loss_type=loss_type), GTPO())
    assert "meant for one advantage a response" in caplog.text
    caplog.clear()
    apply_requirements(config(loss_type=loss_type), GRPO())
    assert not caplog.text


def test_the_off_policy_mask_is_warned_of(caplog):
    apply_requirements(config(off_policy_mask_threshold=0.5), GTPO())
    assert "off_policy_mask_threshold masks the negative tokens" in caplog.text


def test_the_users_configuration_stays_as_it_is():
    """The same one may be given to another trainer, where the rule's requirements mean nothing."""
    args = config()
    shared = {"model": policy(), "reward_funcs": parity, "train_dataset": dataset(), "args": args}
    shared["processing_class"] = tokenizer_for(TASK)
    trainer = CreditGRPOTrainer(**shared, credit=GRPO_S())
    assert trainer.importance_sampling_level == trainer.args.importance_sampling_level == "sequence"
    assert args.importance_sampling_level == "token"
    assert GRPOTrainer(**shared).importance_sampling_level == "token"
    assert CreditGRPOTrainer(**shared, credit=GTPO()).args is args
