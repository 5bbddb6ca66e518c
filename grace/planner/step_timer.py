"""When things happened in the steps of a training run, and the timeline that they make."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from grace.planner.step import Timeline


def undisturbed(seconds: Iterable[float]) -> float:
    """Return the lower quartile, because what else a machine does makes things longer only.

    >>> undisturbed([4.0, 1.0, 2.0, 9.0, 3.0])
    2.0
    """
    ordered = sorted(seconds)
    return ordered[(len(ordered) - 1) // 4]


class StepTimer:
    """When things happened in the steps of a phase."""

    def __init__(self) -> None:
        self.ended = 0.0
        self.steps: list[dict[str, Any]] = []
        self.now: dict[str, Any] = {"ready": {}}

    def ready(self, name: str) -> None:
        """Note that a variable's gradient is there."""
        self.now["ready"][name] = time.perf_counter()

    def mark(self, what: str) -> None:
        """Note that a step is "computed" or "exchanged", once a step; more often, and the step does not count."""
        self.now[what] = time.perf_counter() if what not in self.now else None

    def end(self, counts: bool) -> None:
        """Note that the optimizer has stepped."""
        now = time.perf_counter()
        if counts and self.ended and self.now.get("computed") and self.now.get("exchanged"):
            self.steps.append({**self.now, "began": self.ended, "ended": now})
        self.begin()

    def begin(self) -> None:
        """Begin the next step."""
        self.now, self.ended = {"ready": {}}, time.perf_counter()

    def seconds(self) -> list[float]:
        """Return the seconds of whole steps."""
        return [step["ended"] - step["began"] for step in self.steps]

    def taken_waits(self) -> list[tuple[float, float]]:
        """Return the seconds that steps waited for exchanges, and those of the steps, and forget the steps."""
        steps, self.steps = self.steps, []
        return [(step["exchanged"] - step["computed"], step["ended"] - step["began"]) for step in steps]

    def timeline(self, names: Sequence[str]) -> Timeline | None:
        """Return what steps take undisturbed, backward from the first gradient on; None if no step has a gradient."""
        steps = [{**step, "first": min(step["ready"].values())} for step in self.steps if step["ready"]]
        if not steps:
            return None
        forward, backward, update = (
            max(0.0, undisturbed(step[end] - step[begin] for step in steps))
            for begin, end in (("began", "first"), ("first", "computed"), ("exchanged", "ended"))
        )
        ready = {}
        for name in names:
            seen = [step["ready"][name] - step["first"] for step in steps if name in step["ready"]]
            ready[name] = min(backward, undisturbed(seen)) if seen else backward
        return Timeline(ready, forward, backward, update)
