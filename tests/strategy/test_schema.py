"""Strategy files: round trips, and errors that name the file, the variable and the field."""

# ruff: noqa: E402 - what is imported after pydantic needs it

import dataclasses
import re

import pytest

pytest.importorskip("pydantic", reason="pydantic is not installed")
yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

import grace
from grace.backends.topology import Topology
from grace.core.registry import known, make
from grace.core.schema_words import FileForm
from grace.core.variable import Variable
from grace.strategy import schema
from grace.strategy.builder import OneNode
from grace.strategy.execution import resolve
from grace.strategy.plan import fingerprint
from tests.support.own_parts import InPieces, registered

VARIABLES = [
    Variable("emb", (40, 8), sparse=True),
    Variable("w", (64, 32)),
    Variable("b", (32,)),
    Variable("half", (16, 4), "float16"),
    Variable("scale", ()),
]
SPECS = [
    "all_reduce(compressor='fp16')", "partitioned_ps(min_shard_bytes=0, compressor='topk | qsgd')", "parallax",
    "random_axis_partition_all_reduce(min_shard_bytes=0)", "size_threshold(bytes=100, large='qsgd(levels=7)')",
    "uniform", "by_type",
]  # fmt: skip


def strategy(spec="partitioned_ps(min_shard_bytes=0)", ranks=3):
    return make("builder", spec).build(VARIABLES, OneNode(ranks))


@pytest.mark.parametrize("suffix", ["json", "yaml"])
@pytest.mark.parametrize("spec", SPECS)
def test_round_trips_keep_everything(tmp_path, spec, suffix):
    made, path = strategy(spec), tmp_path / f"s.{suffix}"
    schema.dump(made, path)
    read = schema.load(path, VARIABLES)
    assert read.to_dict() == made.to_dict()
    assert read.id == made.id
    assert read.plans == schema.parse(made.to_dict()).plans


@dataclasses.dataclass(frozen=True)
class Bounded(FileForm):
    """A form with a whole bound of a number that need not be whole."""

    share: float = dataclasses.field(default=0.5, metadata={"ge": 0})
    count: int = dataclasses.field(default=1, metadata={"ge": 0})


def test_fields_for_whole_numbers_are_those_of_this_type():
    assert list(Bounded().too_small()) == []
    assert list(Bounded(count=0.5).too_small()) == [("count", "must be a whole number of at least 0, not 0.5")]


def test_the_id_is_of_the_contents_not_the_form():
    document = strategy().to_dict()
    shuffled = {key: document[key] for key in reversed(document)}
    shuffled["variables"] = {
        name: {key: entry[key] for key in reversed(entry)} for name, entry in document["variables"].items()
    }
    assert schema.parse(shuffled).id == strategy().id
    document["variables"]["w"]["parts"][0]["priority"] = 1
    assert schema.parse(document).id != strategy().id


def test_defaults_and_short_specs_are_one_strategy():
    plain = {"shape": [4, 4], "sync": {"type": "allgather"}, "compressor": "topk"}
    full = {
        "shape": [4, 4], "dtype": "float32", "sparse": False, "priority": 0, "memory": "residual",
        "sync": {"type": "allgather", "group": 0}, "compressor": {"name": "topk", "ratio": 0.01},
    }  # fmt: skip
    one, other = (schema.parse({"version": 1, "variables": {"w": entry}}) for entry in (plain, full))
    assert one.id == other.id


def edited(**changes):
    document = {
        "version": 1,
        "cluster": {"world_size": 2},
        "variables": {"w": {"shape": [4, 2], "sync": {"type": "allreduce"}}},
    }
    entry = document["variables"]["w"]
    for key, value in changes.items():
        (document if key in ("version", "rules", "extra") else entry)[key] = value
    return document


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, r"s.yaml, version: must be 1"),
        ({"extra": 1}, r"s.yaml, extra: unknown key; known: version"),
        ({"shpae": [1]}, r"s.yaml, variables.w.shpae: unknown key \(did you mean 'shape'"),
        ({"shape": [4, -1]}, r"variables.w.shape\[1\]: .*greater than or equal to 0"),
        ({"shape": [4, 2.5]}, r"variables.w.shape\[1\]: must be a whole number, not 2.5"),
        ({"dtype": "int8"}, r"variables.w.dtype: must be 'float16'"),
        ({"sync": {"type": "ring"}}, r"variables.w.sync: .*'ring'"),
        ({"sync": {"type": "allreduce", "destination": 1}}, r"w.sync.destination: unknown key; known: type, group"),
        ({"sync": {"type": "reduce_broadcast", "destination": 2}}, r"sync.destination: rank 2 is not one of 2"),
        ({"sync": {"type": "none", "period": 0}}, r"variables.w.sync.period: must be a whole .* at least 1, not 0"),
        ({"sync": {"type": "none"}, "compressor": "topk"}, r"variable 'w', compressor: ranks that train on their own"),
        ({"compressor": "topk"}, r"variable 'w', sync: allreduce cannot carry topk"),
        ({"compressor": "topq"}, r"variable 'w', compressor: unknown compressor 'topq' \(did you mean 'topk'"),
        ({"compressor": ["topk"]}, r"w.compressor: must be text, as in `topk.*`, or keys with values, not"),
        ({"memory": "dgc"}, r"variable 'w', compressor: memory dgc cannot serve"),
        ({"partition": {"axis": 2, "sizes": [1]}, "parts": []}, r"w.sync: a variable that is cut has it in each"),
        ({"parts": []}, r"variables.w.sync: a variable that is cut has it in each"),
        ({"sync": {"type": "none", "period": True}}, r"variables.w.sync.period: must be a whole number.*, not True"),
        ({"sync": {"type": "allreduce", "group": 1.5}}, r"variables.w.sync.group: must be a whole number.*, not 1.5"),
        ({"sync": {"type": "allreduce", "hierarchical": 1}}, r"w.sync.hierarchical: must be true or false, not 1"),
        ({"sync": {"type": "reduce_broadcast", "destination": True}}, r"sync.destination: rank True is not one of 2"),
        ({"sync": {"type": "reduce_broadcast", "ahead": 2}}, r"variable 'w', sync: reduce_broadcast: ahead goes with"),
        ({"sync": {"type": 7}}, r"variables.w.sync.type: must be text, not 7"),
        ({"sync": 7}, r"variables.w.sync: must be keys with values, not 7"),
        ({"outer": {"period": 4, "merge": "0.5"}}, r"variables.w.outer.merge: must be a .*number, not '0.5'"),
        ({"outer": {"period": 4, "merge": True}}, r"variables.w.outer.merge: must be a .*number, not True"),
        ({"sparse": True, "compressor": "signsgd", "sync": {"type": "allgather"}}, r"is sparse, and signsgd votes"),
        ({"rules": [{"match": {}, "sync": {"type": "allreduce"}}]}, r"rules: they need a model"),
    ],
)  # fmt: skip
def test_errors_name_the_file_the_variable_and_the_field(changes, message):
    with pytest.raises(grace.ConfigError, match=message) as caught:
        schema.parse(edited(**changes), "s.yaml")
    assert str(caught.value).startswith("s.yaml")


def test_a_folder_of_a_builders_name_is_no_strategy_file(tmp_path, monkeypatch):
    (tmp_path / "parallax").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("parallax", VARIABLES, Topology(["here"])).builder["name"] == "parallax"


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        ({"axis": 2, "sizes": [4]}, r"partition.axis: 2 is no axis of shape \[4, 2\]"),
        ({"axis": 0, "sizes": [3, 2]}, r"partition.sizes: \[3, 2\] must be positive and add up to 4, which is 5"),
        ({"axis": 0, "sizes": [2, 1, 1]}, r"parts: there must be one per size: 3, not 2"),
    ],
)
def test_partitions_must_fit(cut, message):
    document = edited(partition=cut, parts=[{"sync": {"type": "allreduce"}}] * 2)
    del document["variables"]["w"]["sync"]
    with pytest.raises(grace.ConfigError, match=message):
        schema.parse(document)


def test_a_strategy_for_another_model_names_the_first_difference():
    other = [*VARIABLES[:2], Variable("b", (33,)), *VARIABLES[3:]]
    with pytest.raises(
        grace.ConfigError, match=r"variable 2: the strategy has 'b', float32\[32\]; the model has 'b', float32\[33\]"
    ):
        strategy().check_model(other)
    with pytest.raises(grace.ConfigError, match=r"variable 4: .*the model has no more variables"):
        strategy().check_model(VARIABLES[:4])
    document = strategy().to_dict()
    del document["variables"]["b"]
    with pytest.raises(grace.ConfigError, match=r"model: the fingerprint is not that of the variables"):
        schema.parse(document)
    assert fingerprint(VARIABLES) != fingerprint(VARIABLES[::-1])


def test_rules_are_resolved_for_a_model():
    document = {
        "version": 1,
        "cluster": {"world_size": 2},
        "variables": {"scale": {"shape": [], "sync": {"type": "none", "period": 4}}},
        "rules": [
            {"match": {"sparse": True}, "sync": {"type": "reduce_broadcast", "destination": 1}},
            {
                "match": {"regex": "w|half", "ndim": 2}, "partition": {"axis": 1, "shards": 3},
                "sync": {"type": "allgather"}, "compressor": "topk",
            },
            {"match": {"name": "*"}, "sync": {"type": "allreduce"}},
        ],
    }  # fmt: skip
    read = schema.parse(document, variables=VARIABLES)
    assert [plan.parts[0].sync.type for plan in read.plans] == [
        "reduce_broadcast", "allgather", "allreduce", "allgather", "none",
    ]  # fmt: skip
    assert read.plans[1].sizes == (11, 11, 10)
    assert "rules" not in read.to_dict()
    document["rules"].pop()
    with pytest.raises(grace.ConfigError, match=r"variable 'b': no rule matches it"):
        schema.parse(document, variables=VARIABLES)


def test_a_rule_cuts_no_variable_without_elements():
    rule = {"match": {}, "partition": {"shards": 2}, "sync": {"type": "allreduce"}}
    empty = [Variable("empty", (0, 4)), Variable("w", (3, 4))]
    assert [plan.sizes for plan in schema.parse({"version": 1, "rules": [rule]}, variables=empty).plans] == [(), (2, 1)]


def test_a_rule_for_a_dtype_that_no_gradient_has_is_refused():
    rule = {"match": {"dtype": "fp16"}, "sync": {"type": "allreduce"}}
    with pytest.raises(grace.ConfigError, match=r"rules\[0\].match.dtype: must be 'float16', .* not 'fp16'"):
        schema.parse({"version": 1, "rules": [rule, {**rule, "match": {}}]}, variables=VARIABLES)


def test_files_without_a_cluster_are_for_any():
    document = {"version": 1, "rules": [{"match": {}, "sync": {"type": "reduce_broadcast", "destination": 2}}]}
    for cluster, wanted in ((None, 3), (OneNode(5), 5)):
        assert schema.parse(document, variables=VARIABLES, cluster=cluster).world_size == wanted
    with pytest.raises(grace.ConfigError, match=r"sync.destination: rank 2 is not one of 2"):
        schema.parse(document, variables=VARIABLES, cluster=OneNode(2))
    document["cluster"] = {"world_size": 4}
    assert schema.parse(document, variables=VARIABLES, cluster=OneNode(5)).world_size == 4  # what runs compare
    document["cluster"] = {"nodes": 2}
    read = schema.parse(document, variables=VARIABLES, cluster=OneNode(5))
    assert (read.world_size, read.nodes) == (5, 2)


def test_every_field_is_described_for_editors():
    found = schema.json_schema()
    models = [found, *found["$defs"].values()]
    fields = [(key, field) for model in models for key, field in model.get("properties", {}).items()]
    assert len(fields) > 40
    assert [key for key, field in fields if not field.get("description")] == []


def test_editors_know_each_communicator_with_its_parameters():
    with registered(InPieces):
        *forms, other = schema.json_schema()["$defs"]["Sync"]["oneOf"]
    types = [form["properties"]["type"] for form in forms]
    names = [name for one in types for name in one["enum"]]
    assert sorted(names) == sorted(other["properties"]["type"]["not"]["enum"])  # one form fits, not two
    assert sorted(names) == sorted([*known("communicator"), "in_pieces", "none"])
    (own,) = (form for form in forms if form["properties"]["type"]["enum"] == ["in_pieces"])
    assert own["properties"]["most"] == {"type": "integer", "description": "Bytes.", "default": 64}
    (rooted,) = (form for form in forms if "destination" in form["properties"])
    assert rooted["properties"]["ahead"].items() >= {"type": "integer", "minimum": 1, "default": 8}.items()
    assert all(field["description"] for form in forms for field in form["properties"].values())
    assert {form["additionalProperties"] for form in forms} == {False}
    assert "additionalProperties" not in other


SUM = "sync: {type: allreduce}"


def test_broken_files_are_refused(tmp_path):
    for name, text, message in (
        ("a.yaml", "version: [1", "a.yaml: is not YAML: "),
        ("a.json", "{'version': 1}", "a.json: is not JSON: "),
        ("b.yaml", "version: 1\nversion: 1", "line 2: the key 'version' stands there a second time"),
        ("b.json", '{"version": 1, "version": 1}', "the key 'version' stands there a second time"),
        ("e.yaml", "version: true", "e.yaml, version: must be 1"),
        ("f.yaml", "version: !!int ''", "'' cannot be read as int (line 1)"),
        ("g.yaml", "version: 1\ncluster: {world_size: 1, nodes: 5}", "cluster.nodes: 5 nodes cannot have 1 ranks"),
        (
            "h.yaml",
            "version: 1\nvariables: {w: {shape: [], sparse: true, sync: {type: allreduce}}}",
            "'w', shape: a sparse",
        ),
        (
            "i.json",
            f'{{"version": 1, "variables": {{"w": {{"shape": {[10**18] * 30}, "sync": {{"type": "none"}}}}}}}}',
            "'w', shape",
        ),
        ("j.json", '{"version": ' + "[" * 900 + "]" * 900 + "}", "nested too deeply"),
        ("k.json", '{"version": ' + "1" * 100_000 + "}", "k.json: is not JSON: "),
        ("l.json", '{"version": 1, "variables": {"\\ud800": {}}}', "half a character"),
        ("n.yaml", "version: 1\nbuilder: {name: all_reduce, params: {a: [.inf]}}", "must be a finite number"),
        (
            "o.yaml",
            f"version: 1\nvariables: {{w: {{shape: [2], {SUM}, compressor: {{name: topk, ratio: 2020-01-01}}}}}}",
            "variable 'w', compressor: topk: ratio must be a number in (0, 1], not '2020-01-01'",
        ),
        ("m.yaml", f"version: {'x' * 10**6}", "version: must be 1"),
        ("c.yaml", "- 1", "must be keys with values, not"),
        ("d.yaml", "", "must be keys with values, not"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(grace.ConfigError, match=re.escape(message)) as error:
            schema.load(tmp_path / name)
        assert len(str(error.value)) < 2000
    with pytest.raises(grace.ConfigError, match=r"missing\.yaml: cannot be read"):
        schema.load(tmp_path / "missing.yaml")
