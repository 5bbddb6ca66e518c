"""``grace bench compare``: two results side by side."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grace.bench.common.results import Results, load
from grace.bench.common.text import clean, digits, of_ranks, of_rate
from grace.bench.compare.compare import (
    BETTER,
    IDENTITY,
    MEASURES,
    SAME,
    UNKNOWN,
    WORSE,
    Change,
    Comparison,
    Key,
    sentence,
)
from grace.bench.compare.compare import compare as compare_results
from grace.errors import ConfigError

STYLES = {BETTER: "green", WORSE: "red", SAME: "", UNKNOWN: "dim"}


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
    found = compare_results(first, second)
    console = Console(highlight=False, markup=False)
    _files(console, (a, b), (first, second))
    _differences(console, found)
    for where, rows in _groups(found).items():
        console.print(f"\n{where}: {_about(found.kind, first)}", style="bold")
        console.print(_table(found.kind, rows, first))
    for name, keys in (("a", found.only_a), ("b", found.only_b)):
        for key in keys:
            console.print(f"only in {name}: {_describe(found.kind, key)}", soft_wrap=False)
    console.print(f"{sentence(found)}.")
    if fail_if_slower is not None:
        complaints = [
            *(
                f"slower by {100 * (ratio - 1):.1f} %: {_describe(found.kind, key)}"
                for key, ratio in found.slower(fail_if_slower)
            ),
            *(f"not measured in b: {_describe(found.kind, key)}" for key in found.lost()),
        ]
        for complaint in complaints:
            print(f"grace bench compare: {complaint}", file=sys.stderr)
        raise typer.Exit(bool(complaints))


def _files(console: Console, paths: tuple[Path, Path], results: tuple[Results, Results]) -> None:
    for name, path, each in zip("ab", paths, results, strict=True):
        state = "" if each.complete else ", incomplete: interrupted"
        console.print(f"{name}: {path} ({each.kind}, {each.when}{state})")


def _differences(console: Console, found: Comparison) -> None:
    if any(what == "machine" for what, *_ in found.differences):
        console.print("Warning: measured on different machines, so times say little about the code.", style="yellow")
    for what, name, one, other in found.differences:
        console.print(f"{what}: {clean(name)}: {_plain(one)} in a, {_plain(other)} in b")
    if not found.differences:
        console.print("The machine, the versions and the settings are the same.")


def _groups(found: Comparison) -> dict[str, list[tuple[str, tuple[Change, ...]]]]:
    """Return rows by their whole identity but the name."""
    groups: dict[str, list[tuple[str, tuple[Change, ...]]]] = {}
    for key, changes in found.rows:
        groups.setdefault(_where(found.kind, key), []).append((clean(key[-1]), changes))
    return groups


def _about(kind: str, results: Results) -> str:
    """Return the meaning of columns a and b."""
    if kind != "train":
        return {"step": "time of a step in ms", "kernels": "encoding and decoding in ms"}[kind]
    unit = results.settings.get("unit")
    return clean(results.settings.get("metric") or "quality") + (f" in {clean(unit)}" if unit else "")


def _table(kind: str, rows: list[tuple[str, tuple[Change, ...]]], first: Results) -> Table:
    main, *others = MEASURES[kind]
    scale = (first.settings.get("scale") or 1) if kind == "train" else 1
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(IDENTITY[kind][-1], overflow="fold", min_width=16)
    for name in "ab":
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("b / a", justify="right", no_wrap=True)
    table.add_column("")
    for measure in others:
        table.add_column(f"{measure.title}\nb / a", justify="right", no_wrap=True)
    words = {BETTER: "faster", WORSE: "slower"} if main.time else {BETTER: "better", WORSE: "worse"}
    for name, (change, *rest) in rows:
        style = STYLES[change.verdict]
        table.add_row(
            Text(name),
            *(digits(None if value is None else value * scale) for value in (change.a, change.b)),
            Text(_ratio(change), style),
            Text({**words, UNKNOWN: "?"}.get(change.verdict, ""), style),
            *(
                Text(_ratio(each) + ("*" if each.verdict in (BETTER, WORSE) else " "), STYLES[each.verdict])
                for each in rest
            ),
        )
    table.caption = (
        "*: by more than noise"
        if any(change.verdict in (BETTER, WORSE) for _, (_, *rest) in rows for change in rest)
        else None
    )
    table.caption_justify = "left"
    return table


def _ratio(change: Change) -> str:
    return digits(change.ratio) if change.ratio is None else f"{change.ratio:.3f}"


def _describe(kind: str, key: Key) -> str:
    where = _where(kind, key)
    return clean(key[-1]) + (f" ({where})" if where else "")


def _where(kind: str, key: Key) -> str:
    facts: dict[str, Any] = dict(zip(IDENTITY[kind][:-1], key[:-1], strict=True))
    parts = []
    for name, value in facts.items():
        if name == "bandwidth":
            parts.append(of_rate(value))
        elif name == "ranks":
            parts.append(of_ranks(value))
        else:
            parts.append(f"{clean(value)} tensor" if name == "tensor" else clean(value))
    return ", ".join(parts)


def _plain(value: Any) -> str:
    return "unknown" if value is None else clean(value) if isinstance(value, str) else clean(json.dumps(value))
