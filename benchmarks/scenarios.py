"""Measurements whose rows are scenarios: a model over a number of ranks and a link, in which several plans compete."""

import argparse
import json
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from grace.bench.common import options, text
from grace.bench.common.progress import ScenarioBars
from grace.bench.common.results import Row, machine, versions
from grace.bench.ranks.scenario import Scenario, run_scenario
from grace.core.atomic_files import atomic_write
from grace.errors import GraceError

ROOT = Path(__file__).parent.parent
WHICH = ("models", "bandwidth", "ranks", "out")
"""Options that say which scenarios there are, and where their rows go, but not how they are measured."""


def parser_of(description: str | None, models: str, ranks: str, out: str, seconds: float) -> argparse.ArgumentParser:
    """Return a parser with the options of all such measurements."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=models, help="or module:function; separated by commas (%(default)s)")
    parser.add_argument("--bandwidth", default="loopback", help="emulated links, as in 1gbit,100mbit (%(default)s)")
    parser.add_argument("--ranks", "-n", default=ranks, help="numbers of processes (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each plan has its turn (%(default)s)")
    parser.add_argument("--seconds", type=float, default=seconds, help="about how long each is measured (%(default)s)")
    parser.add_argument("--out", default=out, help="file of rows, to which a later call adds its own (%(default)s)")
    return parser


def bandwidths_and_ranks(given: argparse.Namespace) -> tuple[list[float | None], list[int]]:
    """Return the bandwidths and the numbers of ranks that the user has named."""
    return options.bandwidths(given.bandwidth), options.integers(given.ranks, "--ranks")


def measure(
    module: str,
    given: argparse.Namespace,
    scenarios: Iterable[Scenario],
    show: Callable[[Console, Row], None],
    console: Console,
    which: Iterable[str] = WHICH,
) -> list[Row]:
    """Measure the scenarios that the file of rows lacks, write and show each when it ends, and return all rows.

    Ranks run the module with a folder and those values of a scenario that are neither ranks nor bandwidth; they emit
    one event with all of its results.

    Args:
        which: options that say which scenarios there are. All others must be those of the rows in the file.
    """
    out = Path(given.out)
    rows = _earlier_rows(out, {key: value for key, value in vars(given).items() if key not in which})
    if rows:
        console.print(f"What {out} has is not measured again.", soft_wrap=True)
    facts: dict[str, Any] = {"settings": vars(given), "machine": machine(), "versions": versions()}
    out.parent.mkdir(parents=True, exist_ok=True)
    # ranks do not import from the current folder
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    for scenario in scenarios:
        if any(scenario.items() <= row.items() for row in rows):
            continue
        others = [value for key, value in scenario.items() if key not in ("ranks", "bandwidth")]
        ranks, rate = scenario["ranks"], scenario["bandwidth"]
        try:
            with ScenarioBars(console) as bars:
                show_event = partial(bars.show, name_of(scenario))
                found = run_scenario(["-m", module], vars(given), others, ranks, rate, show_event)
        except GraceError as error:
            raise SystemExit(f"{module}: {name_of(scenario)}: {error}") from error
        rows.append({**scenario, **found})
        with atomic_write(out) as draft:
            draft.write_text(json.dumps({**facts, "rows": rows}) + "\n")
        show(console, rows[-1])
    return rows


def _earlier_rows(out: Path, settings: dict[str, Any]) -> list[Row]:
    """Return the rows of a file, or exit if they were measured with other settings; none if there is no file."""
    if not out.exists():
        return []
    earlier = json.loads(out.read_text())
    for key, value in settings.items():
        if earlier["settings"].get(key) != value:
            was = f"--{key} {earlier['settings'].get(key)}"
            raise SystemExit(f"{out} was measured with {was}, not {value}: name another file by --out, or remove it")
    rows: list[Row] = earlier["rows"]
    return rows


def name_of(scenario: Row) -> str:
    """Return the name of a scenario.

    >>> name_of({"model": "mlp", "ranks": 2, "bandwidth": 1e9})
    'mlp, 2 ranks at 1gbit'
    """
    compressor = f", {scenario['compressor']}" if "compressor" in scenario else ""
    return f"{scenario['model']}, {text.scenario(scenario['ranks'], scenario['bandwidth'])}{compressor}"
