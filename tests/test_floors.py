"""Imports run one way: down the floors of the house, in no circle, and only its rooms stand at the root."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = sorted(ROOT.glob("grace/**/*.py"))
FLOORS = [
    ["errors"],
    ["kernels"],
    ["core"],
    ["compressors", "memories", "outer", "backends", "launch"],
    ["exchange"],
    ["communicators"],
    ["session"],
    ["strategy"],
    ["planner"],
    ["torch", "tensorflow"],
    ["pipeline"],
    ["integrations"],
    [""],  # grace itself
    ["bench"],
    ["cli"],
]
FLOOR = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
IN_BENCH = [
    ["common"],
    ["link", "workloads", "report", "compare"],
    ["lifecycle"],
    ["ranks"],
    ["step", "train", "kernels"],
    ["plan", "pipeline"],
    ["all"],
    ["cli"],
]
BENCH_FLOOR = {room: i for i, rooms in enumerate(IN_BENCH) for room in rooms}
FRAMEWORKS = {"torch", "triton", "tensorflow", "keras", "horovod"}
IN_KERNELS = ("kernels/torch/", "kernels/triton/", "kernels/tensorflow/")
THEIR_ROOMS = ("torch/", "tensorflow/", "pipeline/torch/", "integrations/", "bench/", *IN_KERNELS)
THEIR_FILES = {
    "backends/torch_distributed.py",
    "backends/torch_streams.py",
    "backends/torchrun.py",
    "backends/horovod_torch.py",
    "backends/horovod_tensorflow.py",
}


def module(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module(file): file for file in FILES}


def name(file: Path) -> str:
    return str(file.relative_to(ROOT / "grace"))


def imported(tree: ast.Module) -> list[tuple[int, str, bool]]:
    """Return lines, the names that they import, inside functions too, and whether they stand at the top."""
    found: list[tuple[int, str, bool]] = []
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.lineno, f"{node.module}.{alias.name}", id(node) in top) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, id(node) in top) for alias in node.names]
    return found


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def imports_of(file: Path) -> list[tuple[int, str, bool]]:
    return imported(parsed(file))


@functools.cache
def imports() -> list[tuple[str, int, str]]:
    """Return all imports of Grace's modules: the importer, the line, and the module."""
    found = []
    for here, file in MODULES.items():
        for line, other, _ in imports_of(file):
            if other.split(".")[0] == "grace":
                found.append((here, line, other if other in MODULES else other.rpartition(".")[0]))
    return found


def room(module: str, depth: int) -> str:
    """Return a module's part of that number, or nothing."""
    return [*module.split("."), "", ""][depth]


def test_imports_run_down():
    for here, line, other in imports():
        a, b = room(here, 1), room(other, 1)
        assert a == b or FLOOR[b] < FLOOR[a], f"{MODULES[here]}:{line}: {other}"


def test_imports_run_down_between_benchmarks():
    for here, line, other in imports():
        if room(here, 1) == room(other, 1) == "bench":
            a, b = room(here, 2), room(other, 2)
            assert a == b or BENCH_FLOOR[b] < BENCH_FLOOR[a], f"{MODULES[here]}:{line}: {other}"


def test_there_is_no_circle():
    graph = {
        name: {other for here, _, other in imports() if here == name} & MODULES.keys() - {name} for name in MODULES
    }
    while free := [name for name, others in graph.items() if not others]:
        graph = {name: others - set(free) for name, others in graph.items() if name not in free}
    assert not graph, f"in circles, or importing what is in one: {graph}"


def test_rooms_stand_at_the_root_and_nothing_else():
    found = {path.name for path in (ROOT / "grace").iterdir() if path.name not in ("__pycache__", "py.typed")}
    assert found == {"__init__.py", "errors.py", *(room for room in FLOOR if room not in ("", "errors"))}


def test_frameworks_are_imported_at_the_top_in_their_rooms_only():
    for file in FILES:
        if not name(file).startswith(THEIR_ROOMS) and name(file) not in THEIR_FILES:
            for line, other, top in imports_of(file):
                assert not top or other.split(".")[0] not in FRAMEWORKS, f"{file}:{line}: {other} at the top"


def test_commands_and_benchmarks_alone_know_typer_and_rich():
    for file in FILES:
        if not name(file).startswith(("cli/", "bench/")):
            refused = {"typer"} if name(file) == "exchange/tracing/trace_tables.py" else {"typer", "rich"}
            for line, other, _ in imports_of(file):
                assert other.split(".")[0] not in refused, f"{file}:{line}: {other}"


def test_packages_hold_exports_only():
    for file in FILES:
        if file.name == "__init__.py" and file.parent != ROOT / "grace":
            for node in parsed(file).body:
                exports = isinstance(node, (ast.ImportFrom, ast.Import, ast.Assign, ast.AugAssign, ast.Try))
                lazily = isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
                words = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                assert exports or lazily or words, f"{file}:{node.lineno}"


def test_names_of_typing_are_those_of_the_oldest_python():
    names = ("Self", "Never", "LiteralString", "Required", "NotRequired", "Unpack", "TypeVarTuple", "override")
    later = {f"typing.{name}" for name in names}
    for file in FILES:
        for line, other, _ in imports_of(file):
            assert other not in later, f"{file}:{line}: Python 3.10 has no {other}"


def test_all_warnings_name_a_line_of_the_users():
    for file in FILES:
        assert "warnings.warn(" not in file.read_text(), f"{file}: grace.errors.warn finds that line"


def test_the_floors_notice_what_runs_up_or_in_a_circle():
    tree = ast.parse("def f():\n    from grace.session import setup\n    import grace.errors")
    assert imported(tree) == [(2, "grace.session.setup", False), (3, "grace.errors", False)]
    assert FLOOR["session"] > FLOOR["exchange"] > FLOOR["kernels"] > FLOOR["errors"]
