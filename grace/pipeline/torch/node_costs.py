"""Costs of each atomic subcomponent: measured seconds, or seconds estimated from FLOPs and bytes without running
anything."""

import contextlib
import functools
import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from grace.core.atomic_files import atomic_write
from grace.pipeline.planning.graph import Graph
from grace.pipeline.torch.atomic_subcomponents import Atoms, CapturedBatch, storage_ids, tensor_leaves
from grace.pipeline.torch.batches import slice_rows
from grace.pipeline.torch.capture import (
    check_plain_model,
    fake_values,
    first_device,
    split_call,
    training_mode,
    written_nodes,
)

REPEATS = 5
"""Least number of runs of a node."""
MOST = 30
"""Largest number of runs of a node."""
SPREAD = 0.1
"""Width of the middle half of the runs, relative to their median, at which they are steady."""
SECONDS = 0.1
"""Seconds after which no further runs of a node are made."""
FLOPS = 50e9
"""FLOPs per second of a CPU core, for estimates."""
BYTES = 10e9
"""Bytes per second that memory moves, for estimates."""
OVERHEAD = 5e-6
"""Seconds of starting an operation, for estimates."""
VERSION = 1

NodeCosts = dict[str, dict[str, float]]


def cache_file() -> Path:
    """Return the file of profiles: in ``$XDG_CACHE_HOME/grace``, or else in ``~/.cache/grace``."""
    try:
        home = Path.home()
    except RuntimeError:  # a container's user may have a number, but no name and no home
        home = Path(os.devnull)
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache", "grace", "pipeline-profiles.json")


def _machine() -> str:
    """Return a description of the hardware. Machines of different kinds may share a home directory."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores, {gpu}"


_memory: dict[str, list[float]] = {}


def measure_costs(
    atoms: Atoms, flat: Sequence[object], file: str | Path | None = None, local_ranks: int = 1
) -> NodeCosts:
    """Measure the seconds of forward and backward, and the bytes kept, of each atomic subcomponent, by running it on
    real inputs.

    Identical subgraphs (operations, shapes, dtypes, devices) are measured once, in this process and, if there is a
    ``file`` of profiles, in all processes that use it, if as many ranks of a host measure at once.

    >>> from grace.pipeline.torch.capture import capture
    >>> x = torch.ones(4, 2)
    >>> costs = measure_costs(Atoms(capture(torch.nn.Linear(2, 3), (x,))), [x])
    >>> sorted(costs["linear"]), costs["linear"]["forward"] > 0
    (['backward', 'forward', 'kept'], True)
    """
    known = _read_profiles(file)
    count = len(known)
    costs = _Measure(atoms, known, local_ranks).costs(flat)
    if file is not None and len(known) > count:
        with contextlib.suppress(OSError):  # a cache that cannot be written is left out
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(file) as draft:
                # read again: other processes may have written to it meanwhile
                draft.write_text(json.dumps({"version": VERSION, "seconds": {**_read_profiles(file), **known}}))
    return costs


def costs_by_rows(
    batch: CapturedBatch, dry: bool = False, file: str | Path | None = None, local_ranks: int = 1
) -> NodeCosts:
    """Return costs with the part of each that does not depend on rows: starting operations, reading weights and writing
    their gradients take as long for a micro-batch of few rows. A second batch, of a quarter of the rows, tells it.

    Args:
        batch: the model, captured for a batch.
        dry: True to estimate costs (:func:`estimate_costs`), as for a model on ``meta``, instead of measuring them.
        file, local_ranks: see :func:`measure_costs`.

    >>> from grace.pipeline.torch.atomic_subcomponents import CapturedBatch
    >>> cost = costs_by_rows(CapturedBatch(torch.nn.Linear(256, 256), (torch.ones(64, 256),), {}))["linear"]
    >>> 0 <= cost["overhead"] <= cost["forward"], 0 <= cost["overhead_back"] <= cost["backward"]
    (True, True)
    """
    dry = dry or any(p.is_meta for p in batch.model.parameters())
    fixed_parts = {"kept": "kept_fixed"}
    if not dry:  # estimates know the overhead
        fixed_parts |= {"forward": "overhead", "backward": "overhead_back"}

    def costs_of(some: CapturedBatch) -> NodeCosts:
        """Return the costs of a batch."""
        return estimate_costs(some.atoms) if dry else measure_costs(some.atoms, some.flat, file, local_ranks)

    costs = costs_of(batch)
    few = max(batch.rows // 4, 2)
    if few >= batch.rows:
        return costs
    try:
        smaller = costs_of(batch.with_inputs(slice_rows(batch.flat, batch.rows, 0, few, batch.whole)))
    except Exception:  # the model takes batches of the original size only
        return costs
    for name, cost in costs.items():
        for key, part in fixed_parts.items():
            if name in smaller:
                slope = max(0.0, cost[key] - smaller[name][key]) / (batch.rows - few)
                cost[part] = max(0.0, cost[key] - slope * batch.rows)
    return costs


def build_graph(model: torch.nn.Module, example_inputs: object, dry: bool = False) -> Graph:
    """Return a model's atomic subcomponents and their costs, as :class:`grace.torch.Pipeline` plans with on every rank.

    Args:
        model: any module that ``torch.export`` takes. One on ``meta`` is never run.
        example_inputs: as :class:`grace.torch.Pipeline` takes them.
        dry: estimate seconds from FLOPs and bytes, and run nothing.

    Raises:
        ConfigError: ``torch.export`` cannot take the model, or it is not a plain module.

    >>> graph = build_graph(torch.nn.Linear(2, 3), torch.ones(4, 2), dry=True)
    >>> graph.rows, [node.name for node in graph.nodes], graph.variable("weight").shape
    (4, ['linear'], (3, 2))
    """
    check_plain_model(model)
    with training_mode(model):
        batch = CapturedBatch(model, *split_call(example_inputs))
        return batch.atoms.graph(batch.rows, costs_by_rows(batch, dry))


def _read_profiles(file: str | Path | None) -> dict[str, list[float]]:
    """Return the profiles of this process and of the file. A damaged file counts as empty."""
    if file is None:
        return _memory
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError, KeyError):  # a damaged file is left out
        document = json.loads(Path(file).read_text())
        if document["version"] == VERSION:
            known = {key: [float(one), float(other)] for key, (one, other) in document["seconds"].items()}
            return {**_memory, **known}
    return dict(_memory)


class _Measure(fx.Interpreter):
    """Interpreter that runs the graph once with real values, and times each node by repeated runs."""

    def __init__(self, atoms: Atoms, known: dict[str, list[float]], local_ranks: int):
        super().__init__(atoms.captured.module)
        self.atoms = atoms
        self.known = known
        self.found = dict[str, list[float]]()
        self.machine = f"{_machine()}, {local_ranks} ranks"

    def costs(self, flat: Sequence[object]) -> NodeCosts:
        """Run the graph, and return the costs of its dynamic nodes."""
        # training draws the numbers that it would draw without a measurement
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            self.run(*(_clone(one) for one in flat), enable_io_processing=False)
        _memory.update(self.known)
        kept = kept_bytes(self.atoms)
        return {
            name: {"forward": forward, "backward": backward, "kept": kept[name]}
            for name, (forward, backward) in self.found.items()
        }

    def fetch_attr(self, target: str) -> object:
        """Return a copy of a parameter, buffer or constant."""
        return _clone(self.atoms.captured.attributes[target])  # operations write to the copy, and not to the model

    def run_node(self, n: fx.Node) -> object:
        """Run a node, and time it unless its seconds are known."""
        if n.op == "output":
            return None
        if n in self.atoms.dynamic:
            key = self._key(n)
            if key not in self.known:
                self.known[key] = list(self._seconds(n))
            self.found[n.name] = self.known[key]
        with torch.no_grad():  # each node is differentiated by itself, from leaves
            return super().run_node(n)

    def _key(self, node: fx.Node) -> str:
        """Return a digest of a node with the constants that feed it."""
        named: dict[fx.Node, int] = {}
        lines = [self.machine, str(torch.get_num_threads()), str(torch.is_autocast_enabled()), str(torch.__version__)]
        for one in (*self.atoms.reads(node), *self.atoms.constants(node), node):
            named[one] = len(named)
            value = self.atoms.values[one]
            shapes = [
                (tuple(t.shape), t.stride(), str(t.dtype), str(t.device), t.requires_grad) for t in tensor_leaves(value)
            ]
            args = fx.map_arg((one.args, one.kwargs), lambda other: f"%{named.get(other)}")
            code = value.code if isinstance(value, fx.GraphModule) else ""  # a branch of torch.cond
            lines.append(f"{'' if one.op != 'call_function' else one.target} {args} {shapes} {code}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]

    def _seconds(self, node: fx.Node) -> tuple[float, float]:
        """Return the median seconds of forward and of backward of a node."""
        constants = self.atoms.constants(node)
        attributes = {one: self.fetch_attr(str(one.target)) for one in constants if one.op == "get_attr"}
        given = {**{one: self.env[one] for one in self.atoms.reads(node)}, **attributes}
        sums = {
            one: torch.zeros_like(value)
            for one, value in attributes.items()
            if isinstance(value, torch.Tensor) and _requires_grad(self.atoms.values[one])
        }
        writes = bool(written_nodes(node))
        forward = list[float]()
        backward = list[float]()
        start = time.perf_counter()
        while True:
            env = {one: pytree.tree_map(_leaf, value, self.atoms.values[one]) for one, value in given.items()}
            for one, total in sums.items():
                env[one].grad = total  # micro-batches add up gradients
            leaves = [t for t in tensor_leaves(list(env.values())) if t.requires_grad]
            if writes:  # autograd refuses to write to leaves in place
                env = pytree.tree_map_only(torch.Tensor, torch.clone, env)
            began = _time_when_done(env)
            for one in (*constants, node):
                if one not in env:
                    args, kwargs = fx.map_arg((one.args, one.kwargs), env.__getitem__)
                    env[one] = one.target(*args, **kwargs)  # type: ignore[operator]
            forward.append(_time_when_done(env) - began)
            outputs = [t for t in tensor_leaves(env[node]) if t.requires_grad]
            if outputs and leaves:
                ones = [torch.ones_like(t) for t in outputs]
                began = _time_when_done(env)
                torch.autograd.backward(outputs, ones, inputs=leaves)
                backward.append(_time_when_done(env) - began)
            spent = time.perf_counter() - start
            if len(forward) >= MOST or (len(forward) >= REPEATS and (_steady(forward, backward) or spent > SECONDS)):
                return statistics.median(forward), statistics.median(backward or [0.0])


def _steady(*runs: Sequence[float]) -> bool:
    """Return True if the middle half of each list of seconds lies within SPREAD of the median."""
    for seconds in runs:
        if seconds:
            low, middle, high = statistics.quantiles(seconds, n=4)
            if high - low > SPREAD * middle:
                return False
    return True


def _time_when_done(env: Mapping[fx.Node, object]) -> float:
    """Return the time once the device has finished its work, in seconds."""
    device = first_device(tensor_leaves(list(env.values())))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _requires_grad(value: object) -> bool:
    """Return True for a tensor that requires gradients."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def _clone(value: object) -> object:
    """Return a copy of a tensor; any other value as it is."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _leaf(value: object, like: object) -> object:
    """Return a value as a node reads it, as a leaf with a gradient of its own if it has one."""
    return value.detach().requires_grad_(_requires_grad(like)) if isinstance(value, torch.Tensor) else value


def kept_bytes(atoms: Atoms) -> dict[str, float]:
    """Return the bytes that each node's forward keeps for backward: distinct storages that autograd saves, or that the
    model returns, each at the node that makes it. Parameters, buffers and the model's inputs are left out."""
    kept = dict.fromkeys((node.name for node in atoms.dynamic), 0.0)
    seen: dict[int, object] = {}  # the tensors are kept alive: another storage could get the id of one that is freed
    feeds = {one: node.name for node in reversed(atoms.dynamic) for one in (*atoms.constants(node), node)}
    makers: dict[int, fx.Node] = {}

    def save(node: fx.Node, tensor: torch.Tensor) -> torch.Tensor:
        """Count a saved tensor's storage at the node that made it."""
        storage = tensor.untyped_storage()
        maker = makers.get(storage._cdata, node)
        if storage._cdata not in seen and maker in feeds:
            seen[storage._cdata] = tensor
            kept[feeds[maker]] += storage.nbytes()
        return tensor

    def saving(node: fx.Node) -> contextlib.AbstractContextManager[None]:
        """Return a context that counts the tensors that a node saves."""
        return torch.autograd.graph.saved_tensors_hooks(functools.partial(save, node), lambda tensor: tensor)

    def record(node: fx.Node, value: object) -> None:
        """Record the storages of a value, and the node that made them."""
        for storage in storage_ids(value):
            makers.setdefault(storage, node)  # a view has the storage of the node that it views
            if node.op != "call_function":  # parameters and inputs are there without being kept
                seen.setdefault(storage, value)

    value_of = fake_values(atoms.captured, context_of=saving, on_value=record)
    for node in atoms.outputs():
        for tensor in tensor_leaves(value_of[node]):
            save(node, tensor)
    return kept


def estimate_costs(atoms: Atoms, flops: float = FLOPS, nbytes: float = BYTES, overhead: float = OVERHEAD) -> NodeCosts:
    """Estimate costs without running anything, of a model that may be on ``meta``: forward = overhead + max(FLOPs /
    ``flops``, bytes / ``nbytes``), backward = overhead + twice the rest."""
    counts: dict[str, float] = {}

    @contextlib.contextmanager
    def counting(node: fx.Node) -> Iterator[None]:
        """Count the FLOPs of a node in this context."""
        with FlopCounterMode(display=False) as counter:
            yield
        counts[node.name] = float(counter.get_total_flops())

    fake_values(atoms.captured, context_of=counting)
    kept = kept_bytes(atoms)
    costs = NodeCosts()
    for node in atoms.dynamic:
        own = (*atoms.constants(node), node)
        moved = sum(t.nbytes for one in {*own, *atoms.reads(node)} for t in tensor_leaves(atoms.values[one]))
        view = bool(tensor_leaves(atoms.values[node])) and not written_nodes(node) and _is_view(atoms, node)
        work = 0.0 if view else max(sum(counts.get(one.name, 0.0) for one in own) / flops, moved / nbytes)
        back = any(t.requires_grad for t in tensor_leaves(atoms.values[node]))
        costs[node.name] = {
            "forward": overhead + work,
            "backward": overhead + 2 * work if back else 0.0,
            "kept": kept[node.name],
            "overhead": overhead,
            "overhead_back": overhead if back else 0.0,
        }
    return costs


def _is_view(atoms: Atoms, node: fx.Node) -> bool:
    """Return True if all storages of a node's value are those of its inputs."""
    read = set[int]().union(*(atoms.storages[one] for one in node.all_input_nodes))
    return bool(atoms.storages[node]) and atoms.storages[node] <= read
