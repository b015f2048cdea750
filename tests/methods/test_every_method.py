"""What every registered method promises, in one table: methods x layouts x types x devices."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from batches import DEVICES, LAYOUTS, Batch, close
from tokencredit import Credit, Rollouts, assign, methods
from tokencredit.methods.pools import Positions

METHODS = sorted(methods())
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
JUNK = (math.nan, math.inf, -math.inf, 1e4)


def sample(seed: int = 0, groups: int = 4, size: int = 4, longest: int = 6) -> Batch:
    """Mixed groups, interleaved, and one that is all right and one that is all wrong."""
    rng = random.Random(seed)
    b = groups * size
    group = [k % groups for k in range(b)]
    success = [rng.random() < 0.5 for _ in range(b)]
    for i, g in enumerate(group):
        if g == 0:
            success[i] = True
        if g == 1:
            success[i] = False
        if g == 2:
            success[i] = i < groups
    return Batch(
        rewards=[float(s) + 0.1 * rng.random() for s in success],
        group=group,
        success=success,
        entropy=[[rng.uniform(0.01, 4) for _ in range(rng.randint(1, longest))] for _ in range(b)],
        keep=[rng.random() > 0.2 for _ in range(b)],
    )


def rollouts_for(name: str, batch: Batch, layout: str = "right", **how: Any) -> Rollouts:
    """The batch with every signal that the method needs, each made from the entropy."""
    rollouts = batch.rollouts(layout, **how)
    entropy = rollouts.signals["entropy"]
    needs = methods()[name].rule().needs
    # Exact in every type, so that types differ by the rounding of the entropy alone.
    made = {n: entropy if n == "entropy" else -entropy * 2**k for k, n in enumerate(needs)}
    return rollouts.replace(signals=made)


def check_promises(credit: Credit, rollouts: Rollouts) -> None:
    """Shapes, types, zeros, finiteness: the same for every method."""
    a = credit.advantage
    assert a.shape == rollouts.mask.shape and a.dtype == torch.float32
    assert credit.base.shape == rollouts.rewards.shape and credit.base.dtype == torch.float32
    assert credit.in_loss.shape == rollouts.rewards.shape and credit.in_loss.dtype == torch.bool
    given = [a, credit.base, credit.in_loss]
    if credit.reward is not None:
        assert credit.reward.shape in (a.shape, credit.base.shape)
        assert credit.reward.dtype == torch.float32
        given.append(credit.reward)
    if credit.weight is not None:
        assert credit.weight.shape == a.shape and credit.weight.dtype == torch.float32
        given.append(credit.weight)
    for value in given:
        assert not value.requires_grad and value.device == rollouts.mask.device
        assert value.isfinite().all()
    assert not a[~rollouts.mask].any() and not a[~credit.in_loss].any()
    assert not (credit.in_loss & ~(rollouts.real & rollouts.keep)).any()
    assert not credit.base[~rollouts.real].any()
    measured = credit.diagnostics
    assert all(isinstance(v, float) and math.isfinite(v) for v in measured.values()), measured
    assert measured["responses"] == float(rollouts.real.sum())
    for share in ("groups_skipped", "sign_flips", "effective_share", "largest_share"):
        assert -1e-6 <= measured[share] <= 1 + 1e-6, (share, measured)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", METHODS)
def test_promises(name: str, layout: str, dtype: torch.dtype, device: str) -> None:
    batch = sample()
    if name == "grpo":
        batch.rewards[3] = math.nan
    rollouts = rollouts_for(
        name, batch, layout, dtype=dtype, garbage=JUNK, padding_rows=3, spare=2, device=device
    )
    credit = assign(rollouts, name)
    check_promises(credit, rollouts)
    # And the numbers are those of plain float32 on the CPU, to the rounding of the type.
    plain = assign(rollouts_for(name, batch), name)
    rel = {torch.bfloat16: 0.02, torch.float16: 0.002}.get(dtype, 2e-6)
    got = batch.tokens(credit.advantage[: len(batch.rewards)], layout, spare=2)
    want = batch.tokens(plain.advantage)
    if name == "datc_shuffled":  # the order is a hash of the values and so of their rounding
        got, want = ([sorted(row) for row in rows] for rows in (got, want))
    close(got, want, rel)


@pytest.mark.parametrize("padding", ["flagged", "empty"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", METHODS)
def test_layout_order_garbage_and_padding_rows_change_nothing(
    name: str, layout: str, padding: Any
) -> None:
    for seed in range(4):
        batch = sample(seed)
        plain = assign(rollouts_for(name, batch), name)
        n = len(batch.rewards)
        order = list(range(n + 5))
        random.Random(seed).shuffle(order)
        how: dict[str, Any] = {"spare": seed, "seed": seed, "order": order}
        rollouts = rollouts_for(
            name, batch, layout, garbage=JUNK, padding_rows=5, padding=padding, **how
        )
        credit = assign(rollouts, name)
        for field in ("advantage", "base", "reward", "weight", "in_loss"):
            want, got = getattr(plain, field), getattr(credit, field)
            assert (want is None) == (got is None)
            if want is not None:
                close(batch.tokens(got, layout, **how), batch.tokens(want), 1e-6)
        measured, again = plain.diagnostics, credit.diagnostics
        assert measured.keys() == again.keys()
        for key in measured:
            assert again[key] == pytest.approx(measured[key], rel=1e-5, abs=1e-6), key


@pytest.mark.parametrize("name", METHODS)
def test_inputs_are_not_modified(name: str) -> None:
    batch = sample()
    for layout in LAYOUTS:
        for dtype in DTYPES:
            mine = batch.rollouts(layout, dtype=dtype, garbage=JUNK)
            entropy = mine.signals["entropy"].clone().requires_grad_()
            given: dict[str, Tensor] = {
                "rewards": mine.rewards.clone(),
                "group": mine.group.clone(),
                "mask": mine.mask.clone(),
                "success": mine.success.clone(),
                "real": mine.real.clone(),
                "keep": mine.keep.clone(),
                "base": torch.randn(len(batch.rewards)),
                "token_ids": torch.arange(mine.mask.numel()).reshape(mine.mask.shape),
            }
            signals = dict.fromkeys(methods()[name].needs, entropy)
            before = {k: v.detach().clone() for k, v in given.items()}
            entropy_before = entropy.detach().clone()
            credit = assign(Rollouts(**given, signals=signals), name)
            assert credit.diagnostics
            # Nor may what is returned share memory with what was given.
            credit.advantage.fill_(7)
            credit.base.fill_(7)
            for value in (credit.reward, credit.weight):
                if value is not None:
                    value.fill_(7)
            for key, value in before.items():
                assert torch.equal(given[key], value), key
            torch.testing.assert_close(
                entropy.detach(), entropy_before, rtol=0, atol=0, equal_nan=True
            )
            assert entropy.grad is None


@pytest.mark.parametrize("name", METHODS)
def test_lists_integers_and_booleans_are_welcome(name: str) -> None:
    signal = [[1, 2, 3], [2, 1, 0], [1, 1, 0], [3, 0, 0]]
    mask = [[1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 0, 0]]
    needs = methods()[name].needs
    floats = Rollouts(
        torch.tensor([1.0, 0.0, 1.0, 0.0]),
        torch.tensor([0, 0, 1, 1]),
        torch.tensor(mask, dtype=torch.bool),
        success=torch.tensor([True, False, True, False]),
        signals={n: torch.tensor(signal, dtype=torch.float32) for n in needs},
    )
    plain = assign(floats, name)
    for rewards, group, masks, success in (
        ([1, 0, 1, 0], ["a", "a", ("b", 1), ("b", 1)], mask, [1, 0, 1, 0]),
        (torch.tensor([1, 0, 1, 0]), [7, 7, -3, -3], torch.tensor(mask), [True, False] * 2),
        (torch.tensor([True, False] * 2), torch.tensor([9, 9, 4, 4]), torch.tensor(mask).float(),
         torch.tensor([1, -1, 1, -1])),
    ):  # fmt: skip
        rollouts = Rollouts(
            rewards,  # type: ignore[arg-type]
            group,
            masks,
            success=success,
            signals={n: torch.tensor(signal) for n in needs},
        )
        assert torch.equal(assign(rollouts, name).advantage, plain.advantage)


@pytest.mark.parametrize(("b", "t"), [(0, 0), (0, 4), (3, 0), (3, 4)])
@pytest.mark.parametrize("name", METHODS)
def test_empty_batches(name: str, b: int, t: int) -> None:
    # b = 3, t = 4: rows without a single token.
    rollouts = Rollouts(
        torch.ones(b),
        list(range(b)),
        torch.zeros(b, t, dtype=torch.bool),
        signals={n: torch.full((b, t), math.nan) for n in methods()[name].needs},
    )
    credit = assign(rollouts, name)
    check_promises(credit, rollouts)
    assert credit.diagnostics["tokens"] == 0


@pytest.mark.parametrize("name", METHODS)
def test_nothing_scored(name: str) -> None:
    batch = sample()
    batch.rewards = [math.nan] * len(batch.rewards)
    rollouts = rollouts_for(name, batch)
    credit = assign(rollouts, name)
    check_promises(credit, rollouts)
    assert not credit.advantage.any() and not credit.in_loss.any()


@pytest.mark.parametrize("name", METHODS)
def test_all_alike(name: str) -> None:
    # One response, copied: nothing tells the copies apart.
    for right in (True, False):
        batch = Batch([float(right)] * 4, [0] * 4, [right] * 4, [[1.0, 2.0]] * 4)
        assert not assign(rollouts_for(name, batch), name).advantage.any()


@pytest.mark.parametrize("name", METHODS)
def test_groups_do_not_mix(name: str) -> None:
    # By default every statistic is the group's own: a group alone gets the same credit.
    batch = sample()
    whole = assign(rollouts_for(name, batch), name)
    for g in set(batch.group):
        rows = [i for i, h in enumerate(batch.group) if h == g]
        part = Batch(
            *([column[i] for i in rows] for column in (
                batch.rewards, batch.group, batch.success, batch.entropy, batch.keep
            ))
        )  # fmt: skip
        alone = assign(rollouts_for(name, part), name)
        want = [row for i, row in enumerate(batch.tokens(whole.advantage)) if i in rows]
        close(part.tokens(alone.advantage), want, 1e-6)


class Synchronisations(TorchDispatchMode):
    """Collects the operators that would make an accelerator wait for the host to look.

    Reading a value (``.item()``, ``bool(tensor)``), and everything whose output shape depends on
    the values: nonzero, unique, masked_select, indexing by a boolean mask.
    """

    WAITING = ("_local_scalar_dense", "is_nonzero", "nonzero", "unique", "masked_select", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.all = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = str(func.name()).removeprefix("aten::").split(".")[0].strip("_")
        self.all += 1
        by_mask = name in ("index", "index_put", "index_put_impl") and any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        waiting = {w.strip("_") for w in self.WAITING}
        if by_mask or name in waiting or name.startswith("unique"):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_detector_detects() -> None:
    for act in (
        lambda x: bool(x.any()),
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: x.masked_select(x > 0),
    ):
        with Synchronisations() as mode:
            act(torch.ones(3))
        assert mode.seen


@pytest.mark.parametrize("name", METHODS)
def test_assign_does_not_make_an_accelerator_wait(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On the CPU `Positions.of` looks whether the mask is a prefix; elsewhere it does not, and that
    # path is what is checked here, without an accelerator. Diagnostics read their values once, at
    # the end; up to there they do not wait either (`tolist` of a CPU tensor is not dispatched).
    monkeypatch.setattr(Positions, "of", staticmethod(Positions.general))
    batch = sample()
    batch.rewards[0] = math.nan
    mine = rollouts_for(name, batch, "interleaved")
    with Synchronisations() as mode:
        rollouts = Rollouts(
            mine.rewards, batch.group, mine.mask, keep=mine.keep, signals=mine.signals
        )
        credit = assign(rollouts, name)
        assert credit.diagnostics
    assert mode.all > 10
    assert mode.seen == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("name", METHODS)
def test_assign_does_not_synchronise_on_cuda(name: str) -> None:
    rollouts = rollouts_for(name, sample(), "interleaved", device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        assign(rollouts, name)
    finally:
        torch.cuda.set_sync_debug_mode("default")
