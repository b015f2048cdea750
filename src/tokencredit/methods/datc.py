"""DATC, Direction-Aware Token Credit Assignment: credit is work done along the update.

The text at hand is the paper's abstract; what it leaves open is listed in `DATC` as this
project's choice. The alignments come from `tokencredit.signals.token_statistics`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tokencredit.credit import Credit, finish
from tokencredit.losses import Surrogate
from tokencredit.methods.grpo import grpo_advantage
from tokencredit.methods.pools import NO_SPREAD, wide
from tokencredit.methods.rule import Recipe, Rule, option
from tokencredit.rollouts import Rollouts

__all__ = [
    "DATC",
    "DATCFlipped",
    "DATCGradTimesInput",
    "DATCNormProduct",
    "DATCRandom",
    "DATCShuffled",
    "datc_weights_reference",
]

Alignment = Literal["work", "projection", "cosine", "natural"]
BLOCK = {False: 1 << 18, True: 1 << 22}
"""How many tokens are solved at a time, on a CPU and on CUDA."""
STEPS = 16
"""Newton steps of the band: more than bounds of 1e4 and responses of 1e5 tokens take."""
STEEPEST = 1e9
"""Largest tilt of the box: beyond it a double cannot tell how far a token is from its bound."""


@dataclass(frozen=True)
class DATC(Rule):
    """DATC: tokens whose update moves the reward the way the advantage says get more of it.

    With u the reward model's score of each vocabulary entry at a token (its gradient there times
    its embeddings), p the policy's distribution, y the sampled token:

        G_t = p (u - p.u)              the reward's force in logit space
        k_t = onehot(y) - p            GRPO's sampled-action direction
        d_t = <G_t, k_t>               ``work``
        s_t = (d_t - mean d) / (std d + std_floor mean|d|)       over a response's free tokens
        w_t = n softmax(A s_t / tau)   over its n free tokens, kept within [1/bound, bound]
        A_t = A w_t

    Source: the abstract of the DATC paper ("maps frozen reward-model gradients into policy logit
    space and allocates weights by evaluating the alignment between the reward direction and
    GRPO's signed sampled-action update direction, while preserving the sign and mean of the
    response-level advantage"). Our choices where it is silent:

    - *Alignment*: the dot product, which is the first-order reward change of the update that
      GRPO makes. ``projection`` divides by the displacement's length, ``cosine`` by both
      lengths (it forgets how far a token can be moved at all), ``natural`` takes the
      natural-gradient displacement.
    - *Standardised per response*, since raw alignments are tiny and would leave all weights 1.
    - *Bounds*, since a heavy tail can give one token everything: ``band`` raises tau of a
      response until its weights fit; ``box`` is the optimum of the same problem under the bounds.
    - *Tilt by the advantage*, or by its sign alone (``direction``).
    - *Frozen tokens* keep weight 1: those marked by the signals that ``freeze`` names (the end
      token, next to which the gradient is an artefact of where the score is read, and structural
      tokens), and those whose alignment is unknown (NaN). A name that the rollouts lack freezes
      nothing.

    Diagnostics of the direction (``misaligned_share``, ``predicted_gain``, ``gain_below``) are
    measured against the signal ``work``, whatever the weights come from; rollouts without it have
    none of them.

    The base is ``Rollouts.base``, else GRPO's.

    Invariants: weights are positive with mean one over each response, so sign and mean of its
    advantage stay; ``bound = 1`` is the base exactly; a base of 0, constant or zero alignment, or
    a single free token gives weight 1; a positive factor on the reward gradient and a constant on
    all token scores change nothing; with ``work`` the predicted gain ``sum w A d`` is never below
    the base's ``sum A d`` (for the others see ``gain_below``).

    Example:
        >>> import torch
        >>> from tokencredit import Rollouts, assign
        >>> rollouts = Rollouts(
        ...     torch.tensor([1.0]), ["p"], torch.ones(1, 3), base=torch.tensor([1.0]),
        ...     work=torch.tensor([[0.3, 0.0, -0.3]]),
        ... )
        >>> [round(x, 3) for x in assign(rollouts, DATC(bound=2.0)).weight[0].tolist()]
        [1.604, 0.896, 0.5]
    """

    name: ClassVar[str] = "datc"
    title: ClassVar[str] = "Direction-Aware Token Credit Assignment"
    paper: ClassVar[str] = "DATC (2026), abstract"
    acts_on: ClassVar[str] = "token weight"

    alignment: Alignment = option(
        "work",
        "alignment of reward force and update direction",
        choices=("work", "projection", "cosine", "natural"),
    )
    bound: float = option(4.0, "weights stay within [1/bound, bound]; 1 = GRPO", low=1)
    tau: float = option(1.0, "temperature of the tilt before it is raised", low=0, low_open=True)
    weight_map: Literal["band", "box"] = option(
        "band", "how the bounds are kept: raise tau, or clip optimally", choices=("band", "box")
    )
    direction: Literal["advantage", "sign"] = option(
        "advantage", "tilt by the advantage, or by its sign", choices=("advantage", "sign")
    )
    freeze: tuple[str, ...] = option(
        ("eos", "structural"), "signals (1 = marked) whose tokens keep weight 1"
    )
    std_floor: float = option(1e-3, "added to the std, times the mean absolute alignment", low=0)

    @property
    def needs(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The signal that holds the alignment."""
        return (self.alignment,)

    @property
    def reads(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What freezes tokens, and what the diagnostics measure against."""
        return (*self.freeze, "work", "logprob")

    def alignments(self, rollouts: Rollouts) -> Float[Tensor, "b t"]:
        """The alignment that weights are formed from; NaN = unknown."""
        return rollouts.signals[self.alignment]

    def credit(self, rollouts: Rollouts) -> Credit:
        """Assign credit."""
        base = grpo_advantage(rollouts) if rollouts.base is None else rollouts.base
        d = self.alignments(rollouts)
        d = d.to(torch.promote_types(d.dtype, torch.float32))
        base = torch.where(rollouts.real & base.isfinite(), base, 0.0).to(d.dtype)
        live = rollouts.live_as(d.dtype)
        free = self._free(rollouts, d, live)
        d = d.nan_to_num(0.0, 0.0, 0.0) * free
        unit = _unit(d)
        tilt = (base.sign() if self.direction == "sign" else base).unsqueeze(1)
        weight = self._weights(tilt * self._standardised(unit, free), free)
        weight = torch.where(free > 0, self._arranged(weight, d, free), 1.0)
        return finish(
            rollouts,
            self,
            advantage=base.unsqueeze(1) * weight,
            base=base,
            weight=weight,
            measures=lambda: self._measures(rollouts, free, live, base, weight),
        )

    def _free(self, rollouts: Rollouts, d: Tensor, live: Tensor) -> Tensor:
        free = d.mul(0).add(1).nan_to_num(0.0) * live  # ones where d is a finite number
        for name in self.freeze:
            if name in rollouts.signals:
                free = free * (rollouts.signals[name].nan_to_num(0.0) == 0)
        return free

    def _standardised(self, d: Tensor, free: Tensor) -> Tensor:
        """Zero mean over the free tokens; 0 where they do not differ. ``|d|`` is at most 1."""
        n = free.sum(dim=1, keepdim=True).clamp(min=1)
        mean = d.sum(dim=1, keepdim=True) / n
        centred = (d - mean) * free
        std = (centred.square().sum(dim=1, keepdim=True) / n).sqrt()
        rms = (std.square() + mean.square()).sqrt()
        floor = self.std_floor * d.abs().sum(dim=1, keepdim=True) / n
        alive = std > NO_SPREAD * rms
        return torch.where(alive, centred / torch.where(alive, std + floor, 1.0), 0.0)

    def _weights(self, x: Tensor, free: Tensor) -> Tensor:
        """From tilts to weights with mean one over the free tokens."""
        if self.bound == 1.0 or x.numel() == 0:
            return torch.ones_like(x)
        weights = _band if self.weight_map == "band" else _box
        # Float32 holds no inverse of a tau below 3e-39; one of 1e-30 is as steep as any.
        limits = math.log(self.bound), min(1 / self.tau, 1e30)
        # Each response is solved for itself, so some at a time: the solver's own tensors then
        # stay in the cache, and a large batch does not take ten times its memory.
        rows = max(BLOCK[x.is_cuda] // x.shape[1], 1)
        if rows >= x.shape[0]:
            return weights(x, free, *limits)
        solved = torch.empty_like(x)
        for start in range(0, x.shape[0], rows):
            block = slice(start, start + rows)
            solved[block] = weights(x[block], free[block], *limits)
        return solved

    def _arranged(self, weight: Tensor, d: Tensor, free: Tensor) -> Tensor:
        """Which free token gets which weight: each its own, but for the shuffled control."""
        return weight

    def _measures(
        self,
        rollouts: Rollouts,
        free: Tensor,
        live: Tensor,
        base: Tensor,
        weight: Tensor,
    ) -> Mapping[str, Tensor]:
        number = free.sum().clamp(min=1)
        moving = free * (base != 0).unsqueeze(1)
        log_bound = math.log(self.bound)
        near = weight.log().abs() > log_bound - 1e-3
        position = live.cumsum(dim=1)
        own = free.sum(dim=1)
        level = ((weight - 1).abs() * free).amax(dim=1) if free.shape[1] else own
        measures = {
            "at_bounds": (near * moving).sum() / moving.sum().clamp(min=1),
            "coverage": free.sum() / live.sum().clamp(min=1),
            "fall_backs": ((base != 0) & rollouts.real & (level == 0)).sum()
            / ((base != 0) & rollouts.real).sum().clamp(min=1),
            "weight_position_correlation": _correlation(weight, position, moving),
            "largest_weight": torch.where(free > 0, weight, 1.0).amax() if free.numel() else number,
        }
        if "work" in rollouts.signals:
            measures |= _against_work(rollouts.signals["work"], free, base, weight)
        if "logprob" in rollouts.signals:
            doubt = -torch.expm1(
                rollouts.signals["logprob"].to(weight.dtype).nan_to_num(0.0, 0.0, 0.0)
            )
            measures["weight_doubt_correlation"] = _correlation(weight, doubt, moving)
        return measures

    @property
    def recipe(self) -> Recipe:
        """GRPO's own loss with a token ratio: the paper changes the advantage alone."""
        return Recipe(
            Surrogate(aggregation="seq-mean-token-mean"),
            source="the abstract changes GRPO's advantage alone; loss as in arXiv 2402.03300",
        )


def _unit(d: Tensor) -> Tensor:
    """Each response's alignments over its largest.

    They may be of any size, 1e-30 included, whose squares float32 cannot hold.
    """
    peak = d.abs().amax(dim=1, keepdim=True) if d.shape[1] else d.sum(dim=1, keepdim=True)
    return d / torch.where(peak > 0, peak, 1.0)


def _against_work(signal: Tensor, free: Tensor, base: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """What the weights do to the work, of which they need not be made."""
    signal = signal.to(torch.promote_types(signal.dtype, weight.dtype))
    known = free * signal.mul(0).add(1).nan_to_num(0.0)
    work = base.unsqueeze(1) * _unit(signal.nan_to_num(0.0, 0.0, 0.0) * known)
    moving = known * (base != 0).unsqueeze(1)
    gain = (work * weight).sum(dim=1) - work.sum(dim=1)
    size = work.abs().sum(dim=1)
    responses = (size > 0).sum().clamp(min=1)
    return {
        "misaligned_share": ((work < 0) * moving).sum() / moving.sum().clamp(min=1),
        "predicted_gain": (gain / torch.where(size > 0, size, 1.0)).sum() / responses,
        "gain_below": ((gain < -1e-5 * size) & (size > 0)).sum() / responses,
    }


def _correlation(a: Tensor, b: Tensor, where: Tensor) -> Tensor:
    n = where.sum().clamp(min=1)
    a = (a - (a * where).sum() / n) * where
    b = (b - (b * where).sum() / n) * where
    return (a * b).sum() / (a.square().sum() * b.square().sum()).sqrt().clamp(min=1e-30)


def _band(x: Tensor, free: Tensor, log_bound: float, sharpest: float) -> Tensor:
    """``n softmax(beta x)`` with the largest beta up to ``sharpest`` that keeps the bounds.

    With K the log of the mean of exp(beta x), the largest weight is within its bound while
    ``beta max x - K <= log bound``, whose left side grows and is concave, and the smallest while
    ``K - beta min x <= log bound``, whose left side grows and is convex: Newton's method comes to
    the one limit from below and to the other from above without ever passing it. A fixed number
    of steps, so that nothing is read back.
    """
    number = free.sum(dim=1, keepdim=True)
    n = number.clamp(min=1)
    out_of_play = (1 - free) * torch.finfo(x.dtype).max
    high = torch.where(number > 0, (x - out_of_play).amax(1, True), 0.0)
    low = torch.where(number > 0, (x + out_of_play).amin(1, True), 0.0)
    x = x - high

    def at(beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``beta max x - K``, and the distances of the tilted mean of x to both ends."""
        e = (beta * x).exp() * free
        total = e.sum(dim=1, keepdim=True).clamp(min=1e-37)
        below_high = -(e * x).sum(dim=1, keepdim=True) / total
        return -(total / n).log(), below_high, (high - low - below_high).clamp(min=0)

    # Weights differ by a factor of at most exp(beta (high - low)), and by bound^2 at most.
    widest = (2 * log_bound / (high - low).clamp(min=1e-30)).clamp(max=sharpest)
    by_largest, by_smallest = torch.zeros_like(high), widest
    for _ in range(STEPS):
        value, slope, _ = at(by_largest)
        step = (log_bound - value) / slope.clamp(min=1e-30)
        by_largest = torch.minimum(by_largest + step.clamp(min=0), widest)
        value, _, slope = at(by_smallest)
        step = (by_smallest * (high - low) - value - log_bound) / slope.clamp(min=1e-30)
        by_smallest = (by_smallest - step.clamp(min=0)).clamp(min=0)
    e = (torch.minimum(by_largest, by_smallest) * x).exp() * free
    return e * (n / e.sum(dim=1, keepdim=True).clamp(min=1e-37))


def _box(x: Tensor, free: Tensor, log_bound: float, sharpest: float) -> Tensor:
    """``clip(c exp(x / tau), 1/bound, bound)`` with c such that the mean is one.

    The optimum of ``sum w x - tau sum w log w`` over weights within the bounds and of mean one.
    """
    # log c may be hundreds, where float32 steps would show in the largest weights.
    given, x, free = x.dtype, x.to(wide(x.device)), free.to(wide(x.device))
    y, playing = x * sharpest, free > 0
    y = y * (STEEPEST / y.abs().amax(dim=1, keepdim=True).clamp(min=STEEPEST))
    n = free.sum(dim=1, keepdim=True)

    # The mean grows with log c, smoothly between the points where a token meets a bound: find the
    # two that hold the solution by halving their list, then solve between them exactly.
    meets = torch.cat([log_bound - y, -log_bound - y], dim=1)
    meets = meets.masked_fill(~playing.repeat(1, 2), torch.inf).sort(dim=1).values
    low, high = torch.zeros_like(n, dtype=torch.long), (2 * n - 1).clamp(min=0).long()
    for _ in range(meets.shape[1].bit_length()):
        middle = (low + high) // 2
        raw = meets.gather(1, middle) + y
        fits = (raw.clamp(-log_bound, log_bound).exp() * free).sum(1, True) <= n
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
    ends = meets.gather(1, low), meets.gather(1, high)
    raw = (ends[0] + ends[1]) / 2 + y
    between = playing & (raw.abs() < log_bound)
    at_bounds = (raw.clamp(-log_bound, log_bound).exp() * (playing & ~between)).sum(1, True)
    log_sum = y.masked_fill(~between, -torch.inf).logsumexp(1, True)
    exact = (n - at_bounds).clamp(min=0).log() - log_sum
    log_c = torch.where(between.any(1, True) & exact.isfinite(), exact, ends[0])
    log_c = torch.where(n > 0, torch.minimum(torch.maximum(log_c, ends[0]), ends[1]), 0.0)
    return ((log_c + y).clamp(-log_bound, log_bound).exp() * free).to(given)


# -- controls -------------------------------------------------------------------------------


@dataclass(frozen=True)
class DATCFlipped(DATC):
    """Control: the alignment with its sign turned. If DATC helps, this should hurt.

    Example:
        >>> from tokencredit import methods
        >>> "datc_flipped" in methods()
        True
    """

    name: ClassVar[str] = "datc_flipped"
    control_of: ClassVar[str] = "datc"
    title: ClassVar[str] = "DATC control: sign flipped"

    def alignments(self, rollouts: Rollouts) -> Float[Tensor, "b t"]:
        """The alignment, negated."""
        return -super().alignments(rollouts)


@dataclass(frozen=True)
class _Substitute(DATC):
    """A control that reads other signals in the alignment's place: no alignment to choose."""

    factors: ClassVar[tuple[str, ...]] = ()

    alignment: Alignment = field(default="work", init=False, repr=False)

    @property
    def needs(self) -> tuple[str, ...]:
        """The signals whose product takes the alignment's place."""
        return self.factors

    def alignments(self, rollouts: Rollouts) -> Float[Tensor, "b t"]:
        """The product of the signals."""
        first, *others = (rollouts.signals[name] for name in self.factors)
        for other in others:
            first = first.to(torch.promote_types(first.dtype, torch.float32)) * other
        return first


@dataclass(frozen=True)
class DATCRandom(_Substitute):
    """Control: the work of a random reward direction, the signal ``work_random``.

    Example:
        >>> from tokencredit import methods
        >>> methods()["datc_random"].needs
        ('work_random',)
    """

    name: ClassVar[str] = "datc_random"
    control_of: ClassVar[str] = "datc"
    title: ClassVar[str] = "DATC control: random direction"
    factors: ClassVar[tuple[str, ...]] = ("work_random",)


@dataclass(frozen=True)
class DATCNormProduct(_Substitute):
    """Control: ``|G| |k|`` in place of ``<G, k>``: the sizes without the alignment.

    Example:
        >>> from tokencredit import methods
        >>> methods()["datc_norm_product"].needs
        ('reward_norm', 'update_norm')
    """

    name: ClassVar[str] = "datc_norm_product"
    control_of: ClassVar[str] = "datc"
    title: ClassVar[str] = "DATC control: norm product"
    factors: ClassVar[tuple[str, ...]] = ("reward_norm", "update_norm")


@dataclass(frozen=True)
class DATCGradTimesInput(_Substitute):
    """Control: gradient times input embedding, the signal ``grad_x_input``: no policy in it.

    Example:
        >>> from tokencredit import methods
        >>> methods()["datc_grad_x_input"].needs
        ('grad_x_input',)
    """

    name: ClassVar[str] = "datc_grad_x_input"
    control_of: ClassVar[str] = "datc"
    title: ClassVar[str] = "DATC control: gradient x input"
    factors: ClassVar[tuple[str, ...]] = ("grad_x_input",)


@dataclass(frozen=True)
class DATCShuffled(DATC):
    """Control: DATC's own weights, shuffled among the free tokens of each response.

    The order comes from a hash of the response's alignments and of ``seed``: it depends neither
    on the order of the rows nor on the padding, and differs from response to response.

    Example:
        >>> import torch
        >>> from tokencredit import Rollouts, assign
        >>> rollouts = Rollouts(
        ...     torch.tensor([1.0]), ["p"], torch.ones(1, 5), base=torch.ones(1),
        ...     work=torch.arange(5.0)[None],
        ... )
        >>> true, shuffled = (assign(rollouts, n).weight[0] for n in ("datc", "datc_shuffled"))
        >>> torch.equal(true, shuffled), torch.equal(true.sort().values, shuffled.sort().values)
        (False, True)
    """

    name: ClassVar[str] = "datc_shuffled"
    control_of: ClassVar[str] = "datc"
    title: ClassVar[str] = "DATC control: weights shuffled"

    seed: int = option(0, "another seed, another order", low=0)

    def _arranged(self, weight: Tensor, d: Tensor, free: Tensor) -> Tensor:
        playing = free > 0
        place = playing.long().cumsum(dim=1)
        bits = d.to(torch.float32).contiguous().view(torch.int32).long()
        # A sum of integers is the same in any layout.
        own = (_mixed(bits + _mixed(place)) * playing).sum(dim=1, keepdim=True)
        key = _mixed(own + _mixed(place + _mixed(torch.full_like(place, self.seed))))
        # Frozen tokens sort behind the free ones in both orders and meet only one another.
        last = torch.iinfo(torch.long).max
        source = key.masked_fill(~playing, last).argsort(dim=1, stable=True)
        target = place.masked_fill(~playing, last).argsort(dim=1, stable=True)
        return torch.empty_like(weight).scatter_(1, target, weight.gather(1, source))


def _mixed(value: Tensor) -> Tensor:
    """Integers whose every bit depends on every bit of the value's lower 32."""
    value = value & 0xFFFFFFFF
    for factor in (0x45D9F3B, 0x45D9F3B):
        value = ((value ^ (value >> 16)) * factor) & 0xFFFFFFFF
    return value ^ (value >> 16)


# -- the reference --------------------------------------------------------------------------


def datc_weights_reference(
    d: list[float], free: list[bool], advantage: float, rule: DATC | None = None
) -> list[float]:
    """DATC's weights of one response in plain loops and Python floats."""
    rule = rule or DATC()
    own = [v for v, f in zip(d, free, strict=True) if f]
    ones = [1.0] * len(d)
    if len(own) < 2 or rule.bound == 1 or advantage == 0:
        return ones
    mean = sum(own) / len(own)
    std = (sum((v - mean) ** 2 for v in own) / len(own)) ** 0.5
    rms = (sum(v * v for v in own) / len(own)) ** 0.5
    if std <= NO_SPREAD * rms:
        return ones
    scale = std + rule.std_floor * sum(abs(v) for v in own) / len(own)
    tilt = math.copysign(1.0, advantage) if rule.direction == "sign" else advantage
    x = [tilt * (v - mean) / scale for v in own]

    def soft(beta: float) -> list[float]:
        peak = max(beta * v for v in x)
        e = [math.exp(beta * v - peak) for v in x]
        total = sum(e)
        return [len(x) * v / total for v in e]

    def boxed(log_c: float) -> list[float]:
        log_bound = math.log(rule.bound)
        return [math.exp(min(max(log_c + v / rule.tau, -log_bound), log_bound)) for v in x]

    def fits(w: list[float]) -> bool:
        return max(w) <= rule.bound and min(w) >= 1 / rule.bound

    if rule.weight_map == "band":
        low, high = 0.0, 1 / rule.tau
        if not fits(soft(high)):
            for _ in range(80):
                middle = (low + high) / 2
                low, high = (middle, high) if fits(soft(middle)) else (low, middle)
            high = low
        weights = soft(high)
    else:
        reach = max(abs(v) for v in x) / rule.tau + math.log(rule.bound)
        low, high = -reach, reach
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if sum(boxed(middle)) < len(x) else (low, middle)
        weights = boxed(low)
    queue = iter(weights)
    return [next(queue) if f else 1.0 for f in free]
