"""Vocabulary statistics of each token without logits in memory: one pass, tile by tile.

From hidden states, the language-model head and the sampled tokens: log-probability, entropy and
what else a credit rule asks for, with a peak memory of one tile. The sums leave the sampled token
out and are taken relative to its logit, so that a token of probability 1 - 1e-10 still has right
digits in every statistic.

Places left: a Triton reduction over the tile, and vocabulary shards over ranks (the sums here add
up over shards once their maxima are aligned, as they do over tiles).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from tokencredit.errors import InputError, nearest

__all__ = ["TokenStatistics", "mean_embedding", "token_statistics"]

DIFFERENTIABLE = ("logprob", "entropy")
OF_REWARD = ("work", "projection", "cosine", "natural", "reward_norm")
Impl = Literal["auto", "tiles", "reference"]

ROWS, COLUMNS = 512, 4096
"""Default tile: 8 MiB in float32."""
ABSENT = -1e4
"""Exponent of a vocabulary entry that is masked out: exp gives exactly 0, products stay finite."""


@dataclass(frozen=True, eq=False)
class TokenStatistics:
    """What `token_statistics` was asked for; the other fields are None. All ``[n]``.

    With p the policy's distribution at the sampling temperature, y the sampled token, k the
    update direction ``onehot(y) - p`` and G the reward gradient in logit space, ``G_v = p_v (u_v
    - sum p u)`` with ``u = E g``:

    Attributes:
        logprob: log p_y in nats. Differentiable.
        entropy: - sum p log p in nats. Differentiable.
        logsumexp: log sum exp of the logits over temperature.
        sum_p2: sum p^2, the probability that two samples agree.
        update_norm: |k|.
        work: <G, k>: reward change along the sampled action's logit direction, before
            multiplication by the advantage and without factors 1 / temperature.
        projection: work / |k|.
        cosine: work / (|G| |k|); 0 where either vanishes.
        natural: <u, k>: work along the natural-gradient displacement.
        reward_norm: |G|.
    """

    logprob: Float[Tensor, "n"] | None = None
    entropy: Float[Tensor, "n"] | None = None
    logsumexp: Float[Tensor, "n"] | None = None
    sum_p2: Float[Tensor, "n"] | None = None
    update_norm: Float[Tensor, "n"] | None = None
    work: Float[Tensor, "n"] | None = None
    projection: Float[Tensor, "n"] | None = None
    cosine: Float[Tensor, "n"] | None = None
    natural: Float[Tensor, "n"] | None = None
    reward_norm: Float[Tensor, "n"] | None = None


STATISTICS = tuple(f.name for f in fields(TokenStatistics))


class _Head(NamedTuple):
    """Everything that turns hidden states into logits over temperature."""

    weight: Tensor
    bias: Tensor | None
    temperature: Tensor
    softcap: float | None
    scale: float
    allowed: Tensor | None
    dtype: torch.dtype


def token_statistics(
    hidden: Float[Tensor, "n d"],
    head: Float[Tensor, "v d"],
    targets: Int[Tensor, "n"],
    *,
    want: Collection[str],
    bias: Float[Tensor, "v"] | None = None,
    temperature: float | Float[Tensor, "n"] = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocabulary_mask: Bool[Tensor, "v"] | None = None,
    reward: tuple[Float[Tensor, "n e"], Float[Tensor, "v e"]] | None = None,
    chunk: int | tuple[int, int] | None = None,
    impl: Impl = "auto",
) -> TokenStatistics:
    """Statistics of the policy's distribution at each token, without ``[n, v]`` in memory.

    The logits are ``cap(scale (hidden head^T + bias)) / temperature`` with ``cap(x) = softcap
    tanh(x / softcap)``. Sums are accumulated in float32 (float64 for float64 inputs) and so are
    the products of 16-bit inputs. Source of the sums without the target and of the closed forms:
    the derivation in the documentation's page on token statistics.

    Args:
        hidden: ``[n, d]`` last hidden states that produce the tokens.
        head: ``[v, d]`` weight of the language-model head.
        targets: ``[n]`` the sampled tokens; a negative one is unread: its row is dropped before
            the head is applied and its statistics are 0. (Finding out which rows are dropped
            costs one synchronisation on an accelerator.)
        want: names of `TokenStatistics`' fields.
        bias: ``[v]`` of the head.
        temperature: of sampling, > 0; a number or one a token.
        softcap: Gemma's cap of the logits.
        logit_scale: Cohere's factor on the logits.
        vocabulary_mask: ``[v]`` bool, False = the entry can never be sampled.
        reward: ``(gradient [n, e], embedding [v, e])``: the reward model's gradient at each
            token's input embedding, and its embedding matrix over the policy's vocabulary.
            Needed by ``work``, ``projection``, ``cosine``, ``natural`` and ``reward_norm``.
        chunk: largest tile, as columns or (rows, columns); default 512 x 4096.
        impl: ``tiles``; ``reference``: float64, logits in memory, kept to check the other
            against; ``auto``: tiles.

    Returns:
        Float32 (float64 for float64 inputs). ``logprob`` and ``entropy`` are differentiable in
        hidden, head and bias; the others carry no gradient.

    Raises:
        InputError: an unknown statistic, shapes that do not fit, a missing ``reward``.

    Example:
        >>> import torch
        >>> statistics = token_statistics(
        ...     torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([0, 3]), want=["sum_p2"]
        ... )
        >>> [round(x, 6) for x in statistics.sum_p2.tolist()], statistics.entropy is None
        ([0.25, 0.25], True)
    """
    names = _checked_want(want, reward)
    n, v = _check_shapes(hidden, head, targets, bias, temperature, vocabulary_mask, reward)
    if impl not in ("auto", "tiles", "reference"):
        raise InputError(f"token_statistics: impl must be auto, tiles or reference, got {impl!r}")
    given: tuple[Tensor, ...] = (hidden, head, *(reward or ()))
    double = impl == "reference" or any(t.dtype == torch.float64 for t in given)
    dtype = torch.float64 if double else torch.float32
    rows, columns = _tile(chunk, n, v)

    read = (targets >= 0).nonzero().squeeze(1)
    whole = read.shape[0] == n
    per_row = torch.as_tensor(temperature, dtype=dtype, device=hidden.device).expand(n)

    def pick(value: Tensor) -> Tensor:
        return value if whole else value.index_select(0, read)

    top = _Head(
        weight=head,
        bias=bias,
        temperature=pick(per_row).unsqueeze(1),
        softcap=softcap,
        scale=logit_scale,
        allowed=vocabulary_mask,
        dtype=dtype,
    )
    gradient = None if reward is None else pick(reward[0])
    embedding = None if reward is None else reward[1]
    kept, wanted = pick(hidden), pick(targets)
    if impl == "reference":
        found = _reference(kept, wanted, top, gradient, embedding, names)
    else:
        tile = (rows, columns)
        found = _by_tiles(kept, wanted, top, gradient, embedding, names, tile)
    if not whole:
        found = {
            name: value.new_zeros(n).index_copy(0, read, value) for name, value in found.items()
        }
    return TokenStatistics(**found)


def mean_embedding(
    hidden: Float[Tensor, "n d"],
    head: Float[Tensor, "v d"],
    embedding: Float[Tensor, "v e"],
    *,
    bias: Float[Tensor, "v"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk: int | tuple[int, int] | None = None,
) -> Float[Tensor, "n e"]:
    """The policy's mean embedding ``sum_v p_v E_v`` at each token; no gradient.

    Arguments as for `token_statistics`; two passes over the vocabulary, a tile in memory.

    Example:
        >>> import torch
        >>> zero = torch.zeros(2, 2)
        >>> mean_embedding(zero[:1], zero, torch.tensor([[1.0], [3.0]])).item()
        2.0
    """
    n, v = hidden.shape[0], head.shape[0]
    targets = torch.zeros(n, dtype=torch.long, device=hidden.device)
    _check_shapes(hidden, head, targets, bias, temperature, None, None)
    options: dict[str, Any] = {"bias": bias, "softcap": softcap, "logit_scale": logit_scale}
    with torch.no_grad():
        log_sum = token_statistics(
            hidden,
            head,
            targets,
            want=("logsumexp",),
            temperature=temperature,
            chunk=chunk,
            **options,
        ).logsumexp
        assert log_sum is not None
        dtype = log_sum.dtype
        rows, columns = _tile(chunk, n, v)
        top = _Head(
            head, bias, log_sum.new_full((n, 1), temperature), softcap, logit_scale, None, dtype
        )
        out = torch.zeros(n, embedding.shape[1], dtype=dtype, device=hidden.device)
        for a, b in _spans(n, rows):
            for start, stop in _spans(v, columns):
                z = _logits(hidden[a:b], top, start, stop, top.temperature[a:b])
                p = z.sub_(log_sum[a:b].unsqueeze(1)).exp_()
                out[a:b].addmm_(p, embedding[start:stop].to(dtype))
    return out


# -- checks ---------------------------------------------------------------------------------


def _checked_want(want: Collection[str], reward: Any) -> tuple[str, ...]:
    asked = (want,) if isinstance(want, str) else tuple(want)
    for name in asked:
        if name not in STATISTICS:
            raise InputError(
                f"token_statistics: unknown statistic {name!r}{nearest(str(name), STATISTICS)}; "
                f"there are: {', '.join(STATISTICS)}"
            )
        if name in OF_REWARD and reward is None:
            raise InputError(
                f"token_statistics: {name} needs reward=(gradient [n, e], embedding [v, e])"
            )
    return asked


def _check_shapes(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    vocabulary_mask: Tensor | None,
    reward: tuple[Tensor, Tensor] | None,
) -> tuple[int, int]:
    def refuse(name: str, expected: str, value: Tensor) -> InputError:
        return InputError(
            f"token_statistics: {name} must have shape {expected}, got {list(value.shape)}"
        )

    if hidden.dim() != 2:
        raise refuse("hidden", "[n, d]", hidden)
    n, d = hidden.shape
    if head.dim() != 2 or head.shape[1] != d:
        raise refuse("head", f"[v, d = {d}]", head)
    v = head.shape[0]
    if targets.shape != (n,):
        raise refuse("targets", f"[n = {n}]", targets)
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise InputError(f"token_statistics: targets must be integers, got {targets.dtype}")
    for name, value in (("bias", bias), ("vocabulary_mask", vocabulary_mask)):
        if value is not None and value.shape != (v,):
            raise refuse(name, f"[v = {v}]", value)
    if isinstance(temperature, Tensor):
        if temperature.shape not in ((), (n,)):
            raise refuse("temperature", f"[n = {n}]", temperature)
    elif temperature <= 0:
        raise InputError(f"token_statistics: temperature must be > 0, got {temperature!r}")
    if reward is not None:
        gradient, embedding = reward
        if gradient.dim() != 2 or gradient.shape[0] != n:
            raise refuse("reward[0], the gradient,", f"[n = {n}, e]", gradient)
        if embedding.shape != (v, gradient.shape[1]):
            raise refuse(
                "reward[1], the embedding,", f"[v = {v}, e = {gradient.shape[1]}]", embedding
            )
    return n, v


def _tile(chunk: int | tuple[int, int] | None, n: int, v: int) -> tuple[int, int]:
    rows, columns = (
        (ROWS, COLUMNS) if chunk is None else ((ROWS, chunk) if isinstance(chunk, int) else chunk)
    )
    if rows < 1 or columns < 1:
        raise InputError(f"token_statistics: chunk must be at least 1, got {chunk!r}")
    return min(rows, max(n, 1)), min(columns, v)


# -- logits ---------------------------------------------------------------------------------


def _product(x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """``x w^T`` accumulated and kept in ``dtype``, whatever the inputs."""
    if (
        x.device.type == "cuda"
        and x.dtype == w.dtype
        and x.dtype in (torch.float16, torch.bfloat16)
    ):
        return torch.mm(x, w.t(), out_dtype=dtype)
    return torch.mm(x.to(dtype), w.to(dtype).t())


def _finish_logits(raw: Tensor, bias: Tensor | None, top: _Head, temperature: Tensor) -> Tensor:
    """From the head's product to logits over temperature, in place where it can be."""
    if bias is not None:
        raw = raw.add_(bias)
    if top.scale != 1.0:
        raw = raw.mul_(top.scale)
    if top.softcap is not None:
        raw = raw.div_(top.softcap).tanh_().mul_(top.softcap)
    return raw.div_(temperature)


def _logits(hidden: Tensor, top: _Head, start: int, stop: int, temperature: Tensor) -> Tensor:
    bias = None if top.bias is None else top.bias[start:stop].to(top.dtype)
    raw = _product(hidden, top.weight[start:stop], top.dtype)
    return _finish_logits(raw, bias, top, temperature)


def _own_logit(hidden: Tensor, targets: Tensor, top: _Head, temperature: Tensor) -> Tensor:
    """The sampled token's logit over temperature, ``[r, 1]``."""
    own = top.weight.index_select(0, targets).to(top.dtype)
    raw = (hidden.to(top.dtype) * own).sum(dim=1, keepdim=True)
    bias = None if top.bias is None else top.bias[targets].to(top.dtype).unsqueeze(1)
    return _finish_logits(raw, bias, top, temperature)


# -- one pass by tiles ----------------------------------------------------------------------


class _Sums(NamedTuple):
    """Sums over the vocabulary without the target, of ``e = exp(zeta - peak)``; all ``[r]``.

    zeta is a logit less the target's; w = e / sum e is the distribution among the others.
    ``log_others`` is ``peak + log sum e``, the log-odds of the others against the target.
    Token scores u are taken less the target's, and further less ``centre``, the score of the
    likeliest other token: where that one dominates, nothing large is left to cancel.
    """

    log_others: Tensor
    others_entropy: Tensor  # - sum w log w
    others_sum_p2: Tensor  # sum w^2
    centre: Tensor  # c = u of the likeliest other - u_y
    mean: Tensor  # sum w (u - u_y - c)
    mean_p: Tensor  # sum w^2 (u - u_y - c)
    square_p: Tensor  # sum w^2 (u - u_y - c)^2
    own_logit: Tensor


def _by_tiles(
    hidden: Tensor,
    targets: Tensor,
    top: _Head,
    gradient: Tensor | None,
    embedding: Tensor | None,
    names: tuple[str, ...],
    tile: tuple[int, int],
) -> dict[str, Tensor]:
    differentiable = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (hidden, top.weight, top.bias)
    )
    need_reward = any(name in OF_REWARD for name in names)
    with torch.no_grad():
        sums = _collect(hidden, targets, top, gradient if need_reward else None, embedding, tile)
        found = _close(sums, names)
    if differentiable and any(name in DIFFERENTIABLE for name in names):
        values = cast(
            "tuple[Tensor, Tensor]",
            _Differentiable.apply(hidden, top.weight, top.bias, targets, top, sums, tile),
        )
        for name, value in zip(DIFFERENTIABLE, values, strict=True):
            if name in names:
                found[name] = value
    return found


def _collect(
    hidden: Tensor,
    targets: Tensor,
    top: _Head,
    gradient: Tensor | None,
    embedding: Tensor | None,
    tile: tuple[int, int],
) -> _Sums:
    parts = [
        _collect_rows(
            hidden[a:b],
            targets[a:b],
            top,
            None if gradient is None else gradient[a:b],
            embedding,
            tile[1],
            top.temperature[a:b],
        )
        for a, b in _spans(hidden.shape[0], tile[0])
    ]
    if not parts:
        empty = hidden.new_zeros(0, dtype=top.dtype)
        return _Sums(*([empty] * len(_Sums._fields)))
    return _Sums(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _spans(total: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(0, total, step):
        yield start, min(start + step, total)


def _collect_rows(
    hidden: Tensor,
    targets: Tensor,
    top: _Head,
    gradient: Tensor | None,
    embedding: Tensor | None,
    columns: int,
    temperature: Tensor,
) -> _Sums:
    r = hidden.shape[0]
    v = top.weight.shape[0]
    own = _own_logit(hidden, targets, top, temperature)
    own_score = None
    if gradient is not None:
        assert embedding is not None
        own_embedding = embedding.index_select(0, targets).to(top.dtype)
        own_score = (gradient.to(top.dtype) * own_embedding).sum(dim=1, keepdim=True)
    peak = own.new_full((r, 1), -torch.inf)
    zero = own.new_zeros(r, 1)
    s0, s1, s2 = zero, zero, zero
    centre, f1, f2, f22 = zero, zero, zero, zero
    for start, stop in _spans(v, columns):
        zeta = _logits(hidden, top, start, stop, temperature).sub_(own)
        _leave_out(zeta, targets, start, stop, top.allowed)
        tile_peak, likeliest = zeta.max(dim=1, keepdim=True)
        new_peak = torch.maximum(peak, tile_peak)
        base = torch.where(new_peak == -torch.inf, 0.0, new_peak)
        drop = torch.where(peak == -torch.inf, 0.0, peak - base)
        shrink = drop.exp()
        zeta = zeta.sub_(base).clamp_(min=ABSENT)
        e = zeta.exp()
        s1 = (s1 + s0 * drop) * shrink + (zeta.mul_(e)).sum(dim=1, keepdim=True)
        if own_score is None:
            s0 = s0 * shrink + e.sum(dim=1, keepdim=True)
            s2 = s2 * shrink * shrink + e.square_().sum(dim=1, keepdim=True)
        else:
            assert gradient is not None and embedding is not None
            score = _product(gradient, embedding[start:stop], top.dtype).sub_(own_score)
            new_centre = torch.where(tile_peak > peak, score.gather(1, likeliest), centre)
            moved = centre - new_centre
            score.sub_(new_centre)
            f22 = (f22 + 2 * moved * f2 + moved * moved * s2) * shrink * shrink
            f2 = (f2 + moved * s2) * shrink * shrink
            f1 = (f1 + moved * s0) * shrink + (score * e).sum(dim=1, keepdim=True)
            s0 = s0 * shrink + e.sum(dim=1, keepdim=True)
            e.square_()
            s2 = s2 * shrink * shrink + e.sum(dim=1, keepdim=True)
            weighted = e.mul_(score)
            f2 = f2 + weighted.sum(dim=1, keepdim=True)
            f22 = f22 + weighted.mul_(score).sum(dim=1, keepdim=True)
            centre = new_centre
        peak = new_peak
    alone = s0 == 0  # no other token can be sampled
    safe = torch.where(alone, 1.0, s0)
    base = torch.where(peak == -torch.inf, 0.0, peak)
    log_others = torch.where(alone, -torch.inf, base + safe.log())
    return _Sums(
        *(
            x.squeeze(1)
            for x in (
                log_others,
                safe.log() - s1 / safe,
                s2 / (safe * safe),
                centre,
                f1 / safe,
                f2 / (safe * safe),
                f22 / (safe * safe),
                own,
            )
        )
    )


def _leave_out(
    zeta: Tensor, targets: Tensor, start: int, stop: int, allowed: Tensor | None
) -> None:
    """Take the target's column and the forbidden ones out of a tile, without a synchronisation."""
    if allowed is not None:
        zeta.masked_fill_(~allowed[start:stop], -torch.inf)
    index = (targets - start).clamp(0, stop - start - 1).unsqueeze(1)
    inside = ((targets >= start) & (targets < stop)).unsqueeze(1)
    zeta.scatter_(1, index, torch.where(inside, -torch.inf, zeta.gather(1, index)))


def _close(sums: _Sums, names: tuple[str, ...]) -> dict[str, Tensor]:
    """From the sums to the statistics; q = 1 - p_y is factored out of what vanishes with it.

    One value a token, so float64 costs nothing and keeps squares of small numbers from underflow.
    """
    dtype = sums.own_logit.dtype
    if sums.own_logit.device.type != "mps":
        sums = _Sums(*(x.double() for x in sums))
    q, p = sums.log_others.sigmoid(), (-sums.log_others).sigmoid()
    logprob = -_softplus(sums.log_others)
    q2, c, mean = sums.others_sum_p2, sums.centre, sums.mean
    spread = 1 + q2  # |k|^2 / q^2
    force = p * c * spread + mean * (p - q * q2) + sums.mean_p  # -work / q^2
    shift = p * c - q * mean  # of the others' scores from the policy's mean, less their own
    square = (p * (c + mean)).square() + (
        sums.square_p + 2 * shift * sums.mean_p + shift * shift * q2
    ).clamp(min=0)  # |G|^2 / q^2
    norms = (square * spread).sqrt()
    found = {
        "logprob": logprob,
        "entropy": _entropy(sums.log_others, logprob, q, p, sums.others_entropy),
        "logsumexp": sums.own_logit - logprob,
        "sum_p2": p * p + q * q * q2,
        "update_norm": q * spread.sqrt(),
        "work": -q * q * force,
        "projection": -q * force / spread.sqrt(),
        "cosine": torch.where(
            (norms > 0) & (q > 0), -force / torch.where(norms > 0, norms, 1.0), 0.0
        ),
        "natural": -q * (c + mean),
        "reward_norm": q * square.sqrt(),
    }
    return {name: found[name].to(dtype) for name in names}


def _entropy(
    log_others: Tensor, logprob: Tensor, q: Tensor, p: Tensor, others_entropy: Tensor
) -> Tensor:
    """Entropy of target-or-other, plus that among the others: no term cancels another."""
    log_q = -_softplus(-log_others)
    own = torch.where(q > 0, q * log_q, 0.0)
    return -(p * logprob + own) + q * others_entropy


def _softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))`` with right digits at both ends."""
    return torch.logaddexp(x, torch.zeros_like(x))


class _Differentiable(torch.autograd.Function):
    """``logprob`` and ``entropy`` with gradients; the probabilities are formed again by tile."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        top: _Head,
        sums: _Sums,
        tile: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:
        """The values, already known from the sums."""
        found = _close(sums, DIFFERENTIABLE)
        ctx.save_for_backward(hidden, weight, bias, targets, found["logprob"], found["entropy"])
        ctx.top, ctx.own_logit, ctx.tile = top, sums.own_logit, tile
        return found["logprob"], found["entropy"]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprob: Tensor, grad_entropy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """``dz = g_lp (onehot - p) - g_H p (log p + H)``, then through cap, scale and head."""
        hidden, weight, bias, targets, logprob, entropy = ctx.saved_tensors
        top: _Head = ctx.top
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        log_sum = (ctx.own_logit - logprob).unsqueeze(1)
        grad_hidden = torch.zeros_like(hidden, dtype=top.dtype) if need_hidden else None
        grad_weight = torch.zeros_like(weight) if need_weight else None
        grad_bias = None if not need_bias or bias is None else torch.zeros_like(bias)
        for start, stop in _spans(weight.shape[0], ctx.tile[1]):
            tile_weight = weight[start:stop].to(top.dtype)
            sum_weight = torch.zeros_like(tile_weight) if need_weight else None
            sum_bias = tile_weight.new_zeros(stop - start)
            for a, b in _spans(hidden.shape[0], ctx.tile[0]):
                raw = _raw_gradient(
                    hidden[a:b],
                    targets[a:b],
                    top,
                    (start, stop),
                    top.temperature[a:b],
                    log_sum[a:b],
                    grad_logprob[a:b].unsqueeze(1),
                    grad_entropy[a:b].unsqueeze(1),
                    entropy[a:b].unsqueeze(1),
                )
                if grad_hidden is not None:
                    grad_hidden[a:b].addmm_(raw, tile_weight)
                if sum_weight is not None:
                    sum_weight.addmm_(raw.t(), hidden[a:b].to(top.dtype))
                sum_bias += raw.sum(dim=0)
            if grad_weight is not None and sum_weight is not None:
                grad_weight[start:stop] = sum_weight
            if grad_bias is not None:
                grad_bias[start:stop] = sum_bias
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _raw_gradient(
    hidden: Tensor,
    targets: Tensor,
    top: _Head,
    span: tuple[int, int],
    temperature: Tensor,
    log_sum: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
    entropy: Tensor,
) -> Tensor:
    """Gradient in the head's product, for one tile."""
    start, stop = span
    z = _logits(hidden, top, start, stop, temperature)
    cap = None
    if top.softcap is not None:
        tanh = z * temperature / top.softcap
        cap = 1 - tanh * tanh
    log_p = z - log_sum
    if top.allowed is not None:
        log_p = log_p.masked_fill(~top.allowed[start:stop], ABSENT)
    p = log_p.exp()
    dz = -grad_logprob * p - grad_entropy * p * (log_p + entropy)
    index = (targets - start).clamp(0, stop - start - 1).unsqueeze(1)
    inside = ((targets >= start) & (targets < stop)).unsqueeze(1)
    dz.scatter_add_(1, index, torch.where(inside, grad_logprob, 0.0))
    dz = dz * (top.scale / temperature)
    return dz if cap is None else dz * cap


# -- the reference --------------------------------------------------------------------------


def _reference(
    hidden: Tensor,
    targets: Tensor,
    top: _Head,
    gradient: Tensor | None,
    embedding: Tensor | None,
    names: tuple[str, ...],
) -> dict[str, Tensor]:
    """Every statistic from its definition, in float64 with the logits in memory."""
    z = hidden.double() @ top.weight.double().t()
    if top.bias is not None:
        z = z + top.bias.double()
    z = z * top.scale
    if top.softcap is not None:
        z = top.softcap * torch.tanh(z / top.softcap)
    z = z / top.temperature.double()
    if top.allowed is not None:
        z = z.masked_fill(~top.allowed, -torch.inf)
    log_sum = torch.logsumexp(z, dim=1)
    log_p = z - log_sum.unsqueeze(1)
    p = log_p.exp()
    k = F.one_hot(targets, z.shape[1]).double() - p.detach()
    found = {
        "logprob": log_p.gather(1, targets.unsqueeze(1)).squeeze(1),
        "entropy": -(p * log_p.masked_fill(p == 0, 0.0)).sum(dim=1),
        "logsumexp": log_sum.detach(),
        "sum_p2": (p * p).sum(dim=1).detach(),
        "update_norm": k.square().sum(dim=1).sqrt(),
    }
    if gradient is not None and embedding is not None:
        u = gradient.detach().double() @ embedding.detach().double().t()
        q = p.detach()
        g = q * (u - (q * u).sum(dim=1, keepdim=True))
        work, force = (g * k).sum(dim=1), g.square().sum(dim=1).sqrt()
        length = found["update_norm"]
        norms = force * length
        found |= {
            "work": work,
            "projection": torch.where(length > 0, work / length, 0.0),
            "cosine": torch.where(norms > 0, work / norms, 0.0),
            "natural": (u * k).sum(dim=1),
            "reward_norm": force,
        }
    return {name: found[name] for name in names}
