"""The ``grace`` command: in this process, without what a new interpreter takes, or as the program that users start."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

from grace.cli import main
from tests.support.engine_pools import environment
from tests.support.limits import HANGS

ROOT = Path(__file__).parents[2]
GRACE = str(Path(sys.executable).with_name("grace"))


def grace_command(*args: str, folder: Path | None = None, columns: int = 80) -> tuple[int, str, str]:
    """Run ``grace``, and return its exit code, stdout and stderr; modules of ``folder``, where it runs, are imported
    anew."""
    out, err, before = io.StringIO(), io.StringIO(), Path.cwd()
    code = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        stack.enter_context(mock.patch.object(sys, "argv", ["grace", *args]))
        stack.enter_context(mock.patch.object(sys, "path", list(sys.path)))
        stack.enter_context(mock.patch.dict(os.environ, COLUMNS=str(columns)))
        stack.callback(os.chdir, before)
        if folder is not None:
            os.chdir(folder)
            for module in folder.glob("*.py"):
                sys.modules.pop(module.stem, None)
        try:
            main.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return code, out.getvalue(), err.getvalue()


def grace_program(*args: str, code=0, cwd=None, launcher=(), columns=80, **variables: str) -> tuple[str, str]:
    """Stdout and stderr of the program, which must exit with ``code``; ``variables`` are of its environment."""
    env = {**environment(), "COLUMNS": str(columns), **variables}
    done = subprocess.run([*launcher, GRACE, *args], capture_output=True, text=True, env=env, cwd=cwd, timeout=HANGS)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


def benchmark(name: str, *args: str, folder: Path) -> str:
    """Stdout of a script of ``benchmarks``, which runs in a folder."""
    env = {**environment(), "COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", f"benchmarks.{name}", *args]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder, timeout=HANGS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def installed(folder: Path, package: str, points: str) -> None:
    """Leave in a folder what installing a package with such entry points leaves there."""
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)
