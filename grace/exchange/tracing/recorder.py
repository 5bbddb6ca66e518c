"""What a training run spends its time on, recorded event by event.

Where the environment variable GRACE_TRACE names a folder, every rank leaves a file ``rankN.jsonl`` in it, and
``grace trace FOLDER`` makes one picture of them. The first GRACE_TRACE_SKIP steps (5) are left out, the next
GRACE_TRACE_STEPS (50) are recorded; before and after, and where nothing is traced, a phase costs a look at a variable.

Times are the host's: on a GPU, where operations are started and not awaited, they say how long starting took.
Events only look at clocks: a traced step runs the same program as any other. Where a bucket is encoded in one pass,
each variable's event is its share of the time by its elements. What was recorded is written at the end of each step,
between two steps, so that a rank that is killed leaves what it had.
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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from grace.errors import ConfigError

FOLDER, STEPS, SKIP = "GRACE_TRACE", "GRACE_TRACE_STEPS", "GRACE_TRACE_SKIP"
DEFAULT_STEPS, DEFAULT_SKIP = 50, 5
FORMAT = 1
"""Of the ranks' files; another one is refused."""
STEP_TRACK, COLLECTIVE_TRACK, FIRST_THREAD = 0, 1, 2
"""The tracks of a rank: its steps, its collectives, and one per thread."""

run: "Recorder | None" = None
"""The recorder of this process; None where nothing is traced. Sessions tell it of gradients, exchanges and updates."""
active: "Recorder | None" = None
"""The same; None outside the steps that are to be recorded."""
_NOTHING = contextlib.nullcontext()


class Recorder:
    """The events of one rank, in a list until the step ends, then in its file.

    The file has one JSON object per line: events of Chrome's trace format, but in nanoseconds of the rank's own clock,
    and facts (objects without "ph").

    Args:
        folder: where the file goes.
        rank, size: whose it is.
        steps: how many steps are recorded,
        skip: after how many.
        engine: the backend, for people.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, folder: Path, rank: int, size: int, steps: int, skip: int, engine: str = ""):
        self.path, self.steps, self.skip, self.pid = folder / f"rank{rank}.jsonl", steps, skip, os.getpid()
        offset = time.time_ns() - time.perf_counter_ns()
        facts = {"rank": rank, "size": size, "host": socket.gethostname(), "engine": engine, "offset": offset}
        self.events: list[dict[str, Any]] = [{"grace_trace": FORMAT, **facts}]
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
        """Whether the step that is under way is to be recorded."""
        return self.skip <= self.number < self.skip + self.steps

    # -- events ----------------------------------------------------------------------------------------

    def note(self, **facts: Any) -> None:
        """Facts about the rank; dicts add to what was noted before."""
        self.events.append(facts)

    def add(self, name: str, kind: str, began: int, ended: int, track: int, args: dict[str, Any]) -> None:
        """A complete event."""
        self.events.append(
            {"ph": "X", "name": name, "cat": kind, "ts": began, "dur": ended - began, "tid": track, "args": args}
        )

    def track(self) -> int:
        """That of the current thread."""
        ident = threading.get_ident()
        if ident not in self.tracks:
            self.tracks[ident] = track = FIRST_THREAD + len(self.tracks)
            thread = threading.current_thread()
            name = "training" if thread is threading.main_thread() else thread.name.replace("Dummy-", "thread ")
            self.note(tracks={track: name})
        return self.tracks[ident]

    def write(self) -> None:
        """Append what was recorded to the file. If that fails, training goes on, and nothing more is recorded."""
        if os.getpid() != self.pid:  # a process that was forked off
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
        """A gradient is there: the backward pass runs."""
        if self.exchanged_at is not None:  # the step before had no update, as after an overflow
            self.end_step()
        now = time.perf_counter_ns()
        self.backward = (now if self.backward is None else self.backward[0], now)

    def exchanged(self) -> None:
        """All exchanges of a step are over; so is the step, unless somebody tells when the update is."""
        self.exchanged_at = time.perf_counter_ns()
        if not self.updates_follow:
            self.end_step()

    def update_begins(self) -> None:
        """The user's optimizer is about to change the variables."""
        self.update_began = time.perf_counter_ns()

    def update_ends(self) -> None:
        """It has."""
        if self.recording and self.update_began is not None:
            self.add("optimizer", "optimizer", self.update_began, time.perf_counter_ns(), STEP_TRACK, {})
        self.update_began = None

    def end_step(self) -> None:
        """The step is over, and the next one begins."""
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
    """A context whose time is an event of the current thread."""

    __slots__ = ("args", "began", "kind", "name", "recorder")

    def __init__(self, recorder: Recorder, name: str, kind: str, args: dict[str, Any]):
        self.recorder, self.name, self.kind, self.args = recorder, name, kind, args

    def __enter__(self) -> None:
        self.began = time.perf_counter_ns()

    def __exit__(self, *error: object) -> None:
        ended = time.perf_counter_ns()
        self.recorder.add(self.name, self.kind, self.began, ended, self.recorder.track(), _plain(self.args))


class CollectiveEvent:
    """The event of a collective under way, made when it starts; collectives overlap, so events are asynchronous."""

    def __init__(self, recorder: Recorder, args: dict[str, Any]):
        self.recorder, self.args, self.began = recorder, args, time.perf_counter_ns()

    def end(self) -> None:
        """Record that the collective is known to be done."""
        event = {"name": "collective", "cat": "collective", "id": next(self.recorder.ids), "tid": COLLECTIVE_TRACK}
        begin = {"ph": "b", "ts": self.began, **event, "args": _plain(self.args)}
        self.recorder.events += [begin, {"ph": "e", "ts": time.perf_counter_ns(), **event}]


def _plain(args: dict[str, Any]) -> dict[str, Any]:
    """With a bucket's number, variables and communicator instead of the bucket."""
    bucket = args.pop("bucket", None)
    if bucket is None:
        return args
    return {"bucket": bucket.index, "variables": bucket.ends, "communicator": bucket.communicator.describe(), **args}


# -- what the exchange says --------------------------------------------------------------------------------------------


def begin(backend: Any, shards: Iterable[Any]) -> None:
    """A runner is made: start to record if GRACE_TRACE says so, and note what it exchanges.

    Args:
        backend: whose rank this is.
        shards: see :class:`grace.session.sharding.Shard`.

    Raises:
        ConfigError: the folder cannot be written, or a number is none.
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


def _described(shard: Any) -> dict[str, Any]:
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


def phase(name: str, kind: str = "codec", **args: Any) -> Any:
    """A context whose time is recorded, as an event of this name.

    Args:
        name: "compress", "wait" ...
        kind: "codec" (work of the method), "wait" (for other ranks), or "part" (one that holds others).
        args: what it was for: ``variable="w"`` or ``bucket=a Bucket``.

    >>> with phase("compress", variable="w"):  # nothing is traced here
    ...     pass
    """
    return _NOTHING if active is None else Phase(active, name, kind, args)


def each(name: str, names: Sequence[str], function: Any, *columns: Iterable[Any]) -> list[Any]:
    """``function(*items, name)`` for every variable, each an event of its own.

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


def shared(name: str, variables: Sequence[Any], function: Any, *args: Any) -> Any:
    """``function(*args)``, which does something for several variables together: an event for each, of the share of the
    time that its elements are of all elements.

    >>> shared("compress", [], max, 1, 2)
    2
    """
    if active is None:
        return function(*args)
    began = time.perf_counter_ns()
    result = function(*args)
    ended, total, done = time.perf_counter_ns(), sum(variable.numel for variable in variables), 0
    for variable in variables:
        start, done = done, done + variable.numel
        at, until = (began + (ended - began) * n // max(1, total) for n in (start, done))
        active.add(name, "codec", at, until, active.track(), {"variable": variable.name})
    return result


def payload(nbytes: dict[str, int]) -> None:
    """So many bytes of each variable were handed to the engine."""
    if active is not None:
        now = time.perf_counter_ns()
        event = {"ph": "i", "name": "payload", "cat": "payload", "ts": now, "s": "t", "tid": active.track()}
        active.events.append({**event, "args": nbytes})


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Nothing is recorded in this context: what it does is no part of training."""
    global active
    before, active = active, None
    try:
        yield
    finally:
        active = before


# -- facts that sessions add -------------------------------------------------------------------------------------------


def note(**facts: Any) -> None:
    """Note facts about this rank: ``updates_follow=True`` if the session calls :meth:`Recorder.end_step` after each
    update, ``waits`` for who waits for collectives if Grace does not."""
    if run is not None:
        run.updates_follow = facts.pop("updates_follow", run.updates_follow)
        if facts:
            run.note(**facts)
