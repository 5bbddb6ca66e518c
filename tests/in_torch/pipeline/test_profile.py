"""Times of atomic subcomponents."""

import json

import pytest
import torch
from torch import nn

from grace.pipeline.torch import node_costs
from grace.pipeline.torch.atomic_subcomponents import Atoms
from grace.pipeline.torch.capture import capture
from tests.support.pipelines import BY_NAME, batch, capture_once, made


@pytest.mark.parametrize("name", BY_NAME)
def test_all_nodes_are_measured_and_the_model_is_untouched(name):
    model = made(name)
    args, kwargs, _ = batch(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    captured = capture_once(model, args, kwargs)
    atoms, drawn = Atoms(captured), torch.get_rng_state()
    costs = node_costs.measure_costs(atoms, captured.flat(args, kwargs))
    graph = atoms.graph(8, costs)
    assert all(node.forward > 0 for node in graph.nodes)
    assert any(node.backward > 0 for node in graph.nodes)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def layers(width=64):
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())))


def test_identical_subgraphs_are_measured_once(tmp_path, monkeypatch):
    monkeypatch.setattr(node_costs, "_memory", {})
    x, file = torch.ones(16, 64), tmp_path / "kept" / "profiles.json"
    atoms = Atoms(capture(layers(), (x,)))
    first = node_costs.measure_costs(atoms, [x], file)
    assert first["linear_1"] == first["linear_2"]
    written = file.read_text()
    # the first layer gives no gradient back for the input, and so is another than the others
    assert len(json.loads(written)["seconds"]) == 3
    monkeypatch.setattr(node_costs, "_memory", {})
    monkeypatch.setattr(node_costs._Measure, "_seconds", lambda *_: pytest.fail("measured again"))
    assert node_costs.measure_costs(atoms, [x], file) == first
    file.write_text("damaged")
    monkeypatch.undo()
    assert node_costs.measure_costs(atoms, [x], file).keys() == first.keys()


def test_what_more_ranks_take_is_measured_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(node_costs, "_memory", {})
    x, file = torch.ones(16, 64), tmp_path / "profiles.json"
    atoms = Atoms(capture(layers(), (x,)))
    for beside, count in ((1, 3), (2, 6), (2, 6)):
        node_costs.measure_costs(atoms, [x], file, beside)
        assert len(json.loads(file.read_text())["seconds"]) == count
    monkeypatch.setattr(node_costs, "_memory", {})
    (tmp_path / "taken").write_text("")
    # a cache that cannot be written is none
    assert node_costs.measure_costs(atoms, [x], tmp_path / "taken" / "profiles.json")


def test_kept_bytes_are_those_of_distinct_storages():
    model, x = layers(), torch.ones(16, 64)
    kept = node_costs.kept_bytes(Atoms(capture(model, (x,))))
    # ReLU keeps its result, which the next layer keeps too; weights and the input are not counted
    assert kept == {"linear": 0.0, "relu": 4096.0, "linear_1": 0.0, "relu_1": 4096.0, "linear_2": 0.0, "relu_2": 4096.0}


def test_a_dry_run_needs_no_values():
    with torch.device("meta"):
        model = layers(1024)
    atoms = Atoms(capture(model, (torch.ones(16, 1024, device="meta"),)))
    costs = node_costs.estimate_costs(atoms, flops=1e9, nbytes=1e12, overhead=1e-6)
    assert costs["linear"]["forward"] == pytest.approx(1e-6 + 2 * 16 * 1024 * 1024 / 1e9)
    assert costs["linear"]["backward"] == pytest.approx(1e-6 + 4 * 16 * 1024 * 1024 / 1e9)
    assert costs["relu"]["forward"] == pytest.approx(1e-6 + 2 * 16 * 1024 * 4 / 1e12)
    graph = atoms.graph(16, costs)
    assert graph.seconds(graph.nodes[0], 32)[0] == pytest.approx(1e-6 + 4 * 16 * 1024 * 1024 / 1e9)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        x = torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))
        x = torch.cond(x.sum() > 0, lambda t: t * 3, lambda t: t + 1, (x,))
        return self.layer(x)


def test_branches_are_measured_and_told_apart():
    x = torch.ones(8, 4)
    atoms = Atoms(capture(Branching(), (x,)))
    measure = node_costs._Measure(atoms, {}, 1)
    costs = measure.costs([x])
    assert costs["cond"]["forward"] > 0
    assert costs["linear"]["backward"] > 0
    keys = {measure._key(node) for node in atoms.dynamic if node.name.startswith("cond")}
    assert len(keys) == 2
