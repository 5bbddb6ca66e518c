"""The codec of a bucket: gradients into wires, and wires into means.

:class:`PerVariableCodec` serves every compressor, memory and framework, a variable at a time. The codecs that encode a
whole bucket in one pass (:mod:`grace.exchange.fused_codec`) are derived from it: they compute the same bits faster, and
fall back on it for inputs that they do not support.
"""

import functools
from collections.abc import Callable, Generator, Iterable, Sequence

from grace.core.compressor import Compressor, Ctx, Payload, Tensor
from grace.core.context import Context
from grace.core.memory import Memory
from grace.core.user_parts import check_decodes
from grace.core.variable import Variable, equal_bounds
from grace.errors import PayloadError, payload_of
from grace.exchange.bucket import Bucket
from grace.exchange.header import REFUSED, Flag, Header, in_range, stamp_numbers
from grace.exchange.layout import Difference, Layout, Stamps, Status
from grace.exchange.sparse_rows import Gradient
from grace.exchange.tracing import recorder
from grace.kernels import Kernels, kernels_of


class PerVariableCodec:
    """Codec that encodes a bucket's gradients into wires, and decodes wires into their mean, variable by variable.

    It is kept from step to step. If each rank owns a piece of every variable there is one wire for each owner, else
    there is one wire. A round trip calls, in this order:

    - ``encode``, once: compensate and compress gradients; return the wires with their headers, joined;
    - ``update_memory``, once, while bytes travel: update the memory with the parts that payloads left out;
    - ``next_round``, for methods of several rounds: take the sum of a round's wires, and return the next wire;
    - ``average`` and ``write_means``, if this rank is an owner or the root: decode all ranks' payloads, and encode the
      mean; then ``update_mean_memory``, while bytes travel;
    - ``decode``, once: decode the wires of the last leg into ``outs``.

    Args:
        bucket: the variables, and the communicator whose methods encode them. Its context has the step whose payload
            sizes hold.
        kernels: the kernels of the gradients' framework and device.
        on_device: True if gradients lie on a device, where no number is read.

    Attributes:
        owners: number of pieces that each variable is cut into, each owned by a rank; 1 if variables stay whole.
        owner: the piece that this rank averages.
        layouts: layouts of the wires that this rank writes in the current round, one for each owner.
        known: the layouts of each round's wires; None for a round until its payloads are made.
        withheld: the payload because of which this rank sends none in this step; a status informs all ranks.
        varies: True if payloads differ in size between ranks.
        divisor: divisor of the sum of decoded payloads that makes it their mean.
    """

    withheld: Difference | None = None
    wrote_statuses = False
    """True if ``average`` has written the statuses of the means as well."""
    rounds: Generator[list[Payload], list[Payload], list[tuple[Payload, Ctx]]]

    def __init__(self, bucket: Bucket, kernels: Kernels, on_device: bool = False):
        communicator = bucket.communicator
        self.bucket = bucket
        self.kernels = kernels
        self.on_device = on_device
        self.names = bucket.names
        self.context: Context = communicator.context
        self.owners, self.owner = (self.context.size, self.context.rank) if communicator.piecewise else (1, 0)
        self.compressor: Compressor = communicator.compressor
        self.memory: Memory = communicator.memory
        self.mean_compression = communicator.mean_compression
        self.pieces = PiecewiseCompressor(self.compressor, self.owners) if communicator.piecewise else None
        self.traits = self.compressor.traits
        self.sums = communicator.sums
        self.divisor = self.context.size / self.context.predivide if self.sums else self.context.size
        self.user_defined = communicator.user_defined
        self.stateful = communicator.stateful
        self.varies = self.traits.varies and not (on_device and self.compressor.bounded)
        self.exact = self.traits.exact and not self.memory.stateful and self.pieces is None
        self.stamps = stamp_numbers(bucket)
        self.bounds = [equal_bounds(variable.numel, self.owners) for variable in bucket.variables]
        # The state of a method of several rounds keeps views of received wires, so its wires are new at each step.
        self.keeps_buffer = not (self.varies or self.traits.rounds > 1 or self.pieces or communicator.delayed)
        self.checks_decoding = (
            self.user_defined and self.pieces is None and type(self.compressor).accumulate is Compressor.accumulate
        )
        self.buffer: Tensor | None = None
        self.round = 0
        self.inputs: list[Tensor] = []
        self._ranges: list[Flag] = []
        self._detects_overflow = False
        self.encoded: list[tuple[Payload, Ctx]] = []
        """Payload of each variable (or one for each owner), and the ctx that decodes any rank's."""
        self.means: list[Tensor] = []
        self.encoded_means: list[tuple[Payload, Ctx]] = []
        self.known = self._known_layouts()
        self.layouts: list[Layout] = self.known[0] or []

    # -- layouts, from shapes ----------------------------------------------------------------------------

    def _known_layouts(self) -> list[list[Layout] | None]:
        """Return the layouts of each round's wires by the variables' shapes; None for a round if the method does not
        declare sizes.

        A user's class must define its sizes itself: inherited ones may be wrong for it."""
        found: list[list[Layout] | None] = [None] * self.traits.rounds
        if self.user_defined and vars(type(self.compressor)).keys().isdisjoint(("payload_spec", "round_specs")):
            return found
        variables = list(zip(self.bucket.variables, self.bounds, strict=True))
        specs = functools.cache(self.compressor.specs)  # many variables have the same shape
        by_owner = [
            [specs(*self._arguments_of_specs(variable, *bounds[j])) for variable, bounds in variables]
            for j in range(self.owners)
        ]
        for number in range(self.traits.rounds):
            payloads = [[specs[number] for specs in of_owner] for of_owner in by_owner]
            if all(spec is not None for of_owner in payloads for spec in of_owner):
                found[number] = [Layout(self.kernels, each, self.sums, self.stamps) for each in payloads]  # type: ignore[arg-type]
        return found

    def _arguments_of_specs(self, variable: Variable, start: int, stop: int) -> tuple[tuple[int, ...], str, bool, int]:
        """Return the arguments of ``compressor.specs`` for a variable, or for its piece in [start, stop)."""
        shape = variable.shape if self.pieces is None else (stop - start,)
        return shape, variable.dtype if self.exact else "float32", self.on_device, self.context.step

    def means_layouts(self) -> list[Layout]:
        """Return the layouts of the means of each owner, or of the root, as far as they follow from shapes."""
        return self.layouts

    # -- sending ---------------------------------------------------------------------------------------

    def encode(self, gradients: Sequence[Gradient], header: Header) -> Tensor:
        """Compensate, compress and pack; set ``header.in_range``.

        Returns:
            the wires of all owners, joined.
        """
        self.round = 0
        self.withheld = None
        if self.traits.rounds > 1:
            return self._first_round(gradients, header)
        self.inputs = recorder.each("compensate", self.names, self.compensated, gradients)
        self.encoded = recorder.each("compress", self.names, self._compressed, self.inputs)
        payloads = [payload for payload, _ in self.encoded]
        if self.checks_decoding:
            self._check_decoding()
        if header.program.detects_overflow:
            tensors = payloads if self.pieces is None else [[t for piece in p for t in piece] for p in payloads]
            header.in_range = self._in_range(header.present, tensors)
        return self._packed(payloads, header)

    def compensated(self, gradient: Tensor, name: str) -> Tensor:
        """Return the tensor to compress: the gradient, to which the memory adds what earlier steps left out (error
        feedback); float32 and contiguous unless the method is exact."""
        if not self.exact:
            k = self.kernels
            gradient = k.reshape(k.flat(k.cast(gradient, "float32")), tuple(gradient.shape))
        return self.memory.compensate(gradient, name)

    def _compressed(self, tensor: Tensor, name: str) -> tuple[Payload, Ctx]:
        """Return a payload, or one for each owner, and the ctx that decodes it."""
        if self.pieces is not None:
            return self.pieces.compress_pieces(tensor, name)
        return self.compressor.compress(tensor, name)

    def _check_decoding(self) -> None:
        """Refuse a user's compressor whose payloads do not decode to the shapes of its inputs. Runs at the first
        step."""
        for x, (payload, ctx), name in zip(self.inputs, self.encoded, self.names, strict=True):
            check_decodes(self.compressor, payload, ctx, x, name)
        self.checks_decoding = False

    def _in_range(self, present: Sequence[bool], payloads: Sequence[Payload], known: Sequence[Flag] = ()) -> list[Flag]:
        """Return True for each variable that this rank has a gradient of, in range with its payload."""
        kept = self.stateful
        each = zip(present, self.inputs, payloads, known or [None] * len(self.names), strict=True)
        return [here and in_range(self.kernels, x, payload, kept, found) for here, x, payload, found in each]

    def _packed(self, payloads: Sequence[Payload], header: Header) -> Tensor:
        """Return the wires of all owners, joined, each padded to the longest."""
        k = self.kernels
        statuses = header.statuses(later_round=self.round > 0)
        payloads = self._predivided(payloads)
        by_owner: list[Sequence[Payload]] = [payloads]
        if self.pieces is not None:
            by_owner = [[pieces[j] for pieces in payloads] for j in range(self.owners)]
        layouts = self.known[self.round]
        if self.varies or layouts is None:
            layouts = [Layout.from_payloads(k, each, self.sums, self.stamps) for each in by_owner]
            if not self.varies:
                self.known[self.round] = layouts
        elif self.user_defined:
            by_owner, statuses = self._withhold(by_owner, layouts, statuses)
        self.layouts = layouts
        stamps = header.stamps_to_send
        if self.pieces is None:
            buffer = layouts[0].pack(by_owner[0], statuses, stamps, self.buffer)
            self.buffer = buffer if self.keeps_buffer else None
            return buffer
        each = zip(layouts, by_owner, strict=True)
        wires = [layout.pack(payloads, statuses, stamps) for layout, payloads in each]
        return k.join([self.padded(wire, layouts) for wire in wires])

    def padded(self, wire: Tensor, layouts: Sequence[Layout]) -> Tensor:
        """Return an owner's wire, padded with zeros to the longest of all owners' layouts."""
        extra = 0 if self.pieces is None else max(layout.length for layout in layouts) - wire.shape[0]
        return self.kernels.join([wire, self.kernels.zeros((extra,), "uint8", wire)]) if extra > 0 else wire

    def _predivided(self, payloads: Sequence[Payload]) -> Sequence[Payload]:
        """Return payloads divided by ``predivide``, if the engine sums them."""
        k, by = self.kernels, self.context.predivide
        if by == 1 or not self.sums:
            return payloads
        # Payload tensors may be views of the gradients, which must not change.
        return [[k.divide(k.zeros(tuple(x.shape), k.dtype(x), x), x, by) for x in payload] for payload in payloads]

    def _withhold(
        self, by_owner: list[Sequence[Payload]], layouts: list[Layout], statuses: list[Status]
    ) -> tuple[list[Sequence[Payload]], list[Status]]:
        """Return the payloads and statuses to send. Payloads of other shapes or dtypes than at the first step do not
        fit the wire: zeros are sent instead of all payloads, and a status by which all ranks give up."""
        for layout, payloads in zip(layouts, by_owner, strict=True):
            difference = layout.first_difference(payloads)
            if difference is not None:
                i, self.withheld = difference.variable, difference
                refused = float("nan") if self.sums else REFUSED
                zeros: list[Sequence[Payload]] = [layout.zeros(by_owner[0][0][0]) for layout in layouts]
                return zeros, [*statuses[:i], refused, *statuses[i + 1 :]]
        return by_owner, statuses

    def update_memory(self) -> None:
        """Update the memory with the parts that payloads left out (error feedback), unless payloads were withheld.
        Methods of several rounds update it in :meth:`decode`."""
        # A withheld payload was not sent: as if it had no gradient, this rank keeps the memory as it is.
        if self.withheld is None and self.traits.rounds == 1:
            recorder.each("update", self.names, self._update, self.inputs, self.encoded)
            self.inputs = []  # copies of all gradients, which nobody reads any more

    def _update(self, tensor: Tensor, encoded: tuple[Payload, Ctx], name: str) -> None:
        self.memory.update(tensor, name, self.pieces or self.compressor, *encoded)

    # -- several rounds --------------------------------------------------------------------------------

    def _first_round(self, gradients: Sequence[Tensor], header: Header) -> Tensor:
        self.inputs, self._ranges = [], []
        self._detects_overflow = header.program.detects_overflow
        tensors: Iterable[Tensor] = map(self._compensate_input, gradients, self.names)
        if recorder.active is not None:  # make all inputs first, to record the memory's time apart from the method's
            tensors = recorder.each("compensate", self.names, self._compensate_input, gradients)
        self.rounds = self.compressor.exchange_all(tensors, self.names)
        with recorder.phase("compress", variables=self.bucket.variables):
            payloads = next(self.rounds)
        if self._detects_overflow:
            header.in_range = self._in_range(header.present, payloads, self._ranges)
        return self._packed(payloads, header)

    def _compensate_input(self, gradient: Tensor, name: str) -> Tensor:
        """Return one variable's input. The method calls it as it iterates, so that the input is in the cache when it is
        checked."""
        tensor = self.compensated(gradient, name)
        self.inputs.append(tensor)
        kept = self.stateful
        self._ranges.append(in_range(self.kernels, tensor, (), kept) if self._detects_overflow else True)
        return tensor

    def receive(self, total: Tensor) -> Tensor | None:
        """Receive the sum of a round's wires.

        Returns:
            1.0 for each variable whose sum is finite, else 0.0, on the device; None if the caller must check.
        """
        return None

    def next_round(self, total: Tensor, header: Header) -> Tensor:
        """Receive the sum of a round's wires, and return the next wire."""
        means = self.layouts[0].unpack(self._divided(total))
        self.round += 1
        with recorder.phase("compress", variables=self.bucket.variables):
            payloads = self.rounds.send(means)
        return self._packed(payloads, header)

    def _divided(self, total: Tensor) -> Tensor:
        """Divide a summed wire in place; include the header unless it is still unread on the device."""
        if self.divisor == 1:
            return total
        part = total[: self.layouts[0].body] if self.on_device else total
        return self.kernels.divide(part, part, self.divisor)

    def _last_round(self, total: Tensor) -> None:
        with payload_of(variable=self.bucket.ends):
            try:
                self.rounds.send(self.layouts[0].unpack(self._divided(total)))
            except StopIteration as end:
                self.encoded = end.value
                return
        raise TypeError("a compressor's exchange() yielded more payloads than its traits.rounds")

    # -- means, if this rank is an owner or the root ---------------------------------------------------

    def average(self, wires: Sequence[Tensor], layouts: Sequence[Layout], header: Header) -> list[Flag]:
        """Decode and average all ranks' payloads, and compress the mean.

        Returns:
            True for each variable whose mean is in range.

        Raises:
            PayloadError: a payload cannot be decoded, or a mean's does not fit the wire; ``error.variable`` is its
                variable.
        """
        assert self.mean_compression is not None
        memory = self.mean_compression.memory
        with recorder.phase("unpack", bucket=self.bucket):
            received = [layout.unpack(wire) for layout, wire in zip(layouts, wires, strict=True)]
        payloads = [[payload[i] for payload in received] for i in range(len(self.names))]
        means = recorder.each("decode", self.names, self.mean, range(len(self.names)), payloads)
        self.means = recorder.each("compensate", self.names, memory.compensate, means)
        self.encoded_means = recorder.each("compress", self.names, self._compressed_mean, self.means)
        if self.user_defined and not self.varies:
            self._check_means_fit()
        each = zip(self.means, self.encoded_means, strict=True)
        return [in_range(self.kernels, mean, payload, memory.stateful) for mean, (payload, _) in each]

    def _check_means_fit(self) -> None:
        """Raise a PayloadError if a mean's payload has other shapes or dtypes than the layout of this rank's means."""
        layout = self.means_layouts()[self.owner]
        self.withheld = layout.first_difference([payload for payload, _ in self.encoded_means])
        if self.withheld is not None:
            with payload_of(variable=self.names[self.withheld.variable]):
                raise PayloadError("the payload of the mean does not fit the wire")

    def mean(self, i: int, payloads: list[Payload], name: str) -> Tensor:
        """Return the mean of one variable, or of the piece of it that this rank owns."""
        ctx = self.encoded[i][1]
        shape = self.bucket.variables[i].shape
        if self.pieces is not None:
            a, b = self.bounds[i][self.owner]
            shape, ctx = (b - a,), ctx[1][self.owner]
        out = self.kernels.zeros(shape, "float32", payloads[0][0])
        return self.aggregated(payloads, ctx, out, self.context.size, name)

    def _compressed_mean(self, mean: Tensor, name: str) -> tuple[Payload, Ctx]:
        assert self.mean_compression is not None
        return self.mean_compression.compressor.compress(mean, f"{name}/{self.mean_compression.label}")

    def write_means(self, statuses: list[Status], stamps: Stamps) -> tuple[Tensor, Layout]:
        """Return the wire of the means, padded to the longest owner's, and its layout."""
        k = self.kernels
        payloads = [payload for payload, _ in self.encoded_means]
        layout = Layout.from_payloads(k, payloads, False, self.stamps) if self.varies else self.layouts[self.owner]
        return self.padded(layout.pack(payloads, statuses, stamps), self.layouts), layout

    def update_mean_memory(self, kept: Sequence[bool]) -> None:
        """Update the memory of means with the parts that the payloads of means left out.

        Args:
            kept: True for each variable to update; False to roll its state back.
        """
        assert self.mean_compression is not None
        compressor, memory = self.mean_compression.compressor, self.mean_compression.memory
        for keep, name, mean, encoded in zip(kept, self.names, self.means, self.encoded_means, strict=True):
            if keep:
                with recorder.phase("update", variable=name):
                    memory.update(mean, name, compressor, *encoded)
            else:
                self.roll_back_mean(name)

    def roll_back_mean(self, name: str) -> None:
        """Roll back the state that the memory of means has of a variable."""
        assert self.mean_compression is not None
        for part in self.mean_compression.memory.named_components().values():
            part.state.rollback(name)

    # -- receiving -------------------------------------------------------------------------------------

    def decode(
        self, wires: Sequence[Tensor], layouts: Sequence[Layout], outs: Sequence[Tensor | None]
    ) -> list[Gradient]:
        """Return the mean of each variable, written into its ``out`` unless that is None.

        Args:
            wires: one from each rank, or their sum; if means are encoded once more, one from each owner, or the root's.
            layouts: the layouts of the wires.
            outs: a tensor for each variable, or None.

        Raises:
            PayloadError: a payload cannot be decoded; ``error.variable`` is its variable.
        """
        count = self.divisor
        if self.traits.rounds > 1:
            self._last_round(wires[0])
            received: list[list[Payload]] = [[payload] for payload, _ in self.encoded]
            count = 1
        else:
            with recorder.phase("unpack", bucket=self.bucket):
                if self.traits.exact and self.sums:  # one division for the whole bucket
                    wires, count = [self._divided(wires[0])], 1
                each = [layout.unpack(wire) for layout, wire in zip(layouts, wires, strict=True)]
                received = [[payloads[i] for payloads in each] for i in range(len(self.names))]
        one = self._aggregate if self.mean_compression is None else self._joined
        counts = [count] * len(outs)
        values = recorder.each("decode", self.names, one, range(len(self.names)), received, outs, counts)
        if self.traits.rounds > 1:  # memories are updated with the aggregated payload
            recorder.each("update", self.names, self._update, self.inputs, self.encoded)
        return values

    def output(self, i: int, out: Tensor | None, like: Tensor, dtype: str = "float32") -> Tensor:
        """Return the tensor that a variable's mean is written to: ``out``, or zeros."""
        return self.kernels.zeros(self.bucket.variables[i].shape, dtype, like) if out is None else out

    def _aggregate(self, i: int, payloads: list[Payload], out: Tensor | None, count: float, name: str) -> Gradient:
        dtype = self.bucket.variables[i].dtype if self.traits.exact else "float32"
        return self.aggregated(payloads, self.encoded[i][1], self.output(i, out, payloads[0][0], dtype), count, name)

    def aggregated(self, payloads: list[Payload], ctx: Ctx, out: Tensor, count: float, name: str) -> Tensor:
        """Return the aggregate of payloads; a PayloadError names the variable."""
        with payload_of(variable=name):
            return self.compressor.aggregate(payloads, ctx, out, count)

    def _joined(self, i: int, payloads: list[Payload], out: Tensor | None, count: float, name: str) -> Gradient:
        """Return the mean that owners, or the root, sent in payloads. Each payload is aggregated alone, so that a vote
        stays a vote."""
        assert self.mean_compression is not None
        ctx = self.encoded[i][1]
        room = self.output(i, out, payloads[0][0])
        with payload_of(variable=name):
            if self.pieces is not None:
                return self.pieces.join(payloads, ctx, room)
            return self.mean_compression.compressor.aggregate(payloads, ctx, room, 1)

    def poisoned(self, value: Gradient) -> Gradient:
        """Return a mean with its numbers replaced by NaN, because a rank's gradient was not finite."""
        return self.kernels.add(value, value, float("nan"))


class PiecewiseCompressor(Compressor):
    """Compressor applied piece by piece: piece j of n elements is ``equal_bounds(n, owners)[j]`` of the flat tensor.

    A payload is a list of payloads, one for each owner; a ctx is bounds, the pieces' ctxs and the shape. Memories are
    updated with this compressor, and so with the errors of all pieces together.

    Args:
        inner: the compressor of a piece.
        owners: number of pieces of each tensor.
    """

    def __init__(self, inner: Compressor, owners: int):
        self.inner = inner
        self.owners = owners
        self.traits = inner.traits

    def compress_pieces(self, tensor: Tensor, name: str) -> tuple[list[Payload], Ctx]:
        """Return a payload for each owner, and the ctx that decodes them."""
        flat = kernels_of(tensor).flat(tensor)
        bounds = equal_bounds(flat.shape[0], self.owners)
        coded = [self.inner.compress(flat[a:b], f"{name}/shard_{j}") for j, (a, b) in enumerate(bounds)]
        return [payload for payload, _ in coded], (bounds, [ctx for _, ctx in coded], tuple(tensor.shape))

    def decompress(self, payload: Payload, ctx: Ctx) -> Tensor:
        k = kernels_of(payload[0][0])
        return self.accumulate(payload, ctx, k.zeros(ctx[2], "float32", payload[0][0]))

    def accumulate(self, payload: Payload, ctx: Ctx, out: Tensor, weight: float = 1.0) -> Tensor:
        return self._piece_by_piece(self.inner.accumulate, payload, ctx, out, weight)

    def join(self, means: Payload, ctx: Ctx, out: Tensor) -> Tensor:
        """Return the tensor made of the means of its pieces. Each payload is aggregated alone, so that a vote stays a
        vote."""
        return self._piece_by_piece(self.inner.aggregate, [[mean] for mean in means], ctx, out, 1)

    @staticmethod
    def _piece_by_piece(
        decode: Callable[..., Tensor], payloads: Sequence[Payload], ctx: Ctx, out: Tensor, number: float
    ) -> Tensor:
        """Return ``out`` with every piece decoded by a method of the inner compressor."""
        k = kernels_of(out)
        flat, pieces = k.flat(out), []
        for owner, ((a, b), payload, inner_ctx) in enumerate(zip(ctx[0], payloads, ctx[1], strict=True)):
            try:
                pieces.append(decode(payload, inner_ctx, flat[a:b], number))
            except PayloadError as error:
                error.place = owner  # aggregate() has set the index among its single payload: replace it by the rank
                raise
        return out if k.mutable else k.reshape(k.join(pieces), tuple(out.shape))
