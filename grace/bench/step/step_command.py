"""``grace bench step``: the costs of a training step with each method, and the gain of compression."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

import grace
from grace.bench.common import options
from grace.bench.common.progress import ScenarioBars
from grace.bench.lifecycle import BenchmarkRun
from grace.bench.ranks.rank_program import Event
from grace.bench.step import step_scenarios
from grace.bench.step.step_settings import (
    DEVICE_METHODS,
    DEVICE_RANKS,
    DEVICE_RATES,
    QUICK_METHODS,
    QUICK_ROUNDS,
    StepSettings,
)
from grace.bench.step.step_table import show
from grace.errors import ConfigError

NAME = "grace bench step"


@options.with_options(StepSettings)
def command(
    given: dict[str, Any],
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
    here = options.launched()
    on_device = device == "cuda"
    sharded = given.get("sharded", 0)
    defaults: dict[str, Any] = {"rounds": QUICK_ROUNDS} if quick else {}
    if quick or sharded:
        defaults["methods"] = list(QUICK_METHODS)
    if device != "cpu":
        check_device(device, here, given)
        methods = QUICK_METHODS if quick else DEVICE_METHODS
        defaults |= {"model": "gpt2", "methods": list(methods), "ranks": [DEVICE_RANKS], "bandwidths": [*DEVICE_RATES]}
        given["baselines"] = []
    if here and sharded:
        given["ranks"] = [2 * sharded]  # until they have joined, and are counted
    settings = StepSettings(**{**defaults, **given})
    if here and "bandwidths" in given:
        raise ConfigError("--bandwidth starts ranks of its own; these ranks were started by a launcher")
    (run_on_device if on_device else run)(settings, out, here).report_and_exit(Console(highlight=False))


def check_device(device: str, here: bool, given: dict[str, Any]) -> None:
    """Refuse options that cannot be measured on one GPU, before anything starts.

    Raises:
        ConfigError: there is no GPU, or an option needs ranks.
    """
    from grace.bench.common.clocks import missing

    if device != "cuda":
        raise ConfigError(f"--device is cpu or cuda, not {device!r}")
    flags = {"ddp_hook": "--ddp-hook", "sharded": "--sharded", "reduce_scatter": "--reduce-scatter"}
    needs_ranks = [flag for field, flag in {**flags, "strategies": "--strategy"}.items() if given.get(field)]
    if given.get("engine", "torch") != "torch":
        needs_ranks.append(f"--engine {given['engine']}")
    if here:
        needs_ranks.append("a launcher")
    if needs_ranks:
        raise ConfigError(
            f"--device cuda pretends all ranks but one, over a simulated wire: leave out {needs_ranks[0]}"
        )
    why = missing()
    if why:
        raise ConfigError(f"--device cuda: {why}; use --device cpu")


def run_on_device(settings: StepSettings, out: Path, here: bool = False) -> BenchmarkRun:
    """Measure on one GPU over simulated wires, show and save."""
    from grace.bench.step import one_gpu

    if len(settings.ranks) > 1:
        raise ConfigError("--device cuda takes one number of --ranks")
    console = Console(highlight=False)
    running = BenchmarkRun(NAME, "step", settings.about(), out, interrupted="interrupted")
    with console.status("") as status:
        running.measure(lambda: one_gpu.run(running, settings, lambda what: status.update(escape(what))))
    show(console, running.results)
    for line in one_gpu.notes(running.results):
        console.print(line, markup=False)
    return running


def run(
    settings: StepSettings, out: Path, here: bool = False, shortfalls: Mapping[str, float | None] | None = None
) -> BenchmarkRun:
    """Measure, show and save; return the benchmark with its results and its exit code.

    With ``here`` this process is one of several ranks, of which only the first writes and shows. With ``shortfalls`` of
    trained methods the verdict recommends only those that learn.
    """
    console = Console(highlight=False, quiet=here and grace.init().rank != 0)
    about = {**settings.about(), **({} if shortfalls is None else {"shortfalls": dict(shortfalls)})}
    running = BenchmarkRun(NAME, "step", about, None if console.quiet else out)

    def measure() -> None:
        with ScenarioBars(console) as bars:

            def watch(scenario: str, event: Event) -> None:
                bars.show(scenario, event)
                if "times_ms" in event:
                    running.save()

            (step_scenarios.run_here if here else step_scenarios.run)(settings, running.results, watch)

    running.measure(measure)
    if not console.quiet:
        show(console, running.results)
    return running
