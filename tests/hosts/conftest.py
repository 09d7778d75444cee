"""Hosts made of network namespaces, each with its own shared memory, name and boot id, on switches of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_MTUS = ("1500", "9000")
_ENTER = """\
#!/bin/sh
# enter NAME COMMAND...: the command on that host
name=$1; shift
exec ip netns exec "$name" unshare --ipc --uts --mount sh -c '
    mount -t tmpfs -o size=1g tmpfs /dev/shm
    mount --bind "$0/$1.boot_id" /proc/sys/kernel/random/boot_id
    hostname "${1##*-}"
    shift
    exec "$@"
' '{folder}' "$name" "$@"
"""
_AGENT = """\
#!/bin/sh
# What MPICH's launcher takes for ssh: agent -x ADDRESS COMMAND
while [ "${{1#-}}" != "$1" ]; do shift; done
address=$1; shift
exec '{enter}' "$(cat '{folder}'/"$address")" sh -c "$*"
"""


class Hosts:
    """Some hosts, `host0` and so on, on two switches: eth0 (MTU 1500) for launchers and eth1 (MTU 9000) for data."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.prefix = f"ncclep{uuid.uuid4().hex[:8]}"
        self.names = [f"{self.prefix}-host{number}" for number in range(count)]
        self.switches = [f"{self.prefix}-switch{number}" for number in range(len(_MTUS))]
        self.addresses = [f"10.77.0.{number + 1}" for number in range(count)]
        self._enter, self._agent = folder / "enter", folder / "agent"

    def build(self) -> None:
        self._enter.write_text(_ENTER.replace("{folder}", str(self.folder)))
        self._agent.write_text(_AGENT.format(enter=self._enter, folder=self.folder))
        for script in (self._enter, self._agent):
            script.chmod(0o755)
        for switch, mtu in zip(self.switches, _MTUS, strict=True):
            _run("ip", "netns", "add", switch)
            _run("ip", "-n", switch, "link", "add", "br0", "mtu", mtu, "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "br0", "up")
        for number, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            (self.folder / f"{name}.boot_id").write_text(f"{uuid.uuid4()}\n")
            (self.folder / address).write_text(name)
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            for network, (switch, mtu) in enumerate(zip(self.switches, _MTUS, strict=True)):
                port, interface = f"port{number}", f"eth{network}"
                peer = ("peer", "name", interface, "mtu", mtu, "netns", name)
                _run("ip", "-n", switch, "link", "add", port, "mtu", mtu, "type", "veth", *peer)
                _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
                _run("ip", "-n", name, "link", "set", interface, "up")
                _run("ip", "-n", name, "addr", "add", f"10.{77 + network}.0.{number + 1}/24", "dev", interface)

    def destroy(self) -> None:
        """End what runs on the hosts, and take them away with their interfaces."""
        for name in (*self.names, *self.switches):
            self._kill(name)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def set_mtu(self, host: int, mtu: int) -> None:
        """The MTU of a host's data interface."""
        _run("ip", "-n", self.names[host], "link", "set", "eth1", "mtu", str(mtu))

    def set_switch_mtu(self, mtu: int) -> None:
        """The MTU of the ports of the data switch."""
        for number in range(len(self.names)):
            _run("ip", "-n", self.switches[1], "link", "set", f"port{number}", "mtu", str(mtu))

    def use_six(self, mtu: int | None = None) -> None:
        """IPv6 in place of IPv4 on the data network; with an MTU, through a router that sends no more to host 1."""
        switch = self.switches[1]
        if mtu is not None:
            _run("ip", "netns", "exec", switch, "sysctl", "-qw", "net.ipv6.conf.all.forwarding=1")
        for number, name in enumerate(self.names):
            network = 0 if mtu is None else number
            _run("ip", "-n", name, "addr", "flush", "dev", "eth1")
            _run("ip", "-n", name, "addr", "add", f"fd78:{network}::{number + 1}/64", "dev", "eth1", "nodad")
            if mtu is not None:
                _run(
                    "ip", "-n", switch, "link", "set", f"port{number}", "nomaster", "mtu", str(mtu if number else 9000)
                )
                _run("ip", "-n", switch, "addr", "add", f"fd78:{network}::99/64", "dev", f"port{number}", "nodad")
                _run("ip", "-n", name, "route", "add", "default", "via", f"fd78:{network}::99")

    def drop_on_the_way(self, rule: str) -> None:
        """Let the data switch drop what a rule of nft matches, without a word."""
        chain = f"chain way {{\n type filter hook forward priority 0;\n {rule} drop\n }}"
        text = f"table bridge faulty {{\n {chain}\n}}\n"
        _run("ip", "netns", "exec", self.switches[1], "nft", "-f", "-", text=text)

    def sent_bytes(self, host: int) -> int:
        """What has left a host over its interfaces."""
        total = 0
        for interface in ("eth0", "eth1"):
            told = _run("ip", "-n", self.names[host], "-s", "-j", "link", "show", interface)
            total += json.loads(told.stdout)[0]["stats64"]["tx"]["bytes"]
        return total

    def mpiexec(self, ranks_per_host: int = 2) -> list[str]:
        """The launcher that starts ranks on the hosts one after the other, `-n` and a command to follow."""
        mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or "mpiexec"
        listed = ",".join(f"{address}:{ranks_per_host}" for address in self.addresses)
        return [mpiexec, "-launcher", "ssh", "-launcher-exec", str(self._agent), "-hosts", listed]

    def run(self, *command: str, host: int = 0, deadline_s: float = 240.0) -> subprocess.CompletedProcess[str]:
        """Run a command on a host and wait for it; past the deadline all hosts are emptied and the test fails."""
        process = subprocess.Popen(
            [str(self._enter), self.names[host], *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={name: value for name, value in os.environ.items() if not name.startswith(("PMI", "NCCL_", "UCX_"))},
        )
        try:
            stdout, stderr = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            self._empty()
            stdout, stderr = process.communicate()
            pytest.fail(f"{shlex.join(command)} did not end within {deadline_s:g} s\n{stdout}\n{stderr}")
        finally:
            self._empty()
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    def _empty(self) -> None:
        for name in self.names:
            self._kill(name)

    def _kill(self, name: str) -> None:
        told = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True)
        for pid in told.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _run(*command: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"
    return done


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator[Callable[[int], Hosts]]:
    """`make_hosts(count)`: that many hosts, taken away after the test, also when it fails."""
    with contextlib.ExitStack() as held:

        def make(count: int) -> Hosts:
            folder = tmp_path / "hosts"
            folder.mkdir()
            hosts = Hosts(folder, count)
            held.callback(hosts.destroy)
            hosts.build()
            return hosts

        yield make


@pytest.fixture
def hosts(make_hosts: Callable[[int], Hosts]) -> Hosts:
    """Two hosts."""
    return make_hosts(2)


@pytest.fixture
def doctor() -> Callable[..., tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]]:
    """`doctor(hosts, *options)`: what four ranks of `ncclep-doctor check`, two on each of two hosts, find."""

    def check(hosts: Hosts, *options: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
        program = [
            sys.executable,
            "-m",
            "ncclep_bench.doctor_cli",
            "check",
            "--format",
            "json",
            "--deadline",
            "60",
            *options,
        ]
        done = hosts.run(*hosts.mpiexec(), "-n", str(2 * len(hosts.names)), *program)
        assert done.stdout.startswith("{"), done.stderr
        return done, json.loads(done.stdout[: done.stdout.rindex("}") + 1])["findings"]

    return check
