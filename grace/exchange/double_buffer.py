"""Double buffering of a bucket's residuals, for codecs of kernels."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from grace.core.compressor import Tensor
from grace.kernels import Kernels


class DoubleBuffer:
    """Residuals of some variables in two buffers that alternate, as addresses for a codec of kernels.

    The buffer with the committed residuals is not written to until the other one is committed. If a codec needs all of
    x to compute the residual, the buffer holds x, and a second array the numbers to be subtracted: the codec subtracts
    them when it reads x again, and :meth:`finish` before any other reader.

    Args:
        memory: the memory whose residuals are buffered, which may keep none; or a method that keeps a tensor of each
            variable itself, by the same ``recall`` and ``keep``.
        kernels: the kernels of the gradients' framework and device.
        names, shapes: names and shapes of the variables.
        codec: the codec that finishes residuals, if it leaves them unfinished; else None.
        pieces: number of pieces of each variable, which have their own numbers to be subtracted.

    Attributes:
        rows: addresses, uint64 of shape (variables, 3): of gradients, of residuals, and of the next residuals. With a
            codec the shape is (variables, 5): also of the numbers to be subtracted from the residuals and from the next
            ones, for the first piece; those of each next piece follow those of all variables.
        factors: float32 of shape (variables, 2): factors of residuals and of gradients.
    """

    def __init__(
        self,
        memory: Any,
        kernels: Kernels,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        codec: Any = None,
        pieces: int = 1,
    ):
        self.memory: Any = memory if hasattr(memory, "recall") else None
        self.kernels = kernels
        self.names = list(names)
        self.shapes = list(shapes)
        self.codec = codec
        self.pieces = pieces
        self.buffers: list[list[Tensor]] = []
        self.places: list[Any] = []
        # float32 of shape (3, pieces, variables, 2): for each buffer the number to be subtracted from negative
        # elements, and the one from others; and zeros, for residuals that are in neither buffer.
        self.sides: Any = None
        self.side_places = np.zeros((3, len(self.names)), np.uint64)
        # Per variable, the row of ``sides`` for its residual and for the next one.
        self.before, self.after = np.zeros((2, len(self.names)), np.int64)
        self.rows = np.zeros((len(self.names), 3 if codec is None else 5), np.uint64)
        self.factors = np.ones((len(self.names), 2), np.float32)
        self.following: list[Tensor] = []
        self.last = 0

    def swap(self, like: Tensor) -> bool:
        """Fill in the addresses of the residuals, and of the next ones in the other buffer.

        Returns:
            False if a codec cannot use the residuals: state was written in this step, or one is in other memory.
        """
        k, memory = self.kernels, self.memory
        self.following = []
        if memory is None:
            return True
        if not self.buffers:
            self._make_buffers(like)
        with memory.state.without_deferred() if self.codec is not None else contextlib.nullcontext():
            recalled = [memory.recall(name) for name in self.names]
        if memory.state.changed(*self.names):
            return False
        self.factors[:] = [(a, b) for a, _, b in recalled]
        last = self.last
        # The usual step: all residuals are in the buffer that was written last.
        if all([residual is own for (_, residual, _), own in zip(recalled, self.buffers[last], strict=True)]):
            self.last = 1 - last
            self.rows[:, 1] = self.places[last]
            self.rows[:, 2] = self.places[self.last]
            self.following = self.buffers[self.last]
            if self.codec is not None:
                self.before[:], self.after[:] = last, self.last
                self._fill_sides()
            return True
        for i, (name, (_, residual, _)) in enumerate(zip(self.names, recalled, strict=True)):
            with memory.state.without_deferred():
                held = residual if residual is not None else _residual(memory.state.get(name))
            turn = int(held is self.buffers[0][i])  # the other buffer
            own = turn or held is self.buffers[1][i]
            self.before[i], self.after[i] = 1 - turn if own else 2, turn
            if not own:
                memory.state.run_deferred(name)  # the residual is in a buffer of another double buffer
            found = None if residual is None or own else k.addresses([residual])
            if residual is None:
                self.rows[i, 1] = 0
            elif own:
                self.rows[i, 1] = self.places[1 - turn][i]
            elif found is None:
                return False
            else:
                self.rows[i, 1] = found[0]
            self.rows[i, 2] = self.places[turn][i]
            self.following.append(self.buffers[turn][i])
        self.last = int(self.following[0] is self.buffers[1][0])
        if self.codec is not None:
            self._fill_sides()
        return True

    def _make_buffers(self, like: Tensor) -> None:
        k = self.kernels
        self.buffers = [[k.zeros(shape, "float32", like) for shape in self.shapes] for _ in range(2)]
        self.places = [np.array(k.addresses(buffer), np.uint64) for buffer in self.buffers]
        if self.codec is not None:
            self.sides = k.zeros((3, self.pieces, len(self.names), 2), "float32", like)
            places = np.arange(3 * self.pieces * len(self.names), dtype=np.uint64).reshape(3, self.pieces, -1)
            begins = np.array(k.addresses([self.sides]), np.uint64)
            self.side_places = begins + 8 * places[:, 0]

    def _fill_sides(self) -> None:
        every = range(len(self.names))
        self.rows[:, 3] = self.side_places[self.before, every]
        self.rows[:, 4] = self.side_places[self.after, every]

    def store(self) -> None:
        """Store the next residuals, which have been written, in the memory."""
        for name, residual in zip(self.names, self.following, strict=self.memory is not None):
            self.memory.keep(name, residual)
            if self.codec is not None:
                self.memory.state.deferred[name] = self

    def finish(self) -> None:
        """Subtract the numbers that are still to be subtracted from both buffers; see
        :class:`~grace.core.state.State`."""
        for turn in (0, 1):
            rows = np.zeros_like(self.rows)
            rows[:, 1], rows[:, 3] = self.places[turn], self.side_places[turn]
            self.codec.finish(rows, self.sides[turn])

    def write(self, into: Callable[[Tensor, Tensor], None]) -> None:
        """Copy the numbers that are to be subtracted, when the next residuals are copied over the committed ones by
        ``into``."""
        before = self.before[0]
        if before < 2 and all(self.before == before):  # all residuals are in one buffer: copy its numbers
            into(self.sides[before], self.sides[1 - before])
        else:
            self.finish()


def _residual(held: Any) -> Any:
    """Return the residual in a memory's state of a variable."""
    return held.get("residual") if isinstance(held, dict) else held
