"""Errors that end a benchmark."""

from grace.errors import GraceError


class WorkerError(GraceError, RuntimeError):
    """Error of a rank that failed, with the rank's own message."""


class LinkError(GraceError, RuntimeError):
    """Error of a link that cannot be emulated here, with the reason."""
