"""Variables that launchers leave in the environment of the ranks that they start."""

from grace.backends.topology import MPI_SIZES

TORCHS = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
LAUNCHERS = {
    "torchrun": {**TORCHS, "TORCHELASTIC_RUN_ID": "none"},
    "Ray": {**TORCHS, "RAY_JOB_ID": "01000000"},
    "torch.distributed's variables": {"RANK": "0", "WORLD_SIZE": "2"},  # the program names the place to meet itself
    "horovodrun": {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"},
    "mpirun (Open MPI)": {"OMPI_COMM_WORLD_SIZE": "2", "SLURM_NTASKS": "4"},
    "mpiexec or srun (PMI)": {"PMI_SIZE": "2"},
    "srun (Slurm)": {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"},
}
"""Variables of rank 0 of 2, by Grace's name of the launcher."""
KEYS = {key for variables in LAUNCHERS.values() for key in variables} | set(MPI_SIZES) | {"GRACE_BACKEND", "TF_CONFIG"}
