"""In which order methods are measured while training waits: first those that promise the shortest steps."""

import math
from collections.abc import Sequence

from grace.core.registry import make
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.planner.grouped import grouped
from grace.planner.network import Network
from grace.planner.simulate import simulate
from grace.planner.step import Timeline
from grace.planner.usual import UsualCodecs
from grace.planner.works import Costs, works


def by_promise(
    methods: Sequence[str],
    variables: Sequence[Variable],
    timeline: Timeline,
    network: Network,
    nodes: Sequence[str],
    first: Sequence[str] = (),
) -> list[str]:
    """The methods, best first, by a step's prediction with the links as they are and codecs as they usually are.

    Args:
        methods: specs of compressors.
        variables: the model's, in declaration order.
        timeline: when gradients are ready.
        network: between the ranks.
        nodes: the node of each rank.
        first: methods that come first, in their order, whatever is expected.

    >>> from grace.planner.network import Links
    >>> model, slow = [Variable("w", (1000, 1000))], Links(1e6, 1e-5)
    >>> by_promise(["none", "fp16", "qsgd"], model, Timeline({"w": 0.0}), slow, ["a", "b"], first=["none"])
    ['none', 'qsgd', 'fp16']
    """
    costs, places = Costs(network, UsualCodecs()), list(dict.fromkeys(nodes))

    def step(method: str) -> float:
        try:
            strategy = grouped(variables, len(nodes), method, nodes=len(places))
            return simulate(timeline, works(strategy, costs, [places.index(node) for node in nodes])).step
        except ConfigError:  # it cannot carry rows
            return math.inf

    wanted = [make("compressor", method).spec for method in first]
    place = {spec: i for i, spec in enumerate(wanted)}
    steps = {method: (place.get(make("compressor", method).spec, len(place)), step(method)) for method in methods}
    return sorted(methods, key=lambda method: steps[method])
