"""DATC: the laws of its weights, its loop reference, its diagnostics and its controls."""

from __future__ import annotations

import importlib
import itertools
import math
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from batches import LAYOUTS, Batch, close
from tokencredit import DATC, GRPO, Credit, Rollouts, assign, methods
from tokencredit.methods import DATCFlipped, DATCNormProduct, DATCShuffled
from tokencredit.methods.datc import datc_weights_reference
from tokencredit.signals import token_statistics

EXAMPLES = settings(max_examples=40)
INF, NAN = math.inf, math.nan
MAPS = ("band", "box")


@dataclass(frozen=True)
class Case:
    """Responses as plain lists: alignments, marks of the end token, advantages."""

    d: list[list[float]]
    eos: list[list[float]]
    base: list[float]

    def batch(self, values: list[list[float]]) -> Batch:
        b = len(self.base)
        return Batch([0.0] * b, list(range(b)), [False] * b, values)

    def rollouts(self, layout: str = "right", **how: Any) -> Rollouts:
        order = how.get("order") or list(range(len(self.base)))
        base = torch.tensor(self.base)[order].to(how.get("dtype", torch.float32))
        work = self.batch(self.d).rollouts(layout, **how)
        eos = self.batch(self.eos).rollouts(layout, **how).signals["entropy"]
        return work.replace(base=base, signals={"work": work.signals["entropy"], "eos": eos})

    def weights(self, credit: Credit, layout: str = "right", **how: Any) -> list[list[float]]:
        assert credit.weight is not None
        return self.batch(self.d).tokens(credit.weight, layout, **how)

    def free(self) -> list[list[bool]]:
        return [
            [math.isfinite(v) and e == 0 for v, e in zip(d, eos, strict=True)]
            for d, eos in zip(self.d, self.eos, strict=True)
        ]

    def reference(self, rule: DATC) -> list[list[float]]:
        return [
            datc_weights_reference(d, free, a, rule)
            for d, free, a in zip(self.d, self.free(), self.base, strict=True)
        ]


def plain(d: list[list[float]], base: list[float]) -> Case:
    return Case(d, [[0.0] * len(row) for row in d], base)


@st.composite
def cases(draw: st.DrawFn, *, unknown: bool = True, responses: int = 5, longest: int = 9) -> Case:
    """Alignments of any size and tail, some unknown, some tokens frozen, some advantages 0."""
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=responses))
    tail = draw(st.sampled_from(["normal", "heavy", "few", "alike"]))
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    size = 10.0 ** rng.randint(-12, 6)

    def value() -> float:
        if unknown and rng.random() < 0.1:
            return rng.choice([NAN, INF, -INF])
        if tail == "alike":
            return size
        if tail == "few":
            return rng.choice([0.0, size, -size])
        v = rng.gauss(0.2, 1)
        return size * (math.copysign(math.exp(3 * abs(v)), v) if tail == "heavy" else v)

    d = [[value() for _ in range(n)] for n in lengths]
    eos = [[float(unknown and rng.random() < 0.15) for _ in range(n)] for n in lengths]
    base = [rng.choice([0.0, 1.0, rng.gauss(0, 2), rng.gauss(0, 0.1)]) for _ in lengths]
    return Case(d, eos, base)


def rules(**fixed: Any) -> st.SearchStrategy[DATC]:
    options: dict[str, st.SearchStrategy[Any]] = {
        "bound": st.sampled_from([1.0, 1.01, 2.0, 4.0, 8.0, 100.0]),
        "tau": st.sampled_from([0.1, 0.5, 1.0, 3.0]),
        "weight_map": st.sampled_from(MAPS),
        "direction": st.sampled_from(["advantage", "sign"]),
        "std_floor": st.sampled_from([0.0, 1e-3, 0.1]),
    }
    options |= {name: st.just(value) for name, value in fixed.items()}
    return st.fixed_dictionaries(options).map(lambda o: DATC(**o))


# -- the laws -------------------------------------------------------------------------------


@EXAMPLES
@given(case=cases(), rule=rules(), layout=st.sampled_from(LAYOUTS))
def test_weights_keep_sign_and_mean_and_stay_in_the_bounds(
    case: Case, rule: DATC, layout: str
) -> None:
    credit = assign(case.rollouts(layout, garbage=(NAN, INF)), rule)
    weights = case.weights(credit, layout)
    advantages = case.batch(case.d).tokens(credit.advantage, layout)
    for w, a, base, free in zip(weights, advantages, case.base, case.free(), strict=True):
        assert min(w) >= (1 - 1e-6) / rule.bound and max(w) <= (1 + 1e-6) * rule.bound
        assert sum(w) / len(w) == pytest.approx(1, abs=1e-6)
        assert sum(a) / len(a) == pytest.approx(base, rel=1e-6, abs=1e-9)
        assert all(x * base >= 0 and (x == 0) == (base == 0) for x in a)
        # Frozen and unknown tokens exactly 1, and not part of the others' mean.
        assert all(v == 1 for v, f in zip(w, free, strict=True) if not f)
    assert torch.equal(credit.base, torch.tensor(case.base))


@EXAMPLES
@given(case=cases(), rule=rules(bound=1.0))
def test_bound_1_is_the_base_bit_for_bit(case: Case, rule: DATC) -> None:
    credit = assign(case.rollouts(), rule)
    want = torch.tensor(case.base).unsqueeze(1) * case.rollouts().mask
    assert torch.equal(credit.advantage, want)
    grpo = case.rollouts().replace(base=None, group=[0] * len(case.base), rewards=case.base)
    assert torch.equal(assign(grpo, rule).advantage, assign(grpo, GRPO()).advantage)


@pytest.mark.parametrize(("rule", "n"), itertools.product([DATC(), DATC(weight_map="box")], [1, 9]))
def test_nothing_to_tell_tokens_apart_leaves_them_alone(rule: DATC, n: int) -> None:
    apart = [0.1 * k for k in range(n)]
    case = Case(
        d=[apart, [0.0] * n, [0.3] * n, [1e-30] * n, [NAN] * n, apart, [2.0] + [NAN] * (n - 1)],
        eos=[[0.0] * n] * 5 + [[1.0] * n, [0.0] * n],
        base=[0.0, 1.0, -1.0, 1.0, 1.0, 1.0, 1.0],
    )
    credit = assign(case.rollouts(), rule)
    assert credit.weight is not None and torch.equal(credit.weight, torch.ones(7, n))
    # Six rows have an advantage, and none of them has anything to weight.
    assert credit.diagnostics["fall_backs"] == 1


@EXAMPLES
@given(case=cases(), rule=rules(), power=st.integers(-20, 20))
def test_a_positive_factor_changes_nothing(case: Case, rule: DATC, power: int) -> None:
    # At most 1e27 or so, which float32 still holds.
    scaled = replace(case, d=[[v * 10.0**power for v in row] for row in case.d])
    one, two = (assign(c.rollouts(dtype=torch.float64), rule) for c in (case, scaled))
    close(case.weights(two), case.weights(one), 1e-5)
    assert two.diagnostics == pytest.approx(one.diagnostics, rel=1e-4, abs=1e-6)


def test_float32_alignments_of_any_size() -> None:
    case = plain([[0.3, -0.2, 0.1, 0.9, 0.0]], [1.3])
    for rule in (DATC(), DATC(weight_map="box")):
        want = case.weights(assign(case.rollouts(), rule))
        for factor in (1e-37, 1e-20, 1e20, 1e37):
            scaled = replace(case, d=[[v * factor for v in case.d[0]]])
            credit = assign(scaled.rollouts(), rule)
            close(case.weights(credit), want, 1e-6)
            assert all(math.isfinite(v) for v in credit.diagnostics.values())


@pytest.mark.parametrize("alignment", ["work", "projection", "cosine", "natural"])
def test_a_constant_on_all_token_scores_changes_nothing(alignment: Any) -> None:
    g = torch.Generator().manual_seed(0)
    n, v, e = 12, 40, 5
    hidden, head = torch.randn(n, 6, generator=g), torch.randn(v, 6, generator=g)
    gradient, table = torch.randn(n, e, generator=g), torch.randn(v, e, generator=g)
    targets = torch.randint(0, v, (n,), generator=g)
    found = []
    for shift in (0.0, 3.0):
        # One more dimension: every entry scores `shift` more, at every token.
        reward = (
            torch.cat([gradient, torch.ones(n, 1)], dim=1),
            torch.cat([table, torch.full((v, 1), shift)], dim=1),
        )
        s = token_statistics(hidden, head, targets, want=[alignment], reward=reward)
        rollouts = Rollouts(
            [0.0, 1.0], [0, 1], torch.ones(2, n // 2), base=[1.0, -0.5],
            signals={alignment: getattr(s, alignment).view(2, -1)},
        )  # fmt: skip
        found.append(assign(rollouts, DATC(alignment=alignment)).weight)
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    assert not torch.equal(found[0], torch.ones_like(found[0]))


@EXAMPLES
@given(case=cases(), rule=rules())
def test_predicted_gain_of_work_is_never_below_the_bases(case: Case, rule: DATC) -> None:
    credit = assign(case.rollouts(dtype=torch.float64), rule)
    for w, d, a in zip(case.weights(credit), case.d, case.base, strict=True):
        work = [a * v if math.isfinite(v) else 0.0 for v in d]
        gain = sum(x * y for x, y in zip(w, work, strict=True))
        assert gain >= sum(work) - 1e-6 * sum(map(abs, work)) - 1e-300
    assert credit.diagnostics["gain_below"] == 0
    assert credit.diagnostics["predicted_gain"] >= -1e-6


@EXAMPLES
@given(case=cases(), rule=rules())
def test_the_opposite_advantage_is_the_opposite_alignment(case: Case, rule: DATC) -> None:
    against = replace(case, base=[-a for a in case.base])
    turned = replace(case, d=[[-v for v in row] for row in case.d])
    one, two = (assign(c.rollouts(), rule) for c in (against, turned))
    close(case.weights(one), case.weights(two), 1e-6)


@EXAMPLES
@given(case=cases(), rule=rules(), data=st.data())
def test_layout_order_and_padding_change_nothing(
    case: Case, rule: DATC, data: st.DataObject
) -> None:
    layout = data.draw(st.sampled_from(LAYOUTS))
    order = list(data.draw(st.permutations(range(len(case.base)))))
    how: dict[str, Any] = {"spare": data.draw(st.integers(0, 4)), "seed": 3, "order": order}
    one = assign(case.rollouts(), rule)
    two = assign(case.rollouts(layout, garbage=(NAN, -INF, 1e30, 1.0), **how), rule)
    close(case.weights(two, layout, **how), case.weights(one), 2e-6)
    assert two.diagnostics == pytest.approx(one.diagnostics, rel=1e-4, abs=1e-5)


# -- the reference --------------------------------------------------------------------------


@pytest.mark.parametrize("weight_map", MAPS)
@settings(max_examples=100)
@given(data=st.data())
def test_equals_the_loop_reference(weight_map: str, data: st.DataObject) -> None:
    rule = data.draw(rules(weight_map=weight_map))
    case = data.draw(cases())
    want = case.reference(rule)
    double = assign(case.rollouts("interleaved", dtype=torch.float64), rule)
    close(case.weights(double, "interleaved"), want, 1e-6)
    close(case.weights(assign(case.rollouts(), rule)), want, 5e-5 / rule.tau)


@pytest.mark.parametrize("weight_map", MAPS)
@pytest.mark.parametrize("bound", [1.001, 4.0, 4096.0])
@pytest.mark.parametrize("tau", [0.01, 1.0])
@pytest.mark.parametrize("kind", ["normal", "one giant", "one dwarf", "cauchy", "halves"])
def test_long_responses(weight_map: Any, bound: float, tau: float, kind: str) -> None:
    rng = random.Random(0)
    n = 4096 if (bound, tau) == (4.0, 1.0) else 300  # the reference takes seconds
    d = {
        "normal": [rng.gauss(0, 1) for _ in range(n)],
        "one giant": [1e6] + [rng.gauss(0, 1) for _ in range(n - 1)],
        "one dwarf": [-1e6] + [rng.gauss(0, 1) for _ in range(n - 1)],
        "cauchy": [math.tan(math.pi * (rng.random() - 0.5)) for _ in range(n)],
        "halves": [float(k % 2) for k in range(n)],
    }[kind]
    case = plain([d, d[:50]], [1.0, -30.0])
    rule = DATC(weight_map=weight_map, bound=bound, tau=tau)
    want = case.reference(rule)
    close(case.weights(assign(case.rollouts(dtype=torch.float64), rule)), want, 2e-6)
    weights = case.weights(assign(case.rollouts(), rule))
    # Tilts of thousands carry float32's relative error into the exponent.
    if not (weight_map == "box" and tau < 1):
        close(weights, want, 1e-4)
    for w in weights:
        assert sum(w) / len(w) == pytest.approx(1, abs=1e-6)
        assert min(w) >= (1 - 1e-6) / bound and max(w) <= (1 + 1e-6) * bound


@pytest.mark.parametrize("size", [1e-30, 1e4, 1e9, 1e20, 1e30])
@pytest.mark.parametrize("weight_map", MAPS)
def test_advantages_of_any_size(size: float, weight_map: Any) -> None:
    case = plain([[0.3, -0.2, 0.1, 0.9, 0.0, 0.11, 0.5]], [size])
    credit = assign(case.rollouts(), DATC(weight_map=weight_map))
    (w,) = case.weights(credit)
    assert sum(w) / len(w) == pytest.approx(1, abs=1e-6)
    assert min(w) >= 0.25 * (1 - 1e-6) and max(w) <= 4 * (1 + 1e-6)
    assert (max(w) > 1.5) == (size > 1)


# -- worked by hand -------------------------------------------------------------------------


def test_three_tokens_by_hand() -> None:
    # d = 0.3, 0, -0.3: mean 0, population std 0.3 sqrt(2/3) = 0.244949, mean |d| = 0.2, so with
    # the floor s = 0.3 / (0.244949 + 0.0002) = 1.223745, 0, -1.223745. A = 1, tau = 1:
    # softmax x 3 has its smallest at 3 e^-s / (1 + e^s + e^-s) = 3 / (1 + 3.399895 + 11.559286) =
    # 0.187980 and its largest at 0.187980 x 11.559286 = 2.172912; the middle one is 0.639112.
    case = plain([[0.3, 0.0, -0.3]], [1.0])
    for weight_map in MAPS:
        wide = assign(case.rollouts(), DATC(bound=6.0, weight_map=weight_map))
        close(case.weights(wide), [[2.172912, 0.639112, 0.187980]], 2e-6)

    # Bound 2. Band: the smallest binds first; with y = e^(beta s): 3 / (1 + y + y^2) = 1/2, so
    # y = (sqrt(21) - 1) / 2 = 1.791288: weights y^2 / 2, y / 2, 1 / 2.
    y = (math.sqrt(21) - 1) / 2
    band = assign(case.rollouts(), DATC(bound=2.0))
    close(case.weights(band), [[y * y / 2, y / 2, 0.5]], 2e-6)
    # Box: the smallest is clipped to 1/2, then c e^s + c = 2.5: c = 2.5 / 4.399895 = 0.568195 and
    # the largest 1.931805, below 2.
    box = assign(case.rollouts(), DATC(bound=2.0, weight_map="box"))
    close(case.weights(box), [[1.931805, 0.568195, 0.5]], 2e-6)
    # Bound 1.5: both ends clipped, 3/2 and 2/3, the middle one takes what is left: 3 - 13/6.
    box = assign(case.rollouts(), DATC(bound=1.5, weight_map="box"))
    close(case.weights(box), [[1.5, 5 / 6, 2 / 3]], 2e-6)

    # A = -2 tilts the other way and twice as far: no bound below 3/(e^-2s (1 + e^s + e^2s)) binds.
    back = assign(replace(case, base=[-2.0]).rollouts(), DATC(bound=100.0))
    e = math.exp(2 * 1.223745)
    total = 1 + e + 1 / e
    close(case.weights(back), [[3 / e / total, 3 / total, 3 * e / total]], 5e-6)
    # By its sign alone: as with A = -1.
    sign = assign(replace(case, base=[-2.0]).rollouts(), DATC(bound=6.0, direction="sign"))
    close(case.weights(sign), [[0.187980, 0.639112, 2.172912]], 2e-6)
    assert sign.advantage[0].tolist() == pytest.approx([-2 * w for w in case.weights(sign)[0]])


@pytest.mark.parametrize("weight_map", MAPS)
def test_two_tokens_by_hand(weight_map: Any) -> None:
    # s = +-1 / (1 + floor): 2 softmax(+-1) = 1.7616, 0.2384: within [1/8, 8], beyond [1/4, 4],
    # where the smaller one binds: 1/4 and 2 - 1/4.
    case = plain([[5.0, 1.0], [-3.0, 7.0]], [1.0, 1.0])
    credit = assign(case.rollouts(), DATC(weight_map=weight_map))
    close(case.weights(credit), [[1.75, 0.25], [0.25, 1.75]], 1e-6)
    credit = assign(case.rollouts(), DATC(weight_map=weight_map, bound=8.0, std_floor=0.0))
    t = math.tanh(1)
    close(case.weights(credit), [[1 + t, 1 - t], [1 - t, 1 + t]], 1e-6)


def test_frozen_tokens_by_hand() -> None:
    # The end token's alignment would dwarf the others; it and the unknown token stay 1, and the
    # two left are two tokens by hand: 2 softmax(+-1).
    t = math.tanh(1)
    work = torch.tensor([[5.0, NAN, 1.0, 900.0]])
    marks = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    rollouts = Rollouts(
        [1.0], ["p"], torch.ones(1, 4), base=[1.0], signals={"work": work, "structural": marks}
    )
    rule = DATC(bound=8.0, std_floor=0.0)
    assert rule.freeze == ("eos", "structural")
    credit = assign(rollouts, rule)
    assert credit.weight is not None
    assert credit.weight[0].tolist() == pytest.approx([1 + t, 1, 1 - t, 1], rel=1e-6)
    assert credit.diagnostics["coverage"] == 0.5
    # Frozen by a name of one's own, or not at all.
    mine = rollouts.replace(signals={"work": work, "mine": marks})
    assert torch.equal(assign(mine, "datc", freeze="mine", bound=8, std_floor=0).weight,
                       credit.weight)  # fmt: skip
    free = assign(rollouts, DATC(freeze=())).weight
    assert free is not None and free[0, 3] > 1.5


# -- the weight maps are what they say ------------------------------------------------------


def objective(w: list[float], x: list[float], tau: float) -> float:
    """``sum w x - tau sum w log w``: what both maps maximise among weights of mean one."""
    return sum(a * b - tau * a * math.log(a) for a, b in zip(w, x, strict=True))


def standardised(d: list[float], rule: DATC) -> list[float]:
    mean = sum(d) / len(d)
    std = (sum((v - mean) ** 2 for v in d) / len(d)) ** 0.5
    return [(v - mean) / (std + rule.std_floor * sum(map(abs, d)) / len(d)) for v in d]


@pytest.mark.parametrize("seed", range(20))
def test_box_is_the_optimum_within_the_bounds(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(2, 30)
    rule = DATC(weight_map="box", bound=rng.choice([1.3, 2.0, 4.0]), tau=rng.choice([0.2, 1.0]))
    case = plain([[rng.gauss(0, 1) ** 3 for _ in range(n)]], [1.0])
    x = standardised(case.d[0], rule)
    (w,) = case.weights(assign(case.rollouts(dtype=torch.float64), rule))
    low, high = 1 / rule.bound, rule.bound
    # Karush, Kuhn, Tucker: the marginal value x - tau log w is the same, mu, at every token
    # between its bounds, at most mu at the lower and at least mu at the upper one.
    value = [v - rule.tau * math.log(a) for v, a in zip(x, w, strict=True)]
    inner = [v for v, a in zip(value, w, strict=True) if low * 1.00001 < a < high * 0.99999]
    at_low = [v for v, a in zip(value, w, strict=True) if a <= low * 1.00001]
    at_high = [v for v, a in zip(value, w, strict=True) if a >= high * 0.99999]
    bottom, top = max(at_low, default=-INF), min(at_high, default=INF)
    if inner:
        assert max(inner) - min(inner) < 1e-5
        bottom, top = max(bottom, min(inner)), min(top, max(inner))
    assert bottom <= top + 1e-5
    # And no other weights do better: random moves of weight from one token to another.
    best = objective(w, x, rule.tau)
    for _ in range(300):
        i, j = rng.randrange(n), rng.randrange(n)
        step = min(high - w[i], w[j] - low) * rng.random()
        if i == j or step <= 0:
            continue
        other = list(w)
        other[i] += step
        other[j] -= step
        assert objective(other, x, rule.tau) <= best + 1e-5


@EXAMPLES
@given(case=cases(unknown=False, responses=1), bound=st.sampled_from([1.5, 2.0, 4.0]))
def test_band_is_softmax_at_the_lowest_tau_that_fits(case: Case, bound: float) -> None:
    rule = DATC(bound=bound)
    (w,) = case.weights(assign(case.rollouts(dtype=torch.float64), rule))
    x = [case.base[0] * v for v in standardised(case.d[0], rule)] if len(set(case.d[0])) > 1 else []
    if not x or not case.base[0] or max(w) / min(w) < 1 + 1e-4:
        return
    # log w is linear in x, with slope 1 / tau.
    spread = max(x) - min(x)
    beta = math.log(max(w) / min(w)) / spread
    shift = math.log(max(w)) - beta * max(x)
    for a, v in zip(w, x, strict=True):
        assert math.log(a) == pytest.approx(beta * v + shift, abs=1e-5)
    assert beta <= 1 / rule.tau + 1e-6
    if beta < 1 / rule.tau - 1e-5:  # raised: because a bound is met
        assert max(w) == pytest.approx(bound, rel=1e-5) or min(w) == pytest.approx(
            1 / bound, rel=1e-5
        )


def test_box_keeps_more_of_the_bodys_spread_than_band_under_an_outlier() -> None:
    rng = random.Random(1)
    d = [[100.0] + [rng.gauss(0, 1) for _ in range(200)]]
    case = plain(d, [1.0])
    spread = {}
    for weight_map in MAPS:
        (w,) = case.weights(assign(case.rollouts(), DATC(weight_map=weight_map, tau=0.1)))
        spread[weight_map] = max(w[1:]) - min(w[1:])
    assert spread["box"] > 2 * spread["band"]


# -- cost -----------------------------------------------------------------------------------


class Counting(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", [DATC(), DATC(weight_map="box"), DATCShuffled()], ids=str)
def test_no_loop_over_responses(rule: DATC) -> None:
    counts = []
    for b in (1, 7, 100):
        g = torch.Generator().manual_seed(b)
        rollouts = Rollouts(
            torch.zeros(b), torch.arange(b), torch.ones(b, 6), base=torch.randn(b, generator=g),
            work=torch.randn(b, 6, generator=g),
        )  # fmt: skip
        with Counting() as mode:
            assert assign(rollouts, rule).diagnostics
        counts.append(mode.count)
    assert len(set(counts)) == 1


# -- base, unscored and truncated rows ------------------------------------------------------


@pytest.mark.parametrize("weight_map", ["band", "box"])
@pytest.mark.parametrize("block", [1, 40, 64, 100])
def test_large_batches_are_solved_some_responses_at_a_time(
    weight_map: Any, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = torch.Generator().manual_seed(0)
    rollouts = Rollouts(
        torch.ones(7), [0] * 7, torch.rand(7, 20, generator=seed) < 0.8,
        base=torch.randn(7, generator=seed), work=torch.randn(7, 20, generator=seed),
    )  # fmt: skip
    whole = assign(rollouts, DATC(weight_map=weight_map)).weight
    module = importlib.import_module("tokencredit.methods.datc")
    monkeypatch.setattr(module, "BLOCK", {False: block, True: block})
    parts = assign(rollouts, DATC(weight_map=weight_map)).weight
    assert whole is not None and parts is not None and torch.equal(whole, parts)


def test_the_base_is_the_engines_else_grpos() -> None:
    rollouts = Rollouts(
        [1.0, 0.0, 0.5], ["p"] * 3, torch.ones(3, 4),
        work=torch.tensor([[1.0, 2.0, 3.0, 4.0]]).expand(3, 4).contiguous(),
    )  # fmt: skip
    grpo = assign(rollouts, GRPO())
    credit = assign(rollouts, DATC())
    assert torch.equal(credit.base, grpo.base)
    torch.testing.assert_close(credit.advantage.mean(dim=1), grpo.base)
    given_base = torch.tensor([0.25, -3.0, 0.0])
    credit = assign(rollouts.replace(base=given_base), DATC())
    assert torch.equal(credit.base, given_base)
    torch.testing.assert_close(credit.advantage.mean(dim=1), given_base)


def test_unscored_padding_and_truncated_rows() -> None:
    case = plain([[1.0, 2.0, 4.0]] * 5, [1.0, 1.0, NAN, 1.0, 1.0])
    rollouts = case.rollouts().replace(
        rewards=torch.tensor([0.0, NAN, 0.0, 0.0, 0.0]),
        real=[True, True, True, False, True],
        keep=[True, True, True, True, False],
    )
    credit = assign(rollouts, DATC())
    assert credit.weight is not None
    assert credit.weight[0, 2] > credit.weight[0, 0] > 0 and credit.weight[0, 2] > 1.3
    for row in (1, 2, 3, 4):  # not scored, no advantage, padding, truncated
        assert credit.weight[row].tolist() == [1, 1, 1]
        assert not credit.advantage[row].any()
    # A truncated response keeps its base; it counts in the diagnostics, not in the loss.
    assert credit.base.tolist() == [1, 0, 0, 0, 1]
    assert credit.in_loss.tolist() == [True, False, True, False, False]
    assert credit.diagnostics["fall_backs"] == 0
    assert all(math.isfinite(v) for v in credit.diagnostics.values())


# -- diagnostics ----------------------------------------------------------------------------


def correlation(pairs: list[tuple[float, float]]) -> float:
    n = len(pairs)
    a, b = sum(p[0] for p in pairs) / n, sum(p[1] for p in pairs) / n
    cov = sum((x - a) * (y - b) for x, y in pairs)
    return cov / math.sqrt(
        sum((x - a) ** 2 for x, _ in pairs) * sum((y - b) ** 2 for _, y in pairs)
    )


@pytest.mark.parametrize("alignment", ["work", "natural"])
@pytest.mark.parametrize("seed", range(5))
def test_diagnostics_against_plain_loops(alignment: Any, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(2, 12) for _ in range(20)]
    case = Case(
        [[rng.gauss(0, 1) if rng.random() > 0.1 else NAN for _ in range(n)] for n in lengths],
        [[float(k == n - 1) for k in range(n)] for n in lengths],
        [rng.choice([0.0, 1.0, rng.gauss(0, 1)]) for _ in lengths],
    )
    logprob = [[-rng.random() * 3 for _ in range(n)] for n in lengths]
    rule = DATC(alignment=alignment, bound=2.0, tau=0.7)
    # The direction is measured against the work, from which other alignments differ.
    d = case.d
    if alignment != "work":
        d = [[v if rng.random() < 0.1 else rng.gauss(0, 1) for v in row] for row in case.d]
    known = [
        [ok and math.isfinite(v) for v, ok in zip(row, free, strict=True)]
        for row, free in zip(d, case.free(), strict=True)
    ]
    made = case.rollouts("left")
    logprobs = case.batch(logprob).rollouts("left").signals["entropy"]
    work = case.batch(d).rollouts("left").signals["entropy"]
    rollouts = made.replace(
        signals={
            "work": work, alignment: made.signals["work"], "eos": made.signals["eos"],
            "logprob": logprobs,
        }
    )  # fmt: skip
    credit = assign(rollouts, rule)
    weights = case.reference(rule)
    tokens = [
        (w[t], t + 1, 1 - math.exp(lp[t]))
        for w, f, a, lp in zip(weights, case.free(), case.base, logprob, strict=True)
        for t in range(len(w))
        if f[t] and a != 0
    ]
    gains, below = [], 0
    pushed = [
        a * v
        for row, ok, a in zip(d, known, case.base, strict=True)
        for v, k in zip(row, ok, strict=True)
        if k and a != 0
    ]
    for w, row, f, a in zip(weights, d, known, case.base, strict=True):
        work = [a * v if ok else 0.0 for v, ok in zip(row, f, strict=True)]
        size = sum(map(abs, work))
        if size > 0:
            gains.append(sum((x - 1) * y for x, y in zip(w, work, strict=True)) / size)
            below += gains[-1] < -1e-5
    alive = [w for w, a in zip(weights, case.base, strict=True) if a != 0]
    want = {
        "misaligned_share": sum(v < 0 for v in pushed) / len(pushed),
        "predicted_gain": sum(gains) / len(gains),
        "gain_below": below / len(gains),
        "at_bounds": sum(abs(math.log(t[0])) > math.log(2) - 1e-3 for t in tokens) / len(tokens),
        "coverage": sum(map(sum, case.free())) / sum(lengths),
        "fall_backs": sum(all(v == 1 for v in w) for w in alive) / len(alive),
        "weight_position_correlation": correlation([(t[0], t[1]) for t in tokens]),
        "weight_doubt_correlation": correlation([(t[0], t[2]) for t in tokens]),
        "largest_weight": max(t[0] for t in tokens),
    }
    for name, value in want.items():
        assert credit.diagnostics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    without = rollouts.replace(
        signals={**rollouts.signals, "logprob": torch.full_like(logprobs, NAN)}
    )
    assert math.isfinite(assign(without, rule).diagnostics["weight_doubt_correlation"])


def test_misaligned_share_by_hand() -> None:
    # A d: + + - for the first, + - for the second (A < 0), the third has no advantage: 2 of 5.
    case = plain([[1.0, 2.0, -1.0], [-1.0, 1.0], [-5.0, 5.0]], [1.0, -1.0, 0.0])
    assert assign(case.rollouts(), DATC()).diagnostics["misaligned_share"] == pytest.approx(0.4)


DIRECTION = ("misaligned_share", "predicted_gain", "gain_below")
VARIANTS = [
    *(DATC(alignment=name) for name in ("work", "projection", "cosine", "natural")),
    *(method.rule() for method in methods().values() if method.rule.control_of == "datc"),
]


def reading_noise(rule: DATC) -> Rollouts:
    """Work, and in every other signal that the rule needs something of its own."""
    g = torch.Generator().manual_seed(3)
    b, t = 64, 12
    signals = {name: torch.randn(b, t, generator=g) for name in ("work", *sorted(rule.needs))}
    return Rollouts(
        torch.zeros(b), torch.arange(b), torch.ones(b, t), base=torch.randn(b, generator=g),
        signals=signals,
    )  # fmt: skip


@pytest.mark.parametrize("rule", VARIANTS, ids=str)
def test_the_direction_is_measured_against_the_work_whatever_the_weights_come_from(
    rule: DATC,
) -> None:
    rollouts = reading_noise(rule)
    credit = assign(rollouts, rule)
    assert credit.weight is not None
    pushed = credit.base.unsqueeze(1) * rollouts.signals["work"]
    gain = ((credit.weight - 1) * pushed).sum(1) / pushed.abs().sum(1)
    assert credit.diagnostics["predicted_gain"] == pytest.approx(float(gain.mean()), abs=1e-5)
    assert credit.diagnostics["misaligned_share"] == pytest.approx(
        float((pushed < 0).float().mean()), abs=1e-6
    )
    below = credit.diagnostics["gain_below"]
    assert below == pytest.approx(float((gain < -1e-5).float().mean()), abs=1e-6)
    if rule.name == "datc" and rule.alignment == "work":
        assert gain.min() > 0 and below == 0
    elif rule.name == "datc_flipped":
        assert gain.max() < 0 and below == 1
    else:  # noise
        assert abs(gain.mean()) < 0.2 and 0.2 < below < 0.8
    assert "work" in rule.reads


@pytest.mark.parametrize("rule", [r for r in VARIANTS if "work" not in r.needs], ids=str)
def test_without_work_nothing_is_said_of_the_direction(rule: DATC) -> None:
    rollouts = reading_noise(rule)
    rollouts = rollouts.replace(signals={name: rollouts.signals[name] for name in rule.needs})
    diagnostics = assign(rollouts, rule).diagnostics
    assert not set(DIRECTION) & set(diagnostics)
    assert "coverage" in diagnostics and "at_bounds" in diagnostics


# -- controls -------------------------------------------------------------------------------


def weight_of(rollouts: Rollouts, rule: Any, **options: Any) -> Tensor:
    weight = assign(rollouts, rule, **options).weight
    assert weight is not None
    return weight


@EXAMPLES
@given(case=cases(), rule=rules())
def test_flipped_is_datc_of_the_opposite_alignment(case: Case, rule: DATC) -> None:
    turned = replace(case, d=[[-v for v in row] for row in case.d])
    flipped = DATCFlipped(**rule.options())
    assert torch.equal(weight_of(case.rollouts(), flipped), weight_of(turned.rollouts(), rule))


def test_substitutes_read_their_own_signals() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = torch.rand(3, 6, generator=g), torch.rand(3, 6, generator=g)
    base = torch.tensor([1.0, -1.0, 0.5])

    def rollouts(**signals: Tensor) -> Rollouts:
        return Rollouts(torch.zeros(3), [0, 1, 2], torch.ones(3, 6), base=base, signals=signals)

    want = weight_of(rollouts(work=a), "datc", bound=3.0)
    assert torch.equal(weight_of(rollouts(work_random=a), "datc_random", bound=3.0), want)
    assert torch.equal(weight_of(rollouts(grad_x_input=a), "datc_grad_x_input", bound=3.0), want)
    product = rollouts(reward_norm=a, update_norm=b)
    assert torch.equal(
        weight_of(product, DATCNormProduct()), weight_of(rollouts(work=a * b), "datc")
    )
    a[0, 0] = NAN
    assert weight_of(product, "datc_norm_product")[0, 0] == 1


@EXAMPLES
@given(case=cases(), rule=rules(), data=st.data())
def test_shuffled_permutes_the_free_tokens_weights(
    case: Case, rule: DATC, data: st.DataObject
) -> None:
    shuffled = DATCShuffled(**rule.options(), seed=data.draw(st.integers(0, 5)))
    layout = data.draw(st.sampled_from(LAYOUTS))
    order = list(data.draw(st.permutations(range(len(case.base)))))
    how: dict[str, Any] = {"spare": data.draw(st.integers(0, 4)), "seed": 3, "order": order}
    one, two = assign(case.rollouts(), rule), assign(case.rollouts(), shuffled)
    for a, b, free in zip(case.weights(one), case.weights(two), case.free(), strict=True):
        assert sorted(a) == sorted(b)
        assert all(w == 1 for w, f in zip(b, free, strict=True) if not f)
    again = assign(case.rollouts(layout, garbage=(NAN, 1.0), **how), shuffled)
    close(case.weights(again, layout, **how), case.weights(two), 2e-6)


def test_shuffles_differ_between_seeds_and_responses_and_are_fair() -> None:
    g = torch.Generator().manual_seed(0)
    n, t = 4000, 4
    work = torch.randn(n, t, generator=g)
    rollouts = Rollouts(
        torch.zeros(n), torch.arange(n), torch.ones(n, t), base=torch.ones(n), work=work
    )
    true = weight_of(rollouts, "datc")
    one, two = (weight_of(rollouts, "datc_shuffled", seed=s) for s in (0, 1))
    for made in (one, two):
        assert torch.equal(made.sort(dim=1).values, true.sort(dim=1).values)
        # Each token's weight goes to each place a quarter of the time: 1000 +- 4 x 27.
        source = (made.unsqueeze(2) == true.unsqueeze(1)).float()
        assert ((source.sum(dim=0) - n / t).abs() < 4 * 27.4).all()
    # 24 orders: two seeds agree on about one response in 24.
    agree = (one == two).all(dim=1).float().mean()
    assert abs(float(agree) - 1 / 24) < 0.02
    assert torch.equal(one, weight_of(rollouts, "datc_shuffled", seed=0))


@pytest.mark.parametrize("weight_map", MAPS)
def test_the_smallest_tau_is_as_steep_as_the_bounds_allow(weight_map: str) -> None:
    """Every tau above 0 is in range, also one whose inverse no float holds."""
    rollouts = Rollouts(
        torch.tensor([1.0]), [0], torch.ones(1, 4), base=torch.ones(1),
        work=torch.tensor([[3.0, 1.0, 0.0, -2.0]]),
    )  # fmt: skip
    small = assign(rollouts, DATC(weight_map=weight_map, tau=1e-6)).weight
    for tau in (1e-39, 1e-300, 5e-324):
        assert torch.equal(assign(rollouts, DATC(weight_map=weight_map, tau=tau)).weight, small)
