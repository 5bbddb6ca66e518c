"""GRACE's dictionaries mean what they meant, and what is not understood is named."""

import pytest

import grace


@pytest.mark.parametrize(
    ("params", "meaning"),
    [
        ({}, "allreduce, none, none"),
        ({"compressor": "topk", "memory": "residual", "communicator": "allgather"}, "allgather, topk, residual"),
        ({"compressor": "topk", "compress_ratio": 0.3}, "allgather, topk(ratio=0.3), residual"),
        ({"compressor": "qsgd", "quantum_num": 64, "communicator": "broadcast"}, "broadcast, qsgd(levels=64), none"),
        ({"compressor": "qsgd", "bucket_size": 1024}, "allgather, qsgd(bucket_size=1024), none"),
        ({"compressor": "powersgd", "memory": "powersgd", "compress_rank": 2}, "allreduce, powersgd(rank=2), residual"),
        ({"compressor": "fp16", "communicator": "alltoall"}, "scatter_reduce, cast, none"),
    ],
)
def test_a_dictionary_gives_its_communicator(params, meaning):
    assert grace.from_params(params).describe() == meaning


def test_unknown_names_are_refused():
    with pytest.raises(grace.ConfigError, match="did you mean 'topk'"):
        grace.from_params({"compressor": "topq"})
    with pytest.raises(grace.ConfigError, match="unknown communicator 'gossip'"):
        grace.from_params({"communicator": "gossip"})


def test_illegal_combinations_are_refused_as_everywhere():
    with pytest.raises(grace.ConfigError, match="Legal communicators for topk"):
        grace.from_params({"compressor": "topk", "memory": "residual", "communicator": "allreduce"})


def test_what_grace_knows_by_itself_is_said_to_be_unneeded():
    with pytest.warns(UserWarning, match="lr=0.1 is not needed"):
        grace.from_params({"compressor": "efsignsgd", "lr": 0.1})
    with pytest.warns(UserWarning, match="topk has no use for quantum_num"):
        grace.from_params({"compressor": "topk", "quantum_num": 64})
