"""The host's time of a step: launches, copies, waits, and the functions that it is found in."""

import functools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import grace
from tools.device import models, place
from tools.device.events import Log

STEPS = 1 if place.INTERPRETED else 15
EVERY = 5e-4
"""Seconds between looks at the stacks of all threads."""
SHOWN = 12
WATCHED = ("launch", "to_device", "to_host")
"""Functions that are timed: a kernel's launch, a copy to the device, and one back, which waits."""


def host(log: Log) -> None:
    """Tell what each method's steps of ResNet-50 cost the host, on one rank."""
    for method in log.left(["no exchange", *log.settings["trained"]]):
        with log.item(method) as row:
            grace.init("local")
            try:
                step = stepper(None if method == "no exchange" else method)
                row["step_ms"] = elapsed_ms(step)
                row |= watched(step)
                row["functions"] = sampled(step)
            finally:
                grace.shutdown()


def stepper(method: str | None) -> Callable[[], Any]:
    """A training step of ResNet-50, some of which were made."""
    model, loss, _ = models.resnet50()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4)
    if method is not None:
        optimizer = grace.DistributedOptimizer(optimizer, model, compressor=method)

    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    for _ in range(3 if place.INTERPRETED else 6):
        step()
    return step


def elapsed_ms(step: Callable[[], Any]) -> float:
    """The milliseconds of a step, of several in a row."""
    clock = place.clock()
    clock.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    clock.synchronize()
    return 1e3 * (time.perf_counter() - began) / STEPS


def watched(step: Callable[[], Any]) -> dict[str, float]:
    """Return how often a step calls each watched function, and the milliseconds in it."""
    spent, calls = Counter[str](), Counter[str]()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **more: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **more)
            finally:
                spent[name] += time.perf_counter() - began
                calls[name] += 1

        return call

    modules = [module for name, module in list(sys.modules.items()) if name.startswith("grace.")]
    taken = [(module, name, vars(module)[name]) for module in modules for name in WATCHED if name in vars(module)]
    try:
        for module, name, function in taken:
            setattr(module, name, timed(name, function))
        for _ in range(STEPS):
            step()
    finally:
        for module, name, function in taken:
            setattr(module, name, function)
    found = {f"{name}_ms": 1e3 * spent[name] / STEPS for name in WATCHED}
    return found | {f"{name}_calls": calls[name] / STEPS for name in WATCHED}


def sampled(step: Callable[[], Any]) -> dict[str, float]:
    """Grace's functions in which most of a step's time was spent, with what they call, in milliseconds."""
    found, looks, ended = Counter[str](), 0, threading.Event()

    def look() -> None:
        nonlocal looks
        while not ended.wait(EVERY):
            looks += 1
            for frame in sys._current_frames().values():
                found.update(functions_of(frame))

    watcher, before = threading.Thread(target=look, daemon=True), sys.getswitchinterval()
    sys.setswitchinterval(EVERY / 2)
    watcher.start()
    try:
        took = elapsed_ms(step)
    finally:
        ended.set()
        watcher.join()
        sys.setswitchinterval(before)
    return {name: took * count / max(1, looks) for name, count in found.most_common(SHOWN)}


def functions_of(frame: Any) -> set[str]:
    """Grace's functions on a stack, each once."""
    found = set()
    while frame is not None:
        folder, _, file = frame.f_code.co_filename.rpartition("/grace/")
        if folder:
            found.add(f"{file}:{frame.f_code.co_name}")
        frame = frame.f_back
    return found
