"""Reward models for the lab: the policy's own backbone, taught to judge.

Two kinds of labels. ``outcomes``: was the response right? The ordinary outcome reward model,
trained on the policy's own samples and read at the last token. ``steps``: is this result right,
given the operands written before it? Only for `Chain`, whose verifier gives these labels for
free; read at the results. Outcome labels alone do not teach a model of this size to check
arithmetic within minutes, step labels do.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from tokencredit.errors import InputError, nearest
from tokencredit.lab.catalogue import Setting
from tokencredit.lab.prompts import draw_prompts, stream_prompts
from tokencredit.lab.sampling import sample_responses
from tokencredit.lab.tasks import Chain, Task, Verdict
from tokencredit.lab.tasks.task import OPERATIONS, SPECIAL_TOKENS
from tokencredit.lab.warmup import OnProgress, fresh_policy

__all__ = ["RewardRecipe", "Strength", "reward_recipe"]

Strength = Literal["strong", "weak"]
Labels = Literal["steps", "outcomes"]

_PAD = SPECIAL_TOKENS.index("<pad>")
_RAMP = 30  # steps from zero to the full learning rate
_TELL_EVERY = 25


@dataclass(frozen=True)
class RewardRecipe:
    """How a reward model is made from a setting's policy.

    `dataclasses.replace` makes variants; each gets a file of its own.

    Attributes:
        name: What to call it, in folders and metadata.
        labels: "steps" (`Chain` only) or "outcomes"; see the module.
        steps: Optimiser steps.
        samples: Outcomes: how many responses the policy writes to learn from, read again and
            again in shuffled order until the steps are done. Steps: not used, each batch of
            demonstrations is new.
        extra_layers: New blocks on top of the policy's, under the final norm.
        frozen: Train only the new blocks, the final norm and the head; the policy's embeddings
            and blocks stay as they are. Needs `extra_layers`.
        noises: Steps: demonstrations err at one of these rates, each as likely as the others.
        interpolate: Steps: move each result's embedding a uniform part of the way to a random
            value's, and its label as far. The score then changes more evenly between tokens, which
            is what makes its gradient at a token point to better ones.
        interpolate_from: The share of the steps after which that begins.
        name_results: Steps: at each result, also learn to name the right one through the
            embeddings. That is quickly learnt, and gives the judgement something to compare the
            written result with.
        batch_size: Responses in a step.
        learning_rate: Its peak; a ramp, then linear decay to zero.
        seed: Of new weights, samples and order.
    """

    name: str
    labels: Labels
    steps: int
    samples: int = 0
    extra_layers: int = 0
    frozen: bool = False
    noises: tuple[float, ...] = ()
    interpolate: bool = False
    interpolate_from: float = 0.0
    name_results: bool = False
    batch_size: int = 64
    learning_rate: float = 1e-3
    seed: int = 0

    @property
    def pooling(self) -> Literal["positions", "last"]:
        """Where the score is read, as `tokencredit.signals.reward_gradient.RewardModel` says it."""
        return "positions" if self.labels == "steps" else "last"

    def fingerprint(self, setting: Setting) -> str:
        """Eight hexadecimal digits that change with all that changes the weights.

        The policy is part of it, through its own fingerprint; the name is not.
        """
        fields = dataclasses.asdict(replace(self, name="")) | {"policy": setting.fingerprint}
        for name in _ADDED_FIELDS:
            if fields[name] == getattr(RewardRecipe, name):
                del fields[name]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:8]

    def check(self, setting: Setting) -> None:
        """Refuse what cannot be trained.

        Raises:
            InputError: The labels do not suit the task, or a number is out of range.
        """
        owner = f"reward recipe {self.name!r}"
        if self.labels not in get_args(Labels):
            raise InputError(f"{owner}: labels={self.labels!r}; give 'steps' or 'outcomes'")
        if self.labels == "steps" and not isinstance(setting.task, Chain):
            raise InputError(
                f"{owner}: labels='steps' judge arithmetic of the task chain, not of "
                f"{setting.task.name!r}; give labels='outcomes'"
            )
        needed = {"steps": self.steps, "batch_size": self.batch_size}
        if self.labels == "outcomes":
            needed["samples"] = self.samples
        for field, value in needed.items():
            if value < 1:
                raise InputError(f"{owner}: {field}={value}; give at least 1")
        if self.labels == "steps" and not self.noises:
            raise InputError(f"{owner}: noises is empty; give at least one rate")
        if not 0 <= self.interpolate_from < 1:
            raise InputError(
                f"{owner}: interpolate_from={self.interpolate_from}; give a share of the steps, "
                "at least 0 and below 1"
            )
        if self.frozen and self.extra_layers < 1:
            raise InputError(f"{owner}: frozen=True trains new layers; give extra_layers of 1 or 2")


# Left out of the fingerprint at their defaults, so that models built before them keep theirs.
_ADDED_FIELDS = ("interpolate_from", "name_results")

_STRONG_STEPS = RewardRecipe(
    "strong",
    "steps",
    steps=600,
    learning_rate=3e-3,
    extra_layers=2,
    frozen=True,
    noises=(0.0, 0.15, 0.5, 0.5),
    interpolate=True,
)
# Under a frozen Llama the new blocks stay at the base rate for hundreds of steps. A frozen GPT-2
# reads an operand not where it is written but at the result before it, which is interpolated.
_STRONG_STEPS_NAMED = replace(
    _STRONG_STEPS,
    steps=480,
    learning_rate=2e-3,
    extra_layers=1,
    frozen=False,
    interpolate_from=1 / 3,
    name_results=True,
)
_STRONG_OUTCOMES = RewardRecipe("strong", "outcomes", steps=512, samples=16_384)
_WEAK_CHAIN = RewardRecipe("weak", "outcomes", steps=192, samples=4096)
# Whether a target is hit is easy to see: with the samples of chain the area would be 0.90.
_WEAK_OUTCOMES = RewardRecipe("weak", "outcomes", steps=96, samples=2048)


def reward_recipe(setting: Setting, strength: Strength) -> RewardRecipe:
    """The lab's own recipe for a setting.

    ``strong``: on chain, step labels (Qwen3 under a frozen backbone, the other families trained
    whole); on other tasks, outcome labels on many samples. ``weak``: outcome labels on a few
    samples. It knows little more than chance, which is the point: a reward model that has become
    the verifier proves nothing about a method that has to live with an imperfect one.

    Args:
        setting: For which.
        strength: "strong" or "weak".

    Raises:
        InputError: Another strength.

    Example:
        >>> from tokencredit.lab import setting
        >>> reward_recipe(setting("chain-qwen3"), "strong").labels
        'steps'
    """
    if strength not in get_args(Strength):
        raise InputError(
            f"strength={strength!r}{nearest(str(strength), get_args(Strength))}; give 'strong', "
            "'weak', or a RewardRecipe"
        )
    if isinstance(setting.task, Chain):
        strong = _STRONG_STEPS if setting.family == "qwen3" else _STRONG_STEPS_NAMED
        return strong if strength == "strong" else _WEAK_CHAIN
    return _STRONG_OUTCOMES if strength == "strong" else _WEAK_OUTCOMES


@dataclass(frozen=True, eq=False)
class Samples:
    """Responses that a policy wrote, with the verifier's verdicts.

    Attributes:
        ids: ``[n, s]`` prompts and responses, padded on the right.
        attention: ``[n, s]`` bool, False at padding.
        response: ``[n, s]`` bool, the responses' tokens.
        verdicts: One a row.
    """

    ids: Int[Tensor, "n s"]
    attention: Bool[Tensor, "n s"]
    response: Bool[Tensor, "n s"]
    verdicts: list[Verdict]

    @property
    def right(self) -> Bool[Tensor, "n"]:
        """Which responses reached the goal."""
        return torch.tensor([verdict.correct for verdict in self.verdicts])

    def rows(self, chosen: Sequence[int]) -> Samples:
        """Some of the rows."""
        verdicts = [self.verdicts[row] for row in chosen]
        index = torch.tensor(chosen, dtype=torch.long)
        return Samples(self.ids[index], self.attention[index], self.response[index], verdicts)


def policy_samples(
    policy: PreTrainedModel, task: Task, count: int, *, seed: int, held_out: bool
) -> Samples:
    """One response of the policy, at temperature 1, to each of `count` prompts."""
    prompts = draw_prompts(task, count, seed, held_out=held_out)
    vocabulary = task.vocabulary
    ids = {word: index for index, word in enumerate(vocabulary)}
    prompt_ids = torch.tensor([[ids[word] for word in prompt] for prompt in prompts])
    written = sample_responses(policy, prompt_ids, max_new_tokens=task.max_response, seed=seed)
    length = torch.tensor([len(response) for response in written]).unsqueeze(1)
    padded = torch.full((count, task.prompt_length + task.max_response), _PAD)
    padded[:, : task.prompt_length] = prompt_ids
    for row, response in enumerate(written):
        padded[row, task.prompt_length : task.prompt_length + len(response)] = torch.tensor(
            response, dtype=torch.long
        )
    column = torch.arange(padded.shape[1])
    attention = column < task.prompt_length + length
    verdicts = [
        task.verify(prompt, [vocabulary[i] for i in response])
        for prompt, response in zip(prompts, written, strict=True)
    ]
    return Samples(padded, attention, attention & (column >= task.prompt_length), verdicts)


def deciding_positions(task: Task) -> tuple[int, ...]:
    """Columns of a response, counted from its first, where a token decides the outcome.

    Example:
        >>> deciding_positions(Chain(steps=2))
        (5, 12)
    """
    # Kinds go by position, whatever is written there.
    prompt = task.problem(random.Random(0))
    kinds = task.verify(prompt, ("<unk>",) * task.max_response).kinds
    return tuple(index for index, kind in enumerate(kinds) if kind == "deciding")


def right_results(task: Chain, ids: Int[Tensor, "n s"]) -> Int[Tensor, "n k"]:
    """The id that is right at each result, given the operands written before it; -1 for none.

    Args:
        task: The chain.
        ids: Prompts and complete responses; what has been cut off is padding.

    Example:
        >>> task = Chain(steps=1, fillers=0)
        >>> ids = torch.tensor([[task.vocabulary.index(w) for w in "6 - 4 = 6 - 3 = 2".split()]])
        >>> [task.vocabulary[i] for i in right_results(task, ids)[0]]
        ['3']
    """
    words = {word: index for index, word in enumerate(task.vocabulary)}
    values = [words[str(value)] for value in range(task.modulus)]
    table = torch.full((len(words),) * 3, -1)
    for operator in task.operators:
        for left in range(task.modulus):
            for right in range(task.modulus):
                result = OPERATIONS[operator](left, right) % task.modulus
                table[values[left], words[operator], values[right]] = values[result]
    result = torch.tensor(deciding_positions(task)) + task.prompt_length
    return table[ids[:, result - 4], ids[:, result - 3], ids[:, result - 2]]


def fresh_reward_model(setting: Setting, recipe: RewardRecipe) -> PreTrainedModel:
    """A classifier of the policy's family with one label, its weights drawn from the seed."""
    layers = setting.layers + recipe.extra_layers
    config = fresh_policy(replace(setting, layers=layers)).config
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(recipe.seed)
        return AutoModelForSequenceClassification.from_config(config).eval()


def train_reward_model(
    setting: Setting,
    recipe: RewardRecipe,
    policy: PreTrainedModel,
    *,
    on_progress: OnProgress | None = None,
) -> PreTrainedModel:
    """Teach the policy's backbone to judge, as the recipe says.

    Args:
        setting: The task, and the policy's shape.
        recipe: What to do.
        policy: The warm policy; left as it was.
        on_progress: Called after every 25th step, the accuracy (of that batch's labels) None
            where soft labels have none.

    Returns:
        The classifier, frozen and in evaluation mode.
    """
    recipe.check(setting)
    model = fresh_reward_model(setting, recipe)
    prefix = policy.base_model_prefix
    _backbone(model).load_state_dict(getattr(policy, prefix).state_dict(), strict=False)
    taken = {f"{prefix}.{name}" for name, _ in getattr(policy, prefix).named_parameters()}
    for name, parameter in model.named_parameters():
        # The norm after the last block now follows the new ones, so it learns with them.
        final_norm = name.rsplit(".", 2)[-2] in ("norm", "ln_f")
        parameter.requires_grad_(not recipe.frozen or name not in taken or final_norm)
    losses = _step_losses if recipe.labels == "steps" else _outcome_losses
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step, loss in enumerate(
        islice(losses(setting.task, recipe, model, policy), recipe.steps), start=1
    ):
        share = min(1.0, step / _RAMP) * (1 - (step - 1) / recipe.steps)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * share
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if on_progress is not None and (step % _TELL_EVERY == 0 or step == recipe.steps):
            on_progress(step, loss.item(), None)
    return model.requires_grad_(False).eval()


def _step_losses(
    task: Any, recipe: RewardRecipe, model: PreTrainedModel, policy: PreTrainedModel
) -> Iterator[Tensor]:
    rng, generator = random.Random(recipe.seed), torch.Generator().manual_seed(recipe.seed)
    writers = [replace(task, noise=noise) for noise in recipe.noises]
    words = {word: index for index, word in enumerate(task.vocabulary)}
    values = torch.tensor([words[str(value)] for value in range(task.modulus)])
    columns = torch.tensor(deciding_positions(task)) + task.prompt_length
    prompts = stream_prompts(task, rng)
    table: Any = model.get_input_embeddings()
    for step in count():
        batch = list(islice(prompts, recipe.batch_size))
        shown = [(*prompt, *rng.choice(writers).demonstration(prompt, rng)) for prompt in batch]
        ids = torch.tensor([[words[word] for word in row] for row in shown])
        right = right_results(task, ids)
        labels = (ids[:, columns] == right).float()
        embeddings = table(ids)
        if recipe.interpolate:
            other = values[torch.randint(len(values), right.shape, generator=generator)]
            # The whole way only from halfway through these steps: mixed from the start, the
            # labels say so little that nothing is learnt for hundreds of steps.
            start = recipe.interpolate_from
            furthest = min(1.0, max(0.0, 2 * (step / recipe.steps - start) / (1 - start)))
            share = furthest * torch.rand(right.shape, generator=generator)
            labels = torch.lerp(labels, (other == right).float(), share)
            moved = torch.lerp(embeddings[:, columns], table(other), share.unsqueeze(-1))
            embeddings = embeddings.index_copy(1, columns, moved)
        attention = torch.ones_like(ids, dtype=torch.bool)
        states = token_states(model, embeddings, attention)
        loss = binary_cross_entropy_with_logits(_head(model, states)[:, columns], labels)
        if recipe.name_results:
            named = states[:, columns] @ table.weight.T
            loss = loss + cross_entropy(named.flatten(0, 1), right.flatten())
        yield loss


def _outcome_losses(
    task: Task, recipe: RewardRecipe, model: PreTrainedModel, policy: PreTrainedModel
) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(recipe.seed)
    # Another stream of prompts than the policy's own training draws with the same seed.
    samples = policy_samples(
        policy, task, recipe.samples, seed=recipe.seed + 100_000, held_out=False
    )
    labels, last = samples.right.float(), samples.attention.sum(dim=1) - 1
    table = model.get_input_embeddings()
    while True:
        order = torch.randperm(recipe.samples, generator=generator)
        for rows in order.split(recipe.batch_size):
            values = token_values(model, table(samples.ids[rows]), samples.attention[rows])
            values = values.gather(1, last[rows].unsqueeze(1)).squeeze(1)
            yield binary_cross_entropy_with_logits(values, labels[rows])


def token_values(
    model: PreTrainedModel, embeddings: Float[Tensor, "n s e"], attention: Bool[Tensor, "n s"]
) -> Float[Tensor, "n s"]:
    """The head read at every token."""
    return _head(model, token_states(model, embeddings, attention))


def token_states(
    model: PreTrainedModel, embeddings: Float[Tensor, "n s e"], attention: Bool[Tensor, "n s"]
) -> Float[Tensor, "n s e"]:
    """What the head reads, after the final norm."""
    return _backbone(model)(
        inputs_embeds=embeddings, attention_mask=attention.long(), use_cache=False
    ).last_hidden_state


def _head(model: PreTrainedModel, states: Float[Tensor, "n s e"]) -> Float[Tensor, "n s"]:
    return model.score(states).squeeze(-1)  # pyright: ignore[reportCallIssue]


def _backbone(model: PreTrainedModel) -> Any:
    return getattr(model, model.base_model_prefix)
