"""GRACE's parameter dictionaries, for those who come from there."""

import warnings
from collections.abc import Mapping
from typing import Any

from grace.communicators.base import Communicator, build_communicator
from grace.core.registry import known, make
from grace.errors import ConfigError

PARTS = {"compressor": "none", "memory": None, "communicator": None}
"""The parts, and what is taken where the dictionary does not say (None: the compressor's default)."""

NAMES = {
    "compressor": {"adaq": "adaptive", "u8bit": "dynamic8"},
    "memory": {"powersgd": "residual"},
    "communicator": {"alltoall": "scatter_reduce"},
}
"""GRACE's names that differ from ours. Its memory for PowerSGD is error feedback with the aggregate."""

KEYS: dict[str, tuple[tuple[str, str], ...]] = {
    "compress_ratio": (("compressor", "ratio"),),
    "quantum_num": (("compressor", "levels"),),
    "bucket_size": (("compressor", "bucket_size"),),
    "threshold": (("compressor", "value"),),
    "momentum": (("compressor", "momentum"), ("memory", "momentum")),
    "gradient_clipping": (("memory", "clip"),),
    "compress_rank": (("compressor", "rank"),),
    "error_bound": (("compressor", "error_bound"),),
    "quantiles": (("compressor", "quantiles"),),
}
"""GRACE's keys, and which parameter of which part each one sets."""

ELSEWHERE = {
    "lr": "the learning rate is read from the optimizer, schedules included",
    "momentum_factor": "PowerSGD has no momentum of its own here; set the optimizer's",
    "world_size": "the number of ranks is that of the run",
}
"""GRACE's keys that say what Grace knows by itself."""


def from_params(params: Mapping[str, Any]) -> Communicator:
    """The communicator that a GRACE dictionary describes, for ``DistributedOptimizer(opt, communicator=...)``.

    Where the dictionary names no memory or communicator, the compressor's defaults are taken (GRACE took none
    and all-reduce, which is wrong for most methods).

    Args:
        params: GRACE's keys and names.

    Raises:
        ConfigError: a key, name or value is not known, or the parts do not go together.

    >>> from_params({"compressor": "topk", "memory": "residual", "compress_ratio": 0.05}).describe()
    'allgather, topk(ratio=0.05), residual'
    """
    for key in params:
        if key not in PARTS and key not in KEYS and key not in ELSEWHERE:
            raise ConfigError(
                f"from_params does not know the key {key!r}; it knows {', '.join([*PARTS, *KEYS, *ELSEWHERE])}"
            )
    for key, why in ELSEWHERE.items():
        if key in params:
            warnings.warn(f"from_params: {key}={params[key]!r} is not needed: {why}", stacklevel=2)
    used: set[str] = set()
    compressor = _part("compressor", params, used)
    memory = _part("memory", params, used)
    unused = [key for key in KEYS if key in params and key not in used]
    if unused:
        warnings.warn(f"from_params: {compressor.spec} has no use for {', '.join(unused)}", stacklevel=2)
    name = params.get("communicator") or compressor.traits.communicator
    name = NAMES["communicator"].get(name, name)
    return build_communicator(compressor, memory, name)


def _part(kind: str, params: Mapping[str, Any], used: set[str]) -> Any:
    name = params.get(kind, PARTS[kind])
    if name is None:
        return None
    name = NAMES[kind].get(name, name)
    valid = known(kind)[name].parameters() if name in known(kind) else {}
    spec = {"name": name}
    for key, targets in KEYS.items():
        for part, parameter in targets:
            if part == kind and key in params and parameter in valid:
                spec[parameter] = _value(key, params[key])
                used.add(key)
    return make(kind, spec)


def _value(key: str, value: Any) -> Any:
    """GRACE says False for no clipping."""
    return None if key == "gradient_clipping" and value is False else value
