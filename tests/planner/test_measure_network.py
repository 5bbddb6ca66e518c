"""Times of collectives, measured by real ranks."""

import time
from unittest import mock

import numpy as np
import pytest

import grace
import grace.planner.measure_network as measuring
from grace.backends.simulated import SimulatedRanks
from grace.core.backend import Handle, LocalBackend
from grace.errors import RankError
from grace.kernels.reference import Kernels
from grace.planner.measure_network import measure_network
from grace.planner.network import KINDS
from tests.support.passing import Passing

SMALL = (1024, 1 << 16)


@pytest.fixture
def clock(monkeypatch):
    """Time passes while something sleeps, so that a busy machine changes nothing."""
    found = Passing()
    monkeypatch.setattr(measuring, "time", found)
    monkeypatch.setitem(globals(), "time", found)
    return found


def only(sizes, kinds=("allreduce",)):
    """Measure so many sizes and kinds."""
    return mock.patch.multiple(measuring, SIZES=sizes, KINDS=kinds)


class Wire(SimulatedRanks):
    """Collectives that take as long as bytes say: a tenth of a millisecond, and as long again for 10 kB."""

    def allreduce(self, tensor):
        return self._slow(super().allreduce(tensor), tensor.nbytes)

    def allgather(self, tensor):
        return self._slow(super().allgather(tensor), tensor.nbytes)

    def _slow(self, handle, nbytes):
        ends = time.perf_counter() + 1e-4 + nbytes * 1e-8

        def wait():
            time.sleep(max(0.0, ends - time.perf_counter()))

        return Handle(wait, later=handle.result)


@only((1000, 100_000, 1_000_000), ("allreduce", "allgather"))
@pytest.mark.usefixtures("clock")
def test_curves_say_what_collectives_take():
    found = measure_network(Wire(2), 2.0)
    for kind in ("allreduce", "allgather"):
        curve = found.curves[kind]
        assert [nbytes for nbytes, _ in curve.points] == [1e3, 1e5, 1e6]
        assert curve.seconds(1_000_000) == pytest.approx(0.0101)
        assert curve.seconds(1000) < 2e-3


@only((1000, 4_000_000, 100_000_000))
@pytest.mark.usefixtures("clock")
def test_sizes_end_where_time_does(clock):
    found = measure_network(Wire(2), 0.5)
    assert [nbytes for nbytes, _ in found.curves["allreduce"].points] == [1000, 4_000_000]
    assert clock.now < 6  # from 1 on


@only((1000, 10_000, 100_000), ("allreduce", "allgather"))
@pytest.mark.usefixtures("clock")
def test_what_disturbs_for_a_while_is_not_measured():
    class Disturbed(Wire):
        calls = 0

        def _slow(self, handle, nbytes):
            if nbytes < 1000:  # ranks that wait for each other
                return handle
            Disturbed.calls += 1
            return super()._slow(handle, nbytes + (5_000_000 if Disturbed.calls <= 12 else 0))  # 50 ms more

    found = measure_network(Disturbed(2), 10.0)
    assert found.curves["allreduce"].seconds(1000) < 1.5e-3


@only((1000,))
@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("crowded", "seconds"), [(False, 1.1e-4), (True, 1.011e-2)])
def test_waits_for_cores_that_ranks_share_are_measured(crowded, seconds):
    class Waiting(Wire):
        calls = 0

        def _slow(self, handle, nbytes):
            Waiting.calls += nbytes >= 1000
            return super()._slow(handle, nbytes + (1_000_000 if Waiting.calls % 3 else 0))  # 10 ms more in two of three

    found = measure_network(Waiting(2), 10.0, crowded=crowded)
    assert found.curves["allreduce"].seconds(1000) == pytest.approx(seconds)


class Computing(Wire):
    """Collectives beside which computing is slower, until they are awaited."""

    under_way = 0

    def allgather(self, tensor):
        handle = super().allgather(tensor)
        self.under_way += 1

        def wait():
            self.under_way -= 1
            handle.wait()

        return Handle(wait, later=handle.result)


@only((100_000, 1_000_000, 4_000_000), ("allreduce", "allgather"))
def test_the_share_of_computing_that_a_collective_takes_is_measured(clock, monkeypatch):
    backend = Computing(2)

    def compute(self, calls):
        clock.sleep(1e-5 * calls * (4 if backend.under_way else 1))
        return 1e-5 * calls * (4 if backend.under_way else 1)

    monkeypatch.setattr(measuring._Timing, "_compute", compute)
    assert measure_network(backend, 2.0).contention == {"allreduce": 0.0, "allgather": 0.75}


class OnDevice(np.ndarray):
    """Arrays that say that they are on a device, whose computing no collective of the host slows."""

    device = "cuda:0"


@only((1_000_000,))
@pytest.mark.usefixtures("clock")
def test_on_a_device_nothing_is_taken(monkeypatch):
    monkeypatch.setattr(measuring._Timing, "_compute", mock.Mock(side_effect=AssertionError))
    assert measure_network(Wire(2), 0.5, lambda array: array.view(OnDevice)).contention == {"allreduce": 0.0}


def measured():
    backend = grace.init()
    before = backend.sent_bytes
    with only(SMALL, KINDS):
        found = measure_network(backend, 30.0)
    return backend.sent_bytes - before, found


def test_ranks_measure_together_and_get_the_same(ranks):
    answers = ranks.run(measured)
    assert len({repr(found) for _, found in answers}) == 1
    sent, found = answers[0]
    assert sent == 0
    assert set(found.curves) == set(KINDS)
    assert found.ranks == ranks.size
    assert found.contention.keys() == set(KINDS)
    assert all(0 <= share < 1 for share in found.contention.values())
    for curve in found.curves.values():
        assert [nbytes for nbytes, _ in curve.points] == list(SMALL)
        assert all(1e-6 < seconds < 5 for _, seconds in curve.points)


def failing():
    """Have no room for a buffer on one rank."""
    backend = grace.init()

    def tensor_of(array):
        if backend.rank == 1 and array.nbytes == 1024:
            raise MemoryError("no more")
        return backend.tensor_of(array)

    try:
        with only((1024,)):
            measure_network(backend, 0.3, tensor_of=tensor_of)
    except (RankError, MemoryError) as error:
        return type(error).__name__, str(error), len(backend.allgather_object(0))
    return None


def test_a_rank_that_fails_ends_all(two_ranks):
    (first, said, size), (second, own, _) = two_ranks.run(failing)
    assert (first, second, own, size) == ("RankError", "MemoryError", "no more", 2)
    assert "rank 1 could not measure the network: MemoryError: no more" in said


def test_alone_there_is_nothing_to_measure():
    assert measure_network(LocalBackend()) is None


@only((1000, 100_000), ("allreduce",))
def test_collectives_of_a_device_end_when_the_device_has_them(clock, monkeypatch):
    """Their handles let only the device wait."""
    monkeypatch.setattr(Kernels, "wait_for", lambda self, x: clock.sleep(2e-3))
    found = measure_network(SimulatedRanks(2), 0.5)
    assert [seconds for _, seconds in found.curves["allreduce"].points] == pytest.approx([2e-3, 2e-3])
