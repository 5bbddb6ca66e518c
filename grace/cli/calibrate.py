"""``grace calibrate``: what this cluster, engine and framework take, measured once and kept."""

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.markup import escape

from grace.backends import runtime
from grace.backends.topology import node_groups, node_name
from grace.bench.common.options import methods as listed
from grace.cli.calibration_tables import show, whole
from grace.cli.consoles import bar, wide_console
from grace.cli.model_variables import from_spec
from grace.communicators.choice import build_communicator
from grace.core.backend import Backend
from grace.core.communicator import Communicator
from grace.core.registry import legal_communicators, make
from grace.errors import ConfigError, GraceError, missing_extra
from grace.planner.calibration import Calibration, Curves, Key, default_path, read
from grace.planner.codecs import measure
from grace.planner.costs import Codec
from grace.planner.links import MeasuredLinks, measure_network
from grace.planner.oversubscription import oversubscription
from grace.session.agreement import gather_or_raise

SHAPES = ((1024, 1024), (256, 128, 3, 3), (512, 512), *((64, 64),) * 8, *((256,),) * 8, *((10,),) * 4)
"""Of gradients, if no model is given."""
SECONDS, QUICK = (10.0, 0.5), (1.0, 0.1)
"""Of the network, and of each method."""
BESIDE = 384
"""Rows and columns of the matrix that is multiplied beside a collective."""
FAILED = "could not calibrate"


def calibrate(
    methods: Annotated[
        str, typer.Option(help="Compressors, separated by commas, or all; a memory behind a slash: topk/none.")
    ] = "all",
    model: Annotated[
        str | None, typer.Option("--model", help="module:function that makes a model, for its variables' shapes.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file to write; in your cache if left out.")
    ] = None,
    framework: Annotated[
        str | None, typer.Option(help="torch, tensorflow or numpy: what gradients are; the first installed one.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure for a shorter time, and only methods' default communicators.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the gradients, and of random methods.")] = 0,
    shown: Annotated[
        Path | None, typer.Option("--show", metavar="FILE", help="Measure nothing; show such a file.")
    ] = None,
) -> None:
    """Measure what this cluster's network and the methods take, for the planner; once per cluster and engine.

    Start it as you start training, with as many ranks and threads:

        torchrun --nproc-per-node 4 --no-python grace calibrate
        mpirun -n 4 grace calibrate

    All ranks time collectives of rising sizes, each method's encoding and
    decoding, and computing beside a collective. Rank 0 writes the file, which
    strategy="auto" and grace plan read. It is for these hosts, this engine,
    and these versions, and is taken for 30 days. GRACE_CALIBRATION names
    another file than the one in your cache.
    """
    if shown is not None:
        made = read(shown, max_age=None)
        show(made, wide_console(), max(0.0, time.time() - made.made))
        return
    backend = runtime.init("auto", framework if framework in runtime.FRAMEWORKS else None)
    began = time.monotonic()
    with _together(backend, "begin"):
        chosen = _choices(methods, backend.size, quick)
        room = _Room(framework or _installed(backend), seed + backend.rank)
        gradients = room.gradients(model)
    names = backend.allgather_object(node_name())
    key = Key.of(backend, names, room.framework, room.threads)
    path = output or default_path(key)
    with _together(backend, "find room for the file"):
        if backend.rank == 0:
            _check_writable(path)
    console = wide_console()
    limits = QUICK if quick else SECONDS
    shared = oversubscription(backend, names)
    with bar(console, backend.rank == 0) as told:
        links, inside = _links(backend, names, room, limits[0], shared > 1, told)
        codecs, left_out = _codecs(backend, chosen, gradients, room, limits[1], shared, seed, told)
    made = Calibration(
        key=key,
        made=time.time(),
        curves=links.curves,
        inside=inside,
        codecs=codecs,
        contention=links.contention,
        by_ring=backend.by_ring,
        concatenates=backend.concatenates,
    )
    with _together(backend, "write"):
        if backend.rank == 0:
            made.write(path)
    if backend.rank == 0:
        show(made, console)
        for method, why in left_out.items():
            console.print(f"left out: {escape(method)}: {escape(why)}", soft_wrap=True)
        if backend.size == 1:
            console.print(
                "One process alone: there are no links to measure. Start it as training is started, as in "
                "torchrun --nproc-per-node 4 --no-python grace calibrate",
                soft_wrap=True,
            )
        console.print(f"Wrote {escape(str(path))} in {time.monotonic() - began:.0f} s.", soft_wrap=True)
    runtime.shutdown()


class _Room:
    """What tensors are, and what computes with them.

    Args:
        framework: "torch", "tensorflow" or "numpy".
        seed: of gradients.

    Raises:
        ConfigError: there is no such framework, or it is not installed.
    """

    def __init__(self, framework: str, seed: int):
        if framework not in (*runtime.FRAMEWORKS, "numpy"):
            raise ConfigError(f"--framework is torch, tensorflow or numpy, not {framework!r}")
        if not runtime._installed(framework):
            raise missing_extra(framework, framework)
        self.framework, self.rng = framework, np.random.default_rng(seed)
        module: Any = importlib.import_module(framework)
        self.tensor_of: Callable[[np.ndarray], Any] = np.copy
        self.synchronize: Callable[[], Any] = lambda: None
        self.threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count() or 1
        if framework == "torch":
            self.threads = module.get_num_threads()
            device = "cpu"
            if module.cuda.is_available():
                device, self.synchronize = f"cuda:{runtime.local_rank()}", module.cuda.synchronize
                module.cuda.set_device(device)
            self.tensor_of = lambda array: module.tensor(array, device=device)
        elif framework == "tensorflow":
            self.tensor_of = module.constant
        beside: Any = self.tensor_of(self.rng.standard_normal((BESIDE, BESIDE), np.float32))

        def compute() -> None:
            product = beside @ beside
            self.synchronize()
            if framework == "tensorflow":
                product.numpy()

        self.compute = compute

    def gradients(self, model: str | None) -> dict[str, Any]:
        """Of a model's shapes, or of some that are usual."""
        if model is None:
            shapes = {f"v{i}": shape for i, shape in enumerate(SHAPES)}
        else:
            shapes = {v.name: v.shape for v in from_spec(model) if not v.sparse and v.numel}
        if not shapes:
            raise ConfigError(f"{model} has no variable with dense gradients, which methods are measured on")
        normal = self.rng.standard_normal
        return {name: self.tensor_of(0.01 * normal(shape, np.float32)) for name, shape in shapes.items()}


def _installed(backend: Backend) -> str:
    """Whose tensors the run exchanges."""
    return backend.framework or next(filter(runtime._installed, (*runtime.FRAMEWORKS, "numpy")))


def _choices(text: str, ranks: int, quick: bool) -> list[Communicator]:
    """Return the communicators of methods; dense gradients are always among them."""
    found: list[Communicator] = []
    for method in dict.fromkeys(["none", *listed(text)]):
        spec, _, memory = method.partition("/")
        default = build_communicator(spec.strip(), memory or None, None, ranks)
        made = {default.describe(): default}
        for communicator in [] if quick else legal_communicators(make("compressor", spec.strip())):
            with contextlib.suppress(ConfigError):
                other = build_communicator(spec.strip(), memory or None, communicator, ranks)
                made.setdefault(other.describe(), other)
        found += made.values()
    return found


def _links(
    backend: Backend,
    names: Sequence[str],
    room: _Room,
    seconds: float,
    crowded: bool,
    told: Callable[[str, float], Any],
) -> tuple[MeasuredLinks, Curves]:
    """Between all ranks, and between those of a node if there are several nodes."""
    own: dict[str, Any] = {"tensor_of": room.tensor_of, "synchronize": room.synchronize, "crowded": crowded}

    def progress(what: str, done: float) -> None:
        told(f"network: {what}", done / 2)

    links = measure_network(backend, seconds, compute=room.compute, progress=progress, **own)
    inside: Curves = {}
    if 1 < len(set(names)) < len(names) and not backend.pairs_by_name:
        error = None
        try:
            node = node_groups(backend, names).node
            inside = measure_network(node, seconds / 2, **own).curves
        except GraceError as raised:
            error = raised
        inside = next(filter(None, gather_or_raise(backend, "times of collectives", inside, error, FAILED)))
    return links, inside


def _codecs(
    backend: Backend,
    choices: Sequence[Communicator],
    gradients: Mapping[str, Any],
    room: _Room,
    seconds: float,
    shared: float,
    seed: int,
    told: Callable[[str, float], Any],
) -> tuple[dict[str, Codec], dict[str, str]]:
    """Of each method the slowest rank's, for which all wait; and why others cannot be measured. Where ranks share
    cores, rank 0 measures alone, and the others' turns are added."""
    codecs, left_out = dict[str, Codec](), dict[str, str]()
    ranks = max(2, backend.size)
    for i, choice in enumerate(choices):
        method = choice.describe()
        told(method, 0.5 + i / len(choices) / 2)
        answer: Any = None
        error: Exception | None = None
        try:
            if shared == 1 or backend.rank == 0:
                found = measure(choice, gradients, backend.size, seed, seconds, room.synchronize)
                answer = found.method, found.codec.times(shared)
        except (GraceError, TypeError) as raised:  # frameworks do not have all types of numbers
            answer = str(raised)
        except Exception as raised:
            error = raised
        received = gather_or_raise(backend, "times of methods", answer, error, FAILED)
        answers = [one for one in received if one is not None]
        refused = [given for given in answers if isinstance(given, str)]
        if refused:
            left_out[method] = refused[0]
        else:
            name, codecs[name] = max(answers, key=lambda given: whole(given[1], ranks))
    told("done", 1.0)
    return codecs, left_out


@contextlib.contextmanager
def _together(backend: Backend, what: str) -> Iterator[None]:
    """What may fail on a rank, whereupon none goes on."""
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    gather_or_raise(backend, f"calibration: {what}", None, error, FAILED)


def _check_writable(path: Path) -> None:
    """Refuse what could not be written in the end; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path}: cannot be written: it is a folder, or its folder is not yours to write to")
