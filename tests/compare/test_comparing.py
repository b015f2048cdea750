"""The numbers of a comparison, against numbers by hand."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from tokencredit import DATC, GRPO, GTPO, InputError, MissingSignalError, Rollouts, Rule, methods
from tokencredit.compare import average_ranks, compare, default_rules, moved_share, spearman
from tokencredit.compare.statistics import rounded
from tokencredit.credit import Credit, finish
from tokencredit.methods import grpo_advantage, option


@dataclass(frozen=True)
class Given(Rule):
    """Advantages straight from a signal."""

    name: ClassVar[str] = "given"
    signal: str = option("a", "which")

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.signal,)

    def credit(self, rollouts: Rollouts) -> Credit:
        return finish(
            rollouts,
            self,
            advantage=rollouts.signals[self.signal],
            base=grpo_advantage(rollouts),
        )


def two(**signals: list[list[float]]) -> Rollouts:
    """One right and one wrong response of two tokens."""
    named = {name: torch.tensor(rows) for name, rows in signals.items()}
    return Rollouts(torch.tensor([1.0, 0.0]), ["p", "p"], torch.ones(2, 2), signals=named)


A, B = [[1.0, 2.0], [-1.0, -2.0]], [[2.0, 1.0], [-1.0, 2.0]]


# -- ranks ----------------------------------------------------------------------------------


def test_ranks_with_ties_and_holes() -> None:
    values = torch.tensor([[3.0, 1.0, 3.0, 2.0], [5.0, 5.0, 5.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]]).bool()
    # Row 1: 1 < 2 < 3 = 3, whose ranks 3 and 4 average to 3.5. Row 2: 5 = 5 < 9 without the hole.
    assert average_ranks(values, mask).tolist() == [[3.5, 1, 3.5, 2], [1.5, 0, 1.5, 3]]
    assert average_ranks(torch.zeros(2, 0)).shape == (2, 0)


def test_spearman_with_ties_by_hand() -> None:
    # Ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4; centred products 2.25 + 0 + 0 + 2.25, squares 4.5 and 5.
    a, b = torch.tensor([1.0, 2.0, 2.0, 3.0]), torch.tensor([10.0, 30.0, 20.0, 40.0])
    assert spearman(a, b) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    # Ranks 1.5 1.5 3.5 3.5 and 1 2 3 4: products .25 . 2 + ... = (1)(1.5) + (1)(.5) twice.
    a, b = torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert spearman(a, b) == pytest.approx(4 / math.sqrt(4 * 5))
    assert spearman(b, b) == 1 and spearman(b, -b) == -1
    assert math.isnan(spearman(torch.ones(3), torch.arange(3.0)))
    with pytest.raises(ValueError, match="one length"):
        spearman(torch.ones(2), torch.ones(3))


def test_rounding_makes_no_ranking() -> None:
    x = torch.tensor([0.7071067, 0.7071068, -0.7071067, -0.7071068, 0.0, -0.0, 1e-30, math.inf])
    near = rounded(x)
    assert near[0] == near[1] == -near[2] == -near[3]
    torch.testing.assert_close(near, x, rtol=1e-5, atol=0)
    assert not near[4:6].signbit().any()


def test_moved_share_by_hand() -> None:
    a, b = torch.tensor(A), torch.tensor(B)
    # |A| 1 2 1 2 and |B| 2 1 1 2, each over 6: half of 1/6 + 1/6.
    assert moved_share(a, b) == pytest.approx(1 / 6)
    # With signs 1 2 -1 -2 and 2 1 -1 2: half of (1 + 1 + 0 + 4) / 6.
    assert moved_share(a, b, signed=True) == pytest.approx(1 / 2)
    assert moved_share(a, -a) == 0 and moved_share(a, -a, signed=True) == pytest.approx(1)
    assert moved_share(a, 3 * a) == pytest.approx(0)
    assert math.isnan(moved_share(a, torch.zeros(2, 2)))


# -- a comparison ---------------------------------------------------------------------------


def test_a_pair_by_hand() -> None:
    result = compare(two(a=A, b=B), {"one": Given("a"), "other": Given("b")}, bins=2)
    assert result.names == ("one", "other")
    assert (result.responses, result.groups, result.tokens) == (2, 1, 4)
    pair = result.pair("one", "other")
    # Ranks 3 4 2 1 and 3.5 2 1 3.5; centred .5 1.5 -.5 -1.5 and 1 -.5 -1.5 1: product -1.
    assert pair.correlation == pytest.approx(-1 / math.sqrt(5 * 4.5), abs=1e-6)
    assert pair.within == -1  # along each response the order turns
    assert pair.moved == pytest.approx(1 / 6) and pair.moved_signed == pytest.approx(1 / 2)
    assert pair.flips == 1 / 4
    assert result.pair("other", "one") == pair
    # Against GRPO, +-0.7071: ranks 3.5 3.5 1.5 1.5 with 3 4 2 1: product 1 . 2 + 1 . 2.
    mine = result.method("one").to_reference
    assert mine.correlation == pytest.approx(4 / math.sqrt(4 * 5), abs=1e-6)
    assert math.isnan(mine.within)
    # |A| over 6 against 1/4 each: half of 4 times 1/12.
    assert mine.moved == mine.moved_signed == pytest.approx(1 / 6)
    one = result.method("one")
    assert one.diagnostics["effective_tokens"] == pytest.approx(9 / 5)
    assert one.position.density == pytest.approx((2 / 3, 4 / 3))
    assert one.position.share == pytest.approx((1 / 3, 2 / 3))
    assert result.position_tokens == (0.5, 0.5) and one.entropy is None
    assert result.method("other").diagnostics["sign_flips"] == 1 / 4


def test_a_method_with_itself() -> None:
    rollouts = Rollouts(
        torch.tensor([1.0, 1.0, 0.0]),
        ["p"] * 3,
        torch.ones(3, 2),
        entropy=torch.tensor([[1.0, 3.0], [2.0, 1.0], [1.0, 1.0]]),
    )
    result = compare(rollouts, {"x": GTPO(), "y": GTPO()})
    for first, second in (("x", "y"), ("x", "x")):
        pair = result.pair(first, second)
        got = (pair.correlation, pair.within, pair.moved, pair.moved_signed, pair.flips)
        assert got == (1, 1, 0, 0, 0)
    itself = compare(rollouts, [GRPO()]).method("grpo").to_reference
    assert (itself.correlation, itself.moved, itself.flips) == (1, 0, 0)


def test_the_flipped_control() -> None:
    # Work symmetric about 0: the weights of the two are each other's mirror image.
    rollouts = Rollouts(
        torch.tensor([1.0, 0.0]),
        ["p", "p"],
        torch.ones(2, 3),
        work=torch.tensor([[0.3, 0.0, -0.3], [-0.1, 0.2, 0.0]]),
    )
    pair = compare(rollouts, ["datc", "datc_flipped"]).pair("datc", "datc_flipped")
    assert pair.within == -1 and pair.flips == 0 and 0 < pair.moved < 1
    # Over the batch the sign of the base comes first, which both keep.
    assert pair.correlation > 0


def test_position_counts_tokens_of_the_mask() -> None:
    mask = torch.tensor([[0, 1, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1]]).bool()
    a = torch.tensor([[9.0, 1.0, 9.0, 2.0, 3.0, 9.0], [1.0, 1, 2, 2, 3, 3]])
    rollouts = Rollouts(torch.tensor([1.0, 0.0]), [0, 0], mask, signals={"a": a})
    profile = compare(rollouts, [Given()], bins=3).method("given").position
    # Thirds hold 1 + 1 + 1, 2 + 2 + 2 and 3 + 3 + 3.
    assert profile.share == pytest.approx((3 / 18, 6 / 18, 9 / 18))
    assert profile.density == pytest.approx((0.5, 1.0, 1.5))
    # Two tokens lie at a quarter and at three quarters: most deciles hold none.
    deciles = compare(two(a=A), [Given()]).method("given").position.density
    assert [k for k, v in enumerate(deciles) if not math.isnan(v)] == [2, 7]


def test_profile_over_entropy_leaves_unknown_out() -> None:
    rollouts = two(a=A, entropy=[[4.0, 1.0], [math.nan, 3.0]])
    result = compare(rollouts, [Given()], bins=3)
    # Entropies 1 < 3 < 4 have |A| 2, 2, 1.
    assert result.entropy_means == (1, 3, 4) and result.entropy_known == 3 / 4
    profile = result.method("given").entropy
    assert profile is not None and profile.share == pytest.approx((0.4, 0.4, 0.2))
    # Equal entropies share one bin.
    assert compare(two(a=A, entropy=[[1.0] * 2] * 2), [Given()], bins=2).entropy_tokens == (0, 1)


def test_only_tokens_in_the_loss_count() -> None:
    many = Rollouts(
        torch.tensor([1.0, 0.0, 1.0, math.nan]),
        ["p"] * 4,
        torch.ones(4, 2),
        keep=[True, True, False, True],
        signals={"a": torch.tensor([*A, [90.0, 80.0], [70.0, 60.0]])},
    )
    few, result = compare(two(a=A), [Given()]), compare(many, [Given()])
    assert result.tokens == 4 and result.responses == 3
    assert repr(result.method("given").position) == repr(few.method("given").position)


def test_a_dropped_group_stays_among_the_tokens() -> None:
    rollouts = Rollouts(torch.tensor([1.0, 0.0, 1.0, 0.9]), list("ppqq"), torch.ones(4, 1))
    result = compare(rollouts, ["grpo", "dapo"])
    assert result.tokens == 4 and result.pair("grpo", "dapo").moved == pytest.approx(0.5)


# -- what is missing, and what is wrong -----------------------------------------------------


def test_missing_signals_are_listed() -> None:
    result = compare(two(entropy=[[math.nan] * 2] * 2), ["grpo", "gtpo", "datc", "datc_random"])
    assert result.names == ("grpo",)
    assert [(m.name, m.signals) for m in result.missing] == [
        ("gtpo", ("entropy",)),
        ("datc", ("work",)),
        ("datc_random", ("work_random",)),
    ]
    assert "reward model" in result.missing[1].how


def test_a_rule_that_looks_for_more_than_it_declares() -> None:
    class Sly(Given):
        needs: ClassVar[tuple[str, ...]] = ()  # type: ignore[assignment]

        def credit(self, rollouts: Rollouts) -> Credit:
            raise MissingSignalError("sly: no signal 'moon'")

    result = compare(two(), {"sly": Sly(), "grpo": "grpo"})
    assert result.missing[0].signals == () and "moon" in result.missing[0].how


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (["gtpo", "datc"], "no method is left: gtpo needs entropy; datc needs work"),
        ([], "no method is left: none was named"),
        (["grpo", GRPO(eps=1.0)], "grpo is given twice"),
        (["gtop"], "did you mean 'gtpo'"),
    ],
)
def test_refusals(rules: list[Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        compare(two(), rules)


def test_no_token_and_no_bin_are_refused() -> None:
    with pytest.raises(InputError, match="no token is in the loss"):
        compare(two().replace(keep=[False, False]), ["grpo"])
    with pytest.raises(InputError, match="bins"):
        compare(two(), ["grpo"], bins=0)
    with pytest.raises(InputError, match="did you mean 'grpo'"):
        compare(two(), ["grpo"]).method("grpoo")


def test_the_default_is_all_that_are_no_controls() -> None:
    names = {name for name, m in methods().items() if not m.rule.control_of}
    assert set(default_rules()) == names
    result = compare(two(entropy=[[1.0, 2.0]] * 2, work=[[1.0, 2.0]] * 2))
    assert {*result.names, *(m.name for m in result.missing)} == names
    assert {"grpo", "gtpo", "grpo_s", "datc"} <= set(result.names)


def test_inputs_stay_and_numbers_are_json() -> None:
    rollouts = two(entropy=[[1.0, 2.0], [math.nan, 1.0]], work=[[1.0, 2.0]] * 2)
    before = {name: value.clone() for name, value in rollouts.signals.items()}
    result = compare(rollouts, {"d": DATC(), "g": GTPO()})
    for name, value in before.items():
        torch.testing.assert_close(rollouts.signals[name], value, equal_nan=True, rtol=0, atol=0)
    text = json.dumps(result.to_dict(), allow_nan=False)
    assert json.loads(text)["pairs"][0][1]["moved"] == result.pairs[0][1].moved


def test_padding_and_order_change_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    b, t = 12, 5
    mask = torch.rand(b, t, generator=generator) < 0.8
    rewards = (torch.rand(b, generator=generator) < 0.5).float()
    signals = {n: torch.rand(b, t, generator=generator) for n in ("entropy", "work")}
    plain = Rollouts(rewards, [i // 4 for i in range(b)], mask, signals=signals)
    order = torch.randperm(b, generator=generator)
    wide = torch.full((b, t + 3), math.nan)

    def moved(value: torch.Tensor) -> torch.Tensor:
        out = wide.clone()
        out[:, 2 : t + 2] = value[order].float()
        return out

    other = Rollouts(
        rewards[order],
        [int(i) // 4 for i in order],
        moved(mask).nan_to_num(0.0),
        signals={n: moved(v) for n, v in signals.items()},
    )
    first, second = compare(plain).to_dict(), compare(other).to_dict()

    def check(a: Any, b: Any) -> None:
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            for key in a:
                if key not in ("worst", "options"):
                    check(a[key], b[key])
        elif isinstance(a, list):
            assert len(a) == len(b)
            for x, y in zip(a, b, strict=True):
                check(x, y)
        else:
            assert a == (pytest.approx(b, rel=1e-5, abs=1e-5) if isinstance(a, float) else b)

    check(first, second)
