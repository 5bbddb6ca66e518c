"""A scale per block: int8, int4 or 8-bit floats, rotated or not."""

import math
from dataclasses import dataclass, replace
from typing import Any

from grace.core.compressor import Accumulating, Payload, PayloadSpec, Tensor, TensorSpec, Traits
from grace.kernels import kernels_of
from grace.kernels.contract.quantization import ROTATED


@dataclass
class Block(Accumulating):
    """Rounds each element to a number of few bits, in units of its block's largest magnitude.

    Per block of ``block`` elements, s = max |x|:

        int:   code = sign(x) round(|x| / s L),         C(x) = s code / L,    L = 127 in 8 bits, 7 in 4
        fp8:   code = the 8-bit float at |x| / s 448,   C(x) = s code / 448   (e4m3)

    With ``hadamard=32`` each 32 elements are rotated before, and back after: y = H x / sqrt(32), which spreads an
    outlier over its neighbours. "nearest" rounding leaves out less than there is, and the memory gives its error back;
    "stochastic" is unbiased, with a variance of at most B / (4 L^2) ||x||^2 (B = block) as integers and about
    ||x||^2 / 256 as floats. It is the method for sharded training's reduce-scatter. Sources: Wang et al., "ZeRO++",
    arXiv 2306.10209; Jia et al., "SDP4Bit", arXiv 2410.15526; e4m3 is of Micikevicius et al., arXiv 2209.05433.

    Args:
        bits: of a code, 8 or 4.
        format: "int" or "fp8" (8 bits).
        block: elements that share a scale.
        hadamard: elements that are rotated together, 32, or 0 for none; what is left at a tensor's end stays as it is.
        rounding: "nearest" or "stochastic".

    >>> import numpy as np
    >>> block = Block(bits=4)
    >>> block.decompress(*block.compress(np.float32([-7, 0.4, 3.2]), "w"))
    array([-7., 0., 3.], dtype=float32)
    """

    bits: int = 8
    format: str = "int"
    block: int = 512
    hadamard: int = 0
    rounding: str = "nearest"

    name = "block"
    trained = {"block(bits=4)": {"adamw": 1.009, "sgd": 1.017}}
    nearest_traits = Traits(
        category="quantization", fixed_size="by shape", contraction=True, shardable=True, memory="residual"
    )

    def __post_init__(self) -> None:
        self.check_choice("bits", (8, 4))
        self.check_choice("format", ("int", "fp8"))
        if self.format == "fp8":
            self.check_choice("bits", (8,))
        self.check_integer("block", 1)
        self.check_choice("hadamard", (0, ROTATED))
        self.check_choice("rounding", ("nearest", "stochastic"))

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Biased and contracting, or unbiased; contracting as well if the blocks are short enough."""
        if self.rounding == "nearest":
            return self.nearest_traits
        contraction = self._variance(self.block) < 1
        memory = "residual" if contraction else "none"
        return replace(self.nearest_traits, unbiased=True, contraction=contraction, memory=memory)

    @property
    def noisy(self) -> bool:
        """True if the error can exceed the gradient."""
        return not self.traits.contraction

    @property
    def levels(self) -> int:
        """The largest whole number that is a code."""
        return 127 if self.bits == 8 else 7

    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, Any]:
        k = kernels_of(tensor)
        flat = k.rotate(k.flat(tensor)) if self.hadamard else k.flat(tensor)
        stream = self.context.stream(name) if self.rounding == "stochastic" else None
        if self.format == "fp8":
            codes, scales = k.round_float8(flat, self.block, stream)
        else:
            codes, scales = k.quantize(flat, self.levels, self.block, "max", stream)
        return [k.pack(codes, self.bits), scales], tuple(tensor.shape)

    def accumulate(self, payload: Payload, ctx: Any, out: Tensor, weight: float = 1.0) -> Tensor:
        k = kernels_of(out)
        packed, scales = payload
        codes = k.unpack(packed, self.bits, math.prod(ctx))
        into = k.zeros((math.prod(ctx),), "float32", out) if self.hadamard else k.flat(out)
        by = 1.0 if self.hadamard else weight
        if self.format == "fp8":
            into = k.add_float8(into, codes, scales, self.block, by)
        else:
            into = k.dequantize(into, codes, scales, self.levels, self.block, by)
        if not self.hadamard:
            return k.reshape(into, ctx)
        return k.add(out, k.reshape(k.rotate(into), ctx), weight)

    def variance(self, n: int) -> float | None:
        return self._variance(n) if self.traits.unbiased else None

    def _variance(self, n: int) -> float:
        block = min(n, self.block)
        if self.format == "fp8":  # an eighth of what is normal is its last place, and 2^-9 of what is less
            return 1 / 256 + block * (2.0**-9 / 448) ** 2 / 4
        return block / (4 * self.levels**2)

    def bucket_codec(self) -> tuple[str, dict[str, Any]] | None:
        chosen = {"levels": self.levels, "bits": self.bits, "bucket": self.block, "l2": False}
        chosen["nearest"] = self.rounding == "nearest"
        if self.format != "fp8" and not self.hadamard:
            return "levels", chosen
        if self.hadamard and self.block % self.hadamard:  # rows lie in several blocks
            return None
        return "coded", {**chosen, "float8": self.format == "fp8", "rotated": self.hadamard > 0}

    def payload_spec(self, shape: tuple[int, ...], step: int) -> PayloadSpec | None:
        n = math.prod(shape)
        return [TensorSpec("uint8", ((n * self.bits + 7) // 8,)), TensorSpec("float32", (-(-n // self.block),))]
