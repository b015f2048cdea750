"""Does the credit mean something? Measurements on the lab's tasks, where the truth is known.

Four tables, each with 95 % intervals: (a) does a score find the first wrong token, (b) do token
advantages agree with the true ones, (c) does the predicted first-order gain show after one real
update, (d) how often GRPO's update points against the reward, by place and kind of token.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokencredit.credit import assign
from tokencredit.lab.credits import Oracle, Uniform
from tokencredit.lab.prompts import draw_prompts
from tokencredit.lab.sampling import sample_responses
from tokencredit.lab.tasks import Task, Verdict, oracle_marks
from tokencredit.losses import policy_loss
from tokencredit.methods.datc import DATC
from tokencredit.methods.grpo import GRPO
from tokencredit.methods.gtpo import GTPO
from tokencredit.methods.rule import Rule
from tokencredit.rollouts import Rollouts
from tokencredit.signals.alignment import alignment_signals, plain_input
from tokencredit.signals.reward_gradient import RewardSource

if TYPE_CHECKING:
    from tokencredit.lab.catalogue import Setting
    from tokencredit.lab.reward_training import Strength

__all__ = [
    "Batch",
    "Interval",
    "Table",
    "agreement",
    "evidence",
    "first_wrong_found",
    "gain_after_one_update",
    "misaligned",
    "sample_batch",
]

ALIGNMENTS = ("work", "projection", "cosine", "natural")


LEARNING_RATES = (0.2, 0.05)
"""Steps of (c): one that trains quickly under GRPO, and one nearer to the prediction's."""


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval (1.96 standard errors over responses, prompts or runs)."""

    mean: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Interval:
        """From independent values.

        Example:
            >>> Interval.of([1.0, 1.0]).mean
            1.0
        """
        n = len(values)
        if n == 0:
            return Interval(math.nan, math.nan, math.nan)
        mean = sum(values) / n
        variance = sum((v - mean) ** 2 for v in values) / max(n - 1, 1)
        half = 1.96 * math.sqrt(variance / n)
        return Interval(mean, mean - half, mean + half)

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


@dataclass(frozen=True)
class Table:
    """A table of measurements.

    Attributes:
        title: what was measured.
        columns: headings, without the first.
        rows: a label and one cell a column.
        note: how to read it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    note: str = ""

    def text(self) -> str:
        """As plain text with aligned columns."""
        lines = [("", *self.columns), *((label, *cells) for label, cells in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        body = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        note = ["  " + self.note] if self.note else []
        return "\n".join([self.title, *("  " + line for line in body), *note])

    def markdown(self) -> str:
        """As a markdown table."""
        lines = [f"**{self.title}**", "", f"| | {' | '.join(self.columns)} |"]
        lines.append("|---" * (len(self.columns) + 1) + "|")
        lines += [
            f"| {label.replace('|', chr(92) + '|')} | {' | '.join(cells)} |"
            for label, cells in self.rows
        ]
        return "\n".join([*lines, "", *([self.note, ""] if self.note else [])])


@dataclass(frozen=True, eq=False)
class Batch:
    """Responses of a policy with their verdicts and every signal; the policy is not changed."""

    prompts: list[tuple[str, ...]]
    prompt_ids: Tensor
    responses: list[list[int]]
    verdicts: list[Verdict]
    rollouts: Rollouts


def sample_batch(
    policy: Any,
    task: Task,
    source: RewardSource,
    *,
    prompts: int,
    group_size: int,
    seed: int,
    held_out: bool = True,
    path_points: int = 1,
) -> Batch:
    """Sample groups of responses and form every signal that the methods and controls read.

    Args:
        policy: a policy of the lab.
        task: the task.
        source: what DATC differentiates.
        prompts: how many.
        group_size: responses to each.
        seed: of prompts and sampling.
        held_out: which split of the prompts.
        path_points: see `alignment_signals`.
    """
    words = draw_prompts(task, prompts, seed, held_out=held_out)
    words = [w for w in words for _ in range(group_size)]
    index = {word: i for i, word in enumerate(task.vocabulary)}
    prompt_ids = torch.tensor([[index[w] for w in prompt] for prompt in words])
    responses = sample_responses(policy, prompt_ids, max_new_tokens=task.max_response, seed=seed)
    verdicts = [
        task.verify(p, [task.vocabulary[i] for i in r])
        for p, r in zip(words, responses, strict=True)
    ]
    width = max(map(len, responses))
    padded = torch.tensor([[*r, *([0] * (width - len(r)))] for r in responses])
    mask = torch.tensor([[i < len(r) for i in range(width)] for r in responses])
    ids = torch.cat([prompt_ids, padded], dim=1)
    attention = torch.cat([torch.ones_like(prompt_ids, dtype=torch.bool), mask], dim=1)
    was_training = policy.training
    policy.eval()
    formed = alignment_signals(
        policy,
        source,
        ids,
        attention,
        mask,
        plain_input(prompt_ids.tolist(), responses, width),
        want=(
            *ALIGNMENTS, "reward_norm", "update_norm", "logprob", "entropy", "grad_x_input",
            "work_random",
        ),
        micro_batch=64,
        path_points=path_points,
    )  # fmt: skip
    policy.train(was_training)
    marks = torch.zeros(len(responses), width)
    for i, verdict in enumerate(verdicts):
        marks[i, : len(responses[i])] = torch.tensor(oracle_marks(verdict))
    end = (padded == index["<eos>"]) & mask
    rollouts = Rollouts(
        torch.tensor([float(v.correct) for v in verdicts]),
        [i // group_size for i in range(len(words))],
        mask,
        signals={**formed.signals, "oracle": marks, "eos": end.float()},
        token_ids=padded,
    )
    return Batch(words, prompt_ids, responses, verdicts, rollouts)


# -- (a) --------------------------------------------------------------------------------------


def first_wrong_found(
    policy: Any, task: Task, source: RewardSource, batch: Batch, *, swaps: int = 60, seed: int = 0
) -> Table:
    """Does a score find the first wrong token of a wrong response?

    Area under the curve: the first wrong token ranked against the response's other tokens (ties
    count half); top-1: it has the highest score. Alignments count with their sign turned, since
    the update of a wrong response goes the other way. The exact swap puts the policy's best other
    token in each place, in turn, and scores the response again: the change that gradients stand
    for.

    Args:
        policy: the policy that sampled the batch.
        task: the task.
        source: what the alignments were formed from.
        batch: from `sample_batch`.
        swaps: how many responses get the exact swap, which costs a pass a token.
        seed: of the random score.
    """
    signals = batch.rollouts.signals
    generator = torch.Generator().manual_seed(seed)
    wrong = [
        i
        for i, v in enumerate(batch.verdicts)
        if not v.correct and v.first_wrong is not None and len(batch.responses[i]) > 1
    ]
    scores: dict[str, Tensor] = {f"-{name}": -signals[name] for name in ALIGNMENTS}
    scores["|G| |k| (control)"] = signals["reward_norm"] * signals["update_norm"]
    scores["-work of a random direction (control)"] = -signals["work_random"]
    scores["-gradient x input (control)"] = -signals["grad_x_input"]
    scores["entropy"] = signals["entropy"]
    scores["surprisal"] = -signals["logprob"]
    scores["random"] = torch.rand(signals["entropy"].shape, generator=generator)
    rows = [(name, _found(score, batch, wrong)) for name, score in scores.items()]
    chosen = wrong[:swaps]
    swapped = _exact_swaps(policy, task, source, batch, chosen)
    rows.append((f"exact swap ({len(chosen)} responses)", _found(swapped, batch, chosen)))
    return Table(
        f"(a) finding the first wrong token, {len(wrong)} wrong responses of {task.name}",
        ("area under the curve", "top-1"),
        tuple((name, (str(area), str(top))) for name, (area, top) in rows),
        "0.5 is chance. Surprisal needs no reward model: the baseline to beat.",
    )


def _found(score: Tensor, batch: Batch, wrong: Sequence[int]) -> tuple[Interval, Interval]:
    areas: list[float] = []
    tops: list[float] = []
    for i in wrong:
        n, first = len(batch.responses[i]), batch.verdicts[i].first_wrong
        assert first is not None
        row = score[i, :n].nan_to_num(-math.inf)
        others = torch.cat([row[:first], row[first + 1 :]])
        own = row[first]
        areas.append(float(((own > others).float() + 0.5 * (own == others)).mean()))
        tops.append(float(own > others.max()))
    return Interval.of(areas), Interval.of(tops)


def _exact_swaps(
    policy: Any, task: Task, source: RewardSource, batch: Batch, chosen: Sequence[int]
) -> Tensor:
    out = torch.full(batch.rollouts.mask.shape, -math.inf)
    for i in chosen:
        prompt, response = batch.prompt_ids[i], batch.responses[i]
        n = len(response)
        ids = torch.cat([prompt, torch.tensor(response)])
        with torch.no_grad():
            logits = policy(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
        logits = logits.scatter(1, ids[len(prompt) :, None], -math.inf)
        rows = ids.repeat(n + 1, 1)
        rows[torch.arange(n), len(prompt) + torch.arange(n)] = logits.argmax(dim=1)
        seen = torch.ones_like(rows, dtype=torch.bool)
        span = seen.clone()
        span[:, : len(prompt)] = False
        with torch.no_grad():
            score = source.score(source.embed(rows), seen, span, slice(0, n + 1))
        out[i, :n] = score[:n] - score[n]
    return out


# -- (b) --------------------------------------------------------------------------------------


def agreement(
    policy: Any,
    task: Task,
    batch: Batch,
    rules: Sequence[Rule] | None = None,
    *,
    responses: int = 24,
    continuations: int = 48,
    seed: int = 0,
) -> Table:
    """Do token advantages agree with the true ones, ``Q(s, a) - V(s)``?

    The value of each prefix is estimated by sampling continuations; a token's true advantage is
    the change of value that it makes. Per response: the correlation over its tokens, and, over the
    tokens whose change is clear of noise (two standard errors), the share with the right sign.

    Args:
        policy: the policy that sampled the batch.
        task: the task.
        batch: from `sample_batch`.
        rules: which methods; default: GRPO, GTPO, DATC and its alignments, oracle.
        responses: how many responses of groups with both outcomes.
        continuations: from each prefix.
        seed: of the continuations and the choice of responses.
    """
    rules = rules or (
        GRPO(),
        GTPO(),
        *(DATC(alignment=name) for name in ALIGNMENTS),  # pyright: ignore[reportArgumentType]
        DATC(weight_map="box"),
        Oracle(),
    )
    r = batch.rollouts
    mixed = {
        int(g)
        for g in r.group.unique()
        if 0 < int(r.success[r.group == g].sum()) < int((r.group == g).sum())
    }
    usable = [i for i in range(r.responses) if int(r.group[i]) in mixed]
    chosen = random.Random(seed).sample(usable, min(responses, len(usable)))
    truth = {i: _true_advantages(policy, task, batch, i, continuations, seed) for i in chosen}
    rows = []
    for rule in rules:
        advantage = assign(r, rule).advantage
        correlations: list[float] = []
        signs: list[float] = []
        for i, (true, error) in truth.items():
            own = advantage[i, : len(true)]
            if own.std(correction=0) > 1e-6 * own.abs().max():
                pair = torch.stack([own.double(), true.double()])
                correlations.append(float(torch.corrcoef(pair)[0, 1].nan_to_num(0.0)))
            else:
                correlations.append(0.0)
            clear = true.abs() > 2 * error
            if clear.any():
                signs.append(float((own[clear].sign() == true[clear].sign()).float().mean()))
        label = (
            rule.name
            if not isinstance(rule, DATC)
            else (f"datc, {rule.alignment}" + (", box" if rule.weight_map == "box" else ""))
        )
        rows.append((label, (str(Interval.of(correlations)), str(Interval.of(signs)))))
    return Table(
        f"(b) agreement with true token advantages, {len(chosen)} responses of {task.name}, "
        f"{continuations} continuations a prefix",
        ("correlation over a response's tokens", "right sign where it is clear"),
        tuple(rows),
        "A constant advantage has correlation 0. No method here turns a token's sign but GTPO.",
    )


def _true_advantages(
    policy: Any, task: Task, batch: Batch, i: int, continuations: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Change of value at each token of a response, and its standard error."""
    prompt, response = batch.prompt_ids[i], batch.responses[i]
    n = len(response)
    values, errors = [], []
    for t in range(n + 1):
        if t == n:
            values.append(float(batch.verdicts[i].correct))
            errors.append(0.0)
            continue
        prefix = torch.cat([prompt, torch.tensor(response[:t], dtype=torch.long)])
        rest = sample_responses(
            policy,
            prefix.repeat(continuations, 1),
            max_new_tokens=task.max_response - t,
            seed=seed + 7919 * i + t,
        )
        wins = sum(
            task.verify(
                batch.prompts[i], [task.vocabulary[k] for k in [*response[:t], *tail]]
            ).correct
            for tail in rest
        )
        # Laplace's estimate of the error, so that 0 of 48 is not certain.
        p = (wins + 1) / (continuations + 2)
        values.append(wins / continuations)
        errors.append(math.sqrt(p * (1 - p) / continuations))
    v, e = torch.tensor(values), torch.tensor(errors)
    return v[1:] - v[:-1], (e[1:].square() + e[:-1].square()).sqrt()


# -- (c) --------------------------------------------------------------------------------------


def gain_after_one_update(
    policy: Any,
    task: Task,
    source: RewardSource,
    rules: Sequence[Rule] | None = None,
    *,
    runs: int = 12,
    prompts: int = 16,
    group_size: int = 8,
    learning_rate: float = 0.2,
    seed: int = 0,
) -> Table:
    """The gain that a rule predicts, and what one real update brings on the same prompts.

    Each run samples a batch, makes one step of plain gradient descent with each rule's credit
    from the same weights, and samples again. Predicted: ``sum A_t d_t`` over GRPO's, from the
    logits taken as free. Measured: the change of the reward model's mean score and of accuracy.

    Args:
        policy: where each run starts; not changed.
        task: the task.
        source: what DATC differentiates, and what scores.
        rules: which methods; default: GRPO, DATC, and DATC with the sign flipped.
        runs: independent batches.
        prompts: prompts of a batch.
        group_size: responses to each.
        learning_rate: of the plain gradient step. The prediction is for an infinitely small one.
        seed: of the first run.
    """
    from tokencredit.methods.datc import DATCFlipped

    rules = rules or (GRPO(), DATC(), DATCFlipped(), Oracle())
    predicted: dict[str, list[float]] = {rule.name: [] for rule in rules}
    scores: dict[str, list[float]] = {rule.name: [] for rule in rules}
    accuracies: dict[str, list[float]] = {rule.name: [] for rule in rules}
    for run in range(runs):
        start = seed + 100_003 * run
        batch = sample_batch(
            policy, task, source, prompts=prompts, group_size=group_size, seed=start
        )
        before = _measure(policy, task, source, batch, start + 1)
        work = batch.rollouts.signals["work"].nan_to_num(0.0)
        plain = float((assign(batch.rollouts, Uniform()).advantage * work).sum())
        for rule in rules:
            credit = assign(batch.rollouts, rule)
            gain = float((credit.advantage * work).sum())
            predicted[rule.name].append(gain / plain if plain else math.nan)
            updated = _updated(policy, batch, credit.advantage, learning_rate)
            after = _measure(updated, task, source, batch, start + 1)
            scores[rule.name].append(after[0] - before[0])
            accuracies[rule.name].append(after[1] - before[1])
    base = rules[0].name
    rows = []
    for rule in rules:
        difference = [a - b for a, b in zip(scores[rule.name], scores[base], strict=True)]
        rows.append(
            (
                rule.name,
                (
                    str(Interval.of(predicted[rule.name])),
                    str(Interval.of(scores[rule.name])),
                    str(Interval.of(difference)),
                    str(Interval.of(accuracies[rule.name])),
                ),
            )
        )
    return Table(
        f"(c) predicted and measured gain of one update, {runs} runs on {task.name}",
        (
            "predicted, over GRPO's",
            "change of mean score",
            f"the same less {base}'s, paired",
            "change of accuracy",
        ),
        tuple(rows),
        f"{prompts} prompts x {group_size}, one step of plain gradient descent at {learning_rate}.",
    )


def _updated(policy: Any, batch: Batch, advantage: Tensor, learning_rate: float) -> Any:
    """A copy of the policy after one step of gradient descent on the batch's policy loss."""
    model = copy.deepcopy(policy).train()
    ids = torch.cat([batch.prompt_ids, batch.rollouts.token_ids], dim=1)  # pyright: ignore[reportArgumentType, reportCallIssue]
    mask = batch.rollouts.mask
    attention = torch.cat([torch.ones_like(batch.prompt_ids), mask.long()], dim=1)
    t = mask.shape[1]
    logits = model(input_ids=ids, attention_mask=attention).logits[:, -t - 1 : -1]
    logprob = logits.log_softmax(-1).gather(-1, ids[:, -t:, None]).squeeze(-1)
    loss = policy_loss(logprob, logprob.detach(), advantage, mask)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= learning_rate * parameter.grad
                parameter.grad = None
    return model.eval()


def _measure(
    policy: Any, task: Task, source: RewardSource, batch: Batch, seed: int
) -> tuple[float, float]:
    """Mean score and accuracy of fresh responses to the batch's prompts.

    A response that ends before its first result has no score: it counts in the accuracy alone.
    """
    prompt_ids = batch.prompt_ids.repeat(2, 1)
    words = batch.prompts * 2
    responses = sample_responses(policy, prompt_ids, max_new_tokens=task.max_response, seed=seed)
    made = plain_input(prompt_ids.tolist(), responses, max(map(len, responses)))
    scores: list[Tensor] = []
    with torch.no_grad():
        for a in range(0, len(responses), 64):
            rows = slice(a, min(a + 64, len(responses)))
            scores.append(
                source.score(
                    source.embed(made.input_ids[rows]),
                    made.attention_mask[rows],
                    made.response[rows],
                    rows,
                )
            )
    right = sum(
        task.verify(p, [task.vocabulary[i] for i in r]).correct
        for p, r in zip(words, responses, strict=True)
    )
    return float(torch.cat(scores).nanmean()), right / len(responses)


# -- (d) --------------------------------------------------------------------------------------


def misaligned(task: Task, batch: Batch) -> Table:
    """How often GRPO's update of a token points against the reward: ``A d < 0``.

    Args:
        task: the task.
        batch: from `sample_batch`.
    """
    advantage = assign(batch.rollouts, GRPO()).advantage
    work = batch.rollouts.signals["work"]
    against = (advantage * work < 0).float()
    moving = batch.rollouts.mask & (advantage != 0) & work.isfinite()

    def share(where: Callable[[int], Tensor]) -> tuple[str, ...]:
        shares = [
            float(against[i][keep].mean())
            for i in range(batch.rollouts.responses)
            if (keep := where(i) & moving[i]).any()
        ]
        return (str(Interval.of(shares)), str(len(shares)))

    width = batch.rollouts.mask.shape[1]
    columns = torch.arange(width)
    kinds: dict[str, Tensor] = {}
    for name in ("forced", "deciding", "filler"):
        marked = torch.zeros(batch.rollouts.mask.shape, dtype=torch.bool)
        for i, verdict in enumerate(batch.verdicts):
            marked[i, : len(verdict.kinds)] = torch.tensor([k == name for k in verdict.kinds])
        kinds[name] = marked
    rows = [("all tokens", share(lambda i: batch.rollouts.mask[i]))]
    for label, value in (("right responses", True), ("wrong responses", False)):
        rows.append(
            (
                label,
                share(lambda i, v=value: batch.rollouts.mask[i] & (batch.rollouts.success[i] == v)),
            )
        )
    rows += [(f"{name} tokens", share(lambda i, m=marked: m[i])) for name, marked in kinds.items()]
    for quarter in range(4):
        low, high = quarter * width // 4, (quarter + 1) * width // 4
        rows.append(
            (
                f"positions {low} to {high - 1}",
                share(lambda i, a=low, b=high: (columns >= a) & (columns < b)),
            )
        )
    return Table(
        f"(d) share of tokens whose update points against the reward (A d < 0), {task.name}",
        ("mean over responses", "responses"),
        tuple(row for row in rows if row[1][1] != "0"),
        "The premise of DATC. 0.5 would be chance.",
    )


# -- all of it ----------------------------------------------------------------------------------


def evidence(
    setting: Setting | str,
    *,
    strengths: Sequence[Strength] = ("strong", "weak"),
    size: float = 1.0,
    seed: int = 0,
    path_points: Sequence[int] = (1, 4),
    on_table: Callable[[Table], object] | None = None,
) -> list[Table]:
    """Every table for a setting of the lab, with each of its reward models.

    Args:
        setting: a setting, or the name of one.
        strengths: which reward models.
        size: factor on the numbers of responses, continuations and runs.
        seed: of everything.
        path_points: (a) is shown for each of these numbers of points.
        on_table: called with each table as it is done.
    """
    from tokencredit.lab.catalogue import setting as named
    from tokencredit.lab.reward_models import load_reward_model
    from tokencredit.lab.store import load_policy

    setting = named(setting) if isinstance(setting, str) else setting
    policy, _ = load_policy(setting)
    task = setting.task
    tables: list[Table] = []

    def done(table: Table, about: str) -> None:
        tables.append(dataclasses.replace(table, title=f"{table.title}; {about}"))
        if on_table is not None:
            on_table(tables[-1])

    def count(n: int, least: int = 2) -> int:
        return max(least, round(size * n))

    for strength in strengths:
        source = load_reward_model(setting, strength).source()
        about = f"{setting.name}, {strength} reward model"
        batch = None
        for points in sorted(path_points, reverse=True):
            batch = sample_batch(
                policy, task, source, prompts=count(80), group_size=8, seed=seed,
                path_points=points,
            )  # fmt: skip
            name = about + ("" if points == 1 else f", gradient averaged at {points} points")
            done(first_wrong_found(policy, task, source, batch, swaps=count(60), seed=seed), name)
        assert batch is not None
        done(misaligned(task, batch), about)
        done(
            agreement(
                policy, task, batch, responses=count(24), continuations=count(48, 8), seed=seed
            ),
            about,
        )
        for rate in LEARNING_RATES:
            done(
                gain_after_one_update(
                    policy, task, source, runs=count(12), learning_rate=rate, seed=seed
                ),
                f"{about}, a step of {rate}",
            )
    return tables
