"""Verdicts on cuts of a model into pipeline stages, and tables of them."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypedDict

from rich.table import Table

from grace.bench.common.tables import Columns, table
from grace.bench.common.tables import markdown as markdown_table
from grace.bench.common.text import digits
from grace.bench.ranks.scenario import Scenario
from grace.bench.ranks.sweep import PLACE
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


class Verdict(NamedTuple):
    """Verdict on a scenario.

    Attributes:
        planned: milliseconds of the planned cut's step.
        best: the fastest of all measured cuts.
        regret: planned over best, minus 1.
        error: predicted over measured step of the planned cut, minus 1.
        median: median over all cuts of the error without its sign.
        by_hand: milliseconds by the name of a rule; None where its cut is not possible.
    """

    planned: float
    best: NamedCut
    regret: float
    error: float
    median: float
    by_hand: dict[str, float | None]


def relative_error(cut: Cut) -> float:
    """Return the relative error of a prediction; positive if it is too long.

    >>> round(relative_error({"predicted_ms": 9.0, "measured_ms": 10.0}), 3)
    -0.1
    """
    return cut["predicted_ms"] / cut["measured_ms"] - 1


def judge(scenario: Scenario) -> Verdict:
    """Return the verdict on a scenario. A cut that has several names counts once."""
    cuts = merged(scenario["cuts"])
    by_name = {name: cut for cut in cuts for name in cut["names"]}
    planned = by_name[CHOSEN]
    best = min(cuts, key=lambda cut: cut["measured_ms"])
    errors = sorted(abs(relative_error(cut)) for cut in cuts)
    by_hand = {name: by_name[name]["measured_ms"] if name in by_name else None for name in BY_HAND}
    regret = planned["measured_ms"] / best["measured_ms"] - 1
    return Verdict(planned["measured_ms"], best, regret, relative_error(planned), errors[len(errors) // 2], by_hand)


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


def cuts_table(scenario: Scenario) -> Table:
    """Return the table of a scenario's cuts, with predicted and measured steps; the planned one is bold."""
    planned = judge(scenario).planned
    columns: Columns[NamedCut] = {
        "cut": lambda cut: ", ".join(cut["names"]),
        "replicas": lambda cut: "-".join(map(str, cut["replicas"])),
        "predicted\nms": lambda cut: digits(cut["predicted_ms"]),
        "measured\nms": lambda cut: digits(cut["measured_ms"]),
        "error": lambda cut: f"{relative_error(cut):+.0%}",
        "to the\nplanned": lambda cut: f"{cut['measured_ms'] / planned:.2f}",
    }
    return table(merged(scenario["cuts"]), columns, style=lambda cut: "bold" if CHOSEN in cut["names"] else "")


def verdict_words(scenario: Scenario) -> str:
    """Return the verdict on a scenario, in a sentence or two."""
    found = judge(scenario)
    if found.regret == 0:
        regret = "The planned cut is the fastest"
    else:
        regret = f"The planned cut takes {found.regret:.1%} longer than the fastest, {found.best['names'][0]}"
    return f"{regret}; predicted {found.error:+.0%}, all cuts {found.median:.0%} off in the median."


def markdown(scenarios: Sequence[Scenario]) -> str:
    """Return the table of all scenarios in Markdown, one line each."""
    found = [{**scenario, "cuts": merged(scenario["cuts"]), "verdict": judge(scenario)} for scenario in scenarios]
    columns: Columns[Scenario] = {
        **PLACE,
        "compressor": lambda row: row["compressor"],
        "cuts": lambda row: str(len(row["cuts"])),
        "planned": lambda row: _planned_cut(row["cuts"]),
        "step ms": lambda row: digits(row["verdict"].planned),
        "predicted": lambda row: f"{row['verdict'].error:+.0%}",
        "regret": lambda row: f"{row['verdict'].regret:.1%}",
        **{name: partial(_to_planned, name) for name in BY_HAND},
    }
    return markdown_table(found, columns)


def _planned_cut(cuts: Sequence[NamedCut]) -> str:
    cut = next(cut for cut in cuts if CHOSEN in cut["names"])
    named = next((name for name in cut["names"] if name.startswith("after ")), "-".join(cut["ends"]))
    return "-".join(map(str, cut["replicas"])) + (f", {named}" if cut["ends"] else "")


def _to_planned(name: str, row: Scenario) -> str:
    """Return the step of a cut by hand over that of the planned one."""
    ms = row["verdict"].by_hand[name]
    return "-" if ms is None else f"{ms / row['verdict'].planned:.2f}"
