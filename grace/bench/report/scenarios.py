"""Results whose rows are scenarios: a model over ranks and a network, in which plans or cuts were compared."""

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from grace.bench.common import text
from grace.bench.common.results import Results, Row
from grace.bench.common.tables import Columns, table


def name(scenario: Row) -> str:
    """Return the name of a scenario.

    >>> name({"model": "mlp", "ranks": 2, "bandwidth": 1e9})
    'mlp, 2 ranks at 1gbit'
    """
    compressor = f", {scenario['compressor']}" if "compressor" in scenario else ""
    return f"{scenario['model']}, {text.scenario(scenario['ranks'], scenario['bandwidth'])}{compressor}"


def show_scenarios(
    console: Console,
    results: Results,
    detail: Callable[[Row], Table],
    verdict: Callable[[Row], str],
    columns: Columns[Row],
) -> None:
    """Show a table and a verdict for each scenario, and what was left out of it; then a table of all scenarios."""
    for row in results.rows:
        console.print(f"\n{name(row)}", style="bold", markup=False, soft_wrap=True)
        console.print(detail(row))
        console.print(verdict(row), markup=False)
        for left_out, why in row["missing"].items():
            console.print(f"Left out: {left_out}: {why}", markup=False, style="dim")
    if results.rows:
        console.print("", table(results.rows, {"": name, **columns}), sep="\n")
