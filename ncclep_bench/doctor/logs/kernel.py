"""Lines of the kernel log and of the fabric manager."""

from __future__ import annotations

from ncclep_bench.doctor.logs.contract import Family, signature

_SIGNATURES = (
    signature(
        "xid",
        "xid",
        r"NVRM: Xid \(PCI:(?P<gpu>[0-9a-f:.]+)\): (?P<xid>\d+)(?P<about>(?:.*?previous Xid (?P<previous>\d+))?.*)",
    ),
    signature("sxid", "xid", r"nvidia-nvswitch\w*:? .*SXid \(PCI:(?P<gpu>[0-9a-f:.]+)\): (?P<xid>\d+)(?P<about>.*)"),
    signature("peermem_context", "invalid context", r"nvidia.peermem.*detected invalid context.*"),
    signature("nothing_to_do", "nothing_to_do", r".*NV_WARN_NOTHING_TO_DO.*"),
    signature(
        "fabric_version",
        "mismatch",
        r".*fabric ?manager.*version.*(?:mismatch|does not match|don't match|not match).*",
    ),
    signature(
        "fabric_failed",
        "fabricmanager",
        r".*nv-?(?:idia-)?fabricmanager.*(?:failed|failure|fatal|could not|unable to).*",
        effect=True,
    ),
    signature("driver_mismatch", "mismatch", r"Driver/library version mismatch.*"),
    signature("no_driver", "nvidia driver", r"NVIDIA-SMI has failed because .*"),
    signature("link_down", "link down", r"mlx5_core (?P<device>\S+).*(?:Link down|link is down).*"),
)

LOGS = Family(
    ("nvrm:", " kernel: ", "nvidia-fabricmanager", "nvidia-nvswitch", "mlx5_core ", "nvidia-peermem "), _SIGNATURES
)
