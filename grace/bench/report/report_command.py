"""``grace report``: results of benchmarks as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from grace.bench.common.results import load


def report(
    results: Annotated[list[Path], typer.Argument(help="results.json of grace bench, or folders with one.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("report.html"),
) -> None:
    """Make one HTML file of benchmarks' results: figures, tables, verdicts.

    Results of kernels, step and train may be given together; each becomes a
    section, and a method has the same color in all of them. The file holds
    all that it shows: it can be opened from disk, sent, and printed.
    """
    from grace.bench.report.page import write_report

    write_report(out, [load(path) for path in results])
    print(f"Wrote {out} ({out.stat().st_size / 1000:.0f} kB).")
