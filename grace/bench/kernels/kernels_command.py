"""``grace bench kernels``: costs and errors of compressing on one machine, without a network."""

import dataclasses
import functools
import itertools
import statistics
from pathlib import Path
from typing import Annotated

import typer

from grace.bench.common import options
from grace.bench.common.options import option
from grace.bench.common.progress import ShowProgress, progress_bar
from grace.bench.common.results import Row, Settings
from grace.bench.common.settings_checks import check_at_least_1
from grace.bench.lifecycle import BenchmarkRun
from grace.errors import ConfigError, require

METHODS = (
    "none", "fp16", "qsgd", "qsgd(levels=7)", "qsgd(levels=1)", "topk", "randomk", "signsgd", "efsignsgd",
    "powersgd(rank=4)",
)  # fmt: skip
QUICK_METHODS = ("none", "fp16", "qsgd", "topk", "signsgd", "powersgd(rank=4)")
TENSORS = ("gaussian", "heavy-tailed", "captured")
RANKS = 4
"""Simulated ones, for the error of the aggregate."""
SMALLEST, LARGEST = 1000, 2**31 - 1
"""Elements: less is all overhead, more has no 32-bit index."""
MOST_THREADS = 1024
"""More, a slip of the keyboard, would take all processes that the machine allows."""
DEVICE_SIZES, DEVICE_REPEATS = ((25_000_000, 250_000_000), (1_000_000,)), (30, 10)
SIZE, REPEATS, DRAWS, ERROR_ELEMENTS = (25_000_000, 1_000_000), (7, 3), (16, 6), (1_000_000, 250_000)
"""Defaults: usually, and with ``--quick``."""


@dataclasses.dataclass
class KernelsSettings:
    """Settings of the benchmark; None is a default that depends on the device, and on ``quick``."""

    size: str | None = option(
        None,
        "Elements of the tensor: 25M, 1e6, 4096 ... It is a matrix as square as can be. On a GPU several.",
        show_default="25M, on a GPU 25M,250M; or 1M with --quick",
    )
    methods: list[str] | None = option(
        None,
        f"Compressor specs, separated by commas, or all. Default: {', '.join(METHODS)}.",
        parse=options.methods,
        show_default=False,
    )
    tensors: list[str] | None = option(
        None,
        "Kinds of gradients, separated by commas; see above.",
        parse=options.split,
        show_default=f"{','.join(TENSORS)}; on a GPU gaussian",
    )
    memory: str | None = option(None, "One memory for all methods, as in residual.", show_default="each method's own")
    device: str = option("cpu", "cpu or cuda.")
    threads: int = option(1, "Threads that torch computes with.")
    repeats: int | None = option(
        None, "Measurements of each; medians count.", show_default="7, on a GPU 30; or 3, 10 with --quick"
    )
    quick: bool = False

    def about(self) -> Settings:
        """Return the settings as they are recorded, defaults filled in, or raise if they make no benchmark."""
        require("torch", "torch")

        from grace.bench.common.clocks import check_device, device_facts
        from grace.bench.kernels.fidelity import communicator_of
        from grace.bench.kernels.gradients import KINDS, matrix

        on_device, quick = self.device == "cuda", self.quick
        sizes = list(DEVICE_SIZES[quick] if on_device else [SIZE[quick]])
        if self.size is not None:
            sizes = [options.size(part) for part in (options.split(self.size) if on_device else [self.size])]
        for asked in sizes:
            if not SMALLEST <= asked <= LARGEST:
                raise ConfigError(f"--size is between {SMALLEST:,} and {LARGEST:,} elements, not {asked:,}")
        methods = list(QUICK_METHODS if quick else METHODS) if self.methods is None else self.methods
        tensors = list(dict.fromkeys(TENSORS[: 1 if on_device else None] if self.tensors is None else self.tensors))
        for name, values in (("methods", methods), ("tensors", tensors)):
            if not values:
                raise ConfigError(f"--{name}: at least one is needed")
        for kind in tensors:
            if kind not in KINDS:
                raise ConfigError(f"unknown tensor {kind!r}; known: {', '.join(KINDS)}")
        if "captured" in tensors:
            require("sklearn", "bench", "scikit-learn")
        for name in methods:
            communicator_of(name, self.memory)
        check_device(self.device)
        check_at_least_1(self, "threads", "repeats")
        if self.threads > MOST_THREADS:
            raise ConfigError(f"--threads must be at most {MOST_THREADS}, not {self.threads}")
        repeats = (DEVICE_REPEATS if on_device else REPEATS)[quick] if self.repeats is None else self.repeats
        shape = matrix(max(sizes))
        facts: Settings = {"sizes": sizes, **(device_facts() if on_device else {})}
        facts |= {"elements": shape[0] * shape[1], "shape": list(shape), "device": self.device}
        facts |= {"threads": self.threads, "repeats": repeats, "copy_gbps": None, "methods": methods}
        facts |= {"tensors": tensors, "memory": self.memory, "ranks": RANKS, "draws": DRAWS[quick]}
        return {**facts, "error_shape": list(matrix(min(*sizes, ERROR_ELEMENTS[quick])))}


@options.with_options(KernelsSettings)
def command(
    given: options.Given,
    out: options.Folder = Path("out/kernels"),
    quick: Annotated[bool, typer.Option("--quick", help="A small tensor and few methods, in seconds.")] = False,
) -> None:
    """Measure what compressing costs and loses: times in copies of the tensor, bits, errors, memory.

    Times are multiples of the time of one copy_ of the same tensor in the same
    run, so they say how far a method is from what memory allows, on any machine.

    gaussian is N(0, 1). heavy-tailed is Student's t with 3 degrees of freedom.
    captured is a gradient that training has computed: of the hidden weight
    matrix, of the size asked for, of a multilayer perceptron after 16 steps on
    scikit-learn's digits. Nothing in it is tiled or scaled; it stands for one
    small task.

    Errors are those of a smaller tensor of the same kind (1M elements; 250,000
    with --quick), because they need many repetitions: 16 (6) draws of a method's
    random numbers, on 4 simulated ranks whose gradients differ, without a memory.

    With --device cuda times alone are measured, by CUDA's events around replays of
    CUDA graphs, the L2 cache flushed before each: against the bytes that a part
    must move, as a fraction of what a copy moves, all in turns.

    Results are saved after each method, Ctrl-C included.
    """
    run(KernelsSettings(**given, quick=quick).about(), out).report_and_exit()


def run(settings: Settings, out: Path) -> BenchmarkRun:
    """Measure, show and save; return the run, which knows how it ended."""
    running = BenchmarkRun("kernels", settings, out, interrupted="interrupted")
    shape, threads = " x ".join(map(str, settings["shape"])), settings["threads"]
    words = f"{threads} thread{'s' if threads > 1 else ''}"
    running.console.print(f"{settings['elements']:,} float32 elements ({shape}), {settings['device']}, {words}")
    return running.measure(lambda: _measure(running))


def _measure(running: BenchmarkRun) -> None:
    """Fill in the rows, tensor by tensor, and save."""
    import torch

    settings = running.results.settings
    torch.set_num_threads(settings["threads"])
    measure_tensor = _measure_on_gpu if settings["device"] == "cuda" else _measure_on_cpu
    for elements, kind in itertools.product(settings["sizes"], settings["tensors"]):
        with progress_bar(running.console) as progress:
            measure_tensor(running, elements, kind, progress)


def _measure_on_cpu(running: BenchmarkRun, elements: int, kind: str, progress: ShowProgress) -> None:
    """Measure the methods one after the other, with their errors and memory, and save after each."""
    from grace.bench.common.clocks import HostClock
    from grace.bench.kernels.fidelity import errors
    from grace.bench.kernels.gradients import KINDS, matrix
    from grace.bench.kernels.timing import extra_bytes, measure

    settings = running.results.settings
    methods, memory = settings["methods"], settings["memory"]
    (x,) = KINDS[kind](matrix(elements), 1)
    gradients = KINDS[kind](tuple(settings["error_shape"]), RANKS)
    for number, method in enumerate(methods):
        show_part = functools.partial(_show_part, progress, kind, number / len(methods))
        (row,) = measure([method], x, settings["repeats"], memory, HostClock(), show_part)
        row |= errors(method, gradients, settings["draws"])
        row["peak_extra_bytes"] = extra_bytes(method, x, memory)
        _add_rows(running, kind, [row], x.nbytes)


def _measure_on_gpu(running: BenchmarkRun, elements: int, kind: str, progress: ShowProgress) -> None:
    """Measure the times of all methods in turns, if the GPU has room for them."""
    import torch

    from grace.bench.common.clocks import DeviceClock
    from grace.bench.kernels.gradients import KINDS, matrix
    from grace.bench.kernels.timing import HELD, measure

    settings = running.results.settings
    free, needed = torch.cuda.mem_get_info()[0], HELD * 4 * elements
    if free < needed:
        left_out = f"{elements:,} elements: {free / 1e9:.0f} GB of {needed / 1e9:.0f} GB are free"
        settings.setdefault("skipped", {})[f"{elements:,}"] = left_out
        return
    x = KINDS[kind](matrix(elements), 1)[0].to(settings["device"])
    clock, show_part = DeviceClock(), functools.partial(_show_part, progress, kind, 0.0)
    rows = measure(settings["methods"], x, settings["repeats"], settings["memory"], clock, show_part, whole=True)
    _add_rows(running, f"{kind}, {elements:,}", rows, x.nbytes)
    clock.forget()


def _add_rows(running: BenchmarkRun, tensor: str, rows: list[Row], nbytes: int) -> None:
    """Add the rows of a tensor of so many bytes to the results, and save them."""
    running.results.rows += [{"tensor": tensor, **row} for row in rows]
    copy_ms = statistics.median(row["copy_ms"] for row in rows)
    running.results.settings["copy_gbps"] = nbytes / copy_ms / 1e6
    running.save()


def _show_part(progress: ShowProgress, kind: str, done: float, part: str) -> None:
    progress(f"{kind}: {part}", done)
