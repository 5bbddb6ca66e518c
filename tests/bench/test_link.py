"""``grace bench link``, and the emulated networks behind it: their rates, and that nothing of them is left behind."""

import functools
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grace.bench.common.ending import LinkError
from grace.bench.common.text import show_rate
from grace.bench.link import link_command, namespaces
from grace.bench.link.emulation import Link, measure, possible
from grace.core.quantities import parse_rate
from grace.errors import ConfigError
from grace.launch.processes import end, signals_raise
from tests.support import warm
from tests.support.limits import HANGS, until

pytestmark = pytest.mark.ranks

REASON = possible()
linked = pytest.mark.skipif(bool(REASON), reason=f"no link can be emulated here: {REASON}")
GRACE = [warm.REAL, "-m", "grace.cli.main"]

HOLD = """
import subprocess, sys, time
from grace.bench.link.emulation import Link
with Link(ranks=2) as link:
    subprocess.Popen(link.command(1, ["sleep", "1234"]))
    print("up", flush=True)
    if sys.argv[1] == "fail":
        raise ValueError("on purpose")
    while sys.argv[1] == "wait":
        time.sleep(0.1)
"""
ALLREDUCE = """
import sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
numbers = torch.ones(2_000_000)
for _ in range(4):
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(numbers)
    print(time.perf_counter() - began)
assert numbers[0] == 16
dist.destroy_process_group()
"""


def left_by(pid: int) -> list[str]:
    """Namespaces of a process, and the processes that run in them."""
    return [name for name in os.listdir(namespaces.FOLDER) if name.startswith(f"grace-{pid}-")]


def start(how: str) -> subprocess.Popen:
    """A process that has a link up, with a rank in it."""
    process = subprocess.Popen([warm.REAL, "-c", HOLD, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    return process


@linked
def test_the_command_measures_each_rate():
    command = [*GRACE, "bench", "link", "--bandwidth", "50mbit,100mbit", "--seconds", "0.1", "--ranks", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, env={**os.environ, "COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    rows = [line.split() for line in done.stdout.splitlines()]
    for rate in ("50mbit", "100mbit"):
        asked, measured, ratio, trusted = next(row for row in rows if row[:1] == [rate])
        assert float(ratio) == pytest.approx(parse_rate(measured) / parse_rate(asked), abs=0.001)
        assert (trusted == "yes") == link_command.trusted(float(ratio))
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the reason is another")
def test_the_command_says_why_it_cannot():
    command = [*GRACE, "bench", "link"]
    path = {**os.environ, "PATH": "/nowhere"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, env=path)
    assert done.returncode == 1
    assert "not possible here: ip, tc and unshare cannot be found" in done.stderr


@linked
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv takes capabilities away, and is not installed")
def test_the_command_wants_the_rights_it_needs():
    command = ["setpriv", "--bounding-set=-net_admin", *GRACE, "bench", "link"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 1
    assert "it needs root: this process lacks CAP_NET_ADMIN\n" in done.stderr


@pytest.mark.parametrize("text", ["", "0gbit", "-1gbit", "1", "100mbps", "1 GB", "1tbit", "nanbit", "²mbit"])
def test_rates_that_are_none(text):
    with pytest.raises(ConfigError, match="100mbit"):
        parse_rate(text)


@pytest.mark.parametrize(("text", "rate"), [("800kbit", 8e5), ("10Gbit", 1e10), (" 2.5 gbit ", 2.5e9), ("5bit", 5)])
def test_rates_are_read_and_shown(text, rate):
    assert parse_rate(text) == rate == parse_rate(show_rate(rate))


def test_links_that_cannot_be():
    for wrong in ({"ranks": 0}, {"rate": 0}, {"rate": float("nan")}):
        with pytest.raises(ConfigError):
            Link(**wrong)
    with pytest.raises(ConfigError, match="ranks 0 to 1, not 2"):
        Link(ranks=2).address(2)
    with pytest.raises(LinkError, match="`with` block"):
        Link().command(0, ["true"])


@linked
@pytest.mark.alone
@pytest.mark.parametrize("rate", ["50mbit", "200mbit", "1gbit"])
def test_a_stream_is_as_fast_as_asked(rate):
    for attempt in (1, 2):  # once more if the machine was busy with something else
        with Link(rate=parse_rate(rate)) as link:
            ratio = statistics.median(measure(link, seconds=0.3) for _ in range(3)) / link.rate
        print(f"{rate}: {ratio:.3f} of it, load {os.getloadavg()[0]:.1f}, attempt {attempt}")
        if 0.9 <= ratio <= 1.1:
            return
    pytest.fail(f"{ratio:.3f} of {rate}")


@linked
@pytest.mark.alone
@pytest.mark.parametrize(
    ("streams", "whole"),
    [([(0, 1), (1, 0)], 2), ([(0, 1), (2, 1)], 1), ([(0, 1), (0, 2)], 1)],
    ids=["both ways at once", "two ranks to one", "one rank to two"],
)
def test_each_direction_of_each_rank_is_limited(streams, whole):
    for seconds in (0.5, 2, 5):  # on a busy machine streams start apart, and have the link to themselves until then
        with Link(ranks=3, rate=1e8) as link, ThreadPoolExecutor() as threads:
            found = [threads.submit(measure, link, seconds, *stream) for stream in streams]
            ratio = sum(one.result() for one in found) / link.rate
        if ratio == pytest.approx(whole, rel=0.15):
            return
    pytest.fail(f"{ratio:.3f} of the rate in place of {whole}")


@linked
@pytest.mark.alone
def test_all_reduces_take_their_bytes_over_the_bandwidth():
    pytest.importorskip("torch")
    expected = 8_000_000 * 8 / 200e6  # a ring of 2: each rank sends and receives all once, both ways at a time
    for _ in range(2):
        with Link(ranks=2, rate=200e6) as link:
            command = [sys.executable, "-c", ALLREDUCE]
            ranks = [
                subprocess.Popen(
                    link.command(rank, command),
                    env={**os.environ, **link.environment(rank), "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
                for rank in range(2)
            ]
            try:
                said = [process.communicate(timeout=HANGS)[0] for process in ranks]
            finally:
                end(*ranks)
        assert [process.returncode for process in ranks] == [0, 0]
        took = [statistics.median(map(float, text.split())) for text in said]
        print(f"expected {expected:.3f} s, took {took}")
        if max(took) == pytest.approx(expected, rel=0.15):
            return
    pytest.fail(f"an all-reduce took {took} s, not {expected}")


@linked
@pytest.mark.alone
def test_each_rank_is_a_machine_of_its_own():
    interfaces = os.listdir("/sys/class/net")
    with Link(ranks=3, rate=1e8) as link, Link(ranks=2) as other:
        assert os.listdir("/sys/class/net") == interfaces
        assert other.command(0, [])[3] not in {link.command(0, [])[3], link.command(1, [])[3]}
        for rank in range(3):
            show = link.command(rank, ["ip", "-brief", "-4", "address", "show", "up"])
            lines = subprocess.run(show, capture_output=True, text=True, check=True).stdout.splitlines()
            assert [line.split()[0].split("@")[0] for line in lines] == ["lo", link.interface]
            assert lines[1].split()[2] == f"{link.address(rank)}/16"
        assert measure(other, seconds=0.1) > 2 * measure(link, seconds=0.1)
    assert left_by(os.getpid()) == []


@linked
@pytest.mark.parametrize("how", ["return", "fail"])
def test_nothing_is_left_when_the_block_ends(how):
    process = start(how)
    _, err = process.communicate(timeout=HANGS)  # the rank, which would sleep on, has stderr too
    assert process.returncode == (1 if how == "fail" else 0)
    assert ("on purpose" in err) == (how == "fail")
    assert left_by(process.pid) == []


@linked
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_after_a_signal(number):
    process = start("wait")
    assert len(left_by(process.pid)) == 3
    process.send_signal(number)
    _, err = process.communicate(timeout=HANGS)
    assert "KeyboardInterrupt" in err
    assert left_by(process.pid) == []


@linked
def test_nothing_is_left_when_the_command_is_interrupted():
    for seconds in (0.02, 0.4):  # while it is set up, and while it is measured
        process = subprocess.Popen([*GRACE, "bench", "link"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        until(functools.partial(left_by, process.pid), process)
        time.sleep(seconds)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=HANGS)
        assert (process.returncode, err) == (130, "grace bench link: interrupted; the network is removed\n")
        assert left_by(process.pid) == []


def held():
    with Link(2):
        pass


@linked
@pytest.mark.parametrize("make", [held, possible])
def test_a_signal_while_a_link_is_set_up_waits_for_the_commands_that_do_it(make, monkeypatch):
    done = []

    def call(*command, script=""):
        if not done:
            signal.raise_signal(signal.SIGTERM)
        output = real(*command, script=script)
        done.append(command[:3])
        return output

    real = namespaces.call
    monkeypatch.setattr(namespaces, "call", call)
    monkeypatch.setattr(namespaces, "remove_stale", lambda: None)
    with pytest.raises(KeyboardInterrupt), signals_raise():
        make()
    assert done.count(("ip", "netns", "add")) == done.count(("ip", "netns", "delete")) >= 2
    assert left_by(os.getpid()) == []


@linked
def test_the_next_link_removes_what_a_killed_process_left():
    process = start("wait")
    broken = Path(namespaces.FOLDER, f"grace-{process.pid}-1-0-hub")
    broken.touch()  # a name without a namespace: killed while it was made
    process.kill()
    process.wait()
    assert len(left_by(process.pid)) == 4
    with Link() as link:
        assert left_by(process.pid) == []
        assert len(left_by(os.getpid())) == 3
        assert "1234" not in process.communicate(timeout=HANGS)[1]  # ends only when the rank has ended
        namespaces.remove_stale()  # leaves what is used
        assert measure(link, seconds=0.1) > 0
