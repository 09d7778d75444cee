"""One group's GPUs: peers' memory at equal offsets, kernels, a barrier on the devices, faults that they report."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ncclep_bench.backends.cuda.staging import Staging, StagingOf, staging_of, this_host
from ncclep_bench.errors import CannotRunError, RankError, UsageError
from ncclep_bench.native.loader import Launch, Launcher
from ncclep_bench.runtime.device_contract import Device
from ncclep_bench.runtime.group import Group
from ncclep_bench.runtime.nccl import Part
from ncclep_bench.runtime.world import MpiGroup

Array = npt.NDArray[Any]

_STATE_WORDS = 3
_PEER_LATE, _EXPERT_OUT_OF_RANGE, _OTHER_TOKENS = 1, 2, 3
_ALIGNMENT, _LARGE_ALIGNMENT = 256, 2 << 20
_WORD_BYTES = 16
_ALWAYS = 2**64 - 1


class Heap:
    """Memory of this rank that peers have mapped: named parts, at the same offsets on all ranks.

    For a peer out of reach this rank has an outbox, memory of its own laid out like the peer's. Kernels write there as
    they would to the peer; whoever launches them sends it on. They need not know: of such a peer every flag is set for
    good, and who launches them sees to it that what they read has come.
    """

    def __init__(
        self,
        device: Device,
        group: Group,
        parts: dict[str, int],
        *,
        out_of_reach: Collection[int] = (),
        flags: dict[str, int] | None = None,
        not_in_outbox: str | None = None,
    ) -> None:
        """Collective; `parts`: bytes of each part, the same on all ranks. All zero at first.

        `flags`: parts that are [any][ranks][so many] flags. `not_in_outbox`: the last part, when no outbox needs it.
        """
        self._device, self._rank = device, group.rank
        self.offset: dict[str, int] = {}
        total = 0
        for name, nbytes in parts.items():
            # The copy engines lose a quarter of their speed on large blocks that begin anywhere.
            alignment = _ALIGNMENT if nbytes < _LARGE_ALIGNMENT else _LARGE_ALIGNMENT
            self.offset[name] = -(-total // alignment) * alignment
            total = self.offset[name] + nbytes
        self.nbytes = -(-max(total, 1) // _ALIGNMENT) * _ALIGNMENT
        self._peers = [rank for rank in range(group.size) if rank != group.rank and rank not in out_of_reach]
        self._allocated = [own := device.allocate(self.nbytes)]
        outbox_bytes = self.offset[not_in_outbox] if not_in_outbox else self.nbytes
        try:
            for name, words in (flags or {}).items():
                if not out_of_reach or parts[name] == 0:
                    continue
                set_flags = np.zeros(parts[name] // 8, np.uint64)
                set_flags.reshape(-1, group.size, words)[:, list(out_of_reach)] = _ALWAYS
                device.write(own + self.offset[name], set_flags)
            outboxes = {rank: device.allocate(outbox_bytes) for rank in sorted(out_of_reach)}
            self._allocated += outboxes.values()
            self.addresses = device.share(own, self.nbytes, group, self._peers)
        except BaseException:
            self._free()
            raise
        for rank, address in outboxes.items():
            self.addresses[rank] = address

    def address(self, name: str, rank: int | None = None) -> int:
        """Where this process sees a part of its own memory, or of a peer's, or of the outbox for that peer."""
        return self.addresses[self._rank if rank is None else rank] + self.offset[name]

    def close(self) -> None:
        """Unmap the peers' memory and free this rank's; peers that still map it keep it alive. May be called twice."""
        self._device.unshare([self.addresses[rank] for rank in self._peers])
        self._peers = []
        self._free()

    def _free(self) -> None:
        while self._allocated:
            self._device.free(self._allocated.pop())


class CudaSession:
    """Device, kernels and control words of one rank; collective to create.

    `blocks`: how many a kernel has that uses all that it may, `num_sms` or the whole device; `bulk_bytes`: shared
    memory of each for bulk copies, 0 where a rank's device has none. Both are the same on all ranks.
    `out_of_reach`: ranks on other hosts or without peer access; `staging` carries what goes there, and is None where
    every rank reaches every other. `transport`: "messages" puts everybody out of reach, with "shared" a rank that is
    raises CannotRunError on all. A device waits `deadline_s` for a peer, then its kernels end and `check` raises
    RankError naming it. `defines`: as Launcher takes them.
    """

    def __init__(
        self,
        group: Group,
        device: Device,
        *,
        num_sms: int | None = None,
        deadline_s: float = 10.0,
        transport: str = "shared",
        host: str | None = None,
        staging_of: StagingOf = staging_of,
        defines: Sequence[str] = (),
    ) -> None:
        self.group, self.device, self.deadline_s = group, device, deadline_s
        self.rank, self.size = group.rank, group.size
        self.out_of_reach = frozenset[int]()
        self.staging: Staging | None = None
        tables = self._reached(transport, host or this_host())
        if any(len(table) < self.size for table in tables):
            self.out_of_reach = frozenset(range(self.size)) - tables[self.rank]
            if transport == "shared":
                rank = min(range(self.size), key=lambda rank: len(tables[rank]))
                raise CannotRunError(
                    f"rank {rank} cannot map the memory of ranks {sorted(set(range(self.size)) - tables[rank])}",
                    hint="this needs one host and peer access, which nvidia-smi topo -p2p w shows; "
                    'the cuda backend does without them when transport is "auto"',
                )
            self.staging = staging_of(group, device, deadline_s)
        # Blocks of the same number meet, so every rank must have as many.
        own = min(device.blocks, num_sms or device.blocks)
        offers = [list(map(int, data.split())) for data in group.allgather(f"{own} {device.bulk_bytes}".encode())]
        self.blocks = min(blocks for blocks, _ in offers)
        self.bulk_bytes = min(bulk_bytes for _, bulk_bytes in offers)
        # An operation that may use some multiprocessors alone holds none for the one after it.
        self.launcher = Launcher(device, defines, early=self.blocks == device.blocks)
        group.barrier()
        self._owned: list[int] = []
        self._heaps: list[Heap] = []
        self._scopes = weakref.WeakSet[CudaSession]()
        self._told = device.host_array(24).view(np.uint64)
        self._told[:] = 0
        self.fault = self.upload(np.array([0, 0, self._told.ctypes.data], np.uint64))
        parts = dict.fromkeys(("ready_flags", "done_flags"), 8 * self.size)
        self._heap = self.heap(parts, flags=dict.fromkeys(parts, 1))
        self._meetings = self.new_state()
        self.meet_neighbours = self.meeting()
        self._words = self.allocate(_WORD_BYTES * self.size) if self.staging else 0

    def _reached(self, transport: str, host: str) -> list[set[int]]:
        """Whom every rank reaches, itself among them; two ranks reach each other or neither does."""
        hosts = self.group.allgather(host.encode())
        neighbours = (
            set() if transport == "messages" else {peer for peer in range(self.size) if hosts[peer] == host.encode()}
        )
        reached = self.device.reachable(neighbours - {self.rank}, self.group)
        tables = [set(data) for data in self.group.allgather(bytes(reached | {self.rank}))]
        return [{peer for peer in table if rank in tables[peer]} for rank, table in enumerate(tables)]

    def heap(self, parts: dict[str, int], *, flags: dict[str, int], not_in_outbox: str | None = None) -> Heap:
        """Memory that peers reach, with outboxes for the others; collective, arguments as Heap takes them."""
        heap = Heap(
            self.device,
            self.group,
            parts,
            out_of_reach=self.out_of_reach,
            flags=flags,
            not_in_outbox=not_in_outbox,
        )
        self._heaps.append(heap)
        return heap

    def scope(self) -> CudaSession:
        """This session for one of its users, whose memory `release` frees; the session's end does at the latest."""
        scope = copy.copy(self)
        scope._owned, scope._heaps = [], []
        self._scopes.add(scope)
        return scope

    def release(self) -> None:
        """Free what has been allocated through this scope; waits for this rank's device alone."""
        for heap in self._heaps:
            heap.close()
        for address in self._owned:
            self.device.free(address)
        self._heaps, self._owned = [], []

    def meet(self) -> None:
        """A meeting of all devices: what their streams held before is done."""
        self.meet_neighbours()
        own = self._words + _WORD_BYTES * self.rank
        self.exchange(
            [Part(peer, own, _WORD_BYTES) for peer in sorted(self.out_of_reach)],
            [Part(peer, self._words + _WORD_BYTES * peer, _WORD_BYTES) for peer in sorted(self.out_of_reach)],
            "a meeting of the ranks",
        )

    def meeting(self, **others: int) -> Launch:
        """One kernel for ranks in reach to meet in, with `others` for some of its arguments."""
        arguments = self.block_arguments(self._heap, self._meetings) | others
        return self.launch("meet", arguments, blocks=1, threads=32)

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part], operation: str) -> int:
        """Bytes sent to ranks out of reach; nothing where there is none. As Staging.exchange."""
        return 0 if self.staging is None else self.staging.exchange(sends, receives, operation)

    def agree(self, data: bytes, operation: str) -> list[bytes]:
        """Everybody's `data`; raises RankError naming who does not come, where the group can tell."""
        if isinstance(self.group, MpiGroup):
            return self.group.allgather(data, self.deadline_s, operation)
        return self.group.allgather(data)

    def allocate(self, nbytes: int) -> int:
        """Zeroed memory of this rank alone, freed with the session."""
        return self.own(self.device.allocate(max(nbytes, 16)))

    def own(self, address: int) -> int:
        """The address of memory that is freed with the session."""
        self._owned.append(address)
        return address

    def new_state(self) -> int:
        """Memory for what a kernel keeps between launches: the struct State and an epoch per block."""
        return self.allocate(8 * (_STATE_WORDS + self.blocks))

    def upload(self, array: Array) -> int:
        """Memory of this rank alone with a copy of `array`."""
        address = self.allocate(array.nbytes)
        self.device.write_unused(address, array)
        return address

    def launch(
        self,
        kernel: str,
        arguments: dict[str, Any],
        *,
        blocks: int | None = None,
        threads: int | None = None,
        shared_bytes: int = 8,
    ) -> Launch:
        """A launch over the whole device, unless told otherwise."""
        return self.launcher.prepare(
            kernel, arguments, blocks or self.blocks, threads or self.device.threads, shared_bytes
        )

    def block_arguments(self, heap: Heap, state: int) -> dict[str, Any]:
        """Arguments of kernels over blocks of parameters, without any block."""
        return {
            "heaps": heap.addresses,
            "rank": self.rank,
            "ranks": self.size,
            "ready_flags_at": heap.offset["ready_flags"],
            "done_flags_at": heap.offset["done_flags"],
            "block_vecs": 0,
            "chunk_vecs": 1,
            "blocks": 0,
            "copies": 0,
            "terms": 0,
            "sums": 0,
            "crossing_vecs": 0,
            "counted": 0,
            "state": state,
            "fault": self.fault,
            "deadline_ns": int(self.deadline_s * 1e9),
        }

    def state(self, address: int) -> tuple[int, int]:
        """Launches done, and rows (or vectors) moved between ranks, of a kernel's state; waits for the device."""
        words = np.zeros(_STATE_WORDS, dtype=np.uint64)
        self.device.read(address, words)
        return int(words[0]), int(words[1])

    def check(self) -> None:
        """Raise what the device has reported, after waiting for it."""
        self.device.synchronize()
        self.check_told()

    def check_told(self) -> None:
        """Raise what the device has reported so far."""
        code, rank, value = self._told.tolist()
        if code == _PEER_LATE:
            raise RankError(
                f"rank {self.rank}: rank {rank} did not reach launch {value} within {self.deadline_s:g} s",
                ranks=(rank,),
                hint="it died, hangs, or did not make the same call",
            )
        if code == _EXPERT_OUT_OF_RANGE:
            expert = int(np.uint64(value).astype(np.int64))
            raise UsageError(
                f"rank {self.rank}: topk_idx names expert {expert}", hint="allowed: the experts of the case, or -1"
            )
        if code == _OTHER_TOKENS:
            raise UsageError(
                f"rank {self.rank}: a call was for another number of tokens than the last update, {value}",
                hint="a graph holds for the tokens with which it was captured: call update before it or after it",
            )

    def close(self) -> None:
        """Free everything; waits for this rank's device alone."""
        if self.staging is not None:
            self.staging.close()
        for scope in (*self._scopes, self):
            scope.release()
