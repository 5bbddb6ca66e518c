"""Resources at run time: builders get the nodes of a file, by an argument or from the launcher."""

import os

import pytest

import grace
from grace.backends.topology import Topology
from grace.strategy.builder import Builder
from grace.strategy.plan import VariablePlan
from grace.strategy.resources import cluster_of
from tests.support.pools import launched
from tests.support.strategies import assert_close, executed, mixed, on_the_mean, train, weights

TWO = """
nodes:
  - {{address: 10.0.0.1, chief: true, cpus: [3], network_bandwidth: {}}}
  - {{address: 10.0.0.2, gpus: [2], ssh_config: x, network_bandwidth: {}}}
ssh: {{x: {{}}}}
"""


@pytest.fixture
def cluster(tmp_path):
    """Two nodes of a rank each, the second 99 times as near."""
    path = tmp_path / "cluster.yaml"
    path.write_text(TWO.format(1, 99))
    return str(path)


def trained(argument, variable, strategy="ps_load_balancing"):
    """Return the destinations and the weights; the resources come as an argument or by the launcher's variable."""
    model = mixed()
    os.environ["GRACE_RESOURCES"] = variable or ""
    try:
        optimizer = executed(model, strategy, **({"resources": argument} if argument else {}))
    finally:
        del os.environ["GRACE_RESOURCES"]
    train(model, optimizer, range(2))
    destinations = {plan.parts[0].sync.destination for plan in optimizer.strategy.plans if plan.variable.numel}
    return destinations, {name: value.numpy() for name, value in weights(model).items()}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("engine", "by"),
    [("gloo", "argument"), ("gloo", "variable"), ("horovodrun-gloo", "argument"), ("mpirun-mpi", "variable")],
)
def test_builders_weigh_destinations_by_the_bandwidth_of_the_file(cluster, engine, by):
    given = (cluster, None) if by == "argument" else (None, cluster)
    answers = launched(engine, 2).run(trained, *given)
    wanted = {name: value.numpy() for name, value in on_the_mean(mixed(), 2, range(2)).items()}
    for destinations, values in answers:
        assert destinations == {1}
        assert_close(values, wanted)


def test_without_a_file_all_destinations_weigh_the_same(two_ranks):
    assert two_ranks.run(trained, None, None)[0][0] == {0, 1}


class Knowing(Builder):
    """Looks at all that there is to know; what is ready first goes to rank 1, and the rest to rank 0."""

    name = "knowing"

    def build(self, variables, resources):
        of = [resources.nodes[node] for node in resources.ranks]
        known = [(node.address, list(node.gpus), list(node.cpus), node.network_bandwidth) for node in of]
        if os.environ.get("GRACE_RESOURCES"):
            assert known == [("10.0.0.1", [], [3], 1.0), ("10.0.0.2", [2], [], 99.0)], known
        else:
            assert known == [("a", [], [], None), ("b", [], [], None)], known
        first = self.ready(variables)[0]
        (words,) = [v for v in variables if v.sparse]
        assert (words.shape, words.nbytes, first.name) == ((10, 6), 240, "dense.bias")
        return self.strategy([VariablePlan(v, (self.reduced(v, int(v is first)),)) for v in variables], resources)


@pytest.mark.parametrize("told", [True, False])
def test_an_own_builder_is_told_of_nodes_devices_and_what_the_model_knows(two_ranks, cluster, told):
    destinations, _ = two_ranks.run(trained, None, cluster if told else None, Knowing())[0]
    assert destinations == {0, 1}


def refused(given, strategy, resources):
    """Each rank's error, and that the ranks are in step afterwards."""
    try:
        executed(mixed(), strategy, resources=given[grace.rank()])
        said = "nothing is wrong"
    except grace.GraceError as error:
        said = f"{type(error).__name__}: {error}"
    return said, trained(None, resources)[0]


@pytest.mark.parametrize(
    ("text", "strategy", "message"),
    [
        ("nodes: [{address: a, cpus: [0, 1, 2]}]", "ps", "it describes 3 ranks, and there are 2"),
        ("nodes: [{address: a, cpus: [0, 1]}]", "ps", "it puts ranks 0, 1 together on a, but they are on a, b"),
        ("nodes: [{address: a, speed: 1}]", "ps", "node a: speed: unknown key"),
        (None, "ps", "cannot be read: No such file"),
        ("nodes: [{address: a, cpus: [0, 1]}]", None, "resources= is for a strategy's builder"),
        (TWO.format(1, 1), {"version": 1}, "resources= is for a builder, and this strategy is built already"),
    ],
)
def test_resources_that_cannot_be_are_refused_on_all_ranks(two_ranks, tmp_path, cluster, text, strategy, message):
    path = tmp_path / "other.yaml"
    if text is not None:
        path.write_text(text)
    given = [str(path), None if strategy == "ps" else str(path)]  # rank 0's counts
    answers = two_ranks.run(refused, given, strategy, cluster)
    assert all(message in said for said, _ in answers), answers
    assert answers[0][0].startswith("ConfigError")
    assert [destinations for _, destinations in answers] == [{1}, {1}]


def test_an_optimizer_over_some_of_a_launched_runs_ranks_builds_from_their_hosts(monkeypatch, cluster):
    monkeypatch.setenv("GRACE_RESOURCES", cluster)
    assert cluster_of(None, Topology(["a"])) == Topology(["a"])
    with pytest.raises(grace.ConfigError, match=r"RESOURCES .*cluster\.yaml: it describes 2 ranks, and there are 3"):
        cluster_of(None, Topology(["a", "b", "c"]))
    assert cluster_of({"nodes": [{"address": "x"}]}, Topology(["a"])).nodes[0].address == "x"
