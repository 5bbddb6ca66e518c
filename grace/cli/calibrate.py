"""``grace calibrate``: seconds of collectives and methods on this cluster, measured once and kept in a file."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape

from grace.backends import runtime
from grace.backends.topology import node_groups, node_name
from grace.bench.common.options import methods as parse_methods
from grace.bench.common.options import option, with_options
from grace.bench.common.progress import ShowProgress, progress_bar
from grace.cli.calibration import Calibration, Key, read
from grace.cli.calibration_tables import print_calibration
from grace.cli.inputs import load_variables, random_gradients, to_tensor
from grace.cli.terminal import check_writable, standard_output
from grace.communicators.choice import build_communicator
from grace.core.backend import Backend
from grace.core.communicator import Communicator
from grace.core.compressor import Tensor
from grace.core.registry import legal_communicators, make
from grace.core.variable import Variable
from grace.errors import ConfigError, GraceError, missing_extra
from grace.planner.links import measure_network, oversubscription
from grace.planner.network import MeasuredNetwork
from grace.planner.planning import measure_methods
from grace.session.agreement import gather_or_raise

SHAPES = ((1024, 1024), (256, 128, 3, 3), (512, 512), *((64, 64),) * 8, *((256,),) * 8, *((10,),) * 4)
"""Shapes of gradients where no model is given."""
SECONDS, QUICK_SECONDS = (10.0, 0.5), (1.0, 0.1)
"""Seconds for the network, and for each method."""
FAILED = "could not calibrate"
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
    seed: int = option(0, "Seed of the gradients, and of methods that draw random numbers.")
    show: Path | None = option(None, "Show a file that was written earlier, and measure nothing.", metavar="FILE")


@with_options(CalibrateOptions)
def calibrate(given: dict[str, Any]) -> None:
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
    backend = runtime.init("auto", asked.framework if asked.framework in runtime.FRAMEWORKS else None)
    began = time.monotonic()
    with _all_or_none(backend, "begin"):
        choices = parse_choices(asked.methods, backend.size, asked.quick)
        installed = filter(runtime._installed, FRAMEWORKS)
        bench = Workbench(asked.framework or backend.framework or next(installed), asked.seed + backend.rank)
        gradients = bench.gradients(asked.model)
    names = backend.allgather_object(node_name())
    key = Key.of(backend, names, bench.framework, bench.threads)
    with _all_or_none(backend, "find room for the file"):
        if backend.rank == 0:
            check_writable(asked.out)
    network_seconds, method_seconds = QUICK_SECONDS if asked.quick else SECONDS
    shared = oversubscription(backend, names)
    with progress_bar(console, backend.rank == 0) as progress:
        network, inside = _measure_links(backend, names, bench, network_seconds, shared > 1, progress)
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
    with _all_or_none(backend, "write"):
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


class Workbench:
    """Tensors of a framework on the device of gradients.

    Args:
        framework: "torch", "tensorflow" or "numpy".
        seed: the seed of gradients.

    Raises:
        ConfigError: there is no such framework, or it is not installed.
    """

    def __init__(self, framework: str, seed: int):
        if framework not in FRAMEWORKS:
            raise ConfigError(f"--framework is torch, tensorflow or numpy, not {framework!r}")
        if not runtime._installed(framework):
            raise missing_extra(framework, framework)
        self.framework = framework
        self.random = np.random.default_rng(seed)
        self.device = "cpu"
        self.threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count() or 1
        if framework == "torch":
            import torch

            self.threads = torch.get_num_threads()
            if torch.cuda.is_available():
                self.device = f"cuda:{runtime.local_rank()}"
                torch.cuda.set_device(self.device)

    def to_tensor(self, array: np.ndarray) -> Tensor:
        """Return an array as a tensor on the device."""
        return to_tensor(self.framework, array, self.device)

    def gradients(self, model: str | None) -> dict[str, Tensor]:
        """Return gradients with the shapes of a model, or of :data:`SHAPES`."""
        variables = [Variable(f"v{i}", shape) for i, shape in enumerate(SHAPES)]
        if model is not None:
            variables = load_variables(model)
        found = random_gradients(self.framework, variables, self.random, self.device)
        if not found:
            raise ConfigError(f"{model} has no variable with dense gradients, which methods are measured on")
        return found


def parse_choices(text: str, ranks: int, quick: bool) -> list[Communicator]:
    """Return methods with their communicators; dense gradients are always among them.

    Raises:
        ConfigError: a method is unknown, or its parts do not go together.
    """
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
    bench: Workbench,
    seconds: float,
    crowded: bool,
    progress: ShowProgress,
) -> tuple[MeasuredNetwork | None, MeasuredNetwork | None]:
    """Measure collectives between all ranks, and between those of a node if there are several nodes."""
    options: dict[str, Any] = {"tensor_of": bench.to_tensor, "crowded": crowded}
    progress("network", 0.0)
    network = measure_network(backend, seconds, **options)
    inside = None
    if 1 < len(set(names)) < len(names) and not backend.pairs_by_name:
        error = None
        try:
            node = node_groups(backend, names).node
            inside = measure_network(node, seconds / 2, **options)
        except GraceError as raised:
            error = raised
        inside = next(filter(None, gather_or_raise(backend, "times of collectives", inside, error, FAILED)))
    return network, inside


@contextlib.contextmanager
def _all_or_none(backend: Backend, operation: str) -> Iterator[None]:
    """Return a context after which no rank goes on if the operation has failed on one of them."""
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    gather_or_raise(backend, f"calibration: {operation}", None, error, FAILED)
