"""A job that its own rank 2 brings to a stand: `hang_ranks.py FAULT`, to be looked at from outside."""

from __future__ import annotations

import os
import signal
import sys
import time

from ncclep_bench.backends.host.session import HostSession
from ncclep_bench.runtime.world import world


def main(fault: str) -> None:
    group = world(60)
    session = HostSession(group, deadline_s=120)
    for step in range(1_000_000):
        session.sync("dispatch of case 7")
        if step == 20:
            os.write(1, b"ready\n")
            if fault == "dies":
                if group.rank == 2:
                    os._exit(0)
                group.barrier()
            elif group.rank == 2:
                if fault == "is stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif fault == "sleeps":
                    time.sleep(600)
                elif fault == "computes":
                    while True:
                        pass
        time.sleep(0.005)


if __name__ == "__main__":
    main(sys.argv[1])
