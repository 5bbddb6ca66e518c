"""ReduceBroadcast for sparse gradients: rows to one destination, the rows of the mean back to all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grace import tracing
from grace.communicators.reduce_broadcast import ReduceBroadcast
from grace.core.compressor import Compressor
from grace.core.memory import Memory
from grace.kernels import kernels_of
from grace.reduce import ReduceExchange
from grace.rows import NOTHING, Slices, by_rows, is_nothing, values_of


class RowReduceExchange(ReduceExchange):
    """An exchange whose gradients and outcomes are :class:`~grace.rows.Slices`; the answer holds all ranks' rows."""

    def __init__(self, group, gradients: Sequence[Slices], *args: Any):
        super().__init__(group, values_of(group, gradients), *args)

    def _compressed_mean(self, i, payloads, answer):
        name, k = self.names[i], self.kernels
        with tracing.phase("decode", variable=name):
            values = self.compressor.aggregate(payloads, self.encoded[i][1], None, self.communicator.context.size)
        compressor: Any = self.compressor
        rows = compressor.received[name]
        if not rows.shape[0]:
            rows = k.full([NOTHING], "int32", rows)
            values = k.zeros((1, *values.shape[1:]), "float32", values)
        answers: Any = self.back
        answers.rows[name] = answers.rows[f"{name}/answer"] = rows
        return self._compressed(values, name, answer)

    def _decoded(self, i, payload, out):
        rows = payload[-1]
        k, shape = kernels_of(rows), self.group.variables[i].shape[1:]
        if is_nothing(rows):
            return Slices(k.zeros((0, *shape), "float32", rows), rows[:0])
        k.check_indices(rows, self.group.variables[i].shape[0])
        answers: Any = self.back
        zeros = k.zeros((rows.shape[0], *shape), "float32", rows)
        ctx = answers.context_of(rows.shape[0], shape, f"{self.names[i]}/answer", rows)
        return Slices(answers.accumulate(payload, ctx, zeros), rows)

    def _spoilt(self, value):
        return Slices(super()._spoilt(value.values), value.rows)


class RowReduceBroadcast(ReduceBroadcast):
    """The user's compressor and memory on rows, both ways.

    Raises:
        ConfigError: they cannot serve sparse gradients; the message says why, and what can.
    """

    def __init__(self, compressor: Compressor, memory: Memory, name: str, options: dict[str, Any]):
        super().__init__(*by_rows(compressor, memory, name), **options)
        answers: Any = self.answers
        kept: Any = self.answer_memory
        answers.shapes = self.compressor.shapes  # type: ignore[attr-defined]
        if hasattr(kept, "compressor"):
            kept.compressor = answers

    def _check(self) -> None:
        """Done by :func:`~grace.rows.unfit`."""

    def begin(self, *args):
        from grace.ahead import AheadExchange

        return AheadExchange(RowReduceExchange, *args) if self.delayed else RowReduceExchange(*args)
