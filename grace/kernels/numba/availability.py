"""Availability of the compiled kernels, and their names; Numba is not imported."""

import os


def missing() -> str:
    """Return the reason why the compiled kernels cannot be used; empty if they can."""
    if os.environ.get("GRACE_FUSED", "1") == "0":
        return "GRACE_FUSED=0"
    try:
        import numba  # noqa: F401
    except ImportError:
        return "Numba is not installed"
    return ""
