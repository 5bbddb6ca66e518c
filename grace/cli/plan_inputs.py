"""Inputs of ``grace plan``: the cluster, its links, the model's times, and costs and errors of methods."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grace.backends.topology import Topology
from grace.bench.common.options import option, split
from grace.bench.common.progress import ShowProgress
from grace.bench.common.text import of_bytes, of_rate
from grace.cli.calibration_file import AGAIN, Calibration, Key, read
from grace.cli.inputs import (
    MOST_RANKS,
    Loss,
    Model,
    call_model_function,
    framework_of,
    load_cluster,
    model_of,
    model_variables,
    random_gradients,
)
from grace.cli.local_steps import LocalSteps, run_steps
from grace.core.backend import LocalBackend
from grace.core.compressor import Tensor
from grace.core.quantities import SECONDS, parse_quantity
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.exchange.sparse_rows import SparseRows
from grace.planner.auto_planner import measure_problem
from grace.planner.builders.auto import Auto, timeline
from grace.planner.codecs import is_table
from grace.planner.costs import DefaultCodecs
from grace.planner.error_budget import REFERENCE
from grace.planner.exchange_costs import Costs
from grace.planner.network import links_of
from grace.planner.problem import Problem
from grace.planner.step_simulation import Timeline
from grace.strategy.builder import Cluster, OneNode, bandwidths

CODECS = ("measure", "usual")
PARTS = ("forward", "backward", "optimizer")


def _time(part: str, help: str) -> Any:
    """Return the option of the time of a step's part."""
    form = f"--{part} is a time with its unit, as in 12ms or 0.5s"
    parse = partial(parse_quantity, units=SECONDS, form=form)
    return option(None, help, parse=parse, show_default="measured here")


def _specs(texts: list[str]) -> list[str] | None:
    specs = [spec for text in texts for spec in split(text)]
    if texts and not specs:  # a shell's variable that is not set
        raise ConfigError("--methods: at least one is needed; leave it out for those that offer themselves")
    return specs or None


@dataclass
class PlanRequest:
    """Options that say what is planned for; ``auto`` is the builder that they make, ``times`` are given seconds."""

    ranks: int | None = option(
        None,
        "Number of ranks, on one machine. For several machines use --resources.",
        "--ranks",
        "-n",
        min=1,
        max=MOST_RANKS,
    )
    resources: Path | None = option(
        None, "A file that describes the cluster: its nodes, and the bandwidth of each.", "--resources", "-r"
    )
    bandwidth: str | None = option(
        None, "Bandwidth of each rank's link, as in 100mbit or 2.5gbit.", show_default="10gbit"
    )
    latency: str | None = option(None, "Time that one message takes over the link, as in 50us.", show_default="50us")
    calibration: Path | None = option(
        None, "A file that grace calibrate wrote: the links and methods are as it measured them."
    )
    forward: float | None = _time("forward", "Time of a step's forward pass, as in 12ms.")
    backward: float | None = _time("backward", "Time of a step's backward pass.")
    optimizer: float | None = _time("optimizer", "Time of the optimizer's step.")
    codecs: str | None = option(
        None,
        "Source of the times of compressing and decompressing: measure (on this machine, with this model's gradients) "
        "or usual (typical figures of another machine).",
        show_default="the calibration's, or measure",
    )
    quality: str = option(
        "feedback",
        "How much compression may change gradients. exact: not at all; half: they become 16-bit floats; unbiased: they "
        "are right on average; feedback: what is left out is added in later steps.",
    )
    methods: list[str] | None = option(
        None,
        "Compressors to choose from, separated by commas; may be repeated.",
        parse=_specs,
        repeated=True,
        show_default="those that offer themselves",
    )
    reference: str = option(
        REFERENCE,
        "A method that is known to train well. On a matrix, no other method may have a larger error than it.",
    )
    seed: int = option(0, "Seed of methods that draw random numbers.", min=0)

    def __post_init__(self) -> None:
        if self.codecs not in (None, *CODECS):
            raise ConfigError(f"--codecs is {' or '.join(CODECS)}, not {self.codecs!r}")
        given = {part: getattr(self, part) for part in PARTS}
        self.times: dict[str, float] = {part: seconds for part, seconds in given.items() if seconds is not None}
        self.auto = Auto(
            quality=self.quality,
            methods=self.methods,
            reference=self.reference,
            bandwidth=self.bandwidth,
            latency=self.latency,
            seed=self.seed,
        )


class TrainedModel(NamedTuple):
    """Model of torch, TensorFlow or, as a list of variables, "numpy"; and the loss of a batch for it, if there is
    one."""

    model: Model
    loss: Loss | None
    variables: list[Variable]
    framework: str


def load_model(spec: str) -> TrainedModel:
    """Return the model of ``module:function``, or one of ``grace bench step`` by its name."""
    if spec.isidentifier():
        from grace.bench.workloads.models import workload

        result: object = tuple(workload(spec, 0))
    else:
        result = call_model_function(spec)
    model = model_of(result)
    variables = model_variables(model)
    if not any(variable.numel for variable in variables):
        found = f"all trainable variables of {spec} are empty" if variables else f"{spec} has no trainable variable"
        raise ConfigError(f"{found}, so there is nothing to exchange")
    loss = result[1] if isinstance(result, tuple) and result is not model and len(result) > 1 else None
    if loss is not None and not callable(loss):
        raise ConfigError(f"(model, loss, samples): loss takes the model, and is no {type(loss).__name__}")
    return TrainedModel(model, loss, variables, framework_of(model))


def choose_cluster(request: PlanRequest, calibration: Calibration | None) -> Cluster:
    """Return the cluster of a file, so many ranks on one node, or the cluster of a calibration."""
    ranks, resources = request.ranks, request.resources
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
    """Read a calibration that is of the last 30 days, of these versions, and of the model's framework; "numpy" takes
    any. A ConfigError names the file and the difference."""
    key = read(path).key
    here = Key.of_run(LocalBackend(), ["here"], framework, key.threads)
    expected = key.framework if framework == "numpy" else here.framework
    return read(path, replace(key, framework=expected, grace=here.grace, python=here.python))


def choose_costs(request: PlanRequest, cluster: Cluster, calibration: Calibration | None) -> tuple[Costs, str]:
    """Return the costs of exchanges and codecs, and the source of those of the links, in words.

    Costs are the calibration's as far as it has them, except for links that are described.

    Raises:
        ConfigError: the calibration is of links between other nodes, or of none.
    """
    auto, path = request.auto, request.calibration
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
        return calibration.costs(calibration.network), f"as measured over {key.engine} by {key.ranks} ranks{extended}"
    costs = auto.costs(cluster)
    links = links_of(costs.network)
    assert links is not None
    between = "of the slowest node" if links.sharing > 1 else "between ranks"
    assumed = "" if described else ", assumed: say --bandwidth, -r or --calibration"
    source = f"{of_rate(links.bandwidth * 8)} {between}, {links.latency * 1e6:.3g} us a message{assumed}"
    if calibration is not None:
        costs = calibration.costs(costs.network)
    return costs, source


def choose_timeline(model: TrainedModel, given: Mapping[str, float], steps: LocalSteps | None) -> tuple[Timeline, str]:
    """Return the times of the model's step, given or measured by some steps, and their source in words."""
    base = timeline(model.variables, given.get("backward", 0.0)) if steps is None else steps.timeline
    seconds = {part: given.get(part, getattr(base, part)) for part in PARTS}
    # gradients are ready at the same fractions of backward, however long it takes
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
    request: PlanRequest,
    cluster: Cluster,
    calibration: Calibration | None,
    progress: ShowProgress,
) -> tuple[Problem, dict[str, str]]:
    """Measure what is not known yet, and return the problem, and the source of each kind of figures in words.

    ``progress`` is called with the operation, and the part of all that is done.
    """
    costs, links = choose_costs(request, cluster, calibration)
    measures = request.codecs == "measure" or (request.codecs is None and calibration is None)
    steps = None
    if model.loss is not None and (measures or len(request.times) < len(PARTS)):
        steps = run_steps(
            model.model, model.loss, model.variables, lambda operation, done: progress(operation, 0.2 * done)
        )
    step_times, compute = choose_timeline(model, request.times, steps)
    gradients = {} if steps is None else steps.gradients
    problem = replace(request.auto.problem(model.variables, cluster), timeline=step_times)
    source = f"as measured by grace calibrate, {request.calibration}"
    errors = "as expected of synthetic gradients"
    if measures:
        known = costs.codecs if calibration is not None else {}
        problem = measure_on_gradients(
            problem, model.framework, gradients, lambda operation, done: progress(operation, 0.2 + 0.6 * done)
        )
        costs = replace(costs, codecs={**known, **problem.costs.codecs})
        source = f"as measured here, on {'the' if gradients else 'random'} gradients of this model"
        errors = "as measured on the gradients" if gradients else errors
    elif request.codecs == "usual":
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


def measure_on_gradients(
    problem: Problem, framework: str, gradients: Mapping[str, Tensor | SparseRows], progress: ShowProgress
) -> Problem:
    """Return the problem with the codecs of all methods, and their errors, measured on gradients.

    Without gradients, codecs are measured on random ones of the framework, whose errors do not count.
    """
    random = np.random.default_rng(problem.seed)
    samples = gradients or random_gradients(framework, problem.variables, random)
    if not samples:
        raise ConfigError("all gradients are sparse, and none is known: let the function return (model, loss) too")
    errors = replace(problem.errors, tables={name for name, x in gradients.items() if is_table(x)})
    found, _ = measure_problem(replace(problem, errors=errors), LocalBackend(), samples, progress=progress)
    return found if gradients else replace(found, errors=errors)
