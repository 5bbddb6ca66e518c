"""Pipelines from their making to their end."""

import dataclasses
import gc
import json
import os
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import grace
from grace.pipeline.planning.pipeline_plan import PipelinePlan
from grace.pipeline.planning.search import SearchOptions, search_plan
from grace.pipeline.torch import node_costs
from grace.pipeline.torch.plan_search import search_plan_by_throughput, state_bytes
from grace.planner.network import Links
from tests.pipeline.graphs import chain
from tests.support.pipelines import ROWS, alone, batch, check_is_alone, loss_fn, made, piped, sgd, unmeasured
from tests.support.pool import RankFailure
from tests.support.pools import on_ranks, ranks_of
from tests.support.training import digest, refusal

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("name", ["OneOperation", "Residual", "Several"])
def test_one_process_is_a_pipeline_of_one_stage(local, name):
    answer = piped(name, 2, microbatches=2, stages=1)
    check_is_alone(name, [answer], alone(name, 2, 2))
    assert answer[3] == (0, 0)


def model_of(make=unmeasured, **settings):
    args, kwargs, _ = batch("Residual")
    return make(made("Residual"), (args, kwargs), loss_fn, optimizer=sgd, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "2f2b"}, "schedule '2f2b' is unknown; there are gpipe"),
        ({"microbatches": 0}, "microbatches must be a whole number of at least 1, not 0"),
        ({"inputs": "some"}, "inputs must be one of replica"),
        ({"plan": 3}, "plan= must be a file or a PipelinePlan"),
        (
            {"stages": 1, "memory": 100.0},
            r"a rank of stage 0 \(linear to .*\) needs [0-9.]+ \w?B, and may use 90 B: .* missing",
        ),
        ({"compresor": "topk"}, "no option 'compresor': of a distributed optimizer's it takes op, "),
        ({"backward_passes_per_step": 2}, r"accumulate under `with engine.no_sync\(\):`"),
        ({"stages": {0, 1}}, "stages must be a whole number of at least 1, not 0"),
        ({"blocks": 3.5}, "blocks must be a whole number of at least 1, not 3.5"),
        ({"memory": "16GB"}, "memory must be a number of bytes above 0, as 16e9, not '16GB'"),
        ({"memory": float("nan")}, "memory must be a number of bytes above 0, as 16e9, not nan"),
        ({"memory_margin": 10}, "memory_margin must be a share from 0 to below 1, not 10"),
        ({"stages": (n for n in (1, 2))}, "stages must be one value, or a list of several, not a generator"),
        ({"recompute": "no"}, "recompute must be True, False or None, not 'no'"),
    ],
)
def test_what_cannot_work_is_refused(local, settings, message):
    with pytest.raises(grace.ConfigError, match=message):
        model_of(**settings)


def test_sharded_and_wrapped_models_are_refused(local):
    class Sharded(torch.Tensor):
        pass

    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Sharded))
    with pytest.raises(grace.ConfigError, match="'weight' is a Sharded"):
        grace.torch.Pipeline(model, torch.ones(2, 2), loss_fn, optimizer=sgd)


def test_optimizers_that_are_none_are_refused(local):
    with pytest.raises(grace.ConfigError, match="made a NoneType"):
        grace.torch.Pipeline(made("Residual"), batch("Residual")[0], loss_fn, optimizer=lambda ps: None)
    with pytest.raises(grace.ConfigError, match=r"optimizer= left out 'head.bias'"):
        grace.torch.Pipeline(made("Residual"), batch("Residual")[0], loss_fn, optimizer=lambda ps: sgd(ps[:-1]))


def test_a_model_that_could_not_be_cut_is_not_cut(local):
    engine = grace.torch.Pipeline(made("Residual"), None, loss_fn, optimizer=lambda ps: None, microbatches=2)
    args, _, target = batch("Residual")
    for _ in range(2):
        with pytest.raises(grace.ConfigError, match="made a NoneType"):
            engine.step(*args, target)
        with pytest.raises(grace.ConfigError, match="not cut yet"):
            engine.state_dict()


def test_other_frameworks_models_are_refused(local):
    with pytest.raises(grace.ConfigError, match="not out of builtins's object: stages run on torch"):
        grace.torch.Pipeline(object(), torch.ones(2, 2), loss_fn, optimizer=sgd)


@pytest.mark.parametrize(("engine", "name"), [("horovodrun-gloo", "horovod"), ("mpirun-mpi", "mpi")])
@on_ranks()
def test_other_engines_are_refused(engine, name):
    said = refusal(model_of)
    assert "which moves tensors between two ranks" in said
    assert f"this run is over {name}: call grace.init('torch')" in said


def in_two_stages(make):
    return unmeasured(made("Residual"), batch("Residual")[0], loss_fn, optimizer=make, stages=2, microbatches=2)


@on_ranks()
def test_optimizers_that_are_spread_over_ranks_are_refused():
    said = refusal(in_two_stages, lambda ps: ZeroRedundancyOptimizer(ps, torch.optim.SGD, lr=0.1))
    assert "makes a ZeroRedundancyOptimizer" in said
    assert "(ZeRO)" in said


@on_ranks()
def test_what_fails_on_a_rank_fails_on_all():
    def make(parameters):
        if grace.rank() == 1 and len(parameters) > 1:
            raise ValueError("not here")
        return sgd(parameters)

    said = refusal(in_two_stages, make, kind=ValueError if grace.rank() else grace.RankError)
    assert said == ("not here" if grace.rank() else "rank 1 refused to start: ValueError: not here")


def test_optimizer_state_is_that_of_the_models_shapes():
    model = nn.Linear(300, 200)
    adafactor = state_bytes(lambda ps: torch.optim.Adafactor(ps), model.parameters())
    assert adafactor == pytest.approx((300 + 200 + 200) / (300 * 200 + 200), rel=0.01)  # a row, a column, the bias
    assert state_bytes(lambda ps: torch.optim.Adam(ps), model.parameters()) == 2.0
    assert state_bytes(lambda ps: torch.optim.SGD(ps, lr=0.1), model.parameters()) == 0.0


@on_ranks(3)
def test_stages_that_ranks_cannot_share_out_evenly_name_the_way_on():
    for stages in (2, {2}):
        said = refusal(model_of, kind=grace.GraceError, microbatches=2, stages=stages)
        assert "3 ranks cannot be 2 stages with as many replicas each" in said
        assert 'grace.torch.Pipeline(..., inputs="global")' in said


def test_the_least_shortage_of_memory_is_said_of_all_numbers_of_replicas():
    graph = chain(8, parameters=1e9, rows=8)
    with pytest.raises(grace.ConfigError, match=r"used least \(4 stages, .* needs 6 GB, .* 2.4 GB are missing$"):
        search_plan_by_throughput(graph, 4, 8, True, None, SearchOptions(memory=4e9))


def test_an_example_is_let_go_once_the_model_is_cut(local):
    x = torch.ones(4, 6)
    example = weakref.ref(x)
    engine = grace.torch.Pipeline(made("FewParameters"), x, loss_fn, optimizer=sgd, microbatches=2)
    del x
    gc.collect()
    assert example() is None
    assert engine.stage == 0


def test_profiles_are_kept_on_disk(local, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(node_costs, "_memory", {})
    model_of(grace.torch.Pipeline, profiles=False)
    assert not node_costs.cache_file().exists()
    monkeypatch.setattr(node_costs, "_memory", {})
    model_of(grace.torch.Pipeline)
    assert json.loads(node_costs.cache_file().read_text())["seconds"]


@pytest.mark.parametrize("seconds", [None, {"version": 1}, {"version": 1, "seconds": {"key": [1.0]}}])
def test_damaged_profiles_count_as_empty(local, tmp_path, monkeypatch, seconds):
    monkeypatch.setattr(node_costs, "_memory", {})
    (tmp_path / "profiles.json").write_text(json.dumps(seconds or {}))
    model_of(grace.torch.Pipeline, profiles=tmp_path / "profiles.json")
    assert "key" not in json.loads((tmp_path / "profiles.json").read_text())["seconds"]


@on_ranks()
def test_a_plan_of_a_dry_run_is_run(tmp_path):
    file = tmp_path / "plan.json"
    model, (args, kwargs, target) = made("Residual"), batch("Residual")
    if grace.rank() == 0:
        graph = node_costs.build_graph(model, (args, kwargs), dry=True)
        search_plan(graph, 2, ROWS, Links(1e9), SearchOptions(stages=2, microbatches=2)).save(file)
    engine = model_of(plan=file)
    engine.step(*args, target)
    assert dataclasses.replace(engine.plan, versions={}) == dataclasses.replace(PipelinePlan.load(file), versions={})
    assert engine.stage == grace.rank()


@on_ranks()
def test_numbers_may_be_ranges():
    for settings, found in (
        ({"replicas": range(1, 2), "microbatches": {4}}, ((1, 1), 4)),
        ({"replicas": {2}, "microbatches": range(2, 4), "blocks": [2, 4]}, ((2,), 2)),
    ):
        plan = model_of(**settings).plan
        assert (plan.replicas, plan.microbatches) == found


@on_ranks()
def test_a_plan_is_written_and_read_and_refused(tmp_path):
    file, (args, _, target) = tmp_path / "plan.json", batch("Residual")
    engine = model_of(plan=file, stages=2, microbatches=2, schedule="1f1b")
    first, plan = engine.step(*args, target).item(), engine.plan
    assert PipelinePlan.load(file) == plan
    assert (plan.replicas, plan.microbatches, plan.schedule) == ((1, 1), 2, "1f1b")
    engine = model_of(plan=file)  # what it says counts
    assert (engine.step(*args, target).item(), engine.plan) == (first, plan)
    document = json.loads(file.read_text())
    older = {**document, "versions": {**document["versions"], "torch": "1.0"}}
    assert "is of torch 1.0" in refusal(model_of, plan=PipelinePlan.from_dict(older))
    assert "for another model" in refusal(model_of, plan=PipelinePlan.from_dict({**document, "model": "other"}))


@on_ranks()
@pytest.mark.parametrize("given", [True, False], ids=["a plan", "searched"])
def test_a_rank_with_another_model_is_named_before_any_stage_is_made(given):
    (args, kwargs, _), last = batch("Residual"), grace.rank() == 1
    plan = model_of(stages=2, microbatches=2).plan if given else None
    model = made("Residual")
    if last:
        model.head = nn.Sequential(model.head, nn.Tanh())
    settings = {"kind": grace.ConfigError if last else grace.RankError, "optimizer": sgd, "plan": plan}
    said = refusal(unmeasured, model, (args, kwargs), loss_fn, stages=2, microbatches=2, **settings)
    assert ("for another model" if last else "rank 1 refused to start: the plan is for another model") in said


@on_ranks()
def test_the_plan_is_found_if_nobody_gives_one():
    engine, (args, _, target) = model_of(grace.torch.Pipeline), batch("Residual")
    engine.step(*args, target)
    assert engine.plan.world_size == 2
    assert "micro-batches" in str(engine.plan)
    return engine.plan, digest({key: engine.parameter(key) for key, _ in engine.model.named_parameters()})


def fill(module):
    torch.manual_seed(sum(p.numel() for p in module.parameters(recurse=False)))
    module.reset_parameters()


@on_ranks()
def test_a_model_on_meta_is_made_where_its_stages_are():
    with torch.device("meta"):
        model = made("TiedEmbedding")
    args, _, target = batch("TiedEmbedding")
    settings = {"stages": 2, "microbatches": 2, "init": fill, "cuts": ["embedding"]}
    engine = unmeasured(model, args, loss_fn, optimizer=sgd, **settings)
    got, state = engine.step(*args, target).item(), engine.state_dict()
    left = [name for name, p in model.named_parameters() if p.is_meta]
    assert left == ([] if grace.rank() else ["middle.weight", "middle.bias"])
    model = made("TiedEmbedding")
    fill(model.table)
    fill(model.middle)
    optimizer = sgd(model.parameters())
    loss = loss_fn(model(*args), target)
    loss.backward()
    optimizer.step()
    assert got == pytest.approx(loss.item(), rel=1e-5)
    assert all(torch.allclose(value, state[key], atol=1e-6) for key, value in model.state_dict().items())


def dies(rank):
    engine = model_of(stages=2, microbatches=2)
    args, _, target = batch("Residual")
    engine.step(*args, target)
    if grace.rank() == rank:
        os._exit(3)
    engine.step(*args, target)


def test_a_rank_that_dies_ends_all_with_its_number():
    with pytest.raises(RankFailure, match=r"rank 0 of 2: step 1 of the pipeline failed; rank 1 [\s\S]*engine says"):
        ranks_of(2).run(dies, 1)


@on_ranks()
def test_inputs_without_rows_are_named():
    """A mask that has as many rows as the batch, and is none."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x, mask):
            return self.two(torch.tanh(self.one(x) @ mask))

    torch.manual_seed(0)
    model, x, mask, y = Masked(), torch.randn(8, 8), torch.randn(8, 8).tril(), torch.randn(8, 4)
    expected = loss_fn(model(x, mask), y).item()
    given = {"optimizer": sgd, "stages": 2, "microbatches": 2, "whole": ["mask"]}
    engine = unmeasured(model, (x, mask), loss_fn, **given)
    assert engine.step(x, mask, y).item() == pytest.approx(expected, rel=1e-5)


def test_names_of_inputs_are_checked(local):
    with pytest.raises(grace.ConfigError, match="whole= names 'y', which is no input of the model: x"):
        model_of(whole=["y"], stages=1)


def test_frozen_parameters_stay(local):
    model = made("Residual")
    model.layers[0].requires_grad_(False)
    before = model.layers[0].weight.clone()
    engine = unmeasured(model, batch("Residual")[0], loss_fn, optimizer=sgd, stages=1, microbatches=2)
    args, _, target = batch("Residual")
    engine.step(*args, target)
    assert torch.equal(model.layers[0].weight, before)
    assert model.layers[0].weight.grad is None
    assert args[0].shape[0] == ROWS
