"""A communicator of one file: sums go down a tree to a root, and the total is broadcast."""

from typing import Any

import numpy as np

import grace
from grace.core.route import BROADCAST, Carries, Collective, Leg


class Tree(grace.Communicator):
    """Sums payloads in ceil(log2 W) hops: in hop h rank r + 2^h sends its partial sum to rank r. Rank 0 has the total
    then, and broadcasts it."""

    name = "tree"
    sums = True

    def legs(self, nbytes, engine):
        return [Leg(TO_THE_ROOT, Carries.GRADIENTS, root=0), Leg(BROADCAST, Carries.SUMS, root=0)]


class Reduction:
    """A sum on its way down the tree."""

    def __init__(self, backend: Any, wire: Any):
        self.backend, self.total, self.done = backend, wire, False
        if backend.rank:
            backend.count(grace.kernels_of(wire).nbytes(wire))

    def wait(self) -> None:
        """Take part in the hops, up to the one in which this rank sends."""
        rank, size, hop = self.backend.rank, self.backend.size, 1
        while hop < size and not self.done:
            if rank % (2 * hop):
                send(self.backend, self.total, rank - hop)
                self.done = True
            elif rank + hop < size:
                self.total = self.total + receive(self.backend, self.total, rank + hop)
            hop *= 2
        self.done = True


def to_the_root(backend, wire, root):
    """Start a reduction to rank 0."""
    reduction = Reduction(backend, wire)
    return grace.Handle(reduction.wait, later=lambda: [reduction.total])


def sent(nbytes, ranks, rank, root):
    """Return the bytes that leave a rank: every one but the root sends once."""
    return nbytes if rank != root else 0.0


TO_THE_ROOT = Collective("tree", to_the_root, sent, formula="p")


def send(backend, wire, rank):
    """Send a wire to a rank, over torch.distributed or MPI."""
    if hasattr(backend, "comm"):
        backend.comm.Send(np.ascontiguousarray(wire), rank)
    else:
        import torch.distributed as dist

        dist.send(wire, rank, group=backend.group)


def receive(backend, like, rank):
    """Return what a rank sends."""
    if hasattr(backend, "comm"):
        buffer = np.empty(tuple(like.shape), grace.kernels_of(like).dtype(like))
        backend.comm.Recv(buffer, rank)
        return grace.kernels_of(like).full(buffer.tolist(), grace.kernels_of(like).dtype(like), like)
    import torch
    import torch.distributed as dist

    buffer = torch.empty_like(like)
    dist.recv(buffer, rank, group=backend.group)
    return buffer
