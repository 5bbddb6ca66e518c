"""``grace trace``: where the time of a training run goes, variable by variable."""

import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from grace.errors import ConfigError
from grace.exchange.tracing import recorder
from grace.exchange.tracing import timeline as traces
from grace.exchange.tracing.summary import summarize
from grace.exchange.tracing.tables import tables
from grace.launch import supervisor
from grace.launch.command_lines import check_script, command, default_engine

PROGRAM = "grace.trace.program"
MOST_TOLD = 10
"""Damaged lines that are told of one by one."""


class WithProgram(TyperCommand):
    """A command whose arguments end at ``--``; the program that follows is in the context."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Cut off the program."""
        if "--" in args:
            place = args.index("--")
            args, ctx.meta[PROGRAM] = args[:place], args[place + 1 :]
        return super().parse_args(ctx, args)


def trace(
    context: typer.Context,
    folder: Annotated[
        Path | None, typer.Argument(help="What ranks have left; or else -- and a program.", metavar="FOLDER")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The trace file; .json, or .json.gz.")] = Path("trace.json"),
    top: Annotated[int, typer.Option(min=1, help="Variables and groups in the tables.")] = 10,
    ranks: Annotated[
        int | None, typer.Option("--ranks", "-n", help="Ranks to run the program on.", show_default="1")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="horovod, torch or mpi.", show_default="the first that is installed")
    ] = None,
    strategy: Annotated[
        Path | None, typer.Option(help="A strategy's file, as for launch.", show_default="none")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps to record.", show_default=str(recorder.DEFAULT_STEPS))
    ] = None,
    skip: Annotated[
        int | None, typer.Option(min=0, help="Steps before them.", show_default=str(recorder.DEFAULT_SKIP))
    ] = None,
) -> None:
    """Record where the time of training steps goes: a timeline and a table.

    grace trace -n 2 --engine torch -- python train.py

    GRACE_TRACE=folder torchrun --nproc-per-node 2 train.py; grace trace folder

    The first form runs a program that uses Grace on ranks of this machine, as
    grace launch does. In the second, ranks that were started in any way leave
    their files in a folder (GRACE_TRACE_STEPS and GRACE_TRACE_SKIP are --steps
    and --skip); collect those of several machines in one. Open the file at
    ui.perfetto.dev (it stays on your machine) or chrome://tracing. Each rank
    is a process there. Ranks of one machine share a clock; those of several
    are aligned as well as the machines' clocks are. On GPUs, times are those
    of starting operations.
    """
    program: list[str] | None = context.meta.get(PROGRAM)
    if (program is None) == (folder is None):
        raise ConfigError(
            "give a folder that ranks have left their traces in, or after -- a program to run, as in: "
            "grace trace -n 2 -- python train.py"
        )
    if folder is not None:
        options = {"--ranks": ranks, "--engine": engine, "--strategy": strategy, "--steps": steps, "--skip": skip}
        for name in [name for name, value in options.items() if value is not None]:
            raise ConfigError(f"{name} is for a program that is run, which comes after --; the folder is recorded")
        _show(folder, out, top)
        return
    check_writable(out)  # before the program runs for nothing
    with tempfile.TemporaryDirectory(prefix="grace-trace-") as made:
        code, message = _run(program or [], Path(made), ranks, engine, strategy, steps, skip)
        if code:
            print(f"grace trace: {message}", file=sys.stderr)
        try:
            if not any(Path(made).iterdir()):
                raise ConfigError("the program left no trace: it made no optimizer, tape or hook of Grace's")
            _show(Path(made), out, top)
        except ConfigError as error:
            if not code:
                raise
            print(f"grace trace: {error}", file=sys.stderr)
    if code:
        raise typer.Exit(code)


def check_writable(path: Path) -> None:
    """Refuse a file that cannot be written.

    >>> check_writable(Path("/dev/null/trace.json"))
    Traceback (most recent call last):
    grace.errors.ConfigError: cannot write /dev/null/trace.json: File exists
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        if not path.stat().st_size:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _run(
    program: list[str],
    folder: Path,
    ranks: int | None,
    engine: str | None,
    strategy: Path | None,
    steps: int | None,
    skip: int | None,
) -> tuple[int, str]:
    """Run a program whose ranks leave their traces in the folder; its exit code, and what to say about it."""
    from grace.launch.cluster import Resources

    wanted = {recorder.FOLDER: folder, recorder.STEPS: steps, recorder.SKIP: skip}
    variables = {name: str(value) for name, value in wanted.items() if value is not None}
    commands = command(Resources.load(None, ranks), engine or default_engine(), program, strategy)
    supervisor.check_program(program[0])
    check_script(program)
    commands = [dataclasses.replace(each, environment={**each.environment, **variables}) for each in commands]
    try:
        end = supervisor.run(commands)
    except KeyboardInterrupt:
        return 130, "interrupted; the ranks are ended"
    return end.code, end.message


def _show(folder: Path, out: Path, top: int) -> None:
    """Merge what ranks have left, and print the summary."""
    console = Console(highlight=False)
    damage: list[str] = []
    ranks = traces.load(folder, damage)
    for line in damage[:MOST_TOLD]:
        print(f"grace trace: left out {line}", file=sys.stderr)
    if len(damage) > MOST_TOLD:
        print(f"grace trace: {len(damage) - MOST_TOLD} more lines are damaged", file=sys.stderr)
    summary = summarize(ranks)
    traces.save(ranks, out)
    console.print(tables(summary, top))
    lost = traces.missing(ranks)
    for rank in lost[:MOST_TOLD]:
        console.print(f"Rank {rank} left no file in {folder}.", markup=False)
    if len(lost) > MOST_TOLD:
        console.print(f"Nor did {len(lost) - MOST_TOLD} more ranks.")
    console.print(f"\nWrote {out}; open it at ui.perfetto.dev or chrome://tracing.", markup=False)
