"""Faults x launchers: what becomes of the other ranks, and what they say. How many seconds it takes is printed by
``python -m tests.striking``.

RELIABILITY.md is this table for people.
"""

import re
from importlib.util import find_spec

import pytest

from tests.striking import LAUNCHERS, run
from tests.support.drawing import THOROUGH
from tests.support.engine_pools import ENGINES, available

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

TIMEOUT = 4
"""Seconds that a rank waits for others, where the fault is that one does not come."""
SOON = {"ANSWER_SECONDS": "3", "GIVE_UP_SECONDS": "1"}
"""Ranks that wait over MPI poll, so waits are short where it is the same rule that ends them."""

SAID = {
    "kill": r"rank 1 was lost",
    "raise": r"rank 1 failed: ValueError: a mistake on rank 1",
    "leave": r"rank 1 has left",
    "stop": rf"rank 1 .*within {TIMEOUT} s",
    "skip": r"rank 1 is at step 5|rank 1 failed: AssertionError: optimizer.zero_grad\(\) was called",  # Horovod's own
    "miss": r"rank 1 called optimizer.zero_grad\(\) and left out backward\(\)",
}
ENDED_FIRST = {
    "kill": r"rank +: 1 \(local_rank: 1\)\s+exitcode +: -9",
    "raise": r"rank 1 failed first: ValueError: a mistake on rank 1",
}
"""Words that torchrun always prints, which looks every 0.1 s whether a rank has failed, and ends the others."""
SAID_IN_GRAPHS = {
    "kill": r"rank 1 failed first: it was lost|process rank 1 .* exited on signal 9",  # the latter by mpirun
    "raise": r"ValueError: a mistake on rank 1",
    "leave": r"rank 1 has left",
}
EXCHANGE = r"rank [02] of 3: the exchange of bucket \d+ \(.*topk.*\) failed at step \d+"
"""Words of one survivor at least: launchers mix the output of several."""


def ended_by(launcher: str, framework: str, fault: str, method: str = "topk(ratio=0.05)", **variables: str) -> str:
    """Return what a run said that ended as it should: not well, and with nobody left."""
    if launcher in ENGINES and not available(launcher):
        pytest.skip(f"{launcher}: its packages are not installed (make horovod)")
    ended = run(launcher, framework, method, fault, **SOON, **variables)
    assert ended.code != 0, ended.printed
    assert not ended.left, ended.printed
    return ended.printed


STRUCK = [(launcher, fault) for launcher in LAUNCHERS for fault in ("kill", "raise", "leave", "skip", "miss")]
"""`make thorough` strikes all. How ranks hear of a fault does not depend on the launcher: the watch tells them."""
FEW = [("torchrun", "kill"), ("horovodrun-gloo", "raise"), ("mpirun-mpi", "leave")]
IN_GRAPHS = [(launcher, fault) for launcher in ("horovodrun-gloo", "mpirun-mpi") for fault in SAID_IN_GRAPHS]


@pytest.mark.every
@pytest.mark.parametrize(("launcher", "fault"), STRUCK if THOROUGH else FEW)
def test_a_fault_of_one_rank_ends_all_and_is_named(launcher, fault):
    printed = ended_by(launcher, "torch", fault)
    if launcher == "torchrun" and fault in ENDED_FIRST and re.search(ENDED_FIRST[fault], printed):
        return  # whether the others had time to say anything or not
    assert re.search(SAID[fault], printed), printed
    if fault in ("kill", "raise", "leave"):
        assert re.search(EXCHANGE, printed), printed
    if fault == "raise":
        assert set(re.findall(r"grace: rank \d failed first.*", printed)) == {f"grace: {ENDED_FIRST['raise']}"}


@pytest.mark.parametrize("fault", ["kill", "raise", "leave"] if THOROUGH else ["leave"])
def test_a_fault_between_outer_rounds_ends_all_and_is_named(fault):
    printed = ended_by("torchrun", "torch", fault, OUTER="nesterov")
    if fault not in ENDED_FIRST or not re.search(ENDED_FIRST[fault], printed):
        assert re.search(SAID[fault], printed), printed
        assert re.search(EXCHANGE, printed), printed


@pytest.mark.parametrize("launcher", ["torchrun", "horovodrun-gloo", "mpirun-mpi"] if THOROUGH else ["mpirun-mpi"])
def test_a_rank_that_stands_still_is_named_after_the_timeout(launcher):
    printed = ended_by(launcher, "torch", "stop", GRACE_TIMEOUT=str(TIMEOUT))
    said = SAID["stop"]
    if launcher == "horovodrun-gloo":
        said += r"|rank 1 does not answer \(stopped"  # when Horovod gives up first
    assert re.search(said, printed), printed


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")
@pytest.mark.every
@pytest.mark.parametrize(("launcher", "fault"), IN_GRAPHS if THOROUGH else [IN_GRAPHS[0], IN_GRAPHS[5]])
def test_a_fault_in_the_middle_of_a_graph_ends_all_and_is_named(launcher, fault):
    printed = ended_by(launcher, "keras", fault)
    assert re.search(SAID_IN_GRAPHS[fault], printed), printed
    assert re.search(r"grace\.1\.0\.dense_kernel|bucket 0 \(dense/kernel .. dense_1/bias", printed), printed


PLANNING = [("mpirun-mpi", "links", "leave"), ("torchrun", "trials", "leave")]
if THOROUGH:
    PLANNING += [("torchrun", "codecs", "kill"), ("torchrun", "links", "leave"), ("horovodrun-gloo", "links", "leave")]


@pytest.mark.parametrize(("launcher", "phase", "fault"), PLANNING)
def test_a_fault_while_auto_plans_ends_all_and_is_named(launcher, phase, fault):
    printed = ended_by(launcher, "auto", fault, method=phase)
    if not (launcher == "torchrun" and fault in ENDED_FIRST and re.search(ENDED_FIRST[fault], printed)):
        assert re.search(SAID[fault], printed), printed
    assert "training goes on uncompressed" not in printed
