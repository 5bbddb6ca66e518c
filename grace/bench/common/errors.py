"""What ends a benchmark, other than its user."""

from grace.errors import GraceError


class WorkerError(GraceError, RuntimeError):
    """A rank failed; the message is what it said."""


class LinkError(GraceError, RuntimeError):
    """A link cannot be emulated here; the message says why."""
