"""The ``grace`` command."""

import io
import sys
from typing import Annotated

import typer

from grace.bench.all import demo
from grace.bench.cli import app as bench
from grace.bench.cli import report
from grace.cli.calibrate import calibrate
from grace.cli.components import describe, list_components
from grace.cli.launch import launch
from grace.cli.pipeline import app as pipeline
from grace.cli.plan import plan
from grace.cli.strategy import app as strategy
from grace.cli.trace import WithProgram, trace
from grace.cli.warmup import warmup
from grace.core.version import __version__
from grace.errors import GraceError, shortened

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command("calibrate")(calibrate)
app.command("demo")(demo)
app.command("launch", context_settings={"allow_interspersed_args": False})(launch)
app.command("plan")(plan)
app.command("report")(report)
app.command("trace", cls=WithProgram)(trace)
app.command("warmup")(warmup)
app.command("list")(list_components)
app.command()(describe)
app.add_typer(bench, name="bench")
app.add_typer(pipeline, name="pipeline")
app.add_typer(strategy, name="strategy")


def main() -> None:
    """Run the command line; an error that Grace raises on purpose becomes one message and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name may have letters that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except GraceError as error:
        print(f"grace: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.filename is None:  # not about a user's file: the traceback is needed
            raise
        print(shortened(f"grace: {error.filename}: {error.strerror}"), file=sys.stderr)  # a name may be too long
        sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"grace {__version__}")
        raise typer.Exit


@app.callback()
def grace(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Gradient compression for data-parallel training."""


if __name__ == "__main__":
    main()
