"""The builders: hand-computed strategies, and what holds for any variables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import grace
from grace.core.registry import known, make
from grace.core.variable import Variable, equal_sizes
from grace.strategy.builder import Builder, OneNode
from grace.strategy.plan import VariablePlan
from tests.support.data import examples

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


@pytest.mark.parametrize(
    "spec", ["by_type(compressor='topk')", "size_threshold(compressor='topk')", "ps(destination=-1)"]
)
def test_parameters_that_would_be_ignored_or_cannot_be_are_refused(spec):
    with pytest.raises(grace.ConfigError):
        make("builder", spec)
    with pytest.raises(grace.ConfigError, match=r"variable 'emb', sync.destination: rank 2 is not one of 2"):
        built("ps(destination=2)")


def test_a_users_builder_is_a_component():
    @grace.register
    class Last(Builder):
        name = "last_for_the_test"

        def build(self, variables, resources):
            return self.strategy(
                [VariablePlan(v, (self.reduced(v, resources.world_size - 1),)) for v in variables], resources
            )

    assert {p.parts[0].sync.destination for p in built("last_for_the_test", ranks=3)} == {2}


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
