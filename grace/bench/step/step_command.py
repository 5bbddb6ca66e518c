"""``grace bench step``: the costs of a training step with each method, and the gain of compression."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

import grace
from grace.backends import launchers
from grace.bench.common import options
from grace.bench.common.progress import ScenarioBars
from grace.bench.lifecycle import BenchmarkRun
from grace.bench.ranks.scenario import run_scenario
from grace.bench.step import step_settings
from grace.bench.step.step_rows import ScenarioRows
from grace.bench.step.step_settings import StepSettings
from grace.errors import ConfigError


@options.with_options(StepSettings)
def command(
    given: options.Given,
    device: Annotated[str, typer.Option(help="cpu, or cuda: steps on one GPU over a simulated wire.")] = "cpu",
    out: options.Folder = Path("out/step"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer methods and rounds: under two minutes.")] = False,
) -> None:
    """Time training steps with Grace's methods and with what people use without it.

    Each step's time is split into compute (a step of the same ranks without any
    communication), codec (Grace's encoding and decoding) and exposed
    communication: what remains, for which the step waits. Bytes are those of
    the rank that moved most, counted at its sockets. The rows take turns, so
    what else the machine does hits all alike; the table has medians.

    Baselines: DistributedDataParallel plain, with torch's fp16 and bf16 hooks
    where the engine takes them, and with torch's PowerSGD hook; Horovod plain
    and with its fp16; and no communication at all, which nothing can beat.

    Started by torchrun, horovodrun or mpirun it measures over the network
    between those ranks, as in: torchrun ... --no-python grace bench step

    With --sharded 2 of 4 ranks two share a copy of the model, by FSDP2, and what
    its copies exchange is compared: by torch's HSDP, and by Grace's methods. An
    emulated link joins the shard groups; within each there is the loopback. The
    bound is shard groups that train alone. Bytes are those that leave a group.

    With --device cuda one process trains on one GPU (NCCL takes no two ranks on
    it), and the wire is simulated: the exchange waits for a kernel that sleeps as
    long as its bytes take. codec is what the exchange adds without a wire, exposed
    what the wire adds to that, and waits of the host for the GPU are counted.
    """
    launcher = launchers.detect()
    here = launcher is not None and launcher.size > 1
    sharded = given.get("sharded", 0)
    defaults: options.Given = {"rounds": step_settings.QUICK_ROUNDS} if quick else {}
    if quick or sharded:
        defaults["methods"] = list(step_settings.QUICK_METHODS)
    if device != "cpu":
        check_on_device(device, here, given)
        defaults = {**step_settings.ON_DEVICE, **defaults}
        given["baselines"] = []
    if here and sharded:
        given["ranks"] = [2 * sharded]  # until they have joined, and are counted
    settings = StepSettings(**{**defaults, **given})
    if here and "bandwidths" in given:
        raise ConfigError("--bandwidth starts ranks of its own; these ranks were started by a launcher")
    running = run_on_device(settings, out) if device == "cuda" else run(settings, out, here)
    running.report_and_exit()


def check_on_device(device: str, here: bool, given: options.Given) -> None:
    """Raise a ConfigError before anything starts if there is no GPU, or an option needs ranks."""
    from grace.bench.common.clocks import check_device

    flags = {"ddp_hook": "--ddp-hook", "sharded": "--sharded", "reduce_scatter": "--reduce-scatter"}
    flags |= {"strategies": "--strategy", "baselines": "--baselines"}
    needs_ranks = [flag for field, flag in flags.items() if given.get(field)]
    if given.get("engine", "torch") != "torch":
        needs_ranks.append(f"--engine {given['engine']}")
    needs_ranks += ["a launcher"] if here else []
    if device == "cuda" and needs_ranks:
        raise ConfigError(
            f"--device cuda pretends all ranks but one, over a simulated wire: leave out {needs_ranks[0]}"
        )
    check_device(device)


def run_on_device(settings: StepSettings, out: Path) -> BenchmarkRun:
    """Measure on one GPU over simulated wires, show and save."""
    from grace.bench.step import one_gpu

    if len(settings.ranks) > 1:
        raise ConfigError("--device cuda takes one number of --ranks")
    running = BenchmarkRun("step", settings.about(), out, interrupted="interrupted")
    return running.measure(lambda: one_gpu.run(running, settings))


def run(
    settings: StepSettings, out: Path, here: bool = False, shortfalls: Mapping[str, float | None] | None = None
) -> BenchmarkRun:
    """Measure, show and save; return the benchmark with its results and its exit code.

    With ``here`` this process is one of several ranks, of which only the first writes and shows. With ``shortfalls`` of
    trained methods the verdict recommends only those that learn.
    """
    about = {**settings.about(), **({} if shortfalls is None else {"shortfalls": dict(shortfalls)})}
    running = BenchmarkRun("step", about, None if here and grace.init().rank != 0 else out)
    return running.measure(lambda: (_measure_here if here else _measure)(settings, running))


def _measure(settings: StepSettings, running: BenchmarkRun) -> None:
    """Measure every scenario; rows and verdicts are added to the results."""
    program = ["-m", "grace.bench.step.step_rank"]
    with ScenarioBars(running.console) as bars:
        for ranks, rate in settings.scenarios:
            rows = ScenarioRows(running, bars, ranks, rate, settings.engines)
            for engine in settings.engines:
                add = partial(rows.add, engine)
                run_scenario(program, settings, [engine], ranks, rate, add, engine, settings.nodes(ranks))
            rows.conclude()


def _measure_here(settings: StepSettings, running: BenchmarkRun) -> None:
    """Measure over the network between the ranks that a launcher has started; rank 0 fills in the results."""
    from grace.bench.step.step_rank import measure

    backend = grace.init()
    settings = dataclasses.replace(settings, engine=backend.name, ranks=[backend.size], bandwidths=[None])
    running.results.settings = settings.about()
    if backend.rank != 0:
        measure(settings, backend, backend.name, lambda event: None)
        return
    with ScenarioBars(running.console) as bars:
        rows = ScenarioRows(running, bars, backend.size, None, [backend.name])
        rows.add(backend.name, {"engine": backend.name})
        measure(settings, backend, backend.name, partial(rows.add, backend.name))
        rows.conclude()
