"""``grace strategy show`` for clusters of any size: what ranks send is counted by kinds of ranks."""

import re
import sys

import pytest
from typer.testing import CliRunner

from grace.cli.main import app
from grace.core.variable import Variable
from grace.strategy import ShardPlan, Strategy, Sync, VariablePlan, schema

PARTS = [
    ShardPlan(),
    ShardPlan(Sync("allgather"), "topk(ratio=0.1)"),
    ShardPlan(Sync("broadcast"), "signsgd"),
    ShardPlan(Sync("scatter_reduce"), "qsgd"),
    ShardPlan(Sync("none", period=4)),
    *(ShardPlan(Sync("reduce_broadcast", destination=rank), "topk") for rank in (0, 1, 2)),
    ShardPlan(Sync("reduce_broadcast", destination=1)),
]


def strategy_of(parts, world):
    parts = [part for part in parts if part.sync.destination < world]
    return Strategy(tuple(VariablePlan(Variable(f"w{i}", (30, 7)), (part,)) for i, part in enumerate(parts)), world)


@pytest.mark.parametrize("world", [9, 20_000, 10**9])
def test_show_takes_no_longer_for_large_worlds(tmp_path, world):
    schema.dump(strategy_of(PARTS, world), tmp_path / "s.json")
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append(None))
    try:
        ran = CliRunner().invoke(app, ["strategy", "show", str(tmp_path / "s.json")])
    finally:
        sys.setprofile(None)
    assert len(calls) < 500_000
    assert ran.exit_code == 0, ran.output
    assert len(re.findall(r"^rank \d+ sends, and receives", ran.stdout, re.MULTILINE)) == 3
    assert f"each of the other {world - 3} ranks sends, and receives" in ran.stdout
    assert "the busiest link is that of rank 1: " in ran.stdout


def test_show_lists_the_busiest_of_many_destinations(tmp_path):
    parts = [ShardPlan(Sync("reduce_broadcast", destination=rank)) for rank in range(12)]
    schema.dump(strategy_of(parts, 20), tmp_path / "s.json")
    shown = CliRunner().invoke(app, ["strategy", "show", str(tmp_path / "s.json")]).stdout
    assert len(re.findall(r"^rank \d+ sends, and receives", shown, re.MULTILINE)) == 8
    assert "4 more destinations send, and receive, " in shown
