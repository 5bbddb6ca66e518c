"""Wrappers of models that exchange gradients themselves, so that Grace's optimizer cannot do it as well."""

import copyreg
import gc
import sys
import weakref
from collections.abc import Collection, Mapping
from typing import Any, SupportsIndex

import torch
from torch.nn.parallel import DistributedDataParallel

from grace.core.live_instances import live_instances
from grace.errors import ConfigError

WHOLE = (
    "What works today: fully_shard (FSDP2) instead, with grace.torch.register_fsdp_hook; or without sharding, "
    "grace.DistributedOptimizer with the plain model, or grace.torch.register_ddp_hook with DistributedDataParallel"
)
LIGHTNING = "under Lightning: Trainer(..., callbacks=[grace.integrations.lightning.GraceCallback(compressor=...)])"
WRAPPING = {
    "accelerate": "under Accelerate: "
    "model, optimizer = grace.integrations.accelerate.prepare(accelerator, model, optimizer, compressor=...)",
    "transformers": "under Hugging Face's Trainer: "
    "Trainer(..., callbacks=[grace.integrations.transformers.GraceCallback(compressor=...)])",
    "lightning": LIGHTNING,
    "pytorch_lightning": LIGHTNING,
    "ray.train": "under Ray Train: "
    "model = ray.train.torch.prepare_model(model); grace.torch.register_ddp_hook(model, ...)",
}
"""Packages that wrap models for their users, and the line to use there."""


class Never:
    """Attribute that is False, whatever is assigned to it."""

    def __get__(self, instance: object, owner: object = None) -> bool:
        return False

    def __set__(self, instance: object, value: object) -> None:
        pass


def check_no_join(model: DistributedDataParallel) -> None:
    """Refuse DDP's ``join()``. All ranks that still have batches come here in their first step.

    Raises:
        ConfigError: ranks that have no batches left would take part with zeros, of which memories know nothing, or not
            at all.
    """
    config = model._join_config
    if config.enable and not config.throw_on_early_termination:
        raise ConfigError(
            "DistributedDataParallel's join() does not go with Grace: a rank that has no batches left makes "
            "no steps, and what it remembers would be lost. Give every rank as many batches "
            "(DistributedSampler(..., drop_last=True)), or end them all when the first one has none left: with "
            "model.join(throw_on_early_termination=True)"
        )


class SilentDDP(DistributedDataParallel):
    """DistributedDataParallel model that exchanges nothing, because a distributed optimizer does.

    Frameworks make such wrappers, and call them; :class:`Silence` makes one silent, of a class of its own.
    """

    require_backward_grad_sync = Never()  # type: ignore[assignment]
    require_forward_param_sync = Never()  # type: ignore[assignment]
    static_graph = Never()  # type: ignore[assignment]  # it and the next one wait for reductions in backward
    find_unused_parameters = Never()  # type: ignore[assignment]
    optimizer: Any = None
    """Weak reference to the distributed optimizer."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model, but not in DDP's ``join()``."""
        check_no_join(self)
        return super().forward(*inputs, **kwargs)

    def no_sync(self) -> Any:
        """Return the context in which the optimizer's gradients only accumulate."""
        return self.optimizer().no_sync()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        """Return the parts of a copy or a pickle: a model that exchanges gradients itself."""
        return copyreg.__newobj__, (type(self).__bases__[-1],), super().__getstate__()  # type: ignore[attr-defined]


class Silence:
    """Handle of a silent DistributedDataParallel model.

    Args:
        model: the model, which becomes silent.
    """

    def __init__(self, model: DistributedDataParallel):
        self.model = weakref.ref(model)
        self.kind = kind = type(model)
        model.__class__ = type(kind.__name__, (SilentDDP, kind), {"__module__": kind.__module__})

    def remove(self) -> None:
        """Let the model exchange gradients again."""
        model = self.model()
        if model is not None:
            model.__class__ = self.kind


def unwrap_compiled(model: torch.nn.Module) -> Any:
    """Return a model without the wrapper of ``torch.compile``."""
    return getattr(model, "_orig_mod", model)


def check_not_sharded(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Refuse parameters of which this rank holds only a part.

    Raises:
        ConfigError: a parameter is a part; the message names the first, and the API that sharded it.
    """
    for name, p in parameters.items():
        if hasattr(p, "device_mesh"):
            sharded: Any = p
            places = ", ".join(map(repr, sharded.placements))
            raise ConfigError(
                f"parameter {name!r} is a DTensor ({places}), as FSDP2's fully_shard and tensor parallelism make them. "
                "What works today, between replicas of a model that fully_shard was called on: "
                "grace.torch.register_fsdp_hook(model, mesh['replicate'], ...), in every step; or "
                "grace.DistributedOptimizer(optimizer, model, ..., outer=..., period=..., "
                "process_group=mesh.get_group('replicate')), now and then"
            )


def check_unwrapped(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Refuse parameters of a model that is in DistributedDataParallel or FullyShardedDataParallel.

    Neither class keeps a list of its models, so they are searched among all objects that Python's garbage collector
    tracks.

    Raises:
        ConfigError: a parameter is in such a model; the message names the first, and the alternatives.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()) or not parameters:
        return
    names = {p: name for name, p in parameters.items()}
    if not _wrappers_of(names):
        return
    gc.collect()  # a deleted model may be part of a reference cycle
    for wrapper, p in _wrappers_of(names):
        if not isinstance(wrapper, DistributedDataParallel):
            raise ConfigError(
                f"parameter {names[p]!r} belongs to FullyShardedDataParallel, which shards it and averages its "
                f"gradients itself. {WHOLE}"
            )
        lines = dict.fromkeys(text for package, text in WRAPPING.items() if package in sys.modules)
        hint = f" ({'; '.join(lines)})" if lines else ""
        raise ConfigError(
            f"parameter {names[p]!r} is in a DistributedDataParallel model, which averages gradients itself, "
            "uncompressed; with grace.DistributedOptimizer they would be exchanged twice. Either keep "
            "DistributedDataParallel and the plain optimizer, and call grace.torch.register_ddp_hook(ddp_model, ...)"
            f"{hint}; or keep grace.DistributedOptimizer, and do not wrap the model"
        )


def _wrappers_of(parameters: Collection[torch.nn.Parameter]) -> list[tuple[torch.nn.Module, torch.nn.Parameter]]:
    """Return the wrappers that exchange one of the parameters, each with the first such parameter."""
    sharding = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", DistributedDataParallel)
    held = []
    for wrapper in live_instances((DistributedDataParallel, sharding)):
        if isinstance(wrapper, SilentDDP):
            continue
        left_out = getattr(wrapper, "parameters_to_ignore", ())
        own = [p for name, p in wrapper.module.named_parameters() if p in parameters and name not in left_out]
        held += [(wrapper, own[0])] if own else []
    return held
