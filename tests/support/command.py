"""The ``grace`` command in this process: what it prints and exits with, without what a new interpreter takes."""

import contextlib
import io
import os
import sys
from pathlib import Path
from unittest import mock

from grace.cli import main


def grace_command(*args: str, folder: Path | None = None, columns: int = 80) -> tuple[int, str, str]:
    """Its exit code, stdout and stderr; modules of ``folder``, where it runs, are imported anew."""
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
