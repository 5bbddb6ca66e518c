"""``grace warmup``, and what is said when loops are compiled without it."""

import io
import re
import sys

import pytest

from tests.support.command import grace_command, grace_program

pytest.importorskip("numba", reason="compiled loops are Numba's")


@pytest.mark.ranks
def test_what_was_compiled_is_kept(tmp_path):
    first, second = (grace_program("warmup", "natural", NUMBA_CACHE_DIR=str(tmp_path))[0] for _ in range(2))
    assert re.fullmatch(rf"Compiled \d+ loops in \d+ s; they are kept in {tmp_path}\.\n", first)
    assert second == f"All loops are compiled already; they are kept in {tmp_path}.\n"
    kept = {path.name.partition("-")[0] for path in tmp_path.rglob("*.nbi")}
    assert kept >= {"buckets.encode_powers", "quantization._round_powers"}  # of whole buckets, and of single variables


def test_what_cannot_be_compiled_is_refused(monkeypatch):
    code, _, err = grace_command("warmup", "topkk")
    assert code == 2
    assert "topk" in err
    monkeypatch.setenv("GRACE_FUSED", "0")
    code, _, err = grace_command("warmup")
    assert (code, err) == (2, "grace: there is nothing to compile: GRACE_FUSED=0\n")


def compiled_while(watched, environment, monkeypatch):
    """Compile two loops, and return what is printed meanwhile."""
    from numba import njit

    from grace.kernels.numba.compiling import announce

    class Terminal(io.StringIO):
        isatty = staticmethod(lambda: watched)

    said = Terminal()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    announce()
    monkeypatch.setattr(sys, "stderr", said)
    for number in range(2):

        def loop(x, number=number):
            return x + number

        loop.__module__ = "grace.kernels.numba.loops"
        njit(loop)(1)
    return said.getvalue()


def test_who_watches_a_terminal_is_told_once(monkeypatch):
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "HOROVOD_LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert compiled_while(True, {}, monkeypatch).count("`grace warmup` does it ahead") == 1
    assert compiled_while(False, {}, monkeypatch) == ""
    assert compiled_while(True, {"LOCAL_RANK": "1"}, monkeypatch) == ""
