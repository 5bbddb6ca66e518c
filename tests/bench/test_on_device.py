"""``grace bench kernels`` and ``step`` with ``--device cuda``: what is computed from times, with injected clocks;
tests/device runs the commands."""

import functools
import gc
import io
import weakref
from unittest import mock

import pytest
import torch
from rich.console import Console

from grace.bench.common import clocks
from grace.bench.common.clocks import HostClock
from grace.bench.common.results import Results
from grace.bench.kernels.timing import measure, times_ms
from grace.bench.report import kernel_tables, step_table
from grace.bench.step import one_gpu
from grace.bench.step.step_rows import EngineRows, compare_with_plain
from grace.bench.step.step_settings import BOUND, StepSettings
from grace.bench.workloads.models import Workload, workload
from grace.core.backend import Handle


class Scripted(HostClock):
    """A clock that works move, and that writes down what it is asked for."""

    def __init__(self):
        self.time, self.asked, self.eager = 0.0, [], ()

    def prepared(self, work):
        self.asked.append("prepared")
        return work, True

    def flush(self):
        self.asked.append("flush")
        self.time += 1000.0  # which no measurement may have in it

    def synchronize(self):
        self.asked.append("settle")

    def now(self):
        self.asked.append("now")
        return self.time

    def ms(self, began, ended):
        return ended - began


class Ticking(Scripted):
    """A clock on which all that is measured takes 2 ms."""

    def now(self):
        self.time += 2.0
        return self.time


def said(show, results):
    """Return the text that is shown of results."""
    console = Console(width=150, record=True, file=io.StringIO())
    show(console, results)
    return console.export_text()


def test_works_take_turns_each_behind_a_flush_and_medians_count():
    clock, took = Scripted(), iter([9.0, 9.0, 1.0, 10.0, 2.0, 50.0, 3.0, 20.0])

    def work():
        clock.asked.append("work")
        clock.time += next(took)

    assert times_ms({"a": work, "b": work}, 3, clock) == {"a": 2.0, "b": 20.0}
    assert clock.asked[:6] == ["settle", "flush", "now", "work", "now", "settle"]
    assert len(clock.asked) == 6 * 8


def test_what_a_replay_reads_stays_as_long_as_the_replay(monkeypatch):
    """Or others' numbers lie there: replays of a decoder died of indices out of bounds."""

    monkeypatch.setattr(torch, "cuda", mock.MagicMock(**{"get_device_properties.return_value.L2_cache_size": 0}))
    monkeypatch.setattr(clocks, "synchronizes_host", lambda work: False)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    clock, payload = clocks.DeviceClock(), torch.zeros(3)
    held = weakref.ref(payload)
    _replay, replayed = clock.prepared(functools.partial(payload.add, 1))
    del payload
    gc.collect()
    assert replayed
    assert held() is not None
    clock.forget()
    assert held() is None


def test_methods_are_measured_in_one_run_against_what_they_must_move():
    x, methods = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)), ["fp16", "topk(ratio=0.25)"]
    rows = measure([*methods, "powersgd(rank=2)"], x, 1, None, Ticking(), lambda what: None, whole=True)
    found = {row["method"]: row for row in rows}
    assert list(found) == [*methods, "powersgd(rank=2)"]
    fp16 = found["fp16"]  # a copy's 8 bytes an element took as long
    assert (fp16["encode_fraction"], fp16["decode_fraction"]) == (6 / 8, 10 / 8)
    assert fp16["exchange_fraction"] == 12 / 8  # means are written, and not read
    assert fp16["round_trip_ms"] == 4.0
    assert fp16["memory_ms"] is None  # it has none
    topk = found["topk(ratio=0.25)"]
    sent = topk["bits_per_element"] / 8
    assert topk["memory_fraction"] == pytest.approx((4 + sent + 8) / (2 * 8))
    assert topk["decode_floor_bytes"] == pytest.approx(sent + 8 * 0.25)
    assert found["powersgd(rank=2)"]["encode_floor_bytes"] == pytest.approx(8 + 32 * 2 * (32 + 64) / 2048 / 8)
    results = Results(
        "kernels", {"gpu": "a GPU", "device": "cuda"}, [{"tensor": "gaussian, 2,048", **row} for row in rows]
    )
    lines = [line.split() for line in said(kernel_tables.show, results).splitlines()]
    assert next(line for line in lines if line[:1] == ["fp16"])[1:7] == ["16.0", "2.00", "75", "%", "2.00", "125"]


class Lane:
    """A wire whose bytes take a scripted clock's time, one collective after the other."""

    def __init__(self, clock):
        self.clock, self.free = clock, 0.0

    def carry(self, move, seconds, sent):
        handle = move()
        done = self.free = max(self.free, self.clock.time) + 1e3 * seconds()

        def wait():
            self.clock.time = max(self.clock.time, done)

        return Handle(wait, later=handle.result)


def test_a_step_is_computing_and_what_the_wire_adds():
    """1 Mbit/s, 4 ranks, and computing that takes 10 ms of the clock's."""
    clock = Scripted()

    def loss(model):
        clock.time += 10.0
        return model(torch.ones(1, 100)).sum()

    settings = StepSettings(methods=["none", "fp16"], ranks=[4], bandwidths=[1e6, 2e6], rounds=1)
    contest = one_gpu.Contest(Workload(torch.nn.Linear(100, 10), loss, 3), settings, Lane(clock))
    tables = {rate: EngineRows("simulated", 4, rate) for rate in settings.bandwidths}
    contest.measure(clock, lambda rate, event: tables[rate].add(event))
    results = Results("step", {}, [row for table in tables.values() for row in compare_with_plain(table.rows())])
    found = {(row["name"], row["bandwidth"]): row for row in results.rows}
    assert list(found) == [(name, rate) for rate in (1e6, 2e6) for name in (BOUND, "none", "fp16")]
    for (name, _), row in found.items():
        assert (row["compute_ms"], row["codec_ms"]) == (10.0, 0.0)
        if name != BOUND:
            assert row["exposed_ms"] == pytest.approx(row["wire_ms"])
    sent = found["none", 1e6]["sent_bytes"]
    assert sent == pytest.approx(2 * 3 / 4 * 4 * 1010, rel=0.1)  # a ring's; and the header
    assert found["none", 1e6]["wire_ms"] == pytest.approx(8e3 * sent / 1e6)
    assert found["none", 2e6]["exposed_ms"] == pytest.approx(found["none", 1e6]["exposed_ms"] / 2)
    waits = {name: {"waits_per_step": 1.0, "reads_per_step": 0.0} for name in (BOUND, "none", "fp16")}
    one_gpu.conclude_all(results, waits)
    assert list(results.settings["verdict"]) == ["4 ranks at 1mbit", "4 ranks at 2mbit"]
    results.settings |= {"model": "wide", "about": one_gpu.SIMULATED_NOTE}
    shown = said(step_table.show, results)
    assert "The wire is simulated" in shown
    assert "fp16 1 and 0" in shown


@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(None, 1), (100, 2)])
def test_buckets_are_as_large_as_asked(bucket_bytes, buckets):
    work = Workload(torch.nn.Linear(100, 10), lambda model: model(torch.ones(1, 100)).sum(), 1)
    settings = StepSettings(methods=["none"], ranks=[4], bandwidths=[1e6], bucket_bytes=bucket_bytes)
    contest = one_gpu.Contest(work, settings, Lane(Scripted()))
    assert len(contest.steppers["none"].exchange._grace.runner.buckets) == buckets


def test_models_of_gpus_have_the_sizes_that_they_are_known_by():
    with torch.device("meta"):
        work = workload("gpt2", 0)
        assert sum(p.numel() for p in work.model.parameters()) == 124_439_808
        assert work.model(torch.zeros(2, 8, dtype=torch.int64)).shape == (2, 8, 50_257)
