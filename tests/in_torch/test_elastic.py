"""Horovod elastic: ranks end and join, memories and counters follow the stated rule, and training goes on."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.engine_pools import available, environment
from tests.support.limits import HANGS

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.skipif(not available("horovodrun-gloo"), reason="Horovod is not installed (make horovod)"),
]

TESTS = Path(__file__).parent.parent


def run_elastic(folder, program, hosts):
    """Run a program on so many ranks of each of two names of this machine, which fail separately.

    Returns: the log's lines, as (what, process, number of ranks, rest), and what the launcher printed.
    """
    first, second = (f"{name}:{slots}\n" for name, slots in hosts.items())
    (folder / "hosts").write_text(first)
    (folder / "both").write_text(first + second)
    discover = folder / "discover.sh"
    # Ranks are numbered in the order in which hosts became known; that of hosts which come together is by chance.
    discover.write_text(f"#!/bin/sh\ncd {folder}\ncat hosts\nif [ -e both ]; then mv both hosts; fi\n")
    discover.chmod(0o755)
    command = ["horovodrun", "-np", str(sum(hosts.values())), "--min-np", "1", "--max-np", "3"]
    command += ["--host-discovery-script", str(discover), "--elastic-timeout", "600"]
    command += [sys.executable, str(TESTS / "programs" / program), str(folder)]
    path = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    env = {**environment(), "PYTHONPATH": path}
    env["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "60"
    env["HOROVOD_CYCLE_TIME"] = "10"  # ranks that wait for others need not ask each other every millisecond
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in (folder / "log").read_text().splitlines()]
    return [(line[0], line[1], int(line[2]), line[3:]) for line in lines], done.stdout + done.stderr


@pytest.fixture(scope="module")
def both_runs(tmp_path_factory):
    """Both programs' runs, at the same time: most of it they wait for the launcher's looks.

    A rank's death is noticed at once by those that wait for it: all others if it is rank 0, which coordinates Horovod's
    operations. If it were rank 2, rank 0 would wait for rank 1 first, and that one for rank 0, until gloo's timeout.
    """
    given = ("elastic.py", {"localhost": 1, "127.0.0.1": 1}), ("elastic_outer.py", {"127.0.0.1": 1, "localhost": 2})
    folders = [tmp_path_factory.mktemp("elastic") for _ in given]
    with ThreadPoolExecutor() as threads:
        started = [threads.submit(run_elastic, folder, *one) for folder, one in zip(folders, given, strict=True)]
        return [one.result() for one in started]


@pytest.fixture(scope="module")
def run(both_runs):
    return both_runs[0]


@pytest.fixture(scope="module")
def outer_run(both_runs):
    """The log's lines as dicts, and what the launcher printed."""
    lines, printed = both_runs[1]
    names = ("what", "process", "size", "rank", "step", "own", "memory", "inner", "weights", "anchors", "momenta")
    found = [dict(zip(names, (*line, *rest), strict=True)) for *line, rest in lines]
    return [{**line, "rank": int(line["rank"]), "step": int(line["step"])} for line in found], printed


def test_training_goes_on_with_fewer_ranks_and_with_new_ones(run):
    lines, _ = run
    starts = [(size, int(rest[0])) for what, _, size, rest in lines if what == "start"]
    assert sorted(starts)[:1] == [(1, 10)]  # alone, from the last commit before the other rank's death
    assert [start for start in starts if start[0] == 2][:2] == [(2, 0), (2, 0)]
    assert [start for start in starts if start[0] == 2][2:] == [(2, 30), (2, 30)]
    assert [(size, rest) for what, _, size, rest in lines if what == "end"] == [(1, ["45"])]


def test_ranks_that_have_met_have_the_same_weights_factors_and_step_counters(run):
    lines, _ = run
    both = [rest for what, _, size, rest in lines if what == "together"]
    assert len(both) == 2
    assert both[0] == both[1]
    assert both[0][:2] == ["35", "35"]


def test_a_rank_that_goes_on_keeps_its_memory_and_a_new_one_starts_with_none(run):
    lines, _ = run
    survivor = next(pid for what, pid, size, _ in lines if what == "start" and size == 1)
    alone = next(rest for what, _, size, rest in lines if what == "start" and size == 1)
    assert alone[1] == alone[2]  # the residual is that of the commit
    for what, pid, size, rest in lines:
        if what == "start" and size == 2 and int(rest[0]) >= 30:
            assert (rest[1] == rest[2]) == (pid == survivor)


def test_what_was_lost_is_said(run):
    _, printed = run
    changes = re.findall(r"the number of ranks changed from (\d to \d) at step", printed)
    assert {change: changes.count(change) for change in changes} == {"2 to 1": 2, "1 to 2": 1}
    assert "those of ranks that ended are lost, and new ranks start with none" in printed


# -- ranks that train alone between outer rounds ---------------------------------------------------------------------


KEPT = ("own", "memory", "inner", "weights", "anchors", "momenta")


def starts_and_known(lines):
    """The starts, and the committed values by process and step."""
    committed = {(line["process"], line["step"]): line for line in lines if line["what"] == "commit"}
    return [line for line in lines if line["what"] == "start"], committed


def test_ranks_that_train_alone_go_on_with_fewer_and_with_more_of_them(outer_run):
    lines, _ = outer_run
    starts, _ = starts_and_known(lines)
    sizes = [(line["size"], line["step"]) for line in starts]
    joined = sizes[-1][1]
    # the others notice the death at their next collective, in the commit of iteration 15, which is within a period
    assert sizes == [(3, 0)] * 3 + [(2, 15)] * 2 + [(3, joined)] * 3
    ends = [line for line in lines if line["what"] == "end"]
    assert len(ends) == 3
    for name in ("weights", "anchors", "momenta"):
        assert len({line[name] for line in ends}) == 1


def test_a_rank_that_trains_alone_goes_on_with_all_that_it_committed(outer_run):
    starts, committed = starts_and_known(outer_run[0])
    went_on = [line for line in starts if (line["process"], line["step"]) in committed]
    assert len(went_on) == 4  # two after the death, and two beside the new one
    for line in went_on:
        before = committed[line["process"], line["step"]]
        assert {name: line[name] for name in KEPT} == {name: before[name] for name in KEPT}
    assert len({line["own"] for line in went_on[:2]}) == 2  # within a period each has its own
    assert len({line["inner"] for line in went_on}) == 4


def test_a_new_rank_starts_from_the_anchor_with_rank_0s_optimizer(outer_run):
    starts, committed = starts_and_known(outer_run[0])
    (new,) = [line for line in starts[-3:] if (line["process"], line["step"]) not in committed]
    (first,) = [line for line in starts[-3:] if line["rank"] == 0]
    assert new["weights"] == new["anchors"] == first["anchors"]
    assert new["momenta"] == first["momenta"]
    assert new["inner"] == first["inner"]
    assert new["memory"] != first["memory"]


def test_what_was_lost_of_training_alone_is_said(outer_run):
    _, printed = outer_run
    assert "from 3 to 2 at step 15: ranks that went on keep what they have trained since the last round" in printed
