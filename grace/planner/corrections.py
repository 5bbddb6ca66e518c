"""What measured steps teach: factors by which methods and collectives take longer than predicted."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from grace.errors import ConfigError
from grace.planner.checked import Checked

SHRINK = 1.0
"""How many steps' worth of weight there is on a factor of 1."""
MOST_FACTOR = 10.0
"""What a single step may say at most."""
LEAST_SHARE = 0.01
"""Of a step, below which a part of it says nothing about what it is made of."""


@dataclass(frozen=True)
class Step:
    """A step that was predicted, and measured. Seconds.

    Attributes:
        plan: the strategy's id, or what else names it.
        compute: predicted: of all that is neither a codec's nor a collective's.
        codecs: predicted: what each codec computes, by its key.
        exposed: predicted: what the step waits for each kind of collective.
        seconds: measured: of the whole step.
        codec: measured: of encoding and decoding; None if nobody did.
        waited: measured: for communication; None if nobody did.
    """

    plan: str
    compute: float
    codecs: Mapping[str, float]
    exposed: Mapping[str, float]
    seconds: float
    codec: float | None = None
    waited: float | None = None

    def predicted(self, corrections: Mapping[str, float] | None = None) -> float:
        """Of the whole step, with these corrections.

        >>> step = Step("s", 1.0, {"topk": 0.5}, {"allgather": 0.25}, seconds=2.0)
        >>> step.predicted(), step.predicted({"topk": 2.0})
        (1.75, 2.25)
        """
        parts = {**self.codecs, **self.exposed}
        return self.compute + sum(seconds * (corrections or {}).get(key, 1.0) for key, seconds in parts.items())

    def without(self, corrections: Mapping[str, float]) -> "Step":
        """What would have been predicted without these corrections."""
        codecs, exposed = (
            {key: seconds / corrections.get(key, 1.0) for key, seconds in parts.items()}
            for parts in (self.codecs, self.exposed)
        )
        return replace(self, codecs=codecs, exposed=exposed)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {**vars(self), "codecs": dict(self.codecs), "exposed": dict(self.exposed)}

    @classmethod
    def from_dict(cls, document: Any, where: str = "the step") -> "Step":
        """The inverse of :meth:`to_dict`.

        Raises:
            ConfigError: something is missing or no time.
        """
        found = Checked(document, where)
        codec, waited = (None if found.maybe(name) is None else found.seconds(name) for name in ("codec", "waited"))
        codecs, exposed = (found.part(name).all_seconds() for name in ("codecs", "exposed"))
        plan, compute, seconds = found.text("plan"), found.seconds("compute"), found.seconds("seconds")
        made = cls(plan, compute, codecs, exposed, seconds, codec, waited)
        found.all_known()
        return made


@dataclass(frozen=True)
class Errors:
    """By how much predictions are off, as shares of what was measured: 0.1 is a tenth."""

    median: float
    worst: float


def error_of(steps: Sequence[Step], corrections: Mapping[str, float] | None = None) -> Errors:
    """How well steps are predicted, with these corrections.

    Raises:
        ConfigError: there is no step of more than no time.

    >>> steps = [Step("s", 1.0, {}, {"allgather": 1.0}, seconds=4.0)]
    >>> error_of(steps), error_of(steps, {"allgather": 3.0})
    (Errors(median=0.5, worst=0.5), Errors(median=0.0, worst=0.0))
    """
    off = [abs(step.predicted(corrections) / step.seconds - 1) for step in steps if step.seconds > 0]
    if not off:
        raise ConfigError("there is no measured step to compare predictions with")
    return Errors(median(off), max(off))


def fitted_corrections(steps: Sequence[Step]) -> dict[str, float]:
    """Factors f, by codec and by kind of collective, that make predictions fit.

    Of each step, measured encoding and decoding (or waiting) over what was predicted is a ratio r, and p_k is the share
    that codec (or collective) k has in the prediction. The factors make

        sum over steps (log r - sum_k p_k log f_k)^2 + SHRINK sum_k (log f_k)^2

    least, so that few steps leave them near 1. Where parts were not measured, what the whole step takes beyond
    computing is one ratio for both.

    Args:
        steps: predicted without corrections.

    >>> waits = Step("s", 1.0, {}, {"allgather": 0.2}, seconds=1.4)
    >>> [round(fitted_corrections([waits] * n)["allgather"], 2) for n in (1, 3, 100)]
    [1.41, 1.68, 1.99]
    """
    rows: list[tuple[float, dict[str, float]]] = []
    for step in steps:
        if step.codec is not None and step.waited is not None:
            rows += _row(step, step.codecs, step.codec) + _row(step, step.exposed, step.waited)
        else:
            rows += _row(step, {**step.codecs, **step.exposed}, step.seconds - step.compute)
    keys = sorted({key for _, shares in rows for key in shares})
    if not keys:
        return {}
    shares = np.array([[row.get(key, 0.0) for key in keys] for _, row in rows])
    logs = np.array([log for log, _ in rows])
    found = np.linalg.solve(shares.T @ shares + SHRINK * np.eye(len(keys)), shares.T @ logs)
    return {key: float(math.exp(log)) for key, log in zip(keys, found, strict=True)}


def _row(step: Step, parts: Mapping[str, float], measured: float) -> list[tuple[float, dict[str, float]]]:
    """log r and shares; nothing, where there is too little of it to tell."""
    total, least = sum(parts.values()), LEAST_SHARE * max(step.seconds, 1e-9)
    if total < least:
        return []
    ratio = min(max(max(measured, least) / total, 1 / MOST_FACTOR), MOST_FACTOR)
    return [(math.log(ratio), {key: seconds / total for key, seconds in parts.items()})]
