"""Blocks dealt to stages, and ranks to their replicas, so that the longest stage is as short as can be.

Let C[t](i, j, r) be the cost of blocks i to j on r replicas with t stages from there to the end (:mod:`costs`; infinite
where memory does not suffice). Then

    best[t](i, d) = min over j, r of max(C[t](i, j, r), best[t-1](j, d - r))

is the longest of t stages with blocks i to the end on d ranks. Of all ways with that longest stage, the one whose sum
of squares is least is taken, by the same recursion.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from grace.partition.costs import Setting, Space


class Cut(NamedTuple):
    """Blocks and ranks of all stages.

    Attributes:
        longest: cost of the longest stage.
        ends: the block behind the last one of each stage.
        replicas: of each stage.
    """

    longest: float
    ends: tuple[int, ...]
    replicas: tuple[int, ...]

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """First block of each stage, and the one behind its last."""
        return list(itertools.pairwise((0, *self.ends)))


class Program:
    """The dynamic program for one setting.

    Args:
        space: blocks and devices.
        setting: what is given.
        stages: numbers of stages that are asked for; of settings with places, their number of stages.
        replicas: numbers of replicas that a stage may have; all if None. One set for each stage, if ``of_stage``.
        by_memory: minimize the largest memory instead.
    """

    def __init__(
        self,
        space: Space,
        setting: Setting,
        stages: Sequence[int],
        replicas: Collection[int] | None = None,
        of_stage: Sequence[int] | None = None,
        by_memory: bool = False,
    ):
        self.space, self.setting, self.by_memory = space, setting, by_memory
        self.stages, self.devices = max(stages), space.devices.count
        self.most = self.devices // setting.places if setting.places else self.devices
        self.allowed = None if replicas is None else set(replicas)
        self.of_stage = of_stage

    def cost(self, stages: int, left: int, ranks: int) -> np.ndarray:
        """Of the first of the last ``left`` of so many stages, with so many ranks left: [i, j, r]."""
        setting, space, stage = self.setting, self.space, stages - left
        if setting.places:
            place = stage % setting.places if setting.schedule != "zbv" else min(stage, stages - 1 - stage)
            start = place if setting.layout == "stages" else place * self.most
        else:
            start = self.devices - ranks
        held = space.held(setting, stages, stage)
        found = space.arrays(setting, start, self.most, held)[self.by_memory]
        allowed = self.allowed if self.of_stage is None else {self.of_stage[stage]}
        if allowed is not None:
            found = found.copy()
            found[:, :, [r for r in range(self.most + 1) if r not in allowed]] = np.inf
        return found

    def longest(self, stages: int) -> float:
        """The least that the longest of so many stages can have; infinite if nothing is possible."""
        return self._solve(stages, None)[0]

    def cut(self, stages: int) -> Cut | None:
        """The best one into so many stages; None if nothing is possible."""
        longest = self.longest(stages)
        if not math.isfinite(longest):
            return None
        _, ends, replicas = self._solve(stages, longest)
        return Cut(longest, ends, replicas)

    def _ranks(self, stages: int, left: int) -> Iterator[int]:
        """Ranks that may be left for so many stages."""
        if self.setting.places:
            yield self.most * left
        elif left == stages:
            yield self.devices
        else:
            yield from range(left, self.devices - (stages - left) + 1)

    def _solve(self, stages: int, cap: float | None) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
        """By the longest stage; or by the sum of squares of those within ``cap``, with what was chosen."""
        size = self.space.count + 1
        best: dict[int, np.ndarray] = {0: np.where(np.arange(size) == size - 1, 0.0, np.inf)}
        chosen: list[dict[int, np.ndarray]] = []
        for left in range(1, stages + 1):
            now: dict[int, np.ndarray] = {}
            chosen.append({})
            for ranks in self._ranks(stages, left):
                cost = self.cost(stages, left, ranks)
                after = np.full((size, self.most + 1), np.inf)
                for r in range(1, min(self.most, ranks) + 1):
                    if ranks - r in best:
                        after[:, r] = best[ranks - r]
                if cap is None:
                    total = np.maximum(cost, after[None])
                else:
                    total = np.where(cost <= cap * (1 + 1e-12), (cost / (cap or 1.0)) ** 2, np.inf) + after[None]
                flat = total.reshape(size, -1)
                chosen[-1][ranks] = flat.argmin(axis=1)
                now[ranks] = flat[np.arange(size), chosen[-1][ranks]]
            best = now
        total_ranks = self.most * stages if self.setting.places else self.devices
        value = float(best[total_ranks][0]) if total_ranks in best else math.inf
        ends, replicas, at, ranks = [], [], 0, total_ranks
        if cap is not None:
            for left in range(stages, 0, -1):
                j, r = divmod(int(chosen[left - 1][ranks][at]), self.most + 1)
                ends.append(j)
                replicas.append(r)
                at, ranks = j, ranks - r
        return value, tuple(ends), tuple(replicas)
