"""What torch's and TensorFlow's Horovod have in common."""

from __future__ import annotations

import math
import os
from typing import Any

from grace.errors import ConfigError

MADE = {"_allreduce_grad_async", "_HAS_AGGREGATE_GRAD"}
"""What the bodies of the classes that Horovod makes of torch's and of Keras's optimizers have, each one of them."""


class Once:
    """A distributed optimizer, of whose class Horovod may not derive its own."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if len(cls.__bases__) == 1 and not MADE.isdisjoint(vars(cls)):
            raise ConfigError(
                "this optimizer is distributed by Grace already, over Horovod where that is the engine: leave out "
                "hvd.DistributedOptimizer"
            )


def check_not_horovods(optimizer: Any, compression: Any, compressor: Any) -> None:
    """Refuse what a script gave to Horovod before.

    Raises:
        ConfigError: an optimizer that Horovod has made distributed, or Horovod's compression.

    >>> check_not_horovods(None, "fp16", None)
    Traceback (most recent call last):
    grace.errors.ConfigError: compression= is Horovod's. Grace's is compressor=: a method's spec, as 'fp16' or 'topk'
    """
    if any(hasattr(optimizer, name) for name in MADE):
        raise ConfigError(
            "this optimizer is Horovod's DistributedOptimizer already: leave that out, and give Grace the optimizer "
            "that it was made of"
        )
    if compression is not None or getattr(compressor, "__module__", "").startswith("horovod."):
        raise ConfigError("compression= is Horovod's. Grace's is compressor=: a method's spec, as 'fp16' or 'topk'")


def heed_timeout(seconds: float) -> None:
    """Before ``hvd.init()``: let Horovod's own thread wait as long for a rank that does not answer. What the user has
    set stays, and so does all in elastic mode, where others may go on without that rank."""
    if os.environ.get("HOROVOD_ELASTIC") != "1":
        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(math.ceil(seconds)))
