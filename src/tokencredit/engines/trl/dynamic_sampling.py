"""DAPO's dynamic sampling inside TRL: groups that teach nothing give their place to fresh ones.

Where all responses of a group are right, or all wrong, there is nothing to compare. DAPO (arXiv
2503.14476, section 3.2) samples on until the batch is full of groups with a mix. Here: after
sampling, and before TRL runs any further pass, such groups are replaced by groups with a mix from
further rounds over fresh prompts, at most so many rounds; what is left is what the rule makes of
it. Every round samples as many responses as the batch has. A round's prompts are drawn at random
from the data set, by a seed that the step decides, so that a run resumed between two
generation batches draws the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from jaxtyping import Bool, Float
from torch import Tensor

from tokencredit.errors import InputError

__all__ = ["DynamicSampling", "Sampled"]


@dataclass
class Sampled:
    """One rank's rows, each a list with an entry a response, and every rank's rewards.

    Attributes:
        inputs: rows of the data set.
        columns: what is known of a response besides, by name; every rank has the same names.
        rewards: ``[B, F]`` over all ranks, a column a reward function.
    """

    inputs: list[Any]
    columns: dict[str, list[Any]]
    rewards: Float[Tensor, "B F"]


class DynamicSampling:
    """Rounds of sampling for one trainer.

    Args:
        rounds: how many further rounds at most; 0 = none.
        dataset: the training set, with a length.
        seed: of the run.
        generations: responses of a prompt.
    """

    def __init__(self, rounds: int, dataset: Any, seed: int, generations: int) -> None:
        if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 0:
            raise InputError(
                f"dynamic_sampling must be a whole number of rounds from 0, got {rounds!r}"
            )
        if rounds and not hasattr(dataset, "__len__"):
            raise InputError(
                "dynamic_sampling: the data set has no length, so no prompts can be drawn from "
                "it; give one that has, or leave dynamic_sampling at 0"
            )
        self.rounds = rounds
        self.dataset = dataset
        self.seed = seed
        self.generations = generations
        self.restart()

    def restart(self) -> None:
        """Training begins, anew or from a checkpoint: what was drawn before does not count."""
        self._step, self._batches = -1, 0

    def fill(
        self,
        first: Sampled,
        sample: Callable[[list[Any]], Sampled],
        useful: Callable[[Tensor], Bool[Tensor, "groups"]],
        *,
        step: int,
        rank: int,
        ranks: int,
    ) -> int:
        """Replace groups of ``first`` that teach nothing, in place.

        Args:
            first: what was sampled.
            sample: samples one response to each of this rank's data rows.
            useful: which groups of ``[B, F]`` rewards have something to compare.
            step: the optimiser's.
            rank: this process.
            ranks: of how many.

        Returns:
            How many further rounds were sampled.
        """
        self._batches = self._batches + 1 if step == self._step else 0
        self._step = step
        size, rows = self.generations, len(first.inputs)
        open_places = (~useful(first.rewards)).nonzero().flatten().tolist()
        for number in range(1, self.rounds + 1):
            if not open_places:
                return number - 1
            keys = set(first.inputs[0]) if first.inputs else set[str]()
            fresh = sample(self._prompts(number, rows, rank, rows * ranks, keys))
            found = useful(fresh.rewards).nonzero().flatten().tolist()
            moves = list(zip(open_places, found, strict=False))
            everywhere = _everywhere(fresh, ranks) if moves else fresh
            for place, source in moves:
                for k in range(size):
                    self._move(everywhere, source * size + k, first, place * size + k - rank * rows)
                at, of = place * size, source * size
                first.rewards[at : at + size] = fresh.rewards[of : of + size]
            open_places = open_places[len(moves) :]
        return self.rounds

    @staticmethod
    def _move(everywhere: Sampled, source: int, first: Sampled, i: int) -> None:
        if not 0 <= i < len(first.inputs):
            return  # another rank's
        # Every row has the same columns, also where a round had further ones.
        first.inputs[i] = {key: everywhere.inputs[source].get(key) for key in first.inputs[i]}
        for name, values in first.columns.items():
            given = everywhere.columns.get(name)
            values[i] = None if given is None else given[source]

    def _prompts(self, number: int, rows: int, rank: int, total: int, keys: set[str]) -> list[Any]:
        """This rank's rows of a round: every prompt ``generations`` times, as TRL has them.

        ``keys`` are the columns that TRL's own rows have: it may have taken some away.
        """
        which = f"{self.seed} {self._step} {self._batches} {number}".encode()
        seed = int.from_bytes(hashlib.blake2b(which, digest_size=7).digest(), "big")
        generator = torch.Generator().manual_seed(seed)
        needed, length = total // self.generations, len(self.dataset)
        drawn: list[int] = []
        while len(drawn) < needed:
            drawn += torch.randperm(length, generator=generator).tolist()
        mine = range(rank * rows, (rank + 1) * rows)
        chosen = [dict(self.dataset[drawn[i // self.generations]]) for i in mine]
        return [{key: value for key, value in row.items() if key in keys} for row in chosen]


def _everywhere(fresh: Sampled, ranks: int) -> Sampled:
    """The rows of all ranks: a group may have its place on another one."""
    if ranks == 1:
        return fresh
    parts = gather_object([{"inputs": fresh.inputs, "columns": fresh.columns}])
    inputs = [row for part in parts for row in part["inputs"]]
    columns = {
        name: [
            value
            for part in parts
            for value in part["columns"].get(name, [None] * len(part["inputs"]))
        ]
        for name in sorted({name for part in parts for name in part["columns"]})
    }
    return Sampled(inputs, columns, fresh.rewards)
