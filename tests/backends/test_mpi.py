"""The MPI backend's own: 16-bit sums that MPI does not know, collectives on the tensors' own memory, its timeout."""

import math
import subprocess
import time
from unittest import mock

import numpy as np
import pytest
import torch

import grace
from tests.support.engine_pools import available, command, environment
from tests.support.limits import HANGS
from tests.support.pools import launched, on_ranks
from tests.support.training import distributed, refusal

pytestmark = pytest.mark.ranks

SIZE = 3


SIZES = pytest.mark.parametrize("size", [2, 3])
"""Numbers of ranks: of two each adds; three leave it to MPI."""
ENGINE = "mpirun-mpi"


# -- sums -------------------------------------------------------------------------------------------------------------


def terms(dtype):
    """Return the terms of ranks 0 and 1: every pair of special values, and every 16-bit number with some other."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    other = bits[torch.randperm(len(bits), generator=torch.Generator().manual_seed(0))]
    most, least = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    inf, ulp = float("inf"), torch.finfo(dtype).eps
    special = torch.tensor([0.0, -0.0, inf, -inf, float("nan"), most, -most, least, 1.0, 1 + ulp, ulp / 2, -ulp / 4])
    pairs = torch.cartesian_prod(special, special).to(dtype)
    return torch.cat([pairs[:, 0], bits.view(dtype)]), torch.cat([pairs[:, 1], other.view(dtype)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@SIZES
@on_ranks(engine=ENGINE)
def test_sixteen_bit_sums_are_rounded_to_nearest_even(size, dtype):
    first, second = terms(dtype)
    expected = first + second  # torch adds in float32 and rounds once
    if dtype == torch.float16:
        with np.errstate(over="ignore", invalid="ignore"):
            np.testing.assert_array_equal(first.numpy() + second.numpy(), expected.numpy())
    assert expected.isinf().any()
    tensor = [first, second, torch.full_like(first, -0.0)][grace.rank()]  # rank 2 adds nothing, which -0 does exactly
    result = grace.init().allreduce(tensor).wait()
    nan = expected.isnan()
    assert torch.equal(result.isnan(), nan)
    assert torch.equal(result.view(torch.int16)[~nan], expected.view(torch.int16)[~nan])


def known(dtype, rank, length):
    """Small numbers that any rank can make up for any other."""
    return (torch.arange(length) % 5 + 10 * rank + 1).to(dtype)


@SIZES
@on_ranks(engine=ENGINE)
def test_sums_are_in_place_for_every_dtype_and_length(size):
    backend = grace.init()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64):
        for length in (0, 1, 7, 1001):
            tensor = known(dtype, backend.rank, length)
            address = tensor.data_ptr()
            result = backend.allreduce(tensor).wait()
            assert result is tensor
            assert result.data_ptr() == address  # MPI wrote where the gradient was
            assert torch.equal(result, sum(known(dtype, rank, length) for rank in range(size)))
    array = np.arange(5, dtype=np.float16) * (backend.rank + 1)
    assert backend.allreduce(array).wait() is array
    np.testing.assert_array_equal(array, np.arange(5) * sum(range(1, size + 1)))


@on_ranks(SIZE, engine=ENGINE)
def test_what_mpi_does_not_sum_is_refused_by_name():
    backend = grace.init()
    before = backend.sent_bytes
    for dtype in ("uint8", "int16", "bool"):
        said = refusal(backend.allreduce, torch.ones(4, dtype=getattr(torch, dtype)), kind=TypeError)
        assert f"MPI does not sum {dtype}; it sums float32, float64, int64, int32, float16, bfloat16" in said
    assert backend.sent_bytes == before


# -- what arrives -----------------------------------------------------------------------------------------------------


@on_ranks(SIZE, engine=ENGINE)
def test_what_arrives_is_what_was_sent_and_counted():
    """All-gather, all-to-all and broadcast of every dtype and some lengths."""
    backend = grace.init()
    rank, size = backend.rank, backend.size
    for dtype in (torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32):
        for length in (0, 1, 7, 1001):
            before, mine = backend.sent_bytes, known(dtype, rank, length)
            rows = backend.allgather(mine).wait()
            assert len(rows) == size
            assert all(torch.equal(row, known(dtype, i, length)) for i, row in enumerate(rows))
            assert torch.equal(mine, known(dtype, rank, length))
            assert backend.sent_bytes - before == (size - 1) * mine.nbytes

            before, parts = backend.sent_bytes, torch.cat([known(dtype, rank + i, length) for i in range(size)])
            rows = backend.alltoall(parts).wait()
            assert all(torch.equal(row, known(dtype, i + rank, length)) for i, row in enumerate(rows))
            assert backend.sent_bytes - before == (size - 1) * mine.nbytes

            for root in range(size):
                before, tensor = backend.sent_bytes, known(dtype, rank, length)
                assert backend.broadcast(tensor, root).wait() is tensor
                assert torch.equal(tensor, known(dtype, root, length))
                assert backend.sent_bytes - before == ((size - 1) * tensor.nbytes if rank == root else 0)
    assert backend.allgather_object({"rank": rank}) == [{"rank": i} for i in range(size)]


@SIZES
@on_ranks(engine=ENGINE)
def test_collectives_may_be_under_way_together(size):
    """Awaited in any order and twice."""
    backend = grace.init()
    tensors = [known(torch.float32, backend.rank, 10_000 + i) for i in range(20)]
    handles = [backend.allreduce(tensor) for tensor in tensors]
    for i in np.random.default_rng(backend.rank).permutation(20):
        assert handles[i].wait() is handles[i].wait()
        expected = sum(known(torch.float32, rank, 10_000 + int(i)) for rank in range(size))
        assert torch.equal(tensors[i], expected)


class Slow:
    """A request that is complete after ``seconds`` of a clock that goes on while its process sleeps."""

    def __init__(self, seconds):
        self.seconds, self.now, self.looks = seconds, 0.0, 0

    def Test(self):
        self.looks += 1
        return self.now >= self.seconds

    def sleep(self, seconds):
        self.now += seconds

    def monotonic(self):
        return self.now


@on_ranks(SIZE, engine=ENGINE)
def test_a_rank_that_waits_looks_seldom_and_sees_the_end_soon():
    from grace.backends import mpi

    for seconds in (1e-3, 0.01, 0.1, 1.0):
        request = Slow(seconds)
        with mock.patch.object(time, "sleep", request.sleep), mock.patch.object(time, "monotonic", request.monotonic):
            grace.init()._wait_for(request)
        assert request.looks < mpi.SPINS + 100 + 100 * math.log(max(seconds, 0.01) / 0.005) + 1000 * seconds
        assert request.now - seconds <= max(0.02 * seconds, 60e-6)


# -- a rank that does not come ----------------------------------------------------------------------------------------


def waited():
    """Return the error of rank 0, which waits for the others, who do not come."""
    from grace.backends.mpi import MPIBackend

    backend, model = MPIBackend(timeout=2), torch.nn.Linear(20, 30)
    optimizer = distributed(model, "topk(ratio=0.1)", backend=backend)
    if backend.rank > 0:
        return None
    model(torch.ones(1, 20)).sum().backward()
    began = time.monotonic()
    with pytest.raises(grace.ExchangeError) as lost:
        optimizer.step()
    assert time.monotonic() - began >= 2
    return str(lost.value), type(lost.value.__cause__).__name__


def test_an_exchange_gives_up_after_its_timeout_and_says_what_it_was():
    mpi = launched(ENGINE, SIZE)
    (message, cause), *_ = mpi.run(waited)
    mpi.stop()  # the ranks are not in step any more
    assert cause == "TimeoutError"
    assert "the exchange of bucket 0 (weight .. bias; allgather, topk(ratio=0.1), residual) failed" in message
    assert "no answer from the other ranks within 2 s" in message


@on_ranks(SIZE, engine=ENGINE)
def test_some_ranks_train_over_a_communicator_of_their_own():
    from mpi4py import MPI

    from grace.backends.mpi import MPIBackend

    rank = grace.rank()
    comm = MPI.COMM_WORLD.Split(rank < 2)
    if rank == 2:  # evaluates meanwhile
        return
    model = torch.nn.Linear(3, 1, bias=False)
    model.weight.data.zero_()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = grace.DistributedOptimizer(sgd, model.named_parameters(), backend=MPIBackend(comm))
    model(torch.full((1, 3), float(rank + 1))).sum().backward()
    optimizer.step()
    assert model.weight.tolist() == [[-1.5] * 3]
    optimizer.close()


RENUMBERED = """
import grace
from mpi4py import MPI
from grace.backends.mpi import MPIBackend

world = MPI.COMM_WORLD
grace.init(MPIBackend(world.Split(0, -world.rank)))  # numbers the ranks the other way round
if world.rank == 1:
    raise ValueError("a mistake")
world.Barrier()
"""


@pytest.mark.skipif(not available(ENGINE), reason="mpi4py is not installed (make horovod)")
def test_a_rank_that_ends_all_others_is_named_by_its_number_in_the_run(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(RENUMBERED)
    line = command(ENGINE, 2, str(program))
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=HANGS)
    assert done.returncode != 0
    assert "grace: ValueError on rank 1 ends all ranks: a mistake" in done.stdout + done.stderr
