"""What logs say of processes that were killed, crashed, or found no memory."""

from __future__ import annotations

from collections.abc import Iterator

from ncclep_bench.doctor.checks.log_events import events_of, lines, listed, log_check, said, who
from ncclep_bench.doctor.contract import Trouble
from ncclep_bench.model.facts import Facts

_LOGS = ("log.processes",)


def _gpu_memory(facts: Facts) -> Iterator[Trouble]:
    if events := events_of(facts, "gpu_memory"):
        sizes = sorted({event.fields["size"] for event in events})
        yield Trouble(f"a GPU had no memory left{who(events)} for {listed(sizes)}", lines(events))


def _killed(facts: Facts) -> Iterator[Trouble]:
    # Launchers kill the others when one has failed, and do not say which of them the kernel has ended.
    if (events := events_of(facts, "killed")) and not events_of(facts, "oom_killed", "crashed", "gpu_memory"):
        yield Trouble(
            f"a process was killed from outside (signal 9){who(events)}: by the kernel for want of memory, a limit of "
            "time, or somebody",
            lines(events),
        )


CHECKS = (
    log_check(
        "LIM014",
        "No process was ended for want of memory",
        said("the out-of-memory killer ended a process{who}", "oom_killed"),
        needs=_LOGS,
        why="A host or a container whose memory is used up ends a process; the other ranks then wait for it.",
        by_hand="sudo dmesg -T | grep -i 'out of memory'; sacct -j JOB -o JobID,MaxRSS,ReqMem",
        remedy="sbatch --mem=0 …   # container: a higher --memory; else fewer data-loader workers or ranks per node",
        reference="reports: nextflow-io/nextflow#5932, hafs-community/HAFS#101",
    ),
    log_check(
        "LIM015",
        "GPU memory sufficed",
        _gpu_memory,
        needs=_LOGS,
        why="Buffers of mode ll are sized for the worst case, and contexts of other processes take theirs.",
        by_hand="nvidia-smi --query-compute-apps=pid,used_memory --format=csv",
        remedy="nvidia-smi   # end what else holds memory there; then fewer tokens per rank, or smaller batches",
        reference="https://docs.pytorch.org/docs/stable/notes/faq.html",
    ),
    log_check(
        "LIM016",
        "No process crashed",
        said("a process crashed{who}: it read or wrote where there is no memory", "crashed"),
        needs=_LOGS,
        why="A device buffer in an MPI built without CUDA, a full /dev/shm (bus error), or two versions of a library "
        "in one process; the other ranks then wait for it.",
        by_hand="coredumpctl info; df -h /dev/shm; ncclep-doctor check",
        remedy="coredumpctl gdb PID   # then bt: the library on top is the one to suspect",
        reference="reports: mpi4py/mpi4py#115, hafs-community/HAFS#101",
    ),
    log_check(
        "LIM017",
        "No process was killed",
        _killed,
        needs=_LOGS,
        why="Nothing of the process's own can tell the reason; the other ranks then wait for it.",
        by_hand="sudo dmesg -T | grep -i kill; sacct -j JOB -o JobID,State,ExitCode,Elapsed,Timelimit",
        remedy="sudo dmesg -T | grep -i 'out of memory'   # on that node; then the scheduler's limits",
        reference="https://man7.org/linux/man-pages/man7/signal.7.html",
    ),
)
