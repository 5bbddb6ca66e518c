"""Outer plans: what a step takes if ranks train alone, and exchange their drifts now and then.

They change training, so that they are shown beside other plans, and are never chosen unasked.
"""

from collections import ChainMap
from dataclasses import replace

from grace.communicators.choice import build_communicator
from grace.planner.costs import CodecCost, DefaultCodecs
from grace.planner.exchange_costs import costs_of_shards
from grace.planner.problem import Problem
from grace.planner.step_simulation import Prediction, Timeline, simulate_step
from grace.planner.uniform_plans import shards_of
from grace.session.sharding import Chooser
from grace.strategy.builders import DiLoCo

PERIOD = 20
"""Iterations between two rounds."""
CARRIERS = ("none", "block(bits=4)")
"""Compressors of drifts."""
COPY_BYTES = 8
"""Bytes of an anchor and a momentum, for each element of a parameter."""
MUCH_FASTER = 2.0
"""Ratio of steps from which on an outer plan is mentioned."""


def outer_plans(problem: Problem) -> dict[str, Prediction]:
    """Return the mean step of a period of each outer plan, by the spec of the builder that makes it.

    All of a round is exposed: T = compute + round / H. What a codec takes is as measured elsewhere if it was not
    measured here: so small a part of a step.
    """
    variables = [replace(variable, sparse=False) for variable in problem.variables]  # drifts are dense
    codecs = ChainMap[str, CodecCost](problem.costs.codecs, DefaultCodecs())  # type: ignore  # nothing writes to it
    costs, compute = replace(problem.costs, codecs=codecs), problem.timeline.compute
    copies = COPY_BYTES * sum(variable.numel for variable in variables)
    found = {}
    for compressor in CARRIERS:
        carrier = build_communicator(compressor, None, None, problem.ranks)
        shards = shards_of(variables, [carrier] * len(variables), Chooser())
        alone = simulate_step(Timeline({}), costs_of_shards(shards, problem.ranks, costs))
        step, codec, exposed = (seconds / PERIOD for seconds in (alone.step, alone.codec, alone.exposed))
        found[DiLoCo(compressor, period=PERIOD).spec] = Prediction(
            round(compute + step, 12), compute, codec, exposed, alone.sent / PERIOD, copies + alone.memory
        )
    return found


def outer_remarks(problem: Problem, taken: Prediction) -> list[str]:
    """Return one line about the fastest outer plan if it is much faster than the plan that is taken; else nothing."""
    spec, best = min(outer_plans(problem).items(), key=lambda plan: plan[1].step)
    if best.step <= 0 or taken.step < MUCH_FASTER * best.step:
        return []
    return [
        f"training over this link would take {taken.step / best.step:.2g} times less with outer= ({spec}); it changes "
        "training, see docs/outer.md"
    ]
