"""FSDP2 over 2 shards x 2 replicas: a model, its batches, and what compresses its gradients; in the rank processes."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import grace

MESHES: dict[tuple[int, ...], DeviceMesh] = {}
POLICIES = {
    "float32": {},
    "bfloat16 to float32": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)},
    "kept": {"reshard_after_forward": False},
}


def mesh_of(*shape: int) -> DeviceMesh:
    """Return a mesh of replicas x shards (x tensor parallelism); made once, since process groups cost threads."""
    shape = shape or (2, 2)
    if shape not in MESHES:
        MESHES[shape] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tp")[: len(shape)])
    return MESHES[shape]


class Net(torch.nn.Module):
    """Two layers of odd sizes, of which shards get unequal parts, and one that is used now and then."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 13)
        self.spare = torch.nn.Linear(8, 13)
        self.last = torch.nn.Linear(13, 3)

    def forward(self, x, spare=False):
        return self.last(torch.relu(self.spare(x) if spare else self.first(x)))


class Turned(torch.nn.Module):
    """Two layers of one size; the other ranks run the second one first."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, x):
        layers = [self.first, self.second]
        for layer in layers if dist.get_rank() == 0 else reversed(layers):
            x = layer(x)
        return x


def built(mesh: DeviceMesh, **options: Any) -> Net:
    """Return the model, sharded over a mesh."""
    torch.manual_seed(7)
    net = Net()
    fully_shard(net.last, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


@contextlib.contextmanager
def compressed(
    net: torch.nn.Module, replicas: Any = None, shards: Any = None, mesh: DeviceMesh | None = None, **options: Any
) -> Iterator[list[Any]]:
    """Compress in this context what replicas exchange, by a method, or what shards do, or both.

    Args:
        net: a sharded model.
        replicas: the method, or method and memory.
        shards: the method, or method and memory.
        mesh: of both axes.
        options: of both.

    Yields:
        the states: that of shards first, if there is one.
    """
    states = []
    if shards is not None:
        choices = (shards,) if isinstance(shards, str) else shards
        states.append(grace.torch.compress_reduce_scatter(net, *choices, **options))
    if replicas is not None:
        choices = (replicas,) if isinstance(replicas, str) else replicas
        states.append(grace.torch.register_fsdp_hook(net, (mesh or mesh_of())["replicate"], *choices, **options))
    try:
        yield states
    finally:
        for state in reversed(states):
            state.close()


def batch(step: int, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's inputs and targets."""
    rng = torch.Generator().manual_seed(100 * step + 10 * part + dist.get_rank())
    return torch.randn(4, 8, generator=rng), torch.randn(4, 3, generator=rng)


def loss_of(net: torch.nn.Module, step: int, part: int = 0, **how: Any) -> torch.Tensor:
    """Return the loss on this rank's batch."""
    x, y = batch(step, part)
    return (net(x, **how).float() - y).square().mean()


def trained(
    net: torch.nn.Module, steps: int, body: Callable | None = None, lr: float = 0.1, first: int = 0
) -> dict[str, torch.Tensor]:
    """Train, and return the whole weights; ``body`` makes a step's gradients."""
    opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    for step in range(first, first + steps):
        opt.zero_grad()
        if body is None:
            loss_of(net, step).backward()
        else:
            body(net, step)
        opt.step()
    return whole(net)


def whole(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the whole parameters."""
    return {name: p.full_tensor().detach().clone() for name, p in net.named_parameters()}


def largest_difference(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return how far weights are apart."""
    return max(float((got[name] - wanted[name]).abs().max()) for name in wanted)


def same_bits(weights: dict[str, torch.Tensor]) -> bool:
    """True if all ranks have the same."""
    flat = torch.cat([w.reshape(-1) for w in weights.values()])
    everybody = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, flat)
    return all(torch.equal(flat, other) for other in everybody)
