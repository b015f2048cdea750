"""Writes what was sampled, scored and credited during training as records."""

from __future__ import annotations

import os
from typing import Any

import tokencredit
from tokencredit.engines.trl.event import CreditEvent
from tokencredit.errors import InputError
from tokencredit.records import (
    Record,
    append_records,
    compact,
    records_with_credit,
    token_texts,
)

__all__ = ["RolloutRecorder"]


class RolloutRecorder:
    """A listener for ``on_credit`` that appends each generation batch to a record file.

    Each call writes whole lines with one flush, so a killed run loses no step and doubles none
    (`tokencredit.records.truncate_after_step` on resuming).

    Args:
        path: a plain ``.jsonl`` file.
        tokenizer: its ``convert_ids_to_tokens`` gives the text of each token.
        every: write the batches of every so many optimiser steps; evaluation is not recorded.
        meta: put into every record's ``meta``: model, tokenizer, temperature, ...

    Example:
        from tokencredit.engines.trl import CreditGRPOTrainer, RolloutRecorder

        trainer = CreditGRPOTrainer(..., on_credit=[RolloutRecorder("rollouts.jsonl", tokenizer)])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tokenizer: Any,
        *,
        every: int = 1,
        meta: dict[str, Any] | None = None,
    ) -> None:
        if every < 1:
            raise InputError(f"RolloutRecorder: every must be at least 1, got {every!r}")
        self.path = os.fspath(path)
        self.tokenizer = tokenizer
        self.every = every
        self.meta = dict(meta or {})
        self._window: int | None = None
        self._step, self._batch = -1, 0

    def __call__(self, event: CreditEvent) -> None:
        """Write one batch, if it is due."""
        if event.mode != "train":
            return
        again = event.step == self._step
        if not again:
            window = event.step // self.every
            if self._window is None and event.step % self.every:
                self._window = window  # resumed inside a window: its step was recorded before
            if window == self._window:
                return
            self._window, self._step, self._batch = window, event.step, 0
        else:
            self._batch += 1  # a step of several generation batches
        append_records(self.path, self._records(event))

    def _records(self, event: CreditEvent) -> list[Record]:
        rollouts = event.rollouts
        mask = rollouts.mask.int().tolist()
        signals = {name: compact(value) for name, value in rollouts.signals.items()}
        rewards: Any = compact(rollouts.rewards)
        success: Any = rollouts.success.tolist() if event.success_known else [None] * len(rewards)
        keep: Any = rollouts.keep.tolist()
        truncated = event.truncated.tolist()
        group = rollouts.group.tolist()
        more = f"{self._batch}." if self._batch else ""
        meta = self.meta | {"tokencredit": tokencredit.__version__}
        if event.entropy_source is not None:
            meta["entropy_source"] = event.entropy_source
        plain = [
            Record(
                group=f"{event.step}.{more}{group[i]}",
                step=event.step,
                prompt=event.prompts[i],
                prompt_token_ids=event.prompt_ids[i],
                response=_text(event.responses[i]),
                token_ids=ids,
                tokens=token_texts(self.tokenizer, ids),
                mask=mask[i][: len(ids)],
                reward=rewards[i],
                rewards={name: values[i] for name, values in event.rewards.items()},
                success=success[i],
                keep=keep[i],
                truncated=truncated[i],
                signals={name: values[i][: len(ids)] for name, values in signals.items()},
                meta=meta,
            )
            for i, ids in enumerate(event.response_ids)
        ]
        rule = event.credit.rule
        assert rule is not None
        about = {"options": rule.options(), "version": tokencredit.__version__}
        return records_with_credit(plain, rule.name, event.credit, meta=about)


def _text(response: Any) -> str:
    """The text of a response, which is a string or a list of messages."""
    if isinstance(response, str):
        return response
    parts = [message.get("content") for message in response]
    return "\n".join(part for part in parts if isinstance(part, str))
