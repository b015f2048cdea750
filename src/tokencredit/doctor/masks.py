"""Masks that mark what the policy did not choose, or leave out what it did.

A record does not say where its prompt ends or its padding begins. Four things tell: the prompt's
own ids at the front of the tokens, tokens that are known to end or to pad, signals of the policy
(which exist where it chose), and filler in the place of signals at one and the same edge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokencredit.doctor.batch import Batch
from tokencredit.doctor.report import Finding, Tally
from tokencredit.records.schema import Record

__all__ = ["LOGPROBS", "SAMPLER_LOGPROBS", "Masks"]

SAMPLER_LOGPROBS = (
    "sampler_logprob",
    "sampling_logprob",
    "rollout_logprob",
    "vllm_logprob",
    "old_logprob",
)
"""Names under which the log-probabilities of the engine that sampled are written."""
LOGPROBS = ("logprob", *SAMPLER_LOGPROBS, "ref_logprob")
_POLICY = ("entropy", "logprob", *SAMPLER_LOGPROBS, "sum_p2")

_PAD_TEXTS = frozenset(
    ("<pad>", "[PAD]", "<PAD>", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")
)
# The last one is DeepSeek's, with full-width bars and low lines.
_END_TEXTS = frozenset(
    (
        *("<eos>", "</s>", "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>"),
        *("<end_of_turn>", "<|return|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    )
)
_SPECIAL_TEXTS = _PAD_TEXTS | _END_TEXTS
FILLER_RESPONSES, FILLER_SHARE, FILLER_INSIDE = 8, 0.9, 0.01
"""Zeros at an edge are filler if nine in ten of at least eight responses have them there, and
hardly any token elsewhere: a grammar that forces tokens makes zeros everywhere."""

_KINDS = {
    "prompt": "tokens of the prompt are marked",
    "late": "the mask leaves out the first token of the response",
    "early": "the mask leaves out the last token of the response",
    "padding": "padding, or a token after the end token, is marked",
    "unknown": "the mask reaches one token beyond those whose signals are known",
    "filler": "the mask reaches one token beyond those whose signals are not filled with 0",
}


class Masks:
    """Looks at the two edges of every mask."""

    def __init__(self) -> None:
        self._kinds = {kind: Tally() for kind in _KINDS}
        self._any = Tally()
        self._responses = 0
        self._edges = {"first": Tally(), "last": Tally()}
        self._inside = [0, 0]
        self._looked = 0

    def look(self, batch: Batch) -> None:
        """Look at one batch; groups with a fault are `broken` from here on."""
        row = 0
        for number, (_, group) in enumerate(batch.groups):
            prompt = _prompt_inside(group)
            for record in group:
                self._responses += 1
                if 1 in record.mask:
                    faults = list(_faults(record, prompt))
                    for kind, token, detail in faults:
                        self._kinds[kind].add(batch.place(row, token, detail))
                    if faults:
                        batch.broken.add(number)
                        self._any.add(batch.place(row, *faults[0][1:]))
                    else:
                        self._count_zeros(batch, row, record)
                row += 1

    def _count_zeros(self, batch: Batch, row: int, record: Record) -> None:
        entropy = record.signals.get("entropy")
        if entropy is None or sum(record.mask) < 3:
            return
        self._looked += 1
        self._inside[1] += sum(record.mask) - 2
        if 0.0 not in entropy:
            return
        others = [record.signals[name] for name in _POLICY if name in record.signals]
        start, end = record.mask.index(1), len(record.mask) - 1 - record.mask[::-1].index(1)
        for t, value in enumerate(entropy):
            if record.mask[t] and value == 0.0 and all(v[t] in (None, 0.0) for v in others):
                if t in (start, end):
                    place = batch.place(row, t, f"{_text(record, t)}mask 1, entropy exactly 0")
                    self._edges["first" if t == start else "last"].add(place)
                else:
                    self._inside[0] += 1

    @property
    def whole_file(self) -> bool:
        """Whether a fault shows only over the whole file, so that no group could be set aside."""
        looked = self._looked
        rare = self._inside[0] <= FILLER_INSIDE * max(self._inside[1], 1)
        return (
            looked >= FILLER_RESPONSES
            and rare
            and any(tally.count >= FILLER_SHARE * looked for tally in self._edges.values())
        )

    def findings(self) -> list[Finding]:
        """One finding for all masks."""
        if self.whole_file:
            tally = max(self._edges.values(), key=lambda tally: tally.count)
            self._kinds["filler"].merge(tally)
            self._any.merge(tally)
        if not self._any.count:
            return []
        what = "; ".join(
            f"{_KINDS[kind]} ({tally.count} responses)"
            for kind, tally in self._kinds.items()
            if tally.count
        )
        return [
            Finding(
                "mask",
                "fault",
                what,
                self._any.count,
                self._responses,
                "responses",
                self._any.place,
                "the mask is 1 exactly where the policy chose the token, its end token included; "
                "look for a shift by one where the mask is made (a shift for next-token targets "
                "belongs to the loss), then assign the credit again",
            )
        ]


def _prompt_inside(group: Sequence[Record]) -> int:
    """How many tokens at the front of every response of the group are those of the prompt."""
    lengths = {len(record.prompt_token_ids or ()) for record in group}
    length = lengths.pop() if len(lengths) == 1 else 0
    if length < 2 or len(group) < 2:
        return 0
    inside = all(
        record.token_ids is not None and record.token_ids[:length] == record.prompt_token_ids
        for record in group
    )
    return length if inside else 0


def _faults(record: Record, prompt: int) -> list[tuple[str, int, str]]:
    mask = record.mask
    start, end = mask.index(1), len(mask) - 1 - mask[::-1].index(1)
    signals = [record.signals[name] for name in _POLICY if name in record.signals]

    def known(t: int) -> bool:
        return any(values[t] is not None for values in signals)

    def alive(t: int) -> bool:
        return any(values[t] not in (None, 0.0) for values in signals)

    def detail(t: int) -> str:
        values = ", ".join(
            f"{name} {'unknown' if record.signals[name][t] is None else record.signals[name][t]}"
            for name in _POLICY[:2]
            if name in record.signals
        )
        return f"{_text(record, t)}mask {mask[t]}{', ' + values if values else ''}"

    pads, ends = _special(record)
    found: list[tuple[str, int, str]] = []
    if prompt and start < prompt:
        found.append(("prompt", start, detail(start)))
    else:
        separate = not prompt and len(record.prompt_token_ids or ()) > 1
        missed = start == prompt + 1 if prompt else start >= 1
        if missed and start - 1 not in pads:
            one = start - 1 == prompt or not known(start - 2)
            shown = alive(start - 1) and one
            if shown or (start == 1 and separate and not signals) or (prompt and start > prompt):
                found.append(("late", start - 1, detail(start - 1)))
    after = end + 1
    if after < len(mask) and record.truncated is not True:
        one = after + 1 == len(mask) or not known(after + 1)
        ended = after in ends and end not in ends
        if (alive(after) and one and after not in pads) or ended:
            found.append(("early", after, detail(after)))
    found += [("padding", t, detail(t)) for t in _marked_padding(record, start, end, pads, ends)]
    if not found and signals and end > start:
        for edge, inside in ((start, start + 1), (end, end - 1)):
            if mask[inside] and not known(edge) and known(inside):
                found.append(("unknown", edge, detail(edge)))
                break
    return found


def _marked_padding(
    record: Record, start: int, end: int, pads: set[int], ends: set[int]
) -> list[int]:
    """The first marked token that is padding, if there is one."""
    mask, ids = record.mask, record.token_ids
    signals = [record.signals[name] for name in _POLICY if name in record.signals]
    for t in range(start, end + 1) if pads or ends else ():
        if t and t - 1 in ends and mask[t - 1] and mask[t]:
            return [t]
        # A policy may sample the padding token as any other. Then it was scored; where no signal
        # tells, padding is what has more of it beside it, up to the edge of the mask.
        if t in pads and mask[t] and not any(values[t] not in (None, 0.0) for values in signals):
            edge = pads.issuperset(range(start, t + 1)) or pads.issuperset(range(t, end + 1))
            if signals or (edge and (t - 1 in pads or t + 1 in pads)):
                return [t]
    if ids is not None:
        last = len(ids) - 1
        if end < last and len(set(ids[end - 1 : last + 1])) == 1 and end - 1 >= start:
            return [end]
        if start > 1 and len(set(ids[: start + 1])) == 1:
            return [start]
    return []


def _special(record: Record) -> tuple[set[int], set[int]]:
    """Indices of the tokens that pad, and of those that end a response."""
    pad_ids, end_ids = _ids(record.meta, "pad_token_id"), _ids(record.meta, "eos_token_id")
    pads: set[int] = set()
    ends: set[int] = set()
    if record.tokens is not None and not _SPECIAL_TEXTS.isdisjoint(record.tokens):
        for t, text in enumerate(record.tokens):
            if text in _PAD_TEXTS:
                pads.add(t)
            elif text in _END_TEXTS:
                ends.add(t)
    if record.token_ids is not None and (pad_ids or end_ids):
        for t, token in enumerate(record.token_ids):
            if token in end_ids:
                ends.add(t)
            elif token in pad_ids:
                pads.add(t)
    for t, value in enumerate(record.signals.get("eos", ())):
        if value == 1.0:
            ends.add(t)
    return pads - ends, ends


def _ids(meta: Mapping[str, object], name: str) -> set[int]:
    value = meta.get(name)
    if isinstance(value, list):
        return {item for item in value if isinstance(item, int)}  # pyright: ignore[reportUnknownVariableType]
    return {value} if isinstance(value, int) else set()


def _text(record: Record, t: int) -> str:
    if record.tokens is not None:
        return f"{record.tokens[t]!r}, "
    return f"id {record.token_ids[t]}, " if record.token_ids is not None else ""
