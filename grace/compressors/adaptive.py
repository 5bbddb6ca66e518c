"""Adaptive thresholds for both signs, and one mean for each."""

import math
from dataclasses import dataclass

from grace.compressors.topk import kept_count
from grace.core.compressor import Accumulating, Payload, PayloadSpec, Shape, Tensor, TensorSpec, Traits, without_padding
from grace.kernels import kernels_of
from grace.kernels.index_coding import check_positions, coded_as, decode, encode


@dataclass
class Adaptive(Accumulating):
    """Keeps the largest positive and the most negative entries, and sends a mean for each side (GRACE's adaq).

    With P the k+ = max(1, ratio n+) largest of the n+ positive entries, and N likewise of the negative ones:

        C(x)_i = mean(x_P) for i in P,    mean(x_N) for i in N,    else 0

    The thresholds are exact, ties broken by index; a side without entries sends none. The payload is the indices
    of each side and two means, so its size depends on the data. On a GPU, where counting would make the host wait, each
    side has room for ratio n indices, of which those that are not needed lie outside of the tensor; and two counts
    travel, too. Source: Dryden et al., "Communication
    quantization for data-parallel training of deep neural networks", MLHPC 2016.

    Args:
        ratio: the part of each side that is sent, in (0, 1].

    >>> import numpy as np
    >>> adaptive = Adaptive(ratio=0.5)
    >>> adaptive.decompress(*adaptive.compress(np.float32([1, -4, 3, -1, 5, 2]), "w"))
    array([ 0., -4., 4., 0., 4., 0.], dtype=float32)
    """

    ratio: float = 0.01

    name = "adaptive"
    bounded = True
    by_position = True
    traits = Traits(category="sparsification", contraction=True, fixed_size="by data", memory="residual")

    def __post_init__(self) -> None:
        self.check_number("ratio", 0, 1, low_open=True)

    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, Shape]:
        k = kernels_of(tensor)
        n = check_positions(math.prod(tensor.shape))
        flat = k.flat(tensor)
        sides, means, counts = [], [], []
        for sign in (1, -1):
            side, count = k.one_side(flat, sign)
            if self.bounded and k.on_device(flat):
                room = kept_count(self.ratio, n)
                values, indices, count = k.largest_above(side, 0.0, room, self.ratio)
                sides.append(encode(k, indices, n + 1, fixed=False))  # index n stands for an unused place
                # The mean over all of the room becomes that of the entries; without any, 0 is divided by 1.
                some = k.cast(count, "float32") + k.cast(count == 0, "float32")
                means.append(k.mean_abs(values) * (room / some))
                counts.append(count)
                continue
            indices = k.topk(side, kept_count(self.ratio, count))
            sides.append(encode(k, indices, n, fixed=False))
            means.append(k.mean_abs(k.gather(side, indices)))
        return [k.join(means), *sides, *([k.join(counts)] if counts else [])], tuple(tensor.shape)

    def payload_spec(self, shape: Shape, step: int) -> PayloadSpec | None:
        side = TensorSpec(coded_as(math.prod(shape))[0], (None,))
        return [TensorSpec("float32", (2,)), side, side]

    def device_spec(self, shape: Shape, step: int) -> PayloadSpec | None:
        n = math.prod(shape)
        side = TensorSpec(coded_as(n + 1)[0], (kept_count(self.ratio, n),))
        return [TensorSpec("float32", (2,)), side, side, TensorSpec("int32", (2,))]

    def accumulate(self, payload: Payload, ctx: Shape, out: Tensor, weight: float = 1.0) -> Tensor:
        k = kernels_of(out)
        means, n = payload[0], math.prod(ctx)
        above, below = self._sides(payload)
        flat = k.add_at(k.flat(out), decode(k, above, n), means[:1], weight)
        flat = k.add_at(flat, decode(k, below, n), means[1:], -weight)
        return k.reshape(flat, ctx)

    def sent_indices(self, payload: Payload, ctx: Shape) -> Tensor | None:
        """Return flat indices of the entries that a payload carries, one side after the other."""
        k, n = kernels_of(payload[0]), math.prod(ctx)
        return k.join([decode(k, coded, n) for coded in self._sides(payload)])

    def _sides(self, payload: Payload) -> list[Tensor]:
        """Return both sides' coded indices."""
        counts = payload[3:]
        return [without_padding([payload[1 + i]], [c[i : i + 1] for c in counts])[0] for i in (0, 1)]
