"""Signals that cannot be: out of range, of another temperature, or of another policy."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from tokencredit.doctor.batch import Batch
from tokencredit.doctor.masks import LOGPROBS, SAMPLER_LOGPROBS
from tokencredit.doctor.report import Finding, Tally

__all__ = ["Ranges", "Sampler", "Temperature"]

ROUNDING = 1e-3
"""How far below 0 an entropy and above 0 a log-probability may lie: bfloat16 and fused kernels
round by less."""
LARGEST_VOCABULARY = 2**20
"""Where nobody says how many tokens there are: no vocabulary in use has more."""
SIGMAS, LEAST_GAP, LEAST_TOKENS = 4.0, 0.05, 200
"""The temperature is at fault if surprise and entropy differ by four standard errors and by 5 %,
over at least 200 tokens. Four: by chance once in 16,000 files. 5 %: what a sampler of another
precision, which is no fault, stays below."""
LARGEST_KL, LARGEST_DIFFERENCE = 0.01, 0.1
"""Nats a token. Two engines of one policy in bfloat16 stay near 0.001 and 0.02; at ten times
that the importance ratios are no longer near 1."""


class Ranges:
    """Entropies below 0 or above log V, log-probabilities above 0."""

    def __init__(self, vocabulary: int | None) -> None:
        self._given = vocabulary
        self._negative, self._large, self._positive = Tally(), Tally(), Tally()
        self._entropies = self._logprobs = 0
        self._limits: set[int] = set()

    def look(self, batch: Batch) -> None:
        """Look at one batch; groups with a fault are `broken` from here on."""
        rollouts, mask = batch.rollouts, batch.rollouts.mask
        entropy = rollouts.signals.get("entropy")
        if entropy is not None:
            known = mask & ~entropy.isnan()
            self._entropies += int(known.sum())
            sizes = [self._vocabulary(record.meta) for record in batch.records]
            limit = torch.tensor(sizes, dtype=torch.float64).log().unsqueeze(1) + ROUNDING
            self._count(batch, self._negative, known & (entropy < -ROUNDING), "entropy", entropy)
            self._count(batch, self._large, known & (entropy > limit), "entropy", entropy)
        for name in LOGPROBS:
            if name in rollouts.signals:
                values = rollouts.signals[name]
                known = mask & ~values.isnan()
                self._logprobs += int(known.sum())
                self._count(batch, self._positive, known & (values > ROUNDING), name, values)

    def _vocabulary(self, meta: object) -> int:
        size = self._given
        if size is None and isinstance(meta, dict):
            stated: object = meta.get("vocab_size")  # pyright: ignore[reportUnknownVariableType]
            size = stated if isinstance(stated, int) and stated > 1 else None
        self._limits.add(size or LARGEST_VOCABULARY)
        return size or LARGEST_VOCABULARY

    def _count(self, batch: Batch, tally: Tally, bad: Tensor, name: str, values: Tensor) -> None:
        for row, token in _indices(bad):
            tally.add(batch.place(row, token, f"{name} {float(values[row, token]):.6g}"))
            batch.broken.add(batch.group_of[row])

    def findings(self) -> list[Finding]:
        """Up to one finding for entropies and one for log-probabilities."""
        found: list[Finding] = []
        limit = max(self._limits, default=LARGEST_VOCABULARY)
        above = f"above log V = {math.log(limit):.4g} (V = {limit})"
        parts = [
            f"{tally.count} {text}"
            for tally, text in ((self._negative, "below 0"), (self._large, above))
            if tally.count
        ]
        if parts:
            both = self._negative if self._negative.count else self._large
            found.append(
                Finding(
                    "entropy",
                    "fault",
                    f"entropies out of range: {', '.join(parts)}",
                    self._negative.count + self._large.count,
                    self._entropies,
                    "tokens",
                    both.place,
                    "entropies are in nats, over the whole vocabulary, from 0 to log V: look for "
                    "bits, a sign, or a sum over several tokens",
                )
            )
        if self._positive.count:
            found.append(
                Finding(
                    "logprob",
                    "fault",
                    "log-probabilities above 0",
                    self._positive.count,
                    self._logprobs,
                    "tokens",
                    self._positive.place,
                    "write log-probabilities, neither their negatives nor logits",
                )
            )
        return found


class Temperature:
    r"""Whether log-probabilities and entropies are those of the distribution that was sampled.

    For a token sampled from the distribution with entropy H, ``-logprob - H`` has mean 0 whatever
    came before, so the sum over all tokens is a martingale and its z-score close to normal. The
    variance of a term is taken as the larger of its square and ``H max(1, log 1/H)``, which is
    what a nearly certain token has: its rare surprises are seldom among the tokens at hand.

    Example:
        >>> Temperature().findings()
        []
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._surprise = self._entropy = self._variance = 0.0
        self._stated: set[str] = set()

    def look(self, batch: Batch) -> None:
        """Add up one batch, without its broken groups."""
        signals = batch.rollouts.signals
        if "entropy" not in signals or "logprob" not in signals:
            return
        entropy, logprob = signals["entropy"].double(), signals["logprob"].double()
        known = batch.rollouts.mask & ~(entropy + logprob).isnan() & batch.sound.unsqueeze(1)
        h, surprise = entropy[known].clamp(min=0), -logprob[known]
        rare = h * (1 / h.clamp(min=1e-30)).log().clamp(min=1)
        self._tokens += h.numel()
        self._surprise += float(surprise.sum())
        self._entropy += float(h.sum())
        self._variance += float(torch.maximum((surprise - h).square(), rare).sum())
        for record in batch.records:
            self._stated.add(str(record.meta.get("temperature", "not stated")))

    @property
    def whole_file(self) -> bool:
        """Whether there is a fault; it shows only over the whole file."""
        gap = self._surprise - self._entropy
        return (
            self._tokens >= LEAST_TOKENS
            and abs(gap) > LEAST_GAP * max(self._entropy, self._surprise)
            and abs(gap) > SIGMAS * math.sqrt(self._variance)
        )

    def findings(self) -> list[Finding]:
        """One finding, if surprise and entropy do not belong together."""
        if not self.whole_file:
            return []
        surprise, entropy = self._surprise / self._tokens, self._entropy / self._tokens
        z = (self._surprise - self._entropy) / math.sqrt(self._variance)
        why = (
            "entropies of a lower temperature, or log-probabilities of a higher one"
            if z > 0
            else "entropies of a higher temperature, log-probabilities of a lower one, or "
            "sampling cut by top_p, top_k or min_p"
        )
        stated = ", ".join(sorted(self._stated))
        return [
            Finding(
                "temperature",
                "fault",
                f"the sampled tokens' mean -logprob is {surprise:.4g} nats, but the mean entropy "
                f"is {entropy:.4g}, {abs(z):.1f} standard errors apart: {why} "
                f"(meta.temperature: {stated})",
                self._tokens,
                self._tokens,
                "tokens",
                None,
                "divide the logits by the sampling temperature before both, and take both from "
                "the policy that sampled",
            )
        ]


class Sampler:
    """Whether the engine that sampled and the one that trains agree on log-probabilities."""

    def __init__(self) -> None:
        self._names: dict[str, list[float]] = {}
        self._places: dict[str, tuple[float, Tally]] = {}

    def look(self, batch: Batch) -> None:
        """Add up one batch, without its broken groups."""
        signals = batch.rollouts.signals
        if "logprob" not in signals:
            return
        trainer = signals["logprob"].double()
        for name in SAMPLER_LOGPROBS:
            if name not in signals:
                continue
            difference = trainer - signals[name].double()
            known = batch.rollouts.mask & ~difference.isnan() & batch.sound.unsqueeze(1)
            d = torch.where(known, difference, 0.0)
            kl = d.clamp(max=20).expm1() - d  # never below 0, and the KL on average
            sums = self._names.setdefault(name, [0.0] * 4)
            largest = float(d.abs().max()) if d.numel() else 0.0
            for i, value in enumerate((known, d.abs(), kl, d.abs() > 1)):
                sums[i] += float(value.sum())
            if largest > self._places.get(name, (0.0, None))[0]:
                row, token = divmod(int(d.abs().argmax()), d.shape[1])
                tally = Tally()
                tally.add(
                    batch.place(
                        row,
                        token,
                        f"logprob {float(trainer[row, token]):.4g}, "
                        f"{name} {float(signals[name][row, token]):.4g}",
                    )
                )
                self._places[name] = largest, tally

    def findings(self) -> list[Finding]:
        """One finding a pair of signals that disagree."""
        found: list[Finding] = []
        for name, (tokens, size, kl, far) in self._names.items():
            if tokens and (kl > LARGEST_KL * tokens or size > LARGEST_DIFFERENCE * tokens):
                found.append(
                    Finding(
                        "sampler",
                        "fault",
                        f"logprob and {name} disagree: mean |difference| {size / tokens:.3g} "
                        f"nats, KL {kl / tokens:.3g} a token; tokens more than 1 nat apart",
                        int(far),
                        int(tokens),
                        "tokens",
                        self._places[name][1].place,
                        "compare precision, temperature, weights and tokenization of sampler and "
                        "trainer, or correct by truncated importance sampling",
                    )
                )
        return found


def _indices(bad: Tensor) -> list[tuple[int, int]]:
    return [(row, token) for row, token in cast("list[list[int]]", bad.nonzero().tolist())]
