"""Comparison of two results of the same kind, row by row, with a test whether a change exceeds noise."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from grace.bench.common.results import Results
from grace.bench.common.text import number
from grace.errors import ConfigError

Row = Mapping[str, Any]
Key = tuple[Any, ...]
BETTER, WORSE, SAME, UNKNOWN = "better", "worse", "same", "unknown"


@dataclasses.dataclass(frozen=True)
class Measure:
    """Figure that rows are compared by.

    Attributes:
        key: the keys under which rows have it; the values of several are added up.
        title: the title of its column.
        noise: relative change up to which it counts as unchanged where rows have no spread of it.
        sign: -1 where lower is better, 1 where higher is, 0 where the settings say it (``higher_is_better``).
        time: True if it is a time, so that worse is called slower.
    """

    key: tuple[str, ...]
    title: str
    noise: float
    sign: int = -1
    time: bool = False

    def value(self, row: Row) -> float | None:
        """Return the figure of a row; None if any part of it is unknown."""
        parts = [number(row.get(key)) for key in self.key]
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None

    def interval(self, row: Row) -> tuple[float, float] | None:
        """Return the interval that the row's repetitions spread over: quartiles (``step_low_ms``), or half a range over
        seeds; None if it is not recorded."""
        if len(self.key) > 1:
            return None
        stem, _, unit = self.key[0].rpartition("_")
        low, high = number(row.get(f"{stem}_low_{unit}")), number(row.get(f"{stem}_high_{unit}"))
        if low is not None and high is not None:
            return low, high
        value, spread = self.value(row), number(row.get(f"{self.key[0]}_spread"))
        return None if value is None or spread is None else (value - spread, value + spread)

    def change(self, one: Row, other: Row, higher_is_better: bool) -> "Change":
        """Return the change of the figure from one row to the other, judged by their noise."""
        a, b = self.value(one), self.value(other)
        if a is None or b is None:
            return Change(a, b, UNKNOWN)
        first, second = self.interval(one), self.interval(other)
        if first is not None and second is not None:
            changed = first[1] < second[0] or second[1] < first[0]
        else:
            changed = abs(b - a) > self.noise * abs(a)
        sign = self.sign or (1 if higher_is_better else -1)
        return Change(a, b, (BETTER if sign * (b - a) > 0 else WORSE) if changed else SAME)


MEASURES = {
    "step": (
        Measure(("step_ms",), "step", 0.1, time=True),
        Measure(("exposed_ms",), "exposed", 0.1, time=True),
        Measure(("sent_bytes",), "sent", 0.01),
    ),
    "train": (
        Measure(("quality",), "quality", 0.0, sign=0),
        Measure(("seconds_to_target",), "to target", 0.1, time=True),
        Measure(("sent_bytes_per_step",), "sent", 0.01),
        Measure(("step_ms",), "step", 0.1, time=True),
    ),
    "kernels": (
        Measure(("encode_ms", "decode_ms"), "codec", 0.1, time=True),
        Measure(("encode_ms",), "encode", 0.1, time=True),
        Measure(("decode_ms",), "decode", 0.1, time=True),
        Measure(("vnmse",), "vNMSE", 0.05),
    ),
}
"""Measures of each kind of results; a row's verdict depends on the first one."""
IDENTITY = {
    "step": ("engine", "ranks", "bandwidth", "name"),
    "train": ("ranks", "bandwidth", "optimizer", "method"),
    "kernels": ("tensor", "method"),
}
"""Keys that identify the rows of each kind; the last one is the row's name."""


@dataclasses.dataclass(frozen=True)
class Change:
    """Figure of one row in both results.

    Attributes:
        a, b: its value in the first and the second results; None if unknown.
        verdict: "better", "worse", "same", or "unknown" if a value or its noise is.
    """

    a: float | None
    b: float | None
    verdict: str

    @property
    def ratio(self) -> float | None:
        """Ratio b / a."""
        return None if self.a is None or self.b is None or not self.a else self.b / self.a


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Comparison of two results.

    Attributes:
        kind: the kind of both.
        rows: (identity, changes in the order of the kind's measures).
        only_a, only_b: identities of rows that the other one lacks.
        differences: differences of machine, versions and settings: (what, name, in a, in b).
    """

    kind: str
    rows: list[tuple[Key, tuple[Change, ...]]]
    only_a: list[Key]
    only_b: list[Key]
    differences: list[tuple[str, str, Any, Any]]

    def slower(self, percent: float) -> list[tuple[Key, float]]:
        """Return rows whose time rose by more than so many percent, and by more than noise: (identity, b / a).

        The time is that of a step, and of kernels that of encoding and decoding together.
        """
        worse = [(key, change.ratio) for key, change in self._times() if change.verdict == WORSE]
        return [(key, ratio) for key, ratio in worse if ratio is not None and ratio > 1 + percent / 100]

    def lost(self) -> list[Key]:
        """Return rows whose time b lacks, so that they might have become slower."""
        return [*self.only_a, *(key for key, change in self._times() if change.a is not None and change.b is None)]

    def _times(self) -> list[tuple[Key, Change]]:
        return [(key, changes[3 if self.kind == "train" else 0]) for key, changes in self.rows]


def compare(a: Results, b: Results) -> Comparison:
    """Compare two results, whose rows are matched by their identities.

    A change counts where it exceeds the noise: the quartiles of the two do not overlap, or the spreads over seeds do
    not; where neither is recorded, where it exceeds a tenth (times), a twentieth (vNMSE) or a hundredth (bytes).

    Raises:
        ConfigError: they are of different kinds, lack keys that identify rows, or have no row in common.

    >>> a = Results("kernels", {}, [{"tensor": "gaussian", "method": "topk", "encode_ms": 4, "decode_ms": 1}])
    >>> b = Results("kernels", {}, [{"tensor": "gaussian", "method": "topk", "encode_ms": 2, "decode_ms": 1}])
    >>> compare(a, b).rows[0]
    (('gaussian', 'topk'), (Change(a=5.0, b=3.0, verdict='better'), ...
    """
    if a.kind != b.kind:
        raise ConfigError(f"results of different kinds cannot be compared: the first are of {a.kind}, not of {b.kind}")
    first, second = _by_identity(a), _by_identity(b)
    rows = [(key, _changes(row, second[key], a, b)) for key, row in first.items() if key in second]
    if not rows:
        raise ConfigError(f"the two results have no row in common: rows are matched by {', '.join(IDENTITY[a.kind])}")
    facts = {
        "machine": (a.machine, b.machine),
        "versions": (a.versions, b.versions),
        "settings": (_settings(a), _settings(b)),
    }
    differences = [
        (what, key, one.get(key), other.get(key))
        for what, (one, other) in facts.items()
        for key in dict.fromkeys([*one, *other])
        if one.get(key) != other.get(key)
    ]
    only_a, only_b = ([key for key in one if key not in other] for one, other in ((first, second), (second, first)))
    return Comparison(a.kind, rows, only_a, only_b, differences)


def sentence(comparison: Comparison) -> str:
    """Return the numbers of rows that changed, in words.

    >>> rows = [((i,), (Change(1, 2, verdict),)) for i, verdict in enumerate(["better", "worse", "same", "same"])]
    >>> sentence(Comparison("step", rows, [], [], []))
    '1 faster, 1 slower, 2 unchanged within the quartiles'
    """
    kind = comparison.kind
    better, worse = ("faster", "slower") if MEASURES[kind][0].time else ("better", "worse")
    noise = {"step": "the quartiles", "train": "the spread over seeds", "kernels": "10 %"}[kind]
    unknown = "that cannot be judged (one seed)" if kind == "train" else "that cannot be judged"
    words = {BETTER: better, WORSE: worse, SAME: f"unchanged within {noise}", UNKNOWN: unknown}
    verdicts = [changes[0].verdict for _, changes in comparison.rows]
    counts = {verdict: verdicts.count(verdict) for verdict in words}
    return ", ".join(f"{count} {words[verdict]}" for verdict, count in counts.items() if count or verdict != UNKNOWN)


def _by_identity(results: Results) -> dict[Key, Row]:
    results.require_keys(IDENTITY[results.kind])
    return {tuple(row[key] for key in IDENTITY[results.kind]): row for row in results.rows}


def _changes(one: Row, other: Row, a: Results, b: Results) -> tuple[Change, ...]:
    changes = [measure.change(one, other, a.settings.get("higher_is_better", True)) for measure in MEASURES[a.kind]]
    if a.kind == "train" and min(len(each.settings.get("seeds") or []) for each in (a, b)) < 2:
        changes[0] = dataclasses.replace(changes[0], verdict=UNKNOWN)  # qualities of one seed have no spread
    return tuple(changes)


def _settings(results: Results) -> dict[str, Any]:
    return {key: value for key, value in results.settings.items() if key not in ("verdict", "shortfalls", "copy_gbps")}
