"""GRACE's dictionaries and calls mean what they meant, and what is not understood is named."""

import warnings

import pytest
import torch

import grace
from grace.communicators import Allgather, ScatterReduce
from grace.compressors.topk import TopK
from grace.memories.residual import Residual
from tests.support.training import Net, distributed, net, train


@pytest.mark.parametrize(
    ("params", "meaning"),
    [
        ({}, "allreduce, none, none"),
        ({"compressor": None, "memory": None, "communicator": None}, "allreduce, none, none"),
        ({"compressor": "topk", "memory": "residual"}, "allgather, topk(ratio=0.3), residual"),
        ({"compressor": "topk", "compress_ratio": 0.01}, "allgather, topk, residual"),
        ({"compressor": "randomk", "communicator": "allreduce"}, "allreduce, randomk(ratio=0.3), residual"),
        ({"compressor": "dgc", "momentum": 0.5}, "allgather, dgc(ratio=0.3), dgc(momentum=0.5)"),
        ({"compressor": "dgc", "gradient_clipping": 0.3}, "allgather, dgc(ratio=0.3), dgc(clip=0.3)"),
        ({"compressor": "dgc", "gradient_clipping": False}, "allgather, dgc(ratio=0.3), dgc"),
        ({"compressor": "adaq"}, "allgather, adaptive(ratio=0.3), residual"),
        ({"compressor": "inceptionn"}, "allgather, inceptionn(error_bound=2e-10), none"),
        ({"compressor": "qsgd", "quantum_num": 64}, "allgather, qsgd(levels=64, bucket_size=128, norm='l2'), none"),
        ({"compressor": "qsgd_cuda", "bucket_size": 512}, "allgather, qsgd(norm='l2'), none"),
        ({"compressor": "qsgd", "norm": "max", "communicator": "broadcast"}, "broadcast, qsgd(bucket_size=128), none"),
        ({"compressor": "threshold", "threshold": 0.5}, "allgather, threshold(value=0.5), residual"),
        ({"compressor": "signum"}, "allgather, signum, none"),
        ({"compressor": "sketch", "quantiles": 16}, "allgather, sketch(quantiles=16), residual"),
        ({"compressor": "powersgd", "memory": "powersgd", "compress_rank": 2}, "allreduce, powersgd(rank=2), residual"),
        ({"compressor": "fp16", "communicator": "alltoall"}, "scatter_reduce, cast, none"),
    ],
)
def test_a_dictionary_gives_its_communicator(params, meaning):
    assert grace.from_params(params).describe() == meaning


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"compressor": "topq"}, "did you mean 'topk'"),
        ({"communicator": "gossip"}, "unknown communicator 'gossip'"),
        ({"compressor": "topk", "memory": "residual", "communicator": "allreduce"}, "Legal communicators for topk"),
        ({"compressor": "dgc", "gradient_clipping": True}, '=True: .* as in "gradient_clipping": 1.0, or False'),
        ({"compressor": "dgc", "gradient_clipping": "much"}, "clip must be .*clip is what gradient_clipping says"),
        ({"compresor": "topk", "memry": "residual"}, "not know 'compresor', 'memry'; it knows compressor, memory"),
        ({"compressor": "efsignsgd", "lr": "0.5"}, "lr must be a number"),
        ({"compressor": ["topk"]}, r"takes the name of a compressor, not \['topk'\]"),
        ({"compressor": TopK()}, r"takes the name of a compressor, not TopK\(.*: pass objects themselves"),
        ({"compressor": "topk", "memory": Residual()}, "takes the name of a memory, not Residual"),
    ],
)
def test_what_cannot_be_is_refused_in_graces_words(params, said):
    with pytest.raises(grace.ConfigError, match=said):
        grace.from_params(params)


def test_a_compressor_without_a_name_is_told_what_makes_it_summable():
    class Ported(grace.torch.Compressor):
        def compress(self, tensor, name):
            return [tensor], None

        def decompress(self, tensors, ctx):
            return tensors[0]

    with pytest.raises(grace.ConfigError, match=r"Traits\(summable=True\).*communicators for Ported: allgather"):
        grace.torch.Allreduce(Ported(), "none")


@pytest.mark.parametrize(
    ("key", "said"),
    [
        *((key, f"topk.* has no use for {key}") for key in ("lr", "quantum_num")),
        *((key, f"{key}=1 is not needed") for key in ("momentum_factor", "kernel")),
    ],
)
def test_what_has_no_use_or_is_not_needed_is_said(key, said):
    with pytest.warns(UserWarning, match=said):
        grace.from_params({"compressor": "topk", key: 1})


def test_the_learning_rate_is_that_of_steps_by_hand():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        half, usual = (
            grace.from_params({"compressor": "efsignsgd", "lr": 0.5}),
            grace.from_params({"compressor": "efsignsgd"}),
        )
    assert (half.lr, usual.lr) == (0.5, 0.1)


# -- calls ---------------------------------------------------------------------------------------------------------


def as_graces_scripts_write_it():
    """Weights after two steps, by each way to give a communicator; and what a wrong number of ranks is told."""
    ways = {
        "here": lambda opt, grc, named: grace.DistributedOptimizer(opt, named, communicator=grc),
        "second": lambda opt, grc, named: grace.DistributedOptimizer(opt, grc, named_parameters=named),
        "all by place": lambda opt, grc, named: grace.torch.DistributedOptimizer(opt, grc, named),
        "grace=": lambda opt, grc, named: grace.DistributedOptimizer(opt, grace=grc, named_parameters=named),
        "compressor's place": lambda opt, grc, named: grace.DistributedOptimizer(opt, named, grc),
        "compressor=": lambda opt, grc, named: grace.DistributedOptimizer(opt, named, compressor=grc),
        "all by name": lambda opt, grc, named: grace.torch.DistributedOptimizer(
            optimizer=opt, named_parameters=named, grace=grc
        ),
    }
    weights = {}
    for way, make in ways.items():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        train(
            model, make(optimizer, Allgather(TopK(0.3), Residual(), grace.size()), model.named_parameters()), range(2)
        )
        weights[way] = torch.cat([p.detach().flatten() for p in model.parameters()])
    wrong = "nothing"
    try:  # on one rank only
        distributed(net(), communicator=Allgather("topk", "residual", 2 + grace.rank()))
    except grace.GraceError as error:
        wrong = str(error)
    return weights, wrong


def test_communicators_are_taken_wherever_graces_scripts_put_them(two_ranks):
    (first, told), (second, wrong) = two_ranks.run(as_graces_scripts_write_it)
    for way, weights in first.items():
        assert torch.equal(weights, first["here"]), way
        assert torch.equal(weights, second[way]), way
    assert "allgather: it was made for world_size=3, and the run has 2 ranks" in wrong
    assert told.startswith("rank 1 refused to start")
    assert wrong.removeprefix("allgather: ") in told


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"grace": Allgather("topk"), "communicator": Allgather("topk")}, "given twice"),
        ({"grace": {"compressor": "topk"}}, r"grace= takes a communicator, as grace.from_params\({...}\) makes one"),
        ({"compressor": Allgather("topk"), "memory": "residual"}, "holds its compressor and memory"),
    ],
)
def test_what_is_meant_twice_or_is_none_is_refused(given, error):
    model = Net()
    with pytest.raises(grace.ConfigError, match=error):
        grace.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(), **given)


def test_the_number_of_ranks_is_known_before_there_are_any():
    """GRACE's dawn.py gives it to init_process_group."""
    assert grace.from_params({"compressor": "topk", "world_size": 4}).world_size == 4
    assert Allgather("topk", "residual", 4).world_size == 4
    assert Allgather("topk", "residual").world_size == 1


def test_the_number_of_ranks_is_checked_for_steps_by_hand_too(local):
    assert grace.from_params({"compressor": "none", "world_size": 1}).step(torch.ones(2), "w").tolist() == [1, 1]
    with pytest.raises(grace.ConfigError, match="world_size=2, and the run has 1 rank"):
        ScatterReduce("qsgd", None, 2).step(torch.ones(2), "w")


def test_all_communicators_are_in_both_frameworks():
    names = {cls.__name__ for cls in grace.known("communicator").values() if cls.__module__.startswith("grace.")}
    assert not names - set(grace.torch.__all__), "grace/torch/__init__.py must export these"
    pytest.importorskip("tensorflow", exc_type=ImportError)
    assert not names - set(grace.tensorflow.__all__), "grace/tensorflow/__init__.py must export these"
