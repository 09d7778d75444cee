"""What a GPU model is built to have, so that a link which is dark by design is no fault."""

from __future__ import annotations

import re
from typing import NamedTuple


class Profile(NamedTuple):
    """How many NVLinks a model has, how many are in use by design, and whether they always lead somewhere.

    `link_gbytes` is the nominal rate of one link in one direction, in 10⁹ bytes per second; of a model without links
    that of its PCIe, 0 where it says little.
    """

    pattern: str
    links: int
    used: int
    soldered: bool
    link_gbytes: float

    @property
    def peer_gbytes(self) -> float | None:
        """What one GPU sends to all others together, in 10⁹ bytes per second; None where no figure is known."""
        return max(self.used, 1) * self.link_gbytes or None


PROFILES = (
    Profile(r"H100 NVL|H200 NVL", 18, 12, False, 25),
    Profile(r"\bH800\b(?!.*PCIe)", 18, 8, True, 25),
    Profile(r"\bA800\b(?!.*PCIe)", 12, 8, True, 25),
    Profile(r"A100.*(?:SXM|HGX)", 12, 12, True, 25),
    Profile(r"(?:B100|B200|B300).*SXM|^NVIDIA (?:B200|B300|GB200|GB300)\b", 18, 18, True, 50),
    Profile(r"(?:H100|H200|H20|GH200).*(?:SXM|HBM3)|^NVIDIA (?:H200|H20)\b", 18, 18, True, 25),
    Profile(r"V100.*SXM", 6, 6, True, 25),
    Profile(r"P100.*SXM", 4, 4, True, 20),
    Profile(r"H100 PCIe|A100.*PCIe", 0, 0, False, 25),
    Profile(r"PCIe|PCI-E|A40|A6000|A10|L40|L4\b|T4|RTX|A30", 0, 0, False, 0),
)
"""First match counts; a name in none of the rows is an unknown model, of which nothing is expected."""


def profile_of(name: str) -> Profile | None:
    """The profile of a GPU with this product name, or None for an unknown model."""
    return next((profile for profile in PROFILES if re.search(profile.pattern, name, re.IGNORECASE)), None)


def is_tray(name: str) -> bool:
    """Whether the model sits in a compute tray whose NVLink switches, and their manager, are in trays of their own."""
    return re.search(r"\bGB[23]00\b", name) is not None
