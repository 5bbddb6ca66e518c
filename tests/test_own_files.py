"""The parts that the pages show are complete files, which a package brings by entry points: used by name alone, on two
ranks, stopped and resumed."""

import os
import re
import sys

import pytest
import torch

import grace
from grace.core import registry
from tests.support.by_hand import started_by_hand
from tests.support.command import grace_command, installed
from tests.support.engine_pools import environment
from tests.support.training import distributed, net, train
from tests.test_pages import ROOT, blocks

PAGES = [ROOT / "docs" / name for name in ("own-parts.md", "own-engine.md", "kernels.md")]
FILES = {
    match[1]: block
    for page in PAGES
    for block in blocks(page, "python")
    if (match := re.match(r"# (\w+)\.py\n", block))
}
LONGEST = 40
USED = {
    "window": {"compressor": "window(every=4)"},
    "decaying": {"compressor": "topk(ratio=0.1)", "memory": "decaying(decay=0.5)"},
    "in_pieces": {"compressor": "topk(ratio=0.1)", "communicator": "in_pieces"},
    "by_size": {"strategy": "by_size(least=2048)"},
    "tenth": {"compressor": "tenth(levels=7)"},
    "blocks": {"compressor": "blocks(size=8)"},
}
"""Arguments with which an optimizer uses each of them."""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A folder with the files, and what installing them leaves."""
    folder = tmp_path_factory.mktemp("package")
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text)
    groups: dict[str, str] = {}
    for page in PAGES:
        for group, points in re.findall(r"^([\w.]+) =\n((?:    .*\n)+)", "".join(blocks(page, "ini")), re.M):
            groups[group] = groups.get(group, "") + points.replace("    ", "")
    installed(folder, "own-parts", "".join(f"[{group}]\n{points}\n" for group, points in groups.items()))
    return folder


def test_every_file_is_short_and_has_an_entry_point(package):
    assert {name: len(text.splitlines()) for name, text in FILES.items() if len(text.splitlines()) > LONGEST} == {}
    named = re.findall(r"^\w+ = (\w+):", (package / "own_parts-1.0.dist-info" / "entry_points.txt").read_text(), re.M)
    assert sorted(named) == sorted(FILES) == sorted([*USED, "shared_file"])


def importable(folder):
    """Let this process find the modules in a folder."""
    sys.path.insert(0, str(folder))
    registry._discover.cache_clear()


def removed(folder):
    sys.path.remove(str(folder))
    registry._discover.cache_clear()


def trained(choices):
    """Weights after four steps, and after two that a checkpoint continues; and the kinds of parts that it keeps."""
    whole = net()
    train(whole, distributed(whole, **choices), range(4))
    model = net()
    optimizer = distributed(model, **choices)
    train(model, optimizer, range(2))
    saved, weights = optimizer.full_state_dict(), model.state_dict()
    optimizer.close()
    resumed = net(seed=1)
    resumed.load_state_dict(weights)
    optimizer = distributed(resumed, **choices)
    optimizer.load_state_dict(saved)
    train(resumed, optimizer, range(2, 4))
    return [p.detach().clone() for p in whole.parameters()], [p.detach().clone() for p in resumed.parameters()]


def all_trained(folder):
    importable(folder)
    try:
        return {name: trained(choices) for name, choices in USED.items()}
    finally:
        removed(folder)


def test_parts_are_used_by_name_on_two_ranks_and_resumed(two_ranks, package):
    first, second = two_ranks.run(all_trained, package)
    for name, (whole, resumed) in first.items():
        for ranks in zip(whole, resumed, *second[name], strict=True):
            assert all(torch.equal(ranks[0], other) for other in ranks[1:]), name


def test_parts_are_listed(package):
    importable(package)
    try:
        code, out, err = grace_command("list")
    finally:
        removed(package)
    assert (code, err) == (0, "")
    for name in USED:
        assert re.search(rf"^{name} ", out, re.M), name


PROGRAM = """
import torch, grace

engine = grace.init()
torch.manual_seed(engine.rank)
model = torch.nn.Linear(30, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = grace.DistributedOptimizer(optimizer, model.named_parameters(), "topk(ratio=0.1)")
for step in range(2):
    optimizer.zero_grad()
    model(torch.randn(8, 30)).square().mean().backward()
    optimizer.step()
weights = engine.allgather_object(model.weight.tolist())
print(engine.describe(), grace.init("shared_file") is engine, weights[0] == weights[1])
"""


@pytest.mark.ranks
def test_an_engine_is_joined_by_its_name_on_two_ranks(package, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    path = os.pathsep.join([str(package), environment()["PYTHONPATH"]])
    command = [sys.executable, "program.py"]
    ranks = started_by_hand(command, tmp_path, GRACE_BACKEND="shared_file", PYTHONPATH=path)
    for number, (_, said) in enumerate(ranks):
        assert f"shared_file, rank {number} of 2 True True\n" in said


def test_an_engine_of_another_name_is_refused(tmp_path, monkeypatch):
    lines = ("from grace.core.backend import LocalBackend", "class Strange(LocalBackend):", "    pass\n")
    (tmp_path / "strange.py").write_text("\n".join(lines))
    installed(tmp_path, "strange", "[grace.backends]\nstrange = strange:Strange\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(grace.ConfigError, match=r"strange = strange:Strange of grace\.backends must give a backend of"):
        grace.init("strange")
    with pytest.raises(grace.ConfigError, match="known: auto, torch, horovod, mpi, local, strange"):
        grace.init("stranger")
