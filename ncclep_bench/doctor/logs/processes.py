"""Lines of the kernel, of launchers and of programs about a process that ended, or found no memory."""

from __future__ import annotations

from ncclep_bench.doctor.logs.contract import Family, signature

_TASKS = r"srun: error: (?P<host>[\w.-]+): tasks? (?P<task>[\d,-]+): "
_RANK = r"(?:process rank (?P<rank>\d+) with .* on node (?P<host>\S+) .*)?"

# Where a program says it of another: not in prose, nor in what the kernel says of a bus ("PCIe Bus Error").
_SAID = r"(?:^\s*|[:(]\s?|\d\s+)"

_SIGNATURES = (
    signature(
        "oom_killed",
        "out of memory: kill",
        r"Out of memory: Kill(?:ed)? process (?P<pid>\d+) \((?P<program>[^)]*)\).*",
    ),
    signature("oom_killed", "slurmstepd", r"slurmstepd: .*Detected (?P<count>\d+) oom[-_]kill event.*"),
    signature("oom_killed", "out of memory", _TASKS + "Out Of Memory"),
    signature(
        "gpu_memory", "cuda out of memory", r"CUDA out of memory\. Tried to allocate (?P<size>[\d.]+ [KMGT]iB).*"
    ),
    signature("crashed", "segmentation fault", _RANK + _SAID + r"(?-i:Segmentation fault\b)(?! in ).*"),
    signature("crashed", "bus error", _RANK + _SAID + r"(?-i:Bus error\b)(?! in ).*"),
    signature("crashed", "segfault at", r"(?P<program>[\w.:/-]+)\[(?P<pid>\d+)\]: segfault at .*"),
    signature(
        "killed",
        "exited on signal",
        r"process rank (?P<rank>\d+) with .* on node (?P<host>\S+) exited on signal 9\b.*",
        effect=True,
    ),
    signature("killed", "killed", _TASKS + "Killed", effect=True),
    signature("killed", "exit string", r"TERMINATED WITH THE EXIT STRING: Killed.*", effect=True),
    signature("killed", "sigkill", r"Signal 9 \(SIGKILL\) received by PID (?P<pid>\d+).*", effect=True),
    signature("killed", "killed", r"line \d+: +(?P<pid>\d+) Killed\b.*", effect=True),
)

LOGS = Family(
    (
        " kernel: ",
        "slurmstepd: ",
        "srun: ",
        "torch.distributed",
        "processgroupnccl",
        *sorted({each.cue for each in _SIGNATURES} - {"killed", "slurmstepd"}),
    ),
    _SIGNATURES,
)
