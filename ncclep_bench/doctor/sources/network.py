"""Interfaces, routes and how the kernel answers for addresses."""

from __future__ import annotations

import ipaddress

from ncclep_bench.doctor.machine import AbsentError, Machine, Reading, printed_by
from ncclep_bench.doctor.records import NetDevice, Route

_ROUTES = "/proc/net/route"
_CONF = "/proc/sys/net/ipv4/conf"
_SYSCTLS = ("arp_ignore", "arp_announce", "rp_filter")
_UP, _GATEWAY = 1, 2


def devices(machine: Machine) -> Reading:
    """Interfaces as `ip addr` prints them; where there is no `ip`, with the networks that the route table joins."""
    try:
        return printed_by(["ip", "addr"], "network", "network.devices")(machine)
    except AbsentError:
        return _from_files(machine)


def routes(machine: Machine) -> Reading:
    """The main table of IPv4."""
    import msgspec

    return Reading(msgspec.to_builtins(_routes(machine)), _ROUTES)


def sysctls(machine: Machine) -> Reading:
    """What is set for each interface and for `all`; the kernel heeds the larger of the two."""
    found = {}
    for name in machine.names(_CONF):
        values = {key: machine.words(f"{_CONF}/{name}/{key}") for key in _SYSCTLS}
        found[name] = {key: int(value) for key, value in values.items() if value.isdecimal()}
    return Reading(found, _CONF)


def _routes(machine: Machine) -> list[Route]:
    found = []
    for number, line in enumerate(machine.text(_ROUTES).splitlines()[1:], 2):
        cells = line.split()
        if len(cells) < 8 or not int(cells[3], 16) & _UP:
            continue
        network = ipaddress.ip_network(f"{_address(cells[1])}/{_address(cells[7])}", strict=False)
        gateway = _address(cells[2]) if int(cells[3], 16) & _GATEWAY else ""
        found.append(Route(at=f"{_ROUTES}:{number}", device=cells[0], network=str(network), gateway=gateway))
    return found


def _address(text: str) -> str:
    """The kernel prints an address as the number that its bytes are in memory."""
    return str(ipaddress.IPv4Address(int(text, 16).to_bytes(4, "little")))


def _from_files(machine: Machine) -> Reading:
    import msgspec

    folder = "/sys/class/net"
    try:
        routes = [route for route in _routes(machine) if not route.gateway]
    except OSError:
        routes = []
    found = []
    for name in machine.names(folder):
        mtu, flags = machine.words(f"{folder}/{name}/mtu"), machine.words(f"{folder}/{name}/flags", "0x0")
        if not mtu.isdecimal():
            continue
        networks = [route.network for route in routes if route.device == name]
        found.append(
            NetDevice(
                at=f"{folder}/{name}", name=name, mtu_bytes=int(mtu), up=bool(int(flags, 16) & _UP), networks=networks
            )
        )
    if not found:
        raise AbsentError("no interface", folder)
    return Reading(msgspec.to_builtins(found), f"{folder}, {_ROUTES}")
