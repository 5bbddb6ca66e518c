"""``grace calibrate``: seconds of collectives and methods on this cluster, measured once and kept in a file."""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grace.backends import runtime
from grace.backends.topology import node_groups, node_name
from grace.bench.common.options import Given, option, with_options
from grace.bench.common.options import methods as parse_methods
from grace.bench.common.progress import progress_bar
from grace.bench.common.tables import Columns, table
from grace.bench.common.text import digits, of_bytes
from grace.cli.calibration_file import Calibration, Key, read
from grace.cli.inputs import load_variables, random_gradients, to_tensor
from grace.cli.terminal import check_writable, standard_output
from grace.communicators.choice import build_communicator
from grace.core.backend import Backend
from grace.core.communicator import Communicator
from grace.core.compressor import Tensor
from grace.core.registry import legal_communicators, make
from grace.core.variable import Variable
from grace.errors import ConfigError, GraceError, installed, require
from grace.planner.auto_planner import measure_methods
from grace.planner.costs import CodecCost, Curve
from grace.planner.measure_network import measure_network, oversubscription
from grace.planner.network import MeasuredNetwork
from grace.session.agreement import failing_together, gather_or_raise

SHAPES = ((1024, 1024), (256, 128, 3, 3), (512, 512), *((64, 64),) * 8, *((256,),) * 8, *((10,),) * 4)
"""Shapes of gradients where no model is given."""
SECONDS, QUICK_SECONDS = (10.0, 0.5), (1.0, 0.1)
"""Seconds for the network, and for each method."""
FAILED = "could not calibrate"
TABLE_SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26)
"""Bytes of collectives in the table."""
VARIABLES, ELEMENTS = 10, 1_000_000
"""Variables and elements of the bucket in the table of methods."""
FRAMEWORKS = (*runtime.FRAMEWORKS, "numpy")


@dataclasses.dataclass
class CalibrateOptions:
    """Options of ``grace calibrate``."""

    methods: str = option(
        "all",
        "Compressors to measure, separated by commas, or all. topk/none is top-k with the memory none; without a slash "
        "a compressor has its default memory.",
    )
    model: str | None = option(
        None,
        "module:function of a function that returns a model. Methods are then measured on gradients of its variables' "
        "shapes.",
    )
    out: Path = option(Path("calibration.json"), "File to write.", "--out", "-o")
    framework: str | None = option(
        None, "Framework whose tensors are measured: torch, tensorflow or numpy.", show_default="the first installed"
    )
    quick: bool = option(
        False, "Measure each method for a shorter time, and with its default communicator only.", "--quick"
    )
    seed: int = option(0, "Seed of the gradients, and of methods that draw random numbers.", min=0)
    show: Path | None = option(None, "Show a file that was written earlier, and measure nothing.", metavar="FILE")


@with_options(CalibrateOptions)
def calibrate(given: Given) -> None:
    """Measure the times of this cluster's network and of compression methods, and keep them in a file for planning.

    Do it once for each cluster and engine. Start it as you start training, with as many ranks and threads:

        torchrun --nproc-per-node 4 --no-python grace calibrate
        mpirun -n 4 grace calibrate

    The ranks time collectives of many sizes, and the compressing and
    decompressing of each method. Rank 0 writes the file, for grace plan
    --calibration, which takes it for this framework and these versions only,
    and for 30 days. strategy="auto" measures by itself.
    """
    console, asked = standard_output(120), CalibrateOptions(**given)
    if asked.show is not None:
        found = read(asked.show, max_age=None)
        print_calibration(found, console, max(0.0, time.time() - found.made))
        return
    # numpy is no framework of the engines: they are joined without one
    backend = runtime.init("auto", asked.framework if asked.framework in runtime.FRAMEWORKS else None)
    began = time.monotonic()
    with failing_together(backend, "calibration: begin", FAILED):
        choices = parse_choices(asked.methods, backend.size, asked.quick)
        framework = asked.framework or backend.framework or next(filter(installed, FRAMEWORKS))
        device, threads = _device_and_threads(framework)
        gradients = _gradients(framework, device, asked.model, asked.seed + backend.rank)
    names = backend.allgather_object(node_name())
    key = Key.of_run(backend, names, framework, threads)
    with failing_together(backend, "calibration: find room for the file", FAILED):  # before minutes of measuring
        if backend.rank == 0:
            check_writable(asked.out)
    network_seconds, method_seconds = QUICK_SECONDS if asked.quick else SECONDS
    shared = oversubscription(backend, names)
    with progress_bar(console, backend.rank == 0) as progress:
        progress("network", 0.0)
        tensor_of = functools.partial(to_tensor, framework, device=device)
        network, inside = _measure_links(backend, names, tensor_of, network_seconds, shared > 1)
        methods_found, left_out = measure_methods(
            backend,
            choices,
            gradients,
            backend.size,
            method_seconds,
            shared,
            asked.seed,
            lambda method, done: progress(method, 0.5 + done / 2),
        )
        progress("done", 1.0)
    calibration = Calibration(
        key=key,
        made=time.time(),
        network=network,
        inside=inside,
        codecs={one.method: one.codec for one in methods_found.values()},
        by_ring=backend.by_ring,
        concatenates=backend.concatenates,
    )
    with failing_together(backend, "calibration: write", FAILED):
        if backend.rank == 0:
            calibration.write(asked.out)
    if backend.rank == 0:
        print_calibration(calibration, console)
        for method, why in left_out.items():
            console.print(f"left out: {escape(method)}: {escape(why)}", soft_wrap=True)
        if backend.size == 1:
            console.print(
                "One process alone: there are no links to measure. Start it as training is started, as in "
                "torchrun --nproc-per-node 4 --no-python grace calibrate",
                soft_wrap=True,
            )
        console.print(f"Wrote {escape(str(asked.out))} in {time.monotonic() - began:.0f} s.", soft_wrap=True)
    runtime.shutdown()


def _device_and_threads(framework: str) -> tuple[str, int]:
    """Return the device of a framework's gradients, and the number of threads that compute with them. Refuse a
    framework that there is not, or that is not installed."""
    if framework not in FRAMEWORKS:
        raise ConfigError(f"--framework is torch, tensorflow or numpy, not {framework!r}")
    require(framework, framework)
    if framework != "torch":
        threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # others are of nested regions
        return "cpu", int(threads) if threads.isdecimal() else os.cpu_count() or 1
    import torch

    device = f"cuda:{runtime.local_rank()}" if torch.cuda.is_available() else "cpu"
    if device != "cpu":
        torch.cuda.set_device(device)
    return device, torch.get_num_threads()


def _gradients(framework: str, device: str, model: str | None, seed: int) -> dict[str, Tensor]:
    """Return gradients with the shapes of a model, or of :data:`SHAPES`."""
    variables = [Variable(f"v{i}", shape) for i, shape in enumerate(SHAPES)]
    if model is not None:
        variables = load_variables(model)
    found = random_gradients(framework, variables, np.random.default_rng(seed), device)
    if not found:
        raise ConfigError(f"{model} has no variable with dense gradients, which methods are measured on")
    return found


def parse_choices(text: str, ranks: int, quick: bool) -> list[Communicator]:
    """Return methods with their communicators; dense gradients are always among them."""
    found: list[Communicator] = []
    for method in dict.fromkeys(["none", *parse_methods(text)]):
        compressor, _, memory = method.partition("/")
        compressor = compressor.strip()
        default = build_communicator(compressor, memory or None, None, ranks)
        distinct = {default.describe(): default}
        for communicator in [] if quick else legal_communicators(make("compressor", compressor)):
            with contextlib.suppress(ConfigError):
                other = build_communicator(compressor, memory or None, communicator, ranks)
                distinct.setdefault(other.describe(), other)
        found += distinct.values()
    return found


def _measure_links(
    backend: Backend,
    names: Sequence[str],
    tensor_of: Callable[[np.ndarray], Tensor],
    seconds: float,
    crowded: bool,
) -> tuple[MeasuredNetwork | None, MeasuredNetwork | None]:
    """Measure collectives between all ranks, and between those of a node if there are several nodes."""
    network = measure_network(backend, seconds, tensor_of, crowded)
    inside = None
    # several nodes, and one of them with several ranks
    if 1 < len(set(names)) < len(names) and not backend.pairs_by_name:
        error = None
        try:
            node = node_groups(backend, names).node
            inside = measure_network(node, seconds / 2, tensor_of, crowded)
        except GraceError as raised:
            error = raised
        inside = next(filter(None, gather_or_raise(backend, "times of collectives", inside, error, FAILED)))
    return network, inside


# -- tables ---------------------------------------------------------------------------------------------------------


def print_calibration(calibration: Calibration, console: Console, age: float | None = None) -> None:
    """Print a calibration, with its age in seconds if that is given."""
    key = calibration.key
    hosts = ", ".join(f"{name} ({count})" for name, count in key.hosts.items())
    ranks = f"{key.ranks} rank{'s' * (key.ranks > 1)}"
    threads = f"{key.threads} thread{'s' * (key.threads > 1)} each"
    console.print(f"{escape(key.engine)}, {ranks} on {escape(hosts)}, {threads}", style="bold")
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(calibration.made))
    days = "" if age is None else f", {age / 86400:.0f} days ago"
    versions = f"{escape(key.framework)}, Python {escape(key.python)}, Grace {escape(key.grace)}"
    console.print(f"{versions}; made {when}{days}")
    for network, among in ((calibration.network, "all {} ranks"), (calibration.inside, "the {} ranks of a node")):
        if network is not None:
            title = f"milliseconds of a collective over {among.format(network.ranks)}"
            console.print(_collectives_table(network.curves, title))
    if calibration.codecs:
        console.print(_codecs_table(calibration.codecs, key.ranks))


def _collectives_table(curves: Mapping[str, Curve], title: str) -> Table:
    def cell(size: int, kind: str) -> str:
        return digits(1e3 * curves[kind].seconds(size)) if size <= curves[kind].points[-1][0] else ""

    columns: Columns[str] = {
        "collective": str,
        **{of_bytes(size): functools.partial(cell, size) for size in TABLE_SIZES},
        "MB/s beyond": lambda kind: f"{1e-6 / curves[kind].slope:,.0f}" if curves[kind].slope > 0 else "",
    }
    return table(curves, columns, title=title)


def _codecs_table(codecs: Mapping[str, CodecCost], ranks: int) -> Table:
    def ms(part: str, row: tuple[str, CodecCost]) -> str:
        return digits(1e3 * getattr(row[1], part).seconds(VARIABLES, ELEMENTS, ranks))

    columns: Columns[tuple[str, CodecCost]] = {
        "method": lambda row: row[0],
        "start": functools.partial(ms, "start"),
        "between": functools.partial(ms, "middle"),
        "finish": functools.partial(ms, "finish"),
        "bits": lambda row: digits(row[1].bits),
    }
    title = f"milliseconds of computing for {ELEMENTS:,} values in {VARIABLES} variables"
    return table(codecs.items(), columns, title=title)
