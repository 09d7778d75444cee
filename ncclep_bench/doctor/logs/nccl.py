"""Lines of NCCL_DEBUG logs."""

from __future__ import annotations

from ncclep_bench.doctor.logs.contract import Family, signature

_DEVICE = r"(?P<device>[\w.-]+:\d+)"

_SIGNATURES = (
    signature(
        "nccl_init",
        "init start",
        r"comm 0x\w+ rank (?P<rank>\d+) nranks (?P<nranks>\d+) .*?busId (?P<bus>\w+)",
    ),
    signature(
        "duplicate_gpu",
        "duplicate gpu",
        r"Duplicate GPU detected ?: rank (?P<first>\d+) and rank (?P<second>\d+) both on CUDA device (?P<gpu>\w+)",
    ),
    signature("gdr_disabled", "rdma disabled", r"GPU Direct RDMA Disabled for (?:HCA|NIC) \S+ '(?P<device>[^']+)'"),
    signature(
        "rdma_access", "async event", rf"(?:NET/IB ?: )?(?:{_DEVICE} )?.*async event ?: (?P<what>local access viol.*)"
    ),
    signature(
        "port_error",
        "async event",
        rf"(?:NET/IB ?: )?(?:{_DEVICE} )?Got async event ?: (?P<what>port error|port down).*",
    ),
    signature(
        "completion",
        "got completion",
        r"Got completion (?:from peer (?P<peer>\S+) )?with (?:error|status=)\s*(?P<status>\d+)"
        r"(?:.*?vendor err (?P<vendor>\d+))?(?:.*?localGid ?(?P<local>[\da-f:.]+) remoteGids? "
        r"?(?P<remote>[\da-f:.]+))?",
    ),
    signature("no_plugin", "no plugin found", r"NET/Plugin ?: (?:No plugin found|Could not find).*(?:libnccl-net)"),
    signature("no_libibverbs", "libibverbs", r"NCCL WARN .*Failed to open libibverbs"),
    signature("network_used", "using network", r"Using network (?P<network>\S+)"),
    signature(
        "no_interface",
        "no socket interface",
        r"no socket interface found",
    ),
    signature(
        "address_family",
        "family",
        r"connecting to address .*with family (?P<family>\d+)|neither AF_INET nor AF_INET6|wrong address family",
    ),
    signature("p2p_ipc", "via p2p/ipc", r"(?P<a>\d+)\[(?P<a_gpu>\w+)\] -> (?P<b>\d+)\[(?P<b_gpu>\w+)\] via P2P/IPC"),
    signature(
        "shm_space",
        "no space left",
        r"NCCL WARN.*No space left on device|No space left on device.*(?:shm|nccl-)|(?:shm|nccl-).*No space left on "
        r"device",
    ),
    signature("shm_space", "failed to extend", r"failed to extend /dev/shm/\S+ to (?P<size>\d+) bytes"),
    signature("adapters_used", "net/ib : using", r"NET/IB ?: Using (?P<adapters>.*?)(?:;|$)"),
    signature(
        "shm_segment",
        "shared memory",
        r"Error(?:: failed to| while| ).{0,20}creat.{0,20}shared memory segment (?P<segment>\S+)(?: \(size "
        r"(?P<size>\d+)\))?",
        effect=True,
    ),
    signature("shm_unlink", "shared memory", r"unlink shared memory.*fail|fail.*unlink shared memory"),
    signature("shm_attach", "(size ", r"NCCL WARN .*(?:attach|import).*\(size 0\)"),
    signature(
        "memory_registration",
        "cannot allocate memory",
        r"(?P<call>ibv_reg_mr\w*|ibv_create_\w+|ibv_reg_\w+|posix_memalign)\b.*Cannot allocate memory",
    ),
    signature("dmabuf", "ibv_", r"ibv_reg_dmabuf_mr\w*.*(?:not supported|failed|Bad address)"),
    signature("modify_qp", "ibv_", r"ibv_modify_qp.*(?:Invalid argument|No such|timed out|Network is unreachable)"),
    signature("open_files", "too many open files", r"Too many open files"),
    signature("nvls_bind", "multicast", r"Failed to bind NVLink SHARP.*|NVLS.*Multicast.*(?:fail|error).*"),
    signature(
        "imex",
        "operation not permitted",
        r"NCCL WARN.*(?:Cuda failure|CUDA error|CUDA Driver error) ?(?:800)?.*operation not permitted(?! when).*",
    ),
    signature("not_initialized", "system not yet initialized", r"system not yet initialized"),
    signature("not_initialized", "error ", r"(?:cuda|cu)\w* ?(?:error|failure) 802\b"),
    signature("capture", "during capture", r"operation failed due to a previous error during capture"),
    signature(
        "capture",
        "stream is capturing",
        r"operation (?:not permitted|would make the legacy stream|failed).*stream is capturing",
    ),
    signature("poisoned", "attempt to use comm", r"Attempt to use communicator.*", effect=True),
    signature(
        "hca_count",
        "local net device",
        r"Detected mixed local Net device counts.*?(?:min (?P<min>\d+), max (?P<max>\d+)|$)",
    ),
    signature(
        "hca_missing",
        "local net device",
        r"Rank (?P<rank>\d+) has (?P<has>\d+) local Net devices \(max (?P<max>\d+)\)",
    ),
    signature(
        "nccl_mismatch",
        "mismatch",
        r"Mismatched NCCL version.*",
    ),
    signature(
        "nccl_mismatch",
        "bytes instead of",
        r"(?:receiving|received|message truncated).*?(?P<got>\d+) bytes instead of (?P<want>\d+)",
    ),
    signature("no_magic", "mismatch", r".*magic mismatch.*"),
    signature("no_magic", "initializer", r"must be initialized (?:via|with|using) \S*INITIALIZER.*"),
)

LOGS = Family(("nccl info", "nccl warn", "nccl version"), _SIGNATURES)
