"""``grace plan``: a strategy chosen by prediction, before any cluster exists."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from grace.cli.consoles import bar, wide_console
from grace.cli.plan_inputs import (
    CODECS,
    Inputs,
    Model,
    as_methods,
    calibration_of,
    cluster_of,
    inputs_of,
    seconds_of,
)
from grace.cli.plan_tables import show
from grace.core.atomic_files import atomic_write
from grace.core.version import __version__
from grace.errors import ConfigError
from grace.planner.builders.auto import Auto
from grace.planner.error_budget import REFERENCE
from grace.planner.explain import Plan, plan_of
from grace.planner.greedy import find_candidates
from grace.strategy.plan import Strategy

FORMAT = 1
"""Of the file that --json writes."""


def plan(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="module:function that returns (model, loss, samples), where loss(model) is the loss of a batch; or a "
            "model alone; or a name that grace bench step knows.",
        ),
    ],
    ranks: Annotated[int | None, typer.Option("--ranks", "-n", min=1, help="How many ranks, without a file.")] = None,
    resources: Annotated[
        Path | None, typer.Option("--resources", "-r", help="The cluster's file, with its nodes' bandwidths.")
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Of each rank's link, as in 100mbit or 2.5gbit.", show_default="10gbit")
    ] = None,
    latency: Annotated[str | None, typer.Option(help="Of a message, as in 50us.", show_default="50us")] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="A file of grace calibrate: links and methods as measured.")
    ] = None,
    forward: Annotated[
        str | None, typer.Option(help="A step's forward time, as in 12ms.", show_default="measured here")
    ] = None,
    backward: Annotated[str | None, typer.Option(help="Likewise backward.", show_default="measured here")] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="Likewise the optimizer's step.", show_default="measured here")
    ] = None,
    codecs: Annotated[
        str | None,
        typer.Option(
            help="What methods compute: measure (here, on this model's gradients) or usual (as measured elsewhere).",
            show_default="the calibration's, or measure",
        ),
    ] = None,
    quality: Annotated[str, typer.Option(help="What may be lost: exact, half, unbiased or feedback.")] = "feedback",
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--methods",
            help="Compressors to choose from, separated by commas; may be repeated.",
            show_default="those that offer themselves",
        ),
    ] = None,
    reference: Annotated[str, typer.Option(help="The method whose error on a matrix others may have.")] = REFERENCE,
    seed: Annotated[int, typer.Option(min=0, help="Of random methods.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the strategy, for grace launch --strategy.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write candidates, reasons and predictions.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write an HTML page: a step's Gantt chart, other ranks and bandwidths.")
    ] = None,
    validate: Annotated[
        bool,
        typer.Option(
            "--validate",
            help="Measure instead, with real ranks here, whether steps take what is predicted: grace bench plan of "
            "this model, these ranks (2), this --bandwidth (an emulated link; loopback) and these --methods.",
        ),
    ] = False,
) -> None:
    """Choose by prediction which variables to compress, with what, carried how; or say: do not compress.

    grace plan --model train:net -n 8 --bandwidth 1gbit --latency 50us -o s.yaml
    grace plan --model train:net -r cluster.yaml --report plan.html
    grace plan --model train:net --calibration c.json

    A step is played through: when each gradient is ready, what encoding takes,
    what the wire takes, what hides behind backward. What the model computes is
    measured here, on one process, unless you say it; what methods take too,
    unless a calibration says it. From the best method for all variables on,
    each variable gets what shortens the step most within a bound on its error,
    and the plan is taken if it is 3 % faster than plain all-reduce.

    grace launch -n 8 --strategy s.yaml -- python train.py then trains with it.
    strategy="auto" plans by itself while training runs, and tries what it plans.
    """
    console = wide_console(150)
    if validate:
        _validate(model, ranks, bandwidth, as_methods(methods), console)
        return
    if codecs not in (None, *CODECS):
        raise ConfigError(f"--codecs is {' or '.join(CODECS)}, not {codecs!r}")
    given = {
        "forward": seconds_of(forward, "--forward"),
        "backward": seconds_of(backward, "--backward"),
        "optimizer": seconds_of(optimizer, "--optimizer"),
    }
    auto = Auto(
        quality=quality,
        methods=as_methods(methods),
        reference=reference,
        bandwidth=bandwidth,
        latency=latency,
        seed=seed,
    )
    for path in filter(None, (output, json_file, report)):
        _check_writable(path)
    if ranks is None and resources is None and calibration is None:
        cluster_of(ranks, resources, None)  # raises, before a model is made
    trained = Model.of(model)
    calibrated = None if calibration is None else calibration_of(calibration, trained.framework)
    cluster = cluster_of(ranks, resources, calibrated)
    with bar(console) as told:
        inputs = inputs_of(trained, auto, cluster, calibrated, calibration, given, codecs, told)
        candidates = find_candidates(inputs.problem, lambda what, done: told(what, 0.8 + 0.2 * done))
        found = plan_of(inputs.problem, candidates)
    show(found, inputs.about, console)
    made = auto.strategy((), cluster).builder
    strategy = dataclasses.replace(found.chosen.strategy, builder=made)
    _write(strategy, found, inputs, console, output, json_file, report)


def _validate(model: str, ranks: int | None, rate: str | None, methods: list[str] | None, console: Console) -> None:
    from grace.bench.common.options import bandwidths
    from grace.bench.plan.plan_command import SWEEP
    from grace.bench.plan.plan_settings import METHODS, PlanSettings

    SWEEP.run(PlanSettings([model], bandwidths(rate), [ranks or 2], methods or list(METHODS)), console=console)


def document(found: Plan, inputs: Inputs, strategy: Strategy) -> dict[str, Any]:
    """Return all of it, as JSON holds it.

    Args:
        found: the plan.
        inputs: what was planned.
        strategy: the one that is taken.
    """
    problem = inputs.problem
    return {
        "grace_plan": FORMAT,
        "grace": __version__,
        "about": inputs.about,
        "why": found.why,
        "compresses": found.compresses,
        "ranks": problem.cluster.world_size,
        "timeline": dataclasses.asdict(problem.timeline),
        "seed": problem.seed,
        "strategy": strategy.to_dict(),
        "plan": found.to_dict(),
    }


def _write(
    strategy: Strategy,
    found: Plan,
    inputs: Inputs,
    console: Console,
    output: Path | None,
    json_file: Path | None,
    report: Path | None,
) -> None:
    written = []
    if output is not None:
        from grace.strategy import schema

        schema.dump(strategy, output)
        written.append(f"{output}: {len(strategy.plans)} variables, for {strategy.world_size} ranks")
    if json_file is not None:
        with atomic_write(json_file) as draft:
            draft.write_text(json.dumps(document(found, inputs, strategy), indent=1) + "\n", encoding="utf-8")
        written.append(str(json_file))
    if report is not None:
        from grace.bench.report.plan import write_plan

        write_plan(report, found, inputs.problem, inputs.about)
        written.append(f"{report} ({report.stat().st_size / 1000:.0f} kB)")
    for what in written:
        console.print(f"Wrote {escape(what)}", soft_wrap=True)


def _check_writable(path: Path) -> None:
    """Raise if a file could not be written in the end."""
    if path.is_dir():
        raise ConfigError(f"{path}: cannot be written: it is a folder")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: cannot be written: there is no folder {path.parent}")
