"""``grace warmup``: compile the loops of methods ahead of the first step."""

import contextlib
import os
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import track

from grace.cli.terminal import standard_output
from grace.communicators.choice import build_communicator
from grace.core.backend import LocalBackend
from grace.core.context import Context
from grace.core.registry import aliases, make, parameterless
from grace.core.variable import Variable
from grace.errors import ConfigError, missing_extra
from grace.kernels.dispatch import arrays_by
from grace.kernels.numba.availability import missing
from grace.session.exchange_plan import UniformPlan
from grace.session.setup import build_step_runner

SHAPES = ((160, 110), (9, 5), (3,))
"""Shapes of variables: one for which top-k's threshold is guessed and positions take 16 bits, and smaller ones."""


def warmup(
    methods: Annotated[
        list[str] | None, typer.Argument(help="Compressors, as their specs are written; all, if left out.")
    ] = None,
) -> None:
    """Compile the loops of CPUs ahead, so that no training waits for it; takes about half a minute, once.

    What is compiled is kept beside Grace, or in the folder that NUMBA_CACHE_DIR names, or else in your cache.
    """
    reason = missing()
    if reason == "Numba is not installed":
        raise missing_extra("numba", "torch")
    if reason:
        raise ConfigError(f"there is nothing to compile: {reason}")
    from numba.core import event

    from grace.kernels.numba import compiling, loops

    console = standard_output()
    compiled: list[str] = []
    began = time.monotonic()
    listener: Any = compiling.Listener(compiled.append)
    event.register("numba:compile", listener)
    try:
        specs = methods or [*parameterless("compressor"), *aliases("compressor")]
        for spec in specs:
            make("compressor", spec)  # a mistake is reported before anything is compiled
        for spec in track(specs, "compiling", console=console, disable=not console.is_terminal):
            _run_steps(spec)
    finally:
        event.unregister("numba:compile", listener)
    folder = loops._max_bits._cache.cache_path
    if folder is None:
        raise ConfigError(
            "what is compiled cannot be kept: neither Grace's folder nor your cache can be written to. Set "
            "NUMBA_CACHE_DIR to a folder that can"
        )
    named = os.environ.get("NUMBA_CACHE_DIR", "")
    if named and Path(named).resolve() in Path(folder).resolve().parents:
        folder = named  # Numba has a folder in it for each of Grace's
    done = "All loops are compiled already"
    if compiled:
        done = f"Compiled {len(compiled)} loops in {time.monotonic() - began:.0f} s"
    console.print(f"{done}; they are kept in {folder}.", soft_wrap=True)


def _run_steps(spec: str) -> None:
    """Run a few steps of one rank, with the method's own memory and with residuals, as far as it takes them."""
    from grace.kernels.numba.primitives import NumbaKernels

    if make("compressor", spec).to_dict().get("dtype") == "bf16":  # NumPy has none
        return
    random = np.random.default_rng(0)
    variables = [Variable(f"v{i}", shape) for i, shape in enumerate(SHAPES)]
    for memory in (None, "residual"):
        with warnings.catch_warnings(), contextlib.suppress(ConfigError), arrays_by(NumbaKernels()):
            warnings.simplefilter("ignore")
            build_communicator(spec, memory, None)
            runner = build_step_runner(
                lambda: variables, partial(UniformPlan, spec, memory, None), LocalBackend(), Context()
            )
            for _ in range(3):
                gradients = {v.name: random.standard_normal(v.shape).astype(np.float32) for v in variables}
                for bucket in runner.buckets:
                    mine = [gradients[variable.name] for variable in bucket.variables]
                    runner.start_round_trip(bucket, mine, [True] * len(mine))
                runner.finish_step(lambda bucket: [None] * len(bucket.variables))
            # Whole buckets have loops of their own; variable by variable the method's own methods are used.
            for bucket in runner.buckets:
                for variable in bucket.variables:
                    compressor = bucket.communicator.compressor
                    compressor.decompress(*compressor.compress(gradients[variable.name], variable.name))
            runner.close()
