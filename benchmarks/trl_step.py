"""A training step of `CreditGRPOTrainer` against one of TRL's own `GRPOTrainer`.

All trainers live in one process and take turns: some steps of one, the same steps of the next,
and again. The learning rate is 0 and each turn starts from the same random state, so all of them
sample the same responses of the same policy and do the same work, but for the credit.
"""

from __future__ import annotations

import random
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tokencredit import assign, lab
from tokencredit.engines.trl import CreditGRPOTrainer
from tokencredit.signals import (
    last_hidden_states,
    plain_input,
    policy_head,
    reward_gradients,
    token_statistics,
)

from .harness import Report, Table, Timing, current_clock, interleaved, progress

__all__ = ["run"]

PLAIN = "GRPOTrainer"
RULES = ("grpo", "dr_grpo", "dapo", "gtpo", "grpo_s", "datc")
VARIANTS = {
    "entropies reused": {"num_iterations": 2},
    "one more pass": {"num_iterations": 1},
}
"""With two iterations a batch TRL runs a pass for the old log-probabilities, in plain training
too; with one (its default) it does not, and a rule that needs entropies costs a forward pass."""


class Clock(TrainerCallback):
    """Each step from begin to end (sampling, scoring, credit, update): seconds, and CPU seconds.

    With one thread the two differ by what other processes took away.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self._start = (0.0, 0.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start = (time.perf_counter(), time.process_time())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wall, busy = self._start
        self.steps.append((time.perf_counter() - wall, time.process_time() - busy))


class Contestant:
    """A trainer and its clock."""

    def __init__(self, rule: str | None, steps: int, *, quick: bool, **options: Any) -> None:
        setting = lab.setting("chain-qwen3")
        if quick:
            tokenizer = lab.tokenizer_for(setting.task)
            model: Any = lab.new_policy(
                "qwen3", len(setting.task.vocabulary), seed=0, layers=1, width=32, heads=2
            )
        else:
            model, tokenizer = lab.load_policy(setting)
        responses = 16 if quick else setting.prompts_per_step * setting.group_size
        fields: dict[str, Any] = {
            "output_dir": tempfile.mkdtemp(),
            "per_device_train_batch_size": responses,
            "num_generations": setting.group_size,
            "max_completion_length": 8 if quick else setting.task.max_response,
            "max_steps": steps,
            "learning_rate": 0.0,
            "lr_scheduler_type": "constant",
            "use_cpu": True,
            "dataloader_pin_memory": False,
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": 10_000,
            "disable_tqdm": True,
            "seed": 0,
        }
        config = GRPOConfig(**(fields | options))
        data = lab.prompt_dataset(setting.task, 64, seed=0)
        common: dict[str, Any] = {
            "model": model,
            "reward_funcs": [lab.task_reward(setting.task)],
            "args": config,
            "train_dataset": data,
            "processing_class": tokenizer,
        }
        if rule == "datc":
            common["reward_model"] = lab.load_reward_model(setting).source()
        self.trainer: Any = (
            GRPOTrainer(**common) if rule is None else CreditGRPOTrainer(credit=rule, **common)
        )
        self.trainer.remove_callback(PrinterCallback)
        self.clock = Clock()
        self.trainer.add_callback(self.clock)

    def turn(self, number: int) -> tuple[float, float]:
        """Train for some steps; the mean seconds and CPU seconds of one."""
        random.seed(number)
        torch.manual_seed(number)
        self.clock.steps.clear()
        self.trainer.train()
        wall, busy = zip(*self.clock.steps, strict=True)
        return sum(wall) / len(wall), sum(busy) / len(busy)


def run(*, quick: bool = False) -> Report:
    warnings.filterwarnings("ignore", category=FutureWarning)
    tables = [
        table
        for name, options in VARIANTS.items()
        for table in _variant(name, options, quick=quick)
    ]
    return Report("trl_step", tables)


def _variant(name: str, options: dict[str, Any], *, quick: bool) -> list[Table]:
    rounds, steps = (2, 2) if quick else (7, 2)
    rules = ("gtpo", "datc") if quick else RULES
    contestants: dict[str, Contestant] = {
        rule or PLAIN: Contestant(rule, steps, quick=quick, **options) for rule in (None, *rules)
    }
    taken: dict[str, list[tuple[float, float]]] = {who: [] for who in contestants}
    for number in range(rounds + 1):
        progress(f"trl_step, {name}: round {number} of {rounds}")
        order = list(contestants)
        shift = number % len(order)
        for who in order[shift:] + order[:shift]:
            step = contestants[who].turn(number)
            if number > 0:  # the first round holds the self-check of the first loss
                taken[who].append(step)
    wall = {who: Timing(tuple(step[0] for step in steps)) for who, steps in taken.items()}
    busy = {who: Timing(tuple(step[1] for step in steps)) for who, steps in taken.items()}
    return [
        _table(name, contestants, wall, busy, steps=steps, quick=quick),
        _datc_parts(name, contestants["datc"].trainer, wall, busy, quick=quick),
    ]


def _table(
    name: str,
    contestants: dict[str, Contestant],
    timing: dict[str, Timing],
    busy: dict[str, Timing],
    *,
    steps: int,
    quick: bool,
) -> Table:
    args = contestants[PLAIN].trainer.args
    table = Table(
        f"{name[0].upper()}{name[1:]}: num_iterations={args.num_iterations}, "
        f"{args.per_device_train_batch_size} responses of at most "
        f"{args.max_completion_length} tokens",
        (
            "trainer",
            "ms a step: min",
            "median",
            "over GRPOTrainer: median of the rounds",
            "of the fastest rounds",
            "in CPU time: median",
            "assign and diagnostics, ms a batch",
            "% of a step",
        ),
    )
    for who, each in contestants.items():
        fastest, paired = timing[who].over(timing[PLAIN])
        row: list[str | float] = [who, 1e3 * timing[who].least, 1e3 * timing[who].median]
        if who == PLAIN:
            row += ["-"] * 5
        else:
            row += [f"{paired:.3f}", f"{fastest:.3f}", f"{busy[who].over(busy[PLAIN])[1]:.3f}"]
            alone = _credit_alone(each.trainer, quick=quick).median
            share = alone / args.num_iterations / timing[who].median
            row += [1e3 * alone, 100 * share]
        table.rows.append(row)
    table.notes.append(
        f"{len(timing[PLAIN].seconds)} rounds of {steps} steps each, learning rate 0, the same "
        "random state in each round: the same responses for all."
    )
    return table


def _datc_parts(
    name: str, trainer: Any, wall: dict[str, Timing], busy: dict[str, Timing], *, quick: bool
) -> Table:
    """What DATC adds to a batch, beside its parts done alone on a batch of the same size."""
    args, work = trainer.args, trainer._work
    rows = args.per_device_train_batch_size
    task = lab.setting("chain-qwen3").task
    prompts = [list(range(3, 3 + task.prompt_length))] * rows
    width = args.max_completion_length
    answers = [[3 + (i + j) % 12 for j in range(width)] for i in range(rows)]
    made = plain_input(prompts, answers, width)
    policy = trainer.accelerator.unwrap_model(trainer.model)
    head = policy_head(policy)
    with torch.no_grad():
        hidden = last_hidden_states(policy, made.input_ids, made.attention_mask, width)
    flat, targets = hidden.reshape(rows * width, -1), made.input_ids[:, -width:].reshape(-1)
    gradient = torch.randn(rows * width, work.source.embedding.shape[1])

    def reward() -> None:
        for _ in reward_gradients(
            work.source, made.input_ids, made.attention_mask, made.response, micro_batch=rows
        ):
            pass

    def statistics() -> Any:
        return token_statistics(
            flat, head.weight, targets, want=work.want, reward=(gradient, work.source.embedding)
        )

    parts = interleaved(
        {
            "reward model, forward and backward": reward,
            "policy, one forward pass without gradient": lambda: last_hidden_states(
                policy, made.input_ids, made.attention_mask, width
            ),
            "token statistics": statistics,
        },
        seconds=1 if quick else 20,
        least=2,
        most=15,
    )
    table = Table(
        f"What DATC adds, {name}: milliseconds a batch of {rows} responses",
        ("what", "ms, median"),
    )
    for what, timing in parts.items():
        table.rows.append([what, 1e3 * timing.median])
    total = sum(timing.median for timing in parts.values())
    clock = busy if current_clock() == "cpu" else wall
    added = args.num_iterations * (clock["datc"].median - clock[PLAIN].median)
    table.rows.append(["the three together", 1e3 * total])
    table.rows.append(["step with DATC less plain step", 1e3 * added])
    table.rows.append(["the latter over the former", added / total])
    return table


def _credit_alone(trainer: Any, *, quick: bool) -> Timing:
    """`assign` and its diagnostics on the trainer's last batch, without the trainer."""
    rollouts, rule = trainer.last_credit._rollouts, trainer.credit_rule
    call: Callable[[], Any] = lambda: assign(rollouts, rule).diagnostics  # noqa: E731
    return interleaved({"assign": call}, seconds=0.2, least=3, most=5 if quick else 100)["assign"]
