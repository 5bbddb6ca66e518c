"""The builders: hand-computed strategies, and what holds for any variables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import grace
from grace.communicators.choice import build_communicator
from grace.core.registry import known, make
from grace.core.variable import Variable, equal_sizes
from grace.session.bucket_limits import Limits
from grace.session.bucketing import make_buckets
from grace.session.sharding import uniform as sharded
from grace.strategy.builder import OneNode
from grace.strategy.execution import make_shards
from tests.support.examples import examples

LIST = [
    Variable("emb", (12, 4), sparse=True),
    Variable("prime", (13, 4)),
    Variable("odd", (9, 2)),
    Variable("scalar", ()),
    Variable("row", (1, 6)),
    Variable("even", (8, 4)),
]


def built(spec, variables=LIST, ranks=2):
    return make("builder", spec).build(variables, OneNode(ranks)).plans


def summary(plans):
    return {p.variable.name: (p.sizes, [part.sync.destination for part in p.parts]) for p in plans}


def groups(plans):
    return {p.variable.name: (p.sizes, [part.sync.group for part in p.parts]) for p in plans}


def test_ps_builders_have_the_parameters_of_the_communicator():
    expected = known("communicator")["reduce_broadcast"].parameters()
    for name in ("ps", "ps_load_balancing", "partitioned_ps", "parallax"):
        parameters = known("builder")[name].parameters()
        assert {key: parameters.get(key) for key in expected if key != "destination"} == {
            key: default for key, default in expected.items() if key != "destination"
        }
        changed = {"sync": False, "local_replication": True, "ahead": 3}
        plans = make("builder", {"name": name, **changed}).build(LIST, OneNode(2)).plans
        options = [part.sync.options for p in plans for part in p.parts if part.sync.type == "reduce_broadcast"]
        assert options
        assert all(option[key] == value for option in options for key, value in changed.items())


def test_ps_sends_everything_to_one_rank():
    plans = built("ps")
    assert {part.sync.destination for p in plans for part in p.parts} == {0}
    assert {part.sync.type for p in plans for part in p.parts} == {"reduce_broadcast"}
    assert all(p.axis is None for p in plans)


@pytest.mark.parametrize(
    ("spec", "ranks", "destinations"),
    [
        # bytes: 192, 208, 72, 4, 24, 128
        ("ps_load_balancing", 1, [0, 0, 0, 0, 0, 0]),
        ("ps_load_balancing", 2, [0, 1, 0, 1, 1, 1]),
        ("ps_load_balancing", 3, [0, 1, 2, 2, 2, 2]),
        ("ps_load_balancing(sorted=true)", 2, [1, 0, 0, 0, 0, 1]),
        ("ps_load_balancing(sorted=true)", 3, [1, 0, 2, 2, 1, 2]),
    ],
)
def test_ps_load_balancing_is_greedy(spec, ranks, destinations):
    assert [p.parts[0].sync.destination for p in built(spec, ranks=ranks)] == destinations


def test_partitioned_ps_cuts_into_the_smallest_divisor():
    plans = built("partitioned_ps(min_shard_bytes=0, max_shards=12)")
    assert summary(plans) == {
        "emb": ((6, 6), [0, 1]),
        "prime": ((), [0]),  # 13 shards of one row are more than 12
        "odd": ((3, 3, 3), [1, 1, 1]),
        "scalar": ((), [1]),
        "row": ((), [1]),
        "even": ((4, 4), [1, 1]),
    }
    assert summary(built("partitioned_ps(min_shard_bytes=0, max_shards=13)"))["prime"][0] == (1,) * 13
    assert all(not p.sizes for p in built("partitioned_ps(min_shard_bytes=4096)"))


def test_uneven_partitioned_ps_cuts_into_what_does_not_divide():
    assert summary(built("uneven_partitioned_ps(min_shard_bytes=0)")) == {
        "emb": ((3, 3, 2, 2, 2), [0, 1, 0, 1, 0]),
        "prime": ((7, 6), [1, 0]),
        "odd": ((5, 4), [1, 0]),
        "scalar": ((), [1]),
        "row": ((), [1]),
        "even": ((3, 3, 2), [0, 1, 0]),
    }


def test_all_reduce_groups_by_index():
    plans = built("all_reduce(chunk_size=4)")
    assert [p.parts[0].sync.group for p in plans] == [0, 0, 0, 0, 1, 1]
    assert {p.parts[0].sync.type for p in plans} == {"allreduce"}
    gathered = built("all_reduce(compressor='topk')", LIST[1:])
    assert {p.parts[0].sync.type for p in gathered} == {"allgather"}  # whose payloads cannot be summed


def test_partitioned_all_reduce_groups_by_running_shard():
    assert groups(built("partitioned_all_reduce(min_shard_bytes=0, chunk_size=3, max_shards=12)")) == {
        "emb": ((6, 6), [0, 0]),
        "prime": ((), [0]),
        "odd": ((3, 3, 3), [1, 1, 1]),
        "scalar": ((), [2]),
        "row": ((), [2]),
        "even": ((4, 4), [2, 3]),
    }


def test_random_axis_partition_all_reduce_draws_axes_with_its_seed():
    spec = "random_axis_partition_all_reduce(min_shard_bytes=0, seed={})"
    variables = [Variable("emb", (4, 6), sparse=True), *(Variable(f"w{i}", (4, 1, 6)) for i in range(20))]
    first = [p.axis for p in built(spec.format(1), variables)]
    assert first == [p.axis for p in built(spec.format(1), variables)]
    assert first != [p.axis for p in built(spec.format(2), variables)]
    assert first[0] == 0
    assert set(first[1:]) == {0, 2}
    assert {p.sizes for p in built(spec.format(1), variables)[1:]} == {(2, 2), (3, 3)}


def test_parallax_parts_dense_and_sparse():
    plans = built("parallax(chunk_size=2)")
    assert [p.parts[0].sync.type for p in plans] == ["reduce_broadcast", *["allreduce"] * 5]
    assert [p.parts[0].sync.group for p in plans[1:]] == [0, 0, 1, 1, 2]


def test_rules_choose_the_compressor():
    rules = [{"match": {"name": "o*"}, "compressor": "topk"}, {"match": {"min_bytes": 128}, "compressor": "fp16"}]
    plans = make("builder", {"name": "all_reduce", "compressor": rules}).build(LIST[1:], OneNode(2)).plans
    assert [p.parts[0].compressor for p in plans] == ["fp16", "topk", "none", "none", "fp16"]


def test_rules_without_a_memory_take_the_builders():
    rules = [
        {"match": {"name": "odd"}, "compressor": "topk", "memory": "none"},
        {"match": {"ndim": 2}, "compressor": "topk"},
    ]
    builder = make("builder", {"name": "all_reduce", "compressor": rules, "memory": "residual(beta=0.5)"})
    plans = builder.build(LIST[1:], OneNode(2)).plans
    assert [p.parts[0].memory for p in plans] == ["residual(beta=0.5)", "none", None, *["residual(beta=0.5)"] * 2]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"match": {"nmae": "w"}}, r"rule 1, match.nmae: unknown key \(did you mean 'name'"),
        ({"compresor": "topk"}, r"rule 1, compresor: unknown key \(did you mean 'compressor'"),
        ({"match": {"regex": "("}}, r"rule 1, match.regex: it cannot be read"),
        (7, r"rule 1, as a whole: "),
    ],
)
def test_a_rule_that_cannot_be_read_is_refused(rule, message):
    rules = [{"match": {"name": "nothing"}}, rule]
    with pytest.raises(grace.ConfigError, match=message):
        make("builder", {"name": "all_reduce", "compressor": rules}).build(LIST, OneNode(2))


WITH_DESTINATIONS = ["ps", "ps_load_balancing", "partitioned_ps", "uneven_partitioned_ps", "parallax"]


@pytest.mark.parametrize("builder", WITH_DESTINATIONS)
def test_builders_with_destinations_take_what_their_sync_can_say(builder):
    caps = "min_shard_bytes=0, " if "partitioned" in builder else ""
    for said, wanted in (
        ("staleness=2, local_replication=true", {"staleness": 2, "local_replication": True, "sync": True}),
        ("sync=false, ahead=3", {"sync": False, "ahead": 3, "staleness": 0}),
    ):
        plans = built(f"{builder}({caps}{said}, compressor=topk(ratio=0.5), memory=none)")
        parts = [part for p in plans for part in p.parts if part.sync.type == "reduce_broadcast"]
        assert len(parts) >= (1 if builder == "parallax" else len(LIST))
        assert all(wanted.items() <= part.to_dict()["sync"].items() for part in parts)
        assert {(part.compressor, part.memory) for part in parts} == {("topk(ratio=0.5)", "none")}


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("uniform(chunk_size=2)", [0, 0, 1, 1, 2, 2]),
        ("size_threshold(chunk_size=2, bytes=100, compressor=none)", [1, 1, 0, 0, 2, 3]),
        ("by_type(chunk_size=1, compressor=none)", [2, 1, 4, 0, 7, 10]),
    ],
)
def test_groups_have_as_many_variables_as_chunk_size_says(spec, wanted):
    assert [p.parts[0].sync.group for p in built(spec)] == wanted


def test_size_threshold_and_by_type_take_a_compressor_and_a_memory():
    dense = [Variable("w", (500, 500)), Variable("b", (500,))]
    for spec in ("size_threshold({}, memory=none)", "by_type({}, memory=none)"):
        for word in ("compressor", "large" if "size" in spec else "matrices"):
            plans = built(spec.format(f"{word}=topk(ratio=0.5)"), dense)
            chosen = [(p.parts[0].compressor, p.parts[0].memory) for p in plans]
            assert chosen == [("topk(ratio=0.5)", "none"), ("none", None)]


def test_objects_are_taken_and_stand_in_files_as_specs():
    topk, rules = (
        make("compressor", "topk(ratio=0.5)"),
        [{"match": {"ndim": 2}, "compressor": make("compressor", "topk")}],
    )
    for compressor, said in ((topk, "topk(ratio=0.5)"), (rules, [{"match": {"ndim": 2}, "compressor": "topk"}])):
        strategy = make("builder", {"name": "all_reduce", "compressor": compressor}).build(LIST[1:], OneNode(2))
        assert strategy.to_dict()["builder"]["params"]["compressor"] == said
        assert len(strategy.id) == 64


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("by_type(compressor=topk, matrices=qsgd)", "matrices is another word for compressor"),
        ("size_threshold(compressor=qsgd, large=topk)", "large is another word for compressor"),
        ("ps(destination=-1)", "destination must be a whole number"),
        ("uniform(chunk_size=0)", "chunk_size must be a whole number"),
        ("parallax(staleness=-1)", "staleness must be a whole number"),
        ("partitioned_ps(sync=false, staleness=1)", "staleness goes with sync=True only"),
        ("uneven_partitioned_ps(max_shards=0)", "max_shards must be a whole number"),
        ("ps_load_balancing(ahead=3)", "ahead goes with sync=False only"),
        ("ps(local_replication=1)", "local_replication must be one of True, False"),
    ],
)
def test_parameters_that_would_be_ignored_or_cannot_be_are_refused(spec, message):
    with pytest.raises(grace.ConfigError, match=message):
        make("builder", spec)


def test_what_cannot_be_done_on_a_cluster_or_with_a_method_names_the_variable():
    with pytest.raises(grace.ConfigError, match=r"variable 'prime', sync: reduce_broadcast: powersgd .*staleness=1"):
        built("ps(staleness=1, compressor=powersgd)", LIST[1:])
    with pytest.raises(grace.ConfigError, match=r"variable 'emb', sync.destination: rank 2 is not one of 2"):
        built("ps(destination=2)")


SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=8)


@pytest.mark.parametrize("name", sorted(n for n, c in known("builder").items() if c.__module__.startswith("grace.")))
@examples(12)
@given(shapes=SHAPES, ranks=st.integers(1, 5), sparse=st.booleans())
def test_every_element_is_in_one_part_and_loads_are_balanced(name, shapes, ranks, sparse):
    variables = [Variable(f"v{i}", shape, sparse=sparse and len(shape) == 2) for i, shape in enumerate(shapes)]
    builder = make("builder", name)
    if hasattr(builder, "min_shard_bytes"):
        builder.min_shard_bytes = 0
    if name in ("size_threshold", "by_type") and sparse:
        builder = make("builder", {"name": name, **{"size_threshold": {"large": "none"}, "by_type": {}}[name]})
    strategy = builder.build(variables, OneNode(ranks))
    assert strategy.variables == variables
    loads = [0] * ranks
    for plan in strategy.plans:
        shards = plan.part_variables()
        assert sum(shard.numel for shard in shards) == plan.variable.numel
        if plan.axis is not None:
            assert sum(plan.sizes) == plan.variable.shape[plan.axis]
            assert min(plan.sizes) >= 1
        for part, shard in zip(plan.parts, shards, strict=True):
            loads[part.sync.destination] += shard.nbytes
    if "ps_" in name or name.endswith("_ps"):
        largest = max((shard.nbytes for plan in strategy.plans for shard in plan.part_variables()), default=0)
        assert max(loads) - min(loads) <= largest


@given(n=st.integers(1, 1000), count=st.integers(1, 50))
def test_equal_sizes_differ_by_one(n, count):
    sizes = equal_sizes(n, count)
    assert sum(sizes) == n
    assert len(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@pytest.mark.parametrize("name", ["all_reduce", "uniform", "by_type", "size_threshold", "parallax"])
def test_collectives_are_chosen_for_the_clusters_ranks(name):
    builder = make("builder", {"name": name, "compressor": "qsgd", **({"bytes": 0} if "size" in name else {})})
    for ranks, kind in ((2, "allgather"), (8, "scatter_reduce"), (2, "allgather")):
        (plan,) = builder.build([Variable("w", (400, 300))], OneNode(ranks)).plans
        assert [part.sync.type for part in plan.parts] == [kind]


@pytest.mark.parametrize("method", ["topk(ratio=0.01)", "qsgd", "none"])
@pytest.mark.parametrize("builder", ["uniform", "size_threshold(bytes=0, small={})", "by_type(vectors={})"])
def test_groups_are_cut_as_an_optimizers_buckets_so_that_they_travel_beside_backward(builder, method):
    model = [Variable(f"w{i}", (512, 1 << i)) for i in range(6, 14)]
    buckets = make_buckets(sharded(model, build_communicator(method, None, None, 2), Limits()))
    assert len(buckets) > 1
    spec = {**make("builder", builder.format(f"'{method}'")).to_dict(), "compressor": method}
    strategy = make("builder", spec).build(model, OneNode(2))
    names = [[v.name for v in bucket.variables] for bucket in buckets]
    assert [[v.name for v in bucket.variables] for bucket in make_buckets(make_shards(strategy, model))] == names
