"""The recorder of a training run's events, which shows where its time goes.

If the environment variable GRACE_TRACE names a folder, every rank writes a file ``rankN.jsonl`` there, and
``grace trace FOLDER`` merges them into one timeline. The first GRACE_TRACE_SKIP steps (5) are left out, the next
GRACE_TRACE_STEPS (50) are recorded; outside of these, and without a trace, a phase costs one read of a variable.

Times are the host's: on a GPU, where operations are started and not awaited, they are the times to start operations.
Events only read clocks: a traced step runs the same program as any other. If a bucket is encoded in one pass, each
variable's event gets its share of the time by its number of elements. Events are written at the end of each step, so
that a killed rank leaves all events of its earlier steps.
"""

import atexit
import contextlib
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from grace.core.backend import Backend
from grace.core.variable import Variable
from grace.errors import ConfigError

T = TypeVar("T")
FOLDER, STEPS, SKIP = "GRACE_TRACE", "GRACE_TRACE_STEPS", "GRACE_TRACE_SKIP"
DEFAULT_STEPS, DEFAULT_SKIP = 50, 5
FORMAT = 1
"""Version of the format of the ranks' files; other versions are refused."""
STEP_TRACK, COLLECTIVE_TRACK, FIRST_THREAD = 0, 1, 2
"""Numbers of a rank's tracks: steps, collectives, and the first of its threads."""

run: "Recorder | None" = None
"""Recorder of this process; None without a trace. Sessions call it for gradients, exchanges and updates."""
active: "Recorder | None" = None
"""Recorder of this process during the steps that are recorded; else None."""
_NOTHING = contextlib.nullcontext()


class Recorder:
    """Recorder of one rank's events, which are in a list until the step ends, then in its file.

    The file has one JSON object per line: events of Chrome's trace format, but in nanoseconds of the rank's own clock,
    and facts (objects without "ph").

    Args:
        folder: the folder of the file.
        rank, size: the number of this rank, and of all ranks.
        steps: number of steps that are recorded.
        skip: number of steps before them.
        engine: description of the backend.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, folder: Path, rank: int, size: int, steps: int, skip: int, engine: str = ""):
        self.path = folder / f"rank{rank}.jsonl"
        self.steps = steps
        self.skip = skip
        self.pid = os.getpid()
        offset = time.time_ns() - time.perf_counter_ns()
        facts = {"rank": rank, "size": size, "host": socket.gethostname(), "engine": engine, "offset": offset}
        self.events: list[dict[str, object]] = [{"grace_trace": FORMAT, **facts}]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.path.write_text("", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{FOLDER}={folder}: cannot write {self.path}: {error.strerror}") from error
        self.tracks: dict[int, int] = {}
        self.ids = itertools.count()
        self.updates_follow = False
        self.number = 0
        self.began = time.perf_counter_ns()
        self.backward: tuple[int, int] | None = None
        self.update_began: int | None = None
        self.exchanged_at: int | None = None
        self.note(tracks={STEP_TRACK: "steps", COLLECTIVE_TRACK: "collectives"})

    @property
    def recording(self) -> bool:
        """True if the current step is recorded."""
        return self.skip <= self.number < self.skip + self.steps

    # -- events ----------------------------------------------------------------------------------------

    def note(self, **facts: object) -> None:
        """Record facts about the rank. Dicts are merged with earlier ones of the same name."""
        self.events.append(facts)

    def add(self, name: str, kind: str, began: int, ended: int, track: int, args: dict[str, object]) -> None:
        """Record a complete event; times are in nanoseconds."""
        self.events.append(
            {"ph": "X", "name": name, "cat": kind, "ts": began, "dur": ended - began, "tid": track, "args": args}
        )

    def track(self) -> int:
        """Return the track of the current thread."""
        ident = threading.get_ident()
        if ident not in self.tracks:
            self.tracks[ident] = track = FIRST_THREAD + len(self.tracks)
            thread = threading.current_thread()
            name = "training" if thread is threading.main_thread() else thread.name.replace("Dummy-", "thread ")
            self.note(tracks={track: name})
        return self.tracks[ident]

    def write(self) -> None:
        """Append the recorded events to the file. If that fails, training continues, and the trace ends."""
        if os.getpid() != self.pid:  # a forked child must not write into its parent's file
            return
        if not self.events:
            return
        count = len(self.events)
        lines = [json.dumps(event, separators=(",", ":"), default=str) for event in self.events[:count]]
        del self.events[:count]  # other threads may have added some meanwhile
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
        except OSError as error:
            print(f"grace: the trace ends here: cannot write {self.path}: {error.strerror}", file=sys.stderr)
            self.steps = 0
            self._set_active()

    # -- steps -----------------------------------------------------------------------------------------

    def gradient(self) -> None:
        """Note that a gradient is ready, so that the backward pass is running."""
        if self.exchanged_at is not None:  # the step before had no update, after an overflow for instance
            self.end_step()
        now = time.perf_counter_ns()
        self.backward = (now if self.backward is None else self.backward[0], now)

    def exchanged(self) -> None:
        """Note that all exchanges of a step have ended. Unless the session reports updates, the step ends, too."""
        self.exchanged_at = time.perf_counter_ns()
        if not self.updates_follow:
            self.end_step()

    def update_begins(self) -> None:
        """Note that the user's optimizer is about to change the variables."""
        self.update_began = time.perf_counter_ns()

    def update_ends(self) -> None:
        """Note that the user's optimizer has changed the variables."""
        if self.recording and self.update_began is not None:
            self.add("optimizer", "optimizer", self.update_began, time.perf_counter_ns(), STEP_TRACK, {})
        self.update_began = None

    def end_step(self) -> None:
        """End the step, and begin the next one."""
        if self.recording:
            self.add("step", "step", self.began, time.perf_counter_ns(), STEP_TRACK, {"step": self.number})
            if self.backward is not None:
                self.add("forward", "compute", self.began, self.backward[0], STEP_TRACK, {})
                self.add("backward", "compute", *self.backward, STEP_TRACK, {})
            self.write()
        self.number += 1
        self.backward = self.exchanged_at = None
        self._set_active()
        self.began = time.perf_counter_ns()

    def _set_active(self) -> None:
        global active
        active = self if self.recording else None


class Phase:
    """Context whose time is an event of the current thread, or one event for each of several variables."""

    __slots__ = ("args", "began", "kind", "name", "recorder", "variables")

    def __init__(self, recorder: Recorder, name: str, kind: str, variables: Sequence[Variable], args: dict[str, Any]):
        self.recorder, self.name, self.kind, self.variables, self.args = recorder, name, kind, variables, args

    def __enter__(self) -> None:
        self.began = time.perf_counter_ns()

    def __exit__(self, *error: object) -> None:
        ended, track = time.perf_counter_ns(), self.recorder.track()
        if not self.variables:
            self.recorder.add(self.name, self.kind, self.began, ended, track, _plain(self.args))
        total, done = sum(variable.numel for variable in self.variables), 0
        for variable in self.variables:
            start, done = done, done + variable.numel
            at, until = (self.began + (ended - self.began) * n // max(1, total) for n in (start, done))
            self.recorder.add(self.name, self.kind, at, until, track, {"variable": variable.name})


class CollectiveEvent:
    """Event of a collective, made when it starts. Collectives overlap, so their events are asynchronous."""

    def __init__(self, recorder: Recorder, args: dict[str, Any]):
        self.recorder, self.args, self.began = recorder, args, time.perf_counter_ns()

    def end(self) -> None:
        """Record the end of the collective."""
        event = {"name": "collective", "cat": "collective", "id": next(self.recorder.ids), "tid": COLLECTIVE_TRACK}
        begin = {"ph": "b", "ts": self.began, **event, "args": _plain(self.args)}
        self.recorder.events += [begin, {"ph": "e", "ts": time.perf_counter_ns(), **event}]


def _plain(args: dict[str, Any]) -> dict[str, object]:
    """Return facts with a bucket's number, variables and communicator instead of the bucket."""
    bucket = args.pop("bucket", None)
    if bucket is None:
        return args
    return {"bucket": bucket.index, "variables": bucket.ends, "communicator": bucket.communicator.describe(), **args}


# -- functions that the exchange calls ---------------------------------------------------------------------------------


def begin(backend: Backend, shards: Iterable[Any]) -> None:
    """Start to record if GRACE_TRACE is set, and note the shards of a new runner.

    Args:
        backend: the backend, which has the number of this rank.
        shards: the runner's shards; see :class:`grace.session.sharding.Shard`.

    Raises:
        ConfigError: the folder cannot be written, or an environment variable is no number.
    """
    global run
    if not os.environ.get(FOLDER):
        return
    if run is None:
        steps, skip = _number(STEPS, DEFAULT_STEPS, 1), _number(SKIP, DEFAULT_SKIP, 0)
        folder = Path(os.environ[FOLDER])
        run = Recorder(folder, backend.rank, backend.size, steps, skip, backend.describe())
        run._set_active()
        atexit.register(run.write)
    run.note(variables={shard.variable.name: _described(shard) for shard in shards})
    run.write()


def _described(shard: Any) -> dict[str, object]:
    variable, communicator = shard.variable, shard.communicator
    return {
        "shape": list(variable.shape),
        "dtype": variable.dtype,
        "method": communicator.compressor.spec,
        "memory": communicator.memory.spec,
        "communicator": communicator.spec,
    }


def _number(name: str, default: int, low: int) -> int:
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or int(text) < low:
        raise ConfigError(f"{name} must be a whole number of at least {low}, not {text!r}")
    return int(text)


def phase(
    name: str, kind: str = "codec", variables: Sequence[Variable] = (), **args: Any
) -> Phase | contextlib.nullcontext[None]:
    """Return a context whose time is recorded as an event, or as one for each of the variables that it works on
    together: its share of the time by its number of elements.

    Args:
        name: name of the event, such as "compress" or "wait".
        kind: "codec" (work of the method), "wait" (for other ranks), or "part" (a phase that contains others).
        variables: the variables that share the time.
        args: facts of the event: ``variable="w"`` or ``bucket=a Bucket``.

    >>> with phase("compress", variable="w"):  # nothing is traced here
    ...     pass
    """
    return _NOTHING if active is None else Phase(active, name, kind, variables, args)


def each(name: str, names: Sequence[str], function: Callable[..., T], *columns: Iterable[object]) -> list[T]:
    """Return ``function(*items, name)`` of every variable, and record an event for each.

    >>> each("compress", ["a", "b"], lambda x, name: f"{name}{x}", [1, 2])
    ['a1', 'b2']
    """
    rows = zip(*columns, names, strict=True)
    if active is None:
        return list(itertools.starmap(function, rows))
    results = []
    for row in rows:
        with phase(name, variable=row[-1]):
            results.append(function(*row))
    return results


def payload(nbytes: dict[str, int]) -> None:
    """Record the bytes of each variable that were passed to the engine."""
    if active is not None:
        now = time.perf_counter_ns()
        event = {"ph": "i", "name": "payload", "cat": "payload", "ts": now, "s": "t", "tid": active.track()}
        active.events.append({**event, "args": nbytes})


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Record nothing in this context, which is no part of training."""
    global active
    before, active = active, None
    try:
        yield
    finally:
        active = before


# -- functions that sessions call --------------------------------------------------------------------------------------


def note(**facts: Any) -> None:
    """Record facts about this rank: ``updates_follow=True`` if the session calls :meth:`Recorder.end_step` after each
    update, ``waits`` for the library that waits for collectives if Grace does not."""
    if run is not None:
        run.updates_follow = facts.pop("updates_follow", run.updates_follow)
        if facts:
            run.note(**facts)
