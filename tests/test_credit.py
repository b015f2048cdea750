"""Credit and assign: diagnostics worked by hand, `finish`, rules of one's own."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch

from tokencredit import (
    GTPO,
    Credit,
    InputError,
    Rollouts,
    Rule,
    assign,
    finish,
    grpo_advantage,
    methods,
    option,
    register,
)
from tokencredit.methods import registry

ROLLOUTS = Rollouts(
    rewards=torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0]),
    group=["p", "p", "q", "q", "r"],
    mask=torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 0], [0, 0, 0]]),
    keep=[True, True, True, False, True],
)


@dataclasses.dataclass(frozen=True)
class Given(Rule):
    """Returns what it was told to."""

    name = "given"
    made: Any = None

    def credit(self, rollouts: Rollouts) -> Credit:
        return self.made(rollouts, self)


def given(**fields: Any) -> Rule:
    return Given(made=lambda rollouts, rule: finish(rollouts, rule, **fields))


def test_diagnostics_by_hand() -> None:
    advantage = torch.tensor(
        [[3.0, 1.0, 0.0], [-1.0, 1.0, 9.0], [0.0, 9.0, 9.0], [5.0, 5.0, 9.0], [9.0, 9.0, 9.0]]
    )
    base = torch.tensor([1.0, -1.0, 1.0, 1.0, 9.0])
    credit = assign(ROLLOUTS, given(advantage=advantage, base=base))
    # Row 3 is truncated, row 4 has no token; the 9s lie outside the mask.
    assert credit.advantage.tolist() == [[3, 1, 0], [-1, 1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert credit.base.tolist() == [1, -1, 1, 1, 0]
    assert credit.in_loss.tolist() == [True, True, True, False, False]
    want = {
        "responses": 4,
        "groups": 2,  # r holds no real response
        "tokens": 6,  # 3 + 2 + 1
        "groups_skipped": 0.5,  # q: one response with advantage 0, one kept out
        "sign_flips": 1 / 6,  # the +1 of row 1
        # Row 0: (3 + 1)^2 / (9 + 1) = 1.6 of 3 tokens; row 1: (1 + 1)^2 / 2 = 2 of 2.
        "effective_tokens": (1.6 + 2) / 2,
        "effective_share": (1.6 / 3 + 1) / 2,
        "largest_share": 0.75,  # 3 of 4
    }
    assert credit.diagnostics == pytest.approx(want, rel=1e-6)
    assert credit.diagnostics is credit.diagnostics  # computed once


def test_finish_masks_weights_and_rewards() -> None:
    weight = torch.full((5, 3), float("nan"))
    weight[ROLLOUTS.mask] = 2.0
    reward = torch.full((5, 3), float("inf"))
    reward[ROLLOUTS.mask] = 3.0
    credit = assign(
        ROLLOUTS,
        given(
            advantage=torch.full((5,), 0.5, dtype=torch.float64, requires_grad=True),
            base=torch.full((5,), 0.25),
            weight=weight,
            reward=reward,
            dropped=torch.tensor([False, True, False, False, False]),
            measures=lambda: {"mine": torch.tensor(4)},
        ),
    )
    assert credit.in_loss.tolist() == [True, False, True, False, False]
    assert credit.advantage.dtype == torch.float32 and not credit.advantage.requires_grad
    in_loss = ROLLOUTS.mask & credit.in_loss.unsqueeze(1)
    assert torch.equal(credit.advantage, 0.5 * in_loss)
    assert credit.weight is not None and credit.reward is not None
    assert torch.equal(credit.weight, 1.0 + in_loss.float())  # 1 where frozen
    assert torch.equal(credit.reward, 3.0 * ROLLOUTS.live)  # shaped rewards of truncated ones stay
    assert credit.diagnostics["mine"] == 4.0


def test_credit_is_frozen_and_knows_its_rule() -> None:
    credit = assign(ROLLOUTS, "grpo", correction=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        credit.base = credit.base  # type: ignore[misc]
    assert credit.rule is not None and credit.rule.name == "grpo"
    assert credit.rule.options() == {"scale": "group", "correction": 0, "eps": 0.0}


def test_a_credit_made_by_hand_has_no_diagnostics() -> None:
    credit = Credit(torch.zeros(1, 1), torch.zeros(1), torch.ones(1, dtype=torch.bool))
    with pytest.raises(InputError, match=r"Credit: .*finish"):
        _ = credit.diagnostics


def test_a_rule_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_METHODS", dict(methods()))

    @register
    @dataclasses.dataclass(frozen=True)
    class Tenth(Rule):
        name = "tenth"
        title = "A tenth of GRPO"
        needs = ("surprise",)
        part: float = option(0.1, "which part", low=0, high=1)

        def credit(self, rollouts: Rollouts) -> Credit:
            base = grpo_advantage(rollouts, correction=0)
            return finish(rollouts, self, advantage=base * self.part, base=base)

    with pytest.raises(InputError, match="tenth: the rollouts have no signal 'surprise'"):
        assign(ROLLOUTS, "tenth")
    ready = ROLLOUTS.replace(signals={"surprise": torch.zeros(5, 3)})
    assert assign(ready, "tenth", part=0.5).advantage[0, 0] == 0.5
    assert methods()["tenth"].options[0].range == ">= 0, <= 1"
    register(Tenth)  # again: welcome

    @dataclasses.dataclass(frozen=True)
    class Other(Tenth):
        pass

    with pytest.raises(InputError, match="Other needs a name of its own, got 'tenth'"):
        register(Other)
    imposter = dataclasses.dataclass(frozen=True)(
        type("GTPO", (Tenth,), {"name": "gtpo", "__qualname__": "GTPO"})
    )
    with pytest.raises(InputError, match="GTPO needs a name of its own, got 'gtpo'"):
        register(imposter)
    assert methods()["gtpo"].rule is GTPO


def test_a_rule_without_a_name_is_refused() -> None:
    with pytest.raises(InputError, match="Given2 needs a name of its own, got ''"):
        register(dataclasses.dataclass(frozen=True)(type("Given2", (Given,), {"name": ""})))


def test_a_rule_that_returns_the_wrong_shape_is_named() -> None:
    def wrong(rollouts: Rollouts, rule: Rule) -> Credit:
        return Credit(torch.zeros(5, 2), torch.zeros(5), rollouts.real)

    with pytest.raises(InputError, match=r"given: .*\[5, 2\] for a mask of \[5, 3\]"):
        assign(ROLLOUTS, Given(made=wrong))


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("again", [pickled, copy.deepcopy, copy.copy])
@pytest.mark.parametrize("name", ["grpo", "gtpo", "grpo_s", "datc"])
def test_rollouts_and_credit_survive_pickling_and_copying(name: str, again: Any) -> None:
    """They cross process borders, and people keep them: with the same numbers, read or not."""
    numbers = torch.rand(ROLLOUTS.mask.shape)
    rollouts = ROLLOUTS.replace(entropy=numbers, work=numbers)
    other = again(rollouts)
    for value in ("rewards", "group", "mask", "success", "real", "keep"):
        assert torch.equal(getattr(other, value), getattr(rollouts, value)), value
    assert torch.equal(other.signals["entropy"], numbers)
    with pytest.raises(TypeError):
        other.signals["entropy"] = numbers  # still read-only
    credit = assign(rollouts, name)
    for made in (again(credit), again(assign(other, name)), again(again(credit))):
        assert torch.equal(made.advantage, credit.advantage)
        assert torch.equal(made.base, credit.base) and made.rule == credit.rule
        assert made.diagnostics == credit.diagnostics


def test_rules_that_are_written_wrongly_are_told_how() -> None:
    class Undecorated(Rule):
        name = "undecorated"
        factor: float = option(1.0, "a factor")

        def credit(self, rollouts: Rollouts) -> Credit:
            raise AssertionError

    @dataclasses.dataclass(frozen=True)
    class Named(Rule):
        name = "named"
        needs = "entropy"  # pyright: ignore[reportAssignmentType]

        def credit(self, rollouts: Rollouts) -> Credit:
            raise AssertionError

    @dataclasses.dataclass(frozen=True)
    class Reading(Rule):
        name = "reading"
        reads = "entropy"  # pyright: ignore[reportAssignmentType]

        def credit(self, rollouts: Rollouts) -> Credit:
            raise AssertionError

    wrong = (
        (Undecorated, "@dataclass"),
        (Named, "needs must be a tuple of names"),
        (Reading, "reads must be a tuple of names"),
    )
    for rule, words in wrong:
        for make in (rule, lambda rule=rule: register(rule)):
            with pytest.raises(InputError, match=words):
                make()
    assert not {"undecorated", "named", "reading"} & set(methods())

    @dataclasses.dataclass(frozen=True)
    class Wrong(Rule):
        name = "wrong"

        def credit(self, rollouts: Rollouts) -> Any:
            return None

    with pytest.raises(InputError, match="wrong: the rule returned NoneType"):
        assign(ROLLOUTS, Wrong())


@pytest.mark.parametrize(
    ("part", "shape"),
    [("advantage", [3]), ("base", [5, 3]), ("reward", [3]), ("weight", [5]), ("dropped", [1])],
)
def test_finish_refuses_shapes_that_do_not_fit(part: str, shape: list[int]) -> None:
    parts: dict[str, Any] = {"advantage": torch.ones(5, 3), "base": torch.ones(5)}
    value = torch.ones(shape, dtype=torch.bool if part == "dropped" else None)
    message = rf"{part} must have shape .* got \[{', '.join(map(str, shape))}\]"
    with pytest.raises(InputError, match=message):
        finish(ROLLOUTS, methods()["grpo"].rule(), **parts | {part: value})
