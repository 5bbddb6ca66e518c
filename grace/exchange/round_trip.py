"""One round trip of one bucket, along any route, and the program that is the same for all round trips of a bucket.

Flags say how overflows are found, and when headers are read::

    flag                     of            true if                                 then
    detects_overflow         program       payloads do not carry Inf and NaN; or   encode checks gradients and
                                           no rank receives whole payloads; or     payloads, and statuses report
                                           state is committed before any arrive    overflows
    payloads_show_overflow   program       payloads carry Inf and NaN; or they     finish looks for them in payloads,
                                           are sums, which may be infinite         if finds_overflow
                                           though all terms are finite
    statuses_matter          program,      detects_overflow; or the method is a    statuses are read; else they could
                             header        user's; or this rank lacks a gradient   not say more than payloads
    sizes_unknown            program       the method declares no payload sizes    ranks compare layouts first
    on_device                program       dense gradients are on a GPU, where     trips go on as if no status were
                                           reading makes the host wait; and the    bad; resolve_headers reads later
                                           communicator does not need to read
    finds_overflow           contribution  a memory, a compressor or an anchor     see payloads_show_overflow
                                           keeps state, which Inf would spoil
    defers_headers           trip          the session reads the headers of all    finish does not call resolve_headers
                                           trips at the end of the step
    headers_after_use        trip          means are applied before headers are    means that overflowed become NaN
                                           read, as in hooks of DDP and FSDP       on the device, if they may hide it
    hides_overflow           trip          the mean of infinite numbers may be     means that overflowed are set to
                                           finite                                  NaN
"""

import contextlib
import copy
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from grace.core.backend import Backend, Handle
from grace.core.compressor import Tensor
from grace.core.route import ALL_GATHER, CONCATENATE, Carries, EngineTraits, Leg, Route, route_of
from grace.core.waits import waiting
from grace.errors import ConfigError, ExchangeError, GraceError, PayloadError, payload_of
from grace.exchange.bucket import Bucket, Contribution, Outcome
from grace.exchange.codec import PerVariableCodec
from grace.exchange.fused_codec import fused_codec
from grace.exchange.header import PRESENT, Header, resolve_headers, shares_stamps
from grace.exchange.layout import Layout
from grace.exchange.mean_encoder import MeanEncoder
from grace.exchange.payload_errors import PayloadErrors
from grace.exchange.send_receive_codec import SendReceiveCodec
from grace.exchange.sparse_codec import SparseGradientCodec
from grace.exchange.sparse_rows import Gradient
from grace.exchange.tracing import recorder
from grace.kernels import kernels_of
from grace.kernels.constants import ITEM_SIZE

T = TypeVar("T")
MOST_BYTES, MOST_BYTES_PER_ELEMENT = 1 << 20, 64
"""Bytes that a payload may take, whatever the method: sizes that come off the wire may be anything."""


class BucketProgram:
    """Codec and route of a bucket, and the facts that they follow from; kept in ``bucket.program``.

    Args:
        bucket: the bucket.
        like: one of its gradients.

    Attributes:
        send_receive: the codec, if the communicator moves payloads itself.
        detects_overflow, payloads_show_overflow, statuses_matter, sizes_unknown, on_device: flags; see the module.
        expected_status: a status (of one rank, or the sum of all ranks') if all ranks have a gradient in range.
    """

    def __init__(self, bucket: Bucket, like: Tensor):
        communicator = bucket.communicator
        compressor, context = communicator.compressor, communicator.context
        self.bucket = bucket
        self.communicator = communicator
        self.context = context
        self.kernels = kernels_of(like)
        self.type, self.device = type(like), getattr(like, "device", None)
        self.traits = compressor.traits
        self.size, self.rank = context.size, context.rank
        self.size_key = compressor.size_key(context.step)
        self.sizes_by_shape = self.traits.fixed_size == "by shape"
        self.sums = communicator.sums
        self.sparse = bucket.variables[0].sparse
        # Rows travel behind their sizes, which the host reads in any case: nothing is gained by deferring their
        # headers.
        self.on_device = communicator.can_defer and not self.sparse and self.kernels.on_device(like)
        self.shares_stamps = shares_stamps(communicator)
        self.codec = self._make_codec(like)
        self.send_receive = self.codec if isinstance(self.codec, SendReceiveCodec) else None
        self.detects_overflow = (
            not self.traits.carries_nonfinite
            or communicator.delayed
            or communicator.piecewise
            or self.send_receive is not None
        )
        self.sizes_unknown = self.traits.fixed_size is None and self.send_receive is None
        self.payloads_show_overflow = communicator.sums or (self.traits.carries_nonfinite and self.send_receive is None)
        self.statuses_matter = self.detects_overflow or communicator.user_defined
        self.expected_status = self.size if self.sums else PRESENT
        count = len(bucket.names)
        # Headers are made at every step; they share these lists, and never change them.
        self.all_true = [True] * count
        self.all_false = [False] * count
        self.all_present = [PRESENT] * count
        self.all_expected = [self.expected_status] * count
        self._route: Route | None = None

    def _make_codec(self, like: Tensor) -> PerVariableCodec:
        """Return the codec of rows, or of the communicator, or else a fused one, or else a
        :class:`PerVariableCodec`."""
        communicator = self.communicator
        kind: type[PerVariableCodec] = PerVariableCodec
        if self.sparse:
            kind = SparseGradientCodec
        elif communicator.moves_payloads:
            kind = SendReceiveCodec
        elif communicator.codec_class is not None:
            kind = communicator.codec_class
        codec = kind(self.bucket, self.kernels, self.on_device)
        # Kernels write to offsets that are fixed beforehand, so they need the layouts of all rounds.
        if kind is PerVariableCodec and self.bucket.fuses and all(codec.known):
            return fused_codec(codec, like) or codec
        return codec

    def fits(self, like: Tensor) -> bool:
        """Return True if the program was made for this kind of gradient, these ranks, and payload sizes of this
        step."""
        communicator, context = self.bucket.communicator, self.communicator.context
        return (
            self.communicator is communicator
            and self.type is type(like)
            and self.device == getattr(like, "device", None)
            and (self.size, self.rank) == (context.size, context.rank)
            and (self.sizes_by_shape or self.size_key == communicator.compressor.size_key(context.step))
        )

    def share_layouts(self, other: "BucketProgram") -> None:
        """Hold payloads to the layouts of another copy of the bucket, whose payloads were the first."""
        # Layouts keep their last results: two threads must not use one.
        self.codec.known = [found and list(map(copy.copy, found)) for found in other.codec.known]

    def route(self) -> Route:
        """Return the legs of the next round trip."""
        if self._route is None:
            codec, backend = self.codec, self.communicator.backend
            # Tensors of NumPy and TensorFlow have no type of a device, and are exchanged from the host.
            on_cpu = getattr(self.device, "type", "cpu") == "cpu"
            engine = EngineTraits(self.size, backend.by_ring, backend.concatenates, on_cpu)
            wires = [layouts[0].nbytes for layouts in codec.known if layouts] or [codec.layouts[0].nbytes]
            wires += [wires[-1]] * (self.traits.rounds - len(wires))  # rounds whose layouts are not known yet
            self._route = backend.supported(
                route_of(self.communicator.route_of_wire, wires, engine, codec.varies), self.sums
            )
        # Layouts are held to those of the first step afterwards; a graph runs the same legs in every step.
        compares = self.sizes_unknown and (self.bucket.compares_every_step or not self.bucket.sizes_compared)
        return [Leg(ALL_GATHER, Carries.DIGESTS), *self._route] if compares else self._route

    def buffers(self) -> list[tuple[Leg, str, int]]:
        """Return the legs of the route, each with the dtype and the length of its buffer.

        The length matters only for payloads of gradients and of rounds, of which a user's communicator may start more
        collectives if they are longer. It is 1 for all other legs, which start one collective each."""
        found, number, parts_before = [], 0, False
        for leg in self.route():
            number += leg.carries is Carries.ROUND
            layouts = self.codec.known[number] or self.codec.layouts
            dtype, length = layouts[0].dtype, 1
            if leg.carries in (Carries.SIZES, Carries.DIGESTS):
                dtype = "int64"
            elif leg.carries is Carries.MEANS or leg.reduce_scatters or parts_before:
                dtype = "uint8"
            elif leg.carries in (Carries.GRADIENTS, Carries.ROUND):
                length = layouts[0].length
            found.append((leg, dtype, length))
            parts_before = leg.reduce_scatters
        return found


class AnyRoundTrip:
    """Round trip of one bucket. Call ``start``, then ``advance`` until that returns False, then ``finish``, or
    ``discard`` to drop its outcomes. All ranks call ``advance`` equally often, so that their collectives pair.

    A :class:`RoundTrip` runs a bucket's route. Two kinds wrap one, keep its errors until ``finish``, and read headers
    at once: :class:`~grace.exchange.delayed.DelayedRoundTrip`, which returns the mean of an earlier step, and
    :class:`~grace.session.hierarchy.HierarchicalRoundTrip`, before which nodes reduce.

    Args:
        contribution: this rank's gradients.

    Attributes:
        header: the header of this rank, and the facts read from those of all ranks.
        error: the error because of which this trip has no outcomes; raised by ``finish``.
        defers_headers, headers_after_use: flags, which the caller sets before ``finish``; see the module.
    """

    header: Header
    error: Exception | None = None
    defers_headers = False
    headers_after_use = False

    def __init__(self, contribution: Contribution):
        bucket, gradients, self.present, self.finds_overflow, self.traffic = contribution
        self.bucket = bucket
        self.gradients: Sequence[Gradient] = gradients
        """This rank's gradients, until they are encoded."""
        self.names = bucket.names
        self.communicator = bucket.communicator

    def start(self) -> None:
        """Encode the gradients, and start the collective of the first leg."""
        raise NotImplementedError

    def advance(self) -> bool:
        """Start the collective of the next leg; return False if there is none."""
        raise NotImplementedError

    def wait(self) -> None:
        """Block until the collective under way is done, if this rank takes part in one."""

    def engine_works(self) -> Sequence[Any]:
        """Return the engine's work objects of the last leg, for a framework that awaits them; wait for the leg here if
        there are none."""
        self.wait()
        return ()

    def finish(self, outs: Sequence[Tensor | None], wait: bool = True) -> list[Outcome]:
        """Decode and aggregate, and return the outcomes; each value is written into its ``out`` unless that is None.
        The caller has started all legs (:func:`advance_all`).

        Args:
            outs: a float32 tensor of the variable's shape (of its own dtype for exact methods), or None.
            wait: False if the last leg is known to be done.

        Raises:
            PayloadError: a payload cannot be decoded; the message names the rank, the variable and the method.
        """
        raise NotImplementedError

    def discard(self) -> None:
        """Wait for the last leg, and drop the outcomes."""
        raise NotImplementedError

    def describe_wait(self) -> str:
        """Return the description of this exchange that error messages use for a blocked rank."""
        return f"the exchange of {self.bucket.describe()} at step {self.communicator.context.step}"

    def failure(self, error: Exception) -> ExchangeError:
        """Return the error of an engine that failed; it names ranks that are known to have ended, or to be
        elsewhere."""
        operation = f"the exchange of {self.bucket.describe()}"
        step = f" at step {self.communicator.context.step}"
        return self.communicator.backend.engine_error(operation, step, error)


class RoundTrip(AnyRoundTrip):
    """Round trip that runs the route of a bucket.

    1. :class:`BucketProgram` has the bucket's codec and route; there is no special first step.
    2. ``start`` calls ``codec.encode``: compensate and compress gradients, and pack payloads and a header into a wire.
       The header has a status for each variable and, in one bucket of each step, this rank's step stamp.
    3. ``start`` calls ``advance``, which starts the collective of the route's first leg.
    4. ``start`` calls ``codec.update_memory``: memories are updated with the parts that payloads left out, while bytes
       travel.
    5. ``advance`` for each further leg: await the leg before, read the headers received, make the buffer that this
       leg carries, start its collective. If there is nothing to send, which all ranks know, the trip is stopped.
    6. ``finish``: await the last leg, read its header, decode and aggregate in float32 into ``outs``.
    7. Each outcome holds whether a rank had a gradient of the variable, and whether one overflowed. The session that
       runs the step resolves deferred reads of headers, then commits the state of memories, or rolls it back.

    Ranks that are at different steps still run this step's collectives, and give up together at its end: the session
    checks ``header.out_of_step`` when all of its round trips are done.

    Attributes:
        handle: the collective under way.
        stopped: True if there was nothing to send by a leg, which all ranks know.
    """

    handle: Handle
    wire: Tensor
    route: Route
    mean_encoder: MeanEncoder | None
    """Encoder of the means that the last leg carries; None if it carries what ranks encoded themselves."""
    stopped = False
    outcomes: Sequence[Outcome] = ()
    layouts: Sequence[Layout] = ()
    """Layouts of the wires received last."""

    leg: Leg | None = None
    """The leg whose collective is under way, or was the last; None before the first."""
    _position = -1
    """Number of that leg."""
    _moves = 0
    """Number of collectives that the communicator started itself."""
    _under_way = False
    _traced: "recorder.CollectiveEvent | None" = None
    """The trace's event of the collective under way."""
    _root_means: Tensor | None = None
    """The root's means, while their sizes are exchanged."""

    def __init__(self, contribution: Contribution):
        super().__init__(contribution)
        bucket, first = self.bucket, self.gradients[0]
        like = first.values if bucket.variables[0].sparse else first
        if bucket.program is None or not bucket.program.fits(like):
            bucket.program = BucketProgram(bucket, like)
        program: BucketProgram = bucket.program
        self.program = program
        self.codec = program.codec
        self.send_receive = program.send_receive
        self.kernels = program.kernels
        self.on_device = program.on_device
        self.traits = program.traits
        self.context = program.context
        self.loss_scale: float = self.context.loss_scale
        self.backend = program.communicator.backend
        self.header = Header(program, self.present)

    # -- sending ---------------------------------------------------------------------------------------

    def start(self, sends: bool = True) -> None:
        """Encode the gradients, start the collective of the first leg, and update memories while bytes travel.

        Args:
            sends: False if a thread starts the first leg, too, by ``advance``.
        """
        began = time.perf_counter()
        self.wire = self.codec.encode(self.gradients, self.header)
        self.gradients = ()  # a delayed round trip outlives its step, and must not keep the gradients alive
        # Only now: what a codec encodes first may tell it the sizes that the route depends on.
        self.route = self.program.route()
        is_mean = self.route[-1].carries is Carries.MEANS
        self.mean_encoder = MeanEncoder(self.program, self.header, self._count) if is_mean else None
        self._count(self.codec.layouts, self.wire)
        self.traffic.codec_seconds += time.perf_counter() - began
        if sends:
            self.advance()
        began = time.perf_counter()
        try:
            self.codec.update_memory()
        except Exception as error:  # raised by a user's memory or compressor
            if not sends:
                raise
            # The collective is under way on all ranks: a bucket that raised here would be started once more by
            # zero_grad(), without a partner. So finish() raises.
            self.error = error
        self.traffic.codec_seconds += time.perf_counter() - began

    # -- legs ------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Start the collective of the next leg.

        Returns:
            False if there is no further leg, or nothing to send by it, which all ranks know.
        """
        if self.stopped or self._position + 1 == len(self.route):
            return False
        if self._position >= 0:
            self.wait()
        began = time.perf_counter()
        leg = self.route[self._position + 1]
        try:
            buffer = self._buffer_for(leg)
        except PayloadError as error:  # a rank has withheld its payload, which all ranks have read
            self.error = error
            buffer = None
        self.traffic.codec_seconds += time.perf_counter() - began
        # All ranks find the same sizes, digests and stamps, so all stop here, and no collective is left without a
        # partner.
        if buffer is None:
            self.stopped = True
            return False
        self._position += 1
        self.leg = leg
        self._start_collective(leg, buffer)
        # Over engines that pair collectives by name, ranks start buckets in any order: payloads wait for the end.
        if leg.carries is Carries.HEADERS and not self.backend.pairs_by_name:
            assert self.send_receive is not None
            self._move_payloads(self.send_receive.move)
        return True

    def _buffer_for(self, leg: Leg) -> Tensor | None:
        """Return the buffer that a leg sends, made from the result of the leg before; None if there is nothing to
        send."""
        arrived = None if self.leg is None else self.leg.carries
        if arrived is Carries.DIGESTS and not self._laid_out_alike():
            return None
        if leg.carries is Carries.DIGESTS:
            return self._numbers(self.codec.layouts[0].digests())
        if leg.carries is Carries.SIZES:
            return self._sizes()
        if leg.carries is Carries.MEANS:
            return self._buffer_of_sized_means(leg) if arrived is Carries.SIZES else self._buffer_of_means(leg)
        if leg.carries is Carries.SUMS:
            return self._sum_to_send(leg)
        if leg.carries is Carries.ROUND:
            self.wire = self._next_round()
        elif arrived is Carries.SIZES:
            return self._padded_to_longest()
        elif leg.collective is CONCATENATE:  # the engine handles unequal lengths; sizes travel in front of payloads
            sizes = self._numbers(self.codec.layouts[0].sizes())
            return self.kernels.join([self.kernels.to_bytes(sizes), self.wire])
        return self._padded_to_parts() if leg.reduce_scatters else self.wire

    def _contributes(self, leg: Leg) -> bool:
        """Return True if this rank sends its own data in a leg of means or sums."""
        return leg.root is None or self.backend.rank == leg.root

    def _start_collective(self, leg: Leg, buffer: Tensor) -> None:
        """Start the bucket's all-reduce, all-gather, or what else the leg is."""
        backend = self.backend
        before = backend.sent_bytes
        backend.label = f"{self.bucket.label}.{self._position + 1}"
        # If a signal ends this rank, its last message names this bucket.
        Backend.last_started = self.bucket
        backend.started += 1
        self._under_way = True
        if recorder.active is not None:
            facts = {"bucket": self.bucket, "label": backend.label, "bytes": self.kernels.nbytes(buffer)}
            self._traced = recorder.CollectiveEvent(recorder.active, facts)
        try:
            self.handle = leg.collective.start(backend, buffer, leg.root)
        # Raised by the backend, which has named the fault.
        except GraceError:
            raise
        except Exception as error:
            raise self.failure(error) from error
        finally:
            backend.label = ""
        self.traffic.sent_bytes += backend.sent_bytes - before

    def _move_payloads(self, act: Callable[[Callable[[], str]], T]) -> T:
        """Let the communicator move payloads itself, and count the bytes that it sends."""
        before = self.backend.sent_bytes
        try:
            return act(self._next_label)
        finally:
            self.traffic.sent_bytes += self.backend.sent_bytes - before

    def _next_label(self) -> str:
        self._moves += 1
        return f"{self.bucket.label}.{self._position + 1 + self._moves}"

    def _count(self, layouts: Sequence[Layout], buffer: Tensor) -> None:
        """Count the wires of these layouts, which are joined in a buffer that is about to be sent."""
        inside = 0
        for layout in layouts:
            self.traffic.add(self.names, layout.payload_bytes)
            if recorder.active is not None:
                recorder.payload(dict(zip(self.names, layout.payload_bytes, strict=True)))
            if self.send_receive is None:
                inside += layout.total
        self.traffic.header_bytes += self.kernels.nbytes(buffer) - inside

    def _numbers(self, numbers: Sequence[int]) -> Tensor:
        found = self.kernels.full(numbers, "int64", self.wire)
        self.traffic.header_bytes += self.kernels.nbytes(found)
        return found

    # -- payloads of unequal sizes -----------------------------------------------------------------------

    def _laid_out_alike(self) -> bool:
        """Return True if all ranks' payloads have the same layout; else set ``error``, as all ranks do."""
        received = [self.kernels.to_list(digests) for digests in self.handle.result()]
        for rank, theirs in enumerate(received):
            if theirs != received[0]:
                i = next(i for i, (a, b) in enumerate(zip(received[0], theirs, strict=True)) if a != b) // 2
                first, other = received[0][2 * i], theirs[2 * i]
                sizes = "other shapes or dtypes"
                if first != other:
                    sizes = f"{first:.0f} bytes on {self.errors.rank(0)}, and {other:.0f}"
                # The layouts are taken anew from the next payloads.
                self.bucket.program = None
                self.error = self.errors.sizes_differ(self.names[i], sizes, rank)
                return False
        self.bucket.sizes_compared = True
        return True

    def _sizes(self) -> Tensor | None:
        """Return the sizes of the payload tensors that the next leg carries."""
        if self._position < 0:
            return self._numbers(self.codec.layouts[0].sizes())
        means_leg = self.route[self._position + 2]
        count = len(self.codec.layouts[0].shapes)
        self._root_means = self._buffer_of_means(means_leg)
        if not self._contributes(means_leg):
            return self.kernels.full([0] * count, "int64", self.wire)
        assert self.mean_encoder is not None
        return self._numbers(self.mean_encoder.sizes())

    def _padded_to_longest(self) -> Tensor | None:
        """Return the wire, padded with zeros to the longest of all ranks'; None, on all ranks, if a received size is
        impossible."""
        try:
            self.layouts = [self._layout(rank, sizes) for rank, sizes in enumerate(self.handle.result())]
        except PayloadError as error:
            self.error = error
            return None
        longest = max(layout.length for layout in self.layouts)
        # No rank may leave the others alone, even if its own sizes were damaged and its wire is longer than all.
        extra = max(0, longest - self.codec.layouts[0].length)
        self.traffic.header_bytes += extra
        return self.kernels.join([self.wire[:longest], self.kernels.zeros((extra,), "uint8", self.wire)])

    def _layout(self, rank: int, sizes: Tensor) -> Layout:
        """Return the layout of a rank's wire, from the sizes that it sent."""
        most = sum(MOST_BYTES + MOST_BYTES_PER_ELEMENT * variable.numel for variable in self.bucket.variables)
        try:
            with payload_of(rank):
                return self.codec.layouts[0].resized(self.kernels.to_list(sizes), most)
        except PayloadError as error:
            raise self.errors.undecoded(error, self.bucket.ends) from error

    def _split_concatenated(self, whole: Tensor) -> list[Tensor]:
        """Return each rank's wire from a concatenation, where the sizes of its payload tensors precede it."""
        count = len(self.codec.layouts[0].shapes)
        start, wires, layouts = 0, [], []
        for rank in range(self.context.size):
            raw = whole[start : start + 8 * count]
            if raw.shape[0] < 8 * count:
                break
            layouts.append(self._layout(rank, self.kernels.from_bytes(raw, "int64", (count,))))
            start += 8 * count
            wires.append(whole[start : start + layouts[-1].length])
            start += layouts[-1].length
        if len(wires) < self.context.size or start != whole.shape[0]:
            raise self.errors.undecoded(PayloadError("the payloads are of other sizes than they say"), self.bucket.ends)
        self.layouts = layouts
        return wires

    # -- rounds and sums -------------------------------------------------------------------------------

    def _next_round(self) -> Tensor:
        """Return the next wire of a method of several rounds."""
        with recorder.phase("unpack", bucket=self.bucket):
            wires = self._last_wires()
            self._read_headers(wires)
        buffer = self.codec.next_round(wires[0], self.header)
        self._count(self.codec.layouts, buffer)
        return buffer

    def _padded_to_parts(self) -> Tensor:
        """Return the wire as bytes that can be cut into an equal part for each rank."""
        k, layout = self.kernels, self.codec.layouts[0]
        raw = k.to_bytes(self.wire)
        padding = -layout.nbytes % (self.context.size * ITEM_SIZE[layout.dtype])
        return k.join([raw, k.zeros((padding,), "uint8", raw)])

    def _sum_to_send(self, leg: Leg) -> Tensor:
        """Return the sum of the received wires, or of their parts; on ranks that do not add up, room for the sum.

        Terms are added in float32 (float64 for float64) in rank order, and the sum is rounded once."""
        k, layout = self.kernels, self.codec.layouts[0]
        if not self._contributes(leg):
            return k.zeros((layout.length,), layout.dtype, self.wire)
        with recorder.phase("sum", bucket=self.bucket):
            reduce_scatters = self.leg is not None and self.leg.reduce_scatters
            received = self.handle.result()
            if reduce_scatters:
                received = [as_numbers(part, layout.dtype) for part in received]
            elif len(received) == 1:
                return k.join([received[0]])
            wide = "float64" if layout.dtype == "float64" else "float32"
            total = k.zeros(tuple(received[0].shape), wide, received[0])
            for part in received:
                total = k.add(total, part)
            total = k.cast(total, layout.dtype)
        if reduce_scatters:
            return k.to_bytes(total)
        self._count(self.codec.layouts, total)
        return total

    def _received_sum(self) -> Tensor:
        """Return the received sum."""
        received = self.handle.result()
        parts_are_summed = self._position > 0 and self.route[self._position - 1].reduce_scatters
        if parts_are_summed and self.route[self._position].carries is Carries.SUMS:
            layout = self.codec.layouts[0]
            return as_numbers(self.kernels.join(list(received))[: layout.nbytes], layout.dtype)
        return received[0]

    # -- means -----------------------------------------------------------------------------------------

    def _buffer_of_means(self, leg: Leg) -> Tensor | None:
        """Return the encoded means that this rank owns, or room for the root's; None, on all owners, if the ranks are
        out of step."""
        # On all ranks: decoders of votes need the loss scale, too.
        self.communicator.rescale_mean_memory(self.loss_scale)
        if not self._contributes(leg):
            return self.kernels.zeros((self.codec.layouts[0].length,), "uint8", self.wire)
        assert self.mean_encoder is not None
        buffer = self.mean_encoder.encode(self._wires_of_ranks(), self.layouts)
        self.error = self.mean_encoder.error
        return buffer

    def _buffer_of_sized_means(self, leg: Leg) -> Tensor | None:
        """Return the root's means, or room for them, of the received sizes; None, on all ranks, if there are no
        means."""
        (sizes,) = self.handle.result()
        numbers = self.kernels.to_list(sizes[:1])
        assert self.mean_encoder is not None
        assert leg.root is not None
        if numbers and numbers[0] < 0:
            self.error = self.mean_encoder.not_sent(leg.root, self.names[-1 - int(numbers[0])])
            return None
        try:
            self.mean_encoder.layout = self._layout(leg.root, sizes)
        except PayloadError as error:
            self.error = error
            return None
        if self._contributes(leg):
            return self._root_means
        return self.kernels.zeros((self.mean_encoder.layout.length,), "uint8", self.wire)

    # -- receiving -------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Block until the collective under way is done.

        Raises:
            ExchangeError: the engine failed; the message has the bucket and the engine's error.
        """
        began = time.perf_counter()
        sent_before = self.backend.sent_bytes
        with waiting(self.describe_wait), recorder.phase("wait", "wait", bucket=self.bucket):
            try:
                self.handle.wait()
            except (ConfigError, PayloadError) as error:  # of what a user's communicate() brings: the engine works
                raise ExchangeError(f"{self.backend.rank_label}: {self.describe_wait()}: {error}") from error
            except Exception as error:
                raise self.failure(error) from error
            # The handle of a user's communicator may start further collectives when it is awaited.
            self.traffic.sent_bytes += self.backend.sent_bytes - sent_before
            if self.send_receive is not None and not self.send_receive.received:
                failed = self._move_payloads(self.send_receive.receive_all)
                if failed is not None and self.error is None:  # else a user's memory failed before
                    self.error = self.errors.undecoded(*failed)
            self.mark_done()
        self.traffic.wait_seconds += time.perf_counter() - began

    def mark_done(self) -> None:
        """Note that the collective under way is known to be done."""
        if self._under_way:
            self.backend.done += 1
            self._under_way = False
        if self._traced is not None:
            self._traced.end()
            self._traced = None

    def engine_works(self) -> Sequence[Any]:
        if self.handle.works and self.send_receive is None:
            return self.handle.works
        # A communicator of the user's own, or a single process.
        return super().engine_works()

    def finish(self, outs: Sequence[Tensor | None], wait: bool = True) -> list[Outcome]:
        if not wait:
            self.mark_done()
        elif not self.stopped:
            self.wait()
        began = time.perf_counter()
        if self.error is not None:
            raise self.error
        if self.stopped:
            return self.empty_outcomes()
        with recorder.phase("unpack", bucket=self.bucket):
            wires = self._last_wires()
            self._read_headers(wires)
        # The means of ranks at different steps are dropped; the session raises once all buckets have ended.
        if self.header.out_of_step:
            return self.empty_outcomes()
        try:
            values = self.codec.decode(wires, self.layouts, outs)
        except PayloadError as error:
            if self.mean_encoder is not None and self.communicator.rooted:
                error.place = self.route[-1].root
            raise self.errors.undecoded(error, error.variable) from error
        self.outcomes = [Outcome(v, value, False) for v, value in zip(self.bucket.variables, values, strict=True)]
        self._mark_outcomes()
        poison = self.header.poison
        if poison is not None:
            for i, outcome in enumerate(self.outcomes):
                outcome.value = self.kernels.add(outcome.value, poison[i])
        if self.header.deferred_reads and not self.defers_headers:
            resolve_headers([self])
        self.traffic.codec_seconds += time.perf_counter() - began
        return list(self.outcomes)

    def _last_wires(self) -> list[Tensor]:
        """Return the wires received in the last leg, or their sum; set ``layouts``."""
        if self.communicator.sums:
            self.layouts = [self.codec.layouts[0]]
            return [self._received_sum()]
        if self.mean_encoder is None:
            return self._wires_of_ranks()
        if self.codec.varies:
            assert self.mean_encoder.layout is not None
            self.layouts = [self.mean_encoder.layout]
        else:
            self.layouts = self.codec.means_layouts()
            self.layouts = self.layouts if self.communicator.piecewise else self.layouts[:1]
        return [wire[: layout.length] for layout, wire in zip(self.layouts, self.handle.result(), strict=True)]

    def _wires_of_ranks(self) -> list[Tensor]:
        """Return the wires of all ranks, cut to their lengths; set ``layouts``."""
        wires = self.handle.result()
        if self.route[self._position].collective is CONCATENATE:
            return self._split_concatenated(wires[0])
        if not self.layouts:
            self.layouts = [self.codec.layouts[self.codec.owner]] * len(wires)
        return [wire[: layout.length] for layout, wire in zip(self.layouts, wires, strict=True)]

    # -- headers ---------------------------------------------------------------------------------------

    def _read_headers(self, wires: list[Tensor]) -> None:
        """Read the headers received in a round, or last, or defer that.

        1. Compare the step stamps. Ranks that are out of step read no more.
        2. Read the statuses if they say more than payloads do; look for overflows in payloads that show them.
        3. If headers are read only after the means were applied, make means that overflowed NaN on the device.

        Overflows are read in each round of a method: a later one may be finite again, since an infinite column may
        become a finite one."""
        header, k = self.header, self.kernels
        several_rounds = self.traits.rounds > 1
        if self.mean_encoder is None or self.communicator.rooted:  # owners compared stamps before they averaged
            header.compare_stamps(self.layouts, wires)
        finite = self.codec.receive(wires[0]) if several_rounds else None
        if header.out_of_step:
            return
        statuses = [wire[layout.statuses] for layout, wire in zip(self.layouts, wires, strict=True)]
        if self.mean_encoder is not None:
            header.read(statuses, self._evaluate_means)
        else:
            to_read = statuses if header.statuses_matter else []
            flags = [] if finite is None else [finite]
            if finite is None and self.finds_overflow and self.program.payloads_show_overflow:
                flags = [k.all_finite(body) for body in self._bodies(wires)]
            if to_read or flags:
                expected = [*[self.program.expected_status] * len(to_read), *[None] * len(flags)]
                header.read([*to_read, *flags], partial(self._evaluate, len(to_read), wires, self.layouts), expected)
        if not (self.headers_after_use and self.on_device and self.hides_overflow):
            return
        if finite is None and several_rounds:
            finite = [math.prod(map(k.all_finite, payload)) for payload in self.layouts[0].unpack(wires[0])]
        header.add_poison(statuses, () if finite is None else finite)

    def _bodies(self, wires: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that show overflows: a whole sum, which is checked variable by variable only if it is not
        finite; or all payload tensors."""
        if self.communicator.sums:
            return [wires[0][: self.layouts[0].body]]
        received = [layout.unpack(wire) for layout, wire in zip(self.layouts, wires, strict=True)]
        return [tensor for payloads in received for payload in payloads for tensor in payload]

    def _evaluate(
        self, count: int, wires: Sequence[Tensor], layouts: Sequence[Layout], numbers: list[list[float]]
    ) -> None:
        """Evaluate which variables are missing, and which overflowed.

        Args:
            count: number of lists in ``numbers`` that are statuses, of each rank or summed.
            wires: the received wires.
            layouts: their layouts.
            numbers: statuses, then 1.0 for each tensor that is finite, else 0.0.
        """
        header, ranks = self.header, numbers[:count]
        if ranks:
            header.evaluate(ranks)
            if header.refused is not None:
                raise self.errors.withheld_by(*header.refused)
        if not all(map(all, numbers[count:])):
            received = [layout.unpack(wire) for layout, wire in zip(layouts, wires, strict=True)]
            for_each = [[tensor for payloads in received for tensor in payloads[i]] for i in range(len(self.names))]
            now = [not all(bool(self.kernels.all_finite(tensor)) for tensor in tensors) for tensors in for_each]
            header.overflowed = [a or b for a, b in zip(header.overflowed, now, strict=True)]
        if self.outcomes:  # on a device headers are read when finish() has made them; else it marks them itself
            self._mark_outcomes()

    def _evaluate_means(self, ranks: list[list[float]]) -> None:
        """Evaluate the statuses that the owners, or the root, sent with their means."""
        assert self.mean_encoder is not None
        self.mean_encoder.evaluate(ranks, self.route[-1].root or 0)
        if self.outcomes:
            self._mark_outcomes()

    @property
    def hides_overflow(self) -> bool:
        """True if the result of infinite numbers may be finite."""
        hidden = self.route[-1].carries in (Carries.MEANS, Carries.HEADERS)
        return hidden or self.traits.rounds > 1 or not self.traits.carries_nonfinite

    def _mark_outcomes(self) -> None:
        """Set in the outcomes the variables that no rank had a gradient of, and those that overflowed."""
        header = self.header
        if not (any(header.missing) or any(header.overflowed)):
            return
        # On a device NaN was added to the means already if headers are read after these were applied.
        poisons = self.hides_overflow and not (self.headers_after_use and self.on_device)
        for outcome, missing, overflowed in zip(self.outcomes, header.missing, header.overflowed, strict=False):
            outcome.overflow = outcome.overflow or overflowed
            if overflowed and poisons and outcome.value is not None:
                outcome.value = self.codec.poisoned(outcome.value)
            if missing:
                outcome.value = None

    def discard(self) -> None:
        """Await the last leg, and compare the received step stamps, the only result that counts in a discarded step:
        ranks that do not discard it raise StepError by these stamps, so this rank must, too."""
        self.wait()
        if self.error is not None or self.stopped or self.communicator.piecewise:
            return
        with contextlib.suppress(PayloadError):  # impossible sizes
            wires = self._last_wires()
            self.header.compare_stamps(self.layouts, wires)

    def empty_outcomes(self) -> list[Outcome]:
        """Return the outcomes of ranks that are not at one step."""
        return [Outcome(variable, None, False) for variable in self.bucket.variables]

    # -- errors ----------------------------------------------------------------------------------------

    @property
    def errors(self) -> PayloadErrors:
        """The builder of errors of payloads, for this step."""
        return PayloadErrors(self.program)


def advance_all(trips: Sequence[AnyRoundTrip]) -> None:
    """Start the remaining legs of round trips: the second leg of each, then the third of each, and so on."""
    # The list makes any() call advance() of every trip, so that ranks start the same collectives in one order.
    while any([trip.advance() for trip in trips]):
        pass


def as_numbers(raw: Tensor, dtype: str) -> Tensor:
    """Return bytes as numbers of a dtype."""
    k = kernels_of(raw)
    return k.from_bytes(raw, dtype, (k.nbytes(raw) // ITEM_SIZE[dtype],))
