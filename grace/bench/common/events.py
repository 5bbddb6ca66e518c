"""Events: what rank 0 of a benchmark writes, and the process that started the ranks reads."""

from typing import Any, TypedDict


class Event(TypedDict, total=False):
    """Message of rank 0 to the process that started the ranks: a line of events.jsonl. An event has some of the keys.

    Attributes:
        engine: the engine whose ranks are started now.
        blocks: the number of blocks of steps, turns or epochs that follow.
        facts: facts of all rows, for the settings of the results.
        scenario: values of the whole scenario.
        run: the row of a training run.
        quality: the quality after an epoch.
        name, kind, method: the contestant whose block it is, see ``Contestant`` of ``grace bench step``.
        times_ms, codec_ms, sent_bytes, received_bytes, samples: times of a block's steps; codec, bytes and samples of
            one step.
    """

    engine: str
    blocks: int
    facts: dict[str, Any]
    scenario: dict[str, Any]
    run: dict[str, Any]
    quality: float
    name: str
    kind: str
    method: str | None
    times_ms: list[float]
    codec_ms: float | None
    sent_bytes: float | None
    received_bytes: float | None
    samples: int
