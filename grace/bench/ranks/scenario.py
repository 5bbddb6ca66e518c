"""One scenario of a benchmark: ranks that are started over a network, and the result of the first of them."""

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grace.bench.link.emulation import Link
from grace.bench.ranks.events import Follower
from grace.bench.ranks.launchers import launcher
from grace.bench.ranks.run import run_ranks


def run_scenario(
    module: str,
    settings: Any,
    given: Sequence[str],
    ranks: int,
    rate: float | None,
    watch: Callable[[dict[str, Any]], None],
    engine: str = "torch",
    nodes: int | None = None,
) -> dict[str, Any]:
    """Start ranks, and return the result that rank 0 writes in the end.

    Args:
        module: their program; its first argument is a folder with settings.json, to which rank 0 writes events.jsonl.
        settings: a dataclass, or a dict.
        given: further arguments.
        ranks: the number of ranks.
        rate: bits per second of emulated links; None for loopback.
        watch: called with each event.
        engine: the engine that joins them.
        nodes: the number of machines that a link joins; one for each rank if left out.

    Raises:
        LinkError: a network cannot be emulated here.
        WorkerError: a rank failed.
    """
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="grace-bench-")))
        facts = settings if isinstance(settings, dict) else dataclasses.asdict(settings)
        (folder / "settings.json").write_text(json.dumps(facts))
        follower = Follower(folder / "events.jsonl")

        def listen() -> None:
            for event in follower.read_new():
                found.update(event.get("scenario", {}))
                watch(event)

        link = None if rate is None else stack.enter_context(Link(nodes or ranks, rate))
        start = stack.enter_context(launcher(engine, ranks, link))
        run_ranks(start, ["-m", module, str(folder), *given], folder, listen)
    return found
