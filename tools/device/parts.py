"""The parts of ``tools/on_device.py``, each in processes of its own: what they do, and how long they may take."""

from typing import NamedTuple


class Part(NamedTuple):
    """A part.

    Attributes:
        name: as it is asked for.
        about: what it finds out, in a line.
        seconds: that it may take in all.
        limit: seconds of an item.
        workers: processes that share the items.
        run: ``module:function`` that each of them calls with a :class:`~tools.device.events.Log`, where it begins and
            ends items.
    """

    name: str
    about: str
    seconds: float
    limit: float
    workers: int
    run: str


PARTS = [
    Part("versions", "versions, and the card", 20, 15, 1, "tools.device.figures:versions"),
    Part("bits", "every kernel's bits against the reference", 70, 40, 8, "tools.device.suites:bits"),
    Part("tests", "the tests of tests/device", 70, 60, 2, "tools.device.suites:tests"),
    Part("compiling", "how long a method's kernels take to be compiled", 30, 25, 8, "tools.device.figures:compiling"),
    Part("bandwidth", "encoding and decoding, of what a copy moves", 75, 25, 1, "tools.device.figures:bandwidth"),
    Part("products", "PowerSGD's exchange beside torch.bmm", 20, 10, 1, "tools.device.figures:products"),
    Part("waits", "how often the host waits for the GPU in a step", 30, 15, 1, "tools.device.steps:waits"),
    Part("captured", "replays of captured steps against eager ones", 30, 15, 1, "tools.device.steps:captured"),
    Part("host", "where the host's time of a step goes", 40, 20, 1, "tools.device.host:host"),
    Part("steps", "whole steps of GPT-2 small and ResNet-50", 125, 60, 1, "tools.device.steps:whole"),
    Part("memory", "what two steps of a method hold at most", 20, 10, 1, "tools.device.figures:memory"),
]
"""The most telling first; all of their seconds are less than nine minutes."""
