"""Files are whole or as they were: a writer that is killed, one that fails, and ranks that are told."""

import os
import signal
import subprocess
import sys

import pytest
import torch

import grace
from grace.core.atomic_files import atomic_write
from tests.support.checkpoints import made
from tests.support.limits import HANGS
from tests.support.pools import on_ranks
from tests.support.training import refusal, train_given

KILLED = """
import os, pathlib, signal, sys
import grace

def write(path):
    with open(path, "wb") as file:
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

grace.init("local")
grace.save_from_root(sys.argv[1], write)
"""


@pytest.mark.ranks
def test_a_process_that_is_killed_while_it_writes_leaves_the_last_good_file(tmp_path):
    file = tmp_path / "checkpoint.pt"
    file.write_bytes(b"the last good one")
    ended = subprocess.run([sys.executable, "-c", KILLED, str(file)], timeout=HANGS, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert file.read_bytes() == b"the last good one"
    with atomic_write(file) as draft:
        draft.write_bytes(b"another")
    assert file.read_bytes() == b"another"
    assert os.listdir(tmp_path) == ["checkpoint.pt"]  # and of the killed one nothing is left


def test_what_fails_leaves_nothing_and_a_link_stays_one(tmp_path):
    file, link = tmp_path / "a.pt", tmp_path / "latest.pt"
    file.write_text("good")
    link.symlink_to(file)

    def fail(path):
        path.write_text("half")
        raise OSError("the disk is full")

    grace.init("local")
    with pytest.raises(OSError, match="disk is full"):
        grace.save_from_root(link, fail)
    grace.save_from_root(link, lambda path: path.write_text("new"))
    grace.shutdown()
    assert (link.is_symlink(), file.read_text(), sorted(os.listdir(tmp_path))) == (True, "new", ["a.pt", "latest.pt"])


def test_a_draft_has_a_new_name_and_is_no_link_of_others(tmp_path):
    file, precious, names = tmp_path / "ck.pt", tmp_path / "precious", []
    precious.write_text("precious")
    planted = [tmp_path / f".ck.{word}draft.pt" for word in ("", "0123456789abcdef.")]
    for link in planted:
        link.symlink_to(precious)

    def write(path):
        names.append(path.name)
        path.write_text("new")

    grace.init("local")
    for _ in range(2):
        grace.save_from_root(file, write)

    def replaced(path):
        path.unlink()
        path.symlink_to(precious)

    with pytest.raises(OSError, match="symbolic link"):
        grace.save_from_root(file, replaced)
    grace.shutdown()
    assert len(set(names)) == 2
    assert (precious.read_text(), file.read_text(), file.is_symlink()) == ("precious", "new", False)
    assert file.stat().st_mode == precious.stat().st_mode  # as open() makes them
    assert all(link.is_symlink() for link in planted)
    assert len(os.listdir(tmp_path)) == 4


def test_two_who_write_one_file_do_not_take_each_others_drafts(tmp_path):
    file = tmp_path / "ck.pt"
    with atomic_write(file) as first:
        with atomic_write(file) as second:
            second.write_text("second")
        assert file.read_text() == "second"
        first.write_text("first")
    assert file.read_text() == "first"
    assert os.listdir(tmp_path) == ["ck.pt"]


@on_ranks()
def test_rank_0_writes_for_all_and_all_are_told_if_it_cannot(tmp_path):
    """README's recipe: saved, loaded; and a folder that is not there."""
    model, optimizer = made()
    train_given(model, optimizer, range(2))
    state = optimizer.full_state_dict()
    grace.save_from_root(tmp_path / "checkpoint.pt", lambda path: torch.save({"optimizer": state}, path))
    assert os.listdir(tmp_path) == ["checkpoint.pt"]
    optimizer.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["optimizer"])
    gone = tmp_path / "gone" / "checkpoint.pt"
    kinds = (OSError, RuntimeError) if grace.rank() == 0 else grace.RankError
    told = refusal(grace.save_from_root, gone, lambda path: path.write_text(""), kind=kinds)
    assert grace.rank() == 0 or told.startswith(f"rank 0 could not save {gone}: ")


@on_ranks()
def test_a_rank_that_cannot_save_its_part_tells_the_others():
    """They do not wait for it."""
    model, optimizer = made()
    train_given(model, optimizer, range(1))
    if grace.rank() == 1:
        optimizer._grace.runner.pending_means = lambda: 1 / 0
        assert refusal(optimizer.full_state_dict, kind=ZeroDivisionError) == "division by zero"
    else:
        said = refusal(optimizer.full_state_dict, kind=grace.RankError)
        assert said == "rank 1 could not save: ZeroDivisionError: division by zero"
