"""What logs say of limits, shared memory and libraries that a job met when it started."""

from __future__ import annotations

from collections.abc import Iterator

from ncclep_bench.doctor.checks.log_events import GUIDE, events_of, lines, listed, log_check, said, who
from ncclep_bench.doctor.contract import Trouble
from ncclep_bench.model.facts import Facts


def _shm(facts: Facts) -> Iterator[Trouble]:
    space, segments = events_of(facts, "shm_space"), events_of(facts, "shm_segment")
    if space:
        sizes = {e.fields["size"] for e in [*space, *segments] if "size" in e.fields}
        yield Trouble(
            f"/dev/shm is too small{who(space)}: no space left"
            + (f" for a segment of {listed(sorted(sizes))} B" if sizes else ""),
            lines([*space, *segments]),
        )
    elif segments:
        yield Trouble(f"a shared memory segment could not be made{who(segments)}", lines(segments))


CHECKS = (
    log_check(
        "LIM006",
        "/dev/shm had room",
        _shm,
        why="Ranks of one node exchange through segments there; containers start with 64 MiB, and dead jobs leave "
        "theirs.",
        by_hand="df -h /dev/shm; ls /dev/shm",
        remedy="docker run --shm-size=8g …   # Kubernetes: an emptyDir of medium Memory at /dev/shm; rm "
        "/dev/shm/nccl-* of dead jobs",
        reference=f"{GUIDE}; reports: NVIDIA/nccl#342, NVIDIA/nccl#525",
    ),
    log_check(
        "LIM007",
        "Memory could be registered",
        said(
            "registering memory with the adapter failed{who}: the limit of locked memory, or no CAP_IPC_LOCK",
            "memory_registration",
        ),
        why="Registration pins memory. A daemon hands its own limit to the ranks it starts.",
        by_hand="ulimit -l   # in a rank",
        remedy="ulimit -l unlimited   # container: --ulimit memlock=-1 --cap-add IPC_LOCK",
        reference="reports: NVIDIA/nccl-tests#206, microsoft/mscclpp#335",
    ),
    log_check(
        "LIM008",
        "Files could be opened",
        said("a rank ran out of file descriptors{who}", "open_files"),
        why="Sockets, queues and segments per peer add up; the default of 1024 ends at some number of nodes.",
        by_hand="ulimit -n   # in a rank",
        remedy="ulimit -n 1048576",
        reference="report: NVIDIA/nccl#550",
    ),
    log_check(
        "LIM009",
        "Shared memory stays while the user is logged out",
        said(
            "a shared memory segment had vanished{who}: systemd removes a user's segments at logout (RemoveIPC)",
            "shm_unlink",
        ),
        why="With RemoveIPC=yes the end of an ssh session deletes segments of jobs that go on.",
        by_hand="grep RemoveIPC /etc/systemd/logind.conf",
        remedy="RemoveIPC=no   # in /etc/systemd/logind.conf, then systemctl restart systemd-logind",
        reference=GUIDE,
    ),
    log_check(
        "LIM010",
        "Host memory can be shared by cuMem",
        said(
            "host memory could not be attached (size 0){who}: NUMA calls are blocked in the container, or only for "
            "some ranks",
            "shm_attach",
        ),
        why="The probe for cuMem host memory differs between ranks when a container blocks get_mempolicy.",
        by_hand="grep 'size 0' LOG",
        remedy="docker run --cap-add SYS_NICE …   # or export NCCL_CUMEM_HOST_ENABLE=0 on all ranks",
        reference=GUIDE,
    ),
    log_check(
        "LIB003",
        "Every rank runs the same NCCL",
        said("ranks run different builds of NCCL{who}", "nccl_mismatch"),
        why="Messages of the set-up have another size or layout in another version.",
        by_hand="grep 'NCCL version' LOG",
        remedy="python -c 'import torch; print(torch.cuda.nccl.version())'   # on every node; install the same",
        reference="reports: NVIDIA/nccl#1267, NVIDIA/nccl#1328",
    ),
    log_check(
        "LIB004",
        "Header and library are of one version",
        said("a structure was made by another version of the header than the library has{who}", "no_magic"),
        why="Configuration structures carry a version; a program built against other headers is refused.",
        by_hand="grep -iE 'magic|INITIALIZER' LOG",
        remedy="rebuild the program against the headers of the library that is loaded",
        reference="report: deepseek-ai/DeepEP#521",
    ),
    log_check(
        "MPI003",
        "MPI takes device buffers",
        said("this MPI was built without CUDA: a device buffer in an MPI call crashes", "mpi_not_cuda"),
        severity="info",
        needs=("log.frameworks",),
        why="An MPI that does not know GPU pointers reads them as host memory.",
        by_hand="ompi_info --parsable --all | grep mpi_built_with_cuda_support:value",
        remedy="conda install -c conda-forge openmpi ucx   # a CUDA-aware build, or copy to the host first",
        reference="reports: mpi4py/mpi4py#115, mpi4py/mpi4py#36",
    ),
)
