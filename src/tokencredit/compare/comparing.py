"""`compare`: the same rollouts under several rules, as numbers. It reads no file, draws nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from tokencredit.compare.laws import LawResult, check_laws
from tokencredit.compare.statistics import (
    average_ranks,
    gram,
    moved_share,
    rounded,
    unit_ranks,
)
from tokencredit.credit import HOW_TO_GET, Credit, assign
from tokencredit.errors import InputError, MissingSignalError, nearest
from tokencredit.methods.grpo import GRPO
from tokencredit.methods.registry import methods, resolve
from tokencredit.methods.rule import Rule
from tokencredit.rollouts import Rollouts

__all__ = [
    "Comparison",
    "MethodSummary",
    "MissingMethod",
    "Pair",
    "Profile",
    "compare",
    "default_rules",
]

PLACES_AT_ONCE = 1 << 20
"""How many padded places the ranking within responses works on at once."""


@dataclass(frozen=True)
class Pair:
    """How two methods differ on one batch; NaN where a number is not defined.

    Attributes:
        correlation: Spearman's rank correlation of the advantages of all tokens in the loss.
        within: Spearman's rank correlation within a response, averaged over the responses along
            which both vary; NaN if there is none (GRPO is constant along each).
        moved: half the L1 distance of ``|A|``, each normalised over the batch: the share of
            absolute credit that lies on other tokens.
        moved_signed: the same with the signs, so that credit that turned counts as well.
        flips: share of the tokens to which the two give opposite signs.
    """

    correlation: float
    within: float
    moved: float
    moved_signed: float
    flips: float


@dataclass(frozen=True)
class Profile:
    """Where along some axis a method puts its absolute credit.

    Attributes:
        density: for each bin the mean ``|A|`` of its tokens over the mean ``|A|`` of all, 1 = as
            dense as on average; NaN for a bin without tokens.
        share: for each bin its share of the absolute credit; these sum to 1.
    """

    density: tuple[float, ...]
    share: tuple[float, ...]


@dataclass(frozen=True)
class MethodSummary:
    """One method on the batch.

    Attributes:
        name: its label: the rule's name, or the key it was given under.
        rule: the registered name of the rule.
        options: its options.
        diagnostics: `Credit.diagnostics`: effective tokens, sign flips against its own base, ...
        to_reference: how it differs from plain GRPO.
        position: absolute credit over the deciles of relative position.
        entropy: the same over quantiles of entropy; None where no entropy is known.
        laws: what it promises, and whether it was kept.
    """

    name: str
    rule: str
    options: Mapping[str, Any]
    diagnostics: Mapping[str, float]
    to_reference: Pair
    position: Profile
    entropy: Profile | None
    laws: tuple[LawResult, ...]

    @property
    def laws_failed(self) -> tuple[str, ...]:
        """The names of the laws that were broken."""
        return tuple(law.name for law in self.laws if law.passed is False)


@dataclass(frozen=True)
class MissingMethod:
    """A method that could not be computed.

    Attributes:
        name: its label.
        rule: the registered name of the rule.
        signals: what the rollouts would have to carry.
        how: how to get it, a line a signal.
    """

    name: str
    rule: str
    signals: tuple[str, ...]
    how: str


@dataclass(frozen=True)
class Comparison:
    """Several methods on one batch, as plain numbers.

    Attributes:
        methods: the methods that could be computed, in the order in which they were given.
        pairs: ``pairs[i][j]``: how methods i and j differ.
        missing: the others.
        responses: real responses.
        groups: real groups.
        tokens: tokens in the loss: those of the mask, of responses that are real and kept. A
            group that one method drops stays among them, with an advantage of 0 there.
        reference: the name of the reference, plain GRPO.
        position_tokens: share of the tokens in each decile of relative position.
        entropy_tokens: share of the tokens of known entropy in each quantile bin.
        entropy_means: mean entropy of each bin, in nats; empty where no entropy is known.
        entropy_known: share of the tokens whose entropy is known.
    """

    methods: tuple[MethodSummary, ...]
    pairs: tuple[tuple[Pair, ...], ...]
    missing: tuple[MissingMethod, ...]
    responses: int
    groups: int
    tokens: int
    position_tokens: tuple[float, ...]
    entropy_tokens: tuple[float, ...]
    entropy_means: tuple[float, ...]
    entropy_known: float
    reference: str = field(default="grpo", kw_only=True)

    @property
    def names(self) -> tuple[str, ...]:
        """The labels of the computed methods."""
        return tuple(method.name for method in self.methods)

    def method(self, name: str) -> MethodSummary:
        """The method of a label."""
        return self.methods[self._index(name)]

    def pair(self, first: str, second: str) -> Pair:
        """How two methods differ, by their labels."""
        return self.pairs[self._index(first)][self._index(second)]

    def _index(self, name: str) -> int:
        if name not in self.names:
            hint = nearest(name, self.names)
            raise InputError(f"no method {name!r}{hint} in it; it has {', '.join(self.names)}")
        return self.names.index(name)

    def to_dict(self) -> dict[str, Any]:
        """Everything as what JSON can hold; NaN and infinities become None.

        Example:
            >>> import torch
            >>> rollouts = Rollouts(torch.tensor([1.0, 0.0]), ["p", "p"], torch.ones(2, 2))
            >>> compare(rollouts, ["grpo"]).to_dict()["methods"][0]["to_reference"]["moved"]
            0.0
        """
        return _plain(asdict(self))


def default_rules() -> dict[str, Rule]:
    """Every registered method that is not a control, with its default options.

    Example:
        >>> "grpo" in default_rules(), "datc_flipped" in default_rules()
        (True, False)
    """
    return {name: m.rule() for name, m in methods().items() if not m.rule.control_of}


def compare(
    rollouts: Rollouts,
    rules: Sequence[str | Rule] | Mapping[str, str | Rule] | None = None,
    *,
    bins: int = 10,
) -> Comparison:
    """What several methods would do to the same batch.

    All numbers are over the tokens in the loss: those of the mask, of responses that are real
    and kept. Rankings run over the batch and so need all of it: memory is about 12 bytes a token
    for each method, beside the rollouts and the credit of one method at a time.

    Args:
        rollouts: the batch; whole groups.
        rules: names or rule objects; a mapping gives them labels, so that one rule can take part
            twice with different options. Default: every method that is not a control.
        bins: bins of the profiles over position and over entropy.

    Returns:
        The numbers. Methods whose signals the rollouts lack, or hold at no token, are in
        `Comparison.missing`.

    Raises:
        InputError: an unknown method, a label given twice, no token in the loss.
        MissingSignalError: no method is left.

    Example:
        >>> from tokencredit import GTPO
        >>> rollouts = Rollouts(
        ...     torch.tensor([1.0, 0.0]), ["p", "p"], torch.ones(2, 2),
        ...     entropy=torch.tensor([[1.0, 3.0], [2.0, 2.0]]),
        ... )
        >>> result = compare(rollouts, {"weak": GTPO(alpha2=0.0), "strong": GTPO(alpha2=1.0)})
        >>> result.names, result.method("weak").to_reference.moved
        (('weak', 'strong'), 0.0)
    """
    if bins < 1:
        raise InputError(f"compare: bins must be at least 1, got {bins}")
    labelled = _labelled(default_rules() if rules is None else rules)
    where = rollouts.mask & (rollouts.real & rollouts.keep).unsqueeze(1)
    tokens = _count(where)
    if not tokens:
        raise InputError(
            "compare: no token is in the loss: every response is unscored, kept out or empty"
        )
    missing: list[MissingMethod] = []
    computed: list[tuple[str, Rule]] = []
    parts: list[_Part] = []
    position = _position_bins(rollouts.mask, bins)[where]
    entropy_bins, entropy_means = _entropy_bins(rollouts, where, bins)
    for name, rule in labelled.items():
        lacks = _lacks(rollouts, where, rule)
        if not lacks:
            try:
                credit = assign(rollouts, rule)
            except MissingSignalError as error:  # a rule that looks for more than it declares
                missing.append(MissingMethod(name, rule.name, (), str(error)))
                continue
            computed.append((name, rule))
            parts.append(_part(rollouts, credit, rule, where, position, entropy_bins, bins))
            del credit  # before the next one is formed
            continue
        how = "\n".join(
            f"{s}: {HOW_TO_GET.get(s, 'a signal of its own, one number a token')}" for s in lacks
        )
        missing.append(MissingMethod(name, rule.name, lacks, how))
    if not parts:
        needed = "; ".join(f"{m.name} needs {' and '.join(m.signals) or m.how}" for m in missing)
        raise MissingSignalError(f"compare: no method is left: {needed or 'none was named'}")

    plain = next((k for k, (_, rule) in enumerate(computed) if rule == GRPO()), None)
    if plain is None:
        parts.append(
            _part(rollouts, assign(rollouts, GRPO()), GRPO(), where, position, entropy_bins, bins)
        )
        plain = len(parts) - 1
    pairs = _pairs(parts)
    count = len(computed)
    summaries = tuple(
        MethodSummary(
            name=name,
            rule=rule.name,
            options=rule.options(),
            diagnostics=part.diagnostics,
            to_reference=pairs[k][plain],
            position=part.position,
            entropy=part.entropy,
            laws=part.laws,
        )
        for k, ((name, rule), part) in enumerate(zip(computed, parts, strict=False))
    )
    known = entropy_bins >= 0
    return Comparison(
        methods=summaries,
        pairs=tuple(row[:count] for row in pairs[:count]),
        missing=tuple(missing),
        responses=_count(rollouts.real),
        groups=_count(torch.bincount(rollouts.group[rollouts.real]) > 0),
        tokens=tokens,
        position_tokens=_shares(torch.bincount(position, minlength=bins)),
        entropy_tokens=_shares(torch.bincount(entropy_bins[known], minlength=bins))
        if entropy_means
        else (),
        entropy_means=entropy_means,
        entropy_known=_count(known) / tokens,
    )


# -- one method -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Part:
    """What is kept of one method: three numbers a token, and its summary."""

    advantage: Float[Tensor, "n"]
    ranks: Float[Tensor, "n"]
    within: Float[Tensor, "n"]
    varies: Float[Tensor, "b"]
    diagnostics: Mapping[str, float]
    position: Profile
    entropy: Profile | None
    laws: tuple[LawResult, ...]


def _part(
    rollouts: Rollouts,
    credit: Credit,
    rule: Rule,
    where: Tensor,
    position: Tensor,
    entropy: Tensor,
    bins: int,
) -> _Part:
    advantage = credit.advantage[where]
    row = advantage.unsqueeze(0)
    ranks, _ = unit_ranks(row, torch.ones_like(row, dtype=torch.bool))
    within = torch.zeros_like(credit.advantage)
    varies = _varies(credit.advantage, where)
    uneven = varies.nonzero().squeeze(1)  # the others have no ranking: response-level methods
    step = max(1, PLACES_AT_ONCE // rollouts.mask.shape[1])
    for start in range(0, uneven.numel(), step):
        rows = uneven[start : start + step]
        unit, _ = unit_ranks(credit.advantage[rows], where[rows])
        within[rows] = unit.to(torch.float32)
    size = advantage.abs()
    known = entropy >= 0
    return _Part(
        advantage=advantage,
        ranks=ranks[0].to(torch.float32),
        within=within[where],
        varies=varies.to(torch.float32),
        diagnostics=credit.diagnostics,
        position=_profile(size, position, bins),
        entropy=_profile(size[known], entropy[known], bins) if _count(known) else None,
        laws=check_laws(rollouts, credit, rule),
    )


def _varies(advantage: Tensor, where: Tensor) -> Tensor:
    """``[b]`` the responses along which the advantage is not one and the same."""
    near = rounded(advantage)
    top = near.masked_fill(~where, -math.inf).amax(dim=1)
    return top > near.masked_fill(~where, math.inf).amin(dim=1)


def _labelled(rules: Sequence[str | Rule] | Mapping[str, str | Rule]) -> dict[str, Rule]:
    if isinstance(rules, Mapping):
        return {label: resolve(rule) for label, rule in rules.items()}
    if isinstance(rules, str):
        rules = [rules]
    labelled: dict[str, Rule] = {}
    for rule in map(resolve, rules):
        if rule.name in labelled:
            raise InputError(
                f"compare: {rule.name} is given twice; give a mapping of labels to rules"
            )
        labelled[rule.name] = rule
    return labelled


def _lacks(rollouts: Rollouts, where: Tensor, rule: Rule) -> tuple[str, ...]:
    """The needed signals that are not there, or known at no token."""
    return tuple(
        name
        for name in rule.needs
        if name not in rollouts.signals
        or not bool((rollouts.signals[name].isfinite() & where).any())
    )


# -- bins -----------------------------------------------------------------------------------


def _position_bins(mask: Tensor, bins: int) -> Tensor:
    """``[b, t]`` the bin of each token's middle, (position + 1/2) / length."""
    place = mask.cumsum(dim=1) - 1
    length = mask.sum(dim=1, keepdim=True).clamp(min=1)
    return (bins * (2 * place + 1)).div(2 * length, rounding_mode="floor").clamp(0, bins - 1)


def _entropy_bins(rollouts: Rollouts, where: Tensor, bins: int) -> tuple[Tensor, tuple[float, ...]]:
    """``[n]`` the quantile bin of each token in the loss, -1 = unknown; and the bins' means."""
    unknown = torch.full((_count(where),), -1, dtype=torch.long, device=where.device)
    if "entropy" not in rollouts.signals:
        return unknown, ()
    entropy = rollouts.signals["entropy"][where].to(torch.float32)
    known = entropy.isfinite()
    number = _count(known)
    if not number:
        return unknown, ()
    values = entropy[known]
    ranks = average_ranks(rounded(values).unsqueeze(0))[0]
    index = ((ranks - 0.5) * bins / number).long().clamp(0, bins - 1)
    unknown[known] = index
    total, count = _binned(values, index, bins)
    return unknown, tuple(_floats(total / count))


def _binned(values: Tensor, index: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    total = torch.zeros(bins, dtype=torch.float64, device=values.device)
    total.index_add_(0, index, values.to(torch.float64))
    return total, torch.bincount(index, minlength=bins)


def _profile(size: Tensor, index: Tensor, bins: int) -> Profile:
    total, count = _binned(size, index, bins)
    everything = total.sum()
    mean = everything / count.sum().clamp(min=1)
    return Profile(
        density=tuple(_floats(total / count / mean)), share=tuple(_floats(total / everything))
    )


# -- pairs ----------------------------------------------------------------------------------


def _pairs(parts: Sequence[_Part]) -> tuple[tuple[Pair, ...], ...]:
    ranks = gram([part.ranks for part in parts])
    within = gram([part.within for part in parts])
    shared = gram([part.varies for part in parts])
    count = len(parts)
    found: dict[tuple[int, int], Pair] = {}
    for i in range(count):
        for j in range(i, count):
            a, b = parts[i].advantage, parts[j].advantage
            size = _value(ranks[i, i] * ranks[j, j])
            both = _value(shared[i, j])
            found[i, j] = found[j, i] = Pair(
                correlation=_bounded(_value(ranks[i, j]) / math.sqrt(size)) if size else math.nan,
                within=_bounded(_value(within[i, j]) / both) if both else math.nan,
                moved=moved_share(a, b),
                moved_signed=moved_share(a, b, signed=True),
                flips=_count(a * b < 0) / a.numel(),
            )
    return tuple(tuple(found[i, j] for j in range(count)) for i in range(count))


def _bounded(value: float) -> float:
    """Without what float32 adds to the seventh digit."""
    return max(-1.0, min(1.0, round(value, 6)))


def _value(tensor: Tensor) -> float:
    return cast("float", tensor.item())


def _count(flags: Tensor) -> int:
    return int(_value(flags.sum()))


def _floats(values: Tensor) -> list[float]:
    return cast("list[float]", values.tolist())


def _shares(counts: Tensor) -> tuple[float, ...]:
    return tuple(_floats(counts / counts.sum().clamp(min=1)))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast("Sequence[Any]", value)]
    return value
