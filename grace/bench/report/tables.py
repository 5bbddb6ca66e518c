"""Functions that show the results of each kind on a console, as tables and verdicts."""

from collections.abc import Callable

from rich.console import Console

from grace.bench.common.results import Results
from grace.bench.report import kernel_tables, step_table, train_table

SHOW: dict[str, Callable[[Console, Results], None]] = {
    "kernels": kernel_tables.show,
    "step": step_table.show,
    "train": train_table.show,
}
