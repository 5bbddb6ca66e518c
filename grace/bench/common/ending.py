"""End of the commands of ``grace bench``, with an exit code, and a line on stderr; and the errors that end them."""

import contextlib
import sys
from collections.abc import Iterator

import typer

from grace.errors import GraceError
from grace.launch.processes import signals_raise


class WorkerError(GraceError, RuntimeError):
    """Error of a rank that failed, with the rank's own message."""


class LinkError(GraceError, RuntimeError):
    """Error of a link that cannot be emulated here, with the reason."""


class Ending:
    """End of a command with a name; ``interrupted`` is the message after Ctrl-C."""

    def __init__(self, name: str, interrupted: str = "interrupted; the ranks are ended"):
        self.name = name
        self.interrupted = interrupted
        self.code = 0
        self.message = ""

    @contextlib.contextmanager
    def record_failure(self) -> Iterator[None]:
        """Return a context that records failures, after which the command continues with the results that it has."""
        try:
            with signals_raise():
                yield
        except (WorkerError, LinkError) as error:
            self.code = 1
            self.message = str(error)
        except KeyboardInterrupt:
            self.code = 130  # as shells do: 128 and SIGINT's number
            self.message = self.interrupted

    def exit_if_failed(self) -> None:
        """Print the failure, if there was one, and exit: 1 if a rank or a network failed, 130 after an interruption."""
        if self.code:
            print(f"{self.name}: {self.message}", file=sys.stderr)
            raise typer.Exit(self.code)
