"""The lab's settings as jobs for the trainer: ``tokencredit train --lab``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from tokencredit.engines.trl.jobs import Job
from tokencredit.engines.trl.work import needs_work
from tokencredit.errors import InputError
from tokencredit.methods.rule import Rule

if TYPE_CHECKING:
    from tokencredit.lab import Setting

__all__ = ["STRENGTHS", "lab_defaults", "lab_job"]

STRENGTHS = ("strong", "weak")
"""The lab's reward models, the default first."""

PROMPTS = 4096
"""Training prompts, however long the run: a shorter or longer one sees the same first ones."""


def lab_defaults(setting: Setting) -> dict[str, Any]:
    """What a setting trains with where the user leaves it open: GTPO, and `GRPOConfig` fields."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    return {
        "credit": "gtpo",
        "per_device_train_batch_size": setting.prompts_per_step * setting.group_size // ranks,
        "per_device_eval_batch_size": setting.prompts_per_step * setting.group_size // ranks,
        "num_generations": setting.group_size,
        "max_completion_length": setting.task.max_response,
        "learning_rate": setting.learning_rate,
        "lr_scheduler_type": "constant",
        "max_steps": setting.steps,
        "logging_steps": 1,
        "save_steps": 20,
        "save_total_limit": 2,
        "seed": 0,
        "use_cpu": not cuda,
        "dataloader_pin_memory": cuda,
        # 0.8 million parameters: 16-bit or recomputed activations would only slow them down.
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
    }


def lab_job(
    setting: Setting,
    training: Any,
    rule: Rule | None,
    *,
    reward_model: str | None = None,
    on_progress: Any,
) -> Job:
    """The setting's policy, prompts, reward and what the rule needs: marks or a reward model."""
    from tokencredit import lab

    model, tokenizer = lab.load_policy(setting, on_progress=on_progress)
    marks = lab.oracle_signal(setting.task)

    def oracle(prompts: Any, completion_ids: Any, **_: Any) -> list[list[float]]:
        return marks(prompts, completion_ids)

    source = None
    if needs_work(rule):
        strength = reward_model or STRENGTHS[0]
        if strength not in STRENGTHS:
            raise InputError(
                f"train: --lab has the reward models strong and weak, not {strength!r}"
            )
        source = lab.load_reward_model(setting, strength, on_progress=on_progress).source()

    def accuracy(policy: Any, count: int) -> Any:
        return lab.evaluate(policy, tokenizer, setting.task, prompts=count, seed=10_000)

    return Job(
        model=model,
        tokenizer=tokenizer,
        train=lab.prompt_dataset(setting.task, PROMPTS, seed=training.seed),
        evaluation=lab.prompt_dataset(setting.task, 256, seed=1, held_out=True)
        if training.eval_strategy != "no"
        else None,
        rewards=[lab.task_reward(setting.task)],
        signals={"oracle": oracle} if rule is not None and "oracle" in rule.needs else {},
        reward_model=source,
        reward_tokenizer=tokenizer if source is not None else None,
        accuracy=accuracy,
    )
