"""Rollouts: defaults, coercions, and the message of every refusal."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from tokencredit import InputError, Rollouts, TokenCreditError

MASK = [[1, 1, 0], [1, 0, 0]]


def make(**changes: Any) -> Rollouts:
    given: dict[str, Any] = {"rewards": [1.0, 0.0], "group": ["p", "p"], "mask": MASK}
    return Rollouts(**(given | changes))


def test_defaults() -> None:
    rollouts = Rollouts([0.5, 0.51, math.nan, 3.0], [0] * 4, [[1], [1], [1], [0]])
    # Success strictly above 0.5; the unscored response and the one without tokens are not real.
    assert rollouts.success.tolist() == [False, True, False, True]
    assert rollouts.real.tolist() == [True, True, False, False]
    assert rollouts.keep.tolist() == [True] * 4
    assert rollouts.base is None and rollouts.token_ids is None and dict(rollouts.signals) == {}
    assert rollouts.responses == 4 and rollouts.groups == 1
    assert rollouts.device == torch.device("cpu")


@pytest.mark.parametrize("nothing", [math.nan, math.inf, -math.inf])
def test_an_unscored_response_is_never_real(nothing: float) -> None:
    assert make(rewards=[nothing, 0.0], real=[True, True]).real.tolist() == [False, True]


@pytest.mark.parametrize(
    "success",
    [
        [True, False],
        [1, 0],
        [1, -1],  # DAPO's rewards: -1 is no success
        [1.0, 0.2],
        torch.tensor([1.0, -1.0]),
        torch.tensor([1, -1]),
        torch.tensor([1.0, math.nan]),
    ],
)
def test_success_as_numbers_is_above_one_half(success: Any) -> None:
    assert make(success=success).success.tolist() == [True, False]


@pytest.mark.parametrize(
    ("group", "dense"),
    [
        (["b", "a", "b"], [0, 1, 0]),
        ([("x", 1), 5, ("x", 1)], [0, 1, 0]),
        (torch.tensor([7, -3, 7]), [1, 0, 1]),
        (torch.tensor([True, False, True]), [1, 0, 1]),
        ((k for k in "aba"), [0, 1, 0]),
        (torch.tensor([7, -3, 7], dtype=torch.int16), [1, 0, 1]),
    ],
)
def test_groups_are_numbered(group: Any, dense: list[int]) -> None:
    rollouts = Rollouts([0.0] * 3, group, [[1]] * 3)
    assert rollouts.group.tolist() == dense
    assert rollouts.group.dtype == torch.long and rollouts.groups == 2


def test_numpy_groups() -> None:
    numpy = pytest.importorskip("numpy")
    rollouts = Rollouts([0.0] * 3, numpy.array([4, 2, 4]), [[1]] * 3)
    assert rollouts.group.tolist() == [0, 1, 0]


def test_types() -> None:
    rollouts = make(
        rewards=torch.tensor([1, 0]),
        entropy=torch.ones(2, 3, dtype=torch.bfloat16),
        work=[[1, 2, 3], [4, 5, 6]],
        token_ids=[[1, 2, 3], [4, 5, 6]],
        base=torch.tensor([0.5, -0.5], dtype=torch.float64),
        signals={"logprob": torch.zeros(2, 3)},
    )
    assert rollouts.rewards.dtype == torch.float32
    assert rollouts.mask.dtype == torch.bool
    assert rollouts.signals["entropy"].dtype == torch.bfloat16
    assert rollouts.signals["work"].dtype == torch.float32
    assert set(rollouts.signals) == {"entropy", "work", "logprob"}
    assert rollouts.base is not None and rollouts.base.dtype == torch.float64
    assert make(rewards=torch.ones(2, dtype=torch.float16)).rewards.dtype == torch.float32
    assert make(rewards=torch.ones(2, dtype=torch.float64)).rewards.dtype == torch.float64


def test_frozen_and_detached() -> None:
    entropy = torch.ones(2, 3, requires_grad=True)
    rollouts = make(entropy=entropy, rewards=torch.ones(2, requires_grad=True))
    assert not rollouts.signals["entropy"].requires_grad and not rollouts.rewards.requires_grad
    with pytest.raises(dataclasses.FrozenInstanceError):
        rollouts.mask = rollouts.mask  # type: ignore[misc]
    with pytest.raises(TypeError):
        rollouts.signals["entropy"] = entropy  # type: ignore[index]


def test_live() -> None:
    rollouts = make(real=[True, False])
    want = torch.tensor([[True, True, False], [False, False, False]])
    assert torch.equal(rollouts.live, want)
    assert torch.equal(rollouts.live_as(), want.float())
    rollouts.live_as().zero_()  # a new tensor
    assert torch.equal(rollouts.live, want)


def test_replace() -> None:
    entropy = torch.ones(2, 3)
    one = make(entropy=entropy, signals={"logprob": -entropy}, keep=[True, False])
    two = one.replace(rewards=[0.0, 1.0])
    assert two.rewards.tolist() == [0.0, 1.0]
    assert two.success.tolist() == [True, False]  # not derived again
    assert two.keep.tolist() == [True, False] and set(two.signals) == {"entropy", "logprob"}
    three = one.replace(entropy=2 * entropy)
    assert three.signals["entropy"][0, 0] == 2 and three.signals["logprob"][0, 0] == -1
    assert set(one.replace(signals={}).signals) == set()
    assert one.signals["entropy"][0, 0] == 1
    with pytest.raises(TypeError, match="sucess"):
        one.replace(sucess=[True, True])


def test_to() -> None:
    one = make(entropy=torch.ones(2, 3), base=[1.0, 2.0], token_ids=torch.ones(2, 3).int())
    two = one.to("cpu")
    for field in dataclasses.fields(Rollouts):
        a, b = getattr(one, field.name), getattr(two, field.name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else True


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mask": [1, 0]}, ["mask", "[b, t]", "[2]"]),
        ({"mask": torch.ones(2, 3, 1)}, ["mask", "[b, t]", "[2, 3, 1]"]),
        ({"mask": [[1, 1], [1]]}, ["mask", "cannot be made a tensor"]),
        ({"rewards": [1.0, 0.0, 0.0]}, ["rewards", "[b] = [2]", "[3]"]),
        ({"rewards": torch.ones(2, 1)}, ["rewards", "[b] = [2]", "[2, 1]"]),
        ({"rewards": ["good", "bad"]}, ["rewards", "cannot be made a tensor"]),
        ({"rewards": torch.ones(2, dtype=torch.complex64)}, ["rewards", "real", "complex64"]),
        ({"group": ["p"]}, ["group", "2 responses", "got 1"]),
        ({"group": torch.tensor([0, 0, 0])}, ["group", "[b] = [2]", "[3]"]),
        ({"group": torch.tensor([0.0, 0.0])}, ["group", "integers", "float32"]),
        ({"group": [["a"], ["b"]]}, ["group", "hashable"]),
        ({"group": [torch.tensor(0), torch.tensor(0)]}, ["group", "one tensor", "got tensors"]),
        ({"group": 3}, ["group", "tensor or a sequence"]),
        ({"success": [True]}, ["success", "[b] = [2]", "[1]"]),
        ({"success": torch.ones(2, 3)}, ["success", "[b] = [2]", "[2, 3]"]),
        ({"real": [True] * 3}, ["real", "[b] = [2]", "[3]"]),
        ({"keep": [True] * 3}, ["keep", "[b] = [2]", "[3]"]),
        ({"base": [0.0]}, ["base", "[b] = [2]", "[1]"]),
        ({"entropy": torch.ones(2, 4)}, ["signals['entropy']", "[b, t] = [2, 3]", "[2, 4]"]),
        ({"entropy": torch.ones(2)}, ["signals['entropy']", "[b, t] = [2, 3]", "[2]"]),
        ({"work": torch.ones(3, 2)}, ["signals['work']", "[b, t] = [2, 3]", "[3, 2]"]),
        ({"signals": {"logprob": torch.ones(2, 2)}}, ["signals['logprob']", "[2, 3]", "[2, 2]"]),
        ({"signals": {"entropy": None}}, ["signals['entropy']", "cannot be made a tensor"]),
        (
            {"entropy": torch.ones(2, 3), "signals": {"entropy": torch.ones(2, 3)}},
            ["entropy", "given twice"],
        ),
        ({"entropy": torch.ones(2, 3, dtype=torch.complex64)}, ["real number", "complex64"]),
        ({"token_ids": torch.ones(2, 3)}, ["token_ids", "integer", "float32"]),
        ({"token_ids": torch.ones(2, 2).int()}, ["token_ids", "[2, 3]", "[2, 2]"]),
        ({"rewards": torch.ones(2, device="meta")}, ["rewards", "meta", "mask on cpu"]),
        ({"entropy": torch.ones(2, 3, device="meta")}, ["signals['entropy']", "meta", "cpu"]),
    ],
    ids=lambda x: str(x)[:40] if isinstance(x, dict) else "",
)
def test_bad_calls_name_argument_and_shapes(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        make(**changes)
    message = str(caught.value)
    assert message.startswith("Rollouts: ")
    for word in words:
        assert word in message, message
    assert isinstance(caught.value, (ValueError, TokenCreditError))
