"""How often a policy is right, and how sure that is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tokencredit.errors import InputError
from tokencredit.lab.prompts import draw_prompts
from tokencredit.lab.sampling import sample_responses
from tokencredit.lab.tasks.task import Task

__all__ = ["Evaluation", "evaluate"]

_Z = 1.959963984540054  # the normal quantile of a two-sided 95% interval


@dataclass(frozen=True)
class Evaluation:
    """Correct responses among all that were sampled.

    Example:
        >>> result = Evaluation(correct=10, total=20)
        >>> result.accuracy
        0.5
        >>> "{:.4f} {:.4f}".format(*result.interval)
        '0.2993 0.7007'
    """

    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        """Share of the responses that are correct."""
        return self.correct / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """95% Wilson score interval of the accuracy.

        Source: E. B. Wilson, "Probable inference, the law of succession, and statistical
        inference", JASA 22 (1927).
        """
        n, p = self.total, self.accuracy
        scale = 1 + _Z**2 / n
        centre = (p + _Z**2 / (2 * n)) / scale
        half = _Z / scale * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2))
        return max(0.0, centre - half), min(1.0, centre + half)


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    *,
    prompts: int = 1024,
    seed: int,
    greedy: bool = False,
    temperature: float = 1.0,
    batch_size: int = 256,
) -> Evaluation:
    """Sample one response for each of `prompts` held-out prompts and count the correct ones.

    The model's mode and the global random state are left as they were. Policies compared at the
    same seed meet the same prompts.

    Args:
        model: A policy of the lab.
        tokenizer: The task's tokenizer.
        task: Whose prompts to draw and whose verifier to ask.
        prompts: How many prompts, drawn from the held-out split.
        seed: Seed of the prompts and of the sampling.
        greedy: Take the most probable token instead of sampling.
        temperature: Divides the logits; above 0.
        batch_size: Prompts at a time.

    Returns:
        The count of correct responses.

    Raises:
        InputError: `prompts`, the temperature or the batch size is not positive.
    """
    if prompts < 1:
        raise InputError(f"evaluate: prompts={prompts}; give at least 1")
    drawn = draw_prompts(task, prompts, seed, held_out=True)
    ids = torch.tensor([tokenizer.convert_tokens_to_ids(list(words)) for words in drawn])
    responses = sample_responses(
        model,
        ids,
        max_new_tokens=task.max_response,
        seed=seed,
        greedy=greedy,
        temperature=temperature,
        batch_size=batch_size,
    )
    verdicts = [
        task.verify(prompt, tokenizer.convert_ids_to_tokens(response))
        for prompt, response in zip(drawn, responses, strict=True)
    ]
    return Evaluation(sum(verdict.correct for verdict in verdicts), prompts)
