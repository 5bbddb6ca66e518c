"""Compiled code of Triton's kernels, for GPUs that need not be here; each check has a kernel that fails it."""

import dataclasses
import importlib
import re

import pytest
import torch

from tests.support.drawing import THOROUGH
from tests.support.implementations import INTERPRETED

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")

REGISTERS = 128
"""A thread's, at most: with more, an SM's 65536 hold fewer than 512 threads."""
SHARED = 48 << 10
"""Bytes of a program: what every GPU gives without being asked."""
NARROW = {
    **dict.fromkeys(("write_random", "write_walked"), 0),  # read nothing
    **dict.fromkeys(("write_header", "write_sign_scales", "write_scales"), 4),  # a bucket's statuses and sums
    **dict.fromkeys(("decode_powers", "decode_levels", "decode_signs"), 4),  # codes
    ("decode_levels", "buckets of qsgd of 5 bits", "gfx942"): 1,  # of bits that lie in two bytes
    ("decode_levels", "buckets of block", "gfx942"): 2,  # 4 codes of each of 256 threads
    ("encode_rows", "buckets of qsgd of odd buckets"): 4,
    **dict.fromkeys(("encode_drawn", "decode_drawn", "zero_bucket"), 0),  # single elements, a bucket's table
    **dict.fromkeys(("count_marks", "decode_entries", "count_bits"), 1),  # positions, wherever they begin
    **dict.fromkeys(("judge_factors", "start_factors", "take_factors", "add_rows", "add_columns"), 4),  # of any rank
    "orthogonalize_bucket": 4,
    ("decode_numbers", "buckets of fp16", "gfx942"): 8,
    ("decode_numbers", "buckets of bf16", "gfx942"): 8,
    **dict.fromkeys(("guess_largest", "guess_of_bucket"), 4),  # of single elements
    "write_positions": 4,  # of counts
    ("list_of_bucket", "buckets of topk", "gfx942"): 8,  # 2 elements of each of 512 threads
    ("list_of_bucket", "buckets of topk with bitmaps", "gfx942"): 8,
    ("list_of_bucket", "buckets of threshold", "gfx942"): 8,
    ("count_digit", "topk", "gfx942"): 8,
    ("digit_of_bucket", "buckets of topk", "gfx942"): 8,
    ("digit_of_bucket", "buckets of topk with bitmaps", "gfx942"): 8,
    ("digit_of_bucket", "buckets of threshold", "gfx942"): 8,
}
"""Bytes of the widest load of those kernels that have none of 16."""
MODULES = (
    "arithmetic packing random rounding selection bucket_tables buckets bucket_levels sparsified_buckets "
    "low_rank_buckets"
)


def named(table, kernel, method, target, otherwise):
    found = (table[key] for key in ((kernel, method, target), (kernel, method), kernel) if key in table)
    return next(found, otherwise)


def faults(one, method=""):
    """Return the faults of a compiled kernel."""
    found = []
    if one.registers > REGISTERS:
        found.append(f"{one.registers} registers, more than {REGISTERS}")
    if one.spilled:
        found.append(f"{one.spilled} spilled")
    if one.local:
        found.append(f"{one.local} bytes of local memory")
    if one.shared > SHARED:
        found.append(f"{one.shared} bytes of shared memory")
    if one.widest < (least := named(NARROW, one.kernel, method, one.target, 16)):
        found.append(f"no load of {least} bytes")
    if one.inexact:
        found.append(f"not the reference's bits: {one.inexact}")
    return found


@pytest.fixture(scope="module")
def compiled():
    from tools import triton_assembly

    with triton_assembly.compiling():
        yield triton_assembly


def launched_for(compiled, target):
    """Every launch, with its method. `make test` compiles the first of each kernel for NVIDIA's GPU, and for either
    those with limits of their own."""
    made, seen = [], set()
    for method, launches in compiled.launches().items():
        for launch in launches:
            name = launch.kernel.__name__
            own = (name, method, target) in NARROW or ((name, method) in NARROW and target != "gfx942")
            first = name not in seen and target != "gfx942"
            seen.add(name)
            if THOROUGH or own or first:
                made.append((method, launch))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "gfx942", *(["sm_80", "sm_100"] if THOROUGH else [])])
def test_kernels_fit_into_registers_read_16_bytes_and_round_as_the_reference(compiled, target):
    bad = {}
    for method, launch in launched_for(compiled, target):
        one = compiled.compiled(launch, target)
        assert one.registers > 0
        if found := faults(one, method):
            bad[method, one.kernel, target] = found
    assert not bad


def pretended(kernel, *args, **constants):
    from grace.kernels.triton.launching import launch, recorded

    x = torch.empty(1 << 16, device="meta")
    with recorded() as made:
        launch(kernel, 1, x, x, 1 << 16, *args, **constants)
    return made[0]


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_badly_written_kernels_are_found(compiled, target):
    from tests.support import triton_kernels as bad

    assert faults(compiled.compiled(pretended(bad.strided, N=1024), target)) == ["no load of 16 bytes"]
    fine = pretended(bad.contracted, 0.3, N=1024)
    assert not faults(compiled.compiled(fine, target))
    joined = dataclasses.replace(fine, constants={**fine.constants, "enable_fp_fusion": True})
    assert "fma" in faults(compiled.compiled(joined, target))[0]
    if target == "sm_90":
        (said,) = faults(compiled.compiled(pretended(bad.inexact, 0.3, N=1024), target))
        assert "not the reference's bits: div." in said
    greedy = faults(compiled.compiled(pretended(bad.greedy, N=1 << 15 if target == "sm_90" else 1 << 17), target))
    assert [" ".join(said.split()[1:]) for said in greedy] == [
        "registers, more than 128",
        "spilled",
        "bytes of local memory",
    ]
    (said,) = faults(compiled.compiled(pretended(bad.sharing, N=128), target))
    assert "bytes of shared memory" in said


@pytest.mark.slow
def test_every_number_may_be_one(compiled):
    """Arguments of 1 are constants to Triton, which have no methods: buckets of one element, the one largest."""
    bad, seen = {}, set()
    for launch in (launch for launches in compiled.launches().values() for launch in launches):
        for place, (name, arg) in enumerate(zip(launch.kernel.arg_names, launch.args, strict=False)):
            this = launch.kernel, name, repr(launch.constants) if THOROUGH else ""
            constant = isinstance(arg, int) and not launch.kernel.params[place].do_not_specialize
            if constant and arg != 1 and this not in seen:
                seen.add(this)
                args = (*launch.args[:place], 1, *launch.args[place + 1 :])
                try:
                    compiled.parsed(dataclasses.replace(launch, args=args), "sm_90")
                except triton.compiler.errors.CompilationError as error:
                    bad[launch.kernel.__name__, name] = error
    assert len(seen) > 15
    assert not bad


def test_every_kernel_of_the_folder_is_compiled(compiled):
    """Whatever no other function calls."""
    made = {launch.kernel.__name__ for launches in compiled.launches().values() for launch in launches}
    functions = {}
    for name in MODULES.split():
        module = importlib.import_module(f"grace.kernels.triton.{name}")
        functions |= {k: v.src for k, v in vars(module).items() if isinstance(v, triton.runtime.JITFunction)}
    inside = {name for name in functions for src in functions.values() if re.search(rf"(?<!def )\b{name}\(", src)}
    assert set(functions) == inside | made
