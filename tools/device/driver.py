"""Runs the parts: processes that are watched, ended when they hang, and started again behind what they failed at; and
writes down what is known whenever more is."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from grace.bench.ranks.rank_program import append_line
from grace.core.atomic_files import atomic_write
from grace.launch.processes import end, guarded, signals_raise
from tools.device import tables
from tools.device.events import LONGEST, read
from tools.device.parts import Part

ROOT = Path(__file__).parents[2]
LATE = 3.0
"""Seconds after an item's limit, in which its process shows where it hangs."""
LOOKS = 0.2
WRITES = 2.0
"""Seconds between looks at the processes, and between two writings."""
FORMAT = 1


class Worker:
    """One process of a part, and those that are started in its place.

    Args:
        part: whose.
        number: of the part's processes.
        folder: of the results; events and what is said lie below it.
    """

    def __init__(self, part: Part, number: int, folder: Path):
        self.part, self.folder, self.number = part, folder, number
        self.file = folder / "events" / f"{part.name}.{number}.jsonl"
        self.said = folder / "said" / f"{part.name}.{number}.txt"
        self.done, self.begun = False, 0
        for path in (self.file, self.said):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
        self._start()

    def _start(self) -> None:
        self.begun = len(self.events())
        part, numbers = self.part, (self.number, self.part.workers, self.part.limit)
        given = part.run, str(self.folder), part.name, *map(str, numbers)
        command = [sys.executable, "-m", "tools.device.worker", *given]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        with self.said.open("ab") as said:
            self.process = subprocess.Popen(
                guarded(command), stdin=subprocess.PIPE, stdout=said, stderr=said, env=env, start_new_session=True
            )

    def events(self) -> list[dict[str, Any]]:
        """All that was told."""
        return read(self.file)

    @property
    def under_way(self) -> dict[str, Any] | None:
        """The event that began what has not ended."""
        events = [event for event in self.events() if "item" in event]
        return events[-1] if events and events[-1]["state"] == "begun" else None

    def look(self) -> None:
        """End the process if it hangs; start another if it ended and something is left."""
        code, item = self.process.poll(), self.under_way
        if code is None and item is not None and time.time() - item["at"] > self.part.limit + LATE:
            self.stop(f"it did not end within {self.part.limit:.0f} s")
        elif code is None:
            return
        elif code == 0:
            self.done = True
            self._close()
            return
        else:
            self._close()
            died = f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self._fail(died)
        if len(self.events()) == self.begun:  # nor would another get further
            append_line(
                self.file, {"item": f"the start of {self.part.name}", "state": "failed", "error": self._last_words()}
            )
            self.done = True
            return
        self._start()

    def stop(self, why: str) -> None:
        """End the process, and what it is at has failed so."""
        end(self.process)
        self._close()
        self._fail(why)

    def _close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()

    def _fail(self, why: str) -> None:
        item = self.under_way
        if item is not None:
            event = {"item": item["item"], "state": "failed", "at": time.time()}
            append_line(self.file, {**event, "error": f"{self._last_words()}\n{why}"})

    def _last_words(self) -> str:
        return self.said.read_text(errors="replace")[-LONGEST:]


class Run:
    """All parts, one after the other.

    Args:
        parts: which.
        settings: for their processes.
        folder: where results go.
        console: where progress is shown.
    """

    def __init__(self, parts: Sequence[Part], settings: Mapping[str, Any], folder: Path, console: Console):
        self.parts, self.folder, self.console = list(parts), folder, console
        self.began = time.time()
        self.report: dict[str, Any] = {
            "on_device": FORMAT,
            "command": shlex.join(sys.argv),
            "when": time.strftime("%Y-%m-%d %H:%M:%S"),
            "ended": "cut off",
            "seconds": 0.0,
            "settings": dict(settings),
            "parts": [{"name": part.name, "about": part.about, "state": "not begun", "items": []} for part in parts],
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "settings.json").write_text(json.dumps(dict(settings)))

    def __call__(self) -> int:
        """Run them; an exit code: 0 if all was done and nothing failed."""
        columns = TextColumn("{task.description:<12}"), BarColumn(bar_width=30), TextColumn("{task.fields[now]}")
        progress = Progress(*columns, TimeElapsedColumn(), console=self.console, disable=not self.console.is_terminal)
        self.save()
        try:
            with signals_raise(), progress:
                for part, found in zip(self.parts, self.report["parts"], strict=True):
                    self._run(part, found, progress)
            self.report["ended"] = "whole"
        except KeyboardInterrupt:
            self.report["ended"] = "interrupted"
        self.save()
        if self.report["ended"] != "whole":
            return 130
        return int(any(part["state"] != "done" or tables.failed(part) for part in self.report["parts"]))

    def _run(self, part: Part, found: dict[str, Any], progress: Progress) -> None:
        bar, began, written = progress.add_task(part.name, total=None, now=""), time.time(), 0.0
        if not self.console.is_terminal:
            self.console.print(f"{part.name}: {part.about}; at most {part.seconds:.0f} s")
        found["state"] = "under way"
        workers = [Worker(part, number, self.folder) for number in range(part.workers)]
        try:
            while not all(worker.done for worker in workers):
                if time.time() - began > part.seconds:
                    found["state"] = "out of time"
                    break
                time.sleep(LOOKS)
                for worker in workers:
                    if not worker.done:
                        worker.look()
                self._take(found, workers, began)
                progress.update(bar, total=found["planned"] or None, completed=len(found["items"]), now=found["now"])
                if time.time() - written > WRITES:
                    self.save()
                    written = time.time()
            else:
                found["state"] = "done"
        finally:
            end(*(worker.process for worker in workers if not worker.done))  # all of them at once
            for worker in workers:
                if not worker.done:
                    worker.stop(f"{part.name} was ended after {time.time() - began:.0f} s")
            self._take(found, workers, began)
            self.save()
            progress.update(bar, now=found["state"])
        self.console.print(f"{part.name}: {tables.counted(found)}, {found['seconds']:.0f} s", highlight=False)

    def _take(self, found: dict[str, Any], workers: Sequence[Worker], began: float) -> None:
        """Fill in what the processes have told."""
        items: dict[str, dict[str, Any]] = {}
        planned, now = set(), list[str]()
        for worker in workers:
            for event in worker.events():
                planned |= set(event.get("planned", []))
                if event.get("state") in ("done", "failed", "skipped"):
                    items[event["item"]] = event
            under_way = worker.under_way  # read once: the process goes on writing
            now += [under_way["item"]] if under_way else []
        found |= {"items": list(items.values()), "planned": len(planned | set(items)), "now": now[0] if now else ""}
        found["seconds"] = time.time() - began

    def save(self) -> None:
        """Write ``on_device.json`` and ``on_device.md``, each at once."""
        self.report["seconds"] = time.time() - self.began
        self.report["goals"] = tables.goals(self.report)
        for name, text in (
            ("on_device.json", json.dumps(self.report, indent=1)),
            ("on_device.md", tables.page(self.report)),
        ):
            with atomic_write(self.folder / name) as draft:
                draft.write_text(text, encoding="utf-8")
