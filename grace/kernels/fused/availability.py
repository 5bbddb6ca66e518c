"""Whether the compiled kernels can be used here."""

import os


def missing() -> str:
    """Why not; empty if they can."""
    if os.environ.get("GRACE_FUSED", "1") == "0":
        return "GRACE_FUSED=0"
    try:
        import numba  # noqa: F401
    except ImportError:
        return "Numba is not installed"
    return ""
