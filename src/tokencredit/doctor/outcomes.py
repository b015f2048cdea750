"""Rewards, verdicts and lengths that contradict one another, and groups that teach nothing."""

from __future__ import annotations

import hashlib
import math

from tokencredit.doctor.batch import Batch, right
from tokencredit.doctor.report import Finding, Place, Tally
from tokencredit.records.schema import Record

__all__ = ["Repeats", "Success", "Truncation", "Variance"]

MOST_SCORES = 10_000
"""Distinct values of one reward that are kept; later ones are not looked at."""
TRUNCATED_NOTE, TRUNCATED_FAULT = 0.01, 0.05
"""Some responses always run into the limit; from one in twenty on it shapes the training."""
UNIFORM_NOTE, UNIFORM_FAULT, UNIFORM_GROUPS = 0.5, 0.9, 10
CHANCE = 14.0
"""Nats: a group is a copy if sampling it again has a chance below exp(-14), one in a million."""
LEAST_TOKENS = 64
"""Where no signal tells how likely a response is: a group this long does not come twice."""


class Success:
    """Whether `success` is what some reward says.

    A verdict that comes from a reward is a threshold on it. If a threshold on the reward, or on
    one of its parts, explains all verdicts, nothing contradicts. If the best one explains most
    (fewer exceptions than half of the rarer verdict), the exceptions contradict it. If none does,
    the verdict comes from another judge, which the file cannot tell.
    """

    def __init__(self) -> None:
        self._scores: dict[str, dict[tuple[float, bool], Tally]] = {}
        self._responses = 0

    def look(self, batch: Batch) -> None:
        """Look at one batch; groups where no reward agrees with `success` are `suspect`."""
        for row, record in enumerate(batch.records):
            if record.success is None or record.reward is None:
                continue
            self._responses += 1
            scores = {"reward": record.reward} | {
                f"rewards.{name}": value
                for name, value in record.rewards.items()
                if value is not None
            }
            if not any((score > 0.5) == record.success for score in scores.values()):
                batch.suspect.add(batch.group_of[row])
            for name, score in scores.items():
                seen = self._scores.setdefault(name, {})
                key = score, record.success
                if key in seen or len(seen) < MOST_SCORES:
                    said = "true" if record.success else "false"
                    detail = f"success {said}, {name} {score:g}"
                    if key not in seen:
                        seen[key] = Tally()
                        seen[key].place = batch.place(row, None, detail)
                    seen[key].count += 1

    def findings(self) -> list[Finding]:
        """One finding, if the best threshold has exceptions."""
        best: tuple[int, str, float, Place | None] | None = None
        for name, seen in self._scores.items():
            exceptions, threshold = _best_threshold(seen)
            place = next(
                (
                    tally.place
                    for (score, success), tally in seen.items()
                    if (score > threshold) != success
                ),
                None,
            )
            if best is None or exceptions < best[0]:
                best = exceptions, name, threshold, place
        if best is None or best[0] == 0:
            return []
        exceptions, name, threshold, place = best
        counts = [
            sum(t.count for (_, s), t in self._scores[name].items() if s is side)
            for side in (True, False)
        ]
        turned, _ = _best_threshold({(-x, s): t for (x, s), t in self._scores[name].items()})
        if turned < exceptions and 2 * turned < min(counts):
            what, exceptions = (
                f"success is false where {name} is high, and true where low",
                (sum(counts) - turned),
            )
        elif 2 * exceptions < min(counts):
            what = f"success contradicts the reward: elsewhere it is {name} > {threshold:g}"
        else:
            return []
        return [
            Finding(
                "success",
                "fault",
                what,
                exceptions,
                self._responses,
                "responses",
                place,
                "take success and reward from the same answer of the same checker; GTPO, GRPO-S "
                "and DAPO's filter read success alone",
            )
        ]


def _best_threshold(seen: dict[tuple[float, bool], Tally]) -> tuple[int, float]:
    """How many verdicts differ from ``score > threshold`` for the best threshold, and that."""
    wrong = sum(tally.count for (_, success), tally in seen.items() if not success)
    scores = sorted({score for score, _ in seen})
    best = wrong, -math.inf
    for i, score in enumerate(scores):
        # Everything up to this score counts as false from here on.
        wrong += seen[score, True].count if (score, True) in seen else 0
        wrong -= seen[score, False].count if (score, False) in seen else 0
        if wrong < best[0]:
            following = scores[i + 1] if i + 1 < len(scores) else score
            best = wrong, (score + following) / 2
    return best


class Truncation:
    """Truncated responses that count as wrong and train."""

    def __init__(self) -> None:
        self._wrong = Tally()
        self._responses = 0

    def look(self, batch: Batch) -> None:
        """Look at one batch."""
        self._responses += len(batch.records)
        for row, record in enumerate(batch.records):
            scored = record.reward is not None
            if record.truncated and record.keep is not False and scored and not right(record):
                self._wrong.add(batch.place(row, None, f"truncated, reward {record.reward:g}"))

    def findings(self) -> list[Finding]:
        """One finding: a note from one in a hundred responses on, a fault from one in twenty."""
        share = self._wrong.count / max(self._responses, 1)
        if share < TRUNCATED_NOTE:
            return []
        return [
            Finding(
                "truncated",
                "fault" if share >= TRUNCATED_FAULT else "note",
                "truncated responses count as wrong and stay in the loss",
                self._wrong.count,
                self._responses,
                "responses",
                self._wrong.place,
                "raise the length limit, or set keep to false for them "
                "(TRL: mask_truncated_completions)",
            )
        ]


class Variance:
    """Groups whose rewards are all the same: no group-relative method learns from them."""

    def __init__(self) -> None:
        self._uniform = Tally()
        self._groups = 0

    def look(self, batch: Batch) -> None:
        """Look at one batch."""
        row = 0
        for _, group in batch.groups:
            scores = [record.reward for record in group if record.reward is not None]
            if scores:
                self._groups += 1
                if max(scores) - min(scores) <= 1e-6 * max(map(abs, scores)):
                    detail = f"all {len(scores)} rewards of the group are {scores[0]:g}"
                    self._uniform.add(batch.place(row, None, detail))
            row += len(group)

    def findings(self) -> list[Finding]:
        """One finding: a note from half of the groups on, a fault from nine in ten on."""
        share = self._uniform.count / max(self._groups, 1)
        if share < UNIFORM_NOTE:
            return []
        fault = share >= UNIFORM_FAULT and self._groups >= UNIFORM_GROUPS
        return [
            Finding(
                "variance",
                "fault" if fault else "note",
                "groups whose responses all have the same reward, so nothing to learn from",
                self._uniform.count,
                self._groups,
                "groups",
                self._uniform.place,
                "choose prompts that the policy solves sometimes, more responses a prompt, or a "
                "finer reward",
            )
        ]


class Repeats:
    """The same prompt with the same responses twice.

    Short and certain responses do come twice, so a copy counts only if sampling the group again
    would be unlikely (`CHANCE`, from log-probabilities or else entropies), or, without those
    signals, if it is long.
    """

    def __init__(self) -> None:
        self._seen: dict[bytes, int] = {}
        self._repeated = Tally()
        self._groups = 0

    def look(self, batch: Batch) -> None:
        """Look at one batch."""
        row = 0
        for number, (line, group) in enumerate(batch.groups):
            self._groups += 1
            key = _fingerprint(group)
            if key not in self._seen:
                self._seen[key] = line
            elif _unlikely(group):
                batch.repeated.add(number)
                detail = f"the group is that of line {self._seen[key]} again"
                self._repeated.add(batch.place(row, None, detail))
            row += len(group)

    def findings(self) -> list[Finding]:
        """One finding."""
        if not self._repeated.count:
            return []
        return [
            Finding(
                "repeated",
                "fault",
                "groups with the prompt and the responses of an earlier group",
                self._repeated.count,
                self._groups,
                "groups",
                self._repeated.place,
                "remove the copies: a resumed or restarted run wrote a step twice, or files were "
                "joined twice (truncate_after_step cuts a file back)",
            )
        ]


def _fingerprint(group: tuple[Record, ...]) -> bytes:
    first = group[0]
    prompt = first.prompt_token_ids or first.prompt or first.prompt_id
    # The order is that of the sampler, and a copy has it too.
    responses = [r.token_ids if r.token_ids is not None else r.tokens for r in group]
    return hashlib.blake2b(repr((prompt, responses)).encode("utf-8", "replace")).digest()[:16]


def _unlikely(group: tuple[Record, ...]) -> bool:
    surprise, known = 0.0, True
    for record in group:
        if "logprob" in record.signals:
            surprise -= sum(v for v in record.signals["logprob"] if v is not None)
        elif "entropy" in record.signals:
            surprise += sum(v for v in record.signals["entropy"] if v is not None)
        else:
            known = False
    if known:
        return surprise > CHANCE
    distinct = {r.token_ids if r.token_ids is not None else r.tokens for r in group}
    return len(distinct) > 1 and sum(record.length for record in group) >= LEAST_TOKENS
