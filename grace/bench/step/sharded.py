"""Contestants of ``grace bench step --sharded``: FSDP2 with Grace's exchange between replicas, and torch's own HSDP."""

import functools

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import grace.torch
from grace.bench.step.contestants import LR, Contestant, Trained
from grace.bench.step.step_settings import SHARDS_ALONE, StepSettings


def contestants(settings: StepSettings) -> list[Contestant]:
    """Return shard groups that train alone, torch's HSDP, and Grace's hook: each method alone, and with compressed
    reduce-scatters if the settings have them."""
    shards, reduce_scatter = settings.sharded, settings.reduce_scatter
    bf16 = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    found = [Contestant(SHARDS_ALONE, "bound", functools.partial(_plain, shards, "shard"))]
    if "ddp" in settings.baselines:
        found += [
            Contestant("HSDP", "baseline", functools.partial(_plain, shards, None)),
            Contestant("HSDP bf16", "baseline", functools.partial(_plain, shards, None, mp_policy=bf16)),
        ]
    hooked: list[tuple[str, str | None, str | None]] = [
        *((spec, spec, None) for spec in settings.methods),
        *((f"strategy {spec}", None, spec) for spec in settings.strategies),
    ]
    for name, method, strategy in hooked:
        build = functools.partial(_hooked, shards, None, method, strategy)
        found.append(Contestant(f"{name} under FSDP2", "grace", build, method))
        if reduce_scatter is not None:
            build = functools.partial(_hooked, shards, reduce_scatter, method, strategy)
            found.append(Contestant(f"{name} + {reduce_scatter} under FSDP2", "grace", build))
    return found


def _plain(
    shards: int,
    axis: str | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> Trained:
    """Shard a model by FSDP2 over one axis or both, without Grace."""
    mesh = _mesh(next(model.parameters()).device.type, shards)
    model, optimizer = _sharded(model, mesh if axis is None else mesh[axis], mp_policy)
    return model, optimizer, None


def _hooked(
    shards: int,
    reduce_scatter: str | None,
    compressor: str | None,
    strategy: str | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> Trained:
    mesh = _mesh(next(model.parameters()).device.type, shards)
    model, optimizer = _sharded(model, mesh["shard"])
    if reduce_scatter is not None:
        grace.torch.compress_reduce_scatter(model, reduce_scatter)
    replicas = mesh["replicate"]
    state = grace.torch.register_fsdp_hook(model, replicas, compressor, strategy=strategy, optimizer=optimizer)
    return model, optimizer, state


@functools.cache  # each mesh has process groups, and each of these has threads
def _mesh(device: str, shards: int) -> DeviceMesh:
    size = torch.distributed.get_world_size()
    return init_device_mesh(device, (size // shards, shards), mesh_dim_names=("replicate", "shard"))


def _sharded(
    model: nn.Module, mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy | None = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model, sharded by the modules of its lists of layers, and an optimizer of its new parameters."""
    policy = mp_policy or MixedPrecisionPolicy()
    lists: list[nn.Sequential | nn.ModuleList] = [model] if isinstance(model, nn.Sequential) else []
    lists += [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    # inner lists first: fully_shard leaves out parameters that an inner module has already
    for part in [part for layers in reversed(lists) for part in layers]:
        if next(part.parameters(), None) is not None:
            fully_shard(part, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, torch.optim.SGD(model.parameters(), lr=LR)
