"""A planner that knows its candidates, for ``strategy="auto"`` in tests."""

from types import SimpleNamespace

from grace.planner.grouped import grouped

TOPK = "topk(ratio=0.1)"
METHODS = ("none", TOPK, "powersgd(rank=1)")
SHAPES = {"w": (12, 8), "v": (40, 6), "b": (5,)}
SLEEPS = {"none": 0.03, TOPK: 0.001, "powersgd(rank=1)": 0.015}
"""Seconds of a step by each."""
NONE_FASTEST = {**SLEEPS, "none": 0.0, TOPK: 0.03}


class Planning:
    """Knows three candidates, and measures nothing."""

    failing = None
    """The rank that cannot."""
    seconds = 2.0

    def __init__(self, asked, backend, names, variables, *ignored):
        self.backend, self.variables = backend, variables

    def measure(self, gradients, timeline, plain):
        assert set(gradients) == set(timeline.ready) == {v.name for v in self.variables}
        if self.failing == self.backend.rank:
            raise ValueError("no such thing")

    def candidates(self):
        made = [(name, grouped(self.variables, self.backend.size, name)) for name in METHODS]
        return [SimpleNamespace(name=name, strategy=strategy) for name, strategy in made]

    def learned(self, seconds):
        self.took = dict(seconds)

    def explained(self, chosen, why):
        return {"chosen": chosen}, why or f"{chosen} is taken"
