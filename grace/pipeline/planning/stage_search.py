"""Assignment of blocks to stages, and of ranks to their replicas, so that the longest stage is as short as possible.

Let C[t](i, j, r) be the cost of blocks i to j on r replicas with t stages from there to the end
(:mod:`grace.pipeline.planning.stage_costs`; infinite if memory does not suffice). Then

    best[t](i, d) = min over j, r of max(C[t](i, j, r), best[t-1](j, d - r))

is the longest of t stages with blocks i to the end on d ranks. Of all cuts with that longest stage, the one whose sum
of squares is least is taken, by the same recursion.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from grace.pipeline.planning.schedules import micro_batches_in_flight
from grace.pipeline.planning.stage_costs import Setting, Space


class StageCut(NamedTuple):
    """Blocks and replicas of all stages.

    Attributes:
        longest: cost of the longest stage.
        ends: for each stage, the block behind its last one.
        replicas: number of replicas of each stage.
    """

    longest: float
    ends: tuple[int, ...]
    replicas: tuple[int, ...]

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """First block of each stage, and the block behind its last one."""
        return list(itertools.pairwise((0, *self.ends)))


@dataclass(eq=False)
class StageSearch:
    """The dynamic program for one setting and number of stages, and the possible numbers of ``replicas`` of each stage
    (None for any). It minimizes the longest stage, or with ``by_memory`` the largest memory."""

    space: Space
    setting: Setting
    stages: int
    replicas: Sequence[Collection[int]] | None = None
    by_memory: bool = False

    def __post_init__(self) -> None:
        self.devices = self.space.devices.count
        equal_stages = self.setting.equal_stages
        self.most = self.devices // equal_stages if equal_stages else self.devices
        """Largest number of replicas of a stage."""

    def cost(self, left: int, ranks: int) -> np.ndarray:
        """Return the cost [i, j, r] of the first of the last ``left`` stages, for which ``ranks`` ranks are left."""
        setting, space, stage = self.setting, self.space, self.stages - left
        start = self.devices - ranks  # the ranks of earlier stages come first
        if setting.equal_stages:
            start = stage if setting.layout == "stages" else stage * self.most
        in_flight = micro_batches_in_flight(setting.schedule, stage, self.stages, setting.microbatches)
        if space.devices.one_node:  # all ranks are alike
            start = 0
        found = space.arrays(setting, start, self.most, in_flight)[self.by_memory]
        if self.replicas is not None:
            found = found.copy()  # the space remembers its arrays
            found[:, :, [r for r in range(self.most + 1) if r not in self.replicas[stage]]] = np.inf
        return found

    def longest(self) -> float:
        """Return the least cost that the longest stage can have; infinite if no cut is possible."""
        return self._solve(None)[0]

    def cut(self) -> StageCut | None:
        """Return the best cut; None if no cut is possible."""
        longest = self.longest()
        if not math.isfinite(longest):
            return None
        _, ends, replicas = self._solve(longest)
        return StageCut(longest, ends, replicas)

    def _possible_ranks(self, left: int) -> Iterator[int]:
        """Yield the numbers of ranks that may be left for the last ``left`` stages."""
        if self.setting.equal_stages:
            yield self.most * left
        elif left == self.stages:  # all ranks, before the first stage
            yield self.devices
        else:
            yield from range(left, self.devices - (self.stages - left) + 1)  # each stage has one rank at least

    def _solve(self, cap: float | None) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
        """Return the cost of the longest stage; or, with a ``cap`` on it, the least sum of squares, and the ends and
        replicas of that cut."""
        size = self.space.count + 1
        best: dict[int, np.ndarray] = {0: np.where(np.arange(size) == size - 1, 0.0, np.inf)}
        chosen: list[dict[int, np.ndarray]] = []
        for left in range(1, self.stages + 1):
            now: dict[int, np.ndarray] = {}
            chosen.append({})
            for ranks in self._possible_ranks(left):
                cost = self.cost(left, ranks)
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
        ranks = self.most * self.stages if self.setting.equal_stages else self.devices
        value = float(best[ranks][0]) if ranks in best else math.inf
        ends, replicas, block = [], [], 0  # from the choices, first stage first
        if cap is not None:
            for left in range(self.stages, 0, -1):
                block, r = divmod(int(chosen[left - 1][ranks][block]), self.most + 1)
                ends.append(block)
                replicas.append(r)
                ranks -= r
        return value, tuple(ends), tuple(replicas)
