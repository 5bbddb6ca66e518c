"""Shell code that runs on a node before the program: the user's lines, an environment, and variables to expand."""

import os
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grace.launch.cluster import SSH

REFERENCE = re.compile(r"\$(?:\$|(\w+)|\{(\w+)\})", re.ASCII)
"""References in a value of ``shared_envs``: $NAME and ${NAME}, and $$ for a dollar."""


EXPORTS = "GRACE_SHARED_ENVS"
"""Variable with the export line of ``shared_envs``, which a node's bash evaluates, and removes before ranks start."""


def setup_lines(ssh: "SSH | None") -> list[str]:
    """Return the lines that bash runs first: ``setup``, and ``python_venv`` where it is a command, as in AutoDist.

    >>> from grace.launch.cluster import SSH
    >>> setup_lines(SSH(setup=["module load cuda"], python_venv="source ~/venv/bin/activate"))
    ['module load cuda', 'source ~/venv/bin/activate']
    """
    if ssh is None:
        return []
    return [*ssh.setup, *([ssh.python_venv] if ssh.python_venv and is_command(ssh.python_venv) else [])]


def is_command(environment: str) -> bool:
    """Return True if a ``python_venv`` is a command rather than a folder.

    >>> [is_command(text) for text in ("~/my venv", "venv", "source ~/venv/bin/activate", "/a.sh; conda activate b")]
    [False, False, True, True]
    """
    path = re.match(r"[/~]|\.\.?/", environment)
    return bool(re.search(r";|&&", environment)) or (not path and " " in environment)


def wrap_in_bash(
    setup: Sequence[str], program: Sequence[str], shared: bool = False, except_on: str = "", file: str = ""
) -> list[str]:
    """Return the command line that runs setup lines and sets variables in bash, and becomes the program.

    A line that fails ends it, and is named. The variables' values are not in the command line. Without lines and
    variables it is the program's own command line.

    Args:
        setup: the setup lines.
        program: the command line of the program.
        shared: True if there are variables, which :func:`exports` writes.
        except_on: the name of the machine that leaves the lines out.
        file: the file with the variables, which is removed; by default :data:`EXPORTS` has them.

    >>> print(wrap_in_bash(["module load cuda"], ["python", "a.py"])[2])
    { module load cuda
    } || { echo "grace launch: on $(uname -n) this failed:" 'module load cuda' >&2; exit 1; }
    exec "$@"
    """
    if not setup and not shared:
        return list(program)
    failed = 'echo "grace launch: on $(uname -n) this failed:"'
    script = [f"{{ {line}\n}} || {{ {failed} {shlex.quote(line)} >&2; exit 1; }}" for line in setup]
    if script and except_on:
        script = [f'if [ "$(uname -n)" != {shlex.quote(except_on)} ]; then', *script, "fi"]
    if shared:  # the file is gone before the lines, which may fail
        script = [*([f"{EXPORTS}=$(cat {file}) || exit 1; rm -f {file}"] if file else []), *script]
        script.append(f'eval "${EXPORTS}"; unset {EXPORTS}')
    return ["bash", "-c", "\n".join([*script, 'exec "$@"']), "grace-launch", *program]


def exports(variables: Mapping[str, str]) -> str:
    """Return the line that sets variables in a shell.

    >>> print(exports({"LIBS": "$LIBS:/more", "TOKEN": "a b"}))
    export LIBS="${LIBS}":/more TOKEN='a b'
    """
    return " ".join(["export", *(f"{name}={quote_word(value)}" for name, value in variables.items())])


def receive_exports_line(file: str, text: str) -> str:
    """Return the line for a node's shell that writes text from stdin into a file, prints ``ready``, and removes the
    file when stdin ends."""
    length = len(os.fsencode(text))  # stdin stays open behind the text, so head counts its bytes
    keep = f"head -c {length} > {file} && echo ready && cat > /dev/null; code=$?; rm -f {file}; exit $code"
    return shlex.join(["sh", "-c", f"trap : HUP PIPE; umask 077; {keep}"])


def setup_failure(output: str) -> str:
    """Return the message about a line that failed before the program, and its node; empty if launchers report none.

    >>> setup_failure("[1,0]<stderr>:grace launch: on b this failed: module load cuda")
    'on b this failed before the program began: module load cuda'
    """
    found = re.search(r"grace launch: on (\S+) this failed: ([^\r\n]+)", output)
    return f"on {found[1]} this failed before the program began: {found[2]}" if found else ""


def quote_word(value: str) -> str:
    """Return a value as a word for a shell, which expands its references and nothing else.

    >>> print(quote_word("$HOME/my lib:$$1"), quote_word("x y"), quote_word("`id`"))
    "${HOME}"'/my lib:$1' 'x y' '`id`'
    """
    # A zero byte, which no value has, stands for a dollar, so that every second piece is a reference.
    pieces = re.split(r"(\$\w+|\$\{\w+\})", value.replace("$$", "\0"), flags=re.ASCII)
    for i, piece in enumerate(pieces):
        if i % 2:
            pieces[i] = f'"${{{piece.strip("${}")}}}"'
        elif piece:
            pieces[i] = shlex.quote(piece.replace("\0", "$"))
    return "".join(pieces) or "''"


def expand_locally(value: str) -> str:
    """Return a value with references expanded by this machine's environment; variables that are not set are empty.

    >>> expand_locally("a$$b${NOT_SET_ANYWHERE}c")
    'a$bc'
    """
    return REFERENCE.sub(lambda found: os.environ.get(found[1] or found[2], "") if found[1] or found[2] else "$", value)


def this_machine() -> str:
    """Return the name by which :func:`wrap_in_bash` knows the machine that the launcher runs on."""
    return platform.node()
