from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ncclep_bench.errors import UsageError
from ncclep_bench.runtime import shared_memory
from ncclep_bench.runtime.processes import process_state
from ncclep_bench.runtime.shared_memory import (
    SEGMENT_ALIGNMENT,
    ControlBlock,
    ControlHandle,
    LocalBarrier,
    Mapping,
    NotEnoughSharedMemoryError,
    PeerAbortedError,
    SharedFile,
    SharedFileHandle,
    free_memory_bytes,
    free_shm_bytes,
    shm_directory,
)

PAGE = os.sysconf("SC_PAGESIZE")


def maps() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(shm_directory()) in line]


@pytest.fixture
def tiny_tmpfs(tmp_path):
    """A shared memory directory of 4 MiB, the size of the docker default in small."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs: needs root")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_a_file_is_zeros_in_whole_huge_pages_and_has_no_name():
    before = set(shm_directory().iterdir())
    file = SharedFile.create(5, "a test")
    mapping = Mapping.of(file)

    assert file.nbytes == SEGMENT_ALIGNMENT == mapping.array.nbytes
    assert mapping.array.ctypes.data % SEGMENT_ALIGNMENT == 0
    assert not mapping.array.any()
    assert set(shm_directory().iterdir()) <= before
    file.close()


@pytest.mark.parametrize("loses_tmpfile", [False, True])
def test_a_killed_process_leaves_nothing_behind(loses_tmpfile):
    program = (
        "import os, signal\n"
        "from ncclep_bench.runtime import shared_memory as shm\n"
        + ("os.O_TMPFILE = 0\n" if loses_tmpfile else "")
        + "file = shm.SharedFile.create(1, 'a test')\n"
        "mapping = shm.Mapping.of(file)\n"
        "mapping.array[:] = 1\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    before = set(shm_directory().iterdir())
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert done.returncode == -signal.SIGKILL, done.stderr
    assert {path for path in set(shm_directory().iterdir()) - before if path.name.startswith("ncclep-")} == set()


def test_the_handle_travels_as_json_and_opens_the_same_memory():
    file = SharedFile.create(1, "a test")
    again = SharedFile.open(SharedFileHandle(*json.loads(json.dumps(file.handle))))
    mine, theirs = Mapping.of(file), Mapping.of(again)
    mine.array[12345] = 7

    assert theirs.array[12345] == 7


def test_a_handle_of_a_closed_or_reused_descriptor_or_of_a_dead_process_does_not_open():
    file = SharedFile.create(1, "a test")
    handle = file.handle
    file.close()
    with pytest.raises(OSError, match="No such file"):
        SharedFile.open(handle)
    reused = SharedFile.create(1, "another")
    assert reused.handle.fd == handle.fd
    with pytest.raises(OSError, match="is another file"):
        SharedFile.open(handle)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with pytest.raises(OSError, match="No such file"):
        SharedFile.open(reused.handle._replace(pid=ended.pid))


def test_too_large_a_file_is_refused_with_the_sum_before_anything_is_allocated(tiny_tmpfs, monkeypatch):
    monkeypatch.setenv("NCCLEP_SHM_DIR", str(tiny_tmpfs))
    free = free_shm_bytes()
    with pytest.raises(NotEnoughSharedMemoryError) as caught:
        SharedFile.create(5 << 20, "the window of rank 3")

    assert caught.value.message == (
        f"the window of rank 3 needs 6 MiB ({6 << 20} bytes), {tiny_tmpfs} has 4 MiB ({4 << 20} bytes) free"
    )
    assert free_shm_bytes() == free == 4 << 20


def test_a_tmpfs_that_fills_up_meanwhile_is_the_same_error_and_not_a_bus_error(tiny_tmpfs, monkeypatch):
    monkeypatch.setenv("NCCLEP_SHM_DIR", str(tiny_tmpfs))
    first = SharedFile.create(2 << 20, "a test")
    before = len(os.listdir("/proc/self/fd"))
    # What another rank sees that looked before the first file was there.
    monkeypatch.setattr(shared_memory, "free_shm_bytes", lambda: 4 << 20)
    with pytest.raises(NotEnoughSharedMemoryError, match="a test needs"):
        SharedFile.create(4 << 20, "a test")
    monkeypatch.undo()

    assert len(os.listdir("/proc/self/fd")) == before
    assert os.statvfs(tiny_tmpfs).f_bavail * os.statvfs(tiny_tmpfs).f_frsize == 2 << 20
    first.close()


def test_more_than_the_memory_of_the_machine_is_refused():
    with pytest.raises(NotEnoughSharedMemoryError, match="bytes\\) free"):
        SharedFile.create(1 << 50, "a test")


def test_the_smallest_limit_of_the_control_groups_above_counts(tmp_path):
    def group(path: str, **entries: str) -> None:
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
        for name, value in entries.items():
            (tmp_path / path / name.replace("__", ".")).write_text(value)

    group("jobs", memory__max="1000\n", memory__current="400\n", memory__stat="anon 1\ninactive_file 50\n")
    group("jobs/step", memory__max="max\n", memory__current="300\n", memory__stat="inactive_file 0\n")
    group("memory/v1", memory__limit_in_bytes="5000\n", memory__usage_in_bytes="6000\n", memory__stat="cache 1\n")
    own = tmp_path / "own"

    own.write_text("0::/jobs/step\n")
    assert shared_memory._control_group_rooms(tmp_path, own) == [650]
    own.write_text("5:cpu:/x\n3:cpuset,memory:/v1/elsewhere\n")
    assert shared_memory._control_group_rooms(tmp_path, own) == [0]
    own.write_text("0::/the/hosts/path\n")
    assert shared_memory._control_group_rooms(tmp_path, own) == []
    assert 0 < free_memory_bytes() <= os.sysconf("SC_PHYS_PAGES") * PAGE


def test_files_lie_side_by_side_and_can_be_replaced_and_cleared():
    mapping = Mapping.reserve(3, SEGMENT_ALIGNMENT)
    files = [SharedFile.create(1, "a test") for _ in range(3)]
    for number, file in enumerate(files):
        Mapping.of(file).array[:] = number + 1
        mapping.place(number, file)
    everything = mapping.array
    assert [int(everything[SEGMENT_ALIGNMENT * place]) for place in range(3)] == [1, 2, 3]
    assert len(maps()) == 3

    mapping.place(1, files[2])
    assert mapping.slot(1)[-1] == 3
    mapping.clear(1)
    assert len(maps()) == 2
    mapping.place(1, files[0])
    assert everything[SEGMENT_ALIGNMENT] == 1
    mapping.touch()


def test_a_smaller_file_leaves_nothing_of_the_larger_one_it_replaces():
    large, small = SharedFile.create(2 * SEGMENT_ALIGNMENT, "a test"), SharedFile.create(1, "a test")
    mapping = Mapping.reserve(2, 2 * SEGMENT_ALIGNMENT)
    mapping.place(0, large)
    mapping.place(0, small)
    mapping.touch(0)

    sizes = [line.split()[0].split("-") for line in maps()]
    assert [int(end, 16) - int(start, 16) for start, end in sizes] == [SEGMENT_ALIGNMENT]


def test_what_does_not_fit_a_mapping_is_refused():
    file = SharedFile.create(2 * SEGMENT_ALIGNMENT, "a test")
    mapping = Mapping.reserve(1, SEGMENT_ALIGNMENT)
    with pytest.raises(UsageError, match="does not fit a place"):
        mapping.place(0, file)
    with pytest.raises(UsageError, match="place 1 of 1"):
        mapping.clear(1)
    with pytest.raises(UsageError, match="not whole pages"):
        Mapping.reserve(1, 100)
    mapping.close()
    with pytest.raises(UsageError, match="closed"):
        mapping.place(0, SharedFile.create(1, "a test"))


def test_touching_maps_every_page_and_changes_none():
    file = SharedFile.create(1, "a test")
    Mapping.of(file).array[:] = 9
    mapping = Mapping.reserve(2, SEGMENT_ALIGNMENT)
    mapping.place(1, file)
    mapping.touch()

    smaps = Path("/proc/self/smaps").read_text()
    resident = smaps[smaps.index(f"{mapping.slot(1).ctypes.data:x}-") :].split("Rss:")[1].split()[0]
    assert int(resident) == SEGMENT_ALIGNMENT >> 10
    assert (mapping.slot(1) == 9).all()


def test_a_view_keeps_its_memory_after_close_and_its_end_unmaps_it():
    file = SharedFile.create(1, "a test")
    mapping = Mapping.of(file)
    view = mapping.array.view(np.float32).reshape(2, -1)[1, 5:10]
    view[:] = 3
    mapping.close()
    mapping.close()
    file.close()
    assert view.tolist() == [3.0] * 5
    assert len(maps()) == 1

    del view
    gc.collect()
    assert maps() == []


def test_five_hundred_cycles_leave_descriptors_mappings_and_memory_as_they_were():
    def cycle() -> None:
        file = SharedFile.create(1, "a test")
        again = SharedFile.open(file.handle)
        mapping = Mapping.reserve(2, SEGMENT_ALIGNMENT)
        mapping.place(1, again)
        mapping.slot(1)[:] = 1
        block = ControlBlock.create(0)
        peer = ControlBlock.open(block.handle)
        LocalBarrier([block], 0).wait(1, "itself")
        for thing in (peer, block, mapping, again, file):
            thing.close()

    def state() -> tuple[int, int, int, list[str]]:
        gc.collect()
        everything = Path("/proc/self/maps").read_text().count("\n")
        return len(os.listdir("/proc/self/fd")), everything, len(maps()), sorted(os.listdir(shm_directory()))

    cycle()
    before = state()
    for _ in range(500):
        cycle()
    after = state()
    # The allocator may grow its own mappings by one or two.
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1] <= before[1] + 2
    assert [name for name in after[3] if name.startswith("ncclep-")] == []


def test_forgotten_files_and_mappings_go_with_their_last_reference():
    before = len(os.listdir("/proc/self/fd"))
    Mapping.of(SharedFile.create(1, "a test"))
    ControlBlock.create(0)
    gc.collect()

    assert len(os.listdir("/proc/self/fd")) == before
    assert maps() == []


def test_peers_read_what_the_owner_publishes():
    block = ControlBlock.create(3)
    peer = ControlBlock.open(ControlHandle(*json.loads(json.dumps(block.handle))))
    block.publish(np.arange(6, dtype=np.int32).reshape(2, 3), offset=64)

    assert peer.rank == 3
    assert peer.peek(np.int32, (2, 3), offset=64).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(UsageError, match="do not fit"):
        block.publish(np.zeros(block.scratch.nbytes + 1, np.uint8))


def test_a_block_of_another_host_is_told_by_its_nonce():
    block = ControlBlock.create(3)

    with pytest.raises(OSError, match="is not rank 3"):
        ControlBlock.open(block.handle._replace(nonce="0" * 32))


def test_an_abort_message_is_cut_at_its_space_and_the_first_one_stays():
    block = ControlBlock.create(0)
    peer = ControlBlock.open(block.handle)
    assert peer.abort_message is None
    block.abort("ä" * 1000)
    block.abort("later")

    assert peer.abort_message == "ä" * 512
    with pytest.raises(PeerAbortedError, match=r"rank 0 .* gave up"):
        LocalBarrier([peer, ControlBlock.create(1)], 1).wait(20, "dispatch")


def test_slots_may_wrap_around():
    blocks = [ControlBlock.create(0), ControlBlock.create(1)]
    for block in blocks:
        block._words[0] = 0xFFFFFFFF
    blocks[1].arrive()
    LocalBarrier(blocks, 0).wait(5, "the wrap")

    assert blocks[0].epoch == 0


def test_the_state_of_a_process_is_told():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def becomes(state: str) -> bool:
        give_up_at = time.monotonic() + 10
        while process_state(child.pid) != state and time.monotonic() < give_up_at:
            time.sleep(0.01)
        return process_state(child.pid) == state

    try:
        assert process_state(os.getpid()) == "running"
        assert becomes("sleeping")
        child.send_signal(signal.SIGSTOP)
        assert becomes("stopped")
    finally:
        child.kill()
    assert becomes("zombie")
    child.wait()
    assert becomes("dead")
