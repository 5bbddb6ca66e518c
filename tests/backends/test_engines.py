"""The whole catalogue over every engine, started by its launcher: the same results as over torch.distributed."""

import functools
import os

import numpy as np
import pytest
import torch

import grace
from grace.core.registry import known, legal_communicators, make
from tests.support.drawing import THOROUGH, drawn
from tests.support.engine_pools import ENGINES, STARTED
from tests.support.methods import EXCHANGES
from tests.support.pairwise import pairwise
from tests.support.pools import launched, on_ranks
from tests.support.training import METHODS, Given, made_up

pytestmark = pytest.mark.ranks

SHAPES = {"odd": (13, 7), "kernel": (3, 2, 3, 3), "one": (1,), "scalar": (), "empty": (0, 3), "zeros": (31,)}
NEW = (
    *("natural", "terngrad", "onebit", "signum", "dynamic8", "sketch(quantiles=16)"),
    *("block(bits=4, hadamard=32)", "block(format=fp8, rounding=stochastic)"),
    *("threshold(value=0.5)", "dgc(ratio=0.1)", "adaptive(ratio=0.1)", "inceptionn"),
    *("topk(ratio=0.2) | qsgd(levels=7)", "randomk(ratio=0.2) | fp16", "dgc(ratio=0.1) | efsignsgd"),
)


def train(compressor: str, communicator: str, steps: int = 4) -> dict[str, tuple[bool, np.ndarray]]:
    """Per variable: whether the engine summed it, and its weights after a few steps."""
    model = Given(SHAPES)
    optimizer = grace.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(), compressor, communicator=communicator
    )
    for step in range(steps):
        gradients = made_up(SHAPES, step, grace.rank())
        gradients["zeros"][:] = 0
        optimizer.zero_grad()
        model.backward(gradients)
        optimizer.step()
    sums = {v.name: g.communicator.sums for g in optimizer._grace.runner.buckets for v in g.variables}
    return {name: (sums[name], p.detach().numpy().copy()) for name, p in model.named_parameters()}


def everything(pairs) -> dict[tuple[str, str], dict[str, tuple[bool, np.ndarray]]]:
    return {pair: train(*pair) for pair in pairs}


RUNS = [*((engine, 2) for engine in ENGINES), ("mpirun-mpi", 3)]
CHOSEN = pairwise(
    *(RUNS, METHODS + NEW, known("communicator")),
    allowed=lambda run, method, name: name in legal_communicators(make("compressor", method)),
)
CASES = [(*run, (method, name)) for run, method, name in drawn([c for c in CHOSEN if c[0][0] in STARTED])]
if THOROUGH:  # three ranks under Horovod wait long for each other on two cores; test_horovod_launchers.py has some
    CASES += [("horovodrun-gloo", 3, pair) for pair in EXCHANGES]


@functools.cache
def expected(size: int) -> dict[tuple[str, str], dict[str, tuple[bool, np.ndarray]]]:
    """Return the results of torch.distributed."""
    return launched("gloo", size).run(everything, sorted({pair for _, ranks, pair in CASES if ranks == size}))[0]


@functools.cache
def results_of(engine: str, size: int):
    """Return the results of an engine on each rank."""
    return launched(engine, size).run(everything, [pair for *run, pair in CASES if run == [engine, size]])


@pytest.mark.every
@pytest.mark.parametrize(("engine", "size", "pair"), CASES, ids=[f"{e}-{n}ranks-{'-'.join(p)}" for e, n, p in CASES])
def test_every_method_gives_what_it_gives_over_torch_distributed(engine, size, pair):
    ranks, wanted = results_of(engine, size), expected(size)
    for other in ranks[1:]:
        for name, (_, weights) in other[pair].items():
            assert weights.tobytes() == ranks[0][pair][name][1].tobytes(), name
    for name, (sums, weights) in wanted[pair].items():
        got = ranks[0][pair][name][1]
        if not sums or len(ranks) == 2:  # one addition, whatever the order
            assert got.tobytes() == weights.tobytes(), name
        else:
            tolerance = {"fp16": 1e-3, "bf16": 1e-2}.get(pair[0].split("| ")[-1], 1e-6)
            np.testing.assert_allclose(got, weights, rtol=tolerance, atol=tolerance, err_msg=name)


def collectives(dtype: torch.dtype, part: int) -> list[list[list[float]]]:
    """Results of an all-gather, an all-to-all, a gather and a broadcast of tensors of ``part`` elements a rank."""
    backend = grace.init("auto")
    rank, size = backend.rank, backend.size

    def filled(number: int, length: int = part) -> torch.Tensor:
        return torch.full((length,), number, dtype=torch.int64).to(dtype)

    sent = torch.cat([filled(to) for to in range(size)])
    handles = [backend.allgather(filled(rank)), backend.alltoall(sent), backend.gather(filled(rank), size - 1)]
    results = [handle.wait() for handle in handles]
    results.append([backend.broadcast(filled(rank), 1).wait()])
    assert all(tensor.dtype == dtype for tensors in results for tensor in tensors)
    return [[tensor.tolist() for tensor in tensors] for tensors in results]


@pytest.mark.parametrize("engine", [("gloo", 2), ("gloo", 4), ("horovodrun-gloo", 2), ("mpirun-mpi", 3)])
def test_collectives_give_a_part_of_each_rank_and_empty_ones_too(engine):
    size = engine[1]
    for dtype in (torch.uint8, torch.int16, torch.bfloat16, torch.float32):
        for part in (0, 1, 3):
            ranks = launched(*engine).run(collectives, dtype, part)
            of_all = [[number] * part for number in range(size)]
            for rank, (gathered, received, at_root, broadcast) in enumerate(ranks):
                assert gathered == of_all
                assert received == [[rank] * part] * size
                assert at_root == (of_all if rank == size - 1 else [])
                assert broadcast == [[1] * part]


def lengths_that_differ():
    """The errors of Horovod's collectives of unequal lengths, and whether the next collective works."""
    backend = grace.init("auto")
    mine = torch.ones(2 + 2 * backend.rank)
    errors = []
    for start in (backend.allgather, backend.alltoall, lambda tensor: backend.gather(tensor, 0)):
        try:
            start(mine).wait()
        except grace.ExchangeError as error:
            errors.append(str(error))
    return errors, len(backend.allgather(torch.ones(3)).wait())


def test_horovods_collectives_of_unequal_lengths_are_refused():
    """Horovod itself joins them, and the parts of ranks would be cut at the wrong places."""
    (first, works), (other, works_too) = launched("horovodrun-gloo", 2).run(lengths_that_differ)
    assert first[0].startswith(
        "allgather takes tensors of one length, and this rank's has 2 elements, all 2 ranks' have 6"
    )
    assert other[0].startswith("allgather takes tensors of one length, and this rank's has 4 elements")
    assert [error.split()[0] for error in first] == ["allgather", "alltoall", "gather"]
    assert [error.split()[0] for error in other] == ["allgather", "alltoall"]  # only the root receives
    assert works == works_too == 2


@pytest.mark.parametrize(("engine", "size"), [("gloo", 3), ("horovodrun-gloo", 2), ("mpirun-mpi", 3)])
@on_ranks()
def test_ranks_know_their_number_on_their_node(engine, size):
    """This rank's number on its node; then that of a backend which nobody told it, where ranks say other nodes."""
    told, backend = grace.local_rank(), grace.init("auto")
    os.environ["GRACE_NODE"] = "even" if grace.rank() % 2 == 0 else "odd"
    before = backend.local_rank, backend.local_size
    backend.local_rank = None
    try:
        assert (told, grace.local_rank(), grace.local_rank()) == (grace.rank(), grace.rank() // 2, grace.rank() // 2)
    finally:
        backend.local_rank, backend.local_size = before  # later tests have the same ranks
        del os.environ["GRACE_NODE"]
