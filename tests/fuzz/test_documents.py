"""Specs, and documents of all kinds, with something wrong in them: an error that names the place, or a round trip."""

import json
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from grace.cli.calibration_file import Calibration, read
from grace.core.registry import known, make
from grace.core.variable import Variable
from grace.errors import GraceError
from grace.launch.cluster import Resources
from grace.pipeline.planning.graph import Graph, GraphNode
from grace.pipeline.planning.pipeline_plan import PipelinePlan, Stage
from grace.strategy import schema
from tests.cli.test_calibration_file import MADE
from tests.support.examples import examples
from tests.support.mutations import JSON, mutated

STRATEGY = {
    "version": 1,
    "builder": {"name": "ps", "params": {"compressor": "topk"}, "seed": 0},
    "cluster": {"world_size": 4, "nodes": 2},
    "variables": {
        "w": {"shape": [6, 2], "sync": {"type": "allgather", "group": 1}, "compressor": "topk(ratio=0.1)"},
        "e": {"shape": [9, 2], "sparse": True, "sync": {"type": "allreduce"}, "priority": 1},
        "cut": {
            "shape": [5, 3],
            "dtype": "float16",
            "partition": {"axis": 0, "sizes": [3, 2]},
            "parts": [
                {"sync": {"type": "reduce_broadcast", "destination": 1, "staleness": 2}, "memory": "none"},
                {"sync": {"type": "none", "period": 3}},
            ],
        },
    },
}
RESOURCES = {
    "nodes": [
        {"address": "10.0.0.1", "chief": True, "gpus": [0, 1], "cpus": [0], "network_bandwidth": 10},
        {"address": "10.0.0.2", "gpus": [0, 1], "ssh_config": "default"},
    ],
    "ssh": {"default": {"username": "me", "port": 22, "key_file": "~/.ssh/id", "shared_envs": {"A": "B"}}},
}
PLAN = PipelinePlan(
    "k" * 64,
    (Stage(("a", "b"), (0, 1), ("b",), 1.0, 0.01, 0.02, 0.001), Stage(("c",), (2, 3))),
    batch=8,
    microbatches=2,
    memory=(1.0, 2.0, 3.0, 4.0),
    limit=9.0,
).to_dict()
GRAPH = Graph(
    (GraphNode("a", ("x",), 4.0, 0.1, 0.2, parameters={"w": 24.0}), GraphNode("b", ("a",), line="net.py:3")),
    {"x": 8.0},
    ("b",),
    rows=2,
    together=(frozenset("ab"),),
    variables=(Variable("w", (2, 3)),),
).to_dict()
KINDS = ("compressor", "memory", "communicator", "builder", "rule")
SIGNS = ["(", ")", "=", ",", "|", " ", "[", "]", "ratio", "levels", "clip", "true", "'x'"]
WORDS = st.sampled_from(
    [*SIGNS, "0.5", "7", "1e999", "-1", "nan", "9" * 300, *(name for kind in KINDS for name in known(kind))]
)


def said_by(function, *args):
    """Return the result of a function, and its message if it refuses."""
    try:
        return function(*args), None
    except GraceError as error:
        said = str(error)
    assert len(said) < 8000
    return None, said


@pytest.mark.parametrize("kind", ["compressor", "memory", "communicator", "builder"])
@examples(20)
@given(st.one_of(st.lists(WORDS, max_size=9).map("".join), JSON, st.data()))
def test_a_spec_is_refused_or_survives_a_round_trip(kind, spec):
    if hasattr(spec, "draw"):
        cls = known(kind)[spec.draw(st.sampled_from(sorted(known(kind))))]
        parameters = {key: spec.draw(JSON) for key in cls.parameters() if spec.draw(st.booleans())}
        spec = {"name": cls.name, **parameters}
    made, refused = said_by(make, kind, spec)
    if refused is not None:
        return
    assert make(kind, made.spec).spec == made.spec
    assert make(kind, made.to_dict()).spec == made.spec


ANY = st.text(max_size=60) | st.binary(max_size=60)


def write_resources(resources, path):
    path.write_bytes(encoded(resources.model_dump(), path.suffix[1:]))


def checked_resources(resources):
    """Resources, whose ranks and chief are as they must be."""
    assert len(resources.ranks) == resources.world_size >= 1
    assert sum(node.chief for node in resources.nodes) == 1
    return resources


def read_calibration(path):
    return read(path, max_age=None)


def used_calibration(found):
    """A calibration, whose links can be used."""
    if found.network is not None:
        found.costs(found.network).network.seconds("allgather", 1e5, 4)
    return found


DOCUMENTS = {
    "strategy": (mutated(STRATEGY), schema.load, schema.dump, lambda strategy: strategy.id, ["json", "yaml"]),
    "resources": (
        *(ANY | JSON | mutated(RESOURCES), Resources.load, write_resources, checked_resources, ["json", "yaml"]),
    ),
    "calibration": (ANY | mutated(MADE.to_dict()), read_calibration, Calibration.write, used_calibration, ["json"]),
    "plan": (ANY | mutated(PLAN), PipelinePlan.load, PipelinePlan.save, lambda plan: (plan, str(plan)), ["json"]),
    "graph": (mutated(GRAPH), Graph.load, Graph.save, lambda graph: graph.key, ["json"]),
}
"""Documents by kind: drawn ones, their reader and writer, and what must be equal when one is written and read again."""


def encoded(document, ending):
    if isinstance(document, bytes):
        return document
    if isinstance(document, (dict, list)):
        document = json.dumps(document) if ending == "json" else yaml.safe_dump(document, sort_keys=False)
    return str(document).encode("utf-8", "replace")


@pytest.mark.parametrize("kind", DOCUMENTS)
@examples(50)
@given(st.data())
def test_a_document_is_refused_by_file_or_survives_a_round_trip(kind, data):
    drawn, read, write, facts, endings = DOCUMENTS[kind]
    document, ending = data.draw(drawn), data.draw(st.sampled_from(endings))
    with tempfile.TemporaryDirectory() as made:
        path, again = Path(made, f"one.{ending}"), Path(made, f"again.{ending}")
        path.write_bytes(encoded(document, ending))
        found, refused = said_by(read, path)
        assert str(path) in (refused or str(path))
        if refused is None:
            write(found, again)
            assert facts(read(again)) == facts(found)


@pytest.mark.parametrize("read", [PipelinePlan.load, Graph.load, Resources.load, schema.load])
@pytest.mark.parametrize("text", ["[" * 100_000, f'{{"graph": {"9" * 5000}}}', '{"a": 1e999}', "\ud800"])
def test_no_text_gets_beyond_the_reader_of_documents(tmp_path, read, text):
    path = tmp_path / "file.json"
    path.write_text(text, "utf-8", "surrogatepass")
    with pytest.raises(GraceError, match=r"file.json: is not (JSON|UTF-8)"):
        read(path)
