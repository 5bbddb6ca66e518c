"""Whole steps as CUDA graphs: forward, backward, exchange and optimizer, launched at once.

A replay runs no Python, so nothing of a captured step is read back. Flags on the device decide after an overflow that
memories keep their old state, residuals are written in place, and random numbers read the step number from device
memory. The ranks' step stamps are not compared.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from grace.core.communicator import Communicator
from grace.core.component import is_ours
from grace.core.context import Context
from grace.core.state import State, Values
from grace.errors import ConfigError
from grace.exchange.bucket import Traffic
from grace.exchange.round_trip import RoundTrip
from grace.session.step_runner import StepRunner
from grace.torch.optimizer import HookedSession

T = TypeVar("T")
"""Type of the result of a step."""
WARM_UP = 3
"""Steps before the capture: the first lays out wires, the second creates residuals, and caching allocators settle."""
COMMUNICATORS = ("allreduce", "allgather")
MEMORIES = ("none", "residual")


def capture(optimizer: torch.optim.Optimizer, step: Callable[[], T], warm_up: int = WARM_UP) -> "CapturedStep[T]":
    """Capture a training step as a CUDA graph. Call the returned object for each step.

    Args:
        optimizer: the result of :func:`grace.DistributedOptimizer`.
        step: a function that computes the loss of a batch in tensors whose addresses do not change, calls
            ``backward()``, and returns the tensors to observe. ``zero_grad()`` is called before it, and
            ``optimizer.step()`` after it.
        warm_up: number of real steps that are made first, 2 or more.

    Raises:
        ConfigError: the method, memory, engine or optimizer cannot be captured; nothing was done.
    """
    session: Any = getattr(optimizer, "_grace", None)
    check_capturable(session)
    if not all(p.is_cuda for p in session.parameters.values()):
        raise ConfigError(
            "grace.torch.capture: CUDA graphs need all parameters on a GPU; call optimizer.step() instead"
        )
    if warm_up < 2:
        raise ConfigError(f"grace.torch.capture: warm_up must be at least 2, not {warm_up}")
    stream = torch.cuda.Stream()  # torch demands that a graph's warm-up runs on a stream of its own
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for number in range(warm_up):
            optimizer.zero_grad()
            last = number == warm_up - 1  # made as it will be captured, so that errors come before the capture
            with ending_on_device(session, None) if last else contextlib.nullcontext():
                step()
                optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    device_step = torch.tensor([session.context.step], device="cuda")
    counts = Counts(session)
    recording = torch.cuda.graph(
        graph, capture_error_mode="thread_local"
    )  # threads of data loaders may pin memory meanwhile
    with ending_on_device(session, device_step), recording:
        result = step()
        optimizer.step()
    counts.subtract_capture()  # a capture runs the step's Python, but no kernels
    states = [part.state for part in session.runner.step_components()]
    return CapturedStep(session.context, graph, device_step, counts, result, states)


def check_capturable(session: object) -> None:
    """Refuse sessions whose steps cannot be captured.

    Raises:
        ConfigError: the steps cannot be captured; the message has the reason and the remedy.
    """
    if not isinstance(session, HookedSession):
        raise ConfigError("grace.torch.capture takes a grace.DistributedOptimizer, and none under Horovod")
    runner = session.runner
    backend = runner.backend
    nccl = backend.name == "torch" and dist.get_backend(getattr(backend, "group", None)) == "nccl"
    reason = ""
    if backend.size > 1 and not nccl:
        reason = f"{backend.describe()} is not NCCL, and a CUDA graph can have no other collectives"
    elif session.passes > 1 or session.grad_scaler is not None or session.driver is not None:
        reason = "backward_passes_per_step, a grad_scaler and strategy='auto' decide on the host what a step does"
    elif runner.hierarchical or runner.outer_rounds or any(v.sparse for v in runner.variables):
        reason = "hierarchical exchanges, outer rounds and sparse gradients decide on the host what a step does"
    elif any(runner.context.step < communicator.compress_after for communicator in runner.communicators):
        reason = "compression has not begun (compress_after), and a graph's collectives are the same at every step"
    elif any(group.get("capturable") is False for group in session.optimizer.param_groups):
        reason = f"give {type(session.optimizer).__name__} capturable=True, so that it counts its steps on the GPU"
    for communicator in runner.communicators:
        reason = reason or _refusal_reason(communicator)
    if reason:
        raise ConfigError(f"this step cannot be captured as a CUDA graph: {reason}. Call optimizer.step() instead")


def _refusal_reason(communicator: Communicator) -> str:
    """Return the reason why the exchange of a communicator cannot be captured; empty if it can."""
    compressor = communicator.compressor
    memory = communicator.memory
    if compressor.traits.fixed_size != "by shape" or not is_ours(type(compressor)):
        return f"the size of what {compressor.spec} sends is not known to be the same at every step"
    if communicator.delayed or communicator.name not in COMMUNICATORS:
        return f"{communicator.describe()} has collectives beside {' and '.join(COMMUNICATORS)}"
    if memory.name not in MEMORIES:
        return f"the memory {memory.spec} reads numbers of the host at every step; {' and '.join(MEMORIES)} do not"
    return ""


@contextlib.contextmanager
def ending_on_device(session: HookedSession, device_step: torch.Tensor | None) -> Iterator[None]:
    """Return a context in which steps end on the device: the host reads no header.

    Args:
        device_step: the step number for random numbers, which each step increments; None to use the host's number.
    """
    runner = session.runner
    context = session.context
    read_on_host = runner.resolve_headers
    runner.resolve_headers = partial(commit_on_device, runner, device_step)
    context.device_step = device_step
    try:
        yield
    finally:
        runner.resolve_headers = read_on_host
        context.device_step = None


def commit_on_device(runner: StepRunner, device_step: torch.Tensor | None, trips: Sequence[RoundTrip]) -> None:
    """Commit the state of memories on the device if the means of all round trips are in range, else keep the old state.

    Raises:
        ConfigError: a variable has no gradient in this step.
    """
    missing = [name for trip in trips for name, present in zip(trip.names, trip.present, strict=True) if not present]
    if missing:
        raise ConfigError(
            f"grace.torch.capture: {missing[0]!r} has no gradient in this step, and needs one in every step "
            "that is captured; freeze it (requires_grad_(False)) before grace.DistributedOptimizer"
        )
    flags = [flag for trip in trips for flag in in_range_flags(trip)]
    in_range = torch.cat(flags).all() if flags else None

    def write(kept: torch.Tensor, staged: torch.Tensor) -> None:
        """Overwrite a kept tensor with the staged one, in place, if all means are in range."""
        kept.copy_(staged if in_range is None else torch.where(in_range, staged, kept))

    for component in runner.step_components():
        component.state.write(write)
    if device_step is not None:
        device_step.add_(1)


def in_range_flags(trip: RoundTrip) -> list[torch.Tensor]:
    """Return flags, on the device, that the means of a round trip are in range. Means that would hide an overflow
    become NaN."""
    flags = list[torch.Tensor]()
    per_variable = list[torch.Tensor]()
    for deferred in trip.header.deferred_reads:
        for tensor, status in zip(deferred.tensors, deferred.expected, strict=False):  # step stamps are not compared
            flags.append(tensor.reshape(-1).float() == (1.0 if status is None else status))
            if status is not None or trip.traits.rounds > 1:
                per_variable.append(flags[-1].expand(len(trip.names)))
    trip.header.deferred_reads = []
    if per_variable and trip.hides_overflow:
        factors = torch.where(torch.stack(per_variable).all(0), 1.0, torch.nan)
        for outcome, factor in zip(trip.outcomes, factors.unbind(), strict=True):
            assert outcome.value is not None  # in a capture each variable has a gradient
            outcome.value.mul_(factor)
    return flags


class Counts:
    """The host's counts of a step. A capture must not change them, and each replay must."""

    TRAFFIC = [one.name for one in dataclasses.fields(Traffic) if one.type is int]

    def __init__(self, session: HookedSession):
        self.traffic = session.runner.traffic
        self.context = session.context
        self.before = self._snapshot()

    def _snapshot(self) -> tuple[list[int], list[int], dict[str, int]]:
        """Return the current traffic, counters and payload bytes."""
        traffic = [getattr(self.traffic, key) for key in self.TRAFFIC]
        return traffic, [self.context.step, self.context.updates], dict(self.traffic.payload_bytes)

    def subtract_capture(self) -> None:
        """Subtract the counts since the constructor; each :meth:`add` then adds them."""
        traffic, _, payload_bytes = self._snapshot()
        traffic_before, (step, updates), payload_bytes_before = self.before
        self.context.step = step
        self.context.updates = updates
        self.traffic_of_step = [after - before for before, after in zip(traffic_before, traffic, strict=True)]
        self.payload_bytes_of_step = {name: n - payload_bytes_before.get(name, 0) for name, n in payload_bytes.items()}
        self._count(-1)

    def add(self) -> None:
        """Add the counts of one step."""
        self._count(1)
        self.context.step += 1
        self.context.updates += 1

    def _count(self, times: int) -> None:
        """Add a number of times the counts of a captured step."""
        for key, n in zip(self.TRAFFIC, self.traffic_of_step, strict=True):
            setattr(self.traffic, key, getattr(self.traffic, key) + times * n)
        for name, n in self.payload_bytes_of_step.items():
            self.traffic.payload_bytes[name] += times * n


class CapturedStep(Generic[T]):
    """A captured step. Each call makes it once more, and returns the result of ``step``, computed anew.

    Attributes:
        result: the tensors that ``step`` returned, which each replay overwrites.
    """

    def __init__(
        self,
        context: Context,
        graph: torch.cuda.CUDAGraph,
        device_step: torch.Tensor,
        counts: Counts,
        result: T,
        states: Sequence[State] = (),
    ):
        self.context = context
        self.graph = graph
        self.device_step = device_step
        self.counts = counts
        self.result = result
        self.next = context.step
        self.held = list[tuple[State, Values, dict[str, Any]]]()
        """Each state, its tensors that the graph reads and writes, and the functions that complete unfinished ones."""
        for state in states:
            unfinished = dict(state.deferred)
            with state.without_deferred():
                self.held.append((state, dict(state), unfinished))

    def __call__(self) -> T:
        """Make the step once, and return its result.

        Raises:
            ConfigError: the state of a memory was reset since the capture.
        """
        if self.context.step != self.next:  # a state was loaded, or a step made without the graph
            self.device_step.fill_(self.context.step)
        for state, values, _ in self.held:
            try:
                state.restore_arrays(values, torch.Tensor.copy_)
            except KeyError as error:
                raise ConfigError(
                    f"grace.torch.capture: the memory of {error} was reset, and the graph still uses the former one; "
                    "capture the step anew"
                ) from None
        self.graph.replay()
        for state, _, unfinished in self.held:
            state.deferred.update(unfinished)
        self.counts.add()
        self.next = self.context.step
        return self.result
