"""What a node's shell does before the program: the user's lines, an environment, and variables that it expands."""

import os
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grace.launch.cluster import SSH

REFERENCE = re.compile(r"\$(?:\$|(\w+)|\{(\w+)\})", re.ASCII)
"""What a value of ``shared_envs`` may refer to: $NAME and ${NAME}, and $$ for a dollar."""


EXPORTS = "GRACE_SHARED_ENVS"
"""The variable by which a node's bash gets those of ``shared_envs`` to put in what they refer to; ranks have none."""


def lines(ssh: "SSH | None") -> list[str]:
    """What bash runs first: ``setup``, and ``python_venv`` where it is a command, as AutoDist has it.

    >>> from grace.launch.cluster import SSH
    >>> lines(SSH(setup=["module load cuda"], python_venv="source ~/venv/bin/activate"))
    ['module load cuda', 'source ~/venv/bin/activate']
    """
    if ssh is None:
        return []
    return [*ssh.setup, *([ssh.python_venv] if ssh.python_venv and is_command(ssh.python_venv) else [])]


def is_command(environment: str) -> bool:
    """Whether a ``python_venv`` is a command rather than a folder.

    >>> [is_command(text) for text in ("~/my venv", "venv", "source ~/venv/bin/activate", "/a.sh; conda activate b")]
    [False, False, True, True]
    """
    path = re.match(r"[/~]|\.\.?/", environment)
    return bool(re.search(r";|&&", environment)) or (not path and " " in environment)


def prepared(
    said: Sequence[str], program: Sequence[str], shared: bool = False, but: str = "", file: str = ""
) -> list[str]:
    """The command line that runs lines and sets variables in bash, and becomes the program; the program's own if there
    are none. A line that fails ends it, and is named. The variables' values do not stand in it.

    Args:
        said: the lines.
        program: what comes then.
        shared: whether there are variables, which :func:`exports` writes.
        but: the name of the machine that leaves the lines out.
        file: where they are, and are removed; by default :data:`EXPORTS` has them.

    >>> print(prepared(["module load cuda"], ["python", "a.py"])[2])
    { module load cuda
    } || { echo "grace launch: on $(uname -n) this failed:" 'module load cuda' >&2; exit 1; }
    exec "$@"
    """
    if not said and not shared:
        return list(program)
    failed = 'echo "grace launch: on $(uname -n) this failed:"'
    script = [f"{{ {line}\n}} || {{ {failed} {shlex.quote(line)} >&2; exit 1; }}" for line in said]
    if script and but:
        script = [f'if [ "$(uname -n)" != {shlex.quote(but)} ]; then', *script, "fi"]
    if shared:  # the file is gone before the lines, which may fail
        script = [*([f"{EXPORTS}=$(cat {file}) || exit 1; rm -f {file}"] if file else []), *script]
        script.append(f'eval "${EXPORTS}"; unset {EXPORTS}')
    return ["bash", "-c", "\n".join([*script, 'exec "$@"']), "grace-launch", *program]


def exports(variables: Mapping[str, str]) -> str:
    """What a shell evaluates to set variables.

    >>> print(exports({"LIBS": "$LIBS:/more", "TOKEN": "a b"}))
    export LIBS="${LIBS}":/more TOKEN='a b'
    """
    return " ".join(["export", *(f"{name}={word(value)}" for name, value in variables.items())])


def keeping(file: str, text: str) -> str:
    """The line for a node's shell that puts text from stdin into a file, says so, and removes it when stdin ends."""
    length = len(os.fsencode(text))  # stdin stays open when all has come
    keep = f"head -c {length} > {file} && echo ready && cat > /dev/null; code=$?; rm -f {file}; exit $code"
    return shlex.join(["sh", "-c", f"trap : HUP PIPE; umask 077; {keep}"])


def unprepared(said: str) -> str:
    """Which line failed before the program, and where; empty if launchers tell of none.

    >>> unprepared("[1,0]<stderr>:grace launch: on b this failed: module load cuda")
    'on b this failed before the program began: module load cuda'
    """
    found = re.search(r"grace launch: on (\S+) this failed: ([^\r\n]+)", said)
    return f"on {found[1]} this failed before the program began: {found[2]}" if found else ""


def word(value: str) -> str:
    """A value as a word for a shell, which puts in what it refers to and leaves all else as it is.

    >>> print(word("$HOME/my lib:$$1"), word("x y"), word("`id`"))
    "${HOME}"'/my lib:$1' 'x y' '`id`'
    """
    pieces, end = [], 0
    literal = ""
    for found in REFERENCE.finditer(value):
        literal += value[end : found.start()]
        end, name = found.end(), found[1] or found[2]
        if name is None:
            literal += "$"
            continue
        pieces += [shlex.quote(literal)] if literal else []
        pieces.append(f'"${{{name}}}"')
        literal = ""
    literal += value[end:]
    return "".join([*pieces, *([shlex.quote(literal)] if literal or not pieces else [])])


def here(value: str) -> str:
    """A value as this machine's environment makes it; what is not set is empty.

    >>> here("a$$b${NOT_SET_ANYWHERE}c")
    'a$bc'
    """
    return REFERENCE.sub(lambda found: os.environ.get(found[1] or found[2], "") if found[1] or found[2] else "$", value)


def refers(value: str) -> bool:
    """Whether a value has something to put in.

    >>> refers("$LD_LIBRARY_PATH:/usr/local/cuda/lib64"), refers("5$")
    (True, False)
    """
    return REFERENCE.search(value) is not None


def this_machine() -> str:
    """The name by which :func:`prepared` knows the machine that the launcher runs on."""
    return platform.node()
