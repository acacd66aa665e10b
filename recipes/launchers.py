"""Tells how many ranks a job has, and which of them this process is, under any launcher."""

import os

# For each launcher: the variables in which it names rank, world size, local rank and local world size.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
}


def join_launcher() -> bool:
    """Takes over the ranks of a launcher, if one has started this process.

    Returns:
        Whether it has; then the variables that torch reads (`RANK`, `WORLD_SIZE`, ...) are set.

    Raises:
        ValueError: If a launcher names ranks but no address at which they meet.
    """
    for launcher, (rank, world_size, local_rank, local_world_size) in LAUNCHERS.items():
        if rank not in os.environ or world_size not in os.environ:
            continue
        if launcher != "torchrun" and os.environ[world_size] == "1":
            continue
        on_node = tasks_of_node(
            os.environ.get(local_world_size, os.environ[world_size]), int(os.environ.get("SLURM_NODEID", "0"))
        )
        os.environ |= {
            "RANK": os.environ[rank],
            "WORLD_SIZE": os.environ[world_size],
            "LOCAL_RANK": os.environ.get(local_rank, "0"),
            "LOCAL_WORLD_SIZE": str(on_node),
        }
        if "MASTER_ADDR" not in os.environ:
            raise ValueError(
                f"{launcher} started this process, but MASTER_ADDR is not set; set it to the host of rank 0 "
                "(and MASTER_PORT to a free port there)"
            )
        os.environ.setdefault("MASTER_PORT", "29500")
        return True
    return False


def tasks_of_node(counts: str, node: int) -> int:
    """Tasks on one node, of a list as srun writes it: `4(x2),3` is 4 on each of two nodes and 3 on a third.

    Args:
        counts: The list; a plain number is one for all nodes.
        node: Number of the node, from 0.
    """
    expanded: list[int] = []
    for item in counts.split(","):
        number, _, times = item.partition("(x")
        expanded += [int(number)] * int(times.rstrip(")") or 1)
    return expanded[node] if node < len(expanded) else expanded[-1]


def default_num_processes() -> int:
    """Ranks to start on this machine: one for each GPU, or 2 without any."""
    import torch

    return torch.cuda.device_count() or 2


def world_size_to_come(num_processes: int | None) -> int:
    """Ranks that the job will have: the launcher's, or those that `run` will start.

    Args:
        num_processes: As in `run`.

    Raises:
        ValueError: If that number is not positive or not that of the launcher, or the launcher has left out the
            address of rank 0.
    """
    if num_processes is not None and num_processes < 1:
        raise ValueError(f"nproc={num_processes} must be at least 1")
    if join_launcher():
        world_size = int(os.environ["WORLD_SIZE"])
        if num_processes not in (None, world_size):
            raise ValueError(f"nproc={num_processes}, but a launcher has started {world_size} ranks; leave nproc out")
        return world_size
    return num_processes or default_num_processes()


def is_first_rank() -> bool:
    """Whether this process speaks for the job: it is rank 0, or no launcher has started it."""
    ranks = (os.environ.get(rank) for rank, *_ in LAUNCHERS.values())
    return next((rank for rank in ranks if rank is not None), "0") == "0"
