"""Where entropies come from: all sources agree with a plain forward pass and a full softmax."""

import logging
from dataclasses import dataclass

import pytest
import torch
from peft import LoraConfig
from trl_harness import Run, one_step, plain, policy, recommended, statistics

from tokencredit import GRPO, InputError, Rule, finish, grpo_advantage

OLD, FORWARD = "the old-log-probability pass", "one more forward pass"


class Independent:
    """A listener that computes log-probabilities and entropies itself, at the same moment."""

    def __init__(self, temperature):
        self.temperature = temperature
        self.trainer = None
        self.pairs = []

    def __call__(self, event):
        with torch.no_grad():
            width = event.rollouts.mask.shape[1]
            model = self.trainer.model
            found = statistics(model, event.prompt_ids, event.response_ids, width, self.temperature)
        mask = event.rollouts.mask
        for name, value in zip(("logprob", "entropy"), found, strict=True):
            self.pairs.append(
                (name, (event.rollouts.signals[name] - value)[mask].abs().max().item())
            )


def watched(temperature=0.7, more=None, **options):
    rule, fields = recommended("gtpo", alpha2=1.0)
    run = Run(rule, more=more, temperature=temperature, **(fields | options))
    independent = Independent(temperature)
    independent.trainer = run.trainer
    run.trainer.on_credit.append(independent)
    run.train()
    return run, independent.pairs


SETTINGS = {
    "forward": ({}, FORWARD),
    "iterations": ({"num_iterations": 2, "max_steps": 4}, OLD),
    "late": ({"steps_per_generation": 12, "max_steps": 4}, OLD),
    "forced": ({"num_iterations": 2, "more": {"entropy_source": "forward"}}, FORWARD),
    "asked": ({"num_iterations": 2, "more": {"entropy_source": "old_logprobs"}}, OLD),
    "twice a step": ({"steps_per_generation": 6, "gradient_accumulation_steps": 12}, FORWARD),
}


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
@pytest.mark.parametrize("setting", SETTINGS)
def test_entropies_are_the_sampling_policys(setting, temperature):
    options, source = SETTINGS[setting]
    run, pairs = watched(temperature, learning_rate=0.05, **({"max_steps": 2} | options))
    assert len(pairs) >= 2
    assert all(error < 1e-5 for _, error in pairs), pairs
    assert {event.entropy_source for event in run.events} == {source}


def test_sources_agree_and_the_temperature_matters():
    entropies = {}
    for name, options in {
        "forward": {},
        "old": {"num_iterations": 2},
        "warm": {"temperature": 1.6},
    }.items():
        entropies[name] = plain(one_step("gtpo", 4, **options).events[0])["entropy"]
    assert (entropies["forward"] - entropies["old"]).abs().max() < 1e-5
    assert (entropies["forward"] - entropies["warm"]).abs().max() > 0.1


@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_lora_the_reference_pass_is_not_taken_for_the_policys(beta, iterations):
    """With adapters TRL's reference pass runs the same model object, adapters off."""
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"])
    run, pairs = watched(
        more={"peft_config": lora},
        beta=beta,
        num_iterations=iterations,
        max_steps=4 * iterations,
        learning_rate=0.1,
    )
    assert len(pairs) == 8
    assert all(error < 1e-5 for _, error in pairs), pairs
    assert run.events[-1].entropy_source == (OLD if iterations == 2 else FORWARD)
    # The adapters do matter by then: the policy without them has other entropies.
    event = run.events[-1]
    with torch.no_grad(), run.trainer.model.disable_adapter():
        _, base = statistics(
            run.trainer.model,
            event.prompt_ids,
            event.response_ids,
            event.rollouts.mask.shape[1],
        )
    mask = event.rollouts.mask
    assert (base - event.rollouts.signals["entropy"])[mask].abs().max() > 1e-2
    if beta:
        assert "kl" in run.log[-2]


def test_a_reference_model_is_not_taken_for_the_policy(tmp_path):
    policy().save_pretrained(tmp_path)
    from trl_harness import TASK, tokenizer_for

    tokenizer_for(TASK).save_pretrained(tmp_path)
    from transformers import AutoModelForCausalLM

    for iterations in (1, 2):
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        run, pairs = watched(
            model=model,
            beta=0.04,
            num_iterations=iterations,
            max_steps=3 * iterations,
            learning_rate=0.05,
        )
        assert run.trainer.ref_model is not None and len(pairs) == 6
        assert all(error < 1e-5 for _, error in pairs), pairs


def test_forcing_a_source_that_is_not_there_is_refused():
    rule, fields = recommended("gtpo")
    run = Run(rule, more={"entropy_source": "old_logprobs"}, **fields)
    with pytest.raises(InputError, match="TRL runs no such pass"):
        run.train()


def test_an_unknown_source_is_refused():
    with pytest.raises(InputError, match="entropy_source must be auto, old_logprobs or forward"):
        Run("gtpo", more={"entropy_source": "vllm"})


def test_the_source_is_logged_once(caplog):
    rule, fields = recommended("gtpo")
    with caplog.at_level(logging.INFO, logger="tokencredit"):
        run = Run(rule, max_steps=3, **fields).train()
    assert len(run.events) == 3
    lines = [r.message for r in caplog.records if "entropies from" in r.message]
    assert lines == [f"tokencredit: token entropies from {FORWARD}"]


def test_a_rule_without_entropies_costs_no_pass():
    run = Run(GRPO(), max_steps=1).train()
    assert run.events[0].entropy_source is None and not run.events[0].rollouts.signals


def test_the_gradient_uses_no_entropy_of_the_update(monkeypatch):
    """Entropies are detached: the credit carries no graph."""
    run = one_step("gtpo", 4, num_iterations=2)
    for value in run.events[0].rollouts.signals.values():
        assert not value.requires_grad and value.dtype == torch.float32


def test_a_rule_may_need_the_log_probability_alone():
    @dataclass(frozen=True)
    class ByLogprob(Rule):
        name = "by_logprob"
        needs = ("logprob",)

        def credit(self, rollouts):
            base = grpo_advantage(rollouts)
            weight = rollouts.signals["logprob"].abs()
            return finish(rollouts, self, advantage=base.unsqueeze(1) * weight, base=base)

    run = Run(ByLogprob()).train()
    assert run.events[0].entropy_source == FORWARD
    assert run.events[0].credit.advantage.abs().max() > 0


def test_a_function_may_stand_in_for_the_entropies():
    def ones(completion_ids, **_):
        return [[1.0] * len(ids) for ids in completion_ids]

    run = Run("gtpo", more={"signals": {"entropy": ones}}).train()
    assert run.events[0].entropy_source is None
    signal = run.events[0].rollouts.signals["entropy"]
    assert bool((signal[run.events[0].rollouts.mask] == 1).all())
