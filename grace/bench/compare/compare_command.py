"""``grace bench compare``: two results side by side."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grace.bench.common.results import Results, load
from grace.bench.common.tables import figures_table
from grace.bench.common.text import clean, digits, of_ranks, of_rate
from grace.bench.compare import comparison
from grace.bench.compare.comparison import BETTER, SAME, UNKNOWN, WORSE, Change, Comparison, Key
from grace.errors import ConfigError

STYLES = {BETTER: "green", WORSE: "red", SAME: "", UNKNOWN: "dim"}
CHANGED = (BETTER, WORSE)
WORDS = {
    True: {BETTER: "faster", WORSE: "slower", UNKNOWN: "?"},
    False: {BETTER: "better", WORSE: "worse", UNKNOWN: "?"},
}
"""Verdicts in words, of times and of other figures."""
MEANINGS = {"step": "time of a step in ms", "kernels": "encoding and decoding in ms"}
"""Columns a and b; of training they are the task's metric."""


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
    """Compare two results of kernels, step or train, row by row.

    Rows are matched by method and by where it was measured (tensor; or
    bandwidth, ranks, engine). Ratios are b / a. A change counts where the
    quartiles of the two do not overlap, or for quality the spreads over
    seeds; where there are neither, where it exceeds a tenth (times), a
    twentieth (vNMSE) or a hundredth (bytes).
    """
    if fail_if_slower is not None and not fail_if_slower >= 0:
        raise ConfigError(f"--fail-if-slower is a number of percent, 0 or more, not {fail_if_slower:g}")
    first, second = load(a), load(b)
    found = comparison.compare(first, second)
    console = Console(highlight=False, markup=False)
    for name, path, each in (("a", a, first), ("b", b, second)):
        state = "" if each.complete else ", incomplete: interrupted"
        console.print(f"{name}: {path} ({each.kind}, {each.when}{state})")
    if any(what == "machine" for what, *_ in found.differences):
        console.print("Warning: measured on different machines, so times say little about the code.", style="yellow")
    for what, name, one, other in found.differences:
        console.print(f"{what}: {clean(name)}: {_plain(one)} in a, {_plain(other)} in b")
    if not found.differences:
        console.print("The machine, the versions and the settings are the same.")
    for where, rows in _groups(found).items():
        console.print(f"\n{where}: {_about(found.kind, first)}", style="bold")
        console.print(_table(found.kind, rows, first))
    for name, keys in (("a", found.only_a), ("b", found.only_b)):
        for key in keys:
            console.print(f"only in {name}: {_describe(found.kind, key)}", soft_wrap=False)
    console.print(f"{comparison.sentence(found)}.")
    if fail_if_slower is not None:
        complaints = {key: f"slower by {100 * (ratio - 1):.1f} %" for key, ratio in found.slower(fail_if_slower)}
        complaints |= dict.fromkeys(found.lost(), "not measured in b")
        for key, complaint in complaints.items():
            print(f"grace bench compare: {complaint}: {_describe(found.kind, key)}", file=sys.stderr)
        raise typer.Exit(bool(complaints))


def _groups(found: Comparison) -> dict[str, list[tuple[str, tuple[Change, ...]]]]:
    """Return rows by their whole identity but the name."""
    groups: dict[str, list[tuple[str, tuple[Change, ...]]]] = {}
    for key, changes in found.rows:
        groups.setdefault(_where(found.kind, key), []).append((clean(key[-1]), changes))
    return groups


def _about(kind: str, results: Results) -> str:
    """Return the meaning of columns a and b."""
    metric, unit = results.settings.get("metric") or "quality", results.settings.get("unit")
    return MEANINGS[kind] if kind != "train" else clean(metric) + (f" in {clean(unit)}" if unit else "")


def _table(kind: str, rows: list[tuple[str, tuple[Change, ...]]], first: Results) -> Table:
    main, *others = comparison.MEASURES[kind]
    scale = (first.settings.get("scale") or 1) if kind == "train" else 1
    headers = ["a", "b", "b / a", "", *(f"{measure.title}\nb / a" for measure in others)]
    table = figures_table(comparison.IDENTITY[kind][-1], headers)
    table.columns[0].min_width = 16
    verdicts = WORDS[main.time]
    for name, (change, *rest) in rows:
        style = STYLES[change.verdict]
        table.add_row(
            Text(name),
            *(digits(None if value is None else value * scale) for value in (change.a, change.b)),
            Text(_ratio(change), style),
            Text(verdicts.get(change.verdict, ""), style),
            *(Text(_ratio(each) + ("*" if each.verdict in CHANGED else " "), STYLES[each.verdict]) for each in rest),
        )
    if any(each.verdict in CHANGED for _, (_, *rest) in rows for each in rest):
        table.caption = "*: by more than noise"
    table.caption_justify = "left"
    return table


def _ratio(change: Change) -> str:
    return digits(change.ratio) if change.ratio is None else f"{change.ratio:.3f}"


def _describe(kind: str, key: Key) -> str:
    where = _where(kind, key)
    return clean(key[-1]) + (f" ({where})" if where else "")


def _where(kind: str, key: Key) -> str:
    forms = {"bandwidth": of_rate, "ranks": of_ranks, "tensor": lambda value: f"{clean(value)} tensor"}
    names = comparison.IDENTITY[kind][:-1]
    return ", ".join(forms.get(name, clean)(value) for name, value in zip(names, key[:-1], strict=True))


def _plain(value: Any) -> str:
    return "unknown" if value is None else clean(value) if isinstance(value, str) else clean(json.dumps(value))
