"""Tiny policies, fixed rollouts, and the gradient of a policy loss formed without TRL."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import trl
from datasets import Dataset
from packaging.version import Version
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    TrainerCallback,
)
from trl import GRPOConfig

from tokencredit import Surrogate, policy_loss
from tokencredit.engines.trl import CreditGRPOTrainer, recommended_config
from tokencredit.lab import Chain, new_policy, tokenizer_for
from tokencredit.methods.registry import resolve

TASK = Chain()
VOCAB = len(TASK.vocabulary)
EOS = 1
BUDGET = 8
GROUP, ROWS = 8, 24
"""Three groups of eight: with two ranks of twelve rows the second group lies on both."""
TRL = Version(trl.__version__)


def policy(seed: int = 0, layers: int = 1) -> PreTrainedModel:
    """A policy whose token entropies differ a good deal (large initial weights)."""
    return new_policy(
        "qwen3", VOCAB, seed=seed, layers=layers, width=32, heads=2, initializer_range=0.3
    )


def reward_model(seed: int = 0) -> PreTrainedModel:
    """A reward model with the policy's vocabulary and wild gradients."""
    torch.manual_seed(seed)
    shape = Qwen3Config(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=12, num_labels=1, pad_token_id=0,
        initializer_range=0.5,
    )  # fmt: skip
    return Qwen3ForSequenceClassification(shape).eval()


def copy_of(model: Any) -> PreTrainedModel:
    """A plain model with the same weights, without anything that TRL patched in."""
    fresh = policy(layers=model.config.num_hidden_layers)
    fresh.load_state_dict({k: v.detach().clone() for k, v in model.state_dict().items()})
    return fresh.eval()


PROMPTS = ("3 + 4 =", "6 - 2 * 3 =", "5 =", "1 + 1 + 1 =", "2 * 2 =", "9 - 1 =")


def dataset(count: int = 6) -> Dataset:
    return Dataset.from_dict(
        {"prompt": list(PROMPTS[:count]), "number": [float(i) for i in range(count)]}
    )


def response(call: int, row: int) -> list[int]:
    """Response of a row of the whole batch: the same however the rows lie on ranks."""
    rng = random.Random(1000 * call + row)
    length = rng.randint(1, BUDGET)
    ids = [rng.randint(3, VOCAB - 1) for _ in range(length)]
    # One in five has used up its budget: no end token.
    return ids if rng.random() < 0.2 else [*ids[:-1], EOS]


def fixed_rollouts(
    env_mask: bool = False, make: Callable[[int, int], list[int]] = response
) -> Callable[..., dict[str, Any]]:
    calls = [0]

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        first = trainer.accelerator.process_index * len(prompts)
        rows = [make(calls[0], first + i) for i in range(len(prompts))]
        calls[0] += 1
        out: dict[str, Any] = {
            "prompt_ids": trainer.processing_class(prompts)["input_ids"],
            "completion_ids": rows,
            "logprobs": None,
        }
        if env_mask:
            out["env_mask"] = [own_tokens(ids) for ids in rows]
        return out

    return rollout


def own_tokens(ids: Sequence[int]) -> list[int]:
    """1 where the policy chose the token; the others came from a tool. The last one never did."""
    return [int(t % 3 != 0 or t == EOS or i == len(ids) - 1) for i, t in enumerate(ids)]


def parity(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 2) for ids in completion_ids]


class KeepGradients(TrainerCallback):
    """Gradients and weights at each optimiser step, before the optimiser acts."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        model = getattr(model, "module", model)
        named = list(model.named_parameters())
        self.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})
        self.weights.append({n: v.detach().clone() for n, v in model.state_dict().items()})


def config(folder: Any = None, **options: Any) -> GRPOConfig:
    fields: dict[str, Any] = {
        "output_dir": str(folder or tempfile.mkdtemp()),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "num_generations": GROUP,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": ROWS // 4,
        "max_completion_length": BUDGET,
        "max_steps": 1,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,
        "beta": 0.0,
        "temperature": 0.7,
        "seed": 7,
    }
    return GRPOConfig(**(fields | options))


class Run:
    """A trainer on fixed rollouts, with what it told and the gradients of its steps."""

    def __init__(
        self,
        credit: Any,
        *,
        trainer: type = CreditGRPOTrainer,
        reward_funcs: Any = parity,
        rollout: Any = "fixed",
        model: Any = None,
        prompts: Dataset | None = None,
        more: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.keep = KeepGradients()
        self.events: list[Any] = []
        extra = dict(more or {})
        if issubclass(trainer, CreditGRPOTrainer):
            extra |= {"credit": credit, "on_credit": [self.events.append]}
        self.trainer = trainer(
            model=policy() if model is None else model,
            reward_funcs=reward_funcs,
            args=config(**options),
            train_dataset=dataset() if prompts is None else prompts,
            processing_class=tokenizer_for(TASK),
            callbacks=[self.keep],
            rollout_func=fixed_rollouts() if rollout == "fixed" else rollout,
            **extra,
        )
        self.trainer.remove_callback(PrinterCallback)

    def train(self) -> Run:
        self.trainer.train()
        return self

    @property
    def log(self) -> list[dict[str, float]]:
        return self.trainer.state.log_history


def recommended(name: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A rule and the configuration that its paper trains with."""
    rule = resolve(name, options)
    return rule, recommended_config(rule)


# -- the same, without TRL ------------------------------------------------------------------


def statistics(
    model: Any,
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    width: int,
    temperature: float = 0.7,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of each response token, row by row, without padding."""
    logprobs, entropies = [], []
    for prompt, answer in zip(prompt_ids, response_ids, strict=True):
        ids = torch.tensor([[*prompt, *answer]])
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
        full = logits.log_softmax(dim=-1)
        chosen = full.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        entropy = -(full.exp() * full).sum(dim=-1)
        pad = (0, width - len(answer))
        logprobs.append(torch.nn.functional.pad(chosen, pad))
        entropies.append(torch.nn.functional.pad(entropy, pad))
    return torch.stack(logprobs), torch.stack(entropies)


def plain(event: Any) -> dict[str, Any]:
    """What of an event the reference gradient needs; picklable."""
    return {
        "prompt_ids": event.prompt_ids,
        "response_ids": event.response_ids,
        "mask": event.rollouts.mask.clone(),
        "advantage": event.credit.advantage.clone(),
        "in_loss": event.credit.in_loss.clone(),
        "real": event.rollouts.real.clone(),
        "entropy": event.rollouts.signals["entropy"].clone()
        if "entropy" in event.rollouts.signals
        else None,
    }


def reference_gradient(
    model: Any,
    told: dict[str, Any],
    surrogate: Surrogate,
    *,
    old: torch.Tensor | None = None,
    max_length: int = BUDGET,
) -> dict[str, torch.Tensor]:
    """Gradient of `policy_loss` over the rows, with one global denominator.

    The denominator is TRL's: tokens in the loss (``dapo``), or all rows (``grpo``, ``dr_grpo``).
    """
    mask = told["mask"] & told["in_loss"].unsqueeze(1)
    n = mask.shape[0]
    logprob, _ = statistics(model, told["prompt_ids"], told["response_ids"], mask.shape[1])
    denominator = {
        "token-mean": mask.sum(),
        "seq-mean-token-mean": n,
        "seq-mean-token-sum-norm": n * max_length,
    }[surrogate.aggregation]
    loss = policy_loss(
        logprob,
        logprob.detach() if old is None else old,
        told["advantage"],
        mask,
        surrogate,
        denominator=float(denominator),
    )
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Largest difference of two gradients over the largest entry of the second."""
    assert found.keys() == wanted.keys()
    scale = max(float(g.abs().max()) for g in wanted.values())
    assert scale > 0
    return max(float((found[n] - wanted[n]).abs().max()) for n in wanted) / scale


CASES = {
    "grpo": ("grpo", {}),
    "dr_grpo": ("dr_grpo", {}),
    "dapo": ("dapo", {}),
    "gtpo": ("gtpo", {"alpha2": 1.0}),
    "grpo_s": ("grpo_s", {"ratio": "arithmetic", "beta2": 1.0}),
    "grpo_s-geometric": ("grpo_s", {"ratio": "geometric", "beta2": 1.0}),
    "datc": ("datc", {}),
}
"""Every method; the shaping stronger than the papers', so that credit differs more from GRPO's."""


def one_step(case: str, micro_batch: int, world: int = 1, **options: Any) -> Run:
    """One optimiser step of a method on the fixed 24 rows."""
    name, chosen = CASES[case]
    rule, fields = recommended(name, **chosen)
    fields |= {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": ROWS // world // micro_batch,
    }
    if name == "datc":
        options = {"more": {"reward_model": reward_model()}} | options
    return Run(rule, **(fields | options)).train()


def surrogate_of(case: str) -> Surrogate:
    name, chosen = CASES[case]
    return replace(resolve(name, chosen).recipe.surrogate)


def same_log(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> bool:
    """Whether two logs agree exactly, times apart."""

    def clean(log: list[dict[str, Any]]) -> list[dict[str, str]]:
        timed = ("time", "second", "runtime")
        return [{k: repr(v) for k, v in d.items() if not any(w in k for w in timed)} for d in log]

    return clean(first) == clean(second)


def same_tensors(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)
