"""What a communicator holds outside of Python's own memory, and how it is given back."""

from __future__ import annotations

from contextlib import ExitStack

from ncclep_bench.backends.host.session import HostSession
from ncclep_bench.ep.agreement import PatientGroup
from ncclep_bench.ep.engine import Engine, ExpertCalls, TokenCalls
from ncclep_bench.errors import UsageError
from ncclep_bench.runtime.world import MpiGroup


class Held:
    """Everything of one communicator that must be freed; does not know the communicator, and so can outlive it."""

    def __init__(self) -> None:
        self.group: MpiGroup | PatientGroup | None = None
        self.session: HostSession | None = None
        self.engine: Engine | None = None
        self.experts: dict[int, ExpertCalls] = {}
        self.tokens: set[TokenCalls] = set()

    def open_session(self, call: str) -> HostSession:
        """The session; raises UsageError naming `call` after the end."""
        if self.session is None:
            raise UsageError(f"{call}: the communicator has been destroyed")
        return self.session

    def open_engine(self, call: str) -> Engine:
        """What carries calls out; raises UsageError naming `call` after the end."""
        if self.engine is None:
            raise UsageError(f"{call}: the communicator has been destroyed")
        return self.engine

    def close_tokens(self, tokens: TokenCalls) -> None:
        """Free one handle, unless it has been freed already."""
        if tokens in self.tokens:
            self.tokens.remove(tokens)
            tokens.close()

    def free(self) -> None:
        """Free all, last made first, whatever fails on the way; local."""
        with ExitStack() as stack:
            if isinstance(self.group, MpiGroup):
                stack.callback(self.group.close)
            if self.session is not None:
                stack.callback(self.session.close)
            if self.engine is not None:
                stack.callback(self.engine.close)
            for experts in self.experts.values():
                stack.callback(experts.close)
            for tokens in self.tokens:
                stack.callback(tokens.close)
            if self.session is not None:
                # First of all, so that nobody waits for this rank while it waits for its device.
                stack.callback(self.session.abort, "it has destroyed the communicator")
        self.group = self.session = self.engine = None
        self.experts, self.tokens = {}, set()
