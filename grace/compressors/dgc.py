"""Deep gradient compression: top-k by a sampled threshold, with a warm-up."""

import math
from dataclasses import dataclass, replace

from grace.compressors.topk import kept_count, warmup_ratio
from grace.core.compressor import Payload, PayloadSpec, Shape, Sparsifier, Tensor, Traits
from grace.kernels import Kernels, kernels_of
from grace.kernels.index_coding import check_positions, encode

TOLERANCE = 0.3
"""Largest relative difference between the number of sent entries and ratio n."""
MIN_SAMPLE = 256
"""Least number of elements of the sample."""


@dataclass
class DGC(Sparsifier):
    """Sends the entries above a threshold that about ratio n of them exceed, with their indices.

        1. Take a sample, one element at random from each of its equal slices; all of a small tensor.
        2. The threshold is the magnitude that the part ``ratio`` of the sample exceeds.
        3. While fewer than 0.7 ratio n entries exceed it, take twice the part, down to a threshold of 0.
        4. If more than 1.3 ratio n exceed it, keep the ratio n largest of those, ties broken by index.

    So the count is within 30 % of ratio n (at least 1); only a tensor with fewer non-zeros sends fewer, all of
    them, and an all-zero one nothing. During the first steps the ratio falls exponentially,
    0.25 (ratio / 0.25)^(step / warmup_steps): the paper's 25 %, 6.25 %, 1.56 %, 0.4 %, 0.1 % at each quarter of
    the way to ratio=0.001. Every tensor is compressed, however small, because the momentum that the optimizer
    must do without is in the memory. On a GPU, where counting would make the host wait, the ratio n largest are found
    exactly, in a payload that has room for as many, and zeros fill it where fewer are non-zero. Source: Lin et al.,
    "Deep gradient compression", ICLR 2018, arXiv 1712.01887.

    Args:
        ratio: the part of the elements that is sent after the warm-up, in (0, 1].
        warmup_steps: steps until then.
        sample: the part of the elements that the threshold is estimated from; at least 256 of them.

    >>> import numpy as np
    >>> dgc = DGC(ratio=0.5)
    >>> dgc.decompress(*dgc.compress(np.float32([1, -4, 3, 2]), "w"))
    array([ 0., -4., 3., 0.], dtype=float32)
    """

    ratio: float = 0.01
    warmup_steps: int = 0
    sample: float = 0.01

    name = "dgc"
    bounded = True
    traits = Traits(
        category="sparsification",
        contraction=True,
        fixed_size="by data",
        memory="dgc",
        needs_memory=True,
    )

    def __post_init__(self) -> None:
        self.check_number("ratio", 0, 1, low_open=True)
        self.check_integer("warmup_steps", 0)
        self.check_number("sample", 0, 1, low_open=True)

    @property
    def current_ratio(self) -> float:
        """Ratio at this step of the warm-up."""
        return self.size_key(self.context.step)

    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, Shape]:
        k = kernels_of(tensor)
        n = check_positions(math.prod(tensor.shape))
        flat = k.flat(tensor)
        if self.bounded and k.on_device(flat):
            return self.padded_payload(flat, 0.0, kept_count(self.current_ratio, n)), tuple(tensor.shape)
        indices = self._select(k, flat, n, name)
        return [k.gather(flat, indices), encode(k, indices, n, fixed=False)], tuple(tensor.shape)

    def size_key(self, step: int) -> float:
        return warmup_ratio(self.ratio, self.warmup_steps, step)

    def device_spec(self, shape: Shape, step: int) -> PayloadSpec | None:
        return self.padded_spec(shape, kept_count(self.size_key(step), math.prod(shape)))

    def _select(self, k: Kernels, flat: Tensor, n: int, name: str) -> Tensor:
        ratio = self.current_ratio
        most = max(1, math.floor((1 + TOLERANCE) * ratio * n))
        # Of few entries the bounds may cross: with ratio n = 1.5 they are 2 and 1.
        least = min(most, math.ceil((1 - TOLERANCE) * ratio * n))
        size = min(n, max(MIN_SAMPLE, round(self.sample * n)))
        sample = flat
        if size < n:  # a sequence of its own: a method composed with this one draws from the first
            stream = replace(self.context.stream(name), draw=1)
            sample = k.gather(flat, k.sample_indices(stream, n, size, flat))
        # At a threshold of 0 all that is not zero is sent, and there is nothing left to look for.
        rank, threshold = max(1, round(ratio * size)), math.inf
        while threshold != 0:
            # What exceeds a threshold is sent, so it is the largest magnitude that is not.
            threshold = k.kth_magnitude(sample, rank + 1) if rank < size else 0.0
            indices = k.above(flat, threshold)
            if len(indices) >= least:
                break
            rank *= 2
        if len(indices) > most:
            largest = k.topk(k.gather(flat, indices), min(most, kept_count(ratio, n)))
            indices = k.gather(indices, largest)
        return indices
