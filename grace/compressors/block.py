"""A scale per block: codes of 8, 4, 3 or 2 bits, or 8-bit floats, rotated or not."""

import math
from dataclasses import dataclass, replace

from grace.core.compressor import Accumulating, BucketCodecSpec, Payload, PayloadSpec, Shape, Tensor, TensorSpec, Traits
from grace.kernels import kernels_of
from grace.kernels.constants import GAUSSIAN_STEPS, ROTATED

BLOCKS = {8: 512, 4: 512, 3: 128, 2: 128}
"""Defaults by bits: the elements that share a scale."""


@dataclass
class Block(Accumulating):
    """Rounds each element to a number of few bits, in units of its block's largest magnitude or root mean square.

    Per block of B elements:

        max:   s = max |x|,           code = sign(x) round(|x| / s L),    C(x) = s code / L,    L = 2^(bits-1) - 1
        rms:   s = sqrt(mean x^2),    C(x) = the nearest of +-d s / 2, +-3 d s / 2, ...    (2^bits levels)
        fp8:   s = max |x|,           code = the 8-bit float at |x| / s 448,    C(x) = s code / 448    (e4m3)

    d is the step whose squared error of Gaussian elements is smallest: .9957, .5860, .3352 and .03076 for 2, 3, 4 and 8
    bits. "rms" has no level 0 (blocks of zeros stay zeros) and cuts off what is beyond its outermost level,
    t = (2^bits - 1) d / 2 times s, which the memory gives back later. Of Gaussian elements 2 bits leave .12 ||x||^2,
    and with "max" and B = 128 .58. Gradients with few large elements are another matter: of one element among zeros
    "rms" with 2 bits brings a seventh, and leaves all of ||x||^2. So "max" is the default: with 2 bits under SGD with
    momentum a character GPT reached a loss of 1.48 by "max" and 2.95 by "rms" (1.46 without compression), under AdamW
    1.403 and 1.364 (1.303).

    "nearest" rounding leaves at most (B - 1) / (B - 1 + 4 L^2) ||x||^2 with "max", and with "rms"
    ((1 - t / sqrt(B))^2 + (1 - 1 / B) d^2 / 4) ||x||^2, which is less than ||x||^2 of blocks of up to 128 elements with
    2 bits, and 2186 with 3; the memory gives the error back. "stochastic" is unbiased, with a variance of at most
    B / (4 L^2) ||x||^2 as integers and about ||x||^2 / 256 as floats; "rms" has no such rounding, since it would lose
    on average, too, what it cuts off.

    With ``hadamard=32`` each 32 elements are rotated before, and back after: y = H x / sqrt(32), which spreads an
    outlier over its neighbours. It is the method for sharded training's reduce-scatter. Sources: Wang et al., "ZeRO++",
    arXiv 2306.10209; Jia et al., "SDP4Bit", arXiv 2410.15526; e4m3 is of Micikevicius et al., arXiv 2209.05433; d of
    Max, "Quantizing for minimum distortion", IRE Trans. Information Theory 6, 1960.

    Args:
        bits: of a code, 8, 4, 3 or 2.
        format: "int" or "fp8" (8 bits).
        block: elements that share a scale; None for 512, and 128 of 3 or 2 bits.
        hadamard: elements that are rotated together, 32, or 0 for none; what is left at a tensor's end stays as it is.
        rounding: "nearest" or "stochastic".
        scale: "max", or "rms" (of integers, to the nearest); None for "max".

    >>> import numpy as np
    >>> block = Block(bits=4)
    >>> block.decompress(*block.compress(np.float32([-7, 0.4, 3.2]), "w"))
    array([-7., 0., 3.], dtype=float32)
    >>> block = Block(bits=2, scale="rms")
    >>> block.decompress(*block.compress(np.float32([-2, 0.4, 0, 4]), "w")).round(2)
    array([-1.12,  1.12,  1.12,  3.35], dtype=float32)
    """

    bits: int = 8
    format: str = "int"
    block: int | None = None
    hadamard: int = 0
    rounding: str = "nearest"
    scale: str | None = None

    name = "block"
    offered = ("block(bits=4)",)
    measured_loss = {
        "block(bits=4)": {"adamw": 1.009, "sgd": 0.999},
        "block(bits=3)": {"adamw": 1.016, "sgd": 0.996},
        "block(bits=2)": {"adamw": 1.076, "sgd": 1.016},
        "block(bits=2, scale='rms')": {"adamw": 1.046, "sgd": 2.026},
    }
    nearest_traits = Traits(
        category="quantization", fixed_size="by shape", contraction=True, shardable=True, memory="residual"
    )

    def __post_init__(self) -> None:
        self.check_choice("bits", tuple(BLOCKS))
        self.check_choice("format", ("int", "fp8"))
        if self.format == "fp8":
            self.check_choice("bits", (8,))
        if self.block is not None:
            self.check_integer("block", 1)
        self.check_choice("hadamard", (0, ROTATED))
        self.check_choice("rounding", ("nearest", "stochastic"))
        self.check_choice("scale", (None, "max", "rms"))
        if self.scale is not None and self.format == "fp8":
            raise self.error("scale is of integers; 8-bit floats are in units of the largest magnitude: leave it out")
        if self.scale == "rms" and self.rounding == "stochastic":
            raise self.error(
                "scale='rms' cuts off what is large, so that stochastic rounding would not be unbiased: use "
                "rounding='nearest' or scale='max'"
            )

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Biased, or unbiased; contracting if the blocks are short enough, as those of the nearest of "max" always."""
        if self.rounding == "nearest":
            contraction = self.norm == "max" or self._largest_error < 1
            return replace(self.nearest_traits, contraction=contraction)
        # Error feedback diverges where the noise of rounding may exceed what is rounded.
        contraction = self._variance(self.block_size) < 1
        memory = "residual" if contraction else "none"
        return replace(self.nearest_traits, unbiased=True, contraction=contraction, memory=memory)

    @property
    def noisy(self) -> bool:
        """True if the error can exceed the gradient."""
        return not self.traits.contraction

    @property
    def noise_advice(self) -> str:  # type: ignore[override]
        """The choice that is recommended on long blocks with error feedback; empty for another memory."""
        return "shorter blocks" if self.norm == "rms" else ""

    @property
    def block_size(self) -> int:
        """Elements that share a scale."""
        return self.block or BLOCKS[self.bits]

    @property
    def norm(self) -> str:
        """The scale of a block: "max", or "rms"."""
        return self.scale or "max"

    @property
    def levels(self) -> float:
        """The outermost level in steps: the largest whole number that is a code, or of "rms" half a step more."""
        return 2 ** (self.bits - 1) - (1 if self.norm == "max" else 0.5)

    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, Shape]:
        k = kernels_of(tensor)
        flat = k.rotate(k.flat(tensor)) if self.hadamard else k.flat(tensor)
        stream = self.context.stream(name) if self.rounding == "stochastic" else None
        if self.format == "fp8":
            codes, scales = k.round_float8(flat, self.block_size, stream)
        else:
            codes, scales = k.quantize(flat, self.levels, self.block_size, self.norm, stream)
        return [k.pack(codes, self.bits), scales], tuple(tensor.shape)

    def accumulate(self, payload: Payload, ctx: Shape, out: Tensor, weight: float = 1.0) -> Tensor:
        k = kernels_of(out)
        packed, scales = payload
        codes = k.unpack(packed, self.bits, math.prod(ctx))
        # What `out` has from other ranks is not rotated: decode apart, rotate back, and add then.
        into = k.zeros((math.prod(ctx),), "float32", out) if self.hadamard else k.flat(out)
        by = 1.0 if self.hadamard else weight
        if self.format == "fp8":
            into = k.add_float8(into, codes, scales, self.block_size, by)
        else:
            into = k.dequantize(into, codes, scales, self.levels, self.block_size, by)
        if not self.hadamard:
            return k.reshape(into, ctx)
        return k.add(out, k.reshape(k.rotate(into), ctx), weight)

    def variance(self, n: int) -> float | None:
        return self._variance(n) if self.traits.unbiased else None

    def _variance(self, n: int) -> float:
        block = min(n, self.block_size)
        if self.format == "fp8":  # an eighth of what is normal is its last place, and 2^-9 of what is less
            return 1 / 256 + block * (2.0**-9 / 448) ** 2 / 4
        return block / (4 * self.levels**2)

    @property
    def _largest_error(self) -> float:
        """The most of ||x||^2 that "rms" leaves out: where one element has it all, the others become half a step."""
        step, n = GAUSSIAN_STEPS[self.levels], self.block_size
        cut = max(0.0, math.sqrt(n) - self.levels * step)
        return step**2 / 4 + max(0.0, cut**2 - step**2 / 4) / n

    def bucket_codec(self) -> BucketCodecSpec | None:
        chosen = {"levels": self.levels, "bits": self.bits, "bucket_size": self.block_size, "norm": self.norm}
        chosen["nearest"] = self.rounding == "nearest"
        if self.format != "fp8" and not self.hadamard:
            return "levels", chosen
        if self.hadamard and self.block_size % self.hadamard:  # rows lie in several blocks
            return None
        return "coded", {**chosen, "float8": self.format == "fp8", "rotated": self.hadamard > 0}

    def payload_spec(self, shape: Shape, step: int) -> PayloadSpec | None:
        n = math.prod(shape)
        return [TensorSpec("uint8", ((n * self.bits + 7) // 8,)), TensorSpec("float32", (-(-n // self.block_size),))]
