"""Verdicts on cuts of a model into pipeline stages, and tables of them."""

from collections.abc import Sequence
from functools import partial
from typing import TypedDict

from rich.console import Console
from rich.table import Table

from grace.bench.common.results import Results, Row
from grace.bench.common.tables import Columns, table
from grace.bench.common.text import digits
from grace.bench.report.scenarios import show_scenarios
from grace.pipeline.planning.baselines import BY_HAND

CHOSEN = "planned"
"""Name of the cut that the search finds."""


class Cut(TypedDict):
    """Cut of a model that was measured; ``ends`` are the last nodes of its stages but the last one."""

    name: str
    replicas: list[int]
    ends: list[str]
    predicted_ms: float
    measured_ms: float
    steps: int


class NamedCut(Cut):
    """Cut with all its names."""

    names: list[str]


def relative_error(cut: Cut) -> float:
    """Return the relative error of a prediction; positive if it is too long.

    >>> round(relative_error({"predicted_ms": 9.0, "measured_ms": 10.0}), 3)
    -0.1
    """
    return cut["predicted_ms"] / cut["measured_ms"] - 1


def merged(cuts: Sequence[Cut]) -> list[NamedCut]:
    """Return each cut once, with all its names; of the same cut measured twice the faster one counts, since
    disturbances make steps longer only."""
    found = dict[tuple[tuple[str, ...], tuple[int, ...]], NamedCut]()
    for cut in cuts:
        key = tuple(cut["ends"]), tuple(cut["replicas"])
        known = found.setdefault(key, {**cut, "names": []})
        known["names"].append(cut["name"])
        known["measured_ms"] = min(known["measured_ms"], cut["measured_ms"])
    return list(found.values())


def judge(cuts: Sequence[Cut]) -> Row:
    """Return the verdict on the cuts of a scenario, as values of its row. A cut that has several names counts once.

    - ``step_ms``, ``error``: the planned cut's step, and its predicted over its measured step, minus 1.
    - ``fastest``, ``regret``: the name of the fastest of all measured cuts, and the planned over it, minus 1.
    - ``median_error``: the median over all cuts of the error without its sign.
    - ``by_hand``: milliseconds by the name of a rule; None where its cut is not possible.
    """
    found = merged(cuts)
    by_name = {name: cut for cut in found for name in cut["names"]}
    planned, best = by_name[CHOSEN], min(found, key=lambda cut: cut["measured_ms"])
    errors = sorted(abs(relative_error(cut)) for cut in found)
    return {
        "step_ms": planned["measured_ms"],
        "error": relative_error(planned),
        "fastest": best["names"][0],
        "regret": planned["measured_ms"] / best["measured_ms"] - 1,
        "median_error": errors[len(errors) // 2],
        "by_hand": {name: by_name[name]["measured_ms"] if name in by_name else None for name in BY_HAND},
    }


def verdict(scenario: Row) -> str:
    """Return the verdict on a scenario, in a sentence or two."""
    regret = "The planned cut is the fastest"
    if scenario["regret"]:
        regret = f"The planned cut takes {scenario['regret']:.1%} longer than the fastest, {scenario['fastest']}"
    return f"{regret}; predicted {scenario['error']:+.0%}, all cuts {scenario['median_error']:.0%} off in the median."


def show(console: Console, results: Results) -> None:
    """Show the cuts of each scenario, then all scenarios."""
    columns: Columns[Row] = {
        "planned": lambda row: _planned_cut(merged(row["cuts"])),
        "step\nms": lambda row: digits(row["step_ms"]),
        "predicted": lambda row: f"{row['error']:+.0%}",
        "regret": lambda row: f"{row['regret']:.1%}",
        **{name.replace(" ", "\n"): partial(_to_planned, name) for name in BY_HAND},
    }
    show_scenarios(console, results, _cuts_table, verdict, columns)


def _cuts_table(scenario: Row) -> Table:
    """Return the table of a scenario's cuts, with predicted and measured steps; the planned one is bold."""
    columns: Columns[NamedCut] = {
        "cut": lambda cut: ", ".join(cut["names"]),
        "replicas": lambda cut: "-".join(map(str, cut["replicas"])),
        "predicted\nms": lambda cut: digits(cut["predicted_ms"]),
        "measured\nms": lambda cut: digits(cut["measured_ms"]),
        "error": lambda cut: f"{relative_error(cut):+.0%}",
        "to the\nplanned": lambda cut: f"{cut['measured_ms'] / scenario['step_ms']:.2f}",
    }
    return table(merged(scenario["cuts"]), columns, style=lambda cut: "bold" if CHOSEN in cut["names"] else "")


def _planned_cut(cuts: Sequence[NamedCut]) -> str:
    cut = next(cut for cut in cuts if CHOSEN in cut["names"])
    named = next((name for name in cut["names"] if name.startswith("after ")), "-".join(cut["ends"]))
    return "-".join(map(str, cut["replicas"])) + (f", {named}" if cut["ends"] else "")


def _to_planned(name: str, row: Row) -> str:
    """Return the step of a cut by hand over that of the planned one."""
    ms = row["by_hand"][name]
    return "-" if ms is None else f"{ms / row['step_ms']:.2f}"
