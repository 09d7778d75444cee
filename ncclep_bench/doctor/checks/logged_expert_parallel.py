"""What logs say of the use of NCCL EP and DeepEP."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ncclep_bench.doctor.checks.log_events import events_of, lines, listed, log_check, said, who
from ncclep_bench.doctor.contract import Trouble
from ncclep_bench.model.facts import Facts


def _one_host_for_two(facts: Facts) -> Iterator[Trouble]:
    gpus_of: dict[tuple[str, int], set[str]] = defaultdict(set)
    ranks_of: dict[tuple[str, str], set[int]] = defaultdict(set)
    events = events_of(facts, "p2p_ipc")
    for event in events:
        for end in ("a", "b"):
            rank, gpu = int(event.fields[end]), event.fields[f"{end}_gpu"]
            gpus_of[event.host, rank].add(gpu)
            ranks_of[event.host, gpu].add(rank)
    # Several communicators number their ranks anew, and ranks that see one GPU each call it 0: neither tells anything.
    if any(len(gpus) > 1 for gpus in gpus_of.values()) or len(ranks_of) < 3:
        return
    shared = {key: sorted(ranks) for key, ranks in ranks_of.items() if len(ranks) > 1}
    if shared:
        (host, gpu), ranks = min(shared.items())
        yield Trouble(
            f"two hosts are taken for one: ranks {listed(ranks)} are all on GPU {gpu} of {host or 'one host'}, "
            f"yet joined to their neighbours via P2P/IPC",
            lines([e for e in events if {int(e.fields["a"]), int(e.fields["b"])} & set(ranks)] or events),
        )


def _dtype(facts: Facts) -> Iterator[Trouble]:
    if events := events_of(facts, "ep_dtype"):
        yield Trouble(
            f"a tensor has a dtype that the operation does not take{who(events)}; FP8 goes into dispatch, BF16 "
            f"into combine, "
            "indices are int64, weights float32 — ranks without tokens included",
            lines(events),
        )


CHECKS = (
    log_check(
        "EP202",
        "The batch fits num_max_dispatch_tokens_per_rank",
        said(
            "num_max_dispatch_tokens_per_rank is smaller than the batch, or topk_idx has fewer rows than tokens{who}",
            "ep_capacity",
        ),
        needs=("log.expert_parallel",),
        why="Low-latency buffers have room for that many tokens of each rank; serving stacks set it by a variable.",
        by_hand="echo $SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK",
        remedy="export SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=256   # on every rank, or a smaller batch",
        reference="reports: deepseek-ai/DeepEP#165, NVIDIA/srt-slurm#44",
    ),
    log_check(
        "EP203",
        "Ranks of two hosts are told apart",
        _one_host_for_two,
        why="Hosts are told apart by name, NCCL by the part before the first dot: equal names join ranks by memory "
        "that "
        "they do not share.",
        by_hand="hostname; cat /proc/sys/kernel/random/boot_id   # in every rank",
        remedy="give every host a name of its own   # or export NCCL_HOSTID=$(cat /proc/sys/kernel/random/boot_id)",
        reference="reports: NVIDIA/nccl#187, deepseek-ai/DeepEP#316",
    ),
    log_check(
        "EP204",
        "Peers' memory could be mapped",
        said(
            "mapping a peer's memory failed{who}: hosts with equal names, containers that do not share IPC, or "
            "uneven placement",
            "ep_ipc",
        ),
        needs=("log.expert_parallel",),
        why="Ranks that are counted to one node must share it: NCCL EP and DeepEP go by host name.",
        by_hand="hostname; readlink /proc/self/ns/ipc   # in every rank",
        remedy="docker run --ipc=host …   # unique host names, equal ranks per node in blocks",
        reference="report: deepseek-ai/DeepEP#316",
    ),
    log_check(
        "EP205",
        "Ranks agree on what must be identical",
        said("ranks were given different values of a setting that must be identical{who}", "ep_identical"),
        needs=("log.expert_parallel",),
        why="Offsets into the peers' buffers are computed from it.",
        by_hand="print the configuration on every rank",
        remedy="use the largest value of any rank on all of them",
        reference="NCCL EP source; report: deepseek-ai/DeepEP#208",
    ),
    log_check(
        "EP206",
        "There are enough queue pairs",
        said("too few queue pairs for the channels or experts{who}", "ep_queue_pairs"),
        needs=("log.expert_parallel",),
        why="Each channel, or each local expert in low-latency mode, needs a queue pair of its own.",
        by_hand="compare num_qps_per_rank with the number of local experts, and with half the SMs",
        remedy="export NVSHMEM_IBGDA_NUM_RC_PER_PE=24   # or fewer SMs: Buffer.set_num_sms(20)",
        reference="report: deepseek-ai/DeepEP#134",
    ),
    log_check(
        "EP207",
        "GPU-initiated networking (GIN) is there",
        said("NCCL EP needs GIN, and this network has none{who}: no GPUDirect RDMA, or a plugin without it", "ep_gin"),
        needs=("log.expert_parallel",),
        why="With more than one NVLink domain dispatch sends from the GPU.",
        by_hand="grep -i gin LOG; lsmod | grep peermem",
        remedy="sudo modprobe nvidia_peermem   # or stay in one NVLink domain",
        reference="NCCL EP source; report: deepseek-ai/DeepEP#629",
    ),
    log_check(
        "EP208",
        "Tensors have the dtypes that are asked for",
        _dtype,
        needs=("log.expert_parallel",),
        why="Dispatch may carry FP8 where combine takes BF16 only; a rank without tokens takes another path.",
        by_hand="print dtype and strides of every tensor that is passed",
        remedy="topk_idx = topk_idx.to(torch.int64); weights = weights.float(); x = x.bfloat16()   # before combine",
        reference="reports: sgl-project/sglang#33669, NVIDIA/TensorRT-LLM#18689",
    ),
)
