"""The lab's frozen reward models: loaded, built, and measured.

Each setting has a strong and a deliberately weak one; see `reward_recipe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from tokencredit import __version__
from tokencredit.errors import InputError
from tokencredit.lab.catalogue import Setting
from tokencredit.lab.catalogue import setting as setting_named
from tokencredit.lab.evaluation import Evaluation
from tokencredit.lab.reward_training import (
    RewardRecipe,
    Samples,
    Strength,
    deciding_positions,
    fresh_reward_model,
    policy_samples,
    reward_recipe,
    right_results,
    token_values,
    train_reward_model,
)
from tokencredit.lab.store import (
    cached_weights,
    find_weights,
    load_policy,
    read_metadata,
    read_weights,
    round_weights,
    weights_in,
    write_weights,
)
from tokencredit.lab.tasks import Chain
from tokencredit.lab.warmup import OnProgress
from tokencredit.signals.reward_gradient import RewardModel, reward_gradients

__all__ = [
    "LabRewardModel",
    "RewardModelAccuracy",
    "build_reward_model",
    "load_reward_model",
    "localisation",
    "reward_model_accuracy",
    "reward_model_metadata",
]

_THRESHOLD_SEED = 4444
_FINAL_SEED = 999
_FINAL_PROMPTS = 1024
_FINAL_RESPONSES = 300
_MICRO_BATCH = 128


@dataclass(frozen=True, eq=False)
class LabRewardModel:
    """A frozen reward model of the lab, and how to read it.

    transformers' own pooling reads the last token only, so use `source`, which reads the score
    where the model was trained to give it.

    Attributes:
        model: ``...ForSequenceClassification`` with one label, float32, evaluation mode.
        setting: Whose policy and task it belongs to; its tokenizer is that policy's.
        pooling: "positions" or "last".
        positions: Columns counted from the response's first token; None unless pooling says so.
        metadata: See `reward_model_metadata`.
    """

    model: PreTrainedModel
    setting: Setting
    pooling: Literal["positions", "last"]
    positions: tuple[int, ...] | None
    metadata: Mapping[str, str]

    @property
    def threshold(self) -> float:
        """The score above which it holds a response right."""
        return float(self.metadata["threshold"])

    def source(self, *, checkpointing: bool = False) -> RewardModel:
        """What `tokencredit.signals.reward_gradient.reward_gradients` takes.

        Args:
            checkpointing: Less memory, one more forward pass.
        """
        return RewardModel(
            self.model,
            pooling=self.pooling,
            positions=self.positions,
            checkpointing=checkpointing,
        )


@dataclass(frozen=True)
class RewardModelAccuracy:
    """How well a reward model judges fresh samples of the policy.

    Attributes:
        outcome: Responses judged rightly, by the score against the model's threshold.
        base: What always giving the commoner answer would reach.
        auc: Probability that a right response scores above a wrong one.
        steps: On chain, results judged rightly given their own written operands, by the sign of
            the head; None for a model that does not judge steps.
        steps_base: The same of always giving the commoner answer.
    """

    outcome: Evaluation
    base: float
    auc: float
    steps: Evaluation | None = None
    steps_base: float | None = None


def load_reward_model(
    setting: Setting | str,
    strength: Strength | RewardRecipe = "strong",
    *,
    on_progress: OnProgress | None = None,
) -> LabRewardModel:
    """The setting's frozen reward model.

    The weights come from the package if they are shipped, else from the cache; if they are in
    neither, they are built into the cache, which takes one to three minutes, and the policy's own
    warm-up before that if it is not there yet.

    Args:
        setting: A setting, or the name of one.
        strength: "strong", "weak", or a recipe of your own.
        on_progress: Told how a build gets on, as ``on_progress(step, loss, accuracy)``.

    Returns:
        A new model on the CPU.

    Raises:
        InputError: There is no such setting or strength, or a stored file is damaged.

    Example:
        >>> reward = load_reward_model("chain-qwen3")
        >>> type(reward.model).__name__, reward.pooling, reward.positions
        ('Qwen3ForSequenceClassification', 'positions', (5, 12, 19, 26, 33))
    """
    setting, recipe = _named(setting, strength)
    name, fingerprint = _name(setting, recipe), recipe.fingerprint(setting)
    path = find_weights(name, fingerprint)
    if path is None:
        folder = cached_weights(name, fingerprint).parent
        path = build_reward_model(setting, folder, strength=recipe, on_progress=on_progress)
    model = read_weights(fresh_reward_model(setting, recipe), path)
    return _wrap(model, setting, recipe, read_metadata(path))


def build_reward_model(
    setting: Setting | str,
    folder: str | Path,
    *,
    strength: Strength | RewardRecipe = "strong",
    seed: int | None = None,
    on_progress: OnProgress | None = None,
) -> Path:
    """Train a reward model and write its weights, in float16, to ``folder/model.safetensors``.

    The same policy, recipe and seed on the same number of threads give the same weights.

    Args:
        setting: Whose policy to start from; it is built if it is not there yet.
        folder: Where to; made if absent.
        strength: "strong", "weak", or a recipe of your own.
        seed: Instead of the recipe's own. A file built from another seed records that and is
            not taken for the setting's reward model.
        on_progress: Told how it gets on, as ``on_progress(step, loss, accuracy)``; the last call
            has the held-out accuracy.

    Returns:
        The file written. Its header says how it came about; see `reward_model_metadata`.

    Raises:
        InputError: The recipe does not suit the task, or the folder cannot be written.
    """
    setting, recipe = _named(setting, strength)
    if seed is not None:
        recipe = replace(recipe, seed=seed)
    recipe.check(setting)
    path = weights_in(folder, "build_reward_model")
    policy, _ = load_policy(setting, on_progress=on_progress)
    model = train_reward_model(setting, recipe, policy, on_progress=on_progress)
    # Measured on the weights as stored, not on the float32 ones that they were rounded from.
    halved = round_weights(model)
    reward = _wrap(model, setting, recipe, {})
    seen = policy_samples(
        policy, setting.task, _FINAL_PROMPTS, seed=_THRESHOLD_SEED, held_out=False
    )
    threshold = _best_threshold(_scores(reward, seen), seen)
    reward = replace(reward, metadata={"threshold": f"{threshold:.4f}"})
    measured = reward_model_accuracy(reward, prompts=_FINAL_PROMPTS, seed=_FINAL_SEED)
    low, high = measured.outcome.interval
    found = localisation(reward, responses=_FINAL_RESPONSES, seed=_FINAL_SEED)
    metadata = {
        "setting": setting.name,
        "strength": recipe.name,
        "fingerprint": recipe.fingerprint(setting),
        "policy": setting.fingerprint,
        "labels": recipe.labels,
        "seed": str(recipe.seed),
        "steps": str(recipe.steps),
        "threshold": f"{threshold:.4f}",
        "accuracy": f"{measured.outcome.accuracy:.4f}",
        "accuracy_interval": f"{low:.4f} {high:.4f}",
        "base": f"{measured.base:.4f}",
        "auc": f"{measured.auc:.4f}",
        "localisation": f"{found:.4f}",
        "version": __version__,
    }
    if measured.steps is not None:
        metadata["step_accuracy"] = f"{measured.steps.accuracy:.4f}"
        metadata["step_base"] = f"{measured.steps_base:.4f}"
    write_weights(path, halved, metadata)
    if on_progress is not None:
        on_progress(recipe.steps, float("nan"), measured.outcome.accuracy)
    return path


def reward_model_metadata(
    setting: Setting | str, strength: Strength | RewardRecipe = "strong"
) -> dict[str, str] | None:
    """What the header of the stored reward model says; None if it is not built yet.

    Args:
        setting: A setting, or the name of one.
        strength: "strong", "weak", or a recipe of your own.

    Returns:
        ``setting``, ``strength``, ``labels``, ``seed``, ``steps``; ``fingerprint`` (of everything
        that decides the weights) and ``policy`` (the policy's); measured on 1,024 held-out
        prompts as `RewardModelAccuracy` says: ``accuracy``, ``accuracy_interval``, ``base``,
        ``auc`` and, if it judges steps, ``step_accuracy`` and ``step_base``; ``threshold``, set on
        other samples; ``localisation``; and the ``version`` of the package that built it.

    Raises:
        InputError: There is no such setting or strength, or the stored file is damaged.

    Example:
        >>> reward_model_metadata("chain-qwen3", "weak")["labels"]
        'outcomes'
    """
    setting, recipe = _named(setting, strength)
    path = find_weights(_name(setting, recipe), recipe.fingerprint(setting))
    return None if path is None else read_metadata(path)


def reward_model_accuracy(
    reward: LabRewardModel, *, prompts: int = 1024, seed: int
) -> RewardModelAccuracy:
    """How well a reward model judges fresh samples of its setting's policy.

    Args:
        reward: A reward model of the lab.
        prompts: How many prompts, drawn from the held-out split, with one response each.
        seed: Seed of the prompts and of the sampling.

    Raises:
        InputError: `prompts` is not positive.
    """
    samples = _fresh_samples(reward, prompts, seed, "reward_model_accuracy")
    right = samples.right
    scores = _scores(reward, samples)
    judged = int(((scores > reward.threshold) == right).sum())
    share = float(right.float().mean())
    accuracy = RewardModelAccuracy(
        Evaluation(judged, prompts), max(share, 1 - share), _area(scores[right], scores[~right])
    )
    task = reward.setting.task
    if reward.positions is None or not isinstance(task, Chain):
        return accuracy
    columns = torch.tensor(reward.positions) + task.prompt_length
    held = samples.attention[:, columns]
    truth = (samples.ids[:, columns] == right_results(task, samples.ids))[held]
    verdicts = (_values(reward, samples)[:, columns] > 0)[held]
    share = float(truth.float().mean())
    return replace(
        accuracy,
        steps=Evaluation(int((verdicts == truth).sum()), truth.numel()),
        steps_base=max(share, 1 - share),
    )


def localisation(reward: LabRewardModel, *, responses: int = 300, seed: int) -> float:
    """How well the reward gradient finds the first wrong token of a wrong response.

    Each token is ranked by the gain that the gradient expects from writing it anew: the score's
    gradient at its embedding, times the way from there to the policy's mean embedding. Within
    each response, the share of the other tokens that rank below the first wrong one (ties count
    half); then the mean over responses. 0.5 is chance.

    Args:
        reward: A reward model of the lab.
        responses: Of so many wrong responses of the policy to held-out prompts, or as many as
            there are among four times that.
        seed: Seed of the prompts and of the sampling.

    Returns:
        The mean area under the curve; NaN without a wrong response.
    """
    samples = _fresh_samples(reward, 4 * responses, seed, "localisation")
    wrong = [row for row, verdict in enumerate(samples.verdicts) if not verdict.correct]
    samples = samples.rows(wrong[:responses])
    if not samples.verdicts:
        return float("nan")
    policy, _ = load_policy(reward.setting)
    source = reward.source()
    with torch.no_grad():
        logits = policy(input_ids=samples.ids, attention_mask=samples.attention.long()).logits
    # The distribution that a token was drawn from is at the column before it.
    expected = torch.zeros(*samples.ids.shape, source.embedding.shape[1])
    expected[:, 1:] = logits[:, :-1].softmax(dim=-1) @ source.embedding
    way = expected - source.embed(samples.ids)
    areas: list[float] = []
    for part in reward_gradients(
        source, samples.ids, samples.attention, samples.response, micro_batch=_MICRO_BATCH
    ):
        gains = (part.gradient * way[part.rows]).sum(dim=-1)
        for gain, seen, verdict in zip(
            gains, samples.response[part.rows], samples.verdicts[part.rows], strict=True
        ):
            values = gain[seen]
            if verdict.first_wrong is not None and len(values) > 1:
                chosen = torch.arange(len(values)) == verdict.first_wrong
                areas.append(_area(values[chosen], values[~chosen]))
    return sum(areas) / len(areas) if areas else float("nan")


def _named(
    setting: Setting | str, strength: Strength | RewardRecipe
) -> tuple[Setting, RewardRecipe]:
    if isinstance(setting, str):
        setting = setting_named(setting)
    if isinstance(strength, RewardRecipe):
        return setting, strength
    return setting, reward_recipe(setting, strength)


def _name(setting: Setting, recipe: RewardRecipe) -> str:
    return f"{setting.name}-reward-{recipe.name}"


def _wrap(
    model: PreTrainedModel, setting: Setting, recipe: RewardRecipe, metadata: Mapping[str, str]
) -> LabRewardModel:
    positions = deciding_positions(setting.task) if recipe.pooling == "positions" else None
    model.requires_grad_(False)
    return LabRewardModel(model.eval(), setting, recipe.pooling, positions, metadata)


def _fresh_samples(reward: LabRewardModel, prompts: int, seed: int, owner: str) -> Samples:
    if prompts < 1:
        raise InputError(f"{owner}: give at least 1 prompt")
    policy, _ = load_policy(reward.setting)
    return policy_samples(policy, reward.setting.task, prompts, seed=seed, held_out=True)


def _scores(reward: LabRewardModel, samples: Samples) -> Float[Tensor, "n"]:
    """Read as a trainer reads them."""
    source = reward.source()
    scores: list[Tensor] = []
    with torch.no_grad():
        for start in range(0, len(samples.verdicts), _MICRO_BATCH):
            rows = slice(start, start + _MICRO_BATCH)
            embeddings = source.embed(samples.ids[rows])
            scores.append(
                source.score(embeddings, samples.attention[rows], samples.response[rows], rows)
            )
    return torch.cat(scores)


def _values(reward: LabRewardModel, samples: Samples) -> Float[Tensor, "n s"]:
    table = reward.model.get_input_embeddings()
    with torch.no_grad():
        return token_values(reward.model, table(samples.ids), samples.attention)


def _best_threshold(scores: Float[Tensor, "n"], samples: Samples) -> float:
    """Between the scores where most verdicts agree with the truth."""
    ordered, order = scores.sort()
    right = samples.right[order].long()
    # Cutting after k scores: the wrong ones among the first k and the right ones after them.
    agreed = torch.cat([torch.zeros(1), (1 - right).cumsum(0)])
    agreed = agreed + right.sum() - torch.cat([torch.zeros(1), right.cumsum(0)])
    edges = torch.cat([ordered[:1] - 1, ordered, ordered[-1:] + 1])
    cut = int(agreed.argmax())
    return float(edges[cut] + edges[cut + 1]) / 2


def _area(above: Float[Tensor, "n"], below: Float[Tensor, "m"]) -> float:
    """Probability that one of the first exceeds one of the second; ties count half."""
    difference = above.unsqueeze(1) - below.unsqueeze(0)
    return float(((difference > 0).double() + 0.5 * (difference == 0).double()).mean())
