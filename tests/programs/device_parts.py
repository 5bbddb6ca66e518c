"""Parts for tools/on_device.py's driver, and a program that runs one which does not end: python -m ... FOLDER."""

import os
import signal
import sys
import time
from pathlib import Path


def well(log):
    """Two items, which find something out."""
    for item in log.left(["one", "two"]):
        with log.item(item) as found:
            found["number"] = len(item)


def fails(log):
    """The first item raises."""
    for item in log.left(["raises", "goes on"]):
        with log.item(item) as found:
            found["begun"] = True
            if item == "raises":
                raise ArithmeticError("it does not add up")


def crashes(log):
    """The first item ends the process."""
    for item in log.left(["crashes", "goes on"]):
        with log.item(item):
            if item == "crashes":
                os.kill(os.getpid(), signal.SIGSEGV)


def hangs(log):
    """The first item does not end."""
    for item in log.left(["hangs", "goes on"]):
        with log.item(item):
            while item == "hangs":
                time.sleep(0.1)


def never_starts(log):
    """Fail before any item."""
    raise ImportError("nothing of that name")


def endless(log):
    """One item ends, and another one does not."""
    for item in log.left(["ends", "does not end"]):
        with log.item(item) as found:
            found["pid"] = os.getpid()
            while item != "ends":
                time.sleep(0.1)


if __name__ == "__main__":
    from rich.console import Console

    from tools.device.driver import Run
    from tools.device.parts import Part

    part = Part("endless", "what does not end", 600, 600, 1, "tests.programs.device_parts:endless")
    Run([part], {}, Path(sys.argv[1]), Console())()
