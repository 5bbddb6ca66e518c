"""The pages of docs/ are true: their code runs, their commands have these options, their links lead somewhere."""

import importlib
import os
import pkgutil
import re
import shlex
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import typer

import grace
from grace.cli import main as cli
from grace.exchange.bucket import Traffic
from grace.session.metrics import metrics
from tests.support.command import grace_command
from tests.support.drawing import THOROUGH
from tests.support.engine_pools import Launched
from tests.support.frameworks import torchrun
from tests.support.pool import Ranks
from tests.support.pools import launched, ranks_of

ROOT = Path(__file__).parent.parent


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.S | re.M)


def imports(page: Path, module: str) -> bool:
    """Return True if a page's program imports a module."""
    return any(f"import {module}" in block for block in blocks(page, "python"))


BUILT = [ROOT / "docs" / name for name in ("methods.md", "strategy-files.md", "benchmarks.html")]
"""Pages that `make docs` writes; they are not kept."""
WRITTEN = sorted(set((ROOT / "docs").glob("*.md")) - set(BUILT))
PAGES = [page for page in WRITTEN if "```python" in page.read_text()]
KERAS = [page for page in PAGES if imports(page, "keras")]
FRAMEWORKS = [page for page in PAGES if "grace.integrations." in page.read_text() and page not in KERAS]
EXCERPTS = [ROOT / "docs" / "clusters.md"]
"""Lines of examples that are run, see tests/integrations/test_ray.py."""
TORCH = [page for page in PAGES if page not in KERAS + FRAMEWORKS + EXCERPTS]
THERE = all(map(find_spec, ("transformers", "lightning", "accelerate")))
LOGGERS = ("wandb", "mlflow")
"""Services that pages log to, of which the tests have stand-ins."""
LONGEST = 250
NAMED = {"ids": lambda page: page.stem}


def write_files(page: Path, folder: Path) -> None:
    """Write the files that a page tells to save: blocks that begin with a file's name."""
    for language in ("python", "yaml"):
        for block in blocks(page, language):
            if name := re.match(r"# (\w+\.(?:py|yaml))\n", block):
                (folder / name[1]).write_text(block)


def run_page(page: Path, folder: Path, last: bool = True, programs: list[str] | None = None) -> dict[str, Any]:
    """All code of a page, in order, as one program; on every rank, as torchrun starts it.

    Args:
        page: its file.
        folder: where it runs.
        last: whether the run ends with it.
        programs: what to run instead of all Python blocks.

    Returns:
        the names that the program has made.
    """
    write_files(page, folder) if grace.rank() == 0 else None
    before = Path.cwd()
    os.chdir(folder)
    module = sys.modules["a_page"] = types.ModuleType("a_page")  # where dataclasses look for names
    sys.modules["tensorboard.compat.notf"] = module  # to TensorBoard: do without TensorFlow, which takes seconds
    loggers = [name for name in LOGGERS if f"import {name}\n" in page.read_text()]  # others look whether they are there
    sys.modules.update(dict.fromkeys(loggers, MagicMock()))
    try:
        with torchrun():
            for block in blocks(page, "python") if programs is None else programs:
                exec(compile(block, str(page), "exec"), vars(module))
    finally:
        os.chdir(before)
        for name in ("a_page", "tensorboard.compat.notf", *loggers):
            del sys.modules[name]
        if last:
            grace.shutdown()
    return vars(module)


@pytest.fixture
def alone(monkeypatch):
    """One process, whatever other tests have left; what a page registers or opens is taken back."""
    monkeypatch.setenv("GRACE_BACKEND", "local")
    registered = {kind: dict(classes) for kind, classes in registry()._registered.items()}
    yield
    for kind, classes in registered.items():
        registry()._registered[kind] = classes
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def registry():
    return sys.modules[grace.register.__module__]


@pytest.mark.slow
@pytest.mark.parametrize("page", TORCH + (KERAS if THOROUGH else []), **NAMED)  # those run on two ranks, too
def test_a_pages_code_runs(page, alone, tmp_path, monkeypatch):
    if page in KERAS:
        pytest.importorskip("tensorflow", exc_type=ImportError)
    monkeypatch.syspath_prepend(tmp_path)
    run_page(page, tmp_path)


@pytest.mark.parametrize("page", TORCH + FRAMEWORKS, **NAMED)
def test_a_pages_code_runs_on_two_ranks(page, two_ranks, tmp_path):
    if page in FRAMEWORKS and not THERE:
        pytest.skip("its frameworks are not installed")
    two_ranks.run(ran, page, tmp_path)


def ran(page: Path, folder: Path, last: bool = True) -> None:
    """A page's code did."""
    run_page(page, folder, last)


def before_and_after(diff: str) -> tuple[str, str]:
    """The two programs of which a block is the difference."""
    lines = diff.splitlines()
    return tuple("\n".join(line[1:] for line in lines if line[:1] != other) for other in "+-")


def weights_after(page: Path, folder: Path, program: str, last: bool) -> list[list[float]]:
    """Run a program, and return the weights that a rank has trained."""
    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.is_initialized():  # a program would begin with what the pool has done
            patch.setattr(torch.distributed, "init_process_group", lambda backend: None)
        model = run_page(page, folder, last, [program])["model"]
    return [np.ravel(getattr(value, "detach", lambda value=value: value)()).tolist() for value in weights_of(model)]


def weights_of(model: Any) -> list[Any]:
    return list(model.parameters() if hasattr(model, "parameters") else model.trainable_variables)


WHOLE = [ROOT / "docs" / f"from-{name}.md" for name in ("autodist", "ddp-hooks", "grace", "horovod")]
"""Pages whose differences are complete programs."""
DIFFERENCES = [(page, number) for page in WHOLE for number, _ in enumerate(blocks(page, "diff"))]


def ranks_for(program: str) -> Ranks | Launched:
    """Two ranks of an engine that the program runs on."""
    if "import tensorflow" in program:
        return launched("horovodrun-gloo", 2, "tensorflow")
    return launched("horovodrun-gloo", 2) if "import horovod" in program else ranks_of(2)


def test_every_page_that_readers_come_to_begins_with_a_whole_program():
    pages = sorted((ROOT / "docs").glob("from-*.md"))
    assert pages == WHOLE
    assert [page.name for page in pages if "| --- |" in page.read_text().split("```diff")[0]] == []


@pytest.mark.ranks
@pytest.mark.parametrize(("page", "number"), DIFFERENCES, ids=[f"{page.stem}-{number}" for page, number in DIFFERENCES])
def test_what_a_page_makes_of_a_program_trains_two_ranks_alike(page, number, tmp_path):
    before, after = before_and_after(blocks(page, "diff")[number])
    compile(before, str(page), "exec")
    ranks = ranks_for(after)
    last = "import torch" in after and "import horovod" not in after
    first, second = ranks.run(weights_after, page, tmp_path, after, last)
    assert first == second
    assert all(any(values) for values in first)  # biases, too, which begin with zeros in Keras


DDP_HOOKS = ROOT / "docs" / "from-ddp-hooks.md"


@pytest.mark.ranks
def test_the_program_with_torchs_hook_trains_two_ranks_alike(tmp_path):
    before, _ = before_and_after(blocks(DDP_HOOKS, "diff")[0])
    first, second = ranks_of(2).run(weights_after, DDP_HOOKS, tmp_path, before, True)
    assert first == second


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("page", KERAS, **NAMED)
def test_a_keras_pages_code_runs_on_two_ranks(page, tmp_path):
    launched("horovodrun-gloo", 2, "tensorflow").run(ran, page, tmp_path, False)


def commands(page: Path) -> list[list[str]]:
    """The page's shell lines that run grace, without what is set before it and remarks behind it."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    lines += re.findall(r"^    (\w.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M), re.M)
    found = [shlex.split(line, comments=True) for line in lines]
    return [words[words.index("grace") + 1 :] for words in found if "grace" in words]


WITH_COMMANDS = [page for page in [*WRITTEN, ROOT / "README.md"] if commands(page)]


@pytest.mark.parametrize("page", WITH_COMMANDS, **NAMED)
def test_a_pages_commands_have_the_options_that_they_use(page):
    for words in commands(page):
        command, rest = typer.main.get_command(cli.app), list(words)
        while hasattr(command, "commands"):
            assert rest, f"grace {words} lacks a command"
            if rest[0] in ("--version", "--help"):
                break
            assert rest[0] in command.commands, f"there is no grace {' '.join(words)}"
            command = command.commands[rest.pop(0)]
        own = rest[: rest.index("--")] if "--" in rest else rest
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        for word in own:
            assert not word.startswith("-") or word in known, f"{word} of grace {' '.join(words)}"


def leaves(group, path=""):
    """All commands, by what is typed."""
    for name, command in group.commands.items():
        yield from leaves(command, f"{path}{name} ") if hasattr(command, "commands") else [(f"{path}{name}", command)]


def test_the_page_of_commands_has_all_of_them_and_no_other():
    known, groups = dict(leaves(typer.main.get_command(cli.app))), {"strategy", "pipeline"}
    shown = set()
    for row in re.findall(r"^\| (`grace .*?) \|", (ROOT / "docs" / "commands.md").read_text(), re.M):
        first, *others = re.findall("`(.*?)`", row)
        group = first.rpartition(" ")[0]  # "grace bench" of `grace bench step`, and of the `train` beside it
        shown |= {word if word.startswith("grace ") else f"{group} {word}" for word in (first, *others)}
    found = {f"grace {path.split()[0] if path.split()[0] in groups else path}" for path in known}
    assert shown == found


def test_what_a_command_writes_is_named_out_everywhere():
    for path, command in leaves(typer.main.get_command(cli.app)):
        for parameter in command.params:
            assert "--out" in parameter.opts or not {"-o", "--output"} & {*parameter.opts}, path


QUICK = ("list", "describe", "--version", "plan", "strategy")


@pytest.mark.parametrize("page", WITH_COMMANDS, **NAMED)
def test_a_pages_quick_commands_run(page, tmp_path, monkeypatch):
    pytest.importorskip("pydantic")
    write_files(page, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for words in commands(page):
        if words[0] in QUICK or "--dry-run" in words:
            code, out, err = grace_command(*words, folder=tmp_path)
            assert (code, err) == (0, ""), f"grace {' '.join(words)}: {out}{err}"


def test_make_targets_in_pages_are_there():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    for page in [*WRITTEN, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        lines = "\n".join(["", *blocks(page, "sh")])
        named = re.findall(r"^make ([\w-]+)", lines, re.M) + re.findall(
            r"(?:^    |`)make ([\w-]+)", page.read_text(), re.M
        )
        assert [target for target in named if target not in targets] == [], page.name


# -- links and lengths --------------------------------------------------------------------------------------------


def anchor(title: str) -> str:
    """Return the name that a heading has in links, on code hosts and in the site."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    return {anchor(title) for title in re.findall(r"^#+ (.*)$", text, re.M)}


DOCUMENTS = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")} - set(BUILT))


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_repository_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        path, _, place = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists() or there in BUILT, f"{page.name} links to {target}"
        if place and there.suffix == ".md" and there not in BUILT:
            assert place in anchors(there), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", WRITTEN, **NAMED)
def test_pages_are_short(page):
    assert len(page.read_text().splitlines()) <= LONGEST


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 140


# -- what must not go stale ---------------------------------------------------------------------------------------


def source() -> str:
    """All text in grace's source, joined as Python joins it."""
    text = "\n".join(file.read_text() for file in sorted((ROOT / "grace").glob("**/*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_messages_that_troubleshooting_quotes_are_raised_somewhere():
    quoted = re.findall(r"^#+ `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    assert len(quoted) > 20
    text = source()
    parts = [part.strip() for message in quoted for part in message.split("...")]
    assert [part for part in parts if part not in text] == []


def test_every_metric_is_in_the_table():
    table = (ROOT / "docs" / "logging.md").read_text()
    missing = [name for name in metrics(None, Traffic()) if f"| `{name}` |" not in table]
    assert not missing, "the table of docs/logging.md needs a row for each of these"


def test_methods_by_which_memories_tell_something_are_of_their_contract():
    told = re.findall(r"memory of your own says by `(\w+)\(", (ROOT / "docs" / "logging.md").read_text())
    assert told
    assert [name for name in told if not hasattr(grace.Memory, name)] == []


def test_every_method_is_in_the_table():
    table = (ROOT / "docs" / "choosing.md").read_text()
    ours = {name for name, cls in grace.known("compressor").items() if cls.__module__.startswith("grace.compressors")}
    missing = {name for name in ours - {"cast"} if f"`{name}" not in table}
    assert not missing, "the table of docs/choosing.md needs a row for each of these"


def test_every_variable_of_the_environment_is_in_the_table():
    table = (ROOT / "docs" / "engines.md").read_text().partition("## Environment variables")[2]
    # The first is of `grace launch`, between a node's shell and its ranks; the second, of a rank and its children.
    internal = {"GRACE_SHARED_ENVS", "GRACE_RANK_PROCESS"}
    assert {name for name in re.findall(r'"(GRACE_[A-Z_]+)"', source()) if f"`{name}" not in table} == internal


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "api").glob("*.md")), **NAMED)
def test_what_the_reference_names_is_there(page):
    if page.stem == "tensorflow":
        pytest.importorskip("tensorflow", exc_type=ImportError)
    if page.stem == "integrations" and not THERE:
        pytest.skip("its frameworks are not installed")
    module = ""
    for kind, path in re.findall(r"^\.\. (currentmodule|auto\w+):: ([\w.]+)", page.read_text(), re.M):
        if kind == "currentmodule":
            module = f"{path}."
        else:
            path = path if path.startswith("grace.") else module + path
            assert pkgutil.resolve_name(path) is not None


@pytest.mark.parametrize("module", ["grace", "grace.torch", "grace.tensorflow"])
def test_every_public_name_is_in_the_reference(module):
    if module == "grace.tensorflow":
        pytest.importorskip("tensorflow", exc_type=ImportError)
    text = "".join(file.read_text() for file in (ROOT / "docs" / "api").glob("*.md"))
    kinds = re.findall(r"^\.\. parts:: (\w+)", text, re.M)
    listed = {cls.__name__ for kind in kinds for cls in grace.known(kind).values()}
    names = set(importlib.import_module(module).__all__) - {"__version__"} - listed
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", text)] == []
