"""``grace launch``: a program on all ranks of a cluster."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from grace.launch import copying, supervisor
from grace.launch.command_lines import MASTER_PORT, check_script, command, default_engine, in_venv


def launch(
    program: Annotated[
        list[str], typer.Argument(help="What every rank runs, after --: python train.py ...", metavar="-- PROGRAM...")
    ],
    resources: Annotated[
        Path | None,
        typer.Option("--resources", "-r", help="The cluster, in YAML or JSON.", show_default="this machine"),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="horovod, torch or mpi.", show_default="the first that is installed")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", "-n", help="Ranks on this machine, without a file.", show_default="1")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="A strategy's file, or a builder: auto, parallax(compressor=qsgd). The ranks find it in "
            "GRACE_STRATEGY.",
            show_default="none",
        ),
    ] = None,
    copy: Annotated[
        list[Path] | None,
        typer.Option(help="A file or folder to put on the other nodes first; may be repeated.", show_default="none"),
    ] = None,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="The chief's port where torch's ranks of several nodes meet.")
    ] = MASTER_PORT,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command lines and exit.")] = False,
) -> None:
    """Run a program on all ranks of a cluster, by the engine's own launcher.

    grace launch -n 2 -- python train.py

    grace launch -r cluster.yaml --engine torch -- python train.py --epochs 3

    Start it on the chief. torchrun is started on every node, on others by ssh;
    horovodrun and Open MPI's mpirun reach the nodes themselves. The program lies
    in the same folder on all nodes, or --copy puts it there. A rank that fails
    ends the job: its number is printed, and its exit code (128 and the number of
    the signal) is ours. GRACE_TIMEOUT says for how many seconds a rank waits for
    another (600).
    """
    from grace.launch.cluster import Resources

    cluster = Resources.load(resources, ranks)
    engine = engine or default_engine()
    commands = command(cluster, engine, program, strategy, port, resources)
    if dry_run:
        print(*copying.commands(cluster, copy or []), *commands, sep="\n")
        return
    started = program if engine == "torch" else in_venv(cluster, program)
    supervisor.check_program(started[0])
    check_script(program)
    try:
        copying.copy(cluster, copy or [])
        end = supervisor.run(commands)
    except KeyboardInterrupt:
        end = supervisor.INTERRUPTED
    if end.code:
        print(f"grace launch: {end.message}", file=sys.stderr)
        raise typer.Exit(end.code)
