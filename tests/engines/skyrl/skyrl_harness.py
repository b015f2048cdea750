"""SkyRL's own classes on a CPU: a configuration, a batch as its trainer makes it, worker, trainer.

What a machine without CUDA and vLLM cannot have is left out, not imitated: objects are made
without their constructors, which start Ray actors, and given the attributes that the methods
under test read.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch, pad_training_input_batch
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
from skyrl.train.trainer import RayPPOTrainer
from transformers import Qwen2Config, Qwen2ForCausalLM

from tokencredit.engines.skyrl.entrypoint import read_config
from tokencredit.engines.skyrl.trainer import credit_trainer
from tokencredit.engines.skyrl.worker import EntropyPolicyWorker

PROMPT, LENGTHS = 5, [4, 2, 6, 1, 3, 6, 5, 2]
SCORES = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
UIDS = ["a", "b", "a", "b", "a", "b", "a", "b"]
T = max(LENGTHS)


def tiny_model(folder: Path) -> HFModelWrapper:
    """SkyRL's wrapper around a Qwen2 with random weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return HFModelWrapper(str(folder), use_flash_attention_2=False, bf16=False)


def configuration(estimator: str = "tokencredit_gtpo", *more: str) -> Any:
    """As ``python -m tokencredit.engines.skyrl`` reads it, for one CPU in SkyRL's eyes."""
    return read_config(
        [
            "trainer.policy.model.path=nowhere", "trainer.logger=console",
            "trainer.placement.colocate_all=false",
            "trainer.placement.policy_num_gpus_per_node=1",
            "trainer.placement.ref_num_gpus_per_node=1",
            "trainer.bf16=false", "trainer.flash_attn=false",
            "trainer.remove_microbatch_padding=false",
            "trainer.algorithm.use_kl_loss=false",
            "trainer.train_batch_size=2", "trainer.policy_mini_batch_size=2",
            "trainer.micro_forward_batch_size_per_gpu=3",
            "trainer.micro_train_batch_size_per_gpu=4",
            "generator.n_samples_per_prompt=4",
            f"trainer.algorithm.advantage_estimator={estimator}", *more,
        ]
    )  # fmt: skip


def batch(padding: int = 0) -> TrainingInputBatch:
    """As SkyRL's trainer makes it: responses padded on the left, one with tokens of a tool."""
    generator = torch.Generator().manual_seed(1)
    rows = len(LENGTHS)
    sequences = torch.randint(3, 64, (rows, PROMPT + T), generator=generator)
    attention = torch.zeros(rows, PROMPT + T, dtype=torch.long)
    response, rewards = torch.zeros(rows, T, dtype=torch.long), torch.zeros(rows, T)
    for i, length in enumerate(LENGTHS):
        attention[i, T - length :] = 1  # the prompt directly before the response
        response[i, T - length :] = 1
        rewards[i, -1] = SCORES[i]
    sequences[attention == 0] = 0
    loss = response.clone()
    loss[2, T - 4 : T - 2] = 0  # a tool's
    loss[5] = 0  # left out by a filter
    made = TrainingInputBatch(
        {
            "sequences": sequences, "attention_mask": attention, "response_mask": response,
            "loss_mask": loss, "rewards": rewards,
        }
    )  # fmt: skip
    made.metadata = {
        "uids": list(UIDS), "response_length": T,
        "avg_response_length": sum(LENGTHS) / rows,
        "policy_mini_batch_boundaries": [(0, rows)],
    }  # fmt: skip
    return pad_training_input_batch(made, padding)


def worker(cfg: Any, model: Any, kind: type = EntropyPolicyWorker) -> Any:
    """A policy worker of SkyRL's on the CPU."""
    made = kind.__new__(kind)
    made.cfg, made.model = cfg.trainer, model
    return made


def training_worker(cfg: Any, model: Any, learning_rate: float) -> Any:
    """One that trains: SkyRL's strategy for gradients and steps, one rank."""
    made = worker(cfg, model)
    made.strategy = FSDPStrategy.__new__(FSDPStrategy)
    made.strategy.max_norm = 1.0
    made.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    made.scheduler = torch.optim.lr_scheduler.ConstantLR(made.optimizer, factor=1.0)
    made.policy_loss_fn = PolicyLossRegistry.get(cfg.trainer.algorithm.policy_loss_type)
    made.mesh_rank = SimpleNamespace(dp_size=1)
    made.device_mesh = SimpleNamespace(get_group=lambda name: None)
    made.strategy.all_reduce = lambda metrics, op="mean", group=None: metrics
    return made


class OneWorker:
    """What of SkyRL's dispatch the trainer calls, with one worker in this process."""

    def __init__(self, policy: Any) -> None:
        self.policy, self.calls = policy, list[str]()

    def forward(self, model: str, data: Any) -> Any:
        """Everything to the policy."""
        self.calls.append(model)
        return self.policy.forward(data)

    def stage_data(self, model: str, data: Any, boundaries: list[tuple[int, int]]) -> list[Any]:
        """Mini-batches."""
        chunks = [data[start:end] for start, end in boundaries]
        for chunk in chunks:
            chunk.metadata = data.metadata
        return chunks

    def forward_from_staged(self, model: str, chunk: Any) -> Any:
        """One of them."""
        self.calls.append(f"{model} staged")
        return self.policy.forward(chunk)

    def forward_backward_from_staged(self, model: str, chunk: Any) -> Any:
        """Gradients of one mini-batch."""
        return self.policy.forward_backward(chunk)

    def optim_step(self, model: str) -> Any:
        """One step."""
        return self.policy.optim_step()

    def get_lcm_dp_size(self) -> int:
        """One rank."""
        return 1

    def empty_cache(self, *_: Any) -> None:
        """Nothing to empty."""


def trainer(cfg: Any, model: Any = None, base: type = RayPPOTrainer) -> Any:
    """SkyRL's trainer with credit, without its constructor, which loads data and starts actors."""
    kind = credit_trainer(base)
    made = kind.__new__(kind)
    made.cfg, made.ref_model, made.all_metrics = cfg, None, {}
    made.dispatch = OneWorker(worker(cfg, model))
    return made


def entropies(model: Any, data: TrainingInputBatch, temperature: float = 1.0) -> torch.Tensor:
    """Entropies in float64 by another route: unpadded sequences, one at a time."""
    found = torch.zeros(data["response_mask"].shape)
    width = found.shape[1]
    for i in range(len(found)):
        inside = data["attention_mask"][i].bool()
        with torch.no_grad():
            logits = model.model(data["sequences"][i, inside].unsqueeze(0)).logits[0].double()
        logp = (logits / temperature).log_softmax(dim=-1)
        own = -(logp.exp() * logp).sum(dim=-1)
        length = int(data["response_mask"][i].sum())
        found[i, width - length :] = own[-length - 1 : -1].float()
    return found
