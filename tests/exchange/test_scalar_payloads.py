"""A payload tensor of no dimensions arrives as one, whatever carries it."""

import torch

import grace
from grace.communicators import Allgather, Allreduce, Broadcast, ReduceBroadcast, ScatterReduce
from grace.core.compressor import Compressor, Traits
from tests.support.pools import on_ranks
from tests.support.training import joined

SEEN: list[tuple[int, ...]] = []


class Scaled(Compressor):
    """Sends the tensor over its scale, and the scale; in whole numbers unless it is to be summed."""

    name = "scaled"

    def __init__(self, kind: str, fixed: bool):
        self.sums = kind == "Allreduce"
        self.traits = Traits(category="quantization", fixed_size=fixed, summable=self.sums, shardable=True)

    def compress(self, tensor, name):
        if self.sums:
            return [tensor, torch.tensor(4.0)], None
        return [(tensor * 8).to(torch.int16), torch.tensor(4.0), torch.tensor(2, dtype=torch.int32)], None

    def decompress(self, payload, ctx):
        SEEN.extend(tuple(part.shape) for part in payload[1:])
        return payload[0] if self.sums else payload[0] / (payload[1] * payload[2])


KINDS = {kind.__name__: kind for kind in (Allgather, Allreduce, Broadcast, ReduceBroadcast, ScatterReduce)}
CASES = [(kind, fixed) for kind in KINDS for fixed in (True, False) if fixed or kind != "ScatterReduce"]


@on_ranks(2, 3)
def test_a_scalar_arrives_as_a_scalar():
    for case in CASES:
        communicator = joined(KINDS[case[0]](Scaled(*case), "none"))
        for name, values in (("vector", torch.arange(1.0, 5)), ("scalar", torch.tensor(5.0))):
            SEEN.clear()
            mean = communicator.step(values * (grace.rank() + 1), name)
            torch.testing.assert_close(mean, values * (grace.size() + 1) / 2, msg=str(case))
            assert set(SEEN) == {()}, case


@on_ranks()
def test_a_scalar_that_goes_with_rows_arrives_as_one():
    """The gradient is sparse, and its codes travel as bytes."""
    table, communicator = torch.nn.Embedding(5, 2, sparse=True), Allgather(Scaled("", True), "none")
    plain = torch.optim.SGD(table.parameters(), lr=1.0)
    optimizer = grace.DistributedOptimizer(plain, table, communicator=communicator)
    SEEN.clear()
    table(torch.tensor([grace.rank(), 4])).sum().backward()
    optimizer.synchronize()
    assert table.weight.grad.to_dense().sum(1).tolist() == [1, 1, 0, 0, 2]
    assert set(SEEN) == {()}
