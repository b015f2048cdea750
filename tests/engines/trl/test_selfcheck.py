"""The check of the first loss: it fires when TRL changes, and leaves no trace when it passes."""

import pytest
import torch
import trl
from trl import GRPOTrainer
from trl_harness import Run, dataset, one_step, recommended, same_log, same_tensors

from tokencredit.engines.trl import CreditGRPOTrainer

REAL = GRPOTrainer._compute_loss


def averaged(self, model, inputs):
    """Token-level advantages averaged over the tokens."""
    a = inputs["advantages"]
    return REAL(self, model, inputs | {"advantages": a if a.dim() == 1 else a.mean(dim=1)})


def unsqueezed(self, model, inputs):
    """TRL up to 0.25: the advantages broadcast to ``[b, b, t]``."""
    a = inputs["advantages"]
    return REAL(self, model, inputs | {"advantages": a if a.dim() == 1 else a.unsqueeze(1)})


def mixed_rows(self, model, inputs):
    """``[b, b, t]`` after a mean: right in scale, one row's advantage in all rows' loss."""
    a = inputs["advantages"]
    return REAL(self, model, inputs | {"advantages": a if a.dim() == 1 else a.mean(0, True)})


def first_token(self, model, inputs):
    """One advantage a row: the first token's."""
    a = inputs["advantages"]
    return REAL(self, model, inputs | {"advantages": a if a.dim() == 1 else a[:, 1]})


def doubled(self, model, inputs):
    a = inputs["advantages"]
    return REAL(self, model, inputs | {"advantages": a if a.dim() == 1 else 2 * a})


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("broken", [averaged, unsqueezed, mixed_rows, first_token, doubled])
def test_it_fires(monkeypatch, broken, loss_type):
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", broken)
    with pytest.raises(RuntimeError, match=rf"TRL {trl.__version__} no longer .*{loss_type}"):
        one_step("gtpo", 4, loss_type=loss_type)


@pytest.mark.parametrize("case", ["grpo_s", "grpo"])
@pytest.mark.parametrize("broken", [unsqueezed, mixed_rows, doubled])
def test_it_fires_for_response_level_rules(monkeypatch, case, broken):
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", broken)
    with pytest.raises(RuntimeError, match="no longer uses"):
        one_step(case, 4)


def test_it_fires_where_all_advantages_have_one_sign(monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", mixed_rows)

    class OneSign(CreditGRPOTrainer):
        def _prepare_inputs(self, generation_batch):
            batch = super()._prepare_inputs(generation_batch)
            batch["advantages"] = batch["advantages"].abs() + batch["completion_mask"]
            return batch

    rule, fields = recommended("grpo")
    with pytest.raises(RuntimeError, match="no longer uses"):
        Run(rule, trainer=OneSign, **fields).train()


def test_a_micro_batch_that_is_all_masked_is_not_taken_as_checked(monkeypatch):
    """DAPO drops whole groups: the check waits for a micro-batch in which something is left."""
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", averaged)
    rule, fields = recommended("dapo")
    seen = []

    class MaskedFirst(CreditGRPOTrainer):
        def _prepare_inputs(self, generation_batch):
            batch = super()._prepare_inputs(generation_batch)
            if not seen:
                batch["completion_mask"].zero_()
            seen.append(self._loss_checked)
            return batch

    with pytest.raises(RuntimeError, match="no longer uses"):
        Run(rule, trainer=MaskedFirst, **fields).train()
    # What is left of a dropped row has nothing to say either, so this may take a few.
    assert len(seen) >= 2 and not any(seen)


OPTIONS = {
    "plain": {},
    "entropy": {
        "use_adaptive_entropy": True,
        "entropy_coef": 0.01,
        "entropy_target": 10.0,
        "top_entropy_quantile": 0.5,
    },
    "evaluated": {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True},
}


@pytest.mark.parametrize("setting", OPTIONS)
def test_it_leaves_no_trace(setting):
    rule, fields = recommended("gtpo", alpha2=1.0)
    runs, states = [], []
    for checked in (False, True):
        torch.manual_seed(3)
        options = fields | OPTIONS[setting]
        more = {}
        if "eval_strategy" in options:
            more = {"eval_dataset": dataset(2)}
            options |= {"per_device_eval_batch_size": 8}
        run = Run(rule, rollout=None, max_steps=2, more=more, **options)
        run.trainer._loss_checked = not checked
        run.train()
        runs.append(run)
        states.append(torch.get_rng_state())
    without, with_check = runs
    assert with_check.trainer._loss_checked and with_check.trainer._loss_pass is None
    assert same_log(without.log, with_check.log)
    assert torch.equal(*states)
    for a, b in zip(without.keep.gradients, with_check.keep.gradients, strict=True):
        assert same_tensors(a, b)
    for name in ("entropy_coef", "_last_world_entropy", "_entropy_window_stats"):
        assert getattr(without.trainer, name, None) == getattr(with_check.trainer, name, None)
    if setting == "entropy":
        assert with_check.trainer.entropy_coef != 0.01  # the controller did act
