"""Token-level credit inside slime: a function for ``--custom-advantage-function-path``.

    --custom-advantage-function-path tokencredit.engines.slime.gtpo

and so for every method that needs no more than rewards, success and entropies: ``grpo``,
``dr_grpo``, ``dapo``, ``gtpo``, ``grpo_s``, and rules of your own. Options stand in the file of
``--custom-config-path``, under ``tokencredit``.

slime calls the function on every rank of the last pipeline stage with that rank's samples alone,
and a group's samples lie on several ranks; under context parallelism each rank holds two slices
of a response. So rewards, masks and entropies are gathered over the data-parallel group with
context parallelism (three collectives a rollout), the rule sees whole groups, and each rank keeps
its own tokens: the numbers do not depend on how slime splits.

Written against slime 0.3.1. slime itself, which needs Megatron and SGLang, was not run; see the
documentation for what was. Importing this module imports neither.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from tokencredit.credit import Credit, assign
from tokencredit.engines.options import group_obstacle, methods_fed_by, plain_options, rule_of
from tokencredit.errors import InputError, MissingSignalError, nearest
from tokencredit.methods.rule import Rule
from tokencredit.rollouts import Rollouts

__all__ = ["advantages", "keep_loss"]

SECTION = "tokencredit"
"""The key of ``--custom-config-path``'s file under which options stand."""
SLIME_HANDS_OVER = ("entropy",)
"""Token signals that can be had from slime."""
FORCE_THE_PASS = (
    "--get-mismatch-metrics --custom-tis-function-path tokencredit.engines.slime.keep_loss"
)
"""What makes slime run its log-probability pass where it would leave it out."""

AdvantageFunction = Callable[[Any, dict[str, Any]], None]


def __getattr__(name: str) -> AdvantageFunction:
    """``tokencredit.engines.slime.METHOD``, as slime looks it up."""
    usable = methods_fed_by(SLIME_HANDS_OVER)
    if name not in usable:
        raise AttributeError(
            f"tokencredit.engines.slime has no method {name!r}{nearest(name, usable)}; "
            f"methods: {', '.join(usable)}; a rule of your own is there once its module is "
            "imported, by a module of yours that slime is pointed to"
        )

    def function(args: Any, rollout_data: dict[str, Any]) -> None:
        advantages(name, args, rollout_data)

    function.__name__ = function.__qualname__ = name
    return function


def keep_loss(
    args: Any, *, pg_loss: Tensor, loss_masks: list[Tensor], **_: Any
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """A function for ``--custom-tis-function-path`` that changes nothing.

    ``--get-mismatch-metrics`` makes slime run its log-probability pass, and calls such a function;
    slime's own would multiply the loss by truncated importance weights.

    Returns:
        The loss and the masks as they came, no further metrics.
    """
    return pg_loss, loss_masks, {}


def advantages(method: str, args: Any, rollout_data: dict[str, Any]) -> None:
    """Put a method's advantages into ``rollout_data``, as slime's hook asks.

    Sets ``advantages`` and ``returns``, lists of one float32 tensor a sample with the shape and
    device of the sample's ``kl`` (under context parallelism, this rank's slices of it), and
    ``credit/...``, the `diagnostics` of the whole rollout, which slime logs.

    Args:
        method: a name of `tokencredit.methods`.
        args: slime's arguments.
        rollout_data: this rank's samples. Read are ``rewards``, ``sample_indices``,
            ``response_lengths``, ``total_lengths``, ``loss_masks``, ``kl`` and, where the rule
            needs it, ``entropy``.

    Raises:
        InputError: arguments under which the method would be another, or data that do not fit.
        MissingSignalError: the rule needs entropies and slime formed none.
    """
    section = plain_options(getattr(args, SECTION, None), SECTION)
    rule = rule_of(method, section, SECTION)
    _refuse(args, rule)
    samples = _samples(rule, rollout_data)
    credit, mine = _credit_over_ranks(args, rule, samples)
    own = [
        credit.advantage[row, positions].to(torch.float32)
        for row, positions in zip(mine.tolist(), samples.positions, strict=True)
    ]
    rollout_data["advantages"] = own
    rollout_data["returns"] = [one.clone() for one in own]
    for name, value in credit.diagnostics.items():
        rollout_data[f"credit/{name}"] = [float(value)] * len(own)


# -- what slime's arguments must say -----------------------------------------------------------


def _refuse(args: Any, rule: Rule) -> None:
    """Refuse arguments under which the method would be another one; the same on every rank."""
    where = f"tokencredit.engines.slime.{rule.name}"

    def given(name: str, default: Any = None) -> Any:
        return getattr(args, name, default)

    lacks = sorted(set(rule.needs) - set(SLIME_HANDS_OVER))
    if lacks:
        raise InputError(f"{where}: needs {', '.join(lacks)}, which slime does not give")
    if given("rewards_normalization", True):
        raise InputError(
            f"{where}: rewards arrive normalised by slime, and the rule forms the statistics of "
            "a group itself; add --disable-rewards-normalization"
        )
    if given("normalize_advantages", False):
        raise InputError(
            f"{where}: --normalize-advantages would shift every token's advantage by the batch's "
            "mean; leave it out"
        )
    if given("use_critic", False):
        raise InputError(
            f"{where}: a critic is trained (--advantage-estimator ppo), and this rule's advantages "
            "need none; set --advantage-estimator grpo"
        )
    for line in group_obstacle(rule, given("n_samples_per_prompt", 1), "--n-samples-per-prompt"):
        raise InputError(f"{where}: {line}")
    if rule.recipe.ratio_required and given("loss_type", "policy_loss") == "policy_loss":
        level, estimator = rule.recipe.surrogate.ratio, given("advantage_estimator", "grpo")
        if level == "sequence_arithmetic":
            raise InputError(
                f"{where}: its ratio is the arithmetic mean of a response's ratios, and slime has "
                f"no such loss; set ratio: geometric under {SECTION} in --custom-config-path's "
                "file, and --advantage-estimator gspo"
            )
        if level == "sequence_geometric" and estimator != "gspo":
            raise InputError(
                f"{where}: it forms its ratio over the whole response, --advantage-estimator "
                f"{estimator} does not; set --advantage-estimator gspo"
            )
        if level == "token" and estimator == "gspo":
            raise InputError(
                f"{where}: --advantage-estimator gspo forms its ratio over the whole response, "
                "and the rule trains with each token's own; set --advantage-estimator grpo"
            )


def _no_entropies(args: Any, rule: Rule) -> MissingSignalError:
    where = f"tokencredit.engines.slime.{rule.name} needs entropies and slime formed none"
    if not getattr(args, "use_rollout_entropy", False):
        return MissingSignalError(
            f"{where}: add --use-rollout-entropy; where a rollout is one optimiser step, add "
            f"{FORCE_THE_PASS} as well, or slime leaves out the pass that forms them"
        )
    if getattr(args, "use_rollout_logprobs", False):
        why = "with --use-rollout-logprobs it runs no log-probability pass"
    else:
        why = (
            "where a rollout is one optimiser step and --kl-coef is 0 it reuses the training "
            "pass's log-probabilities (can_reuse_log_probs_in_loss), and leaves out the pass that "
            "forms entropies, whatever --use-rollout-entropy says"
        )
    return MissingSignalError(f"{where}: {why}; add {FORCE_THE_PASS}")


# -- this rank's samples -----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Samples:
    """One rank's samples as two tables, and where its tokens belong.

    Attributes:
        rows: ``[n, 6]`` float64: sample index, reward, length of the response, tokens held here,
            rollout, checksum of the prompt.
        tokens: ``[m, 3]`` float32, sample after sample: position in the response, whether the
            policy chose the token, entropy.
        positions: for each sample, those of the tokens held here.
        trouble: what is wrong with the data, or "". Raised after the ranks have met, for one that
            raised alone would leave the others waiting.
        no_entropies: slime formed none and the rule needs them; said after the meeting as well.
        has_entropies: whether the table holds them.
    """

    rows: Float[Tensor, "n 6"]
    tokens: Float[Tensor, "m 3"]
    positions: list[Int[Tensor, " l"]]
    trouble: str = ""
    no_entropies: bool = False
    has_entropies: bool = False


def _samples(rule: Rule, data: dict[str, Any]) -> _Samples:
    # `kl` is there in every configuration, with this rank's tokens, on the device of training.
    device = data["kl"][0].device if data["kl"] else _device()
    none = _Samples(torch.zeros(0, 6, dtype=torch.float64, device=device),
                    torch.zeros(0, 3, device=device), [])  # fmt: skip
    count = len(data["kl"])
    if count and "entropy" in rule.needs and not data.get("entropy"):
        return replace(none, no_entropies=True)
    reads = "entropy" in {*rule.needs, *rule.reads} and bool(data.get("entropy"))
    lists = ["rewards", "sample_indices", "response_lengths", "total_lengths", "loss_masks"]
    for name in [*lists, *(["entropy"] if reads else [])]:
        if len(data[name]) != count:
            return replace(none, trouble=f"{count} samples, and {name} has {len(data[name])}")
    rows: list[list[float]] = []
    tokens: list[Tensor] = []
    positions: list[Tensor] = []
    for i in range(count):
        try:
            row, table, where = _sample(data, i, reads, device)
        except InputError as error:
            return replace(none, trouble=f"sample {i} of this rank: {error}")
        except Exception as error:  # whatever it is, the other ranks must not wait
            what = " ".join(f"{type(error).__name__}: {error}".split())
            return replace(none, trouble=f"sample {i} of this rank: {what}")
        rows.append(row)
        tokens.append(table)
        positions.append(where)
    made = torch.tensor(rows, dtype=torch.float64, device=device).reshape(count, 6)
    return _Samples(
        made, torch.cat([none.tokens, *tokens]), positions, has_entropies=reads and count > 0
    )


def _sample(
    data: dict[str, Any], i: int, reads_entropy: bool, device: torch.device
) -> tuple[list[float], Tensor, Tensor]:
    """One sample's row, its tokens on this rank, and their positions."""
    length, total = int(data["response_lengths"][i]), int(data["total_lengths"][i])
    index = _number(data["sample_indices"][i], "its index")
    if abs(index) >= 2**53:
        raise InputError(f"its index {index:.0f} is too large to be counted by")
    rollouts = data.get("rollout_ids")
    rollout = index if rollouts is None else _number(rollouts[i], "its rollout id")
    where = _positions(total, length).to(device)
    mask = torch.as_tensor(data["loss_masks"][i], device=device)
    entropy = where * 0
    if reads_entropy:
        entropy = torch.as_tensor(data["entropy"][i], device=device).to(torch.float32)
    held = data["kl"][i].numel()
    shapes = [tuple(entropy.shape), tuple(mask.shape)]
    if held != len(where) or shapes != [(len(where),), (length,)]:
        raise InputError(
            f"{len(where)} of its {length} tokens are on this rank, but kl has {held}, entropy "
            f"and loss mask have shapes {list(shapes[0])} and {list(shapes[1])}"
        )
    reward = _number(data["rewards"][i], "its reward")
    row = [
        index,
        reward,
        float(length),
        float(len(where)),
        rollout,
        _checksum(data, i, total, length),
    ]
    columns = [where, mask[where], entropy]
    return row, torch.stack([column.to(torch.float32) for column in columns], dim=1), where


def _number(value: Any, what: str) -> float:
    if isinstance(value, dict):
        raise InputError(
            f"{what} is a dictionary of {', '.join(map(str, value))}: set --reward-key"
        )
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise InputError(
            f"{what} must be a number, got {' '.join(repr(value).split())[:60]}"
        ) from None


def _checksum(data: dict[str, Any], i: int, total: int, length: int) -> float:
    """Of the prompt's tokens; -1 where they are not there."""
    if data.get("tokens") is None:
        return -1.0
    prompt = torch.as_tensor(data["tokens"][i])[: total - length].to("cpu", torch.int64)
    return float(zlib.crc32(prompt.numpy().tobytes()))


def _positions(total: int, length: int) -> Int[Tensor, " l"]:
    """Which tokens of a response this rank holds: all, or its slices under context parallelism."""
    everything = torch.arange(length)
    if not dist.is_initialized() or _mpu().get_context_parallel_world_size() == 1:
        return everything
    from slime.backends.megatron_utils.cp_utils import (  # pyright: ignore[reportMissingImports]
        slice_log_prob_with_cp,
    )

    return cast(Tensor, slice_log_prob_with_cp(everything, total, length))


def _mpu() -> Any:
    from megatron.core import mpu  # pyright: ignore[reportMissingImports]

    return mpu


def _device() -> torch.device:
    """Where a rank without samples meets the others."""
    if not dist.is_initialized() or "gloo" in str(dist.get_backend(_group())):
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def _group() -> Any:
    return _mpu().get_data_parallel_group(with_context_parallel=True)


# -- all ranks' samples ------------------------------------------------------------------------


def _credit_over_ranks(args: Any, rule: Rule, samples: _Samples) -> tuple[Credit, Tensor]:
    """Credit of the whole rollout, and which of its rows are this rank's samples."""
    device = samples.rows.device
    where = f"tokencredit.engines.slime.{rule.name}"
    flags = [bool(samples.trouble), samples.no_entropies, samples.has_entropies]
    sizes = torch.tensor([len(samples.rows), len(samples.tokens), *flags], device=device)
    met = [size.tolist() for size in _gather(sizes, 5)]
    if any(none for _, _, _, none, _ in met):
        raise _no_entropies(args, rule)
    if any(trouble for _, _, trouble, _, _ in met):
        said = samples.trouble or "the samples of another rank do not fit; its error says more"
        raise InputError(f"{where}: {said}")
    counts, has_entropies = [(n, m) for n, m, *_ in met], any(has for *_, has in met)
    rows = torch.cat(_gather_rows(samples.rows, [n for n, _ in counts]))
    tokens = torch.cat(_gather_rows(samples.tokens, [m for _, m in counts]))
    # The slices of a sample are on several ranks: one row a sample, in the order of the indices.
    index, row = torch.unique(rows[:, 0].long(), return_inverse=True)
    of_token = torch.repeat_interleave(row, rows[:, 3].long())
    position = tokens[:, 0].long()
    length = torch.zeros(len(index), dtype=torch.long, device=device)
    length[row] = rows[:, 2].long()
    seen = torch.zeros(len(index), dtype=torch.long, device=device)
    seen.index_add_(0, of_token, torch.ones_like(position))
    if len(torch.unique(rows[:, 4])) < len(index) or not torch.equal(seen, length):
        # Context parallelism alone brings a sample several times, each time with other tokens.
        raise InputError(
            f"{where}: several samples come from one rollout (parts "
            "of a dialogue, sub-agents), and each would count as a response of its group; give "
            "one sample a rollout"
        )
    reward = torch.zeros(len(index), dtype=torch.float64, device=device)
    reward[row] = rows[:, 1]
    shape = (len(index), int(length.max()) if len(index) else 0)
    mask = torch.zeros(shape, dtype=torch.bool, device=device)
    mask[of_token, position] = tokens[:, 1] > 0
    entropy = None
    if has_entropies:
        entropy = torch.full(shape, float("nan"), device=device)
        entropy[of_token, position] = tokens[:, 2]
    group = torch.div(index, args.n_samples_per_prompt, rounding_mode="floor")
    prompt = torch.zeros(len(index), dtype=torch.float64, device=device)
    prompt[row] = rows[:, 5]
    _check_groups(where, group, prompt, args.n_samples_per_prompt)
    rollouts = Rollouts(reward.to(torch.float32), group, mask, entropy=entropy)
    return assign(rollouts, rule), torch.searchsorted(index, samples.rows[:, 0].long())


def _check_groups(where: str, group: Tensor, prompt: Tensor, n: int) -> None:
    """Refuse groups that another ``--n-samples-per-prompt`` than today's has numbered."""
    _, sizes = torch.unique(group, return_counts=True)
    pairs = torch.unique(torch.stack([group.double(), prompt]), dim=1).shape[1]
    if pairs > len(sizes) and bool((sizes != n).any()):
        raise InputError(
            f"{where}: with --n-samples-per-prompt {n} samples of different prompts fall into one "
            "group: their indices were given with another number, before a resume perhaps; go on "
            "with that one"
        )


def _gather(value: Tensor, length: int) -> list[Tensor]:
    """One tensor of ``length`` rows from every rank that shares this rollout, in rank order."""
    if not dist.is_initialized():
        return [value]
    group = _group()
    parts = [
        torch.empty((length, *value.shape[1:]), dtype=value.dtype, device=value.device)
        for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(parts, value.contiguous(), group=group)
    return parts


def _gather_rows(value: Tensor, counts: list[int]) -> list[Tensor]:
    """Tensors with as many rows a rank as ``counts`` says."""
    longest = max(counts)
    padded = torch.cat([value, value.new_zeros(longest - len(value), *value.shape[1:])])
    parts = _gather(padded, longest)
    return [part[:count] for part, count in zip(parts, counts, strict=True)]
