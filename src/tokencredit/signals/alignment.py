"""From a frozen reward model and the policy to the token signals that DATC reads.

Some rows at a time: the policy's hidden states, the reward gradient, and the statistics that
join them. Neither gradients ``[b, t, e]`` nor logits ``[b, t, v]`` are ever whole in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokencredit.errors import InputError
from tokencredit.signals.policy import PolicyHead, last_hidden_states, policy_head
from tokencredit.signals.reward_gradient import RewardGradient, RewardSource, reward_gradients
from tokencredit.signals.statistics import STATISTICS, mean_embedding, token_statistics

__all__ = [
    "Alignment",
    "RewardInput",
    "alignment_signals",
    "chat_input",
    "plain_input",
    "text_input",
]

EXTRA = ("grad_x_input", "work_random")
"""Signals of DATC's controls, beside `TokenStatistics`' own."""


@dataclass(frozen=True, eq=False)
class RewardInput:
    """What the reward model reads, and where each of the policy's tokens stands in it.

    Attributes:
        input_ids: ``[b, s]`` padded on the right.
        attention_mask: ``[b, s]`` bool.
        response: ``[b, s]`` bool, the response's tokens.
        column: ``[b, t]`` the reward model's column of each response token of the policy; -1
            where it has none (another tokenisation there, padding).
    """

    input_ids: Int[Tensor, "b s"]
    attention_mask: Bool[Tensor, "b s"]
    response: Bool[Tensor, "b s"]
    column: Int[Tensor, "b t"]


@dataclass(frozen=True, eq=False)
class Alignment:
    """Token signals and scores of a batch.

    Attributes:
        signals: by name, ``[b, t]``; NaN where a token has no counterpart or no finite gradient.
        score: ``[b]`` the reward model's raw scores.
        unmapped: tokens without a counterpart in the reward model's input.
        non_finite: responses whose score or gradient was not finite.
    """

    signals: dict[str, Float[Tensor, "b t"]]
    score: Float[Tensor, "b"]
    unmapped: int
    non_finite: int


def plain_input(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    width: int,
    *,
    pad: int = 0,
    device: torch.device | None = None,
) -> RewardInput:
    """The policy's own tokens, prompt and response, for a reward model without a template.

    Args:
        prompts: token ids of each prompt.
        responses: token ids of each response.
        width: t, the padded width of the responses.
        pad: id of the padding, which is never read.
        device: of the result.

    Example:
        >>> made = plain_input([[5], [5, 6]], [[7, 8], [9]], 3)
        >>> made.input_ids.tolist(), made.column.tolist()
        ([[5, 7, 8], [5, 6, 9]], [[1, 2, -1], [2, -1, -1]])
    """
    rows = [[*p, *r] for p, r in zip(prompts, responses, strict=True)]
    spans = [(len(p), len(p) + len(r)) for p, r in zip(prompts, responses, strict=True)]
    columns = [list(range(a, b)) for a, b in spans]
    return _assemble(rows, spans, columns, width, pad, device)


def chat_input(
    tokenizer: Any,
    prompts: Sequence[Sequence[dict[str, Any]]],
    responses: Sequence[Sequence[int]],
    width: int,
    *,
    pad: int | None = None,
    device: torch.device | None = None,
) -> RewardInput:
    """Prompts and responses in the reward model's own chat template.

    The response is found exactly, by what the template puts before and after it. A token of the
    policy has a counterpart where the same id covers the same characters of the response; where
    the template strips white space or the text is split otherwise there is none.

    Args:
        tokenizer: the reward model's, with a chat template; the policy's own tokenizer or an
            equal one (`check_same_tokenizer`).
        prompts: messages of each prompt.
        responses: token ids of each response, as the policy sampled them.
        width: t, the padded width of the responses.
        pad: id of the padding; default: the tokenizer's.
        device: of the result.

    Raises:
        InputError: no chat template, or one that changes the response's text beyond stripping it.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError("the reward model's tokenizer has no chat template for the messages")

    def frame(messages: Sequence[dict[str, Any]], text: str) -> tuple[str, str, str]:
        return _around(tokenizer, list(messages), text)

    return _by_text(tokenizer, prompts, responses, width, frame, pad, device)


def text_input(
    tokenizer: Any,
    prompts: Sequence[str],
    responses: Sequence[Sequence[int]],
    width: int,
    *,
    pad: int | None = None,
    device: torch.device | None = None,
) -> RewardInput:
    """Prompt and response as one text, split anew: what TRL's own reward models read.

    Arguments and result as for `chat_input`, with prompts as texts.
    """

    def frame(prompt: str, text: str) -> tuple[str, str, str]:
        return prompt, text, ""

    return _by_text(tokenizer, prompts, responses, width, frame, pad, device)


def _by_text(
    tokenizer: Any,
    prompts: Sequence[Any],
    responses: Sequence[Sequence[int]],
    width: int,
    frame: Callable[[Any, str], tuple[str, str, str]],
    pad: int | None,
    device: torch.device | None,
) -> RewardInput:
    special = set(tokenizer.all_special_ids)
    rows: list[list[int]] = []
    spans: list[tuple[int, int]] = []
    columns: list[list[int]] = []
    for prompt, ids in zip(prompts, responses, strict=True):
        body = [i for i in ids if i not in special]
        text = tokenizer.decode(body, skip_special_tokens=False)
        before, inner, after = frame(prompt, text)
        stripped = text.index(inner) if inner else 0
        whole, ends = _encoded(tokenizer, before + inner + after)
        again, own = _encoded(tokenizer, text)
        if ends is not None and own is not None and again == body:
            span = _Span(len(before), len(before) + len(inner), stripped)
            start, stop, column = _by_offsets(ids, special, own, whole, ends, span)
        else:
            parts = [
                tokenizer.encode(part, add_special_tokens=False) for part in (before, inner, after)
            ]
            start, stop = len(parts[0]), len(parts[0]) + len(parts[1])
            if whole != parts[0] + parts[1] + parts[2]:
                # The template's text runs into the response's: find the span in the joint tokens.
                start, stop = _span_by_text(tokenizer, whole, before, inner)
            column = _match(tokenizer, ids, special, stripped, whole[start:stop], start)
        rows.append(whole)
        spans.append((start, stop))
        columns.append(column)
    pad = tokenizer.pad_token_id if pad is None else pad
    return _assemble(rows, spans, columns, width, 0 if pad is None else pad, device)


class _Span(NamedTuple):
    """Characters of the response in the reward model's text, and how many were stripped."""

    low: int
    high: int
    stripped: int


def _encoded(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]] | None]:
    """Ids of a text, and the characters that each covers where the tokenizer can say so."""
    if not getattr(tokenizer, "is_fast", False):
        return tokenizer.encode(text, add_special_tokens=False), None
    made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return made["input_ids"], [tuple(pair) for pair in made["offset_mapping"]]


def _by_offsets(
    ids: Sequence[int],
    special: set[int],
    own: Sequence[tuple[int, int]],
    whole: Sequence[int],
    places: Sequence[tuple[int, int]],
    span: _Span,
) -> tuple[int, int, list[int]]:
    """The response's columns, and that of each of the policy's tokens, by characters covered."""
    inside = [i for i, (a, b) in enumerate(places) if span.low <= a and b <= span.high]
    start, stop = (inside[0], inside[-1] + 1) if inside else (len(whole), len(whole))
    # Several tokens may be bytes of one character: those of one place in their order.
    found: dict[tuple[int, int, int], list[int]] = {}
    for column in reversed(range(start, stop)):
        a, b = (x - span.low + span.stripped for x in places[column])
        found.setdefault((a, b, whole[column]), []).append(column)
    places_left = iter(own)
    columns: list[int] = []
    for token in map(int, ids):
        there = [] if token in special else found.get((*next(places_left), token), [])
        columns.append(there.pop() if there else -1)
    return start, stop, columns


def _around(tokenizer: Any, messages: list[dict[str, Any]], text: str) -> tuple[str, str, str]:
    """What the template puts before the response, the response there, and what comes after."""
    marker = "\u2983response\u2984"

    def render(content: str) -> str:
        answer = {"role": "assistant", "content": content}
        return tokenizer.apply_chat_template([*messages, answer], tokenize=False)

    frame = render(marker)
    if frame.count(marker) != 1:
        raise InputError("the reward model's chat template does not keep a response's text")
    before, after = frame.split(marker)
    whole = render(text)
    for inner in (text, text.strip(), text.lstrip(), text.rstrip()):
        if whole == before + inner + after:
            return before, inner, after
    raise InputError(
        "the reward model's chat template changes the text of a response; its tokens cannot be "
        "mapped"
    )


def _span_by_text(tokenizer: Any, whole: list[int], before: str, inner: str) -> tuple[int, int]:
    """Columns of the tokens that lie wholly inside the response's characters."""
    start = stop = None
    seen = 0
    low, high = len(before), len(before) + len(inner)
    for column, token in enumerate(whole):
        length = len(tokenizer.convert_ids_to_tokens(token))
        if seen >= low and start is None:
            start = column
        if seen + length <= high:
            stop = column + 1
        seen += length
    start = len(whole) if start is None else start
    return start, max(start, stop or start)


def _match(
    tokenizer: Any,
    ids: Sequence[int],
    special: set[int],
    skipped: int,
    theirs: Sequence[int],
    start: int,
) -> list[int]:
    """For each of the policy's tokens its column, where id and place in the text coincide."""

    def size(token: int) -> int:
        # Byte-level vocabularies write one character a byte; others count alike on both sides.
        return len(tokenizer.convert_ids_to_tokens(int(token)))

    place: dict[tuple[int, int], int] = {}
    at = skipped
    for offset, token in enumerate(theirs):
        place[at, int(token)] = start + offset
        at += size(token)
    found: list[int] = []
    at = 0
    for token in ids:
        if int(token) in special:
            found.append(-1)
            continue
        found.append(place.get((at, int(token)), -1))
        at += size(token)
    return found


def _assemble(
    rows: Sequence[Sequence[int]],
    spans: Sequence[tuple[int, int]],
    columns: Sequence[Sequence[int]],
    width: int,
    pad: int,
    device: torch.device | None,
) -> RewardInput:
    longest = max((len(row) for row in rows), default=0)
    ids = torch.tensor([[*row, *([pad] * (longest - len(row)))] for row in rows])
    seen = torch.tensor([[i < len(row) for i in range(longest)] for row in rows])
    response = torch.tensor([[a <= i < b for i in range(longest)] for a, b in spans])
    column = torch.tensor([[*c, *([-1] * (width - len(c)))] for c in columns])
    return RewardInput(
        ids.long().to(device), seen.to(device), response.to(device), column.long().to(device)
    )


def alignment_signals(
    policy: Any,
    source: RewardSource,
    input_ids: Int[Tensor, "b s"],
    attention_mask: Bool[Tensor, "b s"],
    mask: Bool[Tensor, "b t"],
    reward_input: RewardInput,
    *,
    want: Collection[str] = ("work",),
    temperature: float = 1.0,
    micro_batch: int = 8,
    path_points: int = 1,
    seed: int = 0,
) -> Alignment:
    """Signals of each response token: a policy pass, and the source forth and back.

    The gradient is taken at the token's own place in the reward model's input; the distribution
    is the one that produced the token, formed one place before.

    Args:
        policy: a transformers causal language model (or a PEFT model around one).
        source: a `RewardModel` or `GoldAnswer`.
        input_ids: ``[b, s]`` the policy's prompts and responses; the last t columns are responses.
        attention_mask: ``[b, s]`` bool.
        mask: ``[b, t]`` bool, the tokens that the policy chose.
        reward_input: from `plain_input` or `chat_input`.
        want: names of `TokenStatistics`' fields, ``grad_x_input``, ``work_random``.
        temperature: of sampling. Under top-p or top-k sampling the statistics are those of the
            untruncated softmax.
        micro_batch: rows at a time.
        path_points: average the gradient at so many points on the way from each token's embedding
            to the policy's mean embedding; 1 = at the token itself.
        seed: of ``work_random``'s directions.

    Raises:
        InputError: an unknown signal, or a policy whose logits are not its head's.
    """
    for name in want:
        if name not in STATISTICS and name not in EXTRA:
            raise InputError(
                f"alignment_signals: unknown signal {name!r}; there are: "
                f"{', '.join((*STATISTICS, *EXTRA))}"
            )
    head = policy_head(policy)
    embedding = _rows_of(source.embedding, head.weight.shape[0])
    b, t = mask.shape
    device = input_ids.device
    signals = {name: torch.full((b, t), torch.nan, device=device) for name in want}
    score = torch.zeros(b, device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    non_finite = 0
    for start in range(0, b, micro_batch):
        rows = slice(start, min(start + micro_batch, b))
        hidden = last_hidden_states(policy, input_ids[rows], attention_mask[rows].bool(), t)
        part = _Rows(
            hidden=hidden,
            targets=input_ids[rows, -t:],
            column=reward_input.column[rows],
            known=mask[rows] & (reward_input.column[rows] >= 0),
        )
        path = None
        if path_points > 1:
            path = _path(part, head, embedding, reward_input.input_ids[rows], temperature)
        (found,) = reward_gradients(
            source,
            reward_input.input_ids[rows],
            reward_input.attention_mask[rows],
            reward_input.response[rows],
            micro_batch=rows.stop - rows.start,
            path=path,
            path_points=path_points,
            first_row=rows.start,
        )
        score[rows] = found.score
        non_finite += int((~found.finite).sum())
        values = _statistics(part, found, head, embedding, want, temperature, generator)
        for name, value in values.items():
            signals[name][rows] = value
    unmapped = int((mask & (reward_input.column < 0)).sum())
    return Alignment(signals=signals, score=score, unmapped=unmapped, non_finite=non_finite)


@dataclass(frozen=True, eq=False)
class _Rows:
    """Some rows of the policy's batch."""

    hidden: Tensor
    targets: Tensor
    column: Tensor
    known: Tensor


def _rows_of(embedding: Tensor, v: int) -> Tensor:
    """The reward model's embeddings for the policy's ``v`` logits.

    Both tables may be padded beyond the tokenizer, by different amounts. Entries that the reward
    model lacks are never sampled; they get its mean embedding, which pulls nowhere.
    """
    rows = embedding.shape[0]
    if rows >= v:
        return embedding[:v]
    mean = embedding.float().mean(dim=0, keepdim=True).to(embedding.dtype)
    return torch.cat([embedding, mean.expand(v - rows, -1)])


def _statistics(
    part: _Rows,
    found: RewardGradient,
    head: PolicyHead,
    embedding: Tensor,
    want: Collection[str],
    temperature: float,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    r, t = part.targets.shape
    index = part.column.clamp(min=0).unsqueeze(-1).expand(-1, -1, found.gradient.shape[2])
    gradient = found.gradient.gather(1, index)
    known = part.known & found.finite.unsqueeze(1)
    targets = part.targets.masked_fill(~part.known, -100).reshape(-1)
    flat = part.hidden.reshape(r * t, -1)
    plain = [name for name in want if name in STATISTICS]

    def ask(names: Collection[str], g: Tensor) -> dict[str, Tensor]:
        s = token_statistics(
            flat,
            head.weight,
            targets,
            want=names,
            temperature=temperature,
            reward=(g.reshape(r * t, -1), embedding),
            **head.options(),
        )
        return {name: getattr(s, name).float().view(r, t) for name in names}

    values = ask(plain, gradient) if plain else {}
    if "work_random" in want:
        noise = torch.randn(
            gradient.shape, generator=generator, device=gradient.device, dtype=gradient.dtype
        )
        length = gradient.square().sum(dim=-1, keepdim=True).sqrt()
        noise = noise * (length / noise.square().sum(dim=-1, keepdim=True).sqrt().clamp(min=1e-30))
        values["work_random"] = ask(("work",), noise)["work"]
    if "grad_x_input" in want:
        own = embedding[part.targets.clamp(0, embedding.shape[0] - 1)].float()
        values["grad_x_input"] = (gradient * own).sum(dim=-1)
    of_policy = ("logprob", "entropy", "logsumexp", "sum_p2", "update_norm")
    return {
        name: value.masked_fill(~(part.known if name in of_policy else known), torch.nan)
        for name, value in values.items()
    }


def _path(
    part: _Rows, head: PolicyHead, embedding: Tensor, reward_ids: Tensor, temperature: float
) -> Tensor:
    """The policy's mean embedding at each token's place in the reward model's input."""
    r, t = part.targets.shape
    mean = mean_embedding(
        part.hidden.reshape(r * t, -1),
        head.weight,
        embedding,
        temperature=temperature,
        **head.options(),
    ).view(r, t, -1)
    out = embedding[reward_ids.clamp(0, embedding.shape[0] - 1)].to(mean.dtype)
    # Tokens without a place go to one column more, which is cut off.
    spare = out.shape[1]
    index = part.column.masked_fill(~part.known, spare).unsqueeze(-1).expand_as(mean)
    return torch.cat([out, out[:, :1]], dim=1).scatter(1, index, mean)[:, :spare]
