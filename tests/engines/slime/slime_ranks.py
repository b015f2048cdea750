"""One rollout split over ranks in several ways; every rank compares its tokens with `assign`.

    python -m torch.distributed.run --nproc-per-node 4 slime_ranks.py [--megatron]

With ``--megatron``: Megatron's own process groups, and entropies and slices from the functions of
miles, a fork of slime. Without: stand-ins for the four functions that the adapter calls.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from slime_harness import SIZE, Batch, arguments, hook, make_batch, rank_data

METHODS = {"gtpo": {"alpha2": 0.3}, "grpo_s": {"ratio": "geometric"}, "grpo": {}, "dapo": {}}
SPLITS = [(4, 1), (2, 2), (1, 4)]  # data parallel, context parallel


def stand_ins(cp_size: int) -> tuple[int, int]:
    """Megatron's and slime's modules with what the adapter calls; ranks of a CP group adjoin."""
    from slime_harness import held

    dp_rank, cp_rank = divmod(dist.get_rank(), cp_size)
    group = dist.new_group(list(range(dist.get_world_size())))

    def get_data_parallel_group(with_context_parallel: bool = False) -> Any:
        assert with_context_parallel
        return group

    def slice_log_prob_with_cp(value: torch.Tensor, total: int, length: int) -> torch.Tensor:
        assert len(value) == length and cp_size > 1
        return value[held(total, length, cp_rank, cp_size)]

    mpu: Any = types.ModuleType("megatron.core.mpu")
    mpu.get_data_parallel_group = get_data_parallel_group
    mpu.get_context_parallel_world_size = lambda: cp_size
    core: Any = types.ModuleType("megatron.core")
    core.mpu = mpu
    cp_utils: Any = types.ModuleType("slime.backends.megatron_utils.cp_utils")
    cp_utils.slice_log_prob_with_cp = slice_log_prob_with_cp
    sys.modules |= {"megatron.core": core, "slime.backends.megatron_utils.cp_utils": cp_utils}
    return dp_rank, cp_rank


def real_ones(cp_size: int) -> tuple[int, int]:
    """Megatron's groups, and miles's functions under slime's names."""
    from megatron.core import mpu
    from miles.backends.training_utils import cp_utils, parallel

    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(context_parallel_size=cp_size)

    def info(group: Any) -> parallel.GroupInfo:
        return parallel.GroupInfo(dist.get_rank(group), dist.get_world_size(group), group)

    alone = info(mpu.get_tensor_model_parallel_group())
    parallel.set_parallel_state(
        parallel.ParallelState(
            intra_dp=info(mpu.get_data_parallel_group()),
            intra_dp_cp=info(mpu.get_data_parallel_group(with_context_parallel=True)),
            cp=info(mpu.get_context_parallel_group()),
            tp=alone, pp=alone, ep=alone, etp=alone,
        )
    )  # fmt: skip
    sys.modules["slime.backends.megatron_utils.cp_utils"] = cp_utils
    return mpu.get_data_parallel_rank(), mpu.get_context_parallel_rank()


def forks_entropies(batch: Batch, indices: list[int], cp_size: int) -> list[torch.Tensor]:
    """Entropies of packed logits by miles's `get_log_probs_and_entropy`."""
    from miles.backends.training_utils.cp_utils import slice_with_cp
    from miles.backends.training_utils.loss import get_log_probs_and_entropy

    logits = [batch.logits[i] for i in indices]
    if cp_size > 1:
        logits = [slice_with_cp(one, 0.0) for one in logits]
    args = arguments(
        qkv_format="thd", rollout_temperature=1.0, log_probs_chunk_size=-1, allgather_cp=False,
        true_on_policy_mode=False, context_parallel_size=cp_size,
    )  # fmt: skip
    found = get_log_probs_and_entropy(
        torch.cat(logits).unsqueeze(0),
        args=args,
        unconcat_tokens=[batch.tokens[i] for i in indices],
        total_lengths=[batch.prompts[i] + batch.lengths[i] for i in indices],
        response_lengths=[batch.lengths[i] for i in indices],
        with_entropy=True,
    )
    return (found[1] if isinstance(found, tuple) else found)["entropy"]


def main() -> None:
    """Every split, every method; the last line says how many tokens were compared."""
    megatron = "--megatron" in sys.argv
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batch, compared = make_batch(), 0
    for dp_size, cp_size in SPLITS:
        dp_rank, cp_rank = (real_ones if megatron else stand_ins)(cp_size)
        # Unequal shares, in no order, groups on several ranks.
        order = torch.randperm(len(batch.lengths), generator=torch.Generator().manual_seed(1))
        bounds = [0, *(7 + 4 * i for i in range(dp_size - 1)), len(order)]
        indices = order[bounds[dp_rank] : bounds[dp_rank + 1]].tolist()
        for method, options in METHODS.items():
            data = rank_data(batch, indices, cp_rank, cp_size)
            if megatron:
                data["entropy"] = forks_entropies(batch, indices, cp_size)
            estimator = "gspo" if method == "grpo_s" else "grpo"
            path = f"tokencredit.engines.slime.{method}"
            args = arguments(
                custom_advantage_function_path=path, advantage_estimator=estimator,
                tokencredit=options,
            )  # fmt: skip
            hook(args, data)
            want = batch.expected(method, **options)
            assert bool((want != 0).any())
            from slime_harness import held

            for i, got in zip(indices, data["advantages"], strict=True):
                total = batch.prompts[i] + batch.lengths[i]
                mine = held(total, batch.lengths[i], cp_rank, cp_size)
                assert torch.allclose(got, want[i, mine], atol=1e-6), (method, cp_size, i)
                compared += len(mine)
            names = [name for name in data if name.startswith("credit/")]
            assert names and all(len(data[name]) == len(indices) for name in names)
        check_errors(batch, indices, cp_rank, cp_size)
        if cp_size == 1:
            check_a_rank_without_samples(batch)
    total = torch.tensor(compared)
    dist.all_reduce(total)
    assert int(total) == len(SPLITS) * len(METHODS) * sum(batch.lengths)
    if dist.get_rank() == 0:
        print(f"compared {int(total)} tokens in groups of {SIZE}")
    dist.barrier()
    dist.destroy_process_group()


def check_a_rank_without_samples(batch: Batch) -> None:
    """Everything on the others: the same numbers, and no word of entropies that are not there."""
    rank, world = dist.get_rank(), dist.get_world_size()
    indices = list(range(len(batch.lengths)))[rank :: world - 1] if rank < world - 1 else []
    for method in ("gtpo", "grpo"):
        data = rank_data(batch, indices)
        path = f"tokencredit.engines.slime.{method}"
        hook(arguments(custom_advantage_function_path=path), data)
        want = batch.expected(method)
        for i, got in zip(indices, data["advantages"], strict=True):
            assert torch.allclose(got, want[i, : batch.lengths[i]], atol=1e-6)


FAULTS = {
    "entropy too long": lambda d: d["entropy"].__setitem__(0, torch.ones(99)),
    "an entropy too few": lambda d: d["entropy"].pop(),
    "no entropies": lambda d: d.pop("entropy"),
    "a reward too few": lambda d: d["rewards"].pop(),
    "reward None": lambda d: d["rewards"].__setitem__(0, None),
    "reward a dictionary": lambda d: d["rewards"].__setitem__(0, {"acc": 1}),
    "mask None": lambda d: d["loss_masks"].__setitem__(0, None),
    "mask of two dimensions": lambda d: d["loss_masks"].__setitem__(0, torch.ones(1, 5)),
    "index None": lambda d: d["sample_indices"].__setitem__(0, None),
    "index too large": lambda d: d["sample_indices"].__setitem__(0, 2**60),
    "rollout id a text": lambda d: d["rollout_ids"].__setitem__(0, "r0"),
}


def check_errors(batch: Batch, indices: list[int], cp_rank: int, cp_size: int) -> None:
    """What is wrong on one rank is said by all: nobody waits for a rank that has left."""
    from tokencredit import InputError, MissingSignalError

    for name, spoil in FAULTS.items():
        data = rank_data(batch, list(indices), cp_rank, cp_size)
        data["rollout_ids"] = list(indices)
        if dist.get_rank() == 0:
            spoil(data)
        try:
            hook(arguments(), data)
        except InputError as error:
            lines, text = str(error).count("\n"), str(error)
            if name == "no entropies":
                assert isinstance(error, MissingSignalError), error
            else:
                assert ("of another rank" not in text) == (dist.get_rank() == 0), (name, error)
            assert lines == 0, error
        else:
            raise AssertionError(f"{name}: taken")


if __name__ == "__main__":
    main()
