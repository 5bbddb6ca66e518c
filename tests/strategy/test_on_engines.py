"""The main builders over Horovod and MPI: the same results as over torch.distributed."""

import functools

import pytest

import grace
from tests.support.pools import launched, on_ranks
from tests.support.strategies import assert_close, executed, mixed, on_the_mean, train, weights
from tests.support.training import digest, refusal, state_of

pytestmark = pytest.mark.ranks

MAIN = (
    "ps_load_balancing",
    "partitioned_ps(min_shard_bytes=0)",
    "partitioned_all_reduce(min_shard_bytes=0, chunk_size=2)",
    "parallax",
)
COMPRESSORS = ("none", "topk(ratio=0.3)", "qsgd")


def trained(builder, compressor):
    """Weights, what is remembered, and what was sent."""
    joined = ", " if "(" in builder else "("
    model = mixed(seed=grace.rank())
    optimizer = executed(model, f"{builder.removesuffix(')')}{joined}compressor='{compressor}')")
    train(model, optimizer, range(4))
    return weights(model), digest(state_of(optimizer)), sorted(optimizer.traffic.payload_bytes.items())


def everything(builder):
    return {compressor: trained(builder, compressor) for compressor in COMPRESSORS}


@functools.cache
def expected(builder):
    """Return the results of torch.distributed."""
    return launched("gloo", 2).run(everything, builder)


@pytest.fixture(scope="module", params=["horovodrun-gloo", "mpirun-mpi"])
def name(request):
    """One engine after the other."""
    return request.param


@pytest.mark.parametrize("builder", MAIN)
def test_builders_give_what_they_give_over_torch_distributed(name, builder):
    answers = launched(name, 2).run(everything, builder)
    for rank, answer in enumerate(answers):
        for compressor in COMPRESSORS:
            got, wanted = answer[compressor], expected(builder)[rank][compressor]
            assert digest(got[0]) == digest(answers[0][compressor][0])
            assert digest(got[0]) == digest(wanted[0]), (compressor, rank)
            assert got[1:] == wanted[1:], (compressor, rank)
    assert_close(answers[0]["none"][0], on_the_mean(mixed(), 2, range(4)))


@on_ranks(engine=("horovodrun-gloo", "mpirun-mpi"))
def test_a_missing_file_stops_all_ranks():
    file = "/nowhere/s.yaml: cannot be read"
    said = refusal(executed, mixed(), "/nowhere/s.yaml" if grace.rank() == 0 else "parallax", kind=grace.GraceError)
    assert said.startswith(file if grace.rank() == 0 else f"rank 0 refused to start: {file}")
