"""Communicators from GRACE's parameter dictionaries."""

from collections.abc import Mapping
from typing import Any

from grace.communicators.choice import build_communicator
from grace.core.communicator import Communicator
from grace.core.registry import known, make
from grace.errors import ConfigError, warn

PARTS = ("compressor", "memory", "communicator")

NAMES = {
    "compressor": {"adaq": "adaptive", "u8bit": "dynamic8", "qsgd_cuda": "qsgd", "natural_cuda": "natural"},
    "memory": {"powersgd": "residual"},
    "communicator": {"alltoall": "scatter_reduce"},
}
"""Grace's names for GRACE's names, where they differ. GRACE's memory for PowerSGD is error feedback with the
aggregate."""

KEYS: dict[str, tuple[Any, tuple[tuple[str, str], ...]]] = {
    "compress_ratio": (0.3, (("compressor", "ratio"),)),
    "quantum_num": (127, (("compressor", "levels"),)),
    "bucket_size": (128, (("compressor", "bucket_size"),)),
    # The paper's, which GRACE has; the spec "qsgd" means the largest magnitude, whose error is far smaller.
    "norm": ("l2", (("compressor", "norm"),)),
    "threshold": (0.01, (("compressor", "value"),)),
    # Signum keeps its momentum itself, DGC in its memory.
    "momentum": (0.9, (("compressor", "momentum"), ("memory", "momentum"))),
    "gradient_clipping": (False, (("memory", "clip"),)),
    "compress_rank": (1, (("compressor", "rank"),)),
    "error_bound": (2e-10, (("compressor", "error_bound"),)),
    "quantiles": (64, (("compressor", "quantiles"),)),
}
"""Default, and the parts and parameters that it sets, by GRACE's key and QSGD's ``norm``."""

LEARNING_RATE = 0.1
"""GRACE's default learning rate."""

ELSEWHERE = {
    "momentum_factor": "PowerSGD has no momentum of its own here; set the optimizer's",
    "kernel": "which kernel selects is decided by the tensor's device",
}
"""Reasons why Grace ignores some of GRACE's keys, by key."""

OF_THE_RUN = ("lr", "world_size")
"""Keys that set attributes of the communicator."""


def from_params(params: Mapping[str, Any]) -> Communicator:
    """Return the communicator that a GRACE dictionary describes, for ``DistributedOptimizer(opt, communicator=...)``.

    Missing keys have GRACE's defaults (``compress_ratio`` 0.3, where the spec "topk" means 0.01), except for the parts:
    a missing memory or communicator is the compressor's default (GRACE took none and all-reduce, which is wrong for
    most methods). ``lr`` is for steps that are called by hand; with an optimizer its own learning rate counts.
    ``world_size`` is compared with the run's.

    Args:
        params: GRACE's keys and names.

    Raises:
        ConfigError: a key, name or value is not known, or the parts do not go together.

    >>> from_params({"compressor": "topk", "memory": "residual"}).describe()
    'allgather, topk(ratio=0.3), residual'
    """
    unknown = [key for key in params if key not in (*PARTS, *KEYS, *ELSEWHERE, *OF_THE_RUN)]
    if unknown:
        raise ConfigError(
            f"from_params does not know {', '.join(map(repr, unknown))}; it knows "
            f"{', '.join([*PARTS, *KEYS, *OF_THE_RUN, *ELSEWHERE])}"
        )
    for key, why in ELSEWHERE.items():
        if key in params:
            warn(f"from_params: {key}={params[key]!r} is not needed: {why}")
    for kind in PARTS:
        if not isinstance(params.get(kind, ""), (str, type(None))):
            raise ConfigError(f"from_params takes the name of a {kind}, not {params[kind]!r}: pass objects themselves")
    used: set[str] = set()
    compressor = _part("compressor", params.get("compressor") or "none", params, used)
    memory = _part("memory", params.get("memory") or compressor.traits.memory, params, used)
    name = params.get("communicator") or compressor.traits.communicator
    communicator = build_communicator(compressor, memory, NAMES["communicator"].get(name, name))
    if communicator.memory.needs_lr:
        used.add("lr")
        communicator.lr = params.get("lr", LEARNING_RATE)
        communicator.check_number("lr", 0)
    communicator.make_for(params.get("world_size"))
    unused = [key for key in (*KEYS, "lr") if key in params and key not in used]
    if unused:
        warn(f"from_params: {communicator.describe()} has no use for {', '.join(unused)}")
    return communicator


def _part(kind: str, name: str, params: Mapping[str, Any], used: set[str]) -> Any:
    name = NAMES[kind].get(name, name)
    valid = known(kind)[name].parameters() if name in known(kind) else {}
    spec = {"name": name}
    said = []
    for key, (default, targets) in KEYS.items():
        for part, parameter in targets:
            if part == kind and parameter in valid:
                spec[parameter] = _value(key, params.get(key, default))
                used.add(key)
                said += [f"{parameter} is what {key} says"] if key in params and key != parameter else []
    try:
        return make(kind, spec)
    except ConfigError as error:
        raise ConfigError(f"{error} ({', '.join(said)})" if said else str(error)) from None


def _value(key: str, value: Any) -> Any:
    """Return the value of a parameter for GRACE's value of a key; False means no clipping."""
    if key == "gradient_clipping" and isinstance(value, bool):
        if value:
            raise ConfigError(
                "gradient_clipping=True: GRACE clips elements at the norm of all ranks' gradients, which Grace does "
                'not do. Give the largest norm of a gradient, as in "gradient_clipping": 1.0, or False for none'
            )
        return None
    return value
