"""The grace command: list, describe, help and errors, run as a user does; many calls alike run in this process."""

import functools
import os
import re
import subprocess

import pytest

import grace
from grace.bench.workloads.task import OPTIMIZERS
from grace.cli.components import trained_lines
from grace.core.registry import KINDS, aliases, known, legal_communicators, make
from tests.support import warm
from tests.support.command import grace_command, grace_program, installed
from tests.support.grouping import in_groups

COMPONENTS = [
    (kind, name) for kind in KINDS for name, cls in known(kind).items() if cls.__module__.startswith("grace.")
]
COMPRESSORS = [name for kind, name in COMPONENTS if kind == "compressor"]


def said(*args):
    """Run a command in this process, and return what it prints at 80 columns."""
    code, out, err = grace_command(*args)
    assert (code, err) == (0, "")
    return out


@functools.cache
def described(name):
    """Return the output of `grace describe`."""
    return said("describe", name)


@pytest.fixture(scope="module")
def listing():
    return said("list", "--long")


@pytest.mark.ranks
def test_version_is_the_packages():
    assert grace_program("--version")[0] == f"grace {grace.__version__}\n"


def test_the_command_starts_without_the_heavy_packages():
    code = (
        "import sys, grace.cli.main; print({'torch', 'numba', 'matplotlib', 'sklearn', 'tensorflow'} & {*sys.modules})"
    )
    assert subprocess.run([warm.REAL, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@in_groups(("name",), [(name,) for name in COMPRESSORS])
def test_list_shows_a_compressors_traits(listing, name):
    (row,) = re.findall(rf"^{name} .*$", listing.split("\nmemory")[0], re.MULTILINE)
    compressor = make("compressor", name)
    traits = compressor.traits
    bits = compressor.wire_bits((1000, 1000))
    bits = "varies" if bits is None else f"{bits:.4g}"
    unbiased = "yes" if traits.unbiased else "no"
    size = traits.fixed_size.split()
    default, *others = sorted(legal_communicators(compressor), key=lambda other: other != traits.communicator)
    others = ", ".join(others).split()
    assert row.split() == [name, traits.category, unbiased, *size, bits, traits.memory, default, *others]


def test_list_shows_memories_and_communicators(listing):
    assert "residual(beta=1.0, gamma=1.0)" in listing
    assert re.search(r"^allreduce +~2p *$", listing, re.MULTILINE)


def test_the_short_list_has_a_line_for_each_in_columns_with_nothing_cut():
    lines = [line.rstrip() for line in said("list").splitlines() if not line.startswith("─")]
    for kind in KINDS:
        start = next(i for i, line in enumerate(lines) if line.split()[:1] == [kind] and line.endswith("what it is"))
        rows = lines[start + 1 : lines.index("", start)]
        column = lines[start].index("what it is")
        assert all(row[column - 1] == " " and row[column] != " " for row in rows)
        assert [row.split()[0] for row in rows] == [*known(kind), *aliases(kind)]
        for cls, row in zip(known(kind).values(), rows, strict=False):
            first = " ".join(cls.__doc__.split("\n\n")[0].replace("``", "").split())
            assert row.endswith(".")
            assert first.startswith(row[column:].rstrip("."))
    assert re.search(r"^bf16 +allreduce +Short for cast\(dtype=bf16\)\.$", "\n".join(lines), re.MULTILINE)
    assert "grace list --long" in lines[-1]


def test_describe_says_what_is_taken():
    assert "Taken unless you choose others\n  communicator allgather, memory residual\n" in described("topk")
    text = said("describe", "parallax(compressor=topk(ratio=0.05))")
    assert "Taken unless you choose others\n  compressor topk(ratio=0.05), memory residual\n" in text


@pytest.mark.parametrize("args", [["describe", "topk"], ["--help"], ["demo", "--help"]])
def test_output_fits_80_columns(args):
    assert max(map(len, said(*args).splitlines())) <= 80


@in_groups(("kind", "name"), COMPONENTS, lambda kind, name: kind)
def test_describe_explains_a_component(kind, name):
    text = described(name)
    assert f"{name}, {'an outer optimizer' if kind == 'outer' else f'a {kind}'}\n" in text
    component = make(kind, name)
    first = type(component).__doc__.split("\n")[0].replace("``", "")
    assert first in " ".join(text.split())
    for parameter, default in component.parameters().items():
        assert f"  {parameter} = {default!r}\n" in text


@in_groups(("name",), [(name,) for name in COMPRESSORS])
def test_describe_names_legal_communicators_with_their_cost_and_no_other(name):
    text = described(name).split("a memory\n")[0]
    compressor = make("compressor", name)
    section = text.split("Communicators,")[1].split("\n\n")[0]
    lines = dict(re.findall(r"^  (\w+)(?: \(default\))?: (.*)$", section, re.MULTILINE))
    assert set(lines) == set(legal_communicators(compressor))
    for legal, line in lines.items():
        assert line.startswith(known("communicator")[legal].cost)
    assert f"{compressor.traits.communicator} (default)" in section
    assert f"  communicator {compressor.traits.communicator}, memory {compressor.traits.memory}\n" in text


def test_describe_says_whose_traffic_grows_with_the_number_of_ranks():
    assert re.search(r"allgather.*: \(W-1\)p, which grows with the number of ranks", described("qsgd"))
    assert re.search(r"scatter_reduce: ~2p, whatever the number of ranks", described("qsgd"))


def test_describe_explains_a_composition():
    text = said("describe", "topk(ratio=0.02) | qsgd(levels=7)")
    assert text.startswith("topk(ratio=0.02) | qsgd(levels=7), a compressor\n")
    assert "category: hybrid" in text
    bits = make("compressor", "topk(ratio=0.02) | qsgd(levels=7)").wire_bits((1000, 1000))
    assert f"1000 x 1000    {bits:.4g}, " in text
    assert "'sparsifier': {'name': 'topk', 'ratio': 0.02, 'chunk': 0, 'warmup_steps': 0}" in " ".join(text.split())


@in_groups(("name",), [(name,) for name in COMPRESSORS])
def test_describe_says_with_which_optimizers_a_method_was_trained(name):
    cls, text = known("compressor")[name], described(name)
    for spec, losses in vars(cls).get("measured_loss", {}).items():
        assert type(make("compressor", spec)) is cls
        for optimizer, loss in losses.items():
            verdict = "close" if loss <= 1.03 else "behind"
            assert f"{spec} {100 * (loss - 1):+.1f} %, {verdict}" in " ".join(text.split())
            assert optimizer in OPTIMIZERS
    unknown = set(OPTIMIZERS) - {key for losses in vars(cls).get("measured_loss", {}).values() for key in losses}
    assert all(f"  {optimizer}: not measured\n" in text for optimizer in unknown)


def test_what_was_measured_of_a_class_says_nothing_of_its_subclasses():
    class Mine(known("compressor")["block"]):
        name = "mine"

    assert trained_lines(Mine) == ["sgd: not measured", "adamw: not measured"]


def test_describe_uses_the_specs_parameters():
    text = said("describe", "topk(ratio=0.05)")
    assert "ratio = 0.05 (default 0.01)" in text
    assert re.search(r"1000 x 1000 +2\.6, 12.3x smaller than float32 \(325,000 bytes\)", text)
    assert "{'name': 'topk', 'ratio': 0.05, 'chunk': 0, 'warmup_steps': 0}" in text


def test_describe_prices_the_step_after_the_warm_up_and_says_what_sizes_depend_on():
    text = said("describe", "topk(ratio=0.05, warmup_steps=100)")
    assert "payload size by shape and step: the same on every rank" in text
    assert "Wire bits per element, after the warm-up\n" in text
    assert re.search(r"1000 x 1000 +2\.6, 12.3x smaller than float32 \(325,000 bytes\)", text)
    assert "Wire bits per element\n" in described("topk")
    assert "payload size by shape: the same on every rank and at every step" in described("topk")
    assert "payload size by data" in described("threshold")


def test_describe_says_which_shapes_travel_uncompressed():
    assert re.search(r"^  512 +32, uncompressed", said("describe", "powersgd(rank=2)"), re.MULTILINE)


def test_describe_shows_every_kind_that_has_the_name():
    text = described("none")
    assert "none, a compressor" in text
    assert "none, a memory" in text


def test_describe_says_what_a_short_name_stands_for():
    assert "(bf16 is short for cast(dtype=bf16))" in said("describe", "bf16")


@pytest.mark.ranks
def test_components_of_other_packages_are_listed_and_described(tmp_path):
    (tmp_path / "theirs.py").write_text(
        "from dataclasses import dataclass\n"
        "from grace import Compressor, Traits\n"
        "@dataclass\n"
        "class Theirs(Compressor):\n"
        '    """Keeps [some] of it."""\n'
        "    part: float\n"
        "    name = 'theirs'\n"
        "    traits = Traits(category='hybrid')\n"
    )
    compressors = "[grace.compressors]\ntheirs = theirs:Theirs\nbroken = theirs:Gone\n"
    installed(tmp_path, "theirs", f"{compressors}[grace.memories]\nodd = theirs:Theirs\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    assert "Keeps [some] of it. To be used as theirs(part)." in grace_program("list", "--long", PYTHONPATH=path)[0]
    listed = grace_program("list", PYTHONPATH=path)[0]
    assert "Keeps [some] of it." in listed
    said = " ".join(listed.split("Not usable")[1].split())
    broken = "broken = theirs:Gone of grace.compressors in the package theirs 1.0 cannot be loaded: AttributeError:"
    assert f"the entry point {broken}" in said
    assert "the entry point odd = theirs:Theirs of grace.memories in the package theirs 1.0 is no memory" in said
    assert broken in grace_program("describe", "broken", PYTHONPATH=path, code=2)[1]
    text = grace_program("describe", "theirs(part=0.5)", PYTHONPATH=path)[0]
    assert "part = 0.5 (no default)" in text
    assert "depends on the data" in text
    assert "carries adaptive, block, " in grace_program("describe", "allgather", PYTHONPATH=path)[0]
    assert "theirs needs part" in grace_program("describe", "theirs", PYTHONPATH=path, code=2)[1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["describe", "topq"], "did you mean 'topk'?"),
        (["strategy", "check", "s.yaml", "--model", "json:loads"], "'json:loads' makes no model: TypeError"),
        (["strategy", "check", "x" * 5000 + ".yaml"], "cannot be read: File name too long"),
        (["report", "x" * 5000], "File name too long"),
        (["describe", "topk(ratio=" + "(" * 900 + ")" * 900 + ")"], "cannot read the spec 'topk("),
        (["describe", "topk(ratio=" + "1" * 5000 + ")"], "cannot read the spec 'topk("),
        (["describe", "dgc(ratio=" + "1" * 4000 + ")"], "ratio must be a number in (0, 1], not 111"),
        (["describe", "qsgd(bucket_size=" + "1" * 4000 + ")"], "bucket_size must be a whole number in"),
        (["describe", "x" * 100_000], "a spec of 100,000 characters is too long"),
        (["demo", "--ranks", "0"], "--ranks must be between 1 and 1000, not 0"),
        (["demo", "--out", "/dev/null/here"], "cannot write to /dev/null/here"),
        (["strategy", "schema", "-o", "/dev/full"], "/dev/full: No space left on device"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(args, message):
    code, out, err = grace_command(*args)
    assert code == 2
    assert message in err
    assert err.startswith("grace: ")
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.ranks
def test_the_program_exits_with_2_after_a_mistake():
    out, err = grace_program("describe", "topq", code=2)
    assert "did you mean 'topk'?" in err
    assert err.count("\n") == 1
    assert out == ""
