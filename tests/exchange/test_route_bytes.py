"""The bytes that a route says, worked out from shapes, are those that leave each rank."""

import contextlib
import dataclasses
import os
import warnings
from typing import Any, NamedTuple

import pytest
import torch

import grace
from grace.communicators import Allgather, Allreduce, Broadcast
from grace.communicators.choice import build_communicator
from grace.communicators.sparse import row_communicator
from grace.core.registry import known, legal_communicators, make
from grace.core.route import BROADCAST, Carries, EngineTraits, Leg
from grace.core.variable import Variable
from grace.exchange.bucket import Bucket, Traffic
from grace.exchange.delayed import DelayedRoundTrip
from grace.exchange.round_trip import RoundTrip
from grace.exchange.route_bytes import LegBytes, predict_bytes
from grace.exchange.sparse_rows import SparseRows
from grace.kernels import kernels_of
from grace.session.sharding import uniform
from grace.session.step_runner import StepRunner
from tests.support.drawing import THOROUGH
from tests.support.limits import HANGS
from tests.support.own_parts import InPieces, registered
from tests.support.pools import ranks_of

pytestmark = pytest.mark.ranks

SHAPES = ((12, 25), (301,))
OPTIONS: list[dict[str, Any]] = [{}, {"staleness": 1}, {"sync": False}, {"local_replication": True}]
"""Options of communicators by which other bytes travel, or bytes travel later."""


class Blocking(grace.Communicator):
    """Moves payloads itself, variable by variable."""

    name = "blocking"

    @classmethod
    def accepts(cls, compressor):
        return "its payloads differ in size" if compressor.traits.varies else super().accepts(compressor)

    def _start(self, tensors):
        return [self.backend.allgather(kernels_of(tensor).to_bytes(tensor)) for tensor in tensors], tensors

    def _end(self, begun, ctx):
        handles, tensors = begun
        for handle in handles:
            handle.wait()
        return self.compressor.decompress(tensors, ctx)

    def send_receive(self, tensors, ctx, name):
        return self._end(self._start(tensors), ctx)


class Starting(grace.Communicator):
    """Starts to move payloads itself, and awaits them later."""

    name = "starting"
    accepts = Blocking.accepts
    _start, _end = Blocking._start, Blocking._end

    def async_send(self, tensors, name):
        return self._start(tensors)

    def wait_receive(self, handles, ctx, name):
        return self._end(handles, ctx)


class Routed(grace.Communicator):
    """Says its legs."""

    name = "routed"

    def legs(self, nbytes, engine):
        return Broadcast.legs(self, nbytes, engine)


class Beginning(Allgather):
    """Begins round trips itself."""

    name = "beginning"

    def begin(self, contribution):
        return RoundTrip(contribution)


OWN = InPieces, Blocking, Starting, Routed, Beginning


class Case(NamedTuple):
    """One way to exchange some variables."""

    words: str
    variables: list[Variable]
    communicator: Any


def cases(own: bool) -> list[Case]:
    """All that is legal, of what the registry knows: with the communicators of this file, or with Grace's.

    Options take turns with the methods; `make thorough` tries them all.
    """
    found = []
    for number, method in enumerate(known("compressor")):
        tried = OPTIONS if THOROUGH else (OPTIONS[0], OPTIONS[1 + number % (len(OPTIONS) - 1)])
        if dataclasses.MISSING in known("compressor")[method].parameters().values():
            continue
        classes: Any = {kind: known("communicator")[kind] for kind in legal_communicators(make("compressor", method))}
        classes = {kind: cls for kind, cls in classes.items() if (cls in OWN) is own}
        for kind, cls in classes.items():
            # Rows travel alike under all communicators that have no root.
            forms = (False, True) if cls.rooted or kind == next(iter(classes)) else (False,)
            for options in tried:
                for sparse in forms if options.keys() <= cls.parameters().keys() else ():
                    found += case(f"{len(found)}", method, {"name": kind, **options}, sparse)
    return found


def case(name: str, method: str, communicator: dict[str, Any], sparse: bool) -> list[Case]:
    """Return one case, or none if its parts do not go together."""
    variables = [Variable(f"{name}.{i}", shape, sparse=sparse) for i, shape in enumerate(SHAPES)]
    words = f"{communicator}, {method}{', rows' * sparse}"
    with contextlib.suppress(grace.ConfigError), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        built = build_communicator(method, None, communicator)
        if sparse:
            row_communicator(built, name)  # raises if rows cannot be compressed so
        return [Case(words, variables, built)]
    return []


class Counted(NamedTuple):
    """A rank's counts of a bucket: bytes of its own payload, of means that it has sent, and of all it sent."""

    own: int
    means: int
    sent: int


def rows_here(hierarchical: bool) -> int:
    """Return the number of rows of this rank; ranks of nodes have equal numbers, so that their sums have, too."""
    return 4 if hierarchical else 4 + grace.rank()


def gradient(variable: Variable, hierarchical: bool) -> Any:
    if not variable.sparse:
        return torch.randn(variable.shape)
    rows = torch.arange(rows_here(hierarchical))
    return SparseRows(torch.randn(len(rows), *variable.shape[1:]), rows)


def payload_bytes(traffic: Traffic) -> int:
    return sum(traffic.payload_bytes.values())


def exchanged(runner: StepRunner, hierarchical: bool) -> list[Counted]:
    """Exchange all buckets, twice, since some means come a step later: the counts of what the second step brings."""
    steps: list[list[tuple[int, Traffic]]] = [[], []]
    for step in steps:
        for bucket in runner.buckets:
            bucket.carries_stamps = bucket.index % 2 == 0  # with step stamps, and without
            traffic = runner.traffic = Traffic()
            gradients = [gradient(variable, hierarchical) for variable in bucket.variables]
            trip = runner.start_round_trip(bucket, gradients, [True] * len(gradients))
            own = trip.future.round_trip.traffic if isinstance(trip, DelayedRoundTrip) else traffic
            step.append((payload_bytes(own), traffic))
            if hierarchical:
                runner.finish_step(lambda bucket: [None] * len(bucket.variables))
        if not hierarchical:
            runner.finish_step(lambda bucket: [None] * len(bucket.variables))
        for bucket in runner.buckets:  # without sync a step brings what has come
            assert all(future.done.wait(HANGS) for future in bucket.pending)
    counts = []
    for bucket, (first, _), (own, traffic) in zip(runner.buckets, *steps, strict=True):
        sent = first if bucket.communicator.delayed else own  # of the step whose means came
        counts.append(Counted(sent, payload_bytes(traffic) - sent, traffic.sent_bytes))
    return counts


def within_node(bucket: Bucket, inside: Any, node: EngineTraits, rows: dict[str, int], leader: int) -> list[LegBytes]:
    """The legs within a node: to its leader before that exchanges the bucket, and back afterwards."""
    there = predict_bytes(
        Bucket(bucket.index, inside, bucket.variables, carries_stamps=bucket.carries_stamps), node, rows=rows
    )
    buffers = [4.0 * len(bucket.variables)]  # a status of each
    for variable in bucket.variables:
        count = 4 * rows[variable.name]
        rows_back = [8, count, count * variable.numel // variable.shape[0]]
        buffers += rows_back if variable.sparse else [variable.nbytes]
    return [*there, *(LegBytes(Leg(BROADCAST, Carries.MEANS, leader), nbytes) for nbytes in buffers)]


def said(runner: StepRunner, bucket: Bucket, counts: list[Counted], hierarchical: bool) -> float:
    """The bytes that leave this rank by the route; where the data decide, of payloads as large as were counted."""
    communicator: Any = bucket.communicator
    sparse, channel = bucket.variables[0].sparse, runner.channel
    rows = {v.name: rows_here(hierarchical) if hierarchical else 3 + channel.size for v in bucket.variables}
    engine = EngineTraits(channel.size, channel.by_ring, channel.concatenates)
    numbers = sum(rows[v.name] if sparse else 0 for v in bucket.variables)
    elements = sum(v.numel // v.shape[0] * rows[v.name] if sparse else v.numel for v in bucket.variables)
    rank, total = channel.rank, 0.0
    within = 0
    root = communicator.root if communicator.rooted else 0
    if hierarchical:
        groups = runner.hierarchy.node_groups
        inside: Any = row_communicator(Allreduce("none"), "") if sparse else Allreduce("none")
        node = dataclasses.replace(engine, ranks=groups.node.size)
        for one in within_node(bucket, inside, node, rows, groups.first):
            total += round(one.leg.sent(one.nbytes, groups.node.size, groups.node.rank))
        if groups.leaders is None:
            return total
        rank, engine = groups.leaders.rank, dataclasses.replace(engine, ranks=groups.nodes)
        within = 4 * (elements + numbers)  # what the ranks of the node have summed is counted with it
        root = groups.leader_of.index(root)
    sizes = max(count.own for count in counts) - within, counts[root].means
    bits = [8 * max(0, nbytes - 4 * numbers) / elements for nbytes in sizes]
    for own, mean in zip(*(predict_bytes(bucket, engine, of_one, rows) for of_one in bits), strict=True):
        one = mean if own.leg.carries is Carries.MEANS else own
        total += round(one.leg.sent(one.nbytes, engine.ranks, rank))
    return total


def differences(hierarchical: bool, own: bool = False) -> tuple[int, list[str]]:
    """Return the number of buckets that were exchanged, and the differences that were found."""
    os.environ["GRACE_NODE"] = "ab"[grace.rank() >= 2]
    torch.manual_seed(grace.rank())
    backend, words = grace.init(), {}
    try:
        with registered(*OWN):
            shards = []
            for one in cases(own):
                if hierarchical and one.communicator.delayed:  # which is refused
                    continue
                words.update({variable.name: one.words for variable in one.variables})
                of_case = uniform(one.variables, one.communicator)
                shards += [dataclasses.replace(shard, hierarchical=hierarchical) for shard in of_case]
            variables = [shard.variable for shard in shards]
            runner = StepRunner(variables, shards, backend, grace.Context(rank=backend.rank, size=backend.size))
            runner.agree()
            counts = exchanged(runner, hierarchical)
            of_ranks, wrong = list(zip(*backend.allgather_object(counts), strict=True)), []
            for bucket, count, of_all in zip(runner.buckets, counts, of_ranks, strict=True):
                wanted = said(runner, bucket, list(of_all), hierarchical)
                if count.sent != wanted:
                    wrong.append(f"{words[bucket.names[0]]}: {bucket.describe()}: {count.sent}, not {wanted}")
            runner.close()
    finally:
        del os.environ["GRACE_NODE"]
    return len(counts), wrong


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("hierarchical", [False, True], ids=["flat", "hierarchical"])
def test_routes_say_the_bytes_that_leave_each_rank(size, hierarchical):
    for count, wrong in ranks_of(size).run(differences, hierarchical):
        assert not wrong
        assert count > len(known("compressor"))


def test_routes_of_the_users_communicators_say_them_too():
    for count, wrong in ranks_of(2).run(differences, False, True):
        assert not wrong
        assert count > len(known("compressor"))
