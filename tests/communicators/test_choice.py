"""The communicator that a method gets where none is named: by the number of ranks, the same on all of them."""

import numpy as np
import pytest
import torch

import grace
import grace.torch
from grace.communicators.choice import break_even, build_communicator, took_default
from tests.support.pools import ranks_of
from tests.support.training import SPECS

pytestmark = pytest.mark.ranks
LEAST = {
    **dict.fromkeys(("qsgd", "natural", "signsgd", "efsignsgd", "onebit", "block"), 4),
    **{"qsgd(levels=7, norm=l2)": 11, "terngrad": 6, "dynamic8": 6},
}
"""The least W, by hand, with 3 (1 + omega/W + omega) < W (1 + omega/W)."""


@pytest.mark.parametrize("spec", SPECS)
def test_the_rule_is_the_inequality_of_its_docstring(spec):
    assert break_even(grace.make("compressor", spec)) == LEAST.get(spec), "work it out by hand, and enter it in LEAST"
    for ranks in (1, 2, 3, 4, 8, 64):
        name = build_communicator(spec, None, None, ranks).name
        moved = spec in LEAST and ranks >= LEAST[spec]
        assert name == ("scatter_reduce" if moved else grace.make("compressor", spec).traits.communicator)


def test_a_memory_keeps_the_second_error_so_that_it_counts_for_nothing():
    dynamic8 = grace.make("compressor", "dynamic8")
    assert (break_even(dynamic8), break_even(dynamic8, "residual")) == (6, 4)


class OwnSigns(grace.known("compressor")["signsgd"]):
    """A user's."""


class OwnMemory(grace.Memory):
    """A user's."""

    def compensate(self, tensor, name):
        return tensor

    def update(self, tensor, name, compressor, payload, ctx):
        pass


def test_what_somebody_said_is_kept():
    assert build_communicator(OwnSigns(), None, None, 8).name == "allgather"
    assert build_communicator("onebit", OwnMemory(), None, 8).name == "allgather"
    assert build_communicator("qsgd", None, "allgather", 8).name == "allgather"
    assert grace.from_params({"compressor": "qsgd"}).name == "allgather"
    assert not grace.from_params({"compressor": "qsgd"}).by_default


def test_only_a_default_is_taken_for_another():
    here = build_communicator("qsgd", None, None, 8)
    assert took_default(here, "allgather, qsgd, none", "scatter_reduce, qsgd, none")
    assert not took_default(here, "broadcast, qsgd, none", "scatter_reduce, qsgd, none")
    assert not took_default(here, "allgather, natural, none", "scatter_reduce, qsgd, none")
    named = build_communicator("qsgd", None, "scatter_reduce", 8)
    assert not took_default(named, "allgather, qsgd, none", "scatter_reduce, qsgd, none")


def optimizer(compressor: str, memory: str | None = None, communicator: str | None = None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 50), torch.nn.Linear(50, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, grace.DistributedOptimizer(opt, model.named_parameters(), compressor, memory, communicator)


def steps(model, opt, first: int, count: int) -> np.ndarray:
    for step in range(first, first + count):
        opt.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + grace.rank()))
        model(x).square().sum().backward()
        opt.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


def chosen(hierarchical: bool) -> tuple[str, str]:
    model = torch.nn.Linear(6, 50)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = grace.DistributedOptimizer(opt, model.named_parameters(), "qsgd", hierarchical=hierarchical)
    return opt._grace.runner.name, opt._grace.plan.options()["communicator"]


def test_optimizers_take_it_by_the_number_of_ranks_that_exchange():
    assert ranks_of(3).run(chosen, False) == [("allgather, qsgd, none", None)] * 3
    assert ranks_of(4).run(chosen, False) == [("scatter_reduce, qsgd, none", None)] * 4
    assert ranks_of(4).run(chosen, True) == [("allgather, qsgd, none", None)] * 4  # nodes are fewer


def saved(compressor: str, memory: str | None, communicator: str | None) -> dict:
    model, opt = optimizer(compressor, memory, communicator)
    weights = steps(model, opt, 0, 3)
    runner = opt._grace.runner
    return {"file": opt.full_state_dict(), "weights": weights, "state": runner.state(), "name": runner.name}


def resumed(compressor: str, memory: str | None, communicator: str | None, file: dict) -> dict:
    model, opt = optimizer(compressor, memory, communicator)
    try:
        opt.load_state_dict(file)
    except grace.ConfigError as error:
        return {"error": str(error)}
    runner = opt._grace.runner
    kept = runner.state()
    return {"state": kept, "name": runner.name, "weights": steps(model, opt, 3, 2)}


def owed(results: list[dict], name: str) -> np.ndarray:
    """The mean of what all ranks' memories still owe a variable."""
    kept = [result["state"] for result in results]
    own = [state["memory"][name] for state in kept]
    total = np.mean([np.asarray(one["residual"] if isinstance(one, dict) else one) for one in own], axis=0)
    shards = [state["shard_memory"][name] for state in kept if name in state.get("shard_memory", {})]
    shards = [np.asarray(one["residual"] if isinstance(one, dict) else one) for one in shards]
    return total + (np.concatenate(shards).reshape(total.shape) if shards else 0)


@pytest.mark.parametrize(("compressor", "memory"), [("efsignsgd", None), ("onebit", "residual(beta=0.5)")])
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 3)])
def test_a_resume_on_other_ranks_applies_the_rule_anew_and_loses_nothing(before, after, compressor, memory):
    old = ranks_of(before).run(saved, compressor, memory, None)
    new = ranks_of(after).run(resumed, compressor, memory, None, old[0]["file"])
    assert {r["name"].partition(",")[0] for r in old} == {"scatter_reduce" if before > 3 else "allgather"}
    assert {r["name"].partition(",")[0] for r in new} == {"scatter_reduce" if after > 3 else "allgather"}
    for name in ("0.weight", "1.weight"):
        assert np.abs(owed(old, name)).max() > 0
        np.testing.assert_allclose(owed(new, name), owed(old, name), rtol=1e-5, atol=1e-6)
    for result in new:
        assert result["weights"].tobytes() == new[0]["weights"].tobytes()


def test_a_named_communicator_goes_on_with_other_shards_too():
    old = ranks_of(2).run(saved, "efsignsgd", "residual", "scatter_reduce")
    new = ranks_of(3).run(resumed, "efsignsgd", "residual", "scatter_reduce", old[0]["file"])
    np.testing.assert_allclose(owed(new, "0.weight"), owed(old, "0.weight"), rtol=1e-5, atol=1e-6)


def test_a_name_is_compared_with_the_checkpoint_as_before():
    file = ranks_of(4).run(saved, "qsgd", None, None)[0]["file"]
    for result in ranks_of(4).run(resumed, "qsgd", None, "allgather", file):
        assert "was saved with scatter_reduce, qsgd, none, this run uses allgather, qsgd, none" in result["error"]


def own_file(communicator: str | None) -> dict:
    model, opt = optimizer("efsignsgd", "residual", communicator)
    weights = steps(model, opt, 0, 3)
    return {"file": opt.state_dict(), "weights": weights, "state": opt._grace.runner.state()}


def own_resumed(files: list[dict], communicator: str | None) -> dict:
    return resumed("efsignsgd", "residual", communicator, files[grace.rank()])


@pytest.mark.filterwarnings("ignore:.*holds the memories of this rank alone")
def test_each_ranks_own_file_of_an_earlier_default_goes_on():
    """An earlier version gathered on four ranks; their files have no memories of shards."""
    old = ranks_of(4).run(own_file, "allgather")
    new = ranks_of(4).run(own_resumed, [one["file"] for one in old], None)
    assert {r["name"].partition(",")[0] for r in new} == {"scatter_reduce"}
    np.testing.assert_allclose(owed(new, "0.weight"), owed(old, "0.weight"), rtol=1e-5, atol=1e-6)
