"""Measures, verifies and explains the expert-parallel communication of Mixture-of-Experts models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ncclep_bench.ep.communicator import EpCommunicator
    from ncclep_bench.model.ep_config import EpConfig
    from ncclep_bench.results.frames import load_run

    __version__: str

__all__ = ["EpCommunicator", "EpConfig", "__version__", "load_run"]

# Lazy, because `--help` must not pay for pandas or MPI.
_EXPORTS = {
    "EpCommunicator": "ncclep_bench.ep.communicator",
    "EpConfig": "ncclep_bench.model.ep_config",
    "load_run": "ncclep_bench.results.frames",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("ncclep-bench")
        except PackageNotFoundError:
            return "0+source"
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
