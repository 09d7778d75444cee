"""The expert-parallel configuration: shapes that cannot work, and sizes that will disappoint."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ncclep_bench.doctor.contract import Check, Trouble
from ncclep_bench.errors import InputError
from ncclep_bench.model.dtype import DType, dtype_named
from ncclep_bench.model.ep_config import LAYOUTS, EpConfig
from ncclep_bench.model.facts import Facts
from ncclep_bench.model.placement import Placement
from ncclep_bench.units import format_bytes

PAGE_BYTES = 2 << 20
"""Registered memory is 2 MiB aligned."""

MIN_DEADLINE_S = 1.0
"""Starting an interpreter and importing numpy on a busy node already takes about this long."""


def config_of(facts: Facts) -> EpConfig:
    """The configuration in `facts`."""
    return facts.read("ep.config", EpConfig)


def at(facts: Facts, *fields: str) -> tuple[str, ...]:
    """Evidence: the file and these fields of the configuration, with their values."""
    config = config_of(facts)
    return tuple(f"{facts.fact('ep.config').source}: {name} = {_toml(getattr(config, name))}" for name in fields)


def ranks_at(facts: Facts) -> str:
    """Evidence: the number of ranks and who says so."""
    return f"{facts.read('ep.ranks', int)} ranks ({facts.fact('ep.ranks').source})"


def placed(facts: Facts) -> Placement:
    """Who holds which expert, whatever else is wrong. Raises InputError where the experts cannot be placed."""
    config = msgspec.structs.replace(config_of(facts), top_k=1, dtype="float32")
    return config.check(facts.read("ep.ranks", int))


def placement_in(facts: Facts) -> Placement | None:
    """As `placed`, but None where the experts cannot be placed."""
    try:
        return placed(facts)
    except InputError:
        return None


def dtype_in(facts: Facts) -> DType | None:
    """The configured dtype, or None where no such dtype exists."""
    try:
        return dtype_named(config_of(facts).dtype)
    except InputError:
        return None


def _toml(value: object) -> str:
    text = "unset" if value is None else f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _top_k(facts: Facts) -> Iterator[Trouble]:
    config = config_of(facts)
    if config.top_k > config.num_experts:
        yield Trouble(
            f"every token would go to {config.top_k} experts, and there are {config.num_experts}",
            at(facts, "top_k", "num_experts"),
            f"top_k = {config.num_experts}   # or less",
        )


def _placement(facts: Facts) -> Iterator[Trouble]:
    config, ranks = config_of(facts), facts.read("ep.ranks", int)
    try:
        placed(facts)
    except InputError as error:
        even = config.num_experts % ranks == 0
        yield Trouble(
            error.message,
            (*at(facts, "num_experts", "experts_per_rank", "placement"), ranks_at(facts)),
            f"experts_per_rank = {config.num_experts // ranks}" if even and config.placement is None else None,
        )


def _idle_or_crowded(facts: Facts) -> Iterator[Trouble]:
    placement = placement_in(facts)
    if placement is None:
        return
    counts = [len(experts) for experts in placement.experts_of_rank]
    evidence = (*at(facts, "num_experts", "placement"), ranks_at(facts))
    if 0 in counts:
        idle = [rank for rank, count in enumerate(counts) if count == 0]
        shown = ", ".join(map(str, idle[:8])) + (", …" if len(idle) > 8 else "")
        yield Trouble(f"{len(idle)} of {len(counts)} ranks hold no expert: {shown}", evidence)
    elif max(counts) >= 2 * min(counts):
        yield Trouble(
            f"rank {counts.index(max(counts))} holds {max(counts)} experts, "
            f"rank {counts.index(min(counts))} holds {min(counts)}: the fullest rank sets the pace",
            evidence,
        )


def _ll_capacity(facts: Facts) -> Iterator[Trouble]:
    config = config_of(facts)
    if config.mode == "ll" and config.max_tokens_per_rank is None:
        yield Trouble(
            "mode ll has fixed slots, and the configuration does not say for how many tokens",
            at(facts, "mode", "max_tokens_per_rank"),
        )


def _ll_memory(facts: Facts) -> Iterator[Trouble]:
    config, placement, dtype = config_of(facts), placement_in(facts), dtype_in(facts)
    tokens = config.max_tokens_per_rank
    if config.mode != "ll" or not tokens or not config.hidden or placement is None or dtype is None:
        return
    most = max(len(experts) for experts in placement.experts_of_rank)
    slots = placement.ranks * tokens * most
    need_bytes, memory_bytes = slots * config.hidden * dtype.itemsize, facts.read("host.memory_bytes", int)
    if need_bytes > memory_bytes:
        yield Trouble(
            f"the receive slots of one rank take {format_bytes(need_bytes)} of {format_bytes(memory_bytes)}",
            (
                f"{placement.ranks} ranks × {tokens} tokens × {most} experts × {config.hidden} × {dtype.itemsize} B",
                f"{format_bytes(memory_bytes)} ({facts.fact('host.memory_bytes').source})",
            ),
            f'max_tokens_per_rank = {max(1, tokens * memory_bytes // (2 * need_bytes))}   # or mode = "ht"',
        )


def _block_alignment(facts: Facts) -> Iterator[Trouble]:
    config, dtype = config_of(facts), dtype_in(facts)
    if config.expert_elements is None or dtype is None:
        return
    block_bytes = config.expert_elements * dtype.itemsize
    if block_bytes % PAGE_BYTES:
        padded = -(-block_bytes // PAGE_BYTES) * PAGE_BYTES // dtype.itemsize
        yield Trouble(
            f"one expert is {block_bytes} B, no multiple of 2 MiB: blocks laid end to end share pages, "
            "and each registration covers part of its neighbour",
            at(facts, "expert_elements", "dtype"),
            f"expert_elements = {padded}   # {padded - config.expert_elements} elements of padding",
        )


def _registration_cache(facts: Facts) -> Iterator[Trouble]:
    config = config_of(facts)
    if config.expert_elements is not None and config.ep_mr_cache_size < config.num_experts:
        yield Trouble(
            f"{config.num_experts} expert blocks pass in turn through a cache of {config.ep_mr_cache_size}: "
            "each is evicted before it is used again",
            at(facts, "ep_mr_cache_size", "num_experts"),
            f"ep_mr_cache_size = {max(256, 1 << (4 * config.num_experts - 1).bit_length())}",
        )


def _deadlines(facts: Facts) -> Iterator[Trouble]:
    config = config_of(facts)
    for name in ("init_deadline_s", "deadline_s"):
        value = getattr(config, name)
        if value == float("inf"):
            yield Trouble(f"{name} is infinite: a rank that never comes is never named", at(facts, name))
        elif value < MIN_DEADLINE_S:
            yield Trouble(f"{name} of {value:g} s: a rank that starts a little late counts as lost", at(facts, name))


def _nccl_ep_limits(facts: Facts) -> Iterator[Trouble]:
    config = config_of(facts)
    placement = placement_in(facts)
    if placement is None:
        return
    counts = {len(experts) for experts in placement.experts_of_rank}
    tokens = config.max_tokens_per_rank or 0
    limits = {
        "the same number of experts on every rank": len(counts) > 1 or config.num_experts % placement.ranks != 0,
        "top_k of at most 32": config.top_k > 32,
        "in mode ht at most 8192 tokens per rank": config.mode == "ht" and tokens > 8192,
        "in mode ll, max_tokens_per_rank × experts per rank divisible by 4": config.mode == "ll"
        and any(tokens * count % 4 for count in counts),
    }
    broken = [rule for rule, is_broken in limits.items() if is_broken]
    if broken:
        yield Trouble(
            f"NCCL EP would refuse this shape; it wants {'; '.join(broken)}",
            (*at(facts, "num_experts", "top_k", "mode", "max_tokens_per_rank"), ranks_at(facts)),
        )


def _layout(facts: Facts) -> Iterator[Trouble]:
    config = config_of(facts)
    layouts = LAYOUTS[config.mode]
    if config.row_layout not in layouts:
        yield Trouble(
            f"mode {config.mode} has no layout {config.layout}; it has {', '.join(layouts)}",
            at(facts, "mode", "layout"),
            f'layout = "{layouts[0]}"',
        )


_NCCL_EP = "https://github.com/NVIDIA/nccl-extensions (nccl_ep, README and RELEASE notes)"

CHECKS = (
    Check(
        code="EP001",
        title="top_k is within the number of experts",
        severity="error",
        needs=("ep.config",),
        judge=_top_k,
        why="A token chooses top_k different experts; there are only num_experts.",
        by_hand="compare top_k and num_experts in the configuration with the model's card",
        remedy="set top_k to the model's value",
        reference="ncclep_bench.EpConfig",
    ),
    Check(
        code="EP002",
        title="The experts can be placed on the ranks",
        severity="error",
        needs=("ep.config", "ep.ranks"),
        judge=_placement,
        why="Every expert needs a rank, every listed rank must exist, and equal blocks need num_experts divisible by "
        "the ranks. Ranks that compute different offsets from such a shape hang in their first dispatch.",
        by_hand="divide num_experts by the number of ranks",
        remedy='placement = "uneven"',
        reference="ncclep_bench.EpConfig; failure reports: deepseek-ai/DeepEP#208",
    ),
    Check(
        code="EP003",
        title="Every rank has a fair share of the experts",
        severity="warning",
        needs=("ep.config", "ep.ranks"),
        judge=_idle_or_crowded,
        why="A collective ends when its slowest rank ends: ranks without experts idle while the fullest one receives.",
        by_hand="count the experts that the placement lists for each rank",
        remedy='placement = "uneven"   # sizes differ by at most one; or fewer ranks',
        reference="ncclep_bench.EpConfig",
    ),
    Check(
        code="EP004",
        title="Mode ll knows its capacity",
        severity="warning",
        needs=("ep.config",),
        judge=_ll_capacity,
        why="Slots are sized from max_tokens_per_rank. Ranks that derive different capacities address different slots "
        "and wait for each other without any error; a batch above the capacity is refused in the middle of a run.",
        by_hand="find the largest batch that any rank dispatches",
        remedy="max_tokens_per_rank = 128   # the largest batch of any rank, the same everywhere",
        reference="failure reports: deepseek-ai/DeepEP#208, deepseek-ai/DeepEP#165",
    ),
    Check(
        code="EP005",
        title="The slots of mode ll fit the machine",
        severity="error",
        needs=("ep.config", "ep.ranks", "host.memory_bytes"),
        judge=_ll_memory,
        why="Mode ll reserves room for the worst case: every token of every rank on every local expert.",
        by_hand="ranks × max_tokens_per_rank × experts per rank × hidden × bytes of one element, against `free -b`",
        remedy='mode = "ht"',
        reference="ncclep_bench.EpConfig",
    ),
    Check(
        code="EP006",
        title="Expert blocks are multiples of 2 MiB",
        severity="warning",
        needs=("ep.config",),
        judge=_block_alignment,
        why="Memory is registered in whole 2 MiB pages. A block that ends inside one makes two registrations overlap, "
        "and costs the alignment of every block after it.",
        by_hand="expert_elements × bytes of one element, modulo 2097152",
        remedy="pad expert_elements up to the next 2 MiB",
        reference="scenario registration-cache measures the cost",
    ),
    Check(
        code="EP007",
        title="The registration cache holds one round of experts",
        severity="warning",
        needs=("ep.config",),
        judge=_registration_cache,
        why="The cache drops the least recently used entry. Blocks used in turn, one more than it holds, never hit.",
        by_hand="compare ep_mr_cache_size with num_experts; reports have hits, misses and evictions",
        remedy="ep_mr_cache_size = 256",
        reference="scenario registration-cache sweeps the size",
    ),
    Check(
        code="EP008",
        title="Deadlines can tell a late rank from a lost one",
        severity="warning",
        needs=("ep.config",),
        judge=_deadlines,
        why="A rank with another configuration, or none at all, is named when the deadline passes: never, if it is "
        "infinite, and wrongly, if it is shorter than a normal start.",
        by_hand="read init_deadline_s and deadline_s",
        remedy="init_deadline_s = 30.0\ndeadline_s = 60.0",
        reference="ncclep_bench.EpConfig",
    ),
    Check(
        code="EP009",
        title="The shape is one that NCCL EP takes",
        severity="info",
        needs=("ep.config", "ep.ranks"),
        judge=_nccl_ep_limits,
        why="NCCL EP refuses some shapes that this package runs; a comparison would be waived.",
        by_hand="compare with the limits in NCCL EP's release notes",
        remedy="change the shape, or leave backend nccl_ep out of the comparison",
        reference=_NCCL_EP,
    ),
    Check(
        code="EP010",
        title="The mode has the layout",
        severity="warning",
        needs=("ep.config",),
        judge=_layout,
        why="Fixed slots (ll) are addressed by expert or by source rank; exact sizes (ht) pack rows flat or by expert. "
        "A dispatch in any other layout is waived.",
        by_hand="read mode and layout in the configuration; without layout the mode's own is used",
        remedy='layout = "expert_major"   # both modes have it',
        reference="ncclep_bench.EpConfig",
    ),
)
