"""``grace trace``: the time of a training run's steps, variable by variable."""

import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from grace.bench.common.options import Given, option, with_options
from grace.cli.terminal import check_outputs, standard_output
from grace.errors import ConfigError
from grace.exchange.tracing import recorder
from grace.exchange.tracing import timeline as traces
from grace.exchange.tracing.summary import summarize
from grace.exchange.tracing.trace_tables import tables
from grace.launch import supervisor
from grace.launch.command_lines import check_script, command, default_engine

PROGRAM = "grace.trace.program"
MOST_LINES = 10
"""Damaged lines, and ranks without a file, that are named one by one."""


class WithProgram(TyperCommand):
    """Command whose arguments end at ``--``; the program that follows is in the context."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Cut off the program."""
        if "--" in args:  # click would take the program's words for arguments of ours
            end = args.index("--")
            ctx.meta[PROGRAM] = args[end + 1 :]
            args = args[:end]
        return super().parse_args(ctx, args)


@dataclasses.dataclass
class TraceOptions:
    """Options of ``grace trace``: first those of what it writes, then those of a program that it runs."""

    out: Path = option(Path("trace.json"), "File to write the timeline to: .json, or .json.gz.", "--out", "-o")
    top: int = option(10, "Number of variables, and of groups, in the tables.", min=1)
    ranks: int | None = option(None, "Number of ranks that run the program.", "--ranks", "-n", show_default="1")
    engine: str | None = option(
        None, "Engine of the ranks: horovod, torch or mpi.", show_default="the first that is installed"
    )
    strategy: Path | None = option(None, "A strategy's file, as for grace launch.", show_default="none")
    steps: int | None = option(None, "Number of steps to record.", show_default=str(recorder.DEFAULT_STEPS), min=1)
    skip: int | None = option(
        None, "Number of steps before them that are not recorded.", show_default=str(recorder.DEFAULT_SKIP), min=0
    )


@with_options(TraceOptions)
def trace(
    given: Given,
    context: typer.Context,
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Folder with the files that ranks wrote, with GRACE_TRACE=folder. Without it, end with -- and a "
            "program.",
            metavar="FOLDER",
        ),
    ] = None,
) -> None:
    """Record where the time of training steps goes: a timeline and a table.

    grace trace -n 2 --engine torch -- python train.py

    GRACE_TRACE=folder torchrun --nproc-per-node 2 train.py; grace trace folder

    The first form runs a program that uses Grace on ranks of this machine, as
    grace launch does. In the second form you start the ranks in any way; each
    writes a file to the folder that GRACE_TRACE names. (GRACE_TRACE_STEPS and
    GRACE_TRACE_SKIP stand for --steps and --skip.) Copy the files of several
    machines into one folder. Open the trace file at ui.perfetto.dev (it stays
    on your machine) or chrome://tracing, which show each rank as a process.
    Times of several machines fit together only as well as their clocks do. On
    a GPU the timeline shows when operations were started, not when they ran.
    """
    program: list[str] | None = context.meta.get(PROGRAM)
    if (program is None) == (folder is None):
        raise ConfigError(
            "give a folder that ranks have left their traces in, or after -- a program to run, as in: "
            "grace trace -n 2 -- python train.py"
        )
    options = TraceOptions(**given)
    if folder is not None:
        for name in ("ranks", "engine", "strategy", "steps", "skip"):
            if name in given:
                raise ConfigError(
                    f"--{name} is for a program that is run, which comes after --; the folder is recorded"
                )
    recorded = [] if folder is None else folder.glob("rank*.jsonl")
    check_outputs(options.out, sources=recorded, make_folder=True)  # before the program runs for nothing
    if folder is not None:
        _summarize(folder, options.out, options.top)
        return
    with tempfile.TemporaryDirectory(prefix="grace-trace-") as made:
        end = _run(program or [], made, options)
        if end.code:
            print(f"grace trace: {end.message}", file=sys.stderr)
        try:
            if not any(Path(made).iterdir()):
                raise ConfigError("the program left no trace: it made no optimizer, tape or hook of Grace's")
            _summarize(Path(made), options.out, options.top)
        except ConfigError as error:
            if not end.code:
                raise
            print(f"grace trace: {error}", file=sys.stderr)
    if end.code:
        raise typer.Exit(end.code)


def _run(program: list[str], folder: str, options: TraceOptions) -> supervisor.End:
    """Run a program on ranks that record their steps in a folder."""
    from grace.launch.cluster import Resources

    variables = {recorder.FOLDER: folder, recorder.STEPS: options.steps, recorder.SKIP: options.skip}
    more = {name: str(value) for name, value in variables.items() if value is not None}
    engine = options.engine or default_engine()
    commands = command(Resources.load(None, options.ranks), engine, program, options.strategy)
    supervisor.check_program(program[0])
    check_script(program)
    return supervisor.run([dataclasses.replace(each, environment={**each.environment, **more}) for each in commands])


def _summarize(folder: Path, out: Path, top: int) -> None:
    """Merge the files of ranks, and print the summary."""
    damage: list[str] = []
    ranks = traces.load(folder, damage)
    for line in damage[:MOST_LINES]:
        print(f"grace trace: left out {line}", file=sys.stderr)
    if len(damage) > MOST_LINES:
        print(f"grace trace: {len(damage) - MOST_LINES} more lines are damaged", file=sys.stderr)
    summary = summarize(ranks)
    traces.save(ranks, out)
    console = standard_output()
    console.print(tables(summary, top))
    missing = traces.missing(ranks)
    for rank in missing[:MOST_LINES]:
        console.print(f"Rank {rank} left no file in {folder}.", markup=False)
    if len(missing) > MOST_LINES:
        console.print(f"Nor did {len(missing) - MOST_LINES} more ranks.")
    console.print(f"\nWrote {out}; open it at ui.perfetto.dev or chrome://tracing.", markup=False)
