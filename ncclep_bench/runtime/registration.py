"""Registrations of a user's buffers, the least recently used of which go first (S2)."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Registered = TypeVar("Registered")


class RegistrationCache(Generic[Registered]):
    """What has been registered for buffers, by key; `count(counter, amount)` hears of hits, misses and evictions.

    `acquire` keeps what it gives until `release`, which drops what exceeds `capacity`: nothing goes while peers use it.
    A capacity of 0 registers anew at every call. What was acquired `for_good` stays, beside the capacity, until it is
    not to be used again. Dropped registrations are returned, for the owner to undo.
    """

    def __init__(self, capacity: int, count: Callable[[str, float], None]) -> None:
        self._capacity, self._count = capacity, count
        self._held: OrderedDict[Hashable, Registered] = OrderedDict()
        self._for_good: set[Hashable] = set()

    def acquire(self, key: Hashable, register: Callable[[], Registered], *, for_good: bool = False) -> Registered:
        """The registration of `key`, made by `register` if there is none; what that raises counts as nothing."""
        registered = self._held.get(key)
        missed = registered is None
        if registered is None:
            start = time.perf_counter_ns()
            registered = register()
            self._count("mr_miss_total_us", (time.perf_counter_ns() - start) / 1e3)
        self._count("mr_hits", not missed)
        self._count("mr_misses", missed)
        self._held[key] = registered
        self._held.move_to_end(key)
        if for_good:
            self._for_good.add(key)
        return registered

    def drop(self, unwanted: Callable[[Registered], bool]) -> list[Registered]:
        """Drop what is not to be used again."""
        keys = [key for key, registered in self._held.items() if unwanted(registered)]
        if keys:
            self._count("mr_evictions", len(keys))
        self._for_good -= set(keys)
        return [self._held.pop(key) for key in keys]

    def release(self) -> list[Registered]:
        """Drop the least recently used beyond the capacity."""
        keys = [key for key in self._held if key not in self._for_good]
        excess = max(0, len(keys) - self._capacity)
        if self._held:
            self._count("mr_evictions", excess)
        return [self._held.pop(key) for key in keys[:excess]]

    def clear(self) -> list[Registered]:
        """Drop everything, which counts as no eviction."""
        dropped = list(self._held.values())
        self._held.clear()
        self._for_good.clear()
        return dropped
