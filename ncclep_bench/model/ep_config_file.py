"""An EpConfig kept in a TOML file."""

from __future__ import annotations

from pathlib import Path

from ncclep_bench.model.ep_config import EpConfig
from ncclep_bench.model.toml_file import convert, load_toml


def load_ep_config(path: Path) -> EpConfig:
    """The EpConfig in the top level of a TOML file; raises InputError naming file, key, value and what is allowed."""
    return convert(load_toml(path), EpConfig, file=str(path))
