"""A planner that knows its candidates, for ``strategy="auto"`` in tests."""

from types import SimpleNamespace

from grace.communicators.choice import build_communicator
from grace.planner.codecs import measure
from grace.planner.driver import HELD, PLAIN, SETTLED, TIMED, WARM
from grace.planner.uniform_plans import uniform_strategy

TOPK = "topk(ratio=0.1)"
METHODS = ("none", TOPK, "powersgd(rank=1)")
SHAPES = {"w": (12, 8), "v": (40, 6), "b": (5,)}
SLEEPS = {"none": 0.03, TOPK: 0.001, "powersgd(rank=1)": 0.015}
"""Seconds of a step by each."""
NONE_FASTEST = {**SLEEPS, "none": 0.001, TOPK: 0.03}
TURN = SETTLED + TIMED
UNTIL_TRYING = WARM + HELD + PLAIN
"""Steps until the first turn."""
UNTIL_CHOSEN = UNTIL_TRYING + len(METHODS) * TURN
"""Steps until a choice, where one is far ahead of all others."""


def measured(method, gradients, ranks=2, seed=0, limit_seconds=0.02):
    """Measure a compressor by its spec, or a communicator, compressor and memory as ``describe`` writes them."""
    communicator, compressor, memory = method.split(", ") if ", " in method else (None, method, None)
    made = build_communicator(compressor, memory, communicator, ranks)
    return measure(made, gradients, ranks, seed, limit_seconds)


class Planning:
    """Knows three candidates, and measures nothing."""

    failing = None
    """The rank that cannot."""

    def __init__(self, request, backend, names, variables, adaptive):
        self.backend, self.variables = backend, variables

    def measure_links(self, plain):
        if self.failing == self.backend.rank:
            raise ValueError("no such thing")

    def measure_methods(self, gradients, tables, timeline):
        assert set(gradients) == set(timeline.ready) == {v.name for v in self.variables}

    def find_candidates(self, skew):
        made = [(name, uniform_strategy(self.variables, self.backend.size, name)) for name in METHODS]
        return [SimpleNamespace(name=name, strategy=strategy) for name, strategy in made]

    def explained(self, chosen, seconds):
        return {"chosen": chosen}, f"{chosen} is taken"
