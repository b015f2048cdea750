"""The taps on verl's trainers: its own methods run, only workers and the queue are stand-ins."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: `make verl` makes its environment")
pytest.importorskip("transfer_queue", reason="TransferQueue is not installed")

import numpy as np
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo import core_algos, ray_trainer
from verl.trainer.ppo.v1 import trainer_base
from verl.utils import tensordict_utils as tu
from verl_harness import LENGTHS, SCORES, UIDS, at_the_end, entropies, mask_of

from tokencredit import GRPO, InputError, MissingSignalError, Rollouts, assign, register
from tokencredit.engines.verl.estimators import BESIDE
from tokencredit.engines.verl.taps import ENTROPY_KEY, attach, attached
from tokencredit.methods import registry

MASK = mask_of(LENGTHS)


def config(estimator: str = "tokencredit_gtpo", bypass: bool = False, **section: Any) -> Any:
    return OmegaConf.create(
        {
            "algorithm": {
                "adv_estimator": estimator,
                "gamma": 1.0,
                "lam": 1.0,
                "use_kl_in_reward": False,
                "rollout_correction": {"bypass_mode": bypass},
                "tokencredit": section,
            },
            "actor_rollout_ref": {
                "rollout": {"n": 4},
                "actor": {"policy_loss": {"loss_mode": "vanilla"}},
                "model": {},
            },
        }
    )


def expected(entropy: torch.Tensor, success: list[bool] | None = None) -> torch.Tensor:
    rollouts = Rollouts(torch.tensor(SCORES), UIDS, MASK, success=success, entropy=entropy)
    return assign(rollouts, "gtpo").advantage


def test_both_trainers_are_tapped_once():
    assert attached() == {"legacy": True, "V1": True}
    before = trainer_base.PPOTrainer._compute_advantage, ray_trainer.compute_advantage
    assert attach() == {"legacy": "", "V1": ""}
    after = trainer_base.PPOTrainer._compute_advantage, ray_trainer.compute_advantage
    assert before == after


def test_a_name_that_v1_took_before_the_plugin_came_is_tapped_too(monkeypatch):
    from verl.trainer.ppo.v1 import utils

    monkeypatch.setattr(utils, "compute_advantage", ray_trainer.compute_advantage.__wrapped__)
    assert attached() == {"legacy": True, "V1": False}
    attach()
    assert attached() == {"legacy": True, "V1": True}


@pytest.mark.parametrize("trainer", [trainer_base.PPOTrainer, ray_trainer.RayPPOTrainer])
def test_trainers_refuse_before_anything_is_loaded(trainer):
    class Made(trainer):
        pass

    Made.__abstractmethods__ = frozenset()
    with pytest.raises(InputError, match="bypass_mode=False"):
        Made(config(bypass=True))
    with pytest.raises(InputError, match="did you mean 'alpha2'"):
        Made(config(alpa2=1.0))
    with pytest.raises(InputError, match="did you mean 'gtpo'"):
        Made(config("tokencredit_gtop"))
    misspelt = config("grpo")
    misspelt.actor_rollout_ref.actor.policy_loss.loss_mode = "tokencredit_tokn"
    with pytest.raises(InputError, match="did you mean 'tokencredit_token'"):
        Made(misspelt)
    with pytest.raises(Exception) as other:  # verl's own: the configuration here is no whole one
        Made(config("grpo", bypass=True))
    assert not isinstance(other.value, InputError)


def test_options_beside_another_estimator_are_told(caplog):
    for section, told in (({"alpha2": 0.2}, 1), ({}, 0)):
        caplog.clear()
        with pytest.raises(Exception) as other:  # verl's own, later
            trainer_base.PPOTrainer.__init__(SimpleNamespace(), config("grpo", **section))
        assert not isinstance(other.value, InputError)
        assert sum("adv_estimator=grpo is not" in r.getMessage() for r in caplog.records) == told


def test_fused_kernels_return_entropies():
    """Of verl's, in the form that needs no GPU."""
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    generator = torch.Generator().manual_seed(0)
    hidden, head = (
        torch.randn(2, 5, 8, generator=generator),
        torch.randn(50, 8, generator=generator),
    )
    _, entropy = FusedLinearForPPO()(hidden, head, torch.zeros(2, 5).long(), temperature=0.7)
    logp = (hidden.double() @ head.double().T / 0.7).log_softmax(dim=-1)
    assert torch.allclose(entropy.double(), -(logp.exp() * logp).sum(dim=-1), atol=2e-5)


# -- V1 ----------------------------------------------------------------------------------------


class Queue:
    """What `tq.kv_batch_get` and `kv_batch_put` keep: nested fields by key."""

    def __init__(self, keys: list[str], **fields: Any) -> None:
        self.keys = keys
        self.fields = fields
        self.written: dict[str, Any] = {}

    def get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        assert partition_id == "train"
        rows = [self.keys.index(key) for key in keys]
        out: dict[str, Any] = {}
        for name in select_fields:
            if name not in self.fields:
                continue
            values = [self.fields[name][i] for i in rows]
            if isinstance(values[0], torch.Tensor):
                out[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
            else:
                out[name] = values
        return tu.get_tensordict(out)

    def put(self, keys: list[str], partition_id: str, fields: TensorDict) -> str:
        self.written = dict(fields.items())
        return "the batch"


def jagged(values: torch.Tensor) -> list[torch.Tensor]:
    return [row[: max(n, 1)] for row, n in zip(values, LENGTHS, strict=True)]


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    keys = [f"{uid}_{i // 2}_0" for i, uid in enumerate(UIDS)]
    right = [0, 1, 1, 0, 0, 0, 1, 1]
    made = Queue(
        keys,
        uid=list(UIDS),
        response_mask=jagged(MASK),
        rm_scores=jagged(at_the_end(SCORES, MASK)),
        old_log_probs=jagged(torch.zeros(8, 4)),
        entropy=jagged(entropies().to(torch.bfloat16)),
        extra_fields=[{"reward_extra_info": {"acc": r}} for r in right],
    )
    monkeypatch.setattr(tq, "kv_batch_get", made.get)
    monkeypatch.setattr(tq, "kv_batch_put", made.put)
    return made


def v1(
    queue: Queue, configuration: Any, order: list[int] | None = None, **more: Any
) -> dict[str, float]:
    """verl's own `_compute_advantage`; the metrics."""
    keys = [queue.keys[i] for i in order or range(len(queue.keys))]
    batch = tq.KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id="train")
    metrics: dict[str, float] = {}
    trainer = SimpleNamespace(config=configuration, **more)
    done = trainer_base.PPOTrainer._compute_advantage(trainer, batch, metrics)
    assert done == "the batch"
    return metrics


def written(queue: Queue) -> torch.Tensor:
    return torch.nested.to_padded_tensor(queue.written["advantages"], 0.0)


def test_v1_reads_entropies_from_the_queue(queue):
    metrics = v1(queue, config())
    want = expected(entropies().to(torch.bfloat16).float())
    assert torch.allclose(written(queue), want, atol=1e-6)
    assert metrics["credit/responses"] == 8 and metrics["credit/groups"] == 2
    assert BESIDE.get().entropy is None  # nothing is left for the next batch


def test_v1_rows_are_in_the_batchs_order(queue):
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    v1(queue, config(), order)
    want = expected(entropies().to(torch.bfloat16).float())[order]
    assert torch.allclose(written(queue), want, atol=1e-6)


def test_v1_rules_that_read_entropies_without_needing_them_get_them(queue, monkeypatch):
    seen: list[list[str]] = []

    @dataclass(frozen=True)
    class Reads(GRPO):
        name = "reads_entropy"
        reads = ("entropy",)

        def credit(self, rollouts: Rollouts) -> Any:
            seen.append(list(rollouts.signals))
            return super().credit(rollouts)

    register(Reads)
    try:
        v1(queue, config("tokencredit_reads_entropy"))
        v1(queue, config("tokencredit_reads_entropy", bypass=True))
        del queue.fields["entropy"]
        v1(queue, config("tokencredit_reads_entropy"))
        assert seen == [["entropy"], [], []]
    finally:
        registry._METHODS.pop("reads_entropy", None)
        core_algos.ADV_ESTIMATOR_REGISTRY.pop("tokencredit_reads_entropy", None)


def test_v1_success_from_a_field_of_the_result(queue):
    v1(queue, config(success_from="acc"))
    right = [False, True, True, False, False, False, True, True]
    want = expected(entropies().to(torch.bfloat16).float(), right)
    assert torch.allclose(written(queue), want, atol=1e-6)
    with pytest.raises(InputError, match=r"success_from=aac: .*did you mean 'acc'"):
        v1(queue, config(success_from="aac"))


def test_v1_success_is_read_before_the_kl_penalty(queue):
    queue.fields["ref_log_prob"] = jagged(torch.full((8, 4), -9.0))  # takes 9 from every token
    configuration = config()
    configuration.algorithm.update({"use_kl_in_reward": True, "kl_penalty": "kl"})
    controller = core_algos.FixedKLController(kl_coef=1.0)
    metrics = v1(queue, configuration, kl_ctrl_in_reward=controller)
    assert metrics["actor/reward_kl_penalty"] > 8
    rewards = torch.nested.to_padded_tensor(queue.written["token_level_rewards"], 0.0)
    assert bool((rewards.sum(dim=1) < 0).all())
    assert torch.allclose(written(queue), expected(entropies().bfloat16().float()), atol=1e-6)


def test_v1_rejected_tokens_count_in_the_statistics(queue):
    """verl's rejection sampling: whole responses here, whose rollout log-probabilities are off."""
    queue.fields["rollout_log_probs"] = jagged(
        torch.where(torch.arange(8).unsqueeze(1) == 3, -5.0, 0.0).expand(8, 4).contiguous()
    )
    configuration = config()
    configuration.algorithm.rollout_correction.update(
        {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"}
    )
    v1(queue, configuration)
    left = torch.nested.to_padded_tensor(queue.written["response_mask"], 0.0)
    assert left.sum(dim=1).tolist() == [4, 2, 3, 0, 1, 4, 2, 3]
    assert torch.allclose(written(queue), expected(entropies().bfloat16().float()), atol=1e-6)


def test_v1_without_entropies_is_refused(queue):
    with pytest.raises(MissingSignalError, match="bypass_mode=False"):
        v1(queue, config(bypass=True))
    del queue.fields["entropy"]
    with pytest.raises(MissingSignalError, match="bypass_mode=False"):
        v1(queue, config())
    assert v1(queue, config("tokencredit_grpo"))["credit/responses"] == 8


def test_v1_several_outputs_of_a_session_are_refused(queue):
    queue.keys[2] = "a_0_1"
    with pytest.raises(InputError, match="session a_0 has several outputs"):
        v1(queue, config())


def test_v1_other_estimators_are_left_alone(queue):
    queue.keys[2] = "a_0_1"
    metrics = v1(queue, config("rloo"))
    assert metrics == {} and written(queue).any()


# -- the legacy trainer ------------------------------------------------------------------------

needs_flash_attention = pytest.mark.skipif(
    version("verl") < "0.9.1" and find_spec("flash_attn") is None,
    reason="before 0.9.1 verl's legacy trainer imports flash_attn, which needs a GPU",
)


def legacy_batch() -> DataProto:
    """Prompts of two tokens on the left, responses on the right."""
    attention = torch.cat([torch.ones(8, 2, dtype=torch.long), MASK], dim=1)
    return DataProto.from_dict(
        tensors={
            "prompts": torch.ones(8, 2, dtype=torch.long),
            "responses": torch.ones(8, 4, dtype=torch.long),
            "input_ids": torch.ones(8, 6, dtype=torch.long),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "response_mask": MASK,
        },
        non_tensors={
            "uid": np.array(UIDS, dtype=object),
            "acc": np.array([bool(s > 0.5) for s in SCORES], dtype=object),
        },
    )


class Workers:
    """What the policy's workers answer: one entropy and log-probability a token, unpadded.

    verl shifts by one: the value of a response token stands at the token before it.
    """

    def compute_log_prob(self, batch: Any) -> Any:
        rows = []
        for row, n in zip(entropies(), LENGTHS, strict=True):
            rows.append(torch.cat([torch.zeros(1), row[:n], torch.zeros(1)]))
        values = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return tu.get_tensordict(
            {"entropy": values, "log_probs": values}, {"metrics": {"mfu": 0.0}}
        )


@needs_flash_attention
@pytest.mark.parametrize("section", [{}, {"success_from": "acc"}])
def test_the_legacy_trainers_entropies_ride_in_the_batch(section):
    configuration = config(**section)
    trainer = SimpleNamespace(config=configuration, actor_rollout_wg=Workers())
    batch = legacy_batch()
    old_log_prob, _ = ray_trainer.RayPPOTrainer._compute_old_log_prob(trainer, batch)
    assert torch.allclose(old_log_prob.batch["entropys"] * MASK, entropies() * MASK)
    old_log_prob.batch.pop("entropys")  # as verl's fit does
    batch = batch.union(old_log_prob)
    batch.reorder(torch.tensor([5, 2, 7, 0, 3, 6, 1, 4]))
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    batch.batch["token_level_scores"] = at_the_end(SCORES, MASK)[order]
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    done = ray_trainer.compute_advantage(
        batch, adv_estimator="tokencredit_gtpo", config=configuration.algorithm
    )
    assert torch.allclose(done.batch["advantages"], expected(entropies())[order], atol=1e-6)
    assert ENTROPY_KEY not in done.batch and "tokencredit_mask" not in done.batch


@needs_flash_attention
def test_the_legacy_trainer_with_another_estimator_carries_nothing():
    trainer = SimpleNamespace(config=config("grpo"), actor_rollout_wg=Workers())
    old_log_prob, _ = ray_trainer.RayPPOTrainer._compute_old_log_prob(trainer, legacy_batch())
    assert set(old_log_prob.batch.keys()) == {"entropys", "old_log_probs"}
