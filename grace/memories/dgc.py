"""Deep gradient compression's memory: momentum correction, local clipping and momentum factor masking."""

import math
from dataclasses import dataclass

from grace.core.compressor import Compressor, Ctx, Payload, Shape, Tensor
from grace.core.memory import Memory
from grace.kernels import kernels_of
from grace.kernels.index_coding import check_positions
from grace.memories.residual import Residual


@dataclass
class DGCMemory(Memory):
    """Memory that accumulates velocities instead of gradients, so that a late entry arrives with its momentum.

        g = g min(1, clip / sqrt(W) / ||g||_2)      local clipping, per variable, if ``clip`` is given
        u = momentum u + g                          velocity
        v = v + u                                   accumulated;  nesterov: v = v + momentum u + g
        x = v

    After compression v = v - C(x), which is 0 at the entries that a sparsifier sent, and u = 0 at these, too (momentum
    factor masking). Nesterov's variant is that of the paper's code. The optimizer's own momentum must be 0, as it would
    be applied twice. Source: Lin et al., ICLR 2018, arXiv 1712.01887, algorithm 4.

    Args:
        momentum: factor of the velocity.
        clip: largest norm of a variable's gradient, for W = 1; None for no clipping. It is in the units of the
            gradient; a loss scale is accounted for.
        nesterov: True to look ahead by one momentum step.

    >>> import numpy as np
    >>> from grace.compressors.topk import TopK
    >>> memory, topk = DGCMemory(momentum=0.5), TopK(ratio=0.5)
    >>> x = memory.compensate(np.float32([4, 1]), "w")
    >>> memory.update(x, "w", topk, *topk.compress(x, "w"))
    >>> memory.compensate(np.float32([0, 0]), "w")
    array([0. , 1.5], dtype=float32)
    """

    momentum: float = 0.9
    clip: float | None = None
    nesterov: bool = False

    name = "dgc"
    owns_momentum = True

    def __post_init__(self) -> None:
        self.check_number("momentum", 0, 1)
        if self.clip is not None:
            self.check_number("clip", 0, low_open=True)
        self.check_choice("nesterov", (False, True))

    @classmethod
    def accepts(cls, compressor: Compressor) -> str | None:
        """Return the reason why this memory cannot serve the compressor; None if it can."""
        if compressor.traits.category not in ("sparsification", "hybrid"):
            return "it clears the momentum of the entries that were sent, so it is for sparsifiers"
        return None

    def answering(self) -> Memory:
        """Return a residual for a destination's answers: payloads contain momentum and clipping already."""
        return Residual()

    def keeps(self, shape: Shape) -> dict[str, Shape]:
        return {"velocity": shape, "accumulated": shape}

    def residual_tensors(self, name: str) -> list[Tensor]:
        return [self.state[name]["accumulated"]] if name in self.state else []

    def compensate(self, tensor: Tensor, name: str) -> Tensor:
        k = kernels_of(tensor)
        shape = tuple(tensor.shape)
        if self.clip is not None:
            limit = self.clip * self.context.loss_scale / math.sqrt(self.context.size)
            tensor = k.reshape(k.clip_norm(k.flat(tensor), limit), shape)
        if name in self.state:
            kept = self.state[name]
        else:
            # One tensor for both: the kernels below make new ones of it.
            kept = dict.fromkeys(("velocity", "accumulated"), k.zeros(shape, "float32", tensor))
        u = k.combine(self.momentum, kept["velocity"], 1.0, tensor)
        v = k.combine(1.0, kept["accumulated"], self.momentum if self.nesterov else 1.0, u)
        if self.nesterov:
            v = k.add(v, tensor)
        self.state[name] = {"velocity": u, "accumulated": v}
        return v

    def update(self, tensor: Tensor, name: str, compressor: Compressor, payload: Payload, ctx: Ctx) -> None:
        # Both tensors were made in this step, so they may be changed; committed state must not change before the
        # commit.
        k = kernels_of(tensor)
        shape, u = tuple(tensor.shape), self.state[name]["velocity"]
        u = k.reshape(k.zero_at(k.flat(u), _sent(compressor, payload, ctx, shape)), shape)
        v = compressor.accumulate(payload, ctx, tensor, -1.0)
        self.state[name] = {"velocity": u, "accumulated": v}


def _sent(compressor: Compressor, payload: Payload, ctx: Ctx, shape: tuple[int, ...]) -> Tensor:
    """Return the flat indices of sent entries; if the compressor does not know them, those that decode to non-zero."""
    indices = compressor.sent_indices(payload, ctx)
    if indices is not None:
        return indices
    check_positions(math.prod(shape))
    k = kernels_of(payload[0])
    return k.above(k.flat(compressor.decompress(payload, ctx)), 0.0)
