"""How the commands of ``grace bench`` end: with an exit code, and a line on stderr."""

import contextlib
import sys
from collections.abc import Iterator

import typer

from grace.bench.common.errors import LinkError, WorkerError
from grace.launch.processes import signals_raise


class Ending:
    """How a command ends.

    Args:
        name: the command's, for messages.
        interrupted: what is said after Ctrl-C.
    """

    def __init__(self, name: str, interrupted: str = "interrupted; the ranks are ended"):
        self.name, self.interrupted, self.code, self.message = name, interrupted, 0, ""

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """A block whose failures are noted, whereupon the command goes on with what it has."""
        try:
            with signals_raise():
                yield
        except (WorkerError, LinkError) as error:
            self.code, self.message = 1, str(error)
        except KeyboardInterrupt:
            self.code, self.message = 130, self.interrupted

    def fail(self) -> None:
        """Say how it failed, if it did.

        Raises:
            typer.Exit: 1 if a rank or a network failed, 130 after an interruption.
        """
        if self.code:
            print(f"{self.name}: {self.message}", file=sys.stderr)
            raise typer.Exit(self.code)
