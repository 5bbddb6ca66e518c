"""Top-k sparsification."""

import math
from dataclasses import dataclass, replace

from grace.core.compressor import BucketCodecSpec, Payload, PayloadSpec, Shape, Sparsifier, Tensor, Traits
from grace.kernels import kernels_of
from grace.kernels.index_coding import check_positions, decode, encode

WARMUP_RATIO = 0.25
"""Ratio at the first step of a warm-up."""
# Powers of two that a program on a GPU holds in registers, where it finds a chunk's largest by halving.
CHUNKS = (0, *(1 << bits for bits in range(5, 13)))
"""Sizes of chunks that kernels have; 0 for no chunks."""


def kept_count(ratio: float, n: int) -> int:
    """Return how many of n elements a ratio keeps: max(1, ratio n), rounded; none of an empty tensor.

    >>> kept_count(0.01, 250), kept_count(0.01, 3), kept_count(0.01, 0)
    (2, 1, 0)
    """
    # At least one, or a bias of a few elements would never be trained.
    return min(n, max(1, round(ratio * n)))


def warmup_ratio(ratio: float, warmup_steps: int, step: int) -> float:
    """Return the ratio at a step: 0.25 (ratio / 0.25)^(step / warmup_steps), and ``ratio`` from ``warmup_steps`` on. A
    ratio of 0.25 or more has no warm-up.

    >>> [round(warmup_ratio(0.001, 4, step), 4) for step in range(6)]
    [0.25, 0.0629, 0.0158, 0.004, 0.001, 0.001]
    """
    if step >= warmup_steps or ratio >= WARMUP_RATIO:
        return ratio
    return WARMUP_RATIO * (ratio / WARMUP_RATIO) ** (step / warmup_steps)


@dataclass
class TopK(Sparsifier):
    """Sends the k = max(1, ratio n) entries of largest magnitude, with their indices, coded as
    their number makes smallest (int32, 16 bits or a bitmap).

    The k are found exactly; of equal magnitudes the lower index is kept. ||x - C(x)||^2 <= (1 - k/n) ||x||^2, and error
    feedback makes it converge.

    With ``chunk`` it sends the c = max(1, ratio chunk) largest of each ``chunk`` elements, one after the other, and of
    the m < chunk that are left at the end the ceil(c m / chunk) largest: k = ceil(c n / chunk) in all. Then
    ||x - C(x)||^2 <= (1 - c/chunk) ||x||^2, and a little less of ||x||^2 travels than in as many of the largest of all,
    1 % less of Gaussian elements with 1024 a chunk. In return x is read once, on GPUs too, and an index takes 16 bits
    however large the tensor is.
    Sources: Aji and Heafield, EMNLP 2017, arXiv 1704.05021; Stich et al., "Sparsified SGD with memory", NeurIPS 2018,
    arXiv 1809.07599.

    With ``warmup_steps`` the ratio of step t falls exponentially from 25 % to ``ratio``,

        ratio_t = 0.25 (ratio / 0.25)^(t / warmup_steps)    for t < warmup_steps,

    because gradients change fast at first, and what waits in the residual would be stale. All ranks know the step, so
    no sizes travel. Source: Lin et al., "Deep gradient compression", ICLR 2018, arXiv 1712.01887.

    Args:
        ratio: the part of the elements that is sent, after the warm-up, in (0, 1].
        chunk: number of elements that each choose their largest, a power of two
            from 32 to 4096; 0: all together.
        warmup_steps: steps until the ratio is ``ratio``; 0: it always is.

    >>> import numpy as np
    >>> topk = TopK(ratio=0.5)
    >>> topk.decompress(*topk.compress(np.float32([1, -4, 3, 2]), "w"))
    array([ 0., -4., 3., 0.], dtype=float32)
    """

    ratio: float = 0.01
    chunk: int = 0
    warmup_steps: int = 0

    name = "topk"
    offered = ("topk(ratio=0.01)",)
    offered_for_tables = ("topk(ratio=0.001)",)
    measured_loss = {"topk(ratio=0.01)": {"adamw": 1.47, "sgd": 1.975}}
    traits = Traits(category="sparsification", fixed_size="by shape", contraction=True, memory="residual")

    def __post_init__(self) -> None:
        self.check_number("ratio", 0, 1, low_open=True)
        self.check_integer("chunk", 0)
        self.check_choice("chunk", CHUNKS)
        self.check_integer("warmup_steps", 0)
        if self.warmup_steps:
            # Only then: what needs sizes that never change, as scatter_merge does, takes top-k without a warm-up.
            self.traits = replace(self.traits, fixed_size="by shape and step")

    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, Shape]:
        k = kernels_of(tensor)
        n, ratio = check_positions(math.prod(tensor.shape)), self._ratio(self.context.step)
        flat = k.flat(tensor)
        if self.chunk:
            indices = k.topk_chunks(flat, self.chunk, kept_count(ratio, self.chunk))
        else:
            indices = k.topk(flat, kept_count(ratio, n))
        # A bitmap is among the codings, because the number of positions follows from the shape.
        coded = encode(k, indices, n, fixed=True, chunk=self.chunk)
        return [k.gather(flat, indices), coded], tuple(tensor.shape)

    def sent_indices(self, payload: Payload, ctx: Shape) -> Tensor | None:
        coded, n, count = payload[1], math.prod(ctx), payload[0].shape[0]
        # a chunk's number of positions follows from the payload, so that it decodes at any step of the warm-up
        chunks = (self.chunk, count * self.chunk // max(1, n)) if self.chunk else None
        return decode(kernels_of(coded), coded, n, count, chunks)

    def size_key(self, step: int) -> float:
        return self._ratio(step)

    def payload_spec(self, shape: Shape, step: int) -> PayloadSpec | None:
        n, ratio = math.prod(shape), self._ratio(step)
        count = -(-kept_count(ratio, self.chunk) * n // self.chunk) if self.chunk else kept_count(ratio, n)
        return self._spec(n, count, self.chunk)

    def bucket_codec(self) -> BucketCodecSpec:
        if not self.chunk:
            return "largest", {}
        return "largest of chunks", {
            "chunk": self.chunk,
            "kept": kept_count(self._ratio(self.context.step), self.chunk),
        }

    def _ratio(self, step: int) -> float:
        return warmup_ratio(self.ratio, self.warmup_steps, step)
