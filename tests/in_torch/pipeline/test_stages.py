"""Stages that run one after the other are the model, bit for bit."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from grace.errors import ConfigError
from grace.pipeline.torch.atomic_subcomponents import Atoms
from grace.pipeline.torch.capture import capture
from grace.pipeline.torch.stage_builder import build_module, stage_specs
from tests.support.pipelines import BY_NAME, batch, capture_once, halves, loss_fn, made, run_stages


def tensors(value):
    return torch.utils._pytree.tree_leaves(value)


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def cuts(graph):
    """All cuts into two, and one into three."""
    names = [node.name for node in graph.nodes]
    found = []
    for i in range(1, len(names)):
        if all(len({name in names[:i] for name in group}) == 1 for group in graph.together):
            found.append([names[:i], names[i:]])
    return [*found, halves(graph, 3) or [names]]


@pytest.mark.parametrize("name", BY_NAME)
def test_stages_are_the_model_bit_for_bit(name):
    args, kwargs, target = batch(name)
    atoms = Atoms(capture_once(made(name), args, kwargs))
    ways = cuts(atoms.graph(8))
    assert len(ways) > 1 or name == "OneOperation"
    for stages in ways:
        plain, model = made(name), made(name)
        expected = plain(*copy.deepcopy(args), **kwargs)
        loss_fn(expected, target).backward()
        atoms = Atoms(capture_once(model, args, kwargs))
        got = run_stages(atoms, stages, copy.deepcopy(args), kwargs)
        loss_fn(got, target).backward()
        assert all(torch.equal(a, b) for a, b in zip(tensors(expected), tensors(got), strict=True))
        for (key, p), (_, q) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), (key, stages)
        assert all(torch.equal(a, b) for a, b in zip(state(plain).values(), state(model).values(), strict=True))


def test_modules_have_the_models_names_and_tensors():
    model = made("TiedEmbedding")
    atoms = Atoms(capture(model, *batch("TiedEmbedding")[:2]))
    names = list(atoms.graph(8).index)
    cut = stage_specs(atoms, [names[:1], names[1:]])
    first, second = (build_module(atoms, piece, last) for piece, last in zip(cut, (False, True), strict=True))
    assert [name for name, _ in first.named_parameters()] == ["table.weight"]
    assert dict(first.named_parameters())["table.weight"] is model.table.weight
    assert "table.weight" in dict(second.named_parameters())
    assert cut[0].sends == cut[1].receives


def test_a_residual_is_passed_on_by_the_stage_between():
    atoms = Atoms(capture(made("Residual"), *batch("Residual")[:2]))
    cut = stage_specs(atoms, halves(atoms.graph(8), 3))
    assert "linear" in cut[0].sends
    assert "linear" in cut[1].receives
    assert "linear" in cut[1].sends


def test_what_is_written_in_place_is_not_parted_from_its_readers():
    class Writes(nn.Module):
        def forward(self, x):
            h = x * 2
            before = h + 1
            view = h[0]
            view.zero_()
            return h + before

    atoms = Atoms(capture(Writes(), (torch.ones(4, 2),)))
    together = [group for group in atoms.inseparable if "zero_" in group]
    assert together == [frozenset({"mul", "select", "zero_", "add", "add_1"})]


def test_a_cut_after_an_in_place_activation_is_free():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))
    graph = Atoms(capture(model, (torch.ones(4, 3),))).graph(4)
    assert graph.together == (frozenset({"linear", "relu_"}),)


def test_buffers_that_are_written_keep_their_users_together():
    graph = Atoms(capture(made("Normalized"), *batch("Normalized")[:2])).graph(8)
    norms = [node.name for node in graph.nodes if node.name.startswith("batch_norm")]
    assert any({"batch_norm", "batch_norm_1"} <= group for group in graph.together)
    assert len(norms) == 3
    assert not any({"batch_norm", "batch_norm_2"} <= group for group in graph.together)


def test_constants_are_cloned_and_random_ones_are_not():
    class Constants(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.ones(3))

        def forward(self, x):
            e, noise = self.p.exp(), torch.rand(3)
            return (x * e + noise).tanh() * e + noise

    graph = Atoms(capture(Constants(), (torch.ones(4, 3),))).graph(4)
    assert [node.name for node in graph.nodes if node.parameters] == ["mul", "mul_1"]
    assert "rand" in graph.index
    assert "exp" not in graph.index


def test_nodes_say_where_they_come_from():
    graph = Atoms(capture(made("Convolutional"), *batch("Convolutional")[:2])).graph(8)
    node = graph.nodes[graph.index["conv2d"]]
    assert node.kind == "Conv2d"
    assert node.line.startswith("pipelines.py:")
    assert node.parameters == {"one.weight": 216.0, "one.bias": 12.0}
    assert node.differentiable
    assert node.nbytes == 8 * 3 * 8 * 8 * 4


def test_whole_numbers_take_no_gradient_back():
    class Positions(nn.Module):
        def forward(self, x):
            return F.one_hot(x.argmax(-1), 3) * x

    graph = Atoms(capture(Positions(), (torch.ones(4, 3),))).graph(4)
    assert not any(node.differentiable for node in graph.nodes)


def test_what_export_cannot_take_is_told_with_the_models_line():
    class Looks(nn.Module):
        def forward(self, x):
            if x.sum() > 0:  # the line
                return x
            return -x

    with pytest.raises(ConfigError, match=r'cannot take Looks at .*test_stages.py:\d+ \("if x.sum\(\) > 0:.*"\)'):
        capture(Looks(), (torch.ones(3),))


def test_bad_cuts_are_refused():
    atoms = Atoms(capture(made("FewParameters"), *batch("FewParameters")[:2]))
    names = list(atoms.graph(8).index)
    with pytest.raises(ConfigError, match="in no stage"):
        stage_specs(atoms, [names[:1], names[2:]])
    with pytest.raises(ConfigError, match="which stage 1 computes"):
        stage_specs(atoms, [names[1:], names[:1]])
    with pytest.raises(ConfigError, match="is called with 2 arguments"):
        run_stages(atoms, [names], (torch.ones(8, 6), torch.ones(8, 6)))
