"""``grace bench compare``: two results of the same kind, row by row, with a test whether a change exceeds noise."""

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from grace.bench.common.quality import better, scale
from grace.bench.common.results import KINDS, Results, Row, Settings, load, naming_damage
from grace.bench.common.tables import Columns, table
from grace.bench.common.text import clean, digits, number, of_ranks, of_rate
from grace.errors import ConfigError

Key = tuple[str | float | None, ...]
BETTER, WORSE, SAME, UNKNOWN = "better", "worse", "same", "unknown"
STYLES = {BETTER: "green", WORSE: "red", SAME: "", UNKNOWN: "dim"}


@dataclasses.dataclass(frozen=True)
class Measure:
    """Figure that rows are compared by.

    Attributes:
        keys: the keys under which rows have it; the values of several are added up.
        title: the title of its column.
        noise: relative change up to which it counts as unchanged where rows have no spread of it.
        time: True if it is a time, so that worse is called slower.
    """

    keys: tuple[str, ...]
    title: str
    noise: float
    time: bool = False

    def value(self, row: Row) -> float | None:
        """Return the figure of a row; None if any part of it is unknown."""
        known = [value for value in (number(row.get(key)) for key in self.keys) if value is not None]
        return sum(known) if len(known) == len(self.keys) else None

    def interval(self, row: Row) -> tuple[float, float] | None:
        """Return the interval that the row's repetitions spread over: quartiles (``step_low_ms``), or half a range over
        seeds; None if it is not recorded."""
        stem, _, unit = self.keys[0].rpartition("_")
        low, high = number(row.get(f"{stem}_low_{unit}")), number(row.get(f"{stem}_high_{unit}"))
        if low is not None and high is not None:
            return low, high
        value, spread = self.value(row), number(row.get(f"{self.keys[0]}_spread"))
        return None if value is None or spread is None else (value - spread, value + spread)

    def change(self, one: Row, other: Row, sign: int = -1) -> "Change":
        """Return the change from one row to the other, judged by their noise; sign is 1 where higher is better."""
        a, b = self.value(one), self.value(other)
        if a is None or b is None:
            return Change(a, b, UNKNOWN)
        first, second = self.interval(one), self.interval(other)
        if first is not None and second is not None:  # by noise that was measured, else by what is usual
            changed = first[1] < second[0] or second[1] < first[0]
        else:
            changed = abs(b - a) > self.noise * abs(a)
        return Change(a, b, (BETTER if sign * (b - a) > 0 else WORSE) if changed else SAME)


STEP, SENT = Measure(("step_ms",), "step", 0.1, time=True), "sent"
MEASURES = {
    "step": (STEP, Measure(("exposed_ms",), "exposed", 0.1, time=True), Measure(("sent_bytes",), SENT, 0.01)),
    "train": (
        Measure(("quality",), "quality", 0.0),
        Measure(("seconds_to_target",), "to target", 0.1, time=True),
        Measure(("sent_bytes_per_step",), SENT, 0.01),
        STEP,
    ),
    "kernels": (
        Measure(("encode_ms", "decode_ms"), "codec", 0.1, time=True),
        Measure(("encode_ms",), "encode", 0.1, time=True),
        Measure(("decode_ms",), "decode", 0.1, time=True),
        Measure(("vnmse",), "vNMSE", 0.05),
    ),
}
"""Measures of each kind of results; a row's verdict depends on the first one."""


@dataclasses.dataclass(frozen=True)
class Change:
    """Figure of one row in both results: its values, None if unknown, and the verdict."""

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
        rows: changes in the order of the kind's measures, by the rows' identities.
        only_a, only_b: identities of rows that the other one lacks.
        differences: differences of machine, versions and settings: (what, name, in a, in b).
    """

    kind: str
    rows: dict[Key, tuple[Change, ...]]
    only_a: list[Key]
    only_b: list[Key]
    differences: list[tuple[str, str, object, object]]

    def complaints(self, percent: float) -> dict[Key, str]:
        """Return rows whose time rose by more than so many percent and by more than noise, or is missing in b, with the
        complaint. The time is that of a step, and of kernels that of encoding and decoding together."""
        times = {key: changes[3 if self.kind == "train" else 0] for key, changes in self.rows.items()}
        found = {}
        for key, time in times.items():
            if time.verdict == WORSE and time.ratio is not None and time.ratio > 1 + percent / 100:
                found[key] = f"slower by {100 * (time.ratio - 1):.1f} %"
        lost = [*self.only_a, *(key for key, time in times.items() if time.a is not None and time.b is None)]
        return found | dict.fromkeys(lost, "not measured in b")

    def describe(self, key: Key) -> str:
        """Return the name of a row, and where it was measured."""
        where = self.where(key)
        return clean(key[-1]) + (f" ({where})" if where else "")

    def where(self, key: Key) -> str:
        """Return where a row was measured."""
        forms = {"bandwidth": of_rate, "ranks": of_ranks, "tensor": lambda value: f"{clean(value)} tensor"}
        names = KINDS[self.kind][:-1]
        return ", ".join(forms.get(name, clean)(value) for name, value in zip(names, key[:-1], strict=True))

    @property
    def verdict_texts(self) -> dict[str, str]:
        """Texts of the verdicts."""
        main, noise = MEASURES[self.kind][0], {"step": "the quartiles", "train": "the spread over seeds"}
        unknown = "that cannot be judged" + (" (one seed)" if self.kind == "train" else "")
        changed = {BETTER: "faster", WORSE: "slower"} if main.time else {BETTER: BETTER, WORSE: WORSE}
        return {**changed, SAME: f"unchanged within {noise.get(self.kind, '10 %')}", UNKNOWN: unknown}

    def __str__(self) -> str:
        verdicts = [changes[0].verdict for changes in self.rows.values()]
        counts = {verdict: verdicts.count(verdict) for verdict in self.verdict_texts}
        known = {verdict: count for verdict, count in counts.items() if count or verdict != UNKNOWN}
        return ", ".join(f"{count} {self.verdict_texts[verdict]}" for verdict, count in known.items())


def compare_results(a: Results, b: Results) -> Comparison:
    """Compare two results, whose rows are matched by their identities."""
    if a.kind != b.kind:
        raise ConfigError(f"results of different kinds cannot be compared: the first are of {a.kind}, not of {b.kind}")
    first, second = _by_identity(a), _by_identity(b)
    rows = {key: _changes(row, second[key], a, b) for key, row in first.items() if key in second}
    if not rows:
        raise ConfigError(f"the two results have no row in common: rows are matched by {', '.join(KINDS[a.kind])}")
    differences = [
        (what, key, one.get(key), other.get(key))
        for what in ("machine", "versions", "settings")
        for one, other in [(getattr(a, what), getattr(b, what))]
        for key in dict.fromkeys([*one, *other])
        if one.get(key) != other.get(key) and key not in ("verdict", "shortfalls", "copy_gbps")
    ]
    only_a, only_b = [key for key in first if key not in second], [key for key in second if key not in first]
    return Comparison(a.kind, rows, only_a, only_b, differences)


def _by_identity(results: Results) -> dict[Key, Row]:
    return {tuple(row[key] for key in KINDS[results.kind]): row for row in results.rows}


def _changes(one: Row, other: Row, a: Results, b: Results) -> tuple[Change, ...]:
    changes = [measure.change(one, other) for measure in MEASURES[a.kind]]
    if a.kind == "train":
        changes[0] = MEASURES["train"][0].change(one, other, better(a.settings))
        if min(len(each.settings.get("seeds") or []) for each in (a, b)) < 2:
            changes[0] = dataclasses.replace(changes[0], verdict=UNKNOWN)  # qualities of one seed have no spread
    return tuple(changes)


def compare(
    a: Annotated[Path, typer.Argument(help="results.json, or a folder with one: what was before.")],
    b: Annotated[Path, typer.Argument(help="Another one of the same kind: what is now.")],
    fail_if_slower: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT",
            help="Exit with 1 if a row of b is slower by more than so many percent and than noise, or missing.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Compare two results of the same benchmark, row by row.

    Rows are matched by method, and by where it was measured (tensor; or
    bandwidth, ranks, engine). Ratios are b / a. A change counts where the
    quartiles of the two do not overlap, or for quality the spreads over seeds;
    where there are neither, where it exceeds a tenth (times), a twentieth
    (vNMSE) or a hundredth (bytes).
    """
    if fail_if_slower is not None and not fail_if_slower >= 0:
        raise ConfigError(f"--fail-if-slower is a number of percent, 0 or more, not {fail_if_slower:g}")
    first, second = load(a), load(b)
    with naming_damage(a, b):
        found = compare_results(first, second)
        _print_comparison(found, {"a": (a, first), "b": (b, second)}, Console(highlight=False, markup=False))
        complaints = {} if fail_if_slower is None else found.complaints(fail_if_slower)
    for key, complaint in complaints.items():
        print(f"grace bench compare: {complaint}: {found.describe(key)}", file=sys.stderr)
    raise typer.Exit(bool(complaints))


def _print_comparison(found: Comparison, files: dict[str, tuple[Path, Results]], console: Console) -> None:
    """Print how two results differ, their tables, and the verdict."""
    for name, (path, each) in files.items():
        state = "" if each.complete else ", incomplete: interrupted"
        console.print(f"{name}: {path} ({each.kind}, {each.when}{state})")
    if any(what == "machine" for what, *_ in found.differences):
        console.print("Warning: measured on different machines, so times say little about the code.", style="yellow")
    for what, name, *both in found.differences:
        one, other = ("unknown" if value is None else clean(json.dumps(value)).strip('"') for value in both)
        console.print(f"{what}: {clean(name)}: {one} in a, {other} in b")
    if not found.differences:
        console.print("The machine, the versions and the settings are the same.")
    _print_tables(found, files["a"][1].settings, console)
    for name, keys in (("a", found.only_a), ("b", found.only_b)):
        for key in keys:
            console.print(f"only in {name}: {found.describe(key)}")
    console.print(f"{found}.")


def _print_tables(found: Comparison, settings: Settings, console: Console) -> None:
    """Print a table for each place where rows were measured."""
    main, *others = MEASURES[found.kind]
    task = settings if found.kind == "train" else {}
    factor, metric = scale(task), task.get("metric") or main.title
    words = {**found.verdict_texts, SAME: "", UNKNOWN: "?"}
    columns: Columns[tuple[Key, tuple[Change, ...]]] = {
        KINDS[found.kind][-1]: lambda row: str(row[0][-1]),
        f"{metric}\na": lambda row: digits(None if row[1][0].a is None else row[1][0].a * factor),
        "\nb": lambda row: digits(None if row[1][0].b is None else row[1][0].b * factor),
        "\nb / a": lambda row: _ratio(row[1][0]),
        "": lambda row: words[row[1][0].verdict],
    }
    columns |= {f"{measure.title}\nb / a": partial(_marked, i) for i, measure in enumerate(others, start=1)}
    places = dict[str, list[tuple[Key, tuple[Change, ...]]]]()
    for key, changes in found.rows.items():
        places.setdefault(found.where(key), []).append((key, changes))
    for where, rows in places.items():
        console.print(Text(f"\n{where}", "bold"))
        console.print(table(rows, columns, style=lambda row: STYLES[row[1][0].verdict]))
    console.print("ms; *: by more than noise" if main.time else "*: by more than noise", style="dim")


def _marked(number: int, row: tuple[Key, tuple[Change, ...]]) -> str:
    """Return the ratio of a change, marked where it exceeds noise."""
    change = row[1][number]
    return _ratio(change) + ("*" if change.verdict in (BETTER, WORSE) else "")


def _ratio(change: Change) -> str:
    return digits(None) if change.ratio is None else f"{change.ratio:.3f}"
