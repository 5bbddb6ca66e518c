"""``grace bench step``: the costs of a training step with each method, and the gain of compression."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import grace
from grace.bench.common import options
from grace.bench.common.progress import Bar
from grace.bench.common.results import Results
from grace.bench.common.tables import figures_table
from grace.bench.common.text import of_bytes, scenario
from grace.bench.lifecycle import BenchmarkRun
from grace.bench.step import scenarios
from grace.bench.step.in_place import run_here
from grace.bench.step.settings import (
    DEVICE_LINKS,
    DEVICE_METHODS,
    DEVICE_RANKS,
    METHODS,
    QUICK_METHODS,
    QUICK_ROUNDS,
    ROUNDS,
    Event,
    Settings,
    about,
)
from grace.errors import ConfigError

NAME = "grace bench step"
ROOMY = 100
"""Width of the terminal, in characters, from which on all columns are shown."""
HOW_TO_READ = (
    "step: the median; ±: half of the quartiles' distance; codec: Grace's encoding and decoding; exposed: the "
    "communication that the step waits for, of baselines with their codec; sent, received: in a step, of the rank that "
    "moved most; wire: those bytes over the bandwidth."
)
OF_SHARDS = (
    "Of shard groups: bytes are those that left or entered a group, of the one that moved most, where links are "
    "emulated or nodes have addresses of their own; codec: of what replicas exchange. Shard groups alone exchange "
    "within each group only, and exposed is what the exchange between groups adds to that."
)


def command(
    model: Annotated[
        str | None,
        typer.Option(
            help="transformer, resnet, resnet50, gpt2, lstm, ncf, mlp, or module:function, which returns (model, loss, "
            "samples), where loss(model) is the loss of a batch of so many samples, on the device of its choice.",
            show_default="transformer, on a GPU gpt2",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda: steps on one GPU over a simulated wire.")] = "cpu",
    methods: Annotated[
        str | None,
        typer.Option(help="Compressor specs, separated by commas, or all.", show_default="ten, or four with --quick"),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option("--strategy", help="A strategy's file or builder to compare too; may be repeated."),
    ] = None,
    engine: Annotated[str, typer.Option(help="What moves Grace's payloads: torch, horovod or mpi.")] = "torch",
    ranks: Annotated[
        str | None,
        typer.Option(
            "--ranks",
            "-n",
            help="Processes to train on; several numbers as in 2,4 show the scaling.",
            show_default="2, on a GPU 8 that are pretended",
        ),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            help="Rates of emulated links, as in 10gbit,1gbit,100mbit (Linux, root); none is the loopback.",
            show_default="loopback, on a GPU 10gbit,25gbit",
        ),
    ] = None,
    baselines: Annotated[
        str, typer.Option(help="Of ddp and horovod, what to compare with where it is installed; or none.")
    ] = "ddp,horovod",
    rounds: Annotated[
        int | None, typer.Option(help="Blocks of steps of each row.", show_default="8, or 3 with --quick")
    ] = None,
    ddp_hook: Annotated[bool, typer.Option("--ddp-hook", help="Measure the methods as DDP's hooks too.")] = False,
    bucket_bytes: Annotated[
        int | None,
        typer.Option(help="Bytes on the wire that a collective of Grace's carries.", show_default="Grace's choice"),
    ] = None,
    sharded: Annotated[
        int,
        typer.Option(help="Ranks of a shard group (FSDP2), one node of emulated links.", show_default="0"),
    ] = 0,
    reduce_scatter: Annotated[
        str | None, typer.Option(help="A compressor of shard groups' reduce-scatters, to measure the methods with too.")
    ] = None,
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
    defaults: tuple[str, ...] = QUICK_METHODS if quick or sharded else METHODS
    here = options.launched()
    on_device = device == "cuda"
    if device != "cpu":
        check_device(device, here, ddp_hook, sharded, reduce_scatter, strategy, engine)
        defaults = QUICK_METHODS if quick else DEVICE_METHODS
    model = model or ("gpt2" if on_device else "transformer")
    ranks = ranks or (DEVICE_RANKS if on_device else "2")
    if here and sharded:
        ranks = str(2 * sharded)  # until they have joined, and are counted
    settings = Settings(
        model=model,
        methods=list(defaults) if methods is None else options.methods(methods),
        strategies=strategy or [],
        engine=engine,
        baselines=[] if baselines == "none" or on_device else options.split(baselines),
        ranks=options.integers(ranks, "--ranks"),
        bandwidths=options.bandwidths(bandwidth or (DEVICE_LINKS if on_device else None)),
        rounds=rounds if rounds is not None else QUICK_ROUNDS if quick else ROUNDS,
        ddp_hook=ddp_hook,
        bucket_bytes=bucket_bytes,
        sharded=sharded,
        reduce_scatter=reduce_scatter,
    )
    if here and bandwidth is not None:
        raise ConfigError("--bandwidth starts ranks of its own; these ranks were started by a launcher")
    (run_on_device if on_device else run)(settings, out, here).report_and_exit(Console(highlight=False))


def check_device(
    device: str, here: bool, ddp_hook: bool, sharded: int, reduce_scatter: Any, strategy: Any, engine: str
):
    """Refuse options that cannot be measured on one GPU, before anything starts.

    Raises:
        ConfigError: there is no GPU, or an option needs ranks.
    """
    from grace.bench.common.clocks import missing

    if device != "cuda":
        raise ConfigError(f"--device is cpu or cuda, not {device!r}")
    given = {"--ddp-hook": ddp_hook, "--sharded": sharded, "--reduce-scatter": reduce_scatter, "--strategy": strategy}
    given |= {f"--engine {engine}": engine != "torch", "a launcher": here}
    named = [name for name, value in given.items() if value]
    if named:
        raise ConfigError(f"--device cuda pretends all ranks but one, over a simulated wire: leave out {named[0]}")
    why = missing()
    if why:
        raise ConfigError(f"--device cuda: {why}; use --device cpu")


def run_on_device(settings: Settings, out: Path, here: bool = False) -> BenchmarkRun:
    """Measure on one GPU over simulated wires, show and save."""
    from grace.bench.step import on_device

    if len(settings.ranks) > 1:
        raise ConfigError("--device cuda takes one number of --ranks")
    console = Console(highlight=False)
    running = BenchmarkRun(NAME, "step", about(settings), out, interrupted="interrupted")
    with console.status("") as status:
        running.measure(lambda: on_device.run(running, settings, lambda what: status.update(escape(what))))
    show(console, running.results)
    for line in on_device.notes(running.results):
        console.print(line, markup=False)
    return running


def run(settings: Settings, out: Path, here: bool = False) -> BenchmarkRun:
    """Measure, show and save; finished rows are saved, whatever happens.

    Args:
        settings: the settings of the benchmark.
        out: the folder to write to.
        here: True if this process is one of several ranks; only the first writes and shows.

    Returns:
        The benchmark with its results and its exit code.
    """
    console = Console(highlight=False, quiet=here and grace.init().rank != 0)
    running = BenchmarkRun(NAME, "step", about(settings), None if console.quiet else out)

    def measure() -> None:
        with Bar(console) as bar:

            def watch(scenario: str, event: Event) -> None:
                bar.show(scenario, event)
                if "times_ms" in event:
                    running.save()

            (run_here if here else scenarios.run)(settings, running.results, watch)

    running.measure(measure)
    if not console.quiet:
        show(console, running.results)
    return running


def show(console: Console, results: Results) -> None:
    """Show a table and a verdict per scenario."""
    measured = dict.fromkeys((row["ranks"], row["bandwidth"]) for row in results.rows)
    sharded = results.settings.get("sharded", 0)
    for ranks, rate in measured:
        rows = [row for row in results.rows if (row["ranks"], row["bandwidth"]) == (ranks, rate)]
        name = scenario(ranks, rate)
        groups = f", in shard groups of {sharded}" if sharded else ""
        console.print(f"\n[bold]{results.settings['model']}, {name}{groups}[/]", soft_wrap=True)
        console.print(table(rows, console.width, "group" if sharded else "rank"))
        console.print(results.settings.get("verdict", {}).get(name, "Interrupted before the verdict."))
    if measured:
        console.print(HOW_TO_READ, style="dim")
    if measured and sharded:
        console.print(OF_SHARDS, style="dim")
    for name, reason in results.settings.get("skipped", {}).items():
        console.print(f"Left out: {name}: {reason}", markup=False, style="dim")


def table(rows: list[dict[str, Any]], width: int = 80, whose: str = "rank") -> Table:
    """Return the table of one scenario's rows; times in milliseconds. Where there is room, it has bytes received and
    samples per second too."""
    plain = next((row["name"] for row in rows if row["speedup"] == 1.0), None)
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "step\nms": lambda row: number(row["step_ms"]),
        "±": lambda row: number((row["step_high_ms"] - row["step_low_ms"]) / 2),
        f"against\n{plain or 'plain'}": lambda row: f"{row['speedup']:.2f}x" if row["speedup"] else "",
        "codec\nms": lambda row: number(row["codec_ms"]),
        "exposed\nms": lambda row: number(row["exposed_ms"]),
        f"sent\n/ {whose}": lambda row: amount(row["sent_bytes"]),
        f"received\n/ {whose}": lambda row: amount(row["received_bytes"]),
        "wire\nms": lambda row: number(row["wire_ms"]),
        "samples\n/ s": lambda row: number(row["samples_per_s"]),
    }
    if width < ROOMY:
        del columns[f"received\n/ {whose}"], columns["samples\n/ s"]
    made = figures_table("", list(columns))
    engines = dict.fromkeys(row["engine"] for row in rows)
    for row in rows:
        label = row["name"] + (f" ({row['engine']}'s ranks)" if row["kind"] == "bound" and len(engines) > 1 else "")
        style = {"grace": "", "baseline": "cyan", "bound": "dim"}[row["kind"]]
        paying = row["pays"] and row["kind"] == "grace"
        made.add_row(label, *(cell(row) for cell in columns.values()), style="bold" if paying else style)
    return made


def amount(count: float | None) -> str:
    """Format bytes, if they are known."""
    return "" if count is None else of_bytes(count)


def number(value: float | None) -> str:
    """Format a number with three digits, and no more than needed.

    >>> [number(x) for x in (None, 0.1234, 5.678, 56.78, 5678.9)]
    ['', '0.12', '5.68', '56.8', '5679']
    """
    if value is None:
        return ""
    return f"{value:.{max(0, 2 - max(0, len(str(int(value))) - 1))}f}"
