"""Whole steps: how often the host waits in one, whether a captured one is the eager one, and what they take."""

import contextlib
import functools
import itertools
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import grace
import grace.torch
from grace.bench.ranks.scenario import run_scenario
from grace.bench.step.contestants import Stepper
from grace.bench.step.one_gpu import Lane, Simulated, on_wire, traced
from grace.bench.step.step_rows import EngineRows
from grace.bench.step.step_settings import StepSettings
from grace.core.backend import Handle
from grace.core.registry import make
from grace.torch.cuda_graphs import WARM_UP, capture, check_capturable, ending_on_device
from tools.device import place
from tools.device.events import Log

PRETENDED = 2 if place.INTERPRETED else 8
"""Ranks, whose collectives are copies."""
WATCHED, COMPARED = (1, 2) if place.INTERPRETED else (3, 4)
"""Steps that are watched, and others before."""
SHAPES = [(8, 6), (5,)] if place.INTERPRETED else [(1000, 1024), (1000,), (33, 7)]
KEPT = ("none", "residual")
"""The memories that a graph can hold."""
ROUNDS = 2
TIMED = [("gpt2", 1), ("resnet50", 2)] if place.INTERPRETED else [*itertools.product(("gpt2", "resnet50"), (1, 2))]
"""The model and the ranks of each scenario of whole steps."""


class Straight:
    """A wire without a stream, of a CPU."""

    def carry(self, move: Callable[[], Handle], seconds: Any, sent: Any) -> Handle:
        """Move at once."""
        return move()


class Given(nn.Module):
    """Parameters whose gradients are what lies in ``given``; no product of torch's has a part in them."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ParameterList([torch.zeros(shape, device=place.DEVICE) for shape in SHAPES])
        self.given = [torch.zeros(shape, device=place.DEVICE) for shape in SHAPES]

    def draw(self, number: int) -> None:
        """Another step's gradients."""
        generator = torch.Generator(place.DEVICE).manual_seed(number)
        for tensor in self.given:
            tensor.normal_(generator=generator)

    def forward(self) -> torch.Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.own, self.given, strict=True)]).sum()


def waits(log: Log) -> None:
    """Make steps in which torch raises where the host waits, and count waits by its profiler."""
    for method in log.left(log.settings["trained"]):
        with log.item(method) as row:
            row["said"] = watched(pretending(method))
            row |= counted(pretending(method))


def pretending(method: str) -> Stepper:
    """A step that is one of several ranks', some of which were made; collectives are copies."""
    wire, model = Simulated(PRETENDED, Straight() if place.INTERPRETED else Lane(), None), Given()
    model.draw(0)
    stepper = Stepper(on_wire(method, wire), model, nn.Module.__call__)
    for _ in range(WARM_UP):
        stepper()
    return stepper


def counted(step: Callable[[], Any]) -> dict[str, float]:
    """Return how often the host waits and reads in a step."""
    if place.INTERPRETED:
        step()
        return {"waits_per_step": 0.0, "reads_per_step": 0.0}
    return traced(step)


def watched(step: Callable[[], Any]) -> str:
    """Return torch's traceback of a wait of the host in some steps; empty if there is none."""
    if not place.INTERPRETED:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(WATCHED):
            step()
    except RuntimeError:
        return traceback.format_exc(limit=-12)
    finally:
        if not place.INTERPRETED:
            torch.cuda.set_sync_debug_mode("default")
    return ""


@contextlib.contextmanager
def engine(name: str) -> Iterator[None]:
    """One rank, with or without torch's process group."""
    if name != "local":
        kind = "gloo" if place.INTERPRETED else "nccl"
        dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)
    grace.init("local" if name == "local" else "torch")
    try:
        yield
    finally:
        grace.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()


def captured(log: Log) -> None:
    """Compare the parameters after steps that are replayed with those after eager ones, bit for bit."""
    methods, names = log.settings["trained"], ("local", "process group")
    each = {f"{method}, {name}": (method, name) for name in names for method in methods}
    for item in log.left(list(each)):
        method, name = each[item]
        with log.item(item) as row, engine(name):
            (eager, _), (replayed, said) = trained(method, False), trained(method, True)
            row["equal"] = all(map(torch.equal, eager, replayed))
            row["moved"] = bool(eager[0].any())
            row["said"] = said


def trained(method: str, replays: bool) -> tuple[list[torch.Tensor], str]:
    """The parameters after some steps, and where torch says that the host waited in the last ones; without a GPU what
    is replayed is a step that ends as captured ones do."""
    model = Given()
    model.draw(0)
    memory = None if make("compressor", method).traits.memory in KEPT else "residual"
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = grace.DistributedOptimizer(plain, model, method, memory=memory)

    def backward() -> None:
        model().backward()

    def eager(settled: bool = False) -> None:
        optimizer.zero_grad()
        with ending_on_device(optimizer._grace, None) if settled else contextlib.nullcontext():
            backward()
            optimizer.step()

    if replays and not place.INTERPRETED:
        step = capture(optimizer, backward)  # makes so many steps
    else:
        step = functools.partial(eager, replays)  # type: ignore[assignment]
        check_capturable(optimizer._grace)
        for _ in range(WARM_UP):
            eager()
    for number in range(1, 1 + COMPARED):
        model.draw(number)
        step()
    said = watched(step) if replays else ""
    for _ in range(0 if replays else WATCHED):
        step()
    optimizer.close()
    return [p.detach().clone() for p in model.own], said


def whole(log: Log) -> None:
    """Time whole steps in one process, and of two ranks on the one GPU; methods one by one if together they fail."""
    each = {f"{model}, {'alone' if n == 1 else f'{n} ranks'}": (model, n) for model, n in TIMED}
    methods = log.settings["trained"]
    log.left(list(each))
    for item, given in each.items():
        for together in log.left([item]):
            with log.item(together) as row:
                timed(row, *given, methods)
        apart = {f"{item}, {method}": method for method in methods} if item in log.failed else {}
        for one in log.left(list(apart)):
            with log.item(one) as row:
                timed(row, *given, [apart[one]])


def timed(row: dict[str, Any], model: str, ranks: int, methods: list[str]) -> None:
    """Fill in what each method's steps take, as the ranks tell it."""
    asked = StepSettings(model=f"tools.device.models:{model}", methods=methods, baselines=["ddp"], ranks=[ranks])
    asked.rounds = 1 if place.INTERPRETED else ROUNDS
    table = EngineRows("torch", ranks, None)
    row |= {"model": model, "ranks": ranks}

    def add_event(event: dict[str, Any]) -> None:
        table.add(event)
        row["rows"] = [{k: v for k, v in one.items() if k != "times_ms"} for one in table.rows()]

    row |= run_scenario(["-m", "tools.device.rank"], asked, ["torch"], ranks, None, add_event)
    row["skipped"] = table.facts.get("skipped", {})
