"""The codec of sparse gradients, :class:`SparseRows`, whose values are compressed like dense gradients."""

from collections.abc import Sequence
from typing import Any

from grace.core.compressor import Payload, Tensor
from grace.exchange.bucket import Bucket
from grace.exchange.codec import PerVariableCodec
from grace.exchange.header import Header
from grace.exchange.sparse_codec import is_nothing
from grace.exchange.sparse_rows import NOTHING, SparseRows, sum_rows
from grace.exchange.tracing import recorder
from grace.kernels import Kernels, kernels_of


class RowCodec(PerVariableCodec):
    """Codec that adds up duplicate rows, and passes the row numbers to the compressor.

    A second compression is one of rows, too: the root's answer holds all ranks' rows.
    """

    def __init__(self, bucket: Bucket, kernels: Kernels, on_device: bool = False):
        super().__init__(bucket, kernels, on_device)
        self.rows: Any = self.compressor
        """The compressor, a :class:`~grace.exchange.sparse_codec.RowCompressor`."""
        self.answers: Any = None if self.second is None else self.second[0]

    def encode(self, gradients: Sequence[SparseRows], header: Header) -> Tensor:
        distinct = recorder.each("sum rows", self.names, _summed, gradients)
        self.rows.rows = {name: one.rows for name, one in zip(self.names, distinct, strict=True)}
        return super().encode([one.values for one in distinct], header)

    def _aggregate(self, i: int, payloads: list[Payload], out: Any, count: float, name: str) -> SparseRows:
        values = self.aggregated(payloads, self.encoded[i][1], None, count, name)
        return SparseRows(values, self.rows.received[name])

    def mean(self, i: int, payloads: list[Payload], name: str) -> Tensor:
        values = self.aggregated(payloads, self.encoded[i][1], None, self.context.size, name)
        k, rows = self.kernels, self.rows.received[name]
        if not rows.shape[0]:
            rows = k.full([NOTHING], "int32", rows)
            values = k.zeros((1, *values.shape[1:]), "float32", values)
        self.answers.rows[name] = self.answers.rows[f"{name}/answer"] = rows
        return values

    def _joined(self, i: int, payloads: list[Payload], out: Any, count: float, name: str) -> SparseRows:
        (payload,), variable = payloads, self.bucket.variables[i]
        rows, shape = payload[-1], variable.shape[1:]
        k = kernels_of(rows)
        if is_nothing(rows):
            return SparseRows(k.zeros((0, *shape), "float32", rows), rows[:0])
        with self.about(name):
            k.check_indices(rows, variable.shape[0])
            zeros = k.zeros((rows.shape[0], *shape), "float32", rows)
            ctx = self.answers.context_of(rows.shape[0], shape, f"{name}/answer", rows)
            return SparseRows(self.answers.accumulate(payload, ctx, zeros), rows)

    def poisoned(self, value: Any) -> SparseRows:
        return SparseRows(super().poisoned(value.values), value.rows)


def _summed(gradient: SparseRows, name: str) -> SparseRows:
    return sum_rows(gradient)
