"""The doctor across two hosts: paths that do not carry what their ends send are found, and both ends are named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.hosts.conftest import Hosts

pytestmark = [pytest.mark.hosts, pytest.mark.mpi]

Check = Callable[..., tuple[Any, list[dict[str, Any]]]]


def amiss(findings: list[dict[str, Any]], *codes: str) -> list[dict[str, Any]]:
    return [f for f in findings if f["verdict"] in ("warning", "error") and (not codes or f["code"] in codes)]


def verdicts(findings: list[dict[str, Any]], code: str) -> set[str]:
    return {finding["verdict"] for finding in findings if finding["code"] == code}


def test_two_healthy_hosts_give_nothing(hosts: Hosts, doctor: Check):
    before = hosts.sent_bytes(0)
    done, findings = doctor(hosts, "--select", "EP3", "--select", "NET2", "--select", "LIM2", "--select", "NCCL2")

    assert done.returncode == 0
    assert amiss(findings) == []
    # And it has looked: packets of the full size were sent, by ranks of both hosts.
    assert verdicts(findings, "NET203") == {"ok"}
    assert {(f["rank"], f["host"]) for f in findings if f["code"] == "EP300"} == {
        (0, "host0"),
        (1, "host0"),
        (2, "host1"),
        (3, "host1"),
    }
    assert hosts.sent_bytes(0) - before > 9000


def test_hosts_whose_interfaces_have_different_mtus_are_both_named(hosts: Hosts, doctor: Check):
    hosts.set_mtu(1, 1500)
    done, findings = doctor(hosts)
    (odd,) = amiss(findings, "NET202", "NET203")

    assert done.returncode == 1
    assert (odd["code"], odd["verdict"]) == ("NET202", "error")
    assert "9000 on eth1 of host0" in odd["summary"]
    assert "1500 on eth1 of host1" in odd["summary"]


def test_a_path_that_silently_drops_large_packets_is_found_with_both_ends_and_the_size(hosts: Hosts, doctor: Check):
    hosts.drop_on_the_way("ip length > 4000")
    done, findings = doctor(hosts)
    there, back = amiss(findings, "NET202", "NET203")

    assert done.returncode == 1
    assert [odd["verdict"] for odd in (there, back)] == ["error", "error"]
    assert there["summary"].startswith(
        "from eth1 of host0 (10.78.0.1) to eth1 of host1 (10.78.0.2) packets over 4000 B vanish"
    )
    assert back["summary"].startswith("from eth1 of host1 (10.78.0.2) to eth1 of host0 (10.78.0.1)")
    assert verdicts(findings, "EP300") == {"ok"}


def test_a_path_that_drops_in_one_direction_is_found_in_that_direction(hosts: Hosts, doctor: Check):
    hosts.drop_on_the_way("ip saddr 10.78.0.2 ip length > 1500")
    _, findings = doctor(hosts)
    (odd,) = amiss(findings, "NET202", "NET203")

    assert odd["summary"].startswith("from eth1 of host1 (10.78.0.2) to eth1 of host0 (10.78.0.1) packets over 1500 B")


def test_a_narrow_switch_between_wide_ends_is_found(hosts: Hosts, doctor: Check):
    hosts.set_switch_mtu(1500)
    _, findings = doctor(hosts)
    odd = amiss(findings, "NET202", "NET203")

    assert [f["code"] for f in odd] == ["NET203", "NET203"]
    # Ethernet takes four bytes more, as a VLAN tag needs them.
    assert all("packets over 1504 B vanish" in f["summary"] or "over 1500 B" in f["summary"] for f in odd)


def test_over_ipv6_healthy_hosts_give_nothing_and_full_packets_were_sent(hosts: Hosts, doctor: Check):
    hosts.use_six()
    before = hosts.sent_bytes(0)
    done, findings = doctor(hosts, "--select", "NET2")

    assert done.returncode == 0
    assert amiss(findings) == []
    assert verdicts(findings, "NET203") == {"ok"}
    assert hosts.sent_bytes(0) - before > 9000


def test_over_ipv6_a_path_that_silently_drops_large_packets_is_found(hosts: Hosts, doctor: Check):
    hosts.use_six()
    hosts.drop_on_the_way("ip6 length > 3960")  # which leaves out the header
    _, findings = doctor(hosts, "--select", "NET203")
    there, back = amiss(findings)

    assert there["verdict"] == "error"
    assert there["summary"].startswith(
        "from eth1 of host0 (fd78::1) to eth1 of host1 (fd78::2) packets over 4000 B vanish"
    )
    assert back["summary"].startswith("from eth1 of host1 (fd78::2) to eth1 of host0 (fd78::1) packets over 4000 B")


def test_what_an_ipv6_router_says_is_too_big_is_told_as_it_says(hosts: Hosts):
    hosts.use_six(mtu=4000)
    check = [sys.executable, "-m", "ncclep_bench.doctor_cli", "check", "--format", "json", "--select", "NET203"]
    done = hosts.run(*hosts.mpiexec(1), "-n", "2", "env", "NCCL_SOCKET_IFNAME=eth1", *check)
    findings = json.loads(done.stdout[: done.stdout.rindex("}") + 1])["findings"]
    there = amiss(findings)[0]

    assert there["verdict"] == "warning"
    assert there["summary"].startswith(
        "from eth1 of host0 (fd78::1) to eth1 of host1 (fd78:1::2) 4000 B fit, and routers say so"
    )


def test_where_a_firewall_stops_all_probes_the_path_is_not_called_faulty(hosts: Hosts, doctor: Check):
    hosts.drop_on_the_way("ip protocol udp")
    _, findings = doctor(hosts)

    assert amiss(findings, "NET202", "NET203") == []
    assert verdicts(findings, "NET203") == {"info"}


def test_a_rank_that_is_stopped_on_another_host_is_named_by_those_who_see_it(hosts: Hosts):
    check = [sys.executable, "-m", "ncclep_bench.doctor_cli", "check", "--select", "EP300", "--deadline", "12"]
    stopped = ["-n", "1", "sh", "-c", "kill -STOP $$"]
    done = hosts.run(*hosts.mpiexec(), "-n", "2", *check, ":", *stopped, ":", "-n", "1", *check, deadline_s=240)

    assert done.returncode != 0
    assert "rank 2 on host1 did not answer within" in done.stdout
    assert "it is stopped" in done.stdout
    assert "waits for MPI to start, which waits for ranks of other hosts" in done.stdout


def test_the_doctor_starts_ranks_on_both_hosts_itself(hosts: Hosts):
    launcher = " ".join(hosts.mpiexec())
    check = [sys.executable, "-m", "ncclep_bench.doctor_cli", "check", "--select", "EP3", "--select", "NET203"]
    done = hosts.run(*check, "--np", "4", "--launcher", launcher, "--format", "json")
    findings = json.loads(done.stdout)["findings"]

    assert done.returncode == 0
    assert amiss(findings) == []
    assert [f["host"] for f in findings if f["code"] == "EP300"] == ["host0", "host0", "host1", "host1"]
    assert verdicts(findings, "NET203") == {"ok"}
