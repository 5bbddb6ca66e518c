"""Calibrations: what is written is read, and what is damaged, foreign or old is refused by name."""

import copy
import json
import stat
from dataclasses import replace

import pytest

from grace.backends.simulated import SimulatedRanks
from grace.cli.calibration_file import Calibration, Key, read
from grace.errors import ConfigError
from grace.planner.costs import CodecCost, Cost, Curve
from grace.planner.network import MeasuredNetwork

KEY = Key({"a": 2, "b": 2}, "torch.distributed (gloo)", "torch 2.9.0", ranks=4, threads=1)
CURVE = Curve(((1e3, 1e-4), (1e6, 1e-3), (1e8, 0.1)))
MADE = Calibration(
    key=KEY,
    made=1e9,
    network=MeasuredNetwork({"allreduce": CURVE, "allgather": CURVE}, 4, {"allgather": 0.25}),
    inside=MeasuredNetwork({"allreduce": CURVE}, 2),
    codecs={
        "allreduce, none, none": CodecCost(Cost(1e-5, 2e-6, 1e-9), Cost(), Cost(element=1e-9, peer=2e-10)),
        "allgather, topk, residual": CodecCost(Cost(1e-5), bits=1.5),
    },
    by_ring=True,
    concatenates=True,
)


@pytest.fixture
def path(tmp_path):
    MADE.write(tmp_path / "deeper" / "c.json")
    return tmp_path / "deeper" / "c.json"


def test_what_is_written_is_read(path):
    assert read(path, KEY, now=1e9 + 5) == MADE
    assert [each.name for each in path.parent.iterdir()] == ["c.json"]
    assert json.loads(path.read_text())["format"] == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hosts": {"a": 4, "b": 4}, "ranks": 8}, r"hosts: .*'a': 2.*and here .*'a': 4.*"),
        ({"engine": "MPI (Open MPI)"}, r"engine: 'torch.distributed \(gloo\)', and here 'MPI \(Open MPI\)'"),
        ({"hosts": {"a": 4}}, r"hosts: .*'b': 2.*and here .*'a': 4.*"),
        ({"framework": "torch 3.0"}, r"framework: 'torch 2.9.0', and here 'torch 3.0'"),
        ({"threads": 2}, r"threads: 1, and here 2"),
        ({"grace": "9"}, r"grace: .* and here '9'"),
    ],
)
def test_a_foreign_one_is_refused_by_what_differs(path, change, said):
    with pytest.raises(ConfigError, match=rf"c\.json: is for another run: it has {said}\. Run `grace calibrate`"):
        read(path, replace(KEY, **change), now=1e9)


def test_an_old_one_is_refused_by_its_age(path):
    with pytest.raises(ConfigError, match=r"c\.json: is 31 days old, and taken up to 30"):
        read(path, KEY, now=1e9 + 31 * 86400)
    assert read(path, KEY, max_age=None, now=1e10) == MADE
    with pytest.raises(ConfigError, match=r"is damaged: it was made 10 days from now"):
        read(path, KEY, now=1e9 - 10 * 86400)


def change(document, place, value):
    """A copy with something else in a place; without it, if there is no value."""
    changed = copy.deepcopy(document)
    inside = changed
    for name in place[:-1]:
        inside = inside[name]
    if value is None and isinstance(inside, dict):
        del inside[place[-1]]
    else:
        inside[place[-1]] = value
    return changed


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (["format"], 3, r"is of format 3; this Grace reads format 4"),
        (["made"], None, r"is damaged: calibration, made: is missing"),
        (["made"], "today", r"is damaged: calibration, made: must be a number, not 'today'"),
        (["made"], -1, r"is damaged: calibration: made must be a number from 0 on, not -1"),
        (["made"], True, r"is damaged: calibration, made: must be a number, not True"),
        (["network", "curves", "allreduce", "points"], [], r"a curve must be a list of bytes and seconds"),
        (["network", "curves", "allreduce", "points", 1, 1], 1e-5, r"a curve must be .* both rising"),
        (["inside", "curves", "allreduce", "points", 0, 1], -1, r"a curve must be a list of bytes and seconds"),
        (["network", "ranks"], "4", r"network.ranks: must be a whole number, not '4'"),
        (["network", "ranks"], 1, r"collectives of 2 ranks or more"),
        (["network", "links"], 1, r"network.links: unknown key.*; known: curves, ranks, contention"),
        (["network", "curves"], None, r"network.curves: is missing"),
        (["network", "curves"], 3, r"network.curves: must be keys with values, not 3"),
        (["network", "curves", "gossip"], {"points": [[1, 1]]}, r"'gossip' is no collective"),
        (["codecs", "allreduce, none, none", "start", "call"], -1e-9, r"parts of a cost are seconds from 0 on"),
        (["codecs", "allreduce, none, none", "finish"], 1, r"none.finish: must be keys with values, not 1"),
        (
            ["codecs", "allreduce, none, none", "end"],
            1,
            r"codecs.allreduce, none, none.end: unknown key; known: start, ",
        ),
        (["codecs", "allgather, topk, residual", "bits"], 0, r"a value takes more than 0 bits"),
        (["key", "ranks"], 5, r"the hosts .* do not have 5 ranks"),
        (["key", "hosts", "a"], "two", r"key.hosts.a: must be a whole number, not 'two'"),
        (["more"], 1, r"calibration, more: unknown key; known: key, made, "),
    ],
)
def test_a_damaged_one_is_refused_by_the_place(path, place, value, said):
    path.write_text(json.dumps(change(MADE.to_dict(), place, value)))
    with pytest.raises(ConfigError, match=rf"c\.json: .*{said}.*Run `grace calibrate`"):
        read(path, KEY, now=1e9)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format": 1}', "a: b", '{"format": 1, "format": 1}', "\0"])
def test_what_is_no_calibration_is_refused(path, text):
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"c\.json.*Run `grace calibrate`"):
        read(path)


def test_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read.*Run `grace calibrate`"):
        read(tmp_path / "none.json")


# -- what it is for ----------------------------------------------------------------------------------------------------


def test_the_key_is_that_of_the_run():
    key = Key.of_run(SimulatedRanks(3), ["b", "a", "b"], "numpy", 2)
    assert (key.hosts, key.engine, key.ranks, key.threads) == ({"a": 1, "b": 2}, "simulated", 3, 2)
    assert key.framework.startswith("numpy 2") or key.framework.startswith("numpy 1")
    assert Key.of_run(SimulatedRanks(3, 1), ["b", "a", "b"], "numpy", 2) == key


def test_a_file_that_cannot_be_written_stays_as_it_was(path, monkeypatch):
    before, mode = path.read_text(), stat.S_IMODE(path.stat().st_mode)
    monkeypatch.setattr(Calibration, "to_dict", lambda self: {"made": object()})
    with pytest.raises(TypeError):
        MADE.write(path)
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == (before, mode)


# -- what it is used for -----------------------------------------------------------------------------------------------


def test_costs_are_those_that_were_measured():
    costs = MADE.costs(MADE.network)
    assert costs.network.seconds("allgather", 1e6, 4) == 1e-3
    assert costs.codecs["allgather, topk, residual"].bits == 1.5
    assert costs.codecs["allreduce, none, none"] == MADE.codecs["allreduce, none, none"]
    assert costs.by_ring
    assert costs.inside.seconds("allreduce", 1e6, 2) == 1e-3
