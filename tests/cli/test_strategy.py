"""``grace strategy``: run as a user does once, and in this process."""

import json
import os
import re

import pytest

from grace.bench.common.text import of_bytes
from tests.support.command import grace_command, grace_program, installed

pytest.importorskip("pydantic", reason="pydantic is not installed")

MODELS = """
import torch

def net():
    return torch.nn.Sequential(torch.nn.Embedding(100, 8, sparse=True), torch.nn.Linear(8, 64), torch.nn.Linear(64, 10))

def for_bench():
    return net(), lambda model: 0.0, 4

def huge():
    return torch.nn.Linear(2**16, 2**15, bias=False, device="meta")

def other():
    return torch.nn.Sequential(torch.nn.Embedding(100, 8, sparse=True), torch.nn.Linear(8, 32))
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(MODELS)
    return tmp_path


def run(folder, *args, code=0):
    found, out, err = grace_command("strategy", *args, folder=folder, columns=140)
    assert found == code, err
    return out if code in (0, 1) else err


def run_program(folder, *args, code=0, group=("strategy",)):
    return grace_program(*group, *args, code=code, cwd=folder, columns=140)[0]


@pytest.mark.parametrize("run", [run, pytest.param(run_program, marks=pytest.mark.slow)])
def test_a_strategy_is_built_shown_and_checked(folder, run):
    said = run(folder, "build", "--model", "mine:net", "--builder", "parallax", "-n", "2", "-o", "s.yaml")
    assert said == "Wrote s.yaml: 5 variables, for 2 ranks on 1 node, by parallax\n"
    shown = run(folder, "show", "s.yaml")
    assert re.search(r"^0.weight +100 x 8, sparse +3,200 +reduce_broadcast +rank 0 +none, none +~3,600 *$", shown, re.M)
    assert re.search(r"^2.bias +10 +40 +allreduce +group 0 +none, none +40 *$", shown, re.M)
    dense = 4 * (64 * 8 + 64 + 640 + 10)
    assert f"rank 0 sends, and receives, {of_bytes(dense + 3600)} a step" in shown
    assert "s.yaml: 5 variables, for 2 ranks on 1 node, by parallax; id " in run(
        folder, "check", "s.yaml", "--model", "mine:net"
    )


def test_what_bench_takes_makes_a_strategy_too_and_a_nested_spec_needs_no_quotes(folder):
    said = run(
        folder, "build", "--model", "mine:for_bench", "--builder", "parallax(compressor=topk(ratio=0.5))", "-o", "s"
    )
    assert said == "Wrote s: 5 variables, for 1 rank on 1 node, by parallax\n"
    run(folder, "build", "--model", "mine:net", "--builder", "parallax(compressor='topk(ratio=0.5)')", "-o", "t")
    assert run(folder, "check", "s").partition(": ")[2] == run(folder, "check", "t").partition(": ")[2]  # one id


def test_a_strategy_for_another_model_is_refused(folder):
    run(folder, "build", "--model", "mine:net", "-o", "s.json")
    said = run(folder, "check", "s.json", "--model", "mine:other", code=2)
    assert "variable 1: the strategy has '1.weight', float32[64, 8]; the model has '1.weight', float32[32, 8]" in said


def test_a_variable_too_large_for_its_method_is_refused_as_in_a_run(folder):
    topk = "all_reduce(compressor=topk(ratio=0.01))"
    said = run(folder, "build", "--model", "mine:huge", "--builder", topk, "-o", "s.json", code=2)
    assert "variable 'weight' has 2147483648 elements, and topk" in said
    assert not (folder / "s.json").exists()
    run(folder, "build", "--model", "mine:huge", "-o", "s.json")
    document = (folder / "s.json").read_text().replace("allreduce", "allgather")
    (folder / "s.json").write_text(document.replace('"compressor": "none"', '"compressor": "topk(ratio=0.01)"'))
    said = run(folder, "check", "s.json", code=2)
    assert "variable 'weight' has 2147483648 elements" in said


RULES = """
version: 1
rules:
  - {match: {sparse: true}, sync: {type: reduce_broadcast, destination: 1}}
  - {match: {}, sync: {type: allreduce}}
"""


def test_files_of_rules_are_shown_for_a_model_and_any_cluster(folder):
    (folder / "rules.yaml").write_text(RULES)
    (folder / "cluster.yaml").write_text("nodes: [{address: 10.0.0.1, chief: true, cpus: [0, 1, 2]}]")
    for options, size in (([], 2), (["-n", "4"], 4), (["-r", "cluster.yaml"], 3)):
        shown = run(folder, "show", "rules.yaml", "--model", "mine:net", *options)
        assert f"5 variables, for {size} ranks on 1 node" in shown
        assert re.search(r"^0.weight .*reduce_broadcast +rank 1 ", shown, re.M)
    said = run(folder, "check", "rules.yaml", "--model", "mine:net", "-n", "1", code=2)
    assert "rules.yaml: variable '0.weight', sync.destination: rank 1 is not one of 1" in said
    assert "rules: they need a model" in run(folder, "show", "rules.yaml", code=2)


def test_what_contradicts_itself_or_cannot_be_written_is_refused(folder):
    (folder / "cluster.yaml").write_text("nodes: [{address: 10.0.0.1, chief: true, cpus: [0, 1, 2]}]")
    build = ("build", "--model", "mine:net", "-o")
    both = ("-n", "2", "-r", "cluster.yaml")
    assert "cluster.yaml says how many ranks there are" in run(folder, *build, "s.yaml", *both, code=2)
    over = run(folder, *build, "cluster.yaml", "-r", "cluster.yaml", code=2)
    assert "cluster.yaml is a file that is read, and would be overwritten" in over
    assert "cannot write no/s.yaml: No such file" in run(folder, *build, "no/s.yaml", code=2)
    assert "cannot write no/s.json: No such file" in run(folder, "schema", "-o", "no/s.json", code=2)
    assert "65535" in run(folder, *build, "s.yaml", "-n", "100000000", code=2)
    run(folder, *build, "s.yaml", "-n", "2")
    for other in (("-n", "3"), ("-r", "cluster.yaml")):
        assert "s.yaml is for 2 ranks, and" in run(folder, "show", "s.yaml", *other, code=2)
    run(folder, "check", "s.yaml", "-n", "2")


def test_the_schema_is_printed_or_written(folder):
    run(folder, "schema", "-o", "schema.json")
    assert json.loads((folder / "schema.json").read_text()) == json.loads(run(folder, "schema"))
    assert "rules" in json.loads((folder / "schema.json").read_text())["properties"]


THEIRS = """
from dataclasses import dataclass, replace
from grace.communicators import Allgather
from grace.strategy.builders.all_reduce import AllReduce
from grace.strategy import Sync
from grace.strategy.rule import Rule

class Tree(Allgather):
    "Their way round."
    name = "tree"
    def __init__(self, compressor="none", memory=None, fanout=2):
        super().__init__(compressor, memory)
        self.fanout = fanout

@dataclass
class Trees(AllReduce):
    "Their builder."
    fanout: int = 3
    name = "trees"
    def collective(self, variable, group):
        return replace(super().collective(variable, group), sync=Sync("tree", group, options={"fanout": self.fanout}))

@dataclass
class Wide(Rule):
    "Their rule."
    than: int = 9
    name = "wide"
    def fits(self, variable):
        return len(variable.shape) > 1 and variable.shape[1] > self.than
"""
POINTS = """
[grace.communicators]
tree = theirs:Tree
[grace.strategy.builders]
trees = theirs:Trees
[grace.strategy.rules]
wide = theirs:Wide
"""


@pytest.mark.slow
def test_a_package_brings_a_synchronizer_a_builder_and_a_rule(folder, monkeypatch):
    (folder / "theirs.py").write_text(THEIRS)
    installed(folder, "theirs", POINTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    listed = run_program(folder, "list", group=())
    for name, kind, what in (
        ("tree", "communicator", "way round"), ("trees", "builder", "builder"), ("wide", "rule", "rule")
    ):  # fmt: skip
        assert re.search(rf"^{name} +Their {what}", re.split(rf"^{kind} +what it is *$", listed, flags=re.M)[1], re.M)
    (folder / "rules.yaml").write_text(
        "version: 1\nrules:\n- {match: {rule: wide(than=50)}, sync: {type: tree, fanout: 5}}\n"
        "- {match: {}, sync: {type: tree}}\n"
    )
    run_program(folder, "build", "--model", "mine:net", "--builder", "trees(fanout=4)", "-n", "2", "-o", "s.yaml")
    shown = run_program(folder, "show", "s.yaml")
    assert re.search(r"^2.bias +10 +40 +tree +group 0, fanout=4 ", shown, re.M)
    assert "tree: counted as allgather" in shown
    assert "by trees" in run_program(folder, "check", "s.yaml", "--model", "mine:net")
    shown = run_program(folder, "show", "rules.yaml", "--model", "mine:net", "-n", "2")
    for name, fanout in (("2.weight", 5), ("2.bias", 2)):
        assert re.search(rf"^{name} .* tree +group 0, fanout={fanout} ", shown, re.M)


def test_names_are_shown_as_they_are(folder):
    """Square brackets mean something to what prints the table."""
    (folder / "s.yaml").write_text(
        "version: 1\nvariables: {'[bold]w[/nothing]': {shape: [2], sync: {type: allreduce}}}"
    )
    assert re.search(r"^\[bold\]w\[/nothing\] +2 ", run(folder, "show", "s.yaml"), re.M)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("mine", "unknown model 'mine'; known: none but module:function"),
        ("missing:net", "cannot import missing"),
        ("mine:nett", "mine has no function 'nett'"),
        ("os:getcwd", "a torch module or a Keras model is needed, not builtins.str"),
    ],
)
def test_models_that_cannot_be_had_are_refused(folder, model, message):
    assert message in run(folder, "build", "--model", model, "-o", "s.yaml", code=2)
    assert not (folder / "s.yaml").exists()


@pytest.mark.slow
def test_kerass_embeddings_are_sparse(folder):
    pytest.importorskip("keras", reason="TensorFlow is not installed")
    (folder / "mine.py").write_text(
        "import keras\n"
        "def net():\n"
        "    layers = keras.layers\n"
        "    return keras.Sequential([layers.Input((4,)), layers.Embedding(50, 3), layers.Dense(2)])\n"
    )
    run(folder, "build", "--model", "mine:net", "-o", "s.yaml")
    assert re.search(r"^embedding(_\d+)?/embeddings +50 x 3, sparse ", run(folder, "show", "s.yaml"), re.M)
