"""What each atomic subcomponent takes: measured seconds, or seconds from FLOPs and bytes where nothing is run."""

import contextlib
import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from grace.core.atomic_files import atomic_write
from grace.core.user_cache import user_cache
from grace.torch.pipeline.atoms import Atoms, storages_of, tensors_of
from grace.torch.pipeline.capture import capture, values, written
from grace.torch.pipeline.rows import cut_rows, rows_of

REPEATS, MOST, SPREAD, SECONDS = 5, 30, 0.1, 0.1
"""At least and at most so many runs of a node, until the middle half of them lies within so much of the median, and no
longer than so many seconds."""
FLOPS, BYTES, OVERHEAD = 50e9, 10e9, 5e-6
"""Of a processor core, per second, and seconds of starting an operation: a dry run's, unless one knows better."""
VERSION = 1

Costs = dict[str, dict[str, float]]


def cache_file() -> Path:
    """Where profiles are kept: in ``$XDG_CACHE_HOME/grace``, or else ``~/.cache/grace``."""
    return user_cache() / "pipeline-profiles.json"


def _machine() -> str:
    """What computes here: on another kind, home directories may be the same, and times are others."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores, {gpu}"


_memory: dict[str, list[float]] = {}


def measured(atoms: Atoms, flat: Sequence[Any], file: str | Path | None = None, beside: int = 1) -> Costs:
    """Seconds of forward and backward and bytes kept, of each atomic subcomponent, by running it on real inputs.

    Identical subgraphs (operations, shapes, dtypes, devices) are measured once, in this process and, if there is a
    ``file``, in all that know it.

    Args:
        atoms: of a model whose parameters have values.
        flat: the inputs that it was captured with.
        file: of profiles.
        beside: how many ranks of this host measure at once.

    >>> from grace.torch.pipeline.capture import capture
    >>> x = torch.ones(4, 2)
    >>> costs = measured(Atoms(capture(torch.nn.Linear(2, 3), (x,))), [x])
    >>> sorted(costs["linear"]), costs["linear"]["forward"] > 0
    (['backward', 'forward', 'kept'], True)
    """
    known = _read(file)
    before = dict(known)
    found = _Measure(atoms, known, beside).costs(flat)
    if file is not None and known != before:
        with contextlib.suppress(OSError):  # a cache that cannot be written is none
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(file) as draft:
                draft.write_text(json.dumps({"version": VERSION, "seconds": {**_read(file), **known}}))
    return found


def measured_by_rows(
    model: torch.nn.Module,
    atoms: Atoms,
    flat: Sequence[Any],
    whole: Sequence[bool],
    file: str | Path | None = None,
    beside: int = 1,
) -> Costs:
    """The same with a batch of a quarter of the rows as well, so that what does not depend on them is known: starting
    operations, and reading weights and writing their gradients, which a micro-batch of few rows takes as long for.

    Args:
        model: that ``atoms`` are of.
        atoms: see :func:`measured`.
        flat: the inputs that it was captured with.
        whole: of each of them, whether it has no rows whatever its shape is.
        file, beside: see :func:`measured`.

    >>> from grace.torch.pipeline.capture import capture
    >>> x, model = torch.ones(64, 256), torch.nn.Linear(256, 256)
    >>> cost = measured_by_rows(model, Atoms(capture(model, (x,))), [x], [False])["linear"]
    >>> 0 <= cost["overhead"] <= cost["forward"], 0 <= cost["overhead_back"] <= cost["backward"]
    (True, True)
    """
    fixed = {"forward": "overhead", "backward": "overhead_back", "kept": "kept_fixed"}
    return _by_rows(model, atoms, flat, whole, fixed, lambda own, given: measured(own, given, file, beside))


def estimated_by_rows(model: torch.nn.Module, atoms: Atoms, flat: Sequence[Any], whole: Sequence[bool]) -> Costs:
    """Estimate (:func:`estimated`) with a batch of a quarter of the rows as well, so that the bytes that are kept
    whatever the rows are known."""
    return _by_rows(model, atoms, flat, whole, {"kept": "kept_fixed"}, lambda own, given: estimated(own))


def _by_rows(
    model: torch.nn.Module,
    atoms: Atoms,
    flat: Sequence[Any],
    whole: Sequence[bool],
    fixed: Mapping[str, str],
    costs_of: Callable[[Atoms, Sequence[Any]], Costs],
) -> Costs:
    """Costs, and of those in ``fixed`` the part that does not depend on the rows."""
    costs, rows = costs_of(atoms, flat), rows_of(flat, whole)
    few = max(rows // 4, 2)
    if few >= rows:
        return costs
    fewer = cut_rows(flat, rows, 0, few, whole)
    args, kwargs = pytree.tree_unflatten(fewer, atoms.captured.in_spec)
    try:
        smaller = costs_of(Atoms(capture(model, args, kwargs)), fewer)
    except Exception:  # the model is for batches of that size alone, as PyTorch says in its own words
        return costs
    for name, cost in costs.items():
        for key, part in fixed.items():
            if name in smaller:
                slope = max(0.0, cost[key] - smaller[name][key]) / (rows - few)
                cost[part] = max(0.0, cost[key] - slope * rows)
    return costs


def _read(file: str | Path | None) -> dict[str, list[float]]:
    if file is None:
        return _memory
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):  # damaged: measured again
        document = json.loads(Path(file).read_text())
        if document["version"] == VERSION:
            return {**_memory, **document["seconds"]}
    return dict(_memory)


class _Measure(fx.Interpreter):
    """Runs the graph once with real values, and each node on the way as often as it takes."""

    def __init__(self, atoms: Atoms, known: dict[str, list[float]], beside: int):
        super().__init__(atoms.captured.module)
        self.atoms, self.known, self.found = atoms, known, dict[str, list[float]]()
        self.where = f"{_machine()}, {beside} ranks"

    def costs(self, flat: Sequence[Any]) -> Costs:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            self.run(*(_copied(one) for one in flat), enable_io_processing=False)
        _memory.update(self.known)
        kept = kept_bytes(self.atoms)
        return {
            name: {"forward": forward, "backward": backward, "kept": kept[name]}
            for name, (forward, backward) in self.found.items()
        }

    def fetch_attr(self, target: str) -> Any:
        return _copied(self.atoms.captured.attributes[target])  # what is written here is not the model's

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            return None
        if n.op == "get_attr":
            return self.fetch_attr(str(n.target))
        if n in self.atoms.dynamic:
            key = self._key(n)
            if key not in self.known:
                self.known[key] = list(self._seconds(n))
            self.found[n.name] = self.known[key]
        with torch.no_grad():
            return super().run_node(n)

    def _key(self, node: fx.Node) -> str:
        """Digest of a node with the constants that feed it."""
        named: dict[fx.Node, int] = {}
        lines = [self.where, str(torch.get_num_threads()), str(torch.is_autocast_enabled()), str(torch.__version__)]
        for one in (*self.atoms.reads(node), *self.atoms.constants(node), node):
            named[one] = len(named)
            value = self.atoms.values[one]
            shapes = [
                (tuple(t.shape), t.stride(), str(t.dtype), str(t.device), t.requires_grad) for t in tensors_of(value)
            ]
            args = fx.map_arg((one.args, one.kwargs), lambda other: f"%{named.get(other)}")
            lines.append(f"{'' if one.op != 'call_function' else one.target} {args} {shapes}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]

    def _seconds(self, node: fx.Node) -> tuple[float, float]:
        reads, constants = self.atoms.reads(node), self.atoms.constants(node)
        writes = bool(written(node))
        wants = {one for one in constants if one.op == "get_attr" and self.atoms.values[one].requires_grad}
        sums = [torch.zeros_like(self.fetch_attr(str(one.target))) for one in constants if one in wants]
        forward, backward = list[float](), list[float]()
        start = time.perf_counter()
        while True:
            env: dict[fx.Node, Any] = {}
            for one in (*reads, *(one for one in constants if one.op == "get_attr")):
                grad = self.atoms.values[one]
                value = self.fetch_attr(str(one.target)) if one.op == "get_attr" else self.env[one]
                env[one] = pytree.tree_map(_leaf, value, grad)
            weights = [env[one] for one in constants if one in wants]
            given = [t for one in env.values() for t in tensors_of(one) if t.requires_grad]
            if writes:  # which leaves cannot be
                env = pytree.tree_map_only(torch.Tensor, torch.clone, env)
            began = _now(env)
            for one in (*constants, node):
                if one not in env:
                    args, kwargs = fx.map_arg((one.args, one.kwargs), env.__getitem__)
                    env[one] = one.target(*args, **kwargs)  # type: ignore[operator]
            forward.append(_now(env) - began)
            outputs = [t for t in tensors_of(env[node]) if t.requires_grad]
            if outputs and given:
                ones = [torch.ones_like(t) for t in outputs]
                began = _now(env)
                gradients = torch.autograd.grad(outputs, given, ones, allow_unused=True)
                for weight, total in zip(weights, sums, strict=True):  # as micro-batches add up
                    at = next((g for t, g in zip(given, gradients, strict=True) if t is weight), None)
                    if at is not None:
                        total += at
                backward.append(_now(env) - began)
            spent = time.perf_counter() - start
            if len(forward) >= MOST or (len(forward) >= REPEATS and (_steady(forward, backward) or spent > SECONDS)):
                return statistics.median(forward), statistics.median(backward or [0.0])


def _steady(*runs: Sequence[float]) -> bool:
    for seconds in runs:
        if seconds:
            low, middle, high = statistics.quantiles(seconds, n=4)
            if high - low > SPREAD * middle:
                return False
    return True


def _now(env: Mapping[fx.Node, Any]) -> float:
    """The time, when the device is done."""
    for value in env.values():
        for tensor in tensors_of(value):
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)
                return time.perf_counter()
    return time.perf_counter()


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _leaf(value: Any, like: Any) -> Any:
    """A value as a node reads it, with a gradient of its own."""
    if not isinstance(value, torch.Tensor):
        return value
    wants = bool(getattr(like, "requires_grad", False)) and (value.is_floating_point() or value.is_complex())
    return value.detach().requires_grad_(wants)


def kept_bytes(atoms: Atoms) -> dict[str, float]:
    """Bytes that are kept of each node's forward for backward: distinct storages that autograd saves, or that the model
    returns, each at the node that makes it; parameters, buffers and the model's inputs left out."""
    kept, seen, fakes = dict.fromkeys((node.name for node in atoms.dynamic), 0.0), set[int](), list[Any]()
    feeds = {one: node.name for node in reversed(atoms.dynamic) for one in (*atoms.constants(node), node)}
    makers: dict[int, fx.Node] = {}

    def keep(tensor: torch.Tensor, node: fx.Node) -> torch.Tensor:
        storage = tensor.untyped_storage()
        maker = makers.get(storage._cdata, node)
        if storage._cdata not in seen and maker in feeds:
            seen.add(storage._cdata)
            fakes.append(tensor)  # or another storage would get its number
            kept[feeds[maker]] += storage.nbytes()
        return tensor

    def around(node: fx.Node) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: keep(tensor, node), lambda tensor: tensor)

    def known(node: fx.Node, value: Any) -> None:
        if node.op in ("get_attr", "placeholder"):
            seen.update(storages_of(value))
        for storage in storages_of(value):
            makers.setdefault(storage, node)

    found = values(atoms.captured, around=around, given=known)
    for node in atoms.outputs():
        for tensor in tensors_of(found[node]):
            keep(tensor, node)
    return kept


def estimated(atoms: Atoms, flops: float = FLOPS, nbytes: float = BYTES, overhead: float = OVERHEAD) -> Costs:
    """The same without running anything: forward = overhead + max(FLOPs / ``flops``, bytes / ``nbytes``), backward
    twice what is not overhead.

    Args:
        atoms: of a model that may be on ``meta``.
        flops: per second.
        nbytes: that memory moves per second.
        overhead: seconds of starting an operation.
    """
    counts: dict[str, float] = {}

    @contextlib.contextmanager
    def around(node: fx.Node) -> Iterator[None]:
        with FlopCounterMode(display=False) as counter:
            yield
        counts[node.name] = float(counter.get_total_flops())

    values(atoms.captured, around=around)
    kept, found = kept_bytes(atoms), Costs()
    for node in atoms.dynamic:
        own = (*atoms.constants(node), node)
        moved = sum(t.nbytes for one in {*own, *atoms.reads(node)} for t in tensors_of(atoms.values[one]))
        view = bool(tensors_of(atoms.values[node])) and not written(node) and _is_view(atoms, node)
        work = 0.0 if view else max(sum(counts.get(one.name, 0.0) for one in own) / flops, moved / nbytes)
        back = any(t.requires_grad for t in tensors_of(atoms.values[node]))
        found[node.name] = {
            "forward": overhead + work,
            "backward": overhead + 2 * work if back else 0.0,
            "kept": kept[node.name],
            "overhead": overhead,
            "overhead_back": overhead if back else 0.0,
        }
    return found


def _is_view(atoms: Atoms, node: fx.Node) -> bool:
    read = set[int]().union(*(atoms.storages[one] for one in node.all_input_nodes))
    return bool(atoms.storages[node]) and atoms.storages[node] <= read
