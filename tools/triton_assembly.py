"""Compiled code of the kernels, on a machine without a GPU: ``python -m tools.triton_assembly``.

Every method is called with tensors on the meta device; the launches that it would make are written down, compiled for
a GPU that need not be there, and what came out is read: registers, spills, local and shared memory, vector loads.
"""

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_manager

from grace.kernels.bucket_codec import DeviceHeader, Placed
from grace.kernels.random import Stream
from grace.kernels.triton.bucket_codecs import CODECS
from grace.kernels.triton.launching import Launch, recorded
from grace.kernels.triton.low_rank_codecs import LowRank
from grace.kernels.triton.primitives import TritonKernels

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
"""NVIDIA's A100, H100 and B200, and AMD's MI300."""
TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.uint32: "u32",
    torch.uint8: "u8",
}
N = 1 << 24
"""Elements of the tensors that are pretended."""


@dataclass(frozen=True)
class Compiled:
    """Assembly that a compiler made of one launch, and its figures.

    Attributes:
        kernel, target: whose, for what.
        registers: of 32 bits, a thread.
        spilled: bytes (NVIDIA) or registers (AMD) that did not fit and are written to memory.
        local: bytes of a thread's own memory.
        shared: bytes of a program's.
        widest: bytes of the widest load from memory.
        text: the assembly.
    """

    kernel: str
    target: str
    registers: int
    spilled: int
    local: int
    shared: int
    widest: int
    text: str

    @property
    def inexact(self) -> str:
        """An instruction that gives other bits than the reference, if there is one: a product and a sum in one, an
        approximate division or root, or one that takes the smallest numbers for zeros."""
        if "gfx" not in self.target:
            found = re.search(r"\bfma\.rn\S*|\b(div|sqrt|rcp)\.(full|approx)\S*|\S+\.ftz\S*", self.text)
        elif "v_div_fixup_f32" in self.text:  # an exact division has products and sums in one
            found = re.search(r"float_denorm_mode_32 [012]\b", self.text)
        else:
            found = re.search(r"\bv_(pk_)?(fma|fmac|mac|mad)_f32\S*|float_denorm_mode_32 [012]\b", self.text)
        return found[0] if found else ""


def calls() -> dict[str, Callable[[TritonKernels], Any]]:
    """Each method, called as compressors call it."""
    x, codes, stream = _meta(N), _meta(N // 8, torch.uint8), Stream(1)
    in_memory = Stream(1, _meta(1, torch.int64))  # type: ignore[arg-type]  # of CUDA graphs
    return {
        "random_bits": lambda k: k.random_bits(stream, N, x),
        "random_bits of a step in memory": lambda k: k.random_bits(in_memory, N, x),
        "random_indices": lambda k: k.random_indices(stream, N, N // 128, x),
        "random_indices of a step in memory": lambda k: k.random_indices(in_memory, N, N // 128, x),
        "topk": lambda k: k.topk(x, N // 128),
        "scatter_add": lambda k: k.scatter_add(x, _meta(N // 128, torch.int32), _meta(N // 128), 0.5),
        "positions": lambda k: k.positions(codes, N, N // 128),
    }


def _meta(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(n, dtype=dtype, device="meta")


_SCALES = (N // 512, "float32")
_FACTORS = [((1 << 12, 4), "float32")] * 2
BUCKETS: dict[str, tuple[str, list[tuple[Any, str]], dict[str, Any]]] = {
    "none": ("numbers", [(N, "float32")], {}),
    "fp16": ("numbers", [(N, "float16")], {}),
    "bf16": ("numbers", [(N, "bfloat16")], {}),
    "natural": ("powers", [(N, "uint8")], {}),
    "signsgd": ("signs", [(N // 8, "uint8")], {"form": "voted"}),
    "signum": ("signs", [(N // 8, "uint8")], {"form": "moment"}),
    "efsignsgd": ("signs", [(N // 8, "uint8"), (1, "float32")], {"form": "scaled"}),
    "onebit": ("signs", [(N // 8, "uint8"), (2, "float32")], {"form": "sided"}),
    "randomk": ("drawn", [(N // 128, "float32")], {"scaled": False}),
    "topk": ("largest", [(N // 128, "float32"), (N // 128, "int32")], {}),
    "topk with bitmaps": ("largest", [(N // 8, "float32"), (N // 8, "uint8")], {}),
    "threshold": (
        "largest above",
        [(N // 128, "float32"), (N // 128, "int32"), (1, "int32")],
        {"least": lambda: 1.0},
    ),
    "topk of chunks": ("largest of chunks", [(N // 128, "float32"), (N // 128, "int16")], {"chunk": 1024, "kept": 8}),
    "topk of large chunks": ("largest of chunks", [(N, "float32"), (N // 8, "uint8")], {"chunk": 4096, "kept": 4096}),
    "qsgd": ("levels", [(N, "uint8"), _SCALES], {"levels": 127, "bucket_size": 512}),
    "qsgd of 5 bits": ("levels", [(N * 5 // 8, "uint8"), _SCALES], {"levels": 15, "bits": 5, "bucket_size": 512}),
    "qsgd of odd buckets": (
        "levels",
        [(N // 2, "uint8"), (N // 37, "float32")],
        {"levels": 7, "bits": 4, "bucket_size": 37},
    ),
    "qsgd of large buckets": ("levels", [(N, "uint8"), (N // 9000, "float32")], {"levels": 127, "bucket_size": 9000}),
    "block": ("levels", [(N // 2, "uint8"), _SCALES], {"levels": 7, "bits": 4, "bucket_size": 512, "nearest": True}),
    "block of 3 bits": (
        "levels",
        [(N * 3 // 8, "uint8"), (N // 128, "float32")],
        {"levels": 3, "bits": 3, "bucket_size": 128, "nearest": True},
    ),
    "block of 2 bits": (
        "levels",
        [(N // 4, "uint8"), (N // 128, "float32")],
        {"levels": 1.5, "bits": 2, "bucket_size": 128, "norm": "rms", "nearest": True},
    ),
    "float8": ("coded", [(N, "uint8"), _SCALES], {"float8": True, "bucket_size": 512, "nearest": True}),
    "rotated": ("coded", [(N // 2, "uint8"), _SCALES], {"levels": 7, "bits": 4, "rotated": True, "bucket_size": 512}),
    "terngrad": ("ternary", [(N // 4, "uint8"), (1, "float32")], {"clip": 2.5}),
    "powersgd": ("low rank", _FACTORS, {}),
    "powersgd of rank 1": ("low rank", [((N, 1), "float32"), ((1, 1), "float32")], {}),
    "powersgd of rank 8": ("low rank", [((1 << 12, 8), "float32")] * 2, {}),
    "dynamic8": ("table", [(N, "uint8"), (1, "float32")], {"edges": _meta(255), "entries": _meta(256)}),
}
"""Codecs of whole buckets: of which name, of which payload, with which options."""


def bucket_launches(name: str) -> list[Launch]:
    """Return the launches of a codec that encodes with a residual, decodes two ranks' payloads, and finishes
    residuals."""
    codec, payload, options = BUCKETS[name]
    found = [Placed(0, size if isinstance(size, tuple) else (size,), dtype) for size, dtype in payload]
    made = CODECS[codec]([N, N], [found, found], **options, device=torch.device("meta"))
    rows = np.full((2, 5 if made.unfinished else 3), 16, np.uint64)
    factors, streams = np.ones((2, 2), np.float32), np.zeros((2, 4), np.uint32)
    header = DeviceHeader([16], found[0].dtype, [1.0, 1.0], 2.0, [])
    sums = _meta(N)
    with recorded() as launches:
        if isinstance(made, LowRank):
            made.start_from(rows[:, 0], rows[:, 0])
        made.encode(rows, factors, 0, 0x7F7FFFFF, streams, header)
        if isinstance(made, LowRank):
            made.receive(sums, 2, last=False)
            made.follow(sums, header)
            made.receive(sums, 2, last=True)
        made.decode(rows[:, 0], [0, 0], 2, 1.0)
        if made.unfinished:
            made.finish(rows, _meta(4))
    return launches


def launches() -> dict[str, list[Launch]]:
    """Return the launches of each call, by its name."""
    found, kernels = {}, TritonKernels()
    for name, call in calls().items():
        with recorded() as found[name]:
            call(kernels)
    return found | {f"buckets of {name}": bucket_launches(name) for name in BUCKETS}


SAID = "ptxas.log"
"""File of Triton's cache with what NVIDIA's assembler has said of a kernel."""


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Let :func:`compiled`, in this context, hear what NVIDIA's assembler says of what it makes."""
    with triton.knobs.nvidia.scope():
        triton.knobs.nvidia.dump_ptxas_log = True
        yield


def source(launch: Launch) -> ASTSource:
    """A launch's kernel, with what Triton knows of its arguments when it is launched."""
    names, signature, constants, known = launch.kernel.arg_names, {}, {}, {}
    for place, (name, arg) in enumerate(zip(names, launch.args, strict=False)):
        chosen = launch.kernel.params[place].do_not_specialize
        if isinstance(arg, torch.Tensor):
            signature[name], known[place,] = f"*{TYPES[arg.dtype]}", [["tt.divisibility", 16]]
        elif arg is None or (arg == 1 and isinstance(arg, int) and not chosen):
            signature[name], constants[name] = "constexpr", arg
        elif isinstance(arg, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if arg % 16 == 0 and not chosen:
                known[place,] = [["tt.divisibility", 16]]
    for name in names[len(launch.args) :]:
        signature[name], constants[name] = "constexpr", launch.constants[name]
    return ASTSource(launch.kernel, signature, constants, known)


def options(launch: Launch) -> dict[str, Any]:
    """The compiler's options among a launch's constants."""
    return {name: value for name, value in launch.constants.items() if name not in launch.kernel.arg_names}


def parsed(launch: Launch, target: str) -> Any:
    """A launch's kernel in Triton's own language, the first stage of compiling: a mistake in Python is raised there."""
    backend, context = make_backend(TARGETS[target]), ir.context()
    chosen = backend.parse_options(options(launch))
    ir.load_dialects(context)
    backend.load_dialects(context)
    given = backend.get_codegen_implementation(chosen), backend.get_module_map(), context
    return source(launch).make_ir(TARGETS[target], chosen, *given)


def compiled(launch: Launch, target: str) -> Compiled:
    """Return a launch's kernel as it is compiled for a target; what was compiled before is in Triton's cache."""
    made, said = _compiled(launch, target)
    if "ptx" not in made.asm:
        return Compiled(launch.kernel.__name__, target, shared=made.metadata.shared, **_amd(made.asm))
    # the assembler speaks when it runs: what it said is kept beside what it made
    beside = get_cache_manager(made.hash)
    if not said and not beside.has_file(SAID):
        with triton.knobs.compilation.scope():
            triton.knobs.compilation.always_compile = True
            made, said = _compiled(launch, target)
    if said:
        beside.put(said, SAID)
    found = _nvidia(made.asm, Path(beside.get_file(SAID)).read_text())
    return Compiled(launch.kernel.__name__, target, shared=made.metadata.shared, **found)


def _compiled(launch: Launch, target: str) -> tuple[Any, str]:
    """Return what Triton has made of a launch, or makes of it now, and what was printed meanwhile."""
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        made = triton.compile(source(launch), target=TARGETS[target], options=options(launch))
    return made, log.getvalue()


def _nvidia(asm: Any, log: str) -> dict[str, Any]:
    def number(pattern: str) -> int:
        return sum(map(int, re.findall(pattern, log)))

    loads = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.[bfus](\d+)\b", asm["ptx"])
    return {
        "registers": number(r"Used (\d+) registers"),
        "spilled": number(r"(\d+) bytes spill stores"),
        "local": number(r"(\d+) bytes stack frame"),
        "widest": max((int(vector or 1) * int(bits) // 8 for vector, bits in loads), default=0),
        "text": asm["ptx"],
    }


def _amd(asm: Any) -> dict[str, Any]:
    text = asm["amdgcn"]

    def number(name: str) -> int:
        return sum(map(int, re.findall(rf"\.{name}: +(\d+)", text)))

    loads = re.findall(r"(?:global|buffer)_load_(ubyte|ushort|dword)(?:x(\d))?", text)
    widths = {"ubyte": 1, "ushort": 2, "dword": 4}
    return {
        "registers": number("vgpr_count"),
        "spilled": number("vgpr_spill_count") + number("sgpr_spill_count"),
        "local": number("private_segment_fixed_size"),
        "widest": max((widths[kind] * int(many or 1) for kind, many in loads), default=0),
        "text": text,
    }


def main() -> None:
    """Print the table of BENCHMARKS.md; what was compiled to the same stands there once."""
    print(f"| kernel | {' | '.join(TARGETS)} |\n| --- | {' | '.join('---' for _ in TARGETS)} |")
    known = set[tuple[str, ...]]()
    with compiling():
        for name, made in launches().items():
            for launch in made:
                row = [compiled(launch, target) for target in TARGETS]
                cells = [f"{one.registers}, {one.spilled + one.local}, {one.shared:,}, {one.widest}" for one in row]
                if (row[0].kernel, *cells) not in known:
                    print(f"| `{row[0].kernel}` of {name} | {' | '.join(cells)} |", flush=True)
                known.add((row[0].kernel, *cells))


if __name__ == "__main__":
    main()
