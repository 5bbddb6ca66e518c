"""Command lines by which an engine's own launcher starts a program on all ranks of a cluster."""

import dataclasses
import os
import re
import secrets
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grace.core.registry import make
from grace.errors import ConfigError, installed
from grace.launch import preparing

if TYPE_CHECKING:
    from grace.launch.cluster import SSH, Node, Resources

ENGINES = ("horovod", "torch", "mpi")
MASTER_PORT = 29500


@dataclasses.dataclass(frozen=True)
class Command:
    """Command that is started on this machine for a node.

    Attributes:
        node: the node's address.
        argv: the command line.
        environment: variables that are added to this process's environment.
        remote: True if it starts ssh.
        hidden: the variables of ``shared_envs``, whose values are not shown.
        env_sender: the command that puts their values into a file on the node until its stdin ends, and prints
            ``ready`` in between; empty if the environment has them.
        env_exports: the input of ``env_sender``: lines for a shell that set the variables.
        shown: ``argv`` as a dry run prints it where there is an ``env_sender``.
    """

    node: str
    argv: list[str]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    remote: bool = False
    hidden: frozenset[str] = frozenset()
    env_sender: list[str] = dataclasses.field(default_factory=list)
    env_exports: str = dataclasses.field(default="", repr=False)
    shown: list[str] = dataclasses.field(default_factory=list, repr=False)

    def __str__(self) -> str:
        """Return the command as one types it into a shell, without the values that are hidden.

        >>> print(Command("a", ["python", "my file.py"], {"X": "1 2", "TOKEN": "abc"}, hidden=frozenset(["TOKEN"])))
        env 'X=1 2' TOKEN=... python 'my file.py'
        """
        environment = {name: "..." if name in self.hidden else value for name, value in self.environment.items()}
        note = f"# {', '.join(sorted(self.hidden))}: over the input of another ssh, not in this command line\n"
        return (note if self.env_sender else "") + shlex.join([*_env(environment), *(self.shown or self.argv)])

    @property
    def errors_on_stdout(self) -> bool:
        """True if errors are printed on stdout: those of a remote terminal, and of horovodrun's ssh."""
        return self.remote or self.argv[0] == "horovodrun"


def default_engine() -> str:
    """Return "horovod" where Horovod is installed, or else "torch" where torch is, or else "mpi"."""
    return next(filter(installed, ("horovod", "torch")), "mpi")


def command(
    resources: "Resources",
    engine: str,
    program: Sequence[str],
    strategy: Path | str | None = None,
    port: int = MASTER_PORT,
    file: Path | str | None = None,
) -> list[Command]:
    """Return the command lines that start a program on all ranks.

    Args:
        resources: the cluster; its chief is this machine.
        engine: "horovod", "torch" or "mpi".
        program: the program and its arguments, as in ``["python", "train.py"]``.
        strategy: a strategy file, or a builder's spec, for GRACE_STRATEGY.
        file: the file of the resources, for GRACE_RESOURCES.
        port: the chief's port on which torch's ranks find each other, if there are several nodes.

    Returns:
        One command per node for torch, else one.

    Raises:
        ConfigError: the engine's launcher cannot do what the resources say.

    >>> from grace.launch.cluster import Resources
    >>> for line in command(Resources.load(None, ranks=2), "torch", ["python", "train.py"]):
    ...     print(line)
    python -m torch.distributed.run --standalone --nproc-per-node 2 train.py
    """
    if engine not in ENGINES:
        raise ConfigError(f"unknown engine {engine!r}; known: {', '.join(ENGINES)}")
    if not program:
        raise ConfigError("write the program to start after --, as in: grace launch -- python train.py")
    environment = {}
    if strategy is not None:
        environment["GRACE_STRATEGY"] = checked_strategy(str(strategy))
    if file is not None:
        environment["GRACE_RESOURCES"] = str(Path(file).resolve())
    if engine == "torch":
        return _torch(resources, list(program), environment, port)
    return [_mpirun_or_horovodrun(resources, engine, list(program), environment)]


def checked_strategy(given: str) -> str:
    """Return a strategy in the form that all ranks understand: a file's absolute path, or a builder's spec. A
    ConfigError says that there is neither.

    >>> checked_strategy("auto(quality='half')")
    "auto(quality='half')"
    """
    path = Path(given)
    if path.is_file():
        return str(path.resolve())
    if path.suffix in (".yaml", ".yml", ".json") or os.sep in given.partition("(")[0]:
        raise ConfigError(f"there is no strategy file {given}")
    make("builder", given)
    return given


# -- torch ----------------------------------------------------------------------------------------------------------


def _torch(resources: "Resources", program: list[str], environment: dict[str, str], port: int) -> list[Command]:
    """Return a command for each node, the chief's first."""
    commands = []
    nodes = resources.ordered
    for number, node in enumerate(nodes):
        where = ["--standalone", "--nproc-per-node", str(node.slots)]
        if len(nodes) > 1:
            where = ["--nnodes", str(len(nodes)), "--node-rank", str(number), "--nproc-per-node", str(node.slots)]
            where += ["--master-addr", resources.chief.address, "--master-port", str(port)]
        argv = _torchrun(where, program)
        ssh = resources.ssh_of(node)
        own = {**_gpus(node), **environment}
        if node.chief:
            shared = _shared(resources) if ssh is None else ssh.shared_envs
            variables = {**{name: preparing.expand_locally(value) for name, value in shared.items()}, **own}
            line = preparing.wrap_in_bash(preparing.setup_lines(ssh), argv)
            commands.append(Command(node.address, line, variables, hidden=frozenset(shared)))
        else:
            assert ssh is not None
            commands.append(_over_ssh(node, ssh, [*_env(own), *argv]))
    return commands


def _over_ssh(node: "Node", ssh: "SSH", program: list[str]) -> Command:
    """Return the command that starts a program on a node, with the node's setup and variables."""
    setup = preparing.setup_lines(ssh)
    enter = _activate_lines(ssh)
    shared = ssh.shared_envs
    if setup or shared:  # bash may read ~/.bashrc once more, so the environment is entered inside it
        setup = [*setup, *enter]
        enter = []
    if not shared:
        line = _ssh_line(node, ssh, enter, preparing.wrap_in_bash(setup, program))
        return Command(node.address, line, remote=True)
    # Values may be secrets: they travel over ssh's stdin, not in a command line.
    file = f"~/.grace-{secrets.token_hex(16)}"
    env_exports = preparing.exports(shared)
    receive = preparing.receive_exports_line(file, env_exports)
    hidden = shlex.join(["export", *(f"{name}=..." for name in shared)])
    return Command(
        node.address,
        _ssh_line(node, ssh, enter, preparing.wrap_in_bash(setup, program, shared=True, file=file)),
        remote=True,
        hidden=frozenset(shared),
        env_sender=["ssh", *ssh_options(ssh), host(node, ssh), receive],
        env_exports=env_exports,
        shown=_ssh_line(node, ssh, enter, preparing.wrap_in_bash([*setup, hidden], program)),
    )


def _torchrun(where: list[str], program: list[str]) -> list[str]:
    """Return torchrun's command line: it runs Python scripts and modules itself, and other programs by --no-python.

    >>> _torchrun([], ["python3", "a.py"])
    ['python3', '-m', 'torch.distributed.run', 'a.py']
    >>> _torchrun([], ["./train.sh"])
    ['python', '-m', 'torch.distributed.run', '--no-python', './train.sh']
    """
    python = is_python(program[0])
    run = [program[0] if python else "python", "-m", "torch.distributed.run", *where]
    simple = python and len(program) > 1 and (not program[1].startswith("-") or program[1] == "-m")
    return [*run, *(program[1:] if simple else ["--no-python", *program])]


def is_python(name: str) -> bool:
    """Return True if a program's name is that of a Python interpreter."""
    return re.fullmatch(r"python[\d.]*", Path(name).name) is not None


def check_script(program: Sequence[str]) -> None:
    """Raise ConfigError if Python is to run a file that does not exist here."""
    script = program[1] if len(program) > 1 and is_python(program[0]) else "-"
    if not script.startswith("-") and not Path(script).exists():
        raise ConfigError(f"cannot start {script}: there is no such file in {os.getcwd()}")


def _activate_lines(ssh: "SSH") -> list[str]:
    """Return the line that enters a ``python_venv`` that is a folder."""
    if not ssh.python_venv or preparing.is_command(ssh.python_venv):
        return []
    return [f". {_quote_after_home(ssh.python_venv)}/bin/activate"]


def _ssh_line(node: "Node", ssh: "SSH", before: list[str], argv: list[str]) -> list[str]:
    """Return an ssh command line with a terminal (-tt), so that remote processes end when the connection does."""
    remote = " && ".join([f"cd {shlex.quote(os.getcwd())}", *before, shlex.join(argv)])
    return ["ssh", "-tt", *ssh_options(ssh), host(node, ssh), remote]


def ssh_options(ssh: "SSH") -> list[str]:
    """Return the options by which ssh reaches a node."""
    key = ["-i", str(Path(ssh.key_file).expanduser())] if ssh.key_file else []
    return ["-o", "BatchMode=yes", "-p", str(ssh.port), *key]


def host(node: "Node", ssh: "SSH") -> str:
    """Return user and address of a node, for ssh and for programs that run over it."""
    return f"{ssh.username}@{node.address}" if ssh.username else node.address


def _quote_after_home(path: str) -> str:
    """Quote a path except for the ~ at its start, which the other machine's shell is to replace.

    >>> print(_quote_after_home("~/my venv/"), _quote_after_home("/opt/venv"))
    ~/'my venv' /opt/venv
    """
    path = path.rstrip("/")
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)


# -- launchers that start all nodes themselves ----------------------------------------------------------------------


def _mpirun_or_horovodrun(
    resources: "Resources", engine: str, program: list[str], environment: dict[str, str]
) -> Command:
    """Return the command line of horovodrun, or of Open MPI's mpirun."""
    user, port, key = (_common_ssh_setting(resources, field) for field in ("username", "port", "key_file"))
    if engine == "horovod" and user is not None:
        raise ConfigError(
            "horovodrun takes no user name for ssh; leave `username` out and write it into ~/.ssh/config, "
            "or launch with --engine torch or mpi"
        )
    reach = ["-l", user] if user else []
    reach += ["-p", str(port)] if port not in (None, 22) else []
    reach += ["-i", str(Path(key).expanduser())] if key else []
    shared = _shared_for_launcher(resources)
    gpus = _same_gpus(resources)
    prepared = _prepare_all(resources, preparing.EXPORTS in shared, program)
    where = ["-np", str(resources.world_size), "-H", ",".join(f"{n.address}:{n.slots}" for n in resources.ordered)]
    if engine == "horovod":
        variables = {**shared, **environment}
        # horovodrun passes on every variable but CUDA_VISIBLE_DEVICES
        argv = ["horovodrun", *where, *reach, *_env(gpus), *prepared]
    else:
        if any(" " in word for word in reach):
            raise ConfigError(f"mpirun takes no key file whose path has spaces: {key}")
        variables = {"GRACE_BACKEND": "mpi", **shared, **gpus, **environment}
        argv = ["mpirun", *where, "--bind-to", "none"]
        if any(re.search(r"[a-z]\.", node.address) for node in resources.nodes):
            argv += ["--mca", "orte_keep_fqdn_hostnames", "1"]  # else it cuts a name at its first dot
        argv += ["--map-by", "slot", *(["--mca", "plm_rsh_args", " ".join(reach)] if reach else [])]
        argv += [word for name in variables for word in ("-x", name)]
        argv += prepared
    return Command(resources.chief.address, argv, variables, hidden=frozenset(shared))


def _same_gpus(resources: "Resources") -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES for all nodes: these launchers give all ranks one environment."""
    lists = {tuple(node.gpus) for node in resources.nodes}
    if len(lists) > 1:
        each = "; ".join(f"{node.address}: {node.gpus}" for node in resources.ordered)
        raise ConfigError(
            f"horovodrun and mpirun give all nodes the same CUDA_VISIBLE_DEVICES, but their gpus differ ({each}); "
            "list the same ones, or launch with --engine torch"
        )
    return _gpus(resources.chief)


def _common_ssh_setting(resources: "Resources", field: str) -> Any:
    """Return the value of an ssh setting, which must be the same for all nodes but the chief."""
    settings = {
        node.address: getattr(resources.ssh_of(node), field, None) for node in resources.ordered if not node.chief
    }
    values = list(settings.values())
    if any(value != values[0] for value in values):
        each = "; ".join(f"{address}: {value}" for address, value in settings.items())
        raise ConfigError(
            f"horovodrun and mpirun reach all nodes with the same {field}, but the ssh groups differ ({each}); "
            "write them into ~/.ssh/config instead, or launch with --engine torch"
        )
    return values[0] if values else None


def in_venv(resources: "Resources", program: list[str]) -> list[str]:
    """Return the program with the ``python`` of the nodes' environment, since all nodes start the same command line."""
    venv = _common_ssh_setting(resources, "python_venv")
    if venv is None or preparing.is_command(venv) or program[0] not in ("python", "python3"):
        return program
    return [str(Path(venv).expanduser() / "bin" / program[0]), *program[1:]]


def _prepare_all(resources: "Resources", exports: bool, program: list[str]) -> list[str]:
    """Return the program with the setup of all nodes; on the chief the setup runs only if it names that ssh group,
    too."""
    for field in ("setup", "python_venv"):
        _common_ssh_setting(resources, field)
    others = [preparing.setup_lines(resources.ssh_of(node)) for node in resources.nodes if not node.chief]
    own = preparing.setup_lines(resources.ssh_of(resources.chief))
    setup = others[0] if others else own
    if own and own != setup:
        raise ConfigError(
            f"horovodrun and mpirun prepare all nodes alike, but the chief's ssh group has other lines ({own}) "
            f"than the others' ({setup}); use one group, or launch with --engine torch"
        )
    except_on = "" if own else preparing.this_machine()
    return preparing.wrap_in_bash(setup, in_venv(resources, program), exports, except_on)


def _shared_for_launcher(resources: "Resources") -> dict[str, str]:
    """Return the shared variables as a launcher passes them on: those that refer to other variables are joined in one,
    which the nodes expand."""
    shared = _shared(resources)
    expanded = {name: value for name, value in shared.items() if preparing.REFERENCE.search(value)}
    plain = {name: value for name, value in shared.items() if name not in expanded}
    return {**plain, preparing.EXPORTS: preparing.exports(expanded)} if expanded else plain


def _shared(resources: "Resources") -> dict[str, str]:
    """Return the variables of all ssh groups that nodes name."""
    variables: dict[str, str] = {}
    for node in resources.ordered:
        ssh = resources.ssh_of(node)
        for name, value in ({} if ssh is None else ssh.shared_envs).items():
            if variables.setdefault(name, value) != value:
                raise ConfigError(
                    f"the ssh groups' shared_envs give {name} several values, and which ranks get which is not clear; "
                    "use one, or with --engine torch give the chief an ssh_config"
                )
    return variables


def _gpus(node: "Node") -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, node.gpus))} if node.gpus else {}


def _env(variables: dict[str, str]) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []
