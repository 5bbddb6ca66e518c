"""What torch's and TensorFlow's Horovod have in common."""

from __future__ import annotations

import math
import os


def heed_timeout(seconds: float) -> None:
    """Before ``hvd.init()``: let Horovod's own thread wait as long for a rank that does not answer. What the user has
    set stays, and so does all in elastic mode, where others may go on without that rank."""
    if os.environ.get("HOROVOD_ELASTIC") != "1":
        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(math.ceil(seconds)))
