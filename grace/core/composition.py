"""Composition: a value compressor on the values that a sparsifier sends."""

import math

from grace.core.compressor import Compressor, Ctx, FixedSize, Payload, PayloadSpec, Tensor, TensorSpec, Traits
from grace.kernels import kernels_of

MANY = 1 << 20
"""A number of values so large that every payload dimension that grows with the number differs from that for 0."""


class Composed(Compressor):
    """``sparsifier | values``: the sparsifier picks entries, and the second method compresses their values.

        C(x) = scatter(V(x[S(x)]))

    The spec is that of both, joined: ``topk(ratio=0.01) | qsgd(levels=7)``. Error feedback, if the sparsifier
    has it by default, covers both errors. It diverges on values whose variance exceeds them, so an unbiased V with
    E||V(v) - v||^2 <= omega ||v||^2 (``variance``) is damped, as Basu et al. do:

        C(x) = scatter(V(x[S(x)])) / (1 + omega)

    which makes the composition a contraction; the residual keeps the rest. Two published methods are compositions:

    - sparse ternary compression (Sattler et al., arXiv 1903.02891): ``topk(ratio=0.01) | efsignsgd``;
    - Qsparse-local-SGD (Basu et al., NeurIPS 2019, arXiv 1906.02367): ``topk(ratio=0.01) | qsgd(levels=7)``,
      with ``backward_passes_per_step`` for its local steps. With ``qsgd(levels=7, bucket_size=64)``
      omega is 1/3 instead of 2.6, so less is left for later steps.

    Args:
        sparsifier: a compressor whose first payload tensor holds the values that it picked.
        values: a quantizer or cast; not a voting one (signsgd), whose aggregate is not a mean.

    Raises:
        ConfigError: the two do not compose.

    >>> import numpy as np
    >>> import grace
    >>> stc = grace.make("compressor", "topk(ratio=0.5) | efsignsgd")
    >>> stc.decompress(*stc.compress(np.float32([1, -4, 3, 2]), "w"))
    array([ 0. , -3.5,  3.5,  0. ], dtype=float32)
    >>> stc.spec
    'topk(ratio=0.5) | efsignsgd'
    """

    name = "composed"

    def __init__(self, sparsifier: Compressor, values: Compressor):
        self.sparsifier, self.values = sparsifier, values
        sparsifier.bounded = False  # padding would enter the means and norms of the values
        if not sparsifier.sends_values:
            raise self.error(f"{sparsifier.spec} is not a sparsifier that sends values; the first part must be")
        if values.traits.category != "quantization" or values.votes or values.stateful:
            raise self.error(f"{values.spec} cannot compress values; use a quantizer or cast without a vote or state")

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Traits that follow from those of both parts."""
        first, second = self.sparsifier.traits, self.values.traits
        summable = first.summable and second.summable
        return Traits(
            category="hybrid",
            unbiased=first.unbiased and second.unbiased,
            contraction=first.contraction and (second.contraction or self._damps),
            summable=summable,
            fixed_size=self._fixed_size,
            communicator="allreduce" if summable else "allgather",
            memory=first.memory,
            needs_memory=first.needs_memory,
        )

    @property
    def _fixed_size(self) -> FixedSize | None:
        sizes = {self.sparsifier.traits.fixed_size, self.values.traits.fixed_size}
        if "by data" in sizes or sizes == {None, "by shape and step"}:
            # An unknown size is compared with the first step's, which a warm-up would break: let sizes travel.
            return "by data"
        return next(size for size in (None, "by shape and step", "by shape") if size in sizes)

    @property
    def spec(self) -> str:
        """The specs of both parts, joined by a bar."""
        return f"{self.sparsifier.spec} | {self.values.spec}"

    @property
    def by_position(self) -> bool:  # type: ignore[override]
        """True if the sparsifier tells elements apart by position."""
        return self.sparsifier.by_position

    def to_dict(self) -> dict[str, object]:
        """Return the dict form of the spec: the name, and the dict forms of both parts."""
        return {"name": self.name, "sparsifier": self.sparsifier.to_dict(), "values": self.values.to_dict()}

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        """True if the sparsifier is stateful; the values' method never is."""
        return self.sparsifier.stateful

    @property
    def _damps(self) -> bool:
        # Of one value: only whether there is a bound at all.
        return self.sparsifier.traits.memory != "none" and self.values.variance(1) is not None

    noise_advice = "values of bounded variance, as qsgd or natural have"

    @property
    def noisy(self) -> bool:
        """True if the values' noise is neither bounded nor damped."""
        return self.values.traits.unbiased and not self.values.traits.exact and not self._damps

    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, Ctx]:
        (values, *where), ctx = self.sparsifier.compress(tensor, name)
        coded, values_ctx = self.values.compress(values, name)
        return [*coded, *where], (ctx, values_ctx, len(coded))

    def decompress(self, payload: Payload, ctx: Ctx) -> Tensor:
        return self.sparsifier.decompress(*self._decode(payload, ctx))

    def accumulate(self, payload: Payload, ctx: Ctx, out: Tensor, weight: float = 1.0) -> Tensor:
        decoded, first_ctx = self._decode(payload, ctx)
        return self.sparsifier.accumulate(decoded, first_ctx, out, weight)

    def sent_indices(self, payload: Payload, ctx: Ctx) -> Tensor | None:
        return self.sparsifier.sent_indices(*self._decode(payload, ctx))

    def _decode(self, payload: Payload, ctx: Ctx) -> tuple[Payload, Ctx]:
        first_ctx, values_ctx, count = ctx
        coded, where = payload[:count], payload[count:]
        if self.sparsifier.traits.varies:  # another rank sent another number of values
            values_ctx = tuple(where[0].shape)
        values = self.values.decompress(coded, values_ctx)
        k = kernels_of(values)
        variance = self.values.variance(math.prod(values.shape))
        if self._damps and variance is not None:
            values = k.divide(values, values, 1 + variance)
        return [k.flat(values), *where], first_ctx

    def size_key(self, step: int) -> tuple[object, object]:
        return self.sparsifier.size_key(step), self.values.size_key(step)

    def payload_spec(self, shape: tuple[int, ...], step: int) -> PayloadSpec | None:
        picked = self.sparsifier.payload_spec(shape, step)
        if not picked:
            return None
        (count,) = picked[0].shape
        few, many = (self.values.payload_spec((n,), step) for n in ((0, MANY) if count is None else (count, count)))
        if not few or not many:
            return None
        # a dimension that follows from the number of values depends on the data if that number does
        coded = [a if a == b else TensorSpec(a.dtype, (None, *a.shape[1:])) for a, b in zip(few, many, strict=True)]
        return [*coded, *picked[1:]]

    def ctx_of(self, name: str, shape: tuple[int, ...], like: Tensor) -> Ctx:
        picked = self.sparsifier.payload_spec(shape, self.context.step) or []
        # If the data decide the number of values, their shape is taken from the payload when it is decoded.
        values = picked[0].shape if picked and picked[0].known else (0,)
        coded = self.values.payload_spec(values, self.context.step) or []
        return self.sparsifier.ctx_of(name, shape, like), self.values.ctx_of(name, values, like), len(coded)
