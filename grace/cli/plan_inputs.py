"""Inputs of ``grace plan``: the cluster, its links, the model's times, and costs and errors of methods."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grace.backends.topology import Topology
from grace.bench.common.progress import ShowProgress
from grace.bench.common.text import of_bytes, of_rate
from grace.cli.calibration import AGAIN, Calibration, Key, read
from grace.cli.inputs import (
    call_model_function,
    framework_of,
    load_cluster,
    model_of,
    model_variables,
    random_gradients,
)
from grace.cli.local_steps import LocalSteps, run_steps
from grace.core.backend import LocalBackend
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.planner.builders.auto import Auto, timeline
from grace.planner.codecs import is_table
from grace.planner.costs import DefaultCodecs
from grace.planner.exchange_costs import Costs
from grace.planner.network import links_of
from grace.planner.planning import measured
from grace.planner.problem import Problem
from grace.planner.step import Timeline
from grace.strategy.builder import Cluster, OneNode, bandwidths

CODECS = ("measure", "usual")
PARTS = ("forward", "backward", "optimizer")


class TrainedModel(NamedTuple):
    """Model that is planned for.

    Attributes:
        model: a torch module, a Keras model, or a list of variables.
        loss: returns the loss of a batch for the model; None if the user gave none.
        variables: the trainable variables.
        framework: "torch", "tensorflow" or "numpy".
    """

    model: Any
    loss: Callable[[Any], Any] | None
    variables: list[Variable]
    framework: str


def load_model(spec: str) -> TrainedModel:
    """Return the model of ``module:function``, or one of ``grace bench step`` by its name.

    Raises:
        ConfigError: there is none, it has nothing to exchange, or its loss cannot be called.
    """
    if spec.isidentifier():
        from grace.bench.workloads.models import workload

        result: Any = tuple(workload(spec, 0))
    else:
        result = call_model_function(spec)
    model = model_of(result)
    variables = model_variables(model)
    if not any(variable.numel for variable in variables):
        raise ConfigError(f"{spec} has no trainable variable, so there is nothing to exchange")
    loss = None if result is model or len(result) < 2 else result[1]
    if loss is not None and not callable(loss):
        raise ConfigError(f"(model, loss, samples): loss takes the model, and is no {type(loss).__name__}")
    return TrainedModel(model, loss, variables, framework_of(model))


def choose_cluster(ranks: int | None, resources: Path | None, calibration: Calibration | None) -> Cluster:
    """Return the cluster of a file, so many ranks on one node, or the cluster of a calibration.

    Raises:
        ConfigError: none is given, two are, or there is one rank only.
    """
    if ranks is not None and resources is not None:
        raise ConfigError(f"{resources} says how many ranks there are; -n is for planning without a cluster's file")
    if resources is None and calibration is not None:
        cluster: Cluster | None = _calibrated_cluster(ranks, calibration)
    else:
        cluster = load_cluster(resources, ranks)
    if cluster is None:
        raise ConfigError("say for how many ranks: -n 8, or the cluster's file: -r cluster.yaml")
    if cluster.world_size < 2:
        raise ConfigError("one rank alone exchanges nothing; plan for 2 or more")
    return cluster


def _calibrated_cluster(ranks: int | None, calibration: Calibration) -> Cluster:
    """Return the calibration's nodes, or as many nodes like them as have so many ranks."""
    hosts = calibration.key.hosts
    if ranks is None or ranks == calibration.key.ranks:
        return Topology([name for name, count in hosts.items() for _ in range(count)])
    if len(hosts) == 1:
        return OneNode(ranks)
    per_node = max(hosts.values())
    if ranks % per_node or ranks < 2 * per_node:
        raise ConfigError(
            f"the calibration is of {calibration.key.ranks} ranks on {len(hosts)} nodes: -n {ranks} does not say on "
            "how many nodes; name the cluster's file with -r"
        )
    return Topology([f"node{rank // per_node}" for rank in range(ranks)])


def read_calibration(path: Path, framework: str) -> Calibration:
    """Read a calibration that is of the last 30 days, of these versions, and of the model's framework.

    Args:
        path: the file.
        framework: the model's framework; "numpy" takes any.

    Raises:
        ConfigError: the calibration is another; the message names the file and the difference.
    """
    key = read(path).key
    here = Key.of(LocalBackend(), ["here"], framework, key.threads)
    expected = key.framework if framework == "numpy" else here.framework
    return read(path, replace(key, framework=expected, grace=here.grace, python=here.python))


def choose_costs(auto: Auto, cluster: Cluster, calibration: Calibration | None, path: Path | None) -> tuple[Costs, str]:
    """Return the costs of exchanges and codecs, and the source of those of the links, in words.

    Costs are the calibration's as far as it has them, except for links that are described.

    Args:
        auto: the description of links by the user.
        cluster: the ranks and their nodes.
        calibration: measurements of the links, the codecs, or both.
        path: the file of the calibration.

    Raises:
        ConfigError: the calibration is of links between other nodes, or of none.
    """
    nodes = len(set(cluster.ranks))
    measured = calibration is not None and calibration.network is not None
    described = auto.bandwidth is not None or (bandwidths(cluster) is not None and not measured)
    if calibration is not None and not described:
        if auto.latency is not None:
            raise ConfigError(
                "--latency beside a calibration needs --bandwidth: else the links are those that it measured"
            )
        if calibration.network is None:
            raise ConfigError(
                f"{path}: was made by one rank alone, and has no times of collectives. {AGAIN}, by all ranks; or say "
                "--bandwidth"
            )
        key = calibration.key
        if nodes != len(key.hosts):
            raise ConfigError(
                f"{path}: is for another cluster: it has {key.ranks} ranks on {len(key.hosts)} "
                f"node{'s' * (len(key.hosts) != 1)}, and there are {cluster.world_size} on {nodes}. {AGAIN}; or say "
                "--bandwidth"
            )
        extended = "" if cluster.world_size == key.ranks else f"; what {cluster.world_size} take follows by formula"
        return calibration.costs(), f"as measured over {key.engine} by {key.ranks} ranks{extended}"
    costs = auto.costs(cluster)
    links = links_of(costs.network)
    assert links is not None
    between = "of the slowest node" if links.sharing > 1 else "between ranks"
    assumed = "" if described else ", assumed: say --bandwidth, -r or --calibration"
    source = f"{of_rate(links.bandwidth * 8)} {between}, {links.latency * 1e6:.3g} us a message{assumed}"
    if calibration is not None:
        costs = calibration.costs(network=costs.network)
    return costs, source


def choose_timeline(model: TrainedModel, given: Mapping[str, float], steps: LocalSteps | None) -> tuple[Timeline, str]:
    """Return the times of the model's step, and their source in words.

    Args:
        model: the model.
        given: seconds of forward, backward and optimizer, as far as the user gave them.
        steps: steps that were measured, if there are any.
    """
    base = timeline(model.variables, given.get("backward", 0.0)) if steps is None else steps.timeline
    seconds = {part: given.get(part, getattr(base, part)) for part in PARTS}
    ratio = seconds["backward"] / base.backward if base.backward else 0.0
    ready = {name: min(seconds["backward"], when * ratio) for name, when in base.ready.items()}
    missing = ", ".join(part for part in PARTS if part not in given)
    sources = [f"{', '.join(given)} as given"] if given else []
    if missing and steps is not None:
        sources.append(f"{missing} as measured here, on one process")
    elif missing:
        sources.append(f"{missing} 0: let the function return (model, loss, samples), or say how long they take")
    return Timeline(ready, **seconds), "; ".join(sources)


def build_problem(
    model: TrainedModel,
    auto: Auto,
    cluster: Cluster,
    calibration: Calibration | None,
    path: Path | None,
    given: Mapping[str, float],
    codecs: str | None,
    progress: ShowProgress,
) -> tuple[Problem, dict[str, str]]:
    """Measure what is not known yet, and return the problem, and the source of each kind of figures in words.

    Args:
        model: the model.
        auto: the wishes of the user.
        cluster: the ranks and their nodes.
        calibration: measurements of the cluster, if there are any.
        path: their file.
        given: seconds of forward, backward and optimizer, as far as the user gave them.
        codecs: one of :data:`CODECS`; None for those of the calibration, or to measure them where there is none.
        progress: called with the operation, and the part of all that is done.

    Raises:
        ConfigError: the inputs do not go together, or the model's steps fail.
    """
    costs, links = choose_costs(auto, cluster, calibration, path)
    measures = codecs == "measure" or (codecs is None and calibration is None)
    steps = None
    if model.loss is not None and (measures or len(given) < len(PARTS)):
        steps = run_steps(
            model.model, model.loss, model.variables, lambda operation, done: progress(operation, 0.2 * done)
        )
    step_times, compute = choose_timeline(model, given, steps)
    gradients = {} if steps is None else steps.gradients
    problem = replace(auto.problem(model.variables, cluster), timeline=step_times)
    source = f"as measured by grace calibrate, {path}"
    errors = "as expected of synthetic gradients"
    if measures:
        known = costs.codecs if calibration is not None else {}
        problem = measure_methods(
            problem, model.framework, gradients, lambda operation, done: progress(operation, 0.2 + 0.6 * done)
        )
        costs = replace(costs, codecs={**known, **problem.costs.codecs})
        source = f"as measured here, on {'the' if gradients else 'random'} gradients of this model"
        errors = "as measured on the gradients" if gradients else errors
    elif codecs == "usual":
        costs = replace(costs, codecs=DefaultCodecs())
        source = "as measured elsewhere"
    problem = replace(problem, costs=replace(costs, rows={} if steps is None else steps.rows))
    size = of_bytes(sum(v.nbytes for v in model.variables))
    sources = {
        "model": f"{len(model.variables)} variables, {size} of gradients",
        "ranks": f"{cluster.world_size} on {problem.nodes} node{'s' * (problem.nodes != 1)}",
        "links": links,
        "compute": compute,
        "codecs": source,
        "errors": errors,
    }
    return problem, sources


def measure_methods(problem: Problem, framework: str, gradients: Mapping[str, Any], progress: ShowProgress) -> Problem:
    """Return the problem with the codecs of all methods, and their errors, measured on gradients.

    Args:
        problem: the problem.
        framework: the framework of gradients.
        gradients: gradients by name; without any, codecs are measured on random ones, whose errors do not count.
        progress: called with the method, and the part that is done.

    Raises:
        ConfigError: all gradients are sparse, and none is known.
    """
    random = np.random.default_rng(problem.seed)
    samples = gradients or random_gradients(framework, problem.variables, random)
    if not samples:
        raise ConfigError("all gradients are sparse, and none is known: let the function return (model, loss) too")
    errors = replace(problem.errors, tables={name for name, x in gradients.items() if is_table(x)})
    found, _ = measured(replace(problem, errors=errors), LocalBackend(), samples, progress=progress)
    return found if gradients else replace(found, errors=errors)
