"""Ranks that part: one does something else than the others. All say so, and where they were."""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

import grace
from tests.support.drawing import THOROUGH
from tests.support.engine_pools import available, command, environment
from tests.support.limits import HANGS
from tests.support.pools import on_ranks
from tests.support.training import refusal

pytestmark = pytest.mark.ranks

PROGRAM = Path(__file__).parent.parent / "programs" / "apart.py"
TIMEOUT, WARNED = 3, 1
LAUNCHERS = {
    name.replace("torchrun", "gloo"): command(name, 2, str(PROGRAM))
    for name in ("torchrun", "mpirun-mpi", "horovodrun-gloo")
}
EXCHANGE = r"the exchange of bucket \d+ \(\S+( \.\. \S+)?; allgather, topk\(ratio=0\.1\), residual\)"


def run(engine: str, how: str, *options: object) -> tuple[dict[int, str], dict[int, float], str]:
    """Return the error's message and the seconds it took, by rank, and all that was printed."""
    if engine != "gloo" and not available(engine):
        pytest.skip(f"{engine}: its packages are not installed (make horovod)")
    backend = {"gloo": "torch", "mpirun-mpi": "mpi"}.get(engine, "horovod")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*LAUNCHERS[engine], folder, how, *map(str, options)],
            env={**environment(), "GRACE_BACKEND": backend, "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=HANGS,
        )
    printed = done.stdout
    assert done.returncode != 0, printed
    began = dict(re.findall(r"rank (\d) parts at ([\d.]+)", printed))
    ended = re.findall(r"rank (\d) ended at ([\d.]+): (.*)", printed)
    seconds = {int(rank): float(when) - float(began[rank]) for rank, when, _ in ended}
    return {int(rank): said for rank, _, said in ended}, seconds, printed


@pytest.mark.parametrize(
    ("engine", "how", "called"),
    [
        ("gloo", "broadcast", r"in broadcast_parameters\(\)"),
        *([("mpirun-mpi", "state", r"in full_state_dict\(\)")] if THOROUGH else []),
        *([("horovodrun-gloo", "object", r"in from_root\(\)")] if THOROUGH else []),
        ("mpirun-mpi", "sleep", r"at apart\.py:\d+, in no exchange"),
    ],
)
def test_ranks_in_different_places_are_warned_of_and_named_after_the_timeout(engine, how, called):
    said, seconds, printed = run(engine, how, TIMEOUT, WARNED)
    assert re.search(rf"grace: rank 0 has waited \d s in {EXCHANGE} at step [56]; rank 1 is {called}", printed), printed
    assert re.search(rf"ExchangeError: rank 0 of 2: {EXCHANGE} failed at step [56]; rank 1 is {called}", said[0]), (
        printed
    )
    assert seconds[0] > TIMEOUT - 1
    if how != "sleep":
        name = called.removeprefix("in ")
        assert re.search(rf"ExchangeError: rank 1 of 2: {name} failed; rank 0 .*{EXCHANGE}", said[1]), printed


@pytest.mark.parametrize("engine", LAUNCHERS)
@on_ranks()
def test_ranks_that_call_different_things_are_refused_at_once(engine):
    """Each calls another function; afterwards they are in step again."""
    model = torch.nn.Linear(3, 2 + grace.rank())
    ways = [lambda: grace.broadcast_parameters(model), lambda: grace.from_root(lambda: "a word")]
    said = []
    for mine in (grace.rank(), 0):  # the second time both broadcast, but not as much
        said.append(refusal(ways[mine], kind=grace.RankError))
    different, unequal = said
    assert different.startswith("the ranks do different things: ")
    assert "rank 0 is in broadcast_parameters()" in different
    assert "rank 1 is in from_root()" in different
    assert unequal.startswith("the ranks do different things: rank ")
    assert grace.from_root(lambda: "in step") == "in step"
