"""Versions, formats, engine and kernels, which must be equal on all ranks."""

from grace.core.backend import Backend
from grace.exchange import layout
from grace.kernels.numba.availability import missing
from grace.session import state_schema


def public(version: str) -> str:
    """Return a version without its build tag.

    >>> public("2.13.0+cpu")
    '2.13.0'
    """
    return version.split("+")[0]


def versions(backend: Backend) -> list[tuple[str, str]]:
    """Return the facts that ranks compare, except Grace's version, which :func:`grace.session.agreement.compare_facts`
    compares.

    >>> from grace.core.backend import LocalBackend
    >>> versions(LocalBackend())[0]
    ('the backend', 'grace.core.backend.LocalBackend')
    """
    kind, why = type(backend), missing()
    return [
        ("the backend", f"{kind.__module__}.{kind.__qualname__}"),
        ("wires of version", str(layout.WIRE_FORMAT)),
        ("checkpoints of version", str(state_schema.VERSION)),
        # They may round differently from those of the frameworks.
        ("compiled kernels:", f"no ({why})" if why else "yes"),
    ]
