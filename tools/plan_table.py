"""Plans for published profiles beside cuts by hand, data parallelism and brute force.

``python -m tools.plan_table PROFILE.json ...`` prints a Markdown table.
"""

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.hand_cuts import BY_HAND, cut_by_hand, with_blocks
from grace.pipeline.planning.blocks import blocks
from grace.pipeline.planning.pipedream import read_graph
from grace.pipeline.planning.predict import predict_data_parallel
from grace.pipeline.planning.search import SearchOptions, search, space_of
from grace.pipeline.planning.stage_costs import Setting, Space
from grace.pipeline.planning.stage_search import StageCut, StageSearch
from grace.planner.network import Links

MEMORY = 16e9
"""Memory in bytes of the V100 on which PipeDream's profiles were taken."""
LATENCY = 20e-6
"""Seconds of a message."""


def table(
    profiles: Sequence[str | Path],
    devices: Sequence[int] = (4, 8, 16),
    gbits: Sequence[float] = (1, 10, 100),
    compressor: str | None = None,
    memory: float = MEMORY,
) -> str:
    """Return a Markdown table of plans beside baselines.

    It has milliseconds of a step of as many of the profile's batches as there are devices, and their ratio to the best
    cut by hand. Data parallelism alone overlaps its exchange with backward, as no pipeline does. The last column is the
    longest stage that the dynamic program finds for 10 blocks, over the one that brute force finds."""
    rows = [
        "| model | devices | Gbit/s | replicas of each stage | micro-batches, schedule | step ms | data parallel "
        "| equal layers | equal parameters | equal time | to the best by hand | 10 blocks: program / brute force |",
        "| --- | ---: | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for path, count, gbit in itertools.product(profiles, devices, gbits):
        graph = read_graph(path)
        links, batch = Links(gbit * 1e9 / 8, LATENCY), graph.rows * count
        options = SearchOptions(compressor=compressor, memory=memory, memory_margin=0.0)
        space = space_of(graph, count, batch, links, options)
        found = search(space, options)
        by_hand = [cut_by_hand(space, how) for how in BY_HAND.values()]
        others = [predict_data_parallel(space), *(None if plan is None else plan.seconds for plan in by_hand)]
        known = [plan.seconds for plan in by_hand if plan is not None]
        cells = ["-" if seconds is None else f"{1e3 * seconds:.1f}" for seconds in others]
        again = ", recomputing" if found.recompute else ""
        rows.append(
            f"| {Path(path).stem} | {count} | {gbit:g} | {'-'.join(map(str, found.replicas))} | {found.microbatches}, "
            f"{found.schedule}{again} | {1e3 * found.seconds:.1f} | {' | '.join(cells)} | "
            f"{f'{found.seconds / min(known):.2f}' if known else '-'} | {_against_all(space):.3f} |"
        )
    return "\n".join(rows) + "\n"


def _against_all(space: Space, most: int = 10) -> float:
    """Return the longest stage that the dynamic program finds over that of :func:`exhaustive`, with few blocks."""
    few = with_blocks(space, blocks(space.graph, most))
    found = search(few, SearchOptions())
    setting = Setting(found.schedule, found.microbatches, found.recompute)
    stage_search = StageSearch(few, setting, len(found.stages))
    best = exhaustive(stage_search)
    return 1.0 if best is None else stage_search.longest() / best.longest


def exhaustive(search: StageSearch) -> StageCut | None:
    """Return the best cut by brute force: over every way to cut the blocks, with every way to deal the ranks.

    Returns:
        a cut whose longest stage is as short as possible; None if no cut is possible.
    """
    count, stages, setting = search.space.count, search.stages, search.setting
    costs: dict[tuple[int, int], list[list[list[float]]]] = {}

    def cuts(left: int, start: int, ranks: int, longest: float) -> Iterator[StageCut]:
        """Yield all cuts of the blocks from ``start`` on into the last ``left`` stages."""
        if not left:
            yield StageCut(longest, (), ())
            return
        if (left, ranks) not in costs:
            costs[left, ranks] = search.cost(left, ranks).tolist()
        if setting.equal_stages:
            possible_replicas: Sequence[int] = (search.most,)
        else:
            possible_replicas = range(1, ranks - left + 2) if left > 1 else (ranks,)
        for end in range(start + 1, count - left + 2) if left > 1 else (count,):
            for replicas in possible_replicas:
                cost = costs[left, ranks][start][end][replicas]
                if math.isfinite(cost):
                    for rest in cuts(left - 1, end, ranks - replicas, max(longest, cost)):
                        yield StageCut(rest.longest, (end, *rest.ends), (replicas, *rest.replicas))

    ranks = search.most * stages if setting.equal_stages else search.devices
    every_cut = cuts(stages, 0, ranks, 0.0) if stages <= count else ()
    return min(every_cut, key=lambda cut: cut.longest, default=None)


if __name__ == "__main__":
    print(table(sys.argv[1:]), end="")
