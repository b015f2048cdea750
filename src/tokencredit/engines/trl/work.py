"""The signals of DATC inside TRL: a frozen reward model's gradient against the policy's update."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokencredit.errors import InputError, nearest
from tokencredit.methods.rule import Rule
from tokencredit.signals.alignment import (
    EXTRA,
    Alignment,
    RewardInput,
    alignment_signals,
    chat_input,
    plain_input,
    text_input,
)
from tokencredit.signals.policy import check_policy_head
from tokencredit.signals.reward_gradient import (
    GoldAnswer,
    RewardModel,
    RewardSource,
    check_same_tokenizer,
)
from tokencredit.signals.statistics import STATISTICS

__all__ = ["FROM_REWARDS", "MARKS", "WORK_SIGNALS", "TokenMarks", "WorkSignals", "needs_work"]

logger = logging.getLogger("tokencredit")

FROM_REWARDS = "from_rewards"
"""As ``reward_model``: the reward model that is among the trainer's reward functions."""
WORK_SIGNALS = tuple(name for name in (*STATISTICS, *EXTRA) if name not in ("logprob", "entropy"))
"""Signals that need the reward model (or, some of them, only the policy's statistics)."""

MARKS = ("eos", "structural")
"""Signals that mark tokens which carry no decision: 1 there, 0 elsewhere."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)

LITTLE = 0.5
"""A share of tokens with a usable gradient below which the user is told."""


def needs_work(rule: Rule | None, given: Collection[str] = ()) -> bool:
    """Whether a rule needs a signal of the reward model, beyond those that are given."""
    return rule is not None and bool(set(rule.needs) & set(WORK_SIGNALS) - set(given))


class TokenMarks:
    """The signals `MARKS` of a batch.

    Args:
        tokenizer: the policy's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._structural: dict[int, bool] = {}

    def form(self, completion_ids: Tensor, ends: Tensor) -> dict[str, Tensor]:
        """Which tokens end a response, and which are structural."""
        marked = [i for i in completion_ids.unique().tolist() if self._is_structural(i)]
        marks = torch.tensor(marked, device=completion_ids.device, dtype=completion_ids.dtype)
        return {
            "eos": torch.isin(completion_ids, ends).float(),
            "structural": torch.isin(completion_ids, marks).float(),
        }

    def _is_structural(self, token: int) -> bool:
        """White space alone, or a full stop that ends a line: tokens that carry no decision."""
        known = self._structural.get(token)
        if known is None:
            text = self.tokenizer.decode([token])
            known = bool(text) and (text.isspace() or (text.strip() == "." and "\n" in text))
            self._structural[token] = known
        return known


class WorkSignals:
    """Forms the signals of a generation batch on this rank, before rewards are asked for.

    Args:
        source: what is differentiated.
        needs: names of the signals that the rule reads; those of others are left to others.
        policy_tokenizer: the trainer's tokenizer.
        reward_tokenizer: the reward model's; None = it reads the policy's own tokens.
        column: index of the reward function whose scores these are, to share the forward pass.
        path_points: see `alignment_signals`.
        micro_batch: rows at a time.
        temperature: of sampling.
    """

    def __init__(
        self,
        source: RewardSource,
        *,
        needs: Collection[str],
        policy_tokenizer: Any,
        reward_tokenizer: Any = None,
        column: int | None = None,
        path_points: int = 1,
        micro_batch: int = 8,
        temperature: float = 1.0,
    ) -> None:
        if reward_tokenizer is not None:
            check_same_tokenizer(policy_tokenizer, reward_tokenizer)
        self.source = source
        self.want = tuple(
            dict.fromkeys([*(n for n in needs if n in WORK_SIGNALS), "logprob", "entropy"])
        )
        self.tokenizer = policy_tokenizer
        self.reward_tokenizer = reward_tokenizer
        self.column = column
        self.path_points = path_points
        self.micro_batch = micro_batch
        self.temperature = temperature
        self.last: Alignment | None = None
        self._verified = False
        self._warned = False

    @staticmethod
    def of(
        reward_model: Any,
        *,
        trainer: Any,
        needs: Collection[str],
        reward_tokenizer: Any,
        path_points: int,
        micro_batch: int | None,
    ) -> WorkSignals:
        """From what the user gave as ``reward_model``.

        Raises:
            InputError: no reward model among the reward functions, several, or one that cannot
                be differentiated.
        """
        column = None
        if isinstance(reward_model, str) and reward_model == FROM_REWARDS:
            models = [i for i, f in enumerate(trainer.reward_funcs) if isinstance(f, nn.Module)]
            if len(models) != 1:
                raise InputError(
                    f"reward_model={FROM_REWARDS!r}: {len(models)} of the reward functions are "
                    "reward models; exactly one is needed"
                )
            column = models[0]
            reward_model = trainer.reward_funcs[column]
            reward_tokenizer = trainer.reward_processing_classes[column]
        elif isinstance(reward_model, str):
            from transformers import AutoModelForSequenceClassification

            try:
                name, dtype = reward_model, "auto"
                reward_model = AutoModelForSequenceClassification.from_pretrained(name, dtype=dtype)
                if reward_tokenizer is None:
                    reward_tokenizer = _tokenizer_in(name)
            except (OSError, ValueError) as error:
                raise InputError(
                    f"reward_model={reward_model!r}: {' '.join(str(error).split())}"
                ) from error
        if path_points != int(path_points) or path_points < 1:
            raise InputError(f"path_points must be a whole number from 1, got {path_points!r}")
        if micro_batch is not None and micro_batch < 1:
            raise InputError(f"reward_micro_batch must be at least 1, got {micro_batch!r}")
        if isinstance(reward_model, nn.Module):
            _refuse_shared(reward_model, trainer.model)
            reward_model = RewardModel(reward_model)
        for method in ("embed", "score"):
            if not callable(getattr(reward_model, method, None)):
                raise InputError(
                    "reward_model must be a transformers sequence classifier, its name or folder, "
                    f"{FROM_REWARDS!r}, a RewardModel or a GoldAnswer, got {reward_model!r}"
                )
        if isinstance(reward_model, RewardModel | GoldAnswer):
            _refuse_shared(reward_model.model, trainer.model)
            reward_model.model.to(trainer.accelerator.device)
        if isinstance(reward_model, GoldAnswer) and reward_model.column is None:
            raise InputError(
                "reward_model: a trainer's rows change from batch to batch: give GoldAnswer the "
                "name of the data set's column of answers in place of a list"
            )
        if reward_tokenizer is None and isinstance(reward_model, RewardModel):
            reward_tokenizer = _own_tokenizer(reward_model.model)
        args = trainer.args
        if args.top_p < 1.0 or (args.top_k or 0) > 0 or (args.min_p or 0.0) > 0:
            logger.warning(
                "tokencredit: sampling is truncated (top_p, top_k or min_p); the statistics are "
                "those of the untruncated softmax"
            )
        return WorkSignals(
            reward_model,
            needs=needs,
            policy_tokenizer=trainer._tokenizer,
            reward_tokenizer=reward_tokenizer,
            column=column,
            path_points=path_points,
            micro_batch=micro_batch or args.per_device_train_batch_size,
            temperature=trainer.temperature,
        )

    def _set_answers(self, rows: list[Any]) -> None:
        """Give a `GoldAnswer` the answers of these rows of the data set."""
        if not isinstance(self.source, GoldAnswer) or self.source.column is None:
            return
        column = self.source.column
        if rows and column not in rows[0]:
            raise InputError(
                f"GoldAnswer: the data set has no column {column!r}{nearest(column, rows[0])}"
            )
        answers: list[Any] = [row[column] for row in rows]
        for answer in answers:
            if not isinstance(answer, str | list):
                raise InputError(
                    f"GoldAnswer: column {column!r} must hold text or lists of token ids, got "
                    f"{answer!r}"
                )
        self.source.set_answers(
            [
                self.tokenizer.encode(a, add_special_tokens=False) if isinstance(a, str) else a
                for a in answers
            ]
        )

    def form(
        self,
        rows: list[Any],
        policy: Any,
        prompts: list[Any],
        prompt_ids: list[list[int]],
        response_ids: list[list[int]],
        device: torch.device,
    ) -> Alignment:
        """Score a batch and form its signals; kept in ``last`` until `take`."""
        self._set_answers(rows)
        ids, attention, mask = _batch(prompt_ids, response_ids, self.tokenizer.pad_token_id, device)
        reward_input = self._input(prompts, prompt_ids, response_ids, mask.shape[1], device)
        if not self._verified:
            check_policy_head(policy, ids[:1], attention[:1])
            if isinstance(self.source, RewardModel | GoldAnswer):
                self.source.verify(reward_input.input_ids[:2], reward_input.attention_mask[:2])
            self._verified = True
        self.last = alignment_signals(
            policy,
            self.source,
            ids,
            attention,
            mask,
            reward_input,
            want=self.want,
            temperature=self.temperature,
            micro_batch=self.micro_batch,
            path_points=self.path_points,
        )
        self._say_if_blind(self.last, mask)
        return self.last

    def _say_if_blind(self, found: Alignment, mask: Tensor) -> None:
        """Point out, once, that most tokens say nothing to the reward model."""
        finite = 1 - found.non_finite / max(mask.shape[0], 1)
        share = finite * (1 - found.unmapped / max(int(mask.sum()), 1))
        if share < LITTLE and not self._warned:
            self._warned = True
            logger.warning(
                "tokencredit: only %.0f %% of the tokens have a counterpart with a finite gradient "
                "in what the reward model reads; the others keep weight 1 (credit/coverage). %s",
                100 * share,
                "The scores or gradients of whole responses are not finite: load the reward model "
                "in bfloat16 or float32"
                if finite < LITTLE
                else "It reads the text in other tokens than the policy wrote: let prompts end "
                "where a token ends (in a space or a line break), or use text prompts and give the "
                "reward model apart from the rewards (reward_model=...), where it reads the "
                "policy's own tokens",
            )

    def take(self, completion_ids: Tensor) -> dict[str, Tensor]:
        """The formed signals at the width of TRL's tensors."""
        assert self.last is not None
        found, self.last = self.last, None
        width = completion_ids.shape[1]
        return {
            name: nn.functional.pad(value, (0, width - value.shape[1]), value=torch.nan)
            for name, value in found.signals.items()
        }

    def _input(
        self,
        prompts: list[Any],
        prompt_ids: list[list[int]],
        response_ids: list[list[int]],
        width: int,
        device: torch.device,
    ) -> RewardInput:
        pad = self.tokenizer.pad_token_id
        if self.reward_tokenizer is not None and isinstance(prompts[0], list):
            return chat_input(
                self.reward_tokenizer, prompts, response_ids, width, pad=pad, device=device
            )
        if self.column is not None:
            return text_input(
                self.reward_tokenizer, prompts, response_ids, width, pad=pad, device=device
            )
        return plain_input(prompt_ids, response_ids, width, pad=pad, device=device)


def _refuse_shared(model: Any, policy: Any) -> None:
    """The reward model is frozen: where it shares the policy's weights, those would be too."""
    own = {id(p) for p in policy.parameters()}
    if any(id(p) in own for p in model.parameters()):
        raise InputError(
            "reward_model shares weights with the policy, which are frozen in it and then would "
            "not be trained: give it a copy"
        )


def _tokenizer_in(name: str) -> Any:
    """The tokenizer of a folder or name; refused where a folder holds none.

    Of a folder without one transformers makes up an empty tokenizer of the model's family.
    """
    from transformers import AutoTokenizer

    if Path(name).is_dir() and not any((Path(name) / file).is_file() for file in TOKENIZER_FILES):
        raise InputError(
            f"reward_model={name!r}: the folder holds no tokenizer; save the policy's into it if "
            "that is what it was trained with (tokenizer.save_pretrained), or give it by "
            "reward_tokenizer=..."
        )
    return AutoTokenizer.from_pretrained(name)


def _own_tokenizer(model: Any) -> Any:
    """The tokenizer that lies beside a model given as an object, if one does."""
    from transformers import AutoTokenizer

    name = getattr(model.config, "_name_or_path", "")
    if name:
        with contextlib.suppress(OSError, ValueError):  # of which InputError is one
            if Path(name).is_dir():
                return _tokenizer_in(name)
            return AutoTokenizer.from_pretrained(name, local_files_only=True)
    logger.warning(
        "tokencredit: the reward model's tokenizer is not known, so it is taken to be the policy's "
        "and reads its tokens as they are; give it by reward_tokenizer=..."
    )
    return None


def _batch(
    prompt_ids: list[list[int]], response_ids: list[list[int]], pad: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Prompts padded on the left, responses on the right, as TRL lays them out."""
    p, t = max(map(len, prompt_ids)), max(max(map(len, response_ids)), 1)
    ids, seen = [], []
    for prompt, response in zip(prompt_ids, response_ids, strict=True):
        left, right = p - len(prompt), t - len(response)
        ids.append([pad] * left + list(prompt) + list(response) + [pad] * right)
        seen.append([0] * left + [1] * (len(prompt) + len(response)) + [0] * right)
    ids_t = torch.tensor(ids, dtype=torch.long, device=device)
    seen_t = torch.tensor(seen, dtype=torch.bool, device=device)
    return ids_t, seen_t, seen_t[:, -t:]
