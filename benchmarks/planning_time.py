"""Time that planning takes: ``python -m benchmarks.planning_time``.

For each number of variables a model like a transformer's, of made up shapes, is planned as ``auto`` does without
measuring: the choice of methods, and its explanation. One line each: seconds, and what was chosen.
"""

import argparse
import time

from grace.backends.topology import Topology
from grace.core.variable import Variable
from grace.errors import GraceError
from grace.planner.builders.auto import Auto
from grace.planner.explain import Plan

BLOCK = ((512, 512), (512,), (512, 2048), (2048,), (2048, 512), (512,), (512,))
BACKWARD = 2e-9
"""Seconds of backward for each element."""


def model(count: int) -> list[Variable]:
    """Return an embedding, and further matrices, biases and norms, up to a number of variables.

    >>> [variable.shape for variable in model(3)], len(model(200))
    ([(32000, 512), (512, 512), (512,)], 200)
    """
    shapes = [(32_000, 512), *(BLOCK[i % len(BLOCK)] for i in range(count - 1))]
    return [Variable(f"layer{i:05}", shape) for i, shape in enumerate(shapes[:count])]


def timed(count: int, ranks: int = 8, **options: object) -> tuple[float, Plan]:
    """Return the seconds that a plan of so many variables takes, and the plan.

    Args:
        count: the number of variables.
        ranks: the number of ranks, two on each node.
        options: arguments of :class:`grace.planner.builders.auto.Auto`.

    Raises:
        ConfigError: an option is wrong.
    """
    variables = model(count)
    backward = BACKWARD * sum(variable.numel for variable in variables)
    auto = Auto(backward=backward, **options)  # type: ignore[arg-type]
    nodes = Topology([f"node{rank // 2}" for rank in range(ranks)])
    began = time.perf_counter()
    plan = auto.plan(variables, nodes)
    return time.perf_counter() - began, plan


def main() -> None:
    """Print a line for each number of variables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variables", type=int, nargs="*", default=[200, 2000], help="(default: 200 2000)")
    parser.add_argument("--ranks", type=int, default=8, help="two on each node (default: 8)")
    parser.add_argument("--bandwidth", default="1gbit", help="of each rank (default: 1gbit)")
    parser.add_argument("--quality", default="feedback", help="exact, half, unbiased or feedback (default)")
    arguments = parser.parse_args()
    if min([*arguments.variables, arguments.ranks]) < 1:
        parser.error("numbers of variables and ranks are at least 1")
    for count in arguments.variables:
        try:
            options = {"bandwidth": arguments.bandwidth, "quality": arguments.quality}
            seconds, plan = timed(count, arguments.ranks, **options)
        except GraceError as error:
            parser.error(str(error))
        print(f"{count:,} variables, {arguments.ranks} ranks: {seconds:.2f} s; {plan.chosen.name}", flush=True)


if __name__ == "__main__":
    main()
