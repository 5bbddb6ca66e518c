"""The exchange of ScatterMerge: entries to their owners, which add them up, and the largest sums back to all."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from grace.core.compressor import Compressor, Payload, Sparsifier, Tensor, Traits
from grace.errors import PayloadError
from grace.exchange.base import Exchange
from grace.exchange.bucket import Outcome
from grace.exchange.owners import coded, owners_of, positions
from grace.exchange.scatter_reduce import ScatterReduceExchange
from grace.exchange.tracing import recorder
from grace.exchange.wire import Wire, in_range


class Entries(Sparsifier):
    """What a memory sees of the exchange: values, and positions as they are."""

    def __init__(self, inner: Compressor):
        self.inner = inner

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Those of the sparsifier."""
        return self.inner.traits

    def sent_indices(self, payload: Payload, ctx: Any) -> Tensor | None:
        return payload[1]


class ScatterMergeExchange(ScatterReduceExchange):
    """Two collectives: an all-to-all of entries (value, code), and an all-gather of the largest sums.

    Payloads hold all variables of the bucket, so that an owner's share is full although single variables give it more
    or less; they stand in the first variable's place. Both are of a size that follows from shapes.
    """

    def _compensated(self, gradient: Tensor, name: str) -> Tensor:
        return Exchange._compensated(self, gradient, name)

    # -- to the owners ---------------------------------------------------------------------------------

    def _shards(self, inputs: Sequence[Tensor]) -> list[list[Payload]]:
        k, variables = self.kernels, self.bucket.variables
        self.inputs, self.entries = list(inputs), Entries(self.compressor)
        self.encoded = recorder.each("compress", self.names, self.compressor.compress, inputs)
        pairs = zip(self.encoded, variables, strict=True)
        self.sent = [(payload[0], self._indices(payload, ctx)) for (payload, ctx), _ in pairs]
        self.counts = [int(values.shape[0]) for values, _ in self.sent]
        size = self.communicator.context.size
        self.owners = owners_of(tuple(variable.numel for variable in variables), tuple(self.counts), size)
        with recorder.phase("pack", bucket=self.bucket):
            each = [coded(i, place, size) for (_, i), place in zip(self.sent, self.owners.places, strict=True)]
            owners, codes = k.join([one for one, _ in each]), k.join([one for _, one in each])
            values = k.join([values for values, _ in self.sent])
            self.unsent: list[Tensor] = []
            shares = [self._share(rank, owners, codes, values) for rank in range(size)]
            if self.unsent:
                self.on_their_way = k.zero_at(
                    k.zeros(tuple(values.shape), "float32", values) + 1.0, k.join(self.unsent)
                )
            return shares

    def _indices(self, payload: Payload, ctx: Any) -> Tensor:
        indices = self.compressor.sent_indices(payload, ctx)
        assert indices is not None
        return indices

    def _share(self, rank: int, owners: Tensor, codes: Tensor, values: Tensor) -> list[Payload]:
        """What one owner gets, filled up with zeros for a code that nobody reads."""
        k, room = self.kernels, self.owners.room
        mine = k.above(k.cast(owners == rank, "float32"), 0.5)
        if mine.shape[0] > room:
            self.unsent.append(mine[room:])
            mine = mine[:room]
        rest = room - int(mine.shape[0])
        payload = [
            k.join([k.gather(values, mine), k.zeros((rest,), "float32", values)]),
            k.join([k.take_rows(codes, mine), k.zeros((rest,), "int32", codes) + self.owners.codes]),
        ]
        return [payload, *([] for _ in self.names[1:])]

    def _add(self, payload_bytes: list[int]) -> None:
        """Count each variable's part of what all of them send together."""
        total, all_of_them = sum(payload_bytes), max(1, sum(self.counts))
        ends = [total * sent // all_of_them for sent in accumulate(self.counts, initial=0)]
        super()._add([b - a for a, b in pairwise(ends)])

    def _floats(self, payload: Any) -> list[Tensor]:
        return list(payload)

    def _learn(self, inputs: Sequence[Tensor]) -> None:
        """Nothing yet: what comes back decides what stays."""

    # -- at the owner ----------------------------------------------------------------------------------

    @property
    def replies(self) -> list[Wire]:
        return [self.reply] * self.communicator.context.size

    def _answers(self, payloads: list[list[Payload]]) -> tuple[list[Payload], list[Any]]:
        k, owners, context = self.kernels, self.owners, self.communicator.context
        like = payloads[0][0][0]
        sums = k.zeros((owners.codes + 1,), "float32", like)
        try:
            with recorder.phase("decode", bucket=self.bucket):
                for rank, (values, codes) in enumerate(payloads[0]):
                    sums = self._merged(sums, codes, values, rank)
        except PayloadError as error:  # the others wait for the sums: they are told with them
            self.refuse(error, self.names[0])
            sums = k.zeros((owners.codes + 1,), "float32", like)
        sound: list[Any] = []
        found: list[tuple[int, Tensor, Tensor]] = []
        for place in owners.places:
            if place.owner not in (None, context.rank):
                sound.append(True)
                continue
            part = sums[place.base : place.base + place.codes]
            sound.append(in_range(k, part, [], self.memory.stateful))
            top = k.topk(part, place.kept)
            where = positions(top + place.base, place, context.rank, owners.ranks)
            found.append((place.start, k.gather(part, top), where))
        found.sort(key=lambda one: one[0])
        rest = owners.answer - sum(place.kept for place in owners.places if place.owner in (None, context.rank))
        answer = [
            k.join([*(values for _, values, _ in found), k.zeros((rest,), "float32", like)]),
            k.join([*(where for _, _, where in found), k.zeros((rest,), "int32", like)]),
        ]
        answers = [answer, *([] for _ in self.names[1:])]
        self.reply = Wire(k, answers, False, self.room)
        self.longest = self.reply.length
        return answers, sound

    def _merged(self, sums: Tensor, codes: Tensor, values: Tensor, rank: int) -> Tensor:
        try:
            return self.kernels.scatter_add(sums, codes, values, 1.0 / self.communicator.context.size)
        except PayloadError as error:
            error.place = rank
            raise

    def _learn_answers(self) -> None:
        """Nothing: what owners drop stays with those who sent it."""

    # -- everywhere ------------------------------------------------------------------------------------

    def _joined(self, i: int, payloads: list[Payload], overflow: bool, out: Tensor | None, name: str) -> Outcome:
        """One variable's mean, of what its owners kept; and its memory, which learns what came through."""
        k, variable, place = self.kernels, self.bucket.variables[i], self.owners.places[i]
        if i == 0:
            self.kept = payloads
        ranks = range(len(self.kept)) if place.owner is None else [place.owner]
        cut = slice(place.start, place.start + place.kept)
        values = k.join([self.kept[rank][0][cut] for rank in ranks])
        where = k.join([self.kept[rank][1][cut] for rank in ranks])
        out = k.zeros(variable.shape, "float32", values) if out is None else k.zero(out)
        total = k.scatter_add(k.flat(out), where, values, 1.0)
        with recorder.phase("update", variable=name):
            self._keep(i, total, name)
        value = k.reshape(total, tuple(variable.shape))
        value = k.add(value, value, float("nan")) if overflow else value
        return Outcome(variable, None if self.missing[i] else value, overflow)

    def _keep(self, i: int, total: Tensor, name: str) -> None:
        """Let the memory learn that those of this rank's entries were sent that are part of a sum."""
        k, (values, indices) = self.kernels, self.sent[i]
        sums = k.gather(total, indices)
        if self.unsent:
            first = sum(self.counts[:i])
            sums = sums * self.on_their_way[first : first + self.counts[i]]
        through = k.above(sums, 0.0)
        entries = [k.gather(values, through), k.take_rows(indices, through)]
        shape = tuple(self.bucket.variables[i].shape)
        self.memory.update(self.inputs[i], name, self.entries, entries, shape)
