"""A payload tensor of no dimensions arrives as one, whatever carries it."""

import numpy as np
import pytest
import torch

import grace
from grace.communicators import Allgather, Allreduce, Broadcast, ReduceBroadcast, ScatterReduce
from grace.core.compressor import Compressor, Traits

pytestmark = pytest.mark.ranks
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


def exchanged() -> list:
    """Each case's means, and what shapes its scales had when they were decoded."""
    found = []
    for kind, fixed in CASES:
        communicator = KINDS[kind](Scaled(kind, fixed), "none")
        communicator.bind(grace.Context(rank=grace.rank(), size=grace.size()), grace.init())
        for name, values in (("vector", [1.0, 2, 3, 4]), ("scalar", 5.0)):
            SEEN.clear()
            value = communicator.step(torch.tensor(values) * (grace.rank() + 1), name).tolist()
            found.append((kind, fixed, value, sorted(set(SEEN))))
    return found


def rows() -> tuple[list[float], list]:
    """The same of a sparse gradient, whose codes travel as bytes."""
    table, communicator = torch.nn.Embedding(5, 2, sparse=True), Allgather(Scaled("", True), "none")
    plain = torch.optim.SGD(table.parameters(), lr=1.0)
    optimizer = grace.DistributedOptimizer(plain, table, communicator=communicator)
    SEEN.clear()
    table(torch.tensor([grace.rank(), 4])).sum().backward()
    optimizer.synchronize()
    return table.weight.grad.to_dense().sum(1).tolist(), sorted(set(SEEN))


def test_a_scalar_arrives_as_a_scalar(ranks):
    mean = (ranks.size + 1) / 2
    for found in ranks.run(exchanged):
        assert len(found) == 2 * len(CASES)
        for kind, fixed, value, shapes in found:
            wanted = [mean * v for v in (1, 2, 3, 4)] if isinstance(value, list) else 5 * mean
            np.testing.assert_allclose(value, wanted, rtol=1e-6, err_msg=f"{kind} {fixed}")
            assert shapes == [()], (kind, fixed)


def test_a_scalar_that_goes_with_rows_arrives_as_one(two_ranks):
    for found, shapes in two_ranks.run(rows):
        assert found == [1, 1, 0, 0, 2]
        assert shapes == [()]
