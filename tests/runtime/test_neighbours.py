"""What ranks of one host tell each other without MPI."""

from __future__ import annotations

import subprocess
import sys
import uuid

from ncclep_bench.runtime.neighbours import claim, job_here

CLAIMS = "import sys; from ncclep_bench.runtime.neighbours import claim; print(claim(sys.argv[1]), flush=True); input()"


def test_a_name_is_one_process_s_until_it_ends() -> None:
    name = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, "-c", CLAIMS, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        assert not claim(name)
        assert claim(uuid.uuid4().hex)
        other.kill()
    assert claim(name)
    assert not claim(name)


def test_processes_of_one_launcher_have_one_name_for_their_job() -> None:
    # Variables of a rank, so that this process is the launcher of both.
    command = [sys.executable, "-c", "from ncclep_bench.runtime.neighbours import job_here; print(job_here())"]
    names = {
        subprocess.run(command, env={"PMI_RANK": rank, "PMI_SIZE": "2"}, capture_output=True, text=True).stdout
        for rank in "01"
    }
    assert names == {f"{job_here()}\n"}
