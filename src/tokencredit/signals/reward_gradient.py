"""A frozen reward model's score and its gradient at each response token's input embedding.

Two sources: a sequence-classification reward model with one scalar, and, where there is no
reward model, a frozen language model's log-probability of the gold answer after the response.
Both must share the policy's tokenizer; a map between vocabularies has its place in `Alignment`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch
import torch.utils.checkpoint
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tokencredit.errors import InputError
from tokencredit.signals.policy import inner_model, policy_head, refuse_sharded
from tokencredit.signals.statistics import token_statistics

__all__ = [
    "GoldAnswer",
    "RewardGradient",
    "RewardModel",
    "RewardSource",
    "check_same_tokenizer",
    "reward_gradients",
]

Pooling = Literal["last", "mean", "positions"]


@dataclass(frozen=True, eq=False)
class RewardGradient:
    """Scores and input gradients of some rows of a batch.

    Attributes:
        rows: which rows.
        score: ``[r]`` raw scores, float32 (float64 from a float64 model).
        gradient: ``[r, t, e]`` of the score's type, its gradient at each response token's own input
            embedding; 0 outside the response.
        finite: ``[r]`` bool, False where the score or some gradient is NaN or infinite: those
            gradients are 0.
    """

    rows: slice
    score: Float[Tensor, "r"]
    gradient: Float[Tensor, "r t e"]
    finite: Bool[Tensor, "r"]


class RewardSource(Protocol):
    """What scores sequences of embeddings: `RewardModel` and `GoldAnswer`."""

    @property
    def embedding(self) -> Float[Tensor, "v e"]:
        """The embeddings that gradients are taken at, one row a token id."""
        ...

    def embed(self, ids: Int[Tensor, "r s"]) -> Float[Tensor, "r s e"]:
        """Input embeddings of token ids."""
        ...

    def score(
        self,
        embeddings: Float[Tensor, "r s e"],
        attention: Bool[Tensor, "r s"],
        response: Bool[Tensor, "r s"],
        rows: slice,
    ) -> Float[Tensor, "r"]:
        """One raw score a row, differentiable in the embeddings."""
        ...


class _Frozen:
    """A frozen model that reads embeddings in place of tokens."""

    def __init__(self, model: Any, checkpointing: bool) -> None:
        name = type(self).__name__
        self.model = model
        plain = inner_model(model)
        self._backbone: Any = getattr(plain, plain.base_model_prefix, None)
        self._table: Any = plain.get_input_embeddings()
        if not isinstance(self._backbone, nn.Module):
            raise InputError(f"{name}: {type(plain).__name__} has no backbone below its head")
        if not isinstance(self._table, nn.Module) or not hasattr(self._table, "weight"):
            raise InputError(
                f"{name}: the input embeddings of {type(plain).__name__} cannot be reached"
            )
        refuse_sharded(
            cast("Tensor", self._table.weight), f"{name}: the embeddings of {type(plain).__name__}"
        )
        self.checkpointing = checkpointing
        self._embedding: Tensor | None = None
        model.requires_grad_(False)
        model.eval()
        self._context: int | None = getattr(plain.config, "max_position_embeddings", None)

    @property
    def embedding(self) -> Tensor:
        """``[v, e]`` the embeddings as the model uses them, a factor in the table included."""
        if self._embedding is None:
            self._embedding = _effective_embedding(self._table)
        return self._embedding

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings, with the factor that some tables apply."""
        with torch.no_grad():
            return self._table(ids)

    def check_input(self, input_ids: Tensor, attention_mask: Tensor) -> None:
        """Refuse what the model cannot read.

        Raises:
            InputError: token ids that it has no embedding for, or more tokens than its context.
        """
        name = f"{type(self).__name__}: {type(inner_model(self.model)).__name__}"
        seen = attention_mask.bool()
        largest = int(input_ids.masked_fill(~seen, 0).max()) if input_ids.numel() else 0
        known = self._table.weight.shape[0]
        if largest >= known:
            raise InputError(
                f"{name} has {known} embeddings, but the policy's tokens go up to {largest}: it "
                "has another tokenizer, and DATC needs the same one"
            )
        longest = int(seen.sum(dim=1).max()) if input_ids.numel() else 0
        if self._context is not None and longest > self._context > 0:
            raise InputError(
                f"{name} reads {self._context} tokens at most, but prompt and response have "
                f"{longest}: shorten them (max_completion_length), or take one that reads more"
            )

    def verify(self, input_ids: Tensor, attention_mask: Tensor, *, tolerance: float = 1e-2) -> None:
        """Check on some rows that reading embeddings is reading tokens.

        Raises:
            InputError: the model's own forward pass on token ids comes out otherwise: it uses the
                ids elsewhere too, or scales embeddings in a way that is not seen here. Or it
                cannot read them at all (`check_input`).
        """
        attention = attention_mask.bool()
        self.check_input(input_ids, attention)
        input_ids = input_ids.masked_fill(~attention, 0)  # padding may be any id
        with torch.inference_mode(False), torch.no_grad():
            states = _forward(self._backbone, self.embed(input_ids), attention, False)
            plain = self._backbone(
                input_ids=input_ids,
                attention_mask=attention.long(),
                position_ids=(attention.long().cumsum(dim=1) - 1).clamp(min=0),
                use_cache=False,
            ).last_hidden_state
        seen = attention.unsqueeze(-1)
        error = torch.where(seen, (states - plain).float().abs(), 0.0).max()
        size = torch.where(seen, plain.float().abs(), 0.0).max()
        if not bool(error <= tolerance * size.clamp(min=1e-6)):
            raise InputError(
                f"{type(self).__name__}: {type(inner_model(self.model)).__name__} gives other "
                "hidden states for embeddings than for their token ids; its input gradients would "
                "not be those of its score"
            )


class RewardModel(_Frozen):
    """A transformers sequence classifier with one label, frozen.

    The pooling is done here: given embeddings alone, transformers' own classifiers read position
    -1, a padding token on right-padded rows.

    Args:
        model: ``...ForSequenceClassification`` with ``num_labels`` 1; set to eval mode, its
            parameters no longer require gradients.
        pooling: where the score is read: the ``last`` real token (transformers' own choice for
            causal models), the ``mean`` over the response's tokens, or the mean over given
            ``positions``.
        positions: with ``pooling="positions"``: which columns, counted from the response's first.
        checkpointing: recompute activations in the backward pass, layer by layer: less memory,
            one more forward pass.

    Raises:
        InputError: no single scalar, no score head, unreachable embeddings.

    Example:
        >>> from transformers import LlamaConfig, LlamaForSequenceClassification
        >>> config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_labels=1,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, pad_token_id=0)
        >>> RewardModel(LlamaForSequenceClassification(config)).embedding.shape
        torch.Size([9, 8])
    """

    def __init__(
        self,
        model: Any,
        *,
        pooling: Pooling = "last",
        positions: Sequence[int] | Tensor | None = None,
        checkpointing: bool = False,
    ) -> None:
        if pooling not in ("last", "mean", "positions"):
            raise InputError(
                f"RewardModel: pooling must be last, mean or positions, got {pooling!r}"
            )
        if (pooling == "positions") != (positions is not None):
            raise InputError("RewardModel: positions go with pooling='positions'")
        if positions is not None:
            positions = torch.as_tensor(positions).long().reshape(-1)
            if not len(positions) or bool((positions < 0).any()):
                raise InputError(
                    "RewardModel: positions must be columns counted from the response's first, "
                    f"0 or more, got {positions.tolist()}"
                )
        plain = inner_model(model)
        name = type(plain).__name__
        labels = getattr(plain.config, "num_labels", None)
        if labels != 1:
            raise InputError(f"RewardModel: {name} has {labels} labels; one scalar is needed")
        head = getattr(plain, "score", None)
        if not isinstance(head, nn.Module):
            raise InputError(f"RewardModel: {name} has no layer `score` to read at a token")
        super().__init__(model, checkpointing)
        self._head = head
        self.pooling: Pooling = pooling
        self._positions = positions

    def score(self, embeddings: Tensor, attention: Tensor, response: Tensor, rows: slice) -> Tensor:
        """Raw scores, float32 at least; NaN where there is no token to read them at."""
        states = _forward(self._backbone, embeddings, attention, self.checkpointing)
        return self._pool(_wide(self._head(states).squeeze(-1)), attention, response)

    def _pool(self, values: Tensor, attention: Tensor, response: Tensor) -> Tensor:
        columns = torch.arange(attention.shape[1], device=attention.device)
        if self.pooling == "last":
            last = (attention * columns).amax(dim=1, keepdim=True).long()
            return values.gather(1, last).squeeze(1)
        chosen = response & attention
        if self._positions is not None:
            start = torch.where(response, columns, attention.shape[1]).amin(dim=1, keepdim=True)
            wanted = self._positions.to(attention.device)
            chosen = chosen & torch.isin(columns - start, wanted)
        number = chosen.sum(dim=1)
        mean = torch.where(chosen, values, 0.0).sum(dim=1) / number.clamp(min=1)
        return torch.where(number > 0, mean, torch.nan)


class GoldAnswer(_Frozen):
    """Log-probability of the gold answer after the response, under a frozen language model.

    For verifiable tasks without a reward model: the gradient says which tokens made the right
    answer likelier. Scores and gradients come from the model alone; whether the response was
    right stays with the verifier.

    Args:
        model: a transformers causal language model (the reference or initial policy): a copy of
            its own, since it is frozen here.
        answers: one list of token ids a row, put after the response. Inside a trainer, whose rows
            change from batch to batch: the name of the data set's column that holds them, as
            token ids or as text.
        checkpointing: as for `RewardModel`.

    Example:
        >>> from tokencredit.lab import load_policy
        >>> gold = GoldAnswer(load_policy("chain-qwen3")[0], [[5, 3, 1]])
        >>> gold.embedding.shape
        torch.Size([23, 128])
    """

    def __init__(
        self, model: Any, answers: Sequence[Sequence[int]] | str, *, checkpointing: bool = False
    ) -> None:
        super().__init__(model, checkpointing)
        self.column = answers if isinstance(answers, str) else None
        self.answers: list[list[int]] = []
        if not isinstance(answers, str):
            self.set_answers(answers)

    def set_answers(self, answers: Sequence[Sequence[int]]) -> None:
        """The answers of the rows that come next."""
        if any(len(answer) == 0 for answer in answers):
            raise InputError("GoldAnswer: an answer is empty")
        known = self._table.weight.shape[0]
        odd = next((i for answer in answers for i in answer if not 0 <= i < known), None)
        if odd is not None:
            raise InputError(
                f"GoldAnswer: an answer holds the token id {odd}, but "
                f"{type(inner_model(self.model)).__name__} has {known} embeddings"
            )
        self.answers = [list(answer) for answer in answers]

    def score(self, embeddings: Tensor, attention: Tensor, response: Tensor, rows: slice) -> Tensor:
        """``log p(answer | prompt, response)`` in nats."""
        answers = self.answers[rows]
        if len(answers) != embeddings.shape[0]:
            raise InputError(
                f"GoldAnswer: {len(self.answers)} answers, but rows {rows.start}:{rows.stop} asked"
            )
        r, s, _ = embeddings.shape
        longest = max(len(answer) for answer in answers)
        length = attention.long().sum(dim=1)
        # Pack each row to the left, so that the answer follows its own response directly.
        order = (~attention).long().argsort(dim=1, stable=True)
        packed = embeddings.gather(1, order.unsqueeze(-1).expand_as(embeddings))
        ids = torch.zeros(r, longest, dtype=torch.long, device=embeddings.device)
        given = torch.zeros(r, longest, dtype=torch.bool, device=embeddings.device)
        for i, answer in enumerate(answers):
            ids[i, : len(answer)] = torch.tensor(answer, device=ids.device)
            given[i, : len(answer)] = True
        whole = torch.cat([packed, packed.new_zeros(r, longest, packed.shape[2])], dim=1)
        where = length.unsqueeze(1) + torch.arange(longest, device=ids.device)
        whole = whole.scatter(
            1, where.unsqueeze(-1).expand(-1, -1, packed.shape[2]), self.embed(ids).to(whole.dtype)
        )
        seen = torch.zeros(r, s + longest, dtype=torch.bool, device=ids.device)
        seen[:, :s] = torch.arange(s, device=ids.device) < length.unsqueeze(1)
        seen = seen.scatter(1, where, given)
        states = _forward(self._backbone, whole, seen, self.checkpointing)
        before = states.gather(
            1, (where - 1).clamp(min=0).unsqueeze(-1).expand(-1, -1, states.shape[2])
        )
        head = policy_head(self.model)
        logprob = token_statistics(
            before.reshape(r * longest, -1),
            head.weight,
            ids.masked_fill(~given, -100).reshape(-1),
            want=("logprob",),
            **head.options(),
        ).logprob
        assert logprob is not None
        return logprob.view(r, longest).sum(dim=1)


def reward_gradients(
    source: RewardSource,
    input_ids: Int[Tensor, "b s"],
    attention_mask: Bool[Tensor, "b s"],
    response: Bool[Tensor, "b s"],
    *,
    micro_batch: int = 1,
    path: Float[Tensor, "b s e"] | None = None,
    path_points: int = 1,
    first_row: int = 0,
) -> Iterator[RewardGradient]:
    """Scores and gradients, some rows at a time: ``[b, t, e]`` is never whole in memory.

    Rows of a micro-batch are cut to their own longest sequence; a row's numbers do not depend on
    the others. With ``path_points`` above 1 the gradient is averaged at points on the way from
    each token's embedding to ``path`` (for example the policy's mean embedding there): the local
    gradient alone is a poor guide between discrete tokens.

    Args:
        source: a `RewardModel` or `GoldAnswer`.
        input_ids: ``[b, s]`` prompts and responses, as the source reads them.
        attention_mask: ``[b, s]`` bool, False at padding.
        response: ``[b, s]`` bool, the response's tokens.
        micro_batch: rows at a time.
        path: where the path ends, ``[b, s, e]``; read at the response's tokens.
        path_points: how many points; 1 = the gradient at the token itself.
        first_row: what the first row is called towards the source, when these are some rows of a
            larger batch (`GoldAnswer` has one answer a row).

    Yields:
        One `RewardGradient` a micro-batch, in order; ``gradient`` has the width of ``input_ids``.

    Raises:
        InputError: shapes that do not fit, ``path_points`` without ``path``, token ids or lengths
            that the source cannot read, or a model through which no gradient flows.
    """
    b, s = input_ids.shape
    for name, value in (("attention_mask", attention_mask), ("response", response)):
        if value.shape != (b, s):
            raise InputError(f"reward_gradients: {name} must have shape [{b}, {s}]")
    if micro_batch < 1 or path_points < 1:
        raise InputError("reward_gradients: micro_batch and path_points must be at least 1")
    if path_points > 1 and path is None:
        raise InputError("reward_gradients: path_points > 1 needs path, where the way ends")
    if path is not None and path.shape[:2] != (b, s):
        raise InputError(f"reward_gradients: path must have shape [{b}, {s}, e]")
    attention, response = attention_mask.bool(), response.bool() & attention_mask.bool()
    if isinstance(source, _Frozen):
        source.check_input(input_ids, attention)
        input_ids = input_ids.masked_fill(~attention, 0)  # padding may be any id
    for start in range(0, b, micro_batch):
        rows = slice(start, min(start + micro_batch, b))
        # A caller's inference mode would leave nothing to differentiate; nor may tensors made in
        # it be part of a graph, but their copies may.
        with torch.inference_mode(False):
            found = _gradient_of(
                source,
                input_ids[rows].clone(),
                attention[rows].clone(),
                response[rows].clone(),
                slice(rows.start + first_row, rows.stop + first_row),
                None if path is None or path_points == 1 else path[rows],
                path_points,
            )
        yield found


def _gradient_of(
    source: RewardSource,
    ids: Tensor,
    attention: Tensor,
    response: Tensor,
    rows: slice,
    path: Tensor | None,
    points: int,
) -> RewardGradient:
    used = cast("list[int]", attention.any(dim=0).nonzero().squeeze(1).tolist())
    # Rows without a token: one column of padding, and no score.
    cut = slice(used[0], used[-1] + 1) if used else slice(0, 1)
    hard = source.embed(ids[:, cut])
    span = response[:, cut]
    total: Tensor | None = None
    score: Tensor | None = None
    for point in range(points):
        share = point / points
        at = hard
        if share and path is not None:
            moved = hard + share * (path[:, cut].to(hard.dtype) - hard)
            at = torch.where(span.unsqueeze(-1), moved, hard)
        at = at.detach().requires_grad_(True)
        with torch.enable_grad():
            value = source.score(at, attention[:, cut], span, rows)
            gradient = (
                torch.autograd.grad(value.sum(), at, allow_unused=True)[0]
                if value.requires_grad
                else None
            )
        if gradient is None:
            raise InputError(
                "reward_gradients: no gradient reaches the input embeddings: the model detaches "
                "them, or its checkpointing breaks the graph"
            )
        total = _wide(gradient) if total is None else total + gradient
        score = value.detach() if score is None else score
    assert score is not None and total is not None
    score = torch.where(attention.any(dim=1), score, torch.nan)
    total = torch.where(span.unsqueeze(-1), total / points, 0.0)
    finite = score.isfinite() & total.flatten(1).isfinite().all(dim=1)
    total = torch.where(finite.view(-1, 1, 1), total, 0.0)
    whole = total.new_zeros(ids.shape[0], ids.shape[1], total.shape[2])
    whole[:, cut] = total
    return RewardGradient(rows=rows, score=score, gradient=whole, finite=finite)


def _wide(value: Tensor) -> Tensor:
    """In float32 at least."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _forward(backbone: Any, embeddings: Tensor, attention: Tensor, checkpointing: bool) -> Tensor:
    """The backbone's last hidden states from embeddings, padding on either side."""
    position = (attention.long().cumsum(dim=1) - 1).clamp(min=0)

    def run(x: Tensor) -> Tensor:
        return backbone(
            inputs_embeds=x, attention_mask=attention.long(), position_ids=position, use_cache=False
        ).last_hidden_state

    if not checkpointing:
        return run(embeddings)
    with _checkpointed_layers(backbone):
        return run(embeddings)


class _checkpointed_layers:  # noqa: N801 - a context manager, used like a function
    """Recompute each layer in the backward pass.

    transformers' own checkpointing is off in eval mode, which a frozen model is in.
    """

    def __init__(self, backbone: Any) -> None:
        found = (getattr(backbone, name, None) for name in ("layers", "h", "blocks"))
        lists = [layers for layers in found if isinstance(layers, nn.ModuleList)]
        self.layers: list[Any] = [layer for layers in lists[:1] for layer in layers]
        if not self.layers:
            raise InputError(
                f"checkpointing: the layers of {type(backbone).__name__} were not found; "
                "use checkpointing=False with a smaller micro_batch"
            )

        # Hooks of other libraries (accelerate) put a forward of their own on the object.
        self.before: list[Any] = [layer.__dict__.get("forward") for layer in self.layers]

    def __enter__(self) -> None:
        checkpoint = cast("Any", torch.utils.checkpoint.checkpoint)
        for layer in self.layers:
            plain = layer.forward

            def again(*args: Any, _plain: Any = plain, **kwargs: Any) -> Any:
                return checkpoint(_plain, *args, use_reentrant=False, **kwargs)

            layer.forward = again

    def __exit__(self, *_: object) -> None:
        for layer, before in zip(self.layers, self.before, strict=True):
            if before is None:
                del layer.forward
            else:
                layer.forward = before


def _effective_embedding(table: Any) -> Tensor:
    """The rows that the model really uses: some tables multiply theirs by a factor."""
    weight: Tensor = table.weight.detach()
    # More than a few rows: some may be all zeros, the padding token's for one.
    probe = torch.arange(0, weight.shape[0], max(1, weight.shape[0] // 64), device=weight.device)
    with torch.inference_mode(False), torch.no_grad():
        if torch.equal(table(probe), weight[probe]):
            return weight
        return table(torch.arange(weight.shape[0], device=weight.device))


def check_same_tokenizer(policy: Any, reward: Any) -> None:
    """Refuse a reward model that reads other tokens than the policy writes.

    Args:
        policy: the policy's tokenizer.
        reward: the reward model's tokenizer.

    Raises:
        InputError: another vocabulary, or other tokens for the same text. (A map between
            vocabularies is not there yet.)
    """
    ours, theirs = policy.get_vocab(), reward.get_vocab()
    if ours != theirs:
        odd = next((t for t in ours if theirs.get(t) != ours[t]), None)
        detail = f"it has {len(theirs)} tokens to the policy's {len(ours)}"
        if odd is not None:
            there = theirs.get(odd, "missing")
            detail = f"token {odd!r} is {ours[odd]} in the policy's and {there} in it"
        raise InputError(
            f"the reward model has another tokenizer than the policy ({detail}); DATC needs the "
            "same one"
        )
    probe = "The answer is 12 + 34 = 46.\n\nüß, 你好  x"
    if policy.encode(probe, add_special_tokens=False) != reward.encode(
        probe, add_special_tokens=False
    ):
        raise InputError(
            "the reward model's tokenizer splits text otherwise than the policy's; DATC needs the "
            "same one"
        )
