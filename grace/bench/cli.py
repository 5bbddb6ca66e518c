"""Commands of ``grace bench``."""

import typer

from grace.bench.all import command as all_of_them
from grace.bench.compare import compare
from grace.bench.kernels.kernels_command import command as kernels
from grace.bench.link.link_command import link
from grace.bench.pipeline.pipeline_command import command as pipeline
from grace.bench.plan.plan_command import command as plan
from grace.bench.step.step_command import command as step
from grace.bench.train.train_command import command as train

app = typer.Typer(no_args_is_help=True, help="Measure compressors: does compression pay here?")
app.command("all")(all_of_them)
app.command("kernels")(kernels)
app.command("pipeline")(pipeline)
app.command("plan")(plan)
app.command("step")(step)
app.command("train")(train)
app.command()(compare)
app.command()(link)
