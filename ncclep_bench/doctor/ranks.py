"""The doctor in every rank of a job: each reads its facts, rank 0 gathers them, and nobody waits for a silent rank.

`python -m ncclep_bench.doctor.ranks` is such a rank, started by `check --np`.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import msgspec

from ncclep_bench.doctor.answers import answering, documents_of, facts_of_rank
from ncclep_bench.doctor.interviews import Ask, Interviews, Own, Reply
from ncclep_bench.doctor.records import Answer
from ncclep_bench.errors import CannotRunError
from ncclep_bench.model.facts import Facts
from ncclep_bench.runtime.neighbours import claim, job_here, leave, neighbours
from ncclep_bench.runtime.path_mtu import Responder
from ncclep_bench.runtime.processes import lives, unlink_own_segments
from ncclep_bench.runtime.world import Post, abort, environment_sizes

MODULE = "ncclep_bench.doctor.ranks"

# Shares of the deadline: hosts that have answered by the first are probed, then the rest of it is for naming.
_HELLO_SHARE, _GATHER_SHARE, _NAMING_SHARE = 0.4, 0.85, 0.95
_JUDGING_S = 300.0
# Launchers end everybody with the first rank that leaves, and each host has its own to say at the same deadline.
_OTHER_HOSTS_S = 2.0
_LEAVE_S = 10.0
_POLL_S = 0.02


class RankGroup:
    """This rank among those of its job; gathering begins at once.

    `documents` gives the facts of all on the rank that reports, which then calls `finish`, and None on the others,
    which then call `follow`.
    """

    def __init__(self, config: Path | None, ranks: int | None, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._begin = time.monotonic()
        self._own = facts_of_rank(config, ranks)
        leave(self._own.to_json())
        self._post: Post | None = None
        self._gathered, self._judged = threading.Event(), threading.Event()
        self._documents: list[Facts] | None = None
        self._complete = False
        self._code = 1
        self._error: Exception | None = None
        self._speaker: int | None = None
        # MPI waits without a deadline, at its start in particular; whoever has one must not be the one who waits.
        self._thread = threading.Thread(target=self._talk, daemon=True)
        self._thread.start()

    def documents(self) -> list[Facts] | None:
        """The facts of every rank, by number, on the rank that reports; None elsewhere.

        That is rank 0, or when nothing comes from it within the deadline the first rank of each host, for its host.
        """
        size, local_size = environment_sizes()
        self._gathered.wait(max(self._at(1.0) - time.monotonic(), 0.0))
        if self._gathered.is_set() and self._error is None:
            return self._documents
        while self._error is not None and time.monotonic() < self._at(1.0):
            if sum(n.left is not None for n in neighbours()) >= (local_size or size or 1):
                break
            time.sleep(_POLL_S)
        found = neighbours()
        speakers = [n.rank for n in found if n.left is not None and lives(n.pid)]
        if speakers[:1] != [self._own.rank]:
            self._speaker = next((n.pid for n in found if n.rank in speakers[:1]), None)
            return None
        # Another may have looked while this rank was not to be seen yet.
        if not claim(job_here()):
            return None
        seconds = round(time.monotonic() - self._begin, 1)
        documents = documents_of(found, size if size == local_size else None, seconds)
        if self._error or all(facts.read("job.answer", Answer).answered for facts in documents):
            unanswered = Answer(False, os.getpid(), seconds, self._awaits())
            documents = [answering(f, unanswered) if f.rank == self._own.rank else f for f in documents]
        return documents

    def finish(self, code: int) -> int:
        """Leave with the exit code of the report, all ranks together. Where ranks are silent, it ends them and this."""
        if not self._complete:
            self._give_up(code)
        self._code = code
        self._judged.set()
        self._thread.join(_LEAVE_S)
        return code

    def follow(self) -> int:
        """Wait for the rank that reports; the exit code it gives. Where none does, this process ends."""
        if self._error or not self._gathered.is_set():
            self._wait_for_the_speaker()
            self._give_up(1)
        self._judged.wait(_JUDGING_S)
        self._thread.join(_LEAVE_S)
        return self._code

    def _wait_for_the_speaker(self) -> None:
        # When it leaves it ends the others, if it can.
        until = time.monotonic() + _LEAVE_S
        while time.monotonic() < until and (lives(self._speaker) if self._speaker else not claim(job_here())):
            time.sleep(_POLL_S)

    def _give_up(self, code: int) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        unlink_own_segments()
        size, local_size = environment_sizes()
        if size is None or size != local_size:
            time.sleep(_OTHER_HOSTS_S)
        if self._post is not None:
            abort(code)
        os._exit(code)

    def _awaits(self) -> str:
        if self._error is not None:
            return f"cannot use MPI: {self._error}"
        if self._post is None:
            return "waits for MPI to start, which waits for ranks of other hosts"
        return "waits for rank 0"

    def _at(self, share: float) -> float:
        return self._begin + share * self._deadline_s

    def _talk(self) -> None:
        try:
            post = Post()
            size = environment_sizes()[0]
            if size not in (None, post.size):
                raise CannotRunError(
                    f"the launcher started {size} ranks, but MPI sees {post.size}: they are of different makes"
                )
            self._post = post
            with Responder() as responder:
                ours = Own(self._own, responder)
                self._lead(post, ours) if post.rank == 0 else self._follow(post, ours)
            post.close()
        except Exception as error:
            self._error = error
            self._gathered.set()

    def _lead(self, post: Post, own: Own) -> None:
        interviews = Interviews(post, own)
        interviews.run(self._at(_HELLO_SHARE))
        interviews.probe(self._at(_GATHER_SHARE))
        interviews.run(self._at(_GATHER_SHARE))
        interviews.name_the_silent(self._at(_NAMING_SHARE))
        self._documents = interviews.documents(time.monotonic() - self._begin)
        self._complete = not interviews.silent()
        unlink_own_segments()
        interviews.tell_all(Ask("rest"))
        self._gathered.set()
        self._judged.wait()
        interviews.tell_all(Ask("end", number=self._code))

    def _follow(self, post: Post, own: Own) -> None:
        post.send(0, msgspec.msgpack.encode(Reply(0, msgspec.msgpack.encode(own.hello))))
        while True:
            message = post.wait(time.monotonic() + _JUDGING_S)
            if message is None:
                return
            ask = msgspec.msgpack.decode(message[1], type=Ask)
            if ask.what == "rest":
                unlink_own_segments()
                self._gathered.set()
            elif ask.what == "end":
                self._code = ask.number
                self._judged.set()
                return
            else:
                post.send(0, msgspec.msgpack.encode(Reply(ask.serial, own.answer(ask))))


def main() -> None:
    """Be one rank: the one that reports prints the facts of all, in one line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mark", required=True)
    parser.add_argument("--deadline", type=float, required=True)
    parser.add_argument("--config", type=Path)
    arguments = parser.parse_args()
    group = RankGroup(arguments.config, None, arguments.deadline)
    documents = group.documents()
    if documents is None:
        sys.exit(group.follow())
    sys.stdout.buffer.write(arguments.mark.encode() + msgspec.json.encode(documents) + b"\n")
    sys.exit(group.finish(0))


if __name__ == "__main__":
    main()
