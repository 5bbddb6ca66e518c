"""``grace warmup``: compile what methods compute with, ahead of the first step."""

import contextlib
import os
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track

from grace.communicators.choice import build_communicator
from grace.core.backend import LocalBackend
from grace.core.context import Context
from grace.core.registry import aliases, known, make
from grace.core.variable import Variable
from grace.errors import ConfigError, missing_extra
from grace.kernels.dispatch import arrays_by
from grace.kernels.fused.availability import missing
from grace.session.plan import UniformPlan
from grace.session.setup import build_step_runner
from grace.session.step_runner import StepRunner

SHAPES = ((160, 110), (9, 5), (3,))
"""One from which top-k's threshold is guessed and positions take 16 bits, and smaller ones."""


def warmup(
    methods: Annotated[
        list[str] | None, typer.Argument(help="Compressors, as their specs are written; all, if left out.")
    ] = None,
) -> None:
    """Compile the loops of CPUs ahead, so that no training waits for it; takes about half a minute, once.

    What is compiled is kept beside Grace, or in the folder that NUMBA_CACHE_DIR names, or else in your cache.
    """
    why = missing()
    if why == "Numba is not installed":
        raise missing_extra("numba", "torch")
    if why:
        raise ConfigError(f"there is nothing to compile: {why}")
    from numba.core import event

    from grace.kernels.fused import compiling, loops

    console, names, began = Console(highlight=False), list[str](), time.monotonic()
    listener: Any = compiling.Listener(names.append)
    event.register("numba:compile", listener)
    try:
        specs = methods or _specs()
        for spec in specs:
            make("compressor", spec)  # what is wrong is said before anything is compiled
        for spec in track(specs, "compiling", console=console, disable=not console.is_terminal):
            _run(spec)
    finally:
        event.unregister("numba:compile", listener)
    where = loops._max_bits._cache.cache_path
    if where is None:
        raise ConfigError(
            "what is compiled cannot be kept: neither Grace's folder nor your cache can be written to. Set "
            "NUMBA_CACHE_DIR to a folder that can"
        )
    named = os.environ.get("NUMBA_CACHE_DIR", "")
    if named and Path(named).resolve() in Path(where).resolve().parents:
        where = named  # Numba has a folder in it for each of Grace's
    if names:
        done = f"Compiled {len(names)} loops in {time.monotonic() - began:.0f} s; they are kept in {where}."
    else:
        done = f"All loops are compiled already; they are kept in {where}."
    console.print(done, soft_wrap=True)


def _specs() -> list[str]:
    """Every method that can be made without parameters, by all its names."""
    found = []
    for name in [*known("compressor"), *aliases("compressor")]:
        with contextlib.suppress(ConfigError):
            make("compressor", name)
            found.append(name)
    return found


def _runner(found: list[Variable], plan: UniformPlan) -> StepRunner:
    return build_step_runner(lambda: found, lambda: plan, LocalBackend(), Context())


def _run(spec: str) -> None:
    """A few steps of one rank, with its own memory and with residuals, if that may be."""
    from grace.kernels.fused.primitives import FusedKernels

    if make("compressor", spec).to_dict().get("dtype") == "bf16":  # NumPy has none
        return
    kernels, rng = FusedKernels(), np.random.default_rng(0)
    for memory in (None, "residual"):
        with warnings.catch_warnings(), contextlib.suppress(ConfigError), arrays_by(kernels):
            warnings.simplefilter("ignore")
            build_communicator(spec, memory, None)
            found = [Variable(f"v{i}", shape) for i, shape in enumerate(SHAPES)]
            plan = UniformPlan(spec, memory, None)
            runner = _runner(found, plan)
            for _ in range(3):
                gradients = {v.name: rng.standard_normal(v.shape).astype(np.float32) for v in found}
                for bucket in runner.buckets:
                    mine = [gradients[variable.name] for variable in bucket.variables]
                    runner.start(bucket, mine, [True] * len(mine))
                runner.finish_step(lambda bucket: [None] * len(bucket.variables))
            runner.close()
