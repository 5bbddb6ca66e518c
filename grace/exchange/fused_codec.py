"""The codec of a bucket in one pass over memory: by compiled loops (Numba) on the host, by Triton on a GPU.

If method and memory have a codec of kernels, one call encodes all variables of a bucket and another decodes them, to
the same bits as variable by variable, whole or in the pieces that ranks own. Inputs that a call does not support
(tensors in other memory, state that was written in this step, a damaged payload) are handled variable by variable.
"""

import contextlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from grace.core.component import is_ours
from grace.core.compressor import Compressor, Ctx, Payload, Tensor
from grace.core.context import Context
from grace.core.memory import ErrorFeedback, Memory
from grace.exchange.bucket import Bucket
from grace.exchange.codec import PerVariableCodec
from grace.exchange.header import LARGEST_KEPT, OVERFLOW, PRESENT, Flag, Header
from grace.exchange.layout import Layout, Stamps, Status
from grace.exchange.sparse_rows import Gradient
from grace.exchange.tracing import recorder
from grace.kernels import Kernels
from grace.kernels.bucket_codec import DeviceHeader, Placed
from grace.kernels.constants import ANY_BITS

GRADIENT, RESIDUAL, NEXT_RESIDUAL, SUBTRAHENDS, NEXT_SUBTRAHENDS = range(5)
"""Columns of the addresses that a codec of kernels is given: of a gradient, of its residual and of the next residual;
and of the numbers that are still to be subtracted from these two."""
NEITHER = 2
"""Number of the source of a residual that is in neither buffer."""
LARGEST_BITS = np.finfo(np.float32).max.view(np.uint32)
"""Bits of the largest float32 that is in range."""
LARGEST_KEPT_BITS = np.float32(LARGEST_KEPT).view(np.uint32)
"""Bits of the largest float32 that is in range if a memory keeps a residual."""


class FusedCodec(PerVariableCodec):
    """Codec in one pass. The wires of all owners are one buffer, which is kept from step to step.

    The pieces of all owners are rows of one codec of kernels, so that one call encodes all of them. On a device kernels
    write the headers, because only they know which gradients are in range.

    Args:
        bucket, kernels, on_device: see :class:`~grace.exchange.codec.PerVariableCodec`.
        kind: the class of the codec of kernels.
        options: its options.
    """

    stores_at_once = True
    """True if residuals are known when the wires are written."""

    def __init__(self, bucket: Bucket, kernels: Kernels, on_device: bool, kind: Any, options: dict[str, object]):
        super().__init__(bucket, kernels, on_device)
        shapes = [variable.shape for variable in bucket.variables]
        self.writes_headers: bool = kind.on_device
        # 1. The buffer of all wires.
        self.longest = max(layout.length for layout in self.layouts)
        itemsize = self.layouts[0].nbytes // max(1, self.layouts[0].length)
        self.starts = np.arange(self.owners, dtype=np.uint64) * np.uint64(self.longest * itemsize)
        """Offset of each owner's wire, in bytes."""
        self.parts: list[Tensor] = []
        self.buffer_address: list[int] | None = None
        """Address of the buffer, in a list; None before the first step, and if the framework gives none."""
        # 2. The codecs of kernels.
        self.offsets = np.array([[4 * a for a, _ in each] for each in zip(*self.bounds, strict=True)], np.uint64)
        """Offset of each owner's piece in each variable, in bytes."""
        sizes = [[b - a for a, b in each] for each in zip(*self.bounds, strict=True)]
        self.kernel_codec, self.kernel_codec_of_means = self._make_kernel_codecs(kind, options, sizes)
        self.streams = Streams(self._stream_names(), self.context, self.kernel_codec.draws)
        # 3. Residuals.
        unfinished = self.writes_headers and self.kernel_codec.unfinished
        keeper, finisher = moment_keeper(self.compressor) or self.memory, self if unfinished else None
        self.residuals = DoubleBuffer(keeper, kernels, self.names, shapes, finisher, self.owners)
        self.piece_offsets = self._distances_of_pieces()
        self.fused = self.means_fused = False
        """True if this step's wires, and its means, were written in one pass."""
        # 4. Means.
        self.mean_buffer: Tensor | None = None
        self.means_wire: Tensor | None = None
        if self.mean_compression is not None:
            own_sizes = sizes[self.owner]
            # Each variable's mean begins where kernels may read 16 bytes at once.
            starts = np.cumsum([0, *((n + 3) // 4 * 4 for n in own_sizes)])
            self.mean_offsets, self.mean_room = (4 * starts[:-1]).astype(np.uint64), int(starts[-1])
            mean_shapes = shapes if self.pieces is None else [(n,) for n in own_sizes]
            finisher_of_means = self.kernel_codec_of_means if unfinished else None
            memory_of_means = self.mean_compression.memory
            self.mean_residuals = DoubleBuffer(memory_of_means, kernels, self.names, mean_shapes, finisher_of_means)

    def _make_kernel_codecs(self, kind: Any, options: dict[str, object], sizes: list[list[int]]) -> tuple[Any, Any]:
        """Return the codec of the pieces of all owners, whose numbers of elements are given by owner and variable, in
        the buffer of all wires; and that of this owner's means, in a wire of their own."""
        placed = [self.placed(j) for j in range(self.owners)]
        in_buffer = [
            [tensor._replace(offset=int(start) + tensor.offset) for tensor in payload]
            for start, payloads in zip(self.starts, placed, strict=True)
            for payload in payloads
        ]
        of_all = kind([n for each in sizes for n in each], in_buffer, **options)
        if self.owners == 1:  # the only wire is the whole buffer
            return of_all, of_all
        return of_all, kind(sizes[self.owner], placed[self.owner], **options)

    def _distances_of_pieces(self) -> np.ndarray:
        """Return the distance of each piece's addresses from the variable's in bytes, by owner, variable and the
        columns of ``DoubleBuffer.rows``."""
        count = len(self.names)
        pairs = np.arange(self.owners, dtype=np.uint64)[:, None] * np.uint64(8 * count)  # a pair of float32 is 8 bytes
        subtrahends = np.broadcast_to(pairs, (self.owners, count))
        return np.stack([*[self.offsets] * 3, subtrahends, subtrahends], axis=2)

    def placed(self, owner: int) -> list[list[Placed]]:
        """Return the locations of an owner's payload tensors in its wire, for a codec of kernels."""
        return self.layouts[owner].placed()

    def _stream_names(self) -> list[list[str]]:
        """Return the names of random streams: of each owner's pieces, or of whole variables, then of means."""
        if self.pieces is None:
            found = [self.names]
        else:
            found = [[f"{name}/shard_{j}" for name in self.names] for j in range(self.owners)]
        if self.mean_compression is None:
            return found
        return [*found, [f"{name}/{self.mean_compression.label}" for name in self.names]]

    # -- encoding --------------------------------------------------------------------------------------

    def encode(self, gradients: Sequence[Tensor], header: Header) -> Tensor:
        with recorder.phase("encode", variables=self.bucket.variables):
            self.fused = self._encode(gradients, header)
        return self.buffer if self.fused else super().encode(gradients, header)

    def _encode(self, gradients: Sequence[Tensor], header: Header) -> bool:
        """Write all wires and the next residuals; return False, and change nothing, if the inputs are not supported."""
        if self.sums and self.context.predivide != 1:  # kernels do not divide payloads
            return False
        k = self.kernels
        addresses = k.addresses(gradients)
        if addresses is None:  # of another dtype, or not contiguous
            gradients = [k.flat(k.cast(gradient, "float32")) for gradient in gradients]
            addresses = k.addresses(gradients)
        if addresses is None:  # the framework gives no addresses for these tensors
            return False
        if self.buffer_address is None:
            self._make_buffers(gradients[0])
        if self.buffer_address is None or not self.residuals.swap(gradients[0]):
            return False
        self.residuals.rows[:, GRADIENT] = addresses
        largest_bits = LARGEST_KEPT_BITS if self.stateful else LARGEST_BITS
        if not header.program.detects_overflow:  # the received sum shows overflows, so nothing is checked here
            largest_bits = ANY_BITS
        words = self.streams.now() if self.kernel_codec.draws else self.streams.words
        wire = np.uint64(self.buffer_address[0])
        rows, factors, words = self.residuals.rows, self.residuals.factors, words[: self.owners].reshape(-1, 4)
        if self.owners > 1:
            rows, factors = self._rows_of_pieces(rows), np.tile(factors, (self.owners, 1))
        if self.writes_headers:
            self.kernel_codec.step = self.context.device_step
            header.in_range = self.kernel_codec.encode(
                rows, factors, wire, largest_bits, words, self._device_header(header)
            )
        else:
            finite = self.kernel_codec.encode(rows, factors, wire, largest_bits, words)
            if self.owners > 1:
                finite = [all(finite[i :: len(self.names)]) for i in range(len(self.names))]
            header.in_range = finite if all(header.present) else list(map(bool.__and__, header.present, finite))
            statuses, stamps = header.statuses(), header.stamps_to_send
            for layout, part in zip(self.layouts, self.parts, strict=True):
                layout.write_header(part, statuses, stamps)
        if self.stores_at_once:
            self.residuals.store()
        return True

    def _make_buffers(self, like: Tensor) -> None:
        layout, longest = self.layouts[0], self.longest
        self.buffer = self.kernels.zeros((self.owners * longest,), layout.dtype, like)
        self.buffer_address = self.kernels.addresses([self.buffer], layout.dtype)
        self.parts = [self.buffer]
        if self.owners > 1:
            self.parts = [self.buffer[j * longest : (j + 1) * longest] for j in range(self.owners)]

    def _device_header(self, header: Header) -> DeviceHeader:
        """Return the header that a kernel writes behind the payloads, in the wire of each owner."""
        found = [layout.device_header(header.statuses(), header.stamps_to_send) for layout in self.layouts]
        if self.owners == 1:
            return found[0]
        offsets = [int(start) + one.offsets[0] for start, one in zip(self.starts, found, strict=True)]
        return found[0]._replace(offsets=offsets, numbers=found[0].numbers[: self.layouts[0].header])

    def _rows_of_pieces(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows of addresses of all owners' pieces, one owner after the other, from those of variables."""
        columns = rows.shape[1]
        return (rows + self.piece_offsets[:, :, :columns] * (rows != 0)).reshape(-1, columns)

    def finish(self, rows: np.ndarray, subtrahends: Tensor) -> None:
        """Subtract the numbers that are still to be subtracted from the residuals of all pieces."""
        self.kernel_codec.finish(self._rows_of_pieces(rows) if self.owners > 1 else rows, subtrahends)

    def update_memory(self) -> None:
        if not self.fused:
            super().update_memory()

    # -- means -----------------------------------------------------------------------------------------

    def average(self, wires: Sequence[Tensor], layouts: Sequence[Layout], header: Header) -> list[Flag]:
        # A root on a device sends back stamps that are on the device, which kernels do not support.
        stamps_on_device = self.on_device and self.pieces is None
        found = None
        if self.fused and not stamps_on_device:
            with recorder.phase("average", variables=self.bucket.variables):
                found = self._average(wires, header)
        self.means_fused = found is not None
        self.wrote_statuses = self.means_fused and self.writes_headers
        if found is not None:
            return found
        if self.fused:
            self.encoded = self._decoding_ctxs([self.buffer] * len(self.names))
        return super().average(wires, layouts, header)

    def _average(self, wires: Sequence[Tensor], header: Header) -> list[Flag] | None:
        """Average all ranks' payloads, and encode the means; return None if a payload is damaged or inputs are not
        supported."""
        assert self.mean_compression is not None
        k, residuals = self.kernels, self.mean_residuals
        if self.mean_buffer is None:
            self.mean_buffer = k.zeros((self.mean_room,), "float32", wires[0])
            self.means_wire = k.zeros((self.longest,), "uint8", wires[0])
        sources, means = k.addresses(wires, "uint8"), k.addresses([self.mean_buffer])
        target = k.addresses([self.means_wire], "uint8")
        if sources is None or target is None or means is None or not residuals.swap(self.mean_buffer):
            return None
        residuals.rows[:, GRADIENT] = outs = np.uint64(means[0]) + self.mean_offsets
        count, scale = self.context.size, self.context.loss_scale
        if not self.kernel_codec_of_means.decode(outs, np.array(sources, np.uint64), count, scale):
            return None
        largest_bits = LARGEST_KEPT_BITS if self.mean_compression.memory.stateful else LARGEST_BITS
        given = residuals.rows, residuals.factors, np.uint64(target[0]), largest_bits, self.streams.now()[-1]
        if not self.writes_headers:
            finite: list[Flag] = self.kernel_codec_of_means.encode(*given)
            return finite
        body = self.layouts[self.owner].body
        numbers = [*[PRESENT] * len(self.names), *header.stamps_to_send]
        received_statuses = [source + body for source in sources]
        on_device = DeviceHeader([body], "uint8", numbers, OVERFLOW, received_statuses)
        return list(self.kernel_codec_of_means.encode(*given, on_device))

    def write_means(self, statuses: list[Status], stamps: Stamps) -> tuple[Tensor, Layout]:
        if not self.means_fused:
            return super().write_means(statuses, stamps)
        layout = self.layouts[self.owner]
        if not self.writes_headers:
            layout.write_header(self.means_wire, statuses, stamps)
        return self.means_wire, layout

    def update_mean_memory(self, kept: Sequence[bool]) -> None:
        if not self.means_fused:
            super().update_mean_memory(kept)
            return
        self.mean_residuals.store()
        for keep, name in zip(kept, self.names, strict=True):
            if not keep:
                self.roll_back_mean(name)

    # -- decoding --------------------------------------------------------------------------------------

    def decode(
        self, wires: Sequence[Tensor], layouts: Sequence[Layout], outs: Sequence[Tensor | None]
    ) -> list[Gradient]:
        if not self.fused:
            return super().decode(wires, layouts, outs)
        found = self.outputs(outs, wires[0])
        with recorder.phase("decode", variables=self.bucket.variables):
            decoded = self._decode(found, wires)
        if decoded:
            return found
        self.encoded = self._decoding_ctxs(found)
        return super().decode(wires, layouts, found)

    def outputs(self, outs: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
        """Return the tensors that means are written to: ``outs``, and uninitialized tensors for those that are None."""
        return [
            self.kernels.blank(variable.shape, "float32", like) if out is None else out
            for variable, out in zip(self.bucket.variables, outs, strict=True)
        ]

    def _decode(self, means: Sequence[Tensor], wires: Sequence[Tensor]) -> bool:
        """Decode into ``means``; return False if a payload is damaged, or kernels cannot access the tensors."""
        found, sources = self.kernels.addresses(means), self.kernels.addresses(wires, self.layouts[0].dtype)
        if found is None or sources is None:
            return False
        outs, begins = np.array(found, np.uint64), np.array(sources, np.uint64)
        if self.owners > 1:
            # A row's offset is one in the buffer of all wires, so pass where that buffer would begin for each wire.
            begins = np.repeat(begins - self.starts, len(outs))[None]
            outs = (outs + self.offsets).reshape(-1)
        count = self.divisor if self.mean_compression is None else 1
        return bool(self.kernel_codec.decode(outs, begins, count, self.context.loss_scale))

    def _decoding_ctxs(self, like: Sequence[Tensor]) -> list[tuple[Payload, Ctx]]:
        """Return the ctxs that decode payloads variable by variable, made from shapes, in the form of ``encoded``:
        the payloads themselves are empty, because they were written by kernels."""
        ctx_of = self.compressor.ctx_of
        found: list[tuple[Payload, Ctx]] = []
        for variable, bounds, tensor in zip(self.bucket.variables, self.bounds, like, strict=True):
            if self.pieces is None:
                found.append(([], ctx_of(variable.name, variable.shape, tensor)))
            else:
                ctxs = [ctx_of(f"{variable.name}/shard_{j}", (b - a,), tensor) for j, (a, b) in enumerate(bounds)]
                found.append(([], (bounds, ctxs, variable.shape)))
        return found


class FusedRounds(FusedCodec):
    """Codec of kernels for methods of several rounds: it writes each round's wire and receives each round's sum.

    The method keeps the result of the last sum, from which its next step starts, in a double buffer, like residuals.
    Both are stored only when all is decoded.
    """

    stores_at_once = False  # residuals are what the last round leaves out

    def __init__(self, bucket: Bucket, kernels: Kernels, on_device: bool, kind: Any, options: dict[str, object]):
        super().__init__(bucket, kernels, on_device, kind, options)
        shapes = [payload[0].shape for payload in self._layout_of(1).placed()]
        self.started = DoubleBuffer(self.compressor, self.kernels, self.names, shapes)
        self.second_wire: Tensor | None = None

    def _layout_of(self, number: int) -> Layout:
        layouts = self.known[number]
        assert layouts is not None
        return layouts[0]

    def placed(self, owner: int) -> list[list[Placed]]:
        return _payloads_of_rounds(self)

    def encode(self, gradients: Sequence[Tensor], header: Header) -> Tensor:
        self.round = 0
        self.layouts = [self._layout_of(0)]
        return super().encode(gradients, header)

    def _encode(self, gradients: Sequence[Tensor], header: Header) -> bool:
        if not self.started.swap(gradients[0]):
            return False
        self.kernel_codec.start_from(self.started.rows[:, RESIDUAL], self.started.rows[:, NEXT_RESIDUAL])
        return super()._encode(gradients, header)

    def receive(self, total: Tensor) -> Tensor | None:
        if not self.fused:
            return None
        return self.kernel_codec.receive(total, self.divisor, self.round + 1 == len(self.known))

    def next_round(self, total: Tensor, header: Header) -> Tensor:
        if not self.fused:
            return super().next_round(total, header)
        self.round += 1
        layout = self._layout_of(self.round)
        self.layouts = [layout]
        if self.second_wire is None:
            self.second_wire = self.kernels.zeros((layout.length,), layout.dtype, total)
        self.kernel_codec.follow(
            self.second_wire, layout.device_header(header.statuses(later_round=True), header.stamps_to_send)
        )
        return self.second_wire

    def decode(
        self, wires: Sequence[Tensor], layouts: Sequence[Layout], outs: Sequence[Tensor | None]
    ) -> list[Gradient]:
        if not self.fused:
            return super().decode(wires, layouts, outs)
        k = self.kernels
        found = self.outputs(outs, wires[0])
        given, places = found, k.addresses(found)
        if places is None:  # kernels cannot write to these tensors: decode into others, and copy
            given = [k.blank(tuple(out.shape), "float32", wires[0]) for out in found]
            places = k.addresses(given)
        self.kernel_codec.decode(np.array(places, np.uint64), (), self.divisor, self.context.loss_scale)
        for out, mean in zip(found, given, strict=True):
            if out is not mean:
                k.divide(out, mean, 1)
        self.residuals.store()
        self.started.store()
        return found


class DoubleBuffer:
    """Two copies of each residual, the committed one and the one that is written next, as addresses for a codec of
    kernels. So kernels write in place, and a rollback is a swap.

    The buffer with the committed residuals is not written to until the other one is committed. If a codec needs all of
    x to compute the residual, the buffer holds x, and a second array the numbers to be subtracted: the codec subtracts
    them when it reads x again, and :meth:`finish` before any other reader.

    Args:
        memory: the memory whose residuals are buffered, which may keep none; or a method that keeps a tensor of each
            variable itself, by the same ``recall`` and ``keep``.
        kernels: the kernels of the gradients' framework and device.
        names, shapes: names and shapes of the variables.
        finisher: the codec that finishes residuals, if it leaves them unfinished; else None.
        pieces: number of pieces of each variable, which have their own numbers to be subtracted.

    Attributes:
        rows: addresses, uint64, a row for each variable; its columns are :data:`GRADIENT`, :data:`RESIDUAL` and
            :data:`NEXT_RESIDUAL`, and with a finisher :data:`SUBTRAHENDS` and :data:`NEXT_SUBTRAHENDS` of the first
            piece; those of each next piece follow those of all variables.
        factors: float32 of shape (variables, 2): factors of residuals and of gradients.
    """

    def __init__(
        self,
        memory: Any,
        kernels: Kernels,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        finisher: Any = None,
        pieces: int = 1,
    ):
        self.memory: Any = memory if hasattr(memory, "recall") else None
        self.kernels = kernels
        self.names = list(names)
        self.shapes = list(shapes)
        self.finisher = finisher
        self.pieces = pieces
        self.buffers: list[list[Tensor]] = []
        self.addresses: list[np.ndarray] = []
        """Addresses of each buffer's residuals."""
        # float32 of shape (3, pieces, variables, 2): for each buffer the number to be subtracted from negative
        # elements, and the one from others; and zeros, for residuals that are in neither buffer.
        self.subtrahends: Any = None
        self.subtrahend_addresses = np.zeros((3, len(self.names)), np.uint64)
        self.source, self.target = np.zeros((2, len(self.names)), np.int64)
        """For each variable the number of the buffer that its residual is in, or :data:`NEITHER`; and of the one that
        its next residual is written to."""
        self.rows = np.zeros(
            (len(self.names), NEXT_RESIDUAL + 1 if finisher is None else NEXT_SUBTRAHENDS + 1), np.uint64
        )
        self.factors = np.ones((len(self.names), 2), np.float32)
        self.next_residuals: list[Tensor] = []
        self.newest = 0
        """Number of the buffer that was written last."""

    def swap(self, like: Tensor) -> bool:
        """Fill in the addresses of the residuals, and of the next ones in the other buffer.

        Returns:
            False if a codec cannot use the residuals: state was written in this step, or one is in other memory.
        """
        memory = self.memory
        self.next_residuals = []
        if memory is None:
            return True
        if not self.buffers:
            self._make_buffers(like)
        # The codec subtracts what is still to be subtracted when it reads a residual, so it is not done here.
        with memory.state.without_deferred() if self.finisher is not None else contextlib.nullcontext():
            recalled = [memory.recall(name) for name in self.names]
        if memory.state.changed(*self.names):
            return False
        self.factors[:, 0], residuals, self.factors[:, 1] = zip(*recalled, strict=True)
        newest = self.buffers[self.newest]
        # The usual step: all residuals are in the buffer that was written last.
        if all([residual is own for residual, own in zip(residuals, newest, strict=True)]):
            source, target = self.newest, 1 - self.newest
            self.source[:] = source
            self.target[:] = target
            self.rows[:, RESIDUAL] = self.addresses[source]
            self.rows[:, NEXT_RESIDUAL] = self.addresses[target]
            self.next_residuals = self.buffers[target]
            self.newest = target
        elif not self._find_each(residuals):
            return False
        if self.finisher is not None:
            variables = range(len(self.names))
            self.rows[:, SUBTRAHENDS] = self.subtrahend_addresses[self.source, variables]
            self.rows[:, NEXT_SUBTRAHENDS] = self.subtrahend_addresses[self.target, variables]
        return True

    def _find_each(self, residuals: Sequence[Tensor | None]) -> bool:
        """Find each residual in a buffer or in other memory, as after a resume, a roll-back or a switch of plans;
        return False if one has no address."""
        state, (first, second) = self.memory.state, self.buffers
        for i, (name, residual) in enumerate(zip(self.names, residuals, strict=True)):
            held = residual
            if held is None:  # the codec reads none, and must not overwrite the one that the memory keeps
                with state.without_deferred():
                    held = _residual(state.get(name))
            if held is first[i]:
                source, target = 0, 1
            elif held is second[i]:
                source, target = 1, 0
            else:
                source, target = NEITHER, 0
                state.run_deferred(name)  # the residual may be in a buffer of another double buffer
            if residual is None:
                address = 0
            elif source != NEITHER:
                address = self.addresses[source][i]
            else:
                found = self.kernels.addresses([residual])
                if found is None:
                    return False
                address = found[0]
            self.source[i] = source
            self.target[i] = target
            self.rows[i, RESIDUAL] = address
            self.rows[i, NEXT_RESIDUAL] = self.addresses[target][i]
            self.next_residuals.append(self.buffers[target][i])
        self.newest = int(self.target[0])
        return True

    def _make_buffers(self, like: Tensor) -> None:
        k = self.kernels
        self.buffers = [[k.zeros(shape, "float32", like) for shape in self.shapes] for _ in range(2)]
        self.addresses = [np.array(k.addresses(buffer), np.uint64) for buffer in self.buffers]
        if self.finisher is not None:
            self.subtrahends = k.zeros((3, self.pieces, len(self.names), 2), "float32", like)
            begins = np.array(k.addresses([self.subtrahends]), np.uint64)
            numbers = np.arange(3 * self.pieces * len(self.names), dtype=np.uint64).reshape(3, self.pieces, -1)
            self.subtrahend_addresses = begins + 8 * numbers[:, 0]  # of pairs of float32

    def store(self) -> None:
        """Stage the next residuals, which have been written, in the memory. The step runner commits them, or rolls them
        back: then the next :meth:`swap` finds the former ones in the other buffer."""
        for name, residual in zip(self.names, self.next_residuals, strict=self.memory is not None):
            self.memory.keep(name, residual)
            if self.finisher is not None:
                self.memory.state.deferred[name] = self

    def finish(self) -> None:
        """Subtract the numbers that are still to be subtracted from both buffers; see
        :class:`~grace.core.state.State`."""
        for buffer in (0, 1):
            rows = np.zeros_like(self.rows)
            rows[:, RESIDUAL], rows[:, SUBTRAHENDS] = self.addresses[buffer], self.subtrahend_addresses[buffer]
            self.finisher.finish(rows, self.subtrahends[buffer])

    def write(self, into: Callable[[Tensor, Tensor], None]) -> None:
        """Copy the numbers that are to be subtracted, when the next residuals are copied over the committed ones by
        ``into``."""
        source = self.source[0]
        if source != NEITHER and all(self.source == source):  # all residuals are in one buffer: copy its numbers
            into(self.subtrahends[source], self.subtrahends[1 - source])
        else:
            self.finish()


def _residual(held: Tensor | dict[str, Tensor] | None) -> Tensor | None:
    """Return the residual in a memory's state of a variable."""
    return held.get("residual") if isinstance(held, dict) else held


class Streams:
    """Words of random streams for lists of names. The keys are cached as long as the seed and the rank stay the same.

    Args:
        names: lists of names, of equal lengths.
        context: the context with seed, rank and step.
        draws: True if the codec draws random numbers; "shared" if all ranks draw the same ones.
    """

    def __init__(self, names: Sequence[Sequence[str]], context: Context, draws: bool | str):
        self.names = names
        self.context = context
        self.draws = draws
        self.made_for = (-1, -1)
        self.words = np.zeros((len(names), len(names[0]), 4), np.uint32)

    def now(self) -> np.ndarray:
        """Return the words of this step: uint32 of shape (lists, names, 4)."""
        context = self.context
        if not self.draws:
            return self.words
        if self.made_for != (context.seed, context.rank):
            for i, names in enumerate(self.names):
                for j, name in enumerate(names):
                    stream = context.stream(name, shared=self.draws == "shared")
                    self.words[i, j] = replace(stream, step=0).words
            self.made_for = context.seed, context.rank
        self.words[:, :, 2] = context.step & 0xFFFFFFFF
        return self.words


def fused_codec(plain: PerVariableCodec, like: Tensor) -> FusedCodec | None:
    """Return the codec of a bucket in one pass; None if its method, or a memory, has none for these variables on the
    device of ``like``.

    Args:
        plain: the codec of the same bucket variable by variable, whose layouts are known.
        like: one of the bucket's gradients.
    """
    kernels, compressor, of_means = plain.kernels, plain.compressor, plain.mean_compression
    if not _fits_kernels(plain):
        return None
    declared = compressor.bucket_codec()
    if declared is None:
        return None
    name, options = declared
    kind: Any = importlib.import_module(kernels.codecs).CODECS.get(name)
    if kind is None:  # this engine has no kernels for the method
        return None
    # Means are encoded by the same kernels: their method must be the same, and draw its own random numbers.
    if of_means is not None and (kind.draws == "shared" or type(of_means.compressor) is not type(compressor)):
        return None
    if kind.on_device:
        options = {**options, "device": like.device}
    if compressor.traits.rounds == 1:
        return FusedCodec(plain.bucket, kernels, plain.on_device, kind, options)
    # Kernels for several rounds write what the last one leaves out into a residual, and take summed matrices alone.
    matrices_only = plain.sums and all(layouts and layouts[0].body for layouts in plain.known)
    if plain.memory.stateful and matrices_only and kind.takes(_payloads_of_rounds(plain)):
        return FusedRounds(plain.bucket, kernels, plain.on_device, kind, options)
    return None


def _fits_kernels(plain: PerVariableCodec) -> bool:
    """Return True if kernels, if there are any for the method, compute the same as this codec."""
    bucket, compressor, memory = plain.bucket, plain.compressor, plain.memory
    of_means = plain.mean_compression
    # Exact methods send gradients in their own dtype, and kernels read float32 only.
    other_dtype = compressor.traits.exact and any(variable.dtype != "float32" for variable in bucket.variables)
    # A subclass may override compress() and inherit bucket_codec(), which would compute something else.
    inherits_codec = "bucket_codec" not in vars(type(compressor))
    memories = [memory] if of_means is None else [memory, of_means.memory]
    # A codec has one pair of buffers: for the x that the method keeps, or for residuals.
    needs_two_buffers = moment_keeper(compressor) is not None and memory.stateful
    return (
        bool(plain.kernels.codecs)
        # A delayed round trip is still under way when the next one encodes: it has buffers of its own.
        and not bucket.communicator.delayed
        and not other_dtype
        and not inherits_codec
        and all(map(_is_error_feedback_or_none, memories))
        and not needs_two_buffers
    )


def _payloads_of_rounds(codec: PerVariableCodec) -> list[list[Placed]]:
    """Return the locations of each variable's tensors of all rounds in the rounds' wires."""
    each = zip(*(layouts[0].placed() for layouts in codec.known if layouts), strict=True)
    return [[tensor for payload in of_variable for tensor in payload] for of_variable in each]


def moment_keeper(compressor: Compressor) -> Any:
    """Return the method if it keeps the x that it compresses (a moment, as signum does), by the ``recall`` and ``keep``
    of :class:`~grace.core.memory.ErrorFeedback`; else None. Methods of several rounds, which have the same functions
    for the tensor that they start from, are no such keepers."""
    return compressor if hasattr(compressor, "recall") and compressor.traits.rounds == 1 else None


def _is_error_feedback_or_none(memory: Memory) -> bool:
    """Return True if a memory computes x = a r + g and keeps x - C(x), or keeps nothing."""
    return is_ours(type(memory)) and (isinstance(memory, ErrorFeedback) or not memory.stateful)
