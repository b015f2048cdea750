"""Ranks leave a run together, and all of them do leave."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from tokencredit.engines.trl.training import wait_for_all

ROUNDS = 100


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    # Nobody is made to give up the GIL: with a plain barrier a round in ten never ended.
    sys.setswitchinterval(1000.0)
    for i in range(ROUNDS):
        store = f"file://{folder}/store-{i}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        _train()
    Path(folder, f"rank-{rank}").touch()


def _train() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    dist.all_gather([torch.zeros(3) for _ in range(2)], torch.ones(3))
    wait_for_all()
    dist.destroy_process_group()  # the model, freed on return, still owns the group


@pytest.mark.slow
def test_every_rank_leaves_after_the_last_barrier(tmp_path: Path):
    context = processes.spawn(_rank, (str(tmp_path),), nprocs=2, join=False)
    try:
        deadline = time.monotonic() + 100
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, "a rank waits for ever"
    finally:
        for process in context.processes:
            process.kill()
    assert {path.name for path in tmp_path.glob("rank-*")} == {"rank-0", "rank-1"}


def test_without_ranks_there_is_nothing_to_wait_for():
    assert not dist.is_initialized()
    wait_for_all()
