"""Commands of ``grace bench``, and ``grace report``: results of benchmarks as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from grace.bench.all import command as all_of_them
from grace.bench.common.results import load, naming_damage
from grace.bench.compare import compare
from grace.bench.kernels.kernels_command import command as kernels
from grace.bench.link.link_command import link
from grace.bench.step.step_command import command as step
from grace.bench.train.train_command import command as train
from grace.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Measure compressors: does compression pay here?")
app.command("all")(all_of_them)
app.command("kernels")(kernels)
app.command("step")(step)
app.command("train")(train)
app.command()(compare)
app.command()(link)


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

    sources = {(path / "results.json" if path.is_dir() else path).resolve() for path in results}
    if out.resolve() in sources:
        raise ConfigError(f"{out} is one of the results, which the report would overwrite")
    with naming_damage(*results):
        write_report(out, [load(path) for path in results])
    print(f"Wrote {out} ({out.stat().st_size / 1000:.0f} kB).")
