"""What ``grace plan`` plans from: the cluster, its links, what the model computes, and what methods take and lose."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grace.backends.topology import Topology
from grace.bench.common.text import of_bytes, of_rate
from grace.cli import local_steps
from grace.cli.model_variables import made_by, model_of, model_variables
from grace.core.backend import LocalBackend
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.planner.builders.auto import TIMES, Auto, quantity, timeline
from grace.planner.calibration import AGAIN, Calibration, Key, read
from grace.planner.codecs import is_table, measure
from grace.planner.costs import Codec
from grace.planner.default_costs import DefaultCodecs
from grace.planner.exchange_costs import Costs
from grace.planner.network import Levels, links_of
from grace.planner.planning import CODEC_SECONDS, measured_by
from grace.planner.problem import Problem, methods_of
from grace.planner.step import Timeline
from grace.strategy.builder import Cluster, OneNode, bandwidths

CODECS = ("measure", "usual")
Told = Callable[[str, float], Any]
PARTS = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        made: a model, or (model, loss, samples).
        variables: its own.
    """

    made: Any
    variables: list[Variable]

    @classmethod
    def of(cls, spec: str) -> "Model":
        """That of ``module:function``, or one of ``grace bench step``'s by its name.

        Raises:
            ConfigError: there is none, or it has nothing to exchange.
        """
        if spec.isidentifier():
            from grace.bench.workloads.models import workload

            made: Any = tuple(workload(spec, 0))
        else:
            made = made_by(spec)
        variables = model_variables(model_of(made))
        if not any(variable.numel for variable in variables):
            raise ConfigError(f"{spec} has no trainable variable, so there is nothing to exchange")
        return cls(made, variables)

    @property
    def model(self) -> Any:
        """It alone."""
        return model_of(self.made)

    @property
    def loss(self) -> Callable[[Any], Any] | None:
        """Of a batch; None if it came alone."""
        if self.made is self.model or len(self.made) < 2:
            return None
        if not callable(self.made[1]):
            raise ConfigError(f"(model, loss, samples): loss takes the model, and is no {type(self.made[1]).__name__}")
        return self.made[1]  # type: ignore[no-any-return]

    @property
    def framework(self) -> str:
        """Whose tensors it has."""
        return local_steps.framework_of(self.model)


@dataclass(frozen=True)
class Inputs:
    """What is planned, and where the figures come from.

    Attributes:
        problem: it.
        about: sentences: what was measured, given, or assumed.
    """

    problem: Problem
    about: dict[str, str] = field(default_factory=dict)


def cluster_of(ranks: int | None, resources: Path | None, calibration: Calibration | None) -> Cluster:
    """The ranks and their nodes: those of a file, so many on one node, or those that were calibrated.

    Raises:
        ConfigError: nobody says it, both do, or there is one rank only.
    """
    if ranks is not None and resources is not None:
        raise ConfigError(f"{resources} says how many ranks there are; -n is for planning without a cluster's file")
    found: Cluster
    if resources is not None:
        from grace.launch.cluster import Resources

        found = Resources.load(resources)
    elif calibration is not None:
        found = _calibrated(ranks, calibration)
    elif ranks is not None:
        found = OneNode(ranks)
    else:
        raise ConfigError("say for how many ranks: -n 8, or the cluster's file: -r cluster.yaml")
    if found.world_size < 2:
        raise ConfigError("one rank alone exchanges nothing; plan for 2 or more")
    return found


def _calibrated(ranks: int | None, calibration: Calibration) -> Cluster:
    """The calibration's nodes, or as many like them as have so many ranks."""
    hosts = calibration.key.hosts
    if ranks is None or ranks == calibration.key.ranks:
        return Topology([name for name, count in hosts for _ in range(count)])
    if len(hosts) == 1:
        return OneNode(ranks)
    each = max(count for _, count in hosts)
    if ranks % each or ranks < 2 * each:
        raise ConfigError(
            f"the calibration is of {calibration.key.ranks} ranks on {len(hosts)} nodes: -n {ranks} does not say on "
            "how many nodes; name the cluster's file with -r"
        )
    return Topology([f"node{rank // each}" for rank in range(ranks)])


def calibration_of(path: Path, framework: str) -> Calibration:
    """A calibration, if it is whole, of the last 30 days, and of these versions and this framework.

    Args:
        path: of the file.
        framework: of the model; "numpy" takes any.

    Raises:
        ConfigError: it is not; the message names the file and the difference.
    """
    key = read(path).key
    mine = Key.of(LocalBackend(), ["here"], framework, key.threads)
    same = key.framework if framework == "numpy" else mine.framework
    return read(path, replace(key, framework=same, grace=mine.grace, python=mine.python))


def costs_of(auto: Auto, cluster: Cluster, calibration: Calibration | None, where: Any) -> tuple[Costs, str]:
    """What exchanges and codecs take: from the calibration as far as it goes, but for links that are described.

    Args:
        auto: what the user said of links.
        cluster: the ranks and their nodes.
        calibration: of the links, the codecs, or both.
        where: its file, for messages.

    Raises:
        ConfigError: the calibration is of links between other nodes, or of none.
    """
    nodes = len(set(cluster.ranks))
    measured_links = calibration is not None and bool(calibration.curves)
    told = auto.bandwidth is not None or (bandwidths(cluster) is not None and not measured_links)
    if not told and auto.latency is not None and calibration is not None:
        raise ConfigError("--latency beside a calibration needs --bandwidth: else the links are those that it measured")
    if calibration is None or told:
        costs = auto.costs(cluster)
        links = links_of(costs.network)
        assert links is not None
        whose = "of the slowest node" if isinstance(costs.network, Levels) else "between ranks"
        given = "" if told else ", assumed: say --bandwidth, -r or --calibration"
        said = f"{of_rate(links.bandwidth * 8)} {whose}, {links.latency * 1e6:.3g} us a message{given}"
        if calibration is None:
            return costs, said
        made = calibration.costs(network=costs.network)
        return replace(made, inside=made.inside or costs.inside), said
    if not calibration.curves:
        raise ConfigError(
            f"{where}: was made by one rank alone, and has no times of collectives. {AGAIN}, by all ranks; or say "
            "--bandwidth"
        )
    key = calibration.key
    if nodes != len(key.hosts):
        raise ConfigError(
            f"{where}: is for another cluster: it has {key.ranks} ranks on {len(key.hosts)} "
            f"node{'s' * (len(key.hosts) != 1)}, and there are {cluster.world_size} on {nodes}. {AGAIN}; or say "
            "--bandwidth"
        )
    said = f"as measured over {key.engine} by {key.ranks} ranks"
    if cluster.world_size != key.ranks:
        said += f"; what {cluster.world_size} take follows by formula"
    return calibration.costs(), said


def computed(
    model: Model, given: Mapping[str, float | None], wanted: bool, told: Told
) -> tuple[Timeline, dict[str, Any], dict[str, float], str]:
    """When gradients are ready, the gradients themselves and the rows of sparse ones, and where that comes from.

    Args:
        model: it.
        given: seconds of forward, backward and optimizer, as far as the user says them.
        wanted: run steps even if all three are given, for the gradients.
        told: of progress.
    """
    known = {part: seconds for part, seconds in given.items() if seconds is not None}
    ran = None
    if model.loss is not None and (wanted or len(known) < len(PARTS)):
        ran = local_steps.run(model.model, model.loss, model.variables, told)
    usual = timeline(model.variables, known.get("backward", 0.0)) if ran is None else ran.timeline
    parts = {part: known.get(part, getattr(usual, part)) for part in PARTS}
    ratio = parts["backward"] / usual.backward if usual.backward else 0.0
    made = Timeline({n: min(parts["backward"], s * ratio) for n, s in usual.ready.items()}, **parts)
    where = []
    if known:
        where.append(f"{', '.join(known)} as given")
    if len(known) < len(PARTS):
        rest = [part for part in PARTS if part not in known]
        where.append(
            f"{', '.join(rest)} as measured here, on one process"
            if ran
            else f"{', '.join(rest)} 0: let the function return (model, loss, samples), or say how long they take"
        )
    return made, ran.gradients if ran else {}, ran.rows if ran else {}, "; ".join(where)


def inputs_of(
    model: Model,
    auto: Auto,
    cluster: Cluster,
    calibration: Calibration | None,
    calibrated: Path | None,
    given: Mapping[str, float | None],
    codecs: str | None,
    told: Told,
) -> Inputs:
    """All of it.

    Args:
        model, auto, cluster: what is planned.
        calibration, calibrated: it, and its file.
        given: as :func:`computed` takes it.
        codecs: one of :data:`CODECS`; None for the calibration's, or to measure where there is none.
        told: of progress, of which this is all.

    Raises:
        ConfigError: see the functions above.
    """
    costs, links = costs_of(auto, cluster, calibration, calibrated)
    measures = codecs == "measure" or (codecs is None and calibration is None)
    line, gradients, rows, compute = computed(model, given, measures, lambda what, done: told(what, 0.2 * done))
    problem = replace(auto.problem(model.variables, cluster), timeline=line)
    where, real = f"as measured by grace calibrate, {calibrated}", bool(gradients)
    if measures:
        known = costs.codecs if calibration is not None else {}
        problem = measured(problem, model.framework, gradients, lambda what, done: told(what, 0.2 + 0.6 * done))
        costs = replace(costs, codecs={**known, **problem.costs.codecs})
        where = f"as measured here, on {'the' if real else 'random'} gradients of this model"
    elif codecs == "usual":
        costs, where = replace(costs, codecs=DefaultCodecs()), "as measured elsewhere"
    problem = replace(problem, costs=replace(costs, rows=rows))
    lost = "as measured on the gradients" if measures and real else "as expected of synthetic gradients"
    about = {
        "model": f"{len(model.variables)} variables, {of_bytes(sum(v.nbytes for v in model.variables))} of gradients",
        "ranks": f"{cluster.world_size} on {(n := len(set(cluster.ranks)))} node{'s' * (n != 1)}",
        "links": links,
        "compute": compute,
        "codecs": where,
        "errors": lost,
    }
    return Inputs(problem, about)


def measured(problem: Problem, framework: str, gradients: Mapping[str, Any], told: Told) -> Problem:
    """Return the problem with the codecs of all methods, and their errors, measured on gradients.

    Args:
        problem: what is planned.
        framework: whose tensors gradients are.
        gradients: by name; random ones, whose errors tell nothing, are made if there are none.
        told: of progress.

    Raises:
        ConfigError: all gradients are sparse, and none is known.
    """
    known = gradients or local_steps.randoms(framework, problem.variables, problem.seed)
    if not known:
        raise ConfigError("all gradients are sparse, and none is known: let the function return (model, loss) too")
    errors = replace(problem.errors, tables={name for name, x in gradients.items() if is_table(x)})
    methods = methods_of(problem.methods, problem.quality, problem.ranks, bool(errors.tables))
    if problem.quality != "exact":
        methods += methods_of([errors.reference], "feedback", problem.ranks)
    choices = {choice.describe(): choice for choice in measured_by(methods, problem.variables)}
    codecs, lost = dict[str, Codec](), dict[str, Mapping[str, float]]()
    for i, (described, choice) in enumerate(choices.items()):
        told(described, i / len(choices))
        with contextlib.suppress(ConfigError):  # it makes none of these gradients smaller
            found = measure(choice, known, problem.ranks, problem.seed, CODEC_SECONDS)
            codecs[found.method] = found.codec
            lost[choice.compressor.spec] = found.errors
    if gradients:
        errors = replace(errors, measured=lost)
    return replace(problem, costs=replace(problem.costs, codecs=codecs), errors=errors)


def seconds_of(text: str | None, option: str) -> float | None:
    """A duration with its unit.

    Args:
        text: as given; None stays None.
        option: its name, for messages.

    Raises:
        ConfigError: it is none.

    >>> seconds_of("12ms", "--forward"), seconds_of("0.5 s", "--forward"), seconds_of(None, "--forward")
    (0.012, 0.5, None)
    """
    if text is None:
        return None
    found = quantity(text, TIMES)
    if not (math.isfinite(found) and found >= 0):
        raise ConfigError(f"{option} is a time with its unit, as in 12ms or 0.5s, not {text!r}")
    return found


def as_methods(texts: Sequence[str] | None) -> list[str] | None:
    """Specs, each option's separated by commas; None if there are none."""
    from grace.bench.common.options import split

    found = [spec for text in texts or () for spec in split(text)]
    return found or None
