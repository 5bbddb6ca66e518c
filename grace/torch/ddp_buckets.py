"""The parameters and buckets of gradients that DistributedDataParallel passes to a communication hook."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from grace.core.variable import unwrap_names
from grace.errors import ConfigError
from grace.session.bucket_limits import Limits
from grace.session.step_runner import StepRunner
from grace.torch.parameters import sparse_names


def check_all_reduced(model: DistributedDataParallel) -> None:
    """Refuse a DDP model that leaves out the buckets of unused parameters.

    Raises:
        ConfigError: the first and last bucket of a step tell where it begins and ends, and might be left out.
    """
    if getattr(model, "skip_all_reduce_unused_params", False):  # torch 2.6 has none
        raise ConfigError(
            "DistributedDataParallel(skip_all_reduce_unused_params=True) leaves out buckets, and without them Grace "
            "does not know where a step begins and ends. Leave the argument out: parameters that no rank uses travel "
            "as zeros, and freezing them (requires_grad_(False)) before DistributedDataParallel spares even these"
        )


def trainable_parameters(model: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of a DDP model that need gradients, by name, without those that DDP was told to ignore.

    Raises:
        ConfigError: DDP has made its buckets of others.
    """
    pairs = [(name, p) for name, p in _exchanged_parameters(model) if p.requires_grad]
    known = model._get_ddp_logging_data()["num_parameter_tensors"]
    if known != len(pairs):
        raise ConfigError(
            f"DistributedDataParallel exchanges {known} parameters, and {len(pairs)} of the model require gradients "
            "now: some were frozen or unfrozen since it was made. Let all that are to be trained at any time require "
            "gradients before DistributedDataParallel(model, find_unused_parameters=True), and freeze parameters "
            "after register_ddp_hook"
        )
    return dict(zip(unwrap_names([name for name, _ in pairs]), (p for _, p in pairs), strict=True))


def frozen_parameters(model: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of a DDP model that need no gradients, by name, without those that DDP was told to
    ignore."""
    return {name: p for name, p in _exchanged_parameters(model) if not p.requires_grad}


def _exchanged_parameters(model: DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters of a DDP model without those that DDP was told to ignore."""
    # Names of modules and parameters with a point between them, even of the root's.
    ignored = model.parameters_to_ignore
    return [
        (name, p) for name, p in model.module.named_parameters() if (name if "." in name else f".{name}") not in ignored
    ]


def check_frozen(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Refuse parameters that were frozen when the hook was registered, and are not any more.

    Raises:
        ConfigError: a parameter requires gradients, of which DDP has no bucket.
    """
    for name, p in parameters.items():
        if p.requires_grad:
            raise ConfigError(
                f"the parameter {name!r} requires gradients now, and did not when DistributedDataParallel was made: "
                "it does not exchange them, and the ranks would drift apart. Let it require them before "
                "DistributedDataParallel(model, find_unused_parameters=True), and freeze it after register_ddp_hook; "
                "or wrap the model anew"
            )


def check_dense(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Refuse parameters whose gradients are sparse.

    Raises:
        ConfigError: a layer was made with ``sparse=True``; DDP passes its gradients as rows, not in a buffer.
    """
    for name in sparse_names(parameters):
        raise ConfigError(
            f"the gradient of {name!r} is sparse, and DDP's hook exchanges dense gradients alone. Make the layer dense "
            "(sparse=False), or train the model without DistributedDataParallel and pass it to "
            "grace.DistributedOptimizer(opt, model), which exchanges rows"
        )


def bucket_gradients(bucket: Any) -> list[torch.Tensor]:
    """Return views of a bucket's gradients in their parameters' shapes.

    DDP lays out a gradient in the memory order of its parameter (transposed, channels_last), but returns it in the
    parameter's shape as if it were contiguous.
    """
    gradients = list(bucket.gradients())
    if not isinstance(bucket, torch.distributed.GradBucket):
        return gradients
    for i, p in enumerate(bucket.parameters()):
        if (
            not p.is_contiguous() and torch.empty_like(p, device="meta").stride() == p.stride()
        ):  # otherwise the memory has gaps
            gradients[i] = gradients[i].as_strided(p.shape, p.stride())
    return gradients


def gradient_to_send(gradient: torch.Tensor, missing: bool) -> torch.Tensor:
    """Return a gradient in the order of its shape. A missing gradient may still hold an overflow of an earlier step,
    which was reported then, so non-finite numbers of it become 0."""
    return torch.nan_to_num(gradient, 0.0, 0.0, 0.0) if missing else gradient.contiguous()


def bucket_limits(runner: StepRunner, bucket_bytes: int | None) -> dict[int, Limits | None]:
    """Return the limits of the parts that one of DDP's buckets is cut into, by the communicator's id.

    Compressed gradients are cut as in a DistributedOptimizer's buckets; uncompressed ones stay in one collective.
    """
    limits: dict[int, Limits | None] = {}
    for communicator in runner.communicators:
        shards = [shard for shard in runner.shards.values() if shard.communicator is communicator]
        sent = sum(shard.wire_bytes for shard in shards)
        compressed = sent < sum(shard.variable.nbytes for shard in shards)
        wire = Limits(bucket_bytes).wire_bytes(sent, compressed)
        cuts = compressed or bucket_bytes is not None
        limits[id(communicator)] = Limits(bucket_bytes=max(1, round(wire))) if cuts else None
    return limits
