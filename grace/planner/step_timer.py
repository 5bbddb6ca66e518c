"""When things happened in the steps of a training run, and the timeline that they make."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from grace.planner.step_simulation import Timeline


def undisturbed(seconds: Iterable[float]) -> float:
    """Return the lower quartile, because what else a machine does makes things longer only.

    >>> undisturbed([4.0, 1.0, 2.0, 9.0, 3.0])
    2.0
    """
    ordered = sorted(seconds)
    return ordered[(len(ordered) - 1) // 4]


class TimedStep(NamedTuple):
    """Times of one step, and those at which gradients were ready, by the variable's name."""

    ready: Mapping[str, float]
    began: float
    computed: float
    exchanged: float
    ended: float


class StepTimer:
    """When things happened in the steps of a phase."""

    def __init__(self) -> None:
        self.ended, self.steps = 0.0, list[TimedStep]()
        self.readied, self.marks = dict[str, float](), dict[str, float]()

    def ready(self, name: str) -> None:
        """Note that a variable's gradient is there."""
        self.readied[name] = time.perf_counter()

    def mark(self, what: str) -> None:
        """Note that a step is "computed" or "exchanged", once a step; more often, and the step does not count."""
        self.marks[what] = time.perf_counter() if what not in self.marks else 0.0

    def end(self, counts: bool) -> None:
        """Note that the optimizer has stepped."""
        computed, exchanged = self.marks.get("computed"), self.marks.get("exchanged")
        if counts and self.ended and computed and exchanged:  # a first step has no end before it to begin at
            self.steps.append(TimedStep(self.readied, self.ended, computed, exchanged, time.perf_counter()))
        self.begin()

    def begin(self) -> None:
        """Begin the next step."""
        self.readied, self.marks, self.ended = {}, {}, time.perf_counter()

    def seconds(self) -> list[float]:
        """Return the seconds of whole steps."""
        return [step.ended - step.began for step in self.steps]

    def taken_waits(self) -> list[tuple[float, float]]:
        """Return the seconds that steps waited for exchanges, and those of the steps, and forget the steps."""
        steps, self.steps = self.steps, []
        return [(step.exchanged - step.computed, step.ended - step.began) for step in steps]

    def timeline(self, names: Sequence[str]) -> Timeline | None:
        """Return what steps take undisturbed, backward from the first gradient on; None if no step has a gradient."""
        steps = [(step, min(step.ready.values())) for step in self.steps if step.ready]
        if not steps:
            return None
        forward = undisturbed(first - step.began for step, first in steps)
        backward = max(0.0, undisturbed(step.computed - first for step, first in steps))  # 0 if all come at its end
        update = undisturbed(step.ended - step.exchanged for step, _ in steps)
        ready = {}
        for name in names:
            seen = [step.ready[name] - first for step, first in steps if name in step.ready]
            ready[name] = min(backward, undisturbed(seen)) if seen else backward
        return Timeline(ready, max(0.0, forward), backward, max(0.0, update))
