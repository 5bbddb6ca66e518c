"""The commands of ``grace bench``."""

from __future__ import annotations

import typer

from grace.bench import all_command, kernels_command, step_command, train_command
from grace.bench.compare_command import compare
from grace.bench.link_command import link

app = typer.Typer(no_args_is_help=True, help="Measure compressors: does compression pay here?")
app.command("all")(all_command.command)
app.command("kernels")(kernels_command.command)
app.command("step")(step_command.command)
app.command("train")(train_command.command)
app.command()(compare)
app.command()(link)
