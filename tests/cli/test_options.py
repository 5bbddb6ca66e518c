"""Options that several commands have mean the same in all of them."""

import pytest

import grace
from grace.cli.terminal import check_writable
from tests.support.command import grace_command

WRITING = ["bench step", "bench train", "bench kernels", "bench all", "demo", "report", "trace", "strategy build"]


@pytest.mark.parametrize("command", WRITING)
def test_what_is_written_goes_to_out_or_o(command):
    code, text, _ = grace_command(*command.split(), "--help")
    assert code == 0
    (line,) = [line for line in text.splitlines() if "--out " in line]
    assert " -o " in line


def test_bench_says_what_a_model_alone_lacks(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from grace.bench.workloads.models import workload

    (tmp_path / "alone.py").write_text("import torch\n\ndef net():\n    return torch.nn.Linear(2, 2)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(grace.ConfigError, match=r"returns a model alone, .* grace bench needs its loss too"):
        workload("alone:net", rank=0)


def test_a_check_of_what_will_be_written_removes_nothing(tmp_path):
    (tmp_path / "empty").touch()
    check_writable(tmp_path / "empty")
    check_writable(tmp_path / "new" / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "new"]
    assert not list((tmp_path / "new").iterdir())
