"""The round trips of sparse gradients."""

from collections.abc import Sequence
from typing import Any

from grace.core.compressor import Payload, Tensor
from grace.exchange.base import Exchange
from grace.exchange.bucket import Contribution, Outcome
from grace.exchange.reduce_broadcast import ReduceBroadcastExchange
from grace.exchange.sparse_codec import is_nothing
from grace.exchange.sparse_rows import NOTHING, SparseRows, summed
from grace.exchange.tracing import recorder
from grace.kernels import kernels_of


def with_values(contribution: Contribution) -> Contribution:
    """The same with the values of distinct rows as gradients; the bucket's compressor is told the rows."""
    bucket = contribution.bucket
    names = [variable.name for variable in bucket.variables]
    slices = recorder.each("sum rows", names, lambda gradient, name: summed(gradient), contribution.gradients)
    compressor: Any = bucket.communicator.compressor
    compressor.rows = {v.name: s.rows for v, s in zip(bucket.variables, slices, strict=True)}
    return contribution._replace(gradients=[s.values for s in slices])


class RowExchange(Exchange):
    """An exchange whose gradients and outcomes are :class:`SparseRows`."""

    puts_off = False

    def __init__(self, contribution: Contribution):
        super().__init__(with_values(contribution))

    def finish(self, outs: Sequence[Tensor | None], wait: bool = True) -> list[Outcome]:
        """The mean's distinct rows, per variable."""
        outcomes = super().finish(outs, wait)
        compressor: Any = self.compressor
        for outcome in outcomes:
            if outcome.value is not None:
                outcome.value = SparseRows(outcome.value, compressor.received[outcome.variable.name])
        return outcomes

    def _aggregate(self, i: int, payloads: list[Any], out: Tensor | None, name: str) -> Outcome:
        variable = self.bucket.variables[i]
        return Outcome(variable, self.compressor.aggregate(payloads, self.encoded[i][1], out, self.count), False)


class RowReduceBroadcastExchange(ReduceBroadcastExchange):
    """The same through a destination, whose answer holds all ranks' rows."""

    puts_off = False

    def __init__(self, contribution: Contribution):
        super().__init__(with_values(contribution))

    def _compressed_mean(self, i: int, payloads: list[Payload]) -> tuple[Tensor, Payload, Any]:
        name, k = self.names[i], self.kernels
        with recorder.phase("decode", variable=name):
            values = self.compressor.aggregate(payloads, self.encoded[i][1], None, self.communicator.context.size)
        compressor: Any = self.compressor
        rows = compressor.received[name]
        if not rows.shape[0]:
            rows = k.full([NOTHING], "int32", rows)
            values = k.zeros((1, *values.shape[1:]), "float32", values)
        answers: Any = self.back
        answers.rows[name] = answers.rows[f"{name}/answer"] = rows
        return self._compressed(values, name)

    def _decoded(self, i: int, payload: Payload, out: Tensor | None) -> SparseRows:
        rows = payload[-1]
        k, shape = kernels_of(rows), self.bucket.variables[i].shape[1:]
        if is_nothing(rows):
            return SparseRows(k.zeros((0, *shape), "float32", rows), rows[:0])
        k.check_indices(rows, self.bucket.variables[i].shape[0])
        answers: Any = self.back
        zeros = k.zeros((rows.shape[0], *shape), "float32", rows)
        ctx = answers.context_of(rows.shape[0], shape, f"{self.names[i]}/answer", rows)
        return SparseRows(answers.accumulate(payload, ctx, zeros), rows)

    def _poisoned(self, value: Any) -> SparseRows:
        return SparseRows(super()._poisoned(value.values), value.rows)
