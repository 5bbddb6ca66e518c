"""Times of collectives by formulas, and by measurements."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grace.core.route import DIRECT_BYTES
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.planner.builders.auto import Auto
from grace.planner.costs import Curve
from grace.planner.network import KINDS, Links, MeasuredNetwork, steps_of
from grace.strategy import ShardPlan, Strategy, Sync, VariablePlan

GIGABYTE = Links(bandwidth=1e9, latency=1e-4)
BYTES, RANKS, EACH = st.floats(0, 1e9), st.integers(1, 1024), st.sampled_from(KINDS)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    {
        "allreduce": 6e-4 + 1.5e-3,
        "allgather": 1e-4 + 3e-3,
        "alltoall": 1e-4 + 0.75e-3,
        "gather": 1e-4 + 3e-3,
        "broadcast": 2e-4 + 2e-3,
    }.items(),
)
def test_a_megabyte_of_four_ranks(kind, seconds):
    assert GIGABYTE.seconds(kind, 1e6, 4) == pytest.approx(seconds)
    assert GIGABYTE.seconds(kind, 1e6, 1) == 0
    assert Links(math.inf, 1e-4).seconds(kind, 1e6, 4) == pytest.approx(1e-4 * steps_of(kind, 1e6, 4)[0])


def test_much_is_gathered_round_a_ring():
    assert steps_of("allgather", DIRECT_BYTES / 4, 4) == (1, 3 * DIRECT_BYTES / 4)
    assert steps_of("allgather", DIRECT_BYTES, 4) == (3, 3 * DIRECT_BYTES)


@pytest.mark.parametrize(
    ("bandwidth", "latency", "message"),
    [(0, 0, "above 0"), (-1, 0, "above 0"), (math.nan, 0, "above 0"), (1, -1, "finite"), (1, math.inf, "finite")],
)
def test_links_that_cannot_be_are_refused(bandwidth, latency, message):
    with pytest.raises(ConfigError, match=message):
        Links(bandwidth, latency)


def test_what_is_no_collective_is_refused():
    for network in (GIGABYTE, MeasuredNetwork({"allreduce": Curve.through([(1, 1)])}, 2)):
        with pytest.raises(ConfigError, match="'reduce' is no collective; there are allreduce, "):
            network.seconds("reduce", 1, 2)
    with pytest.raises(ConfigError, match="'reduce' is no collective"):
        MeasuredNetwork({"reduce": Curve.through([(1, 1)])}, 2)
    with pytest.raises(ConfigError, match="there are none"):
        MeasuredNetwork({}, 2)
    with pytest.raises(ConfigError, match=r"a share of computing from 0 to below 1, not \{'allreduce': 1.0\}"):
        MeasuredNetwork({"allreduce": Curve.through([(1, 1)])}, 2, {"allreduce": 1.0})


def measured(links, ranks, kinds=("allreduce", "allgather"), sizes=(1e3, 1e5, 1e6, 1e7, 1e8)):
    return MeasuredNetwork({k: Curve.through([(n, links.seconds(k, n, ranks)) for n in sizes]) for k in kinds}, ranks)


@given(kind=EACH, nbytes=st.floats(1e3, 1e8), ranks=st.sampled_from([2, 3, 4, 8, 16]), by=st.sampled_from([2, 4]))
def test_measurements_of_such_links_say_what_the_links_do(kind, nbytes, ranks, by):
    found = measured(GIGABYTE, by).seconds(kind, nbytes, ranks)
    assert found == pytest.approx(GIGABYTE.seconds(kind, nbytes, ranks), rel=0.25)  # straight between points
    if kind != "allgather":
        assert found == pytest.approx(GIGABYTE.seconds(kind, nbytes, ranks), rel=1e-3)


NOISY = MeasuredNetwork(
    {
        "allreduce": Curve.through([(1e3, 1e-3), (1e5, 1e-3), (1e6, 5e-2)]),
        "broadcast": Curve.through([(1e3, 1e-5), (1e6, 1e-2), (1e8, 1e-2)]),
    },
    2,
)
NETWORKS = [GIGABYTE, NOISY, measured(GIGABYTE, 4), Links(1e9, 1e-4, sharing=4)]


@given(network=st.sampled_from(NETWORKS), kind=EACH, nbytes=BYTES, more=BYTES, ranks=RANKS)
def test_more_bytes_never_take_less(network, kind, nbytes, more, ranks):
    less = network.seconds(kind, nbytes, ranks)
    assert less <= network.seconds(kind, nbytes + more, ranks) * (1 + 1e-9)
    assert (ranks == 1) == (less == 0) or nbytes == 0 or kind not in NOISY.curves


@given(kind=EACH, nbytes=BYTES, ranks=RANKS, slower=st.floats(1, 10), later=st.floats(0, 1))
def test_less_bandwidth_and_more_latency_never_take_less(kind, nbytes, ranks, slower, later):
    worse = Links(1e9 / slower, 1e-4 + later)
    assert GIGABYTE.seconds(kind, nbytes, ranks) <= worse.seconds(kind, nbytes, ranks)


def test_other_numbers_of_ranks_follow_that_which_was_measured():
    twice = Curve.through([(n, 2 * GIGABYTE.seconds("allreduce", n, 2)) for n in (1e4, 1e6, 1e8)])
    network = MeasuredNetwork({"allreduce": twice}, 2)
    assert network.seconds("allreduce", 1e6, 2) == pytest.approx(2 * GIGABYTE.seconds("allreduce", 1e6, 2))
    assert network.seconds("allreduce", 1e6, 1024) == pytest.approx(2 * GIGABYTE.seconds("allreduce", 1e6, 1024))
    assert network.seconds("gather", 1e6, 4) == pytest.approx(2 * GIGABYTE.seconds("gather", 1e6, 4))


def test_ranks_of_a_node_share_its_link():
    shared = Links(1e9, sharing=4)
    assert shared.seconds("allreduce", 1e6, 8) == Links(1e9).seconds("allreduce", 1e6, 8)
    assert shared.seconds("alltoall", 1e6, 8) == 4 * Links(1e9).seconds("alltoall", 1e6, 8)


CLUSTER = {
    "nodes": [
        {"address": "a", "chief": True, "cpus": [0, 1], "network_bandwidth": 10},
        {"address": "b", "cpus": [0, 1], "network_bandwidth": 1, "ssh_config": "x"},
        {"address": "c", "cpus": [0, 1], "network_bandwidth": 1, "ssh_config": "x"},
    ],
    "ssh": {"x": {}},
}


def test_a_resource_file_tells_the_planner_which_nodes_are_fast():
    pytest.importorskip("pydantic", reason="pydantic is not installed")
    from grace.launch.cluster import Resources

    cluster = Resources.from_document(CLUSTER)
    costs = Auto(latency=0).costs(cluster)
    slow = Links(1e9 / 8)
    assert costs.network.seconds("allreduce", 1e6, 6) == slow.seconds("allreduce", 1e6, 6)  # passes each link once
    variables = [Variable(f"w{i}", (1000, 1000)) for i in range(4)]
    problem = Auto(latency=0).problem(variables, cluster)

    def step(**sync):
        part = ShardPlan(Sync(**sync))
        plans = tuple(VariablePlan(variable, (part,)) for variable in variables)
        return problem.predict(Strategy(plans, 6, 3)).step

    assert step(type="allreduce") < step(type="allgather")
    one = Resources.from_document({"nodes": [{**CLUSTER["nodes"][0], "network_bandwidth": 8}]})
    assert Auto().costs(one).network.bandwidth == 0.5e9  # each of two ranks has half
