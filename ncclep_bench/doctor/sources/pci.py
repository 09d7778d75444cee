"""PCI devices and their access control, from sysfs."""

from __future__ import annotations

from collections.abc import Iterator

from ncclep_bench.doctor.machine import AbsentError, Machine, Reading
from ncclep_bench.doctor.records import Acs, PciDevice

FOLDER = "/sys/bus/pci/devices"

_KEPT_CLASSES = ("0x02", "0x03", "0x0680", "0x12")
"""Network, display and 3D, bridges that are no PCI bridges (NVSwitch), accelerators."""
_PCI_BRIDGE = "0x0604"
_EXTENDED, _ACS_ID = 0x100, 0x000D
_FLAGS = ("SrcValid", "TransBlk", "ReqRedir", "CmpltRedir", "UpstreamFwd", "EgressCtrl", "DirectTrans")
"""Bits of the access control register, the lowest first."""


def devices(machine: Machine) -> Reading:
    """Adapters, GPUs and switches, with the speed that their link has and could have."""
    return _reading([device for device in _devices(machine) if device.class_code.startswith(_KEPT_CLASSES)])


def access_control(machine: Machine) -> Reading:
    """The access control register of every PCI bridge that has one; only root may read that far."""
    import msgspec

    bridges = [device for device in _devices(machine) if device.class_code.startswith(_PCI_BRIDGE)]
    virtual = " hypervisor" in machine.words("/proc/cpuinfo")
    found, shut = [], []
    for bridge in bridges:
        config = machine.data(f"{FOLDER}/{bridge.address}/config")
        register = _access_control_register(config)
        if register is not None:
            on = [flag for bit, flag in enumerate(_FLAGS) if register >> bit & 1]
            title = f"PCI bridge: {bridge.vendor}:{bridge.device}"
            found.append(Acs(at=bridge.at, device=bridge.address, title=title, on=on, virtual=virtual))
        elif len(config) <= 64:
            shut.append(bridge.address)
    if shut and not found:
        raise AbsentError(
            f"the configuration of {len(shut)} bridges ends after 64 bytes for this user; root may read access control",
            f"{FOLDER}/*/config",
            "not_permitted",
        )
    if not found:
        raise AbsentError("no PCI bridge with access control", f"{FOLDER}/*/config")
    return Reading(msgspec.to_builtins(found), f"{FOLDER}/*/config")


def _reading(found: list[PciDevice]) -> Reading:
    import msgspec

    return Reading(msgspec.to_builtins(found), FOLDER)


def _devices(machine: Machine) -> Iterator[PciDevice]:
    for address in machine.names(FOLDER):
        folder = f"{FOLDER}/{address}"
        class_code = machine.words(f"{folder}/class")
        if not class_code.startswith((*_KEPT_CLASSES, _PCI_BRIDGE)):
            continue
        node = machine.words(f"{folder}/numa_node")
        yield PciDevice(
            at=folder,
            address=address,
            vendor=machine.words(f"{folder}/vendor"),
            device=machine.words(f"{folder}/device"),
            class_code=class_code,
            numa_node=int(node) if node.isdecimal() else None,
            **{
                f"{which}_link_{what}": machine.words(f"{folder}/{which}_link_{what}")
                for which in ("current", "max")
                for what in ("speed", "width")
            },
        )


def _access_control_register(config: bytes) -> int | None:
    """The control register in a configuration space, found by walking its extended capabilities."""
    offset = _EXTENDED
    for _ in range(64):  # a damaged list may lead in a circle
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == _ACS_ID and len(config) >= offset + 8:
            return int.from_bytes(config[offset + 6 : offset + 8], "little")
        offset = header >> 20
        if offset < _EXTENDED:
            return None
    return None
