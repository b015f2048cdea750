"""`token_statistics`: against its float64 reference, autograd, hand numbers and hard inputs."""

from __future__ import annotations

import math
import resource
import subprocess
import sys

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tokencredit import InputError
from tokencredit.signals import TokenStatistics, token_statistics
from tokencredit.signals.statistics import DIFFERENTIABLE, OF_REWARD, STATISTICS

torch.set_num_threads(1)


def problem(n, v, d=6, e=3, seed=0, scale=1.0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return {
        "hidden": (torch.randn(n, d, generator=g) * scale).to(dtype),
        "head": torch.randn(v, d, generator=g).to(dtype),
        "targets": torch.randint(0, v, (n,), generator=g),
        "reward": (
            torch.randn(n, e, generator=g).to(dtype),
            torch.randn(v, e, generator=g).to(dtype),
        ),
    }


def truth(p, i, options) -> dict[str, float]:
    """The definitions with 400 digits, for one token: no float64 formula is exact everywhere."""
    mpmath.mp.dps = 400
    m = mpmath.mpf
    h, rows = [m(float(x)) for x in p["hidden"][i]], p["head"].double().tolist()
    bias = options["bias"].tolist() if options.get("bias") is not None else [0.0] * len(rows)
    z = [mpmath.fdot(h, [m(w) for w in row]) + m(b) for row, b in zip(rows, bias, strict=True)]
    z = [x * m(options.get("logit_scale", 1.0)) for x in z]
    if (cap := options.get("softcap")) is not None:
        z = [m(cap) * mpmath.tanh(x / m(cap)) for x in z]
    z = [x / m(options.get("temperature", 1.0)) for x in z]
    e = [mpmath.exp(x) for x in z]
    total = mpmath.fsum(e)
    prob = [x / total for x in e]
    g = [m(float(x)) for x in p["reward"][0][i]]
    u = [mpmath.fdot(g, [m(w) for w in row]) for row in p["reward"][1].double().tolist()]
    mean = mpmath.fdot(prob, u)
    y = int(p["targets"][i])
    force = [a * (b - mean) for a, b in zip(prob, u, strict=True)]
    k = [(1 if v == y else 0) - a for v, a in enumerate(prob)]
    norm_g = mpmath.sqrt(mpmath.fsum(x * x for x in force))
    norm_k = mpmath.sqrt(mpmath.fsum(x * x for x in k))
    work = mpmath.fdot(force, k)
    return {
        "logprob": mpmath.log(prob[y]),
        "entropy": -mpmath.fsum(a * mpmath.log(a) for a in prob),
        "logsumexp": mpmath.log(total),
        "sum_p2": mpmath.fsum(a * a for a in prob),
        "update_norm": norm_k,
        "work": work,
        "projection": work / norm_k,
        "cosine": work / (norm_g * norm_k),
        "natural": u[y] - mean,
        "reward_norm": norm_g,
    }


def worst(got: TokenStatistics, expected: TokenStatistics) -> dict[str, float]:
    errors = {}
    for name in STATISTICS:
        a, b = getattr(got, name), getattr(expected, name)
        if a is not None:
            assert torch.isfinite(a).all(), name
            errors[name] = float(((a.double() - b.double()).abs() / (1 + b.abs())).max())
    return errors


def close(got, expected, tolerance):
    for name, error in worst(got, expected).items():
        assert error <= tolerance, (name, error)


OPTIONS = [
    {},
    {"temperature": 0.1},
    {"temperature": 0.7},
    {"softcap": 5.0},
    {"logit_scale": 0.25},
    {"bias": True},
    {"softcap": 3.0, "logit_scale": 2.0, "bias": True, "temperature": 1.5},
]


@pytest.mark.parametrize("v", [2, 37])
@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_the_definitions_with_400_digits(v, scale, options):
    p = problem(6, v, scale=scale, seed=v, dtype=torch.float64)
    options = dict(options)
    if options.pop("bias", False):
        options["bias"] = torch.randn(v, generator=torch.Generator().manual_seed(1)).double()
    got = token_statistics(**p, want=STATISTICS, **options, chunk=16)
    for i in range(6):
        for name, value in truth(p, i, options).items():
            # Logits of some hundreds are themselves known to 1e-13 only.
            assert float(getattr(got, name)[i]) == pytest.approx(float(value), rel=1e-11), name


@pytest.mark.parametrize("v", [37, 4096, 4097])
@pytest.mark.parametrize("scale", [0.1, 1.0])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_the_reference(v, scale, options):
    p = problem(9, v, scale=scale, seed=v)
    options = dict(options)
    if options.pop("bias", False):
        options["bias"] = torch.randn(v, generator=torch.Generator().manual_seed(1))
    got = token_statistics(**p, want=STATISTICS, **options)
    close(got, token_statistics(**p, want=STATISTICS, impl="reference", **options), 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_are_multiplied_in_float32(dtype):
    # The reference works on the same 16-bit values in float64: what is left is float32 rounding,
    # not the 1e-2 of a product that was rounded to 16 bits.
    p = problem(16, 5000, d=64, scale=0.5, dtype=dtype)
    got = token_statistics(**p, want=STATISTICS)
    close(got, token_statistics(**p, want=STATISTICS, impl="reference"), 2e-5)
    plain = torch.log_softmax(p["hidden"] @ p["head"].T, dim=1)
    own = plain.gather(1, p["targets"].unsqueeze(1)).squeeze(1)
    expected = token_statistics(**p, want=["logprob"], impl="reference").logprob
    ours = (got.logprob - expected).abs().max()
    assert ours <= (own - expected).abs().max() / 100


def test_per_token_temperature_is_each_tokens_own():
    p = problem(5, 41)
    t = torch.tensor([0.1, 0.7, 1.0, 2.0, 9.0])
    whole = token_statistics(**p, want=STATISTICS, temperature=t)
    for i in range(5):
        one = {
            "hidden": p["hidden"][i : i + 1],
            "head": p["head"],
            "targets": p["targets"][i : i + 1],
            "reward": (p["reward"][0][i : i + 1], p["reward"][1]),
        }
        alone = token_statistics(**one, want=STATISTICS, temperature=float(t[i]))
        for name in STATISTICS:
            assert torch.allclose(getattr(whole, name)[i], getattr(alone, name)[0], atol=1e-6), name


@given(
    n=st.integers(1, 7),
    v=st.integers(1, 40),
    rows=st.integers(1, 8),
    columns=st.integers(1, 41),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_tile_does_not_matter(n, v, rows, columns, seed):
    p = problem(n, v, seed=seed, dtype=torch.float64)
    got = token_statistics(**p, want=STATISTICS, chunk=(rows, columns))
    close(got, token_statistics(**p, want=STATISTICS, impl="reference"), 1e-7)


@pytest.mark.parametrize("target", [0, 40])
def test_target_in_the_first_and_in_the_last_tile(target):
    p = problem(3, 41) | {"targets": torch.full((3,), target)}
    got = token_statistics(**p, want=STATISTICS, chunk=16)
    close(got, token_statistics(**p, want=STATISTICS, impl="reference"), 1e-5)


@pytest.mark.parametrize("level", [-150.0, 150.0])
def test_a_constant_in_all_logits_changes_nothing(level):
    p = problem(4, 300)
    here = token_statistics(**p, want=STATISTICS)
    there = token_statistics(**p, want=STATISTICS, bias=torch.full((300,), level))
    for name in STATISTICS:
        shift = level if name == "logsumexp" else 0.0
        # float32 logits around 150 are 1.5e-5 apart
        assert torch.allclose(getattr(there, name), getattr(here, name) + shift, atol=1e-4), name


def test_a_constant_in_all_token_scores_changes_nothing():
    # One more embedding column that is 1 everywhere, with gradient 1000: u + 1000.
    p = problem(4, 300, dtype=torch.float64)
    gradient, embedding = p["reward"]
    shifted = p | {
        "reward": (
            torch.cat([gradient, torch.full((4, 1), 1000.0)], dim=1),
            torch.cat([embedding, torch.ones(300, 1)], dim=1),
        )
    }
    close(token_statistics(**shifted, want=OF_REWARD), token_statistics(**p, want=OF_REWARD), 1e-10)


def test_hand_numbers():
    # logits log 6, log 3, log 1 -> p = .6, .3, .1; y = 0, u = (0, 1, 2).
    # sum p u = .5; G = p (u - .5) = (-.3, .15, .15); k = (.4, -.3, -.1);
    # work = -.12 - .045 - .015 = -.18; |k|^2 = .16 + .09 + .01; |G|^2 = .09 + .0225 + .0225;
    # natural = u_y - sum p u = -.5; entropy = -(.6 ln .6 + .3 ln .3 + .1 ln .1).
    head = torch.tensor([[6.0], [3.0], [1.0]]).log()
    s = token_statistics(
        torch.ones(1, 1),
        head,
        torch.tensor([0]),
        want=STATISTICS,
        reward=(torch.ones(1, 1), torch.tensor([[0.0], [1.0], [2.0]])),
    )
    k, g = math.sqrt(0.26), math.sqrt(0.135)
    expected = {
        "logprob": math.log(0.6),
        "entropy": -(0.6 * math.log(0.6) + 0.3 * math.log(0.3) + 0.1 * math.log(0.1)),
        "logsumexp": math.log(10),
        "sum_p2": 0.46,
        "update_norm": k,
        "work": -0.18,
        "projection": -0.18 / k,
        "cosine": -0.18 / (k * g),
        "natural": -0.5,
        "reward_norm": g,
    }
    for name, value in expected.items():
        assert getattr(s, name).item() == pytest.approx(value, rel=2e-6), name


@pytest.mark.parametrize("q", [1e-2, 1e-4, 1e-6, 1e-8, 1e-10])
def test_a_confident_token_has_right_digits(q):
    # One token of log-odds log((1-q)/q) against a spread of others, float32 against float64.
    others = torch.tensor([0.0, -1.0, 0.7, -3.0])
    own = math.log((1 - q) / q) + float(others.logsumexp(0))
    head = torch.cat([torch.tensor([own]), others]).unsqueeze(1)
    reward = (
        torch.tensor([[0.3, -2.0]]),
        torch.randn(5, 2, generator=torch.Generator().manual_seed(0)),
    )
    got = token_statistics(
        torch.ones(1, 1), head, torch.tensor([0]), want=STATISTICS, reward=reward
    )
    # float64 logits of exactly the float32 values, through the tiles (the plain float64 formula
    # itself loses its digits below q = 1e-8, which this test also shows).
    exact = token_statistics(
        torch.ones(1, 1).double(),
        head.double(),
        torch.tensor([0]),
        want=STATISTICS,
        reward=(reward[0].double(), reward[1].double()),
    )
    for name in STATISTICS:
        a, b = getattr(got, name).item(), getattr(exact, name).item()
        assert a == pytest.approx(b, rel=1e-5), name
    assert exact.update_norm.item() == pytest.approx(
        q * math.sqrt(1 + float((others.softmax(0) ** 2).sum())), rel=1e-5
    )
    assert exact.logprob.item() == pytest.approx(math.log1p(-q), rel=1e-5)


def test_a_token_far_from_the_likeliest_has_right_digits():
    # The sampled token is all but impossible and one other takes everything: |G| and |k - ...|
    # are differences of nearly equal numbers unless the sums are centred there.
    head = torch.tensor([[0.0], [60.0], [20.0], [-5.0]])
    reward = (torch.ones(1, 1), torch.tensor([[1000.0], [1000.5], [999.0], [1003.0]]))
    args = (torch.ones(1, 1), head, torch.tensor([0]))
    p = {"hidden": args[0], "head": head, "targets": args[2], "reward": reward}
    got = token_statistics(*args, want=STATISTICS, reward=reward)
    for name, value in truth(p, 0, {}).items():
        assert getattr(got, name).item() == pytest.approx(float(value), rel=2e-5), name


def test_ties_uniform_and_single_entry():
    even = token_statistics(
        torch.zeros(1, 2), torch.zeros(8, 2), torch.tensor([5]), want=["entropy", "sum_p2"], chunk=3
    )
    assert even.entropy.item() == pytest.approx(math.log(8))
    assert even.sum_p2.item() == pytest.approx(0.125)
    only = token_statistics(
        torch.ones(2, 2), torch.ones(1, 2), torch.tensor([0, 0]), want=STATISTICS,
        reward=(torch.ones(2, 1), torch.ones(1, 1)),
    )  # fmt: skip
    for name, value in (("logprob", 0.0), ("entropy", 0.0), ("sum_p2", 1.0), ("work", 0.0)):
        assert getattr(only, name).tolist() == [value, value], name
    assert only.cosine.tolist() == [0.0, 0.0]


def test_masked_vocabulary_is_as_if_it_were_not_there():
    p = problem(6, 50)
    allowed = torch.rand(50, generator=torch.Generator().manual_seed(3)) < 0.4
    allowed[[7, 9]] = True
    targets = torch.tensor([7, 9, 7, 9, 7, 9])
    place = torch.cumsum(allowed.long(), 0) - 1
    small = {
        "hidden": p["hidden"],
        "head": p["head"][allowed],
        "targets": place[targets],
        "reward": (p["reward"][0], p["reward"][1][allowed]),
    }
    for chunk in (None, 1, 7):
        got = token_statistics(
            **(p | {"targets": targets}), want=STATISTICS, vocabulary_mask=allowed, chunk=chunk
        )
        close(got, token_statistics(**small, want=STATISTICS, impl="reference"), 1e-5)


def test_unread_rows_are_zero_and_so_are_their_gradients():
    p = problem(5, 23, dtype=torch.float64)
    p["targets"] = torch.tensor([3, -100, 4, -1, 22])
    p["hidden"][1] = float("nan")
    hidden = p["hidden"].clone().requires_grad_(True)
    head = p["head"].clone().requires_grad_(True)
    s = token_statistics(**(p | {"hidden": hidden, "head": head}), want=STATISTICS)
    for name in STATISTICS:
        assert getattr(s, name)[[1, 3]].tolist() == [0.0, 0.0], name
    (s.logprob.sum() + s.entropy.sum()).backward()
    assert hidden.grad[[1, 3]].abs().sum() == 0
    assert torch.isfinite(head.grad).all() and hidden.grad[[0, 2, 4]].abs().min() > 0
    nothing = token_statistics(**(p | {"targets": torch.full((5,), -1)}), want=STATISTICS)
    assert all(getattr(nothing, name).tolist() == [0.0] * 5 for name in STATISTICS)


@pytest.mark.parametrize("statistic", [*DIFFERENTIABLE, "both"])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients(statistic, masked):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 5, generator=g, dtype=torch.float64).requires_grad_(True)
    head = torch.randn(17, 5, generator=g, dtype=torch.float64).requires_grad_(True)
    bias = torch.randn(17, generator=g, dtype=torch.float64).requires_grad_(True)
    targets = torch.tensor([0, 3, 16, -1, 8, 8])
    allowed = torch.ones(17, dtype=torch.bool)
    allowed[[1, 12]] = not masked
    temperature = torch.tensor([0.5, 1.0, 2.0, 1.0, 0.7, 1.0], dtype=torch.float64)
    mix = torch.randn(2, 6, generator=g, dtype=torch.float64)

    def f(hidden, head, bias):
        s = token_statistics(
            hidden, head, targets, want=DIFFERENTIABLE, bias=bias, softcap=4.0, logit_scale=1.3,
            temperature=temperature, vocabulary_mask=allowed, chunk=(4, 5),
        )  # fmt: skip
        if statistic == "both":
            return (mix[0] * s.logprob + mix[1] * s.entropy).sum()
        return getattr(s, statistic)

    assert torch.autograd.gradcheck(f, (hidden, head, bias))


def test_only_logprob_and_entropy_carry_gradients():
    p = problem(3, 9)
    p["hidden"].requires_grad_(True)
    s = token_statistics(**p, want=STATISTICS)
    for name in STATISTICS:
        assert getattr(s, name).requires_grad == (name in DIFFERENTIABLE), name
    with torch.no_grad():
        assert not token_statistics(**p, want=["logprob"]).logprob.requires_grad


def test_gradients_of_a_bfloat16_head_are_summed_in_float32():
    # 600 rows add up to a weight gradient: in bfloat16 the sum would stall at 3 digits.
    p = problem(600, 11, d=4, dtype=torch.bfloat16)
    head = p["head"].clone().requires_grad_(True)
    token_statistics(
        p["hidden"], head, p["targets"], want=["logprob"], chunk=(50, 4)
    ).logprob.sum().backward()
    exact = p["head"].double().clone().requires_grad_(True)
    token_statistics(
        p["hidden"].double(), exact, p["targets"], want=["logprob"]
    ).logprob.sum().backward()
    assert torch.allclose(head.grad.double(), exact.grad, rtol=2**-8, atol=1e-3)


def test_work_is_the_straight_through_gradient_along_the_update():
    """An autograd oracle: a nonlinear reward of soft inputs, differentiated in the logits."""
    g = torch.Generator().manual_seed(0)
    n, v, e = 4, 13, 5
    logits = torch.randn(n, v, generator=g, dtype=torch.float64).requires_grad_(True)
    embedding = torch.randn(v, e, generator=g, dtype=torch.float64)
    targets = torch.randint(0, v, (n,), generator=g)
    p = logits.softmax(dim=1)
    soft = p @ embedding
    hard = embedding[targets]
    inputs = soft + (hard - soft).detach()  # value hard, derivative soft
    reward = torch.tanh(inputs).cumsum(0).square().sum()
    (inputs_grad,) = torch.autograd.grad(reward, inputs, retain_graph=True)
    (force,) = torch.autograd.grad(reward, logits)
    k = torch.nn.functional.one_hot(targets, v).double() - p.detach()
    s = token_statistics(
        logits.detach(), torch.eye(v, dtype=torch.float64), targets, want=OF_REWARD,
        reward=(inputs_grad, embedding),
    )  # fmt: skip
    assert torch.allclose(s.work, (force * k).sum(1), rtol=1e-10)
    assert torch.allclose(s.reward_norm, force.norm(dim=1), rtol=1e-10)
    # First order: moving the logits by eps k changes the linearised reward by eps work.
    eps = 1e-5
    moved = (logits.detach() + eps * k).softmax(dim=1)
    change = (inputs_grad * ((moved - p.detach()) @ embedding)).sum(1)
    assert torch.allclose(change / eps, s.work, rtol=1e-3)


def test_a_second_call_is_bit_identical_and_inputs_stay():
    p = problem(33, 700)
    before = {k: v.clone() for k, v in p.items() if k != "reward"}
    a = token_statistics(**p, want=STATISTICS, chunk=64)
    b = token_statistics(**p, want=STATISTICS, chunk=64)
    assert all(torch.equal(getattr(a, n), getattr(b, n)) for n in STATISTICS)
    assert all(torch.equal(p[k], v) for k, v in before.items())


class _Watch(TorchDispatchMode):
    """Counts what would synchronise with an accelerator, and the largest tensor made."""

    def __init__(self):
        super().__init__()
        self.syncs, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "local_scalar_dense" in str(func) or "nonzero" in str(func):
            self.syncs.append(str(func))
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def test_one_synchronisation_and_no_tensor_larger_than_a_tile():
    p = problem(40, 3000, d=4, e=4)
    with _Watch() as watch:
        token_statistics(**p, want=STATISTICS, chunk=(16, 128))
    assert watch.syncs == ["aten.nonzero.default"]
    assert watch.largest <= max(16 * 128, 128 * 4, 40 * 10)


MEMORY = """
import resource, sys, torch
from tokencredit.signals import token_statistics
torch.set_num_threads(1)
n, v, d = 48, 151_936, 64
hidden, head = torch.randn(n, d).bfloat16(), torch.randn(v, d).bfloat16()
targets = torch.randint(0, v, (n,))
token_statistics(hidden[:2], head[:4096], targets[:2] % 4096, want=["entropy"])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
s = token_statistics(hidden, head, targets, want=["logprob", "entropy", "sum_p2"])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
both = ["logprob", "entropy"]
exact = token_statistics(hidden[:4], head, targets[:4], want=both, impl="reference")
print(*(float((getattr(s, n)[:4] - getattr(exact, n)).abs().max()) for n in reversed(both)))
"""


def test_a_real_vocabulary_in_the_memory_of_a_tile():
    # 48 x 151,936 float32 logits alone are 29 MB, log_softmax and entropy three times that.
    out = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True
    ).stdout.split()
    assert int(out[0]) < 12_000  # KiB
    assert float(out[1]) < 1e-4 and float(out[2]) < 3e-5
    assert resource.RUSAGE_SELF == 0


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        ({"want": ["entrpy"]}, ["entrpy", "did you mean 'entropy'"]),
        ({"want": ["work"], "reward": None}, ["work", "needs reward"]),
        ({"hidden": torch.ones(3)}, ["hidden", "[n, d]", "[3]"]),
        ({"head": torch.ones(5, 4)}, ["head", "d = 6", "[5, 4]"]),
        ({"targets": torch.ones(2, dtype=torch.long)}, ["targets", "[n = 3]", "[2]"]),
        ({"targets": torch.ones(3)}, ["targets", "integers", "float32"]),
        ({"bias": torch.ones(2)}, ["bias", "[v = 5]"]),
        ({"vocabulary_mask": torch.ones(2)}, ["vocabulary_mask", "[v = 5]"]),
        ({"temperature": 0.0}, ["temperature", "> 0"]),
        ({"temperature": torch.ones(4)}, ["temperature", "[n = 3]"]),
        ({"reward": (torch.ones(2, 3), torch.ones(5, 3))}, ["gradient", "n = 3"]),
        ({"reward": (torch.ones(3, 2), torch.ones(5, 3))}, ["embedding", "e = 2"]),
        ({"chunk": 0}, ["chunk", "at least 1"]),
        ({"impl": "fast"}, ["impl", "reference"]),
    ],
    ids=lambda x: str(x)[:40],
)
def test_bad_calls_say_what_is_wrong(change, fragments):
    arguments = problem(3, 5) | {"want": ["entropy"]} | change
    with pytest.raises(InputError) as error:
        token_statistics(**arguments)
    for fragment in fragments:
        assert fragment in str(error.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda(dtype):
    p = problem(64, 5003, d=64, dtype=dtype)
    there = {
        k: v.cuda() if isinstance(v, torch.Tensor) else tuple(x.cuda() for x in v)
        for k, v in p.items()
    }
    got = token_statistics(**there, want=STATISTICS)
    exact = token_statistics(**p, want=STATISTICS, impl="reference")
    close(TokenStatistics(**{n: getattr(got, n).cpu() for n in STATISTICS}), exact, 1e-4)
