"""What ranks must have the same of, whatever their script says: versions, formats, engine and kernels."""

from grace.core.backend import Backend
from grace.exchange import layout
from grace.kernels.fused.availability import missing
from grace.session import state_schema


def public(version: str) -> str:
    """A version without what it was built for.

    >>> public("2.13.0+cpu")
    '2.13.0'
    """
    return version.split("+")[0]


def fused() -> str:
    """Whether tensors on CPUs are computed with by compiled kernels, which may round otherwise."""
    why = missing()
    return f"no ({why})" if why else "yes"


def versions(backend: Backend) -> list[tuple[str, str]]:
    """Facts for :func:`grace.session.agreement.agree`, which compares Grace's own version itself.

    >>> from grace.core.backend import LocalBackend
    >>> versions(LocalBackend())[0]
    ('the backend', 'grace.core.backend.LocalBackend')
    """
    kind = type(backend)
    return [
        ("the backend", f"{kind.__module__}.{kind.__qualname__}"),
        ("wires of version", str(layout.WIRE_FORMAT)),
        ("checkpoints of version", str(state_schema.VERSION)),
        ("compiled kernels:", fused()),
    ]
