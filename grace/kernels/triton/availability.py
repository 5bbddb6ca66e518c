"""The test of whether the Triton kernels can be used here."""

import importlib.util
import os
import sys


def missing() -> str:
    """Return the reason why the Triton kernels cannot be used; empty if they can."""
    if os.environ.get("GRACE_FUSED", "1") == "0":
        return "GRACE_FUSED=0"
    if "triton" in sys.modules:
        return ""
    if "tensorflow" in sys.modules:  # both bring an LLVM, and the second one that is loaded ends the process
        return "TensorFlow was imported before Triton"
    return "" if importlib.util.find_spec("triton") is not None else "Triton is not installed"
