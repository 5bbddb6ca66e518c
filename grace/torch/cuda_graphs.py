"""Whole steps as CUDA graphs: forward, backward, exchange and optimizer, launched at once.

A replay runs no Python. So nothing of a captured step is read back: whether a rank's gradient overflowed decides on the
device what memories keep, residuals are written in place, and random numbers read their step in memory. Ranks' places
are not compared.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from grace.core.state import State
from grace.core.transactional_dict import is_ours
from grace.errors import ConfigError
from grace.exchange.round_trip import RoundTrip
from grace.torch.optimizer import HookedSession

WARM_UP = 3
"""Steps before the capture: the first one lays out wires, the second keeps residuals, allocators come to rest."""
COMMUNICATORS, MEMORIES = ("allreduce", "allgather"), ("none", "residual")


def capture(optimizer: Any, step: Callable[[], Any], warm_up: int = WARM_UP) -> "CapturedStep":
    """Capture a training step as a CUDA graph; call what is returned for each step.

    Args:
        optimizer: what :func:`grace.DistributedOptimizer` returned.
        step: computes the loss of a batch in tensors that stay where they are, calls ``backward()``, and returns what
            is to be looked at. ``zero_grad()`` comes before it, ``optimizer.step()`` behind it.
        warm_up: real steps that are made first, 2 or more.

    Raises:
        ConfigError: the method, memory, engine or optimizer cannot be captured; nothing was done.
    """
    session: Any = getattr(optimizer, "_grace", None)
    check(session)
    if not all(p.is_cuda for p in session.parameters.values()):
        raise ConfigError(
            "grace.torch.capture: CUDA graphs need all parameters on a GPU; call optimizer.step() instead"
        )
    if warm_up < 2:
        raise ConfigError(f"grace.torch.capture: warm_up must be at least 2, not {warm_up}")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for number in range(warm_up):
            optimizer.zero_grad()
            last = number == warm_up - 1  # as it will be captured, for what that refuses
            with settled_there(session, None) if last else contextlib.nullcontext():
                step()
                optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    optimizer.zero_grad()
    graph, there = torch.cuda.CUDAGraph(), torch.tensor([session.context.step], device="cuda")
    counts = Counts(session)
    recording = torch.cuda.graph(graph, capture_error_mode="thread_local")  # loaders pin memory meanwhile
    with settled_there(session, there), recording:
        result = step()
        optimizer.step()
    counts.take_back()
    states = [part.state for part in session.runner._stepping()]
    return CapturedStep(session.context, graph, there, counts, result, states)


def check(session: Any) -> None:
    """Whether steps can be captured.

    Raises:
        ConfigError: they cannot; the message says why, and what would be right.
    """
    if not isinstance(session, HookedSession):
        raise ConfigError("grace.torch.capture needs what grace.DistributedOptimizer returned, not under Horovod")
    runner = session.runner
    backend = runner.backend
    nccl = backend.name == "torch" and dist.get_backend(getattr(backend, "group", None)) == "nccl"
    said = ""
    if backend.size > 1 and not nccl:
        said = f"{backend.describe()} is not NCCL, whose collectives alone a CUDA graph can hold"
    elif session.passes > 1 or session.grad_scaler is not None or session.auto is not None:
        said = "backward_passes_per_step, a grad_scaler and strategy='auto' decide on the host what a step does"
    elif runner.hierarchical or runner.averages or any(v.sparse for v in runner.variables):
        said = "hierarchical exchanges, sync none(period) and sparse gradients decide on the host what a step does"
    elif any(runner.context.step < communicator.compress_after for communicator in runner.communicators):
        said = "compression has not begun (compress_after), and a graph's collectives are the same at every step"
    elif any(group.get("capturable") is False for group in session.optimizer.param_groups):
        said = f"give {type(session.optimizer).__name__} capturable=True, so that it counts its steps on the GPU"
    for communicator in () if said else runner.communicators:
        said = said or _refused(communicator)
    if said:
        raise ConfigError(f"this step cannot be captured as a CUDA graph: {said}. Call optimizer.step() instead")


def _refused(communicator: Any) -> str:
    """Why what a communicator exchanges cannot be captured; empty if it can."""
    compressor, memory = communicator.compressor, communicator.memory
    if compressor.traits.fixed_size != "by shape" or not is_ours(type(compressor)):
        return f"the size of what {compressor.spec} sends is not known to be the same at every step"
    if communicator.delayed or communicator.name not in COMMUNICATORS:
        return f"{communicator.describe()} has collectives beside {' and '.join(COMMUNICATORS)}"
    if memory.name not in MEMORIES:
        return f"the memory {memory.spec} reads numbers of the host at every step; {' and '.join(MEMORIES)} do not"
    return ""


@contextlib.contextmanager
def settled_there(session: HookedSession, there: torch.Tensor | None) -> Iterator[None]:
    """In this context a step ends on the device: the host learns nothing of it.

    Args:
        there: the step that random numbers are drawn for, which is counted on; None to draw for the host's.
    """
    runner, context = session.runner, session.context

    def settle(trips: Sequence[RoundTrip]) -> None:
        left_out = [n for trip in trips for n, here in zip(trip.names, trip.present, strict=True) if not here]
        if left_out:
            raise ConfigError(
                f"grace.torch.capture: {left_out[0]!r} has no gradient in this step, and needs one in every step "
                "that is captured; freeze it (requires_grad_(False)) before grace.DistributedOptimizer"
            )
        flags = [flag for trip in trips for flag in judged(trip)]
        sound = torch.cat(flags).all() if flags else None

        def write(kept: torch.Tensor, staged: torch.Tensor) -> None:
            kept.copy_(staged if sound is None else torch.where(sound, staged, kept))

        for component in runner._stepping():
            component.state.write(write)
        if there is not None:
            there.add_(1)

    before, runner.resolve, context.device_step = runner.resolve, settle, there
    try:
        yield
    finally:
        runner.resolve, context.device_step = before, None


def judged(trip: RoundTrip) -> list[torch.Tensor]:
    """Return flags, on the device, of whether the means of a round trip are in range; where values would hide it they
    become NaN."""
    found, each = list[torch.Tensor](), list[torch.Tensor]()
    for tensors, _, wanted in trip.header.deferred_reads:
        for tensor, status in zip(tensors, wanted, strict=False):  # step stamps are not compared
            found.append(tensor.reshape(-1).float() == (1.0 if status is None else status))
            if status is not None or trip.traits.rounds > 1:
                each.append(found[-1].expand(len(trip.names)))
    trip.header.deferred_reads = []
    if each and trip.hides_overflow:
        factors = torch.where(torch.stack(each).all(0), 1.0, torch.nan)
        for outcome, factor in zip(trip.outcomes, factors.unbind(), strict=True):
            assert outcome.value is not None  # in a capture each variable has a gradient
            outcome.value.mul_(factor)
    return found


class Counts:
    """What the host counts of a step, which a capture must not and each replay shall."""

    TRAFFIC = ("steps", "header_bytes", "sent_bytes", "dense_bytes", "elements")

    def __init__(self, session: HookedSession):
        self.traffic, self.context = session.runner.traffic, session.context
        self.before = self._now()

    def _now(self) -> tuple[list[int], list[int], dict[str, int]]:
        own = [getattr(self.traffic, key) for key in self.TRAFFIC]
        return own, [self.context.step, self.context.updates], dict(self.traffic.payload_bytes)

    def take_back(self) -> None:
        """What was counted since is to be counted by each :meth:`add`."""
        (now, _, sent), (before, (self.context.step, self.context.updates), had) = self._now(), self.before
        self.more = [b - a for a, b in zip(before, now, strict=True)]
        self.sent = {name: n - had.get(name, 0) for name, n in sent.items()}
        self._count(-1)

    def add(self) -> None:
        """Count a step."""
        self._count(1)
        self.context.step += 1
        self.context.updates += 1

    def _count(self, times: int) -> None:
        for key, n in zip(self.TRAFFIC, self.more, strict=True):
            setattr(self.traffic, key, getattr(self.traffic, key) + times * n)
        for name, n in self.sent.items():
            self.traffic.payload_bytes[name] += times * n


class CapturedStep:
    """A step that was captured; each call makes it once more, and returns what ``step`` returned, anew.

    Attributes:
        result: that.
    """

    def __init__(
        self, context: Any, graph: Any, there: torch.Tensor, counts: Counts, result: Any, states: Sequence[State] = ()
    ):
        self.context, self.graph, self.there, self.counts, self.result = context, graph, there, counts, result
        self.next = context.step
        self.held = list[tuple[State, dict[str, Any], dict[str, Any]]]()
        """The values that the graph reads and writes, and what finishes those that it leaves unfinished."""
        for state in states:
            unfinished = dict(state.deferred)
            with state.without_deferred():
                self.held.append((state, dict(state), unfinished))

    def __call__(self) -> Any:
        """Make the step.

        Raises:
            ConfigError: what was remembered has been reset.
        """
        if self.context.step != self.next:  # a state was loaded, or a step made without the graph
            self.there.fill_(self.context.step)
        for state, values, _ in self.held:
            try:
                state.restore_arrays(values, torch.Tensor.copy_)
            except KeyError as error:
                raise ConfigError(
                    f"grace.torch.capture: what was remembered of {error} was reset, and the graph goes on from it; "
                    "capture the step anew"
                ) from None
        self.graph.replay()
        for state, _, unfinished in self.held:
            state.deferred.update(unfinished)
        self.counts.add()
        self.next = self.context.step
        return self.result
