"""Probes of a path's MTU, over the loopback interface; tests/hosts has real paths between hosts."""

from __future__ import annotations

import pytest

from ncclep_bench.runtime.path_mtu import Fit, Interface, Path, Responder, interfaces, paths, probe


def interface(device: str, address: str, network: str, mtu_bytes: int = 9000) -> Interface:
    return Interface(device, address, network, mtu_bytes)


LOOP = interface("lo", "127.0.0.1", "127.0.0.0/8", 9000)
LOOP_SIX = interface("lo", "::1", "::1/128", 9000)


@pytest.mark.parametrize("loop", [LOOP, LOOP_SIX], ids=["IPv4", "IPv6"])
def test_the_full_size_passes_a_healthy_path(loop: Interface):
    with Responder() as responder:
        assert probe(Path(loop, loop), responder.port, responder.key, deadline_s=5) == Fit(9000, 9000)


@pytest.mark.parametrize("loop", [LOOP, LOOP_SIX], ids=["IPv4", "IPv6"])
def test_no_more_passes_than_the_interface_takes(loop: Interface):
    wide = Interface(loop.device, loop.address, loop.network, 65536 + 4000)  # of lo's 65536
    with Responder() as responder:
        fit = probe(Path(wide, wide), responder.port, responder.key, deadline_s=5)

    assert 9000 < fit.passed_bytes <= 65536


def test_a_responder_answers_only_those_who_know_its_key():
    with Responder() as responder:
        assert probe(Path(LOOP, LOOP), responder.port, b"another key, 16b", deadline_s=5) == Fit(9000, 0)


def test_a_responder_that_is_closed_answers_nobody():
    responder = Responder()
    responder.close()
    responder.close()

    assert probe(Path(LOOP, LOOP), responder.port, responder.key, deadline_s=5) == Fit(9000, 0)


def test_a_search_ends_at_its_deadline():
    with Responder() as responder, pytest.raises(TimeoutError):
        probe(Path(LOOP, LOOP), responder.port, b"another key, 16b", deadline_s=0.1)


def test_paths_join_interfaces_of_one_network_and_leave_out_addresses_that_both_have():
    ours = [interface("eth0", "10.0.0.1", "10.0.0.0/24"), interface("ib0", "10.1.0.1", "10.1.0.0/24")]
    theirs = [
        interface("eth9", "10.0.0.2", "10.0.0.0/24"),
        interface("ib0", "10.1.0.2", "10.1.0.0/24"),
        interface("br0", "10.0.0.1", "10.0.0.0/24"),
    ]

    assert paths(ours, theirs) == [Path(ours[0], theirs[0]), Path(ours[1], theirs[1])]


def test_hosts_without_a_common_network_have_the_path_that_routing_chooses():
    ours, theirs = [interface("eth0", "10.0.0.1", "10.0.0.0/31")], [interface("eth0", "10.0.0.3", "10.0.0.2/31")]

    assert paths(ours, theirs) == [Path(None, theirs[0])]
    assert paths(ours, [interface("eth0", "fd00::3", "fd00::/64"), *theirs]) == [Path(None, theirs[0])]


def test_the_loopback_interface_leads_nowhere():
    assert not {"127.0.0.1", "::1"} & {found.address for found in interfaces(lambda name: True)}
