"""Without personal details: nothing of them is left, what was equal stays equal, and the checks say the same."""

from __future__ import annotations

import ipaddress
import json
import os
import random
import re
import socket
import string
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ncclep_bench.doctor.anonymise import anonymised, anonymous
from ncclep_bench.doctor.compare import group_facts
from ncclep_bench.doctor.contract import Finding
from ncclep_bench.doctor.recorded import read_recorded
from ncclep_bench.doctor.run import all_checks, run_checks
from ncclep_bench.doctor_cli import main
from ncclep_bench.model.anonymous import Anonymous
from ncclep_bench.model.facts import Fact, Facts
from tests.doctor.rank_facts import RANKS_TRIGGERS, Ranks
from tests.doctor.recorded_texts import Recorded
from tests.doctor.test_checks import ALL_TRIGGERS, Fixture, each


def judged(documents: list[Facts]) -> list[Finding]:
    return [finding for facts in documents for finding in run_checks(all_checks(), facts)] + (
        run_checks(all_checks(), group_facts(documents)) if len(documents) > 1 else []
    )


def verdicts(documents: list[Facts]) -> list[tuple[str, str]]:
    return sorted((finding.code, finding.verdict) for finding in judged(documents))


@pytest.mark.parametrize(("_", "fixture"), each(ALL_TRIGGERS))
def test_the_checks_say_the_same_of_a_machine_without_its_details(
    _: str, fixture: Fixture | Recorded | Ranks, tmp_path: Path
) -> None:
    documents = fixture.documents() if isinstance(fixture, Ranks) else [fixture.facts(tmp_path)]

    assert verdicts(anonymised(documents, anonymous())) == verdicts(documents)


LABELS = st.from_regex(r"[a-z]{3,6}(-[a-z]{3,5})?(-?[1-9][0-9]{0,2})?", fullmatch=True)
HEX = "0123456789abcdef"


@st.composite
def details(draw: st.DrawFn) -> dict[str, Any]:
    """The details of one machine, none of which is a word of the documents, or part of another."""

    def digits(count: int) -> str:
        return draw(st.text(HEX, min_size=count, max_size=count))

    def octets(count: int) -> str:
        return ":".join(digits(2) for _ in range(count))

    host, user = draw(LABELS), draw(st.from_regex(r"[a-z]{3,8}[0-9]?", fullmatch=True))
    site = draw(st.from_regex("[a-z]{3,6}", fullmatch=True))
    words = {*host.rstrip("0123456789").split("-"), user.rstrip("0123456789"), site}
    assume(not words & vocabulary() and user not in f"{host}.{site}" and host not in user)
    return {
        "host": host,
        "full": f"{host}.{site}.example.org",
        "user": user,
        "four": str(draw(st.ip_addresses(network="23.0.0.0/8"))),
        "near": str(draw(st.ip_addresses(network="192.168.0.0/16"))),
        "six": str(draw(st.ip_addresses(network="2a00::/12"))),
        "hardware": f"e4:{octets(5)}",
        "bare_hardware": f"e4a0{digits(7)}1",
        "bare_gid": f"fe800000000000000e42{digits(12)}",
        "long_hardware": f"80:00:02:08:fe:80:{octets(14)}",
        "guid": f"0x0e42{digits(12)}",
        "gid": f"fe80:0000:0000:0000:0e42:{digits(4)}:{digits(4)}:{digits(4)}",
        "uuid": f"e{digits(7)}-{digits(4)}-{digits(4)}-{digits(4)}-{digits(12)}",
        "serial": draw(st.from_regex(r"1[0-9]{12}", fullmatch=True)),
        "key": draw(st.sampled_from(["hf_", "ghp_", "sk-", "sk-proj-", "glpat-", "nvapi-", "newco_", ""]))
        + "".join(draw(st.sampled_from(kind)) for kind in (string.ascii_letters, string.digits) * 14),
        "secret": draw(st.from_regex(r"[a-zA-Z]{4}[0-9]{12}zz", fullmatch=True)),
    }


def document(known: dict[str, Any]) -> Facts:
    """Each detail where tools write it: in keys, values, sources, reasons, paths, log lines and settings."""
    lines = [
        "{host}:4242:4311 [3] NCCL INFO Bootstrap : Using eth0:{four}<0>",
        "{host}:4242:4311 [3] NCCL WARN NET/IB : Got completion from peer {near}<41234> with status=12 localGid {gid}",
        "Call to connect from {full}<51234> failed, remote [{six}]:123, GPU-{uuid}",
        "{user}@{host}: /scratch/{user}/run_{user}.log HF_TOKEN={secret}",
        "pulling https://{user}:{key}@{full}/v2 with {key}, enx{bare_hardware} of {bare_hardware}, port {bare_gid}",
    ]
    events = [
        {"at": f"/home/{known['user']}/{known['host']}.log:{n}", "host": known["host"], "kind": "completion",
         "text": line.format_map(known), "fields": {"status": "12", "peer": known["near"]}}
        for n, line in enumerate(lines)
    ]  # fmt: skip
    sections = {
        "host": {"boot_id": Fact("value", "/proc/sys/kernel/random/boot_id", known["uuid"])},
        "job": {
            "settings": Fact("value", "environment, /home/{user}/.nccl.conf".format_map(known), [
                {"name": "NCCL_COMM_ID", "value": "{full}:1234".format_map(known), "source": "environment"},
                {"name": "NCCL_TOPO_FILE", "value": "/home/{user}/topo.xml".format_map(known), "source": "environment"},
                {"name": "VLLM_API_KEY", "value": known["secret"], "source": "environment"},
                {"name": "CUDA_VISIBLE_DEVICES", "value": "GPU-{uuid}".format_map(known), "source": "environment"},
            ])
        },
        "gpus": {"query": Fact("value", "nvidia-smi -q", [
            {"at": "q:1", "gpu": "0", "fields": {"serial number": known["serial"], "gpu uuid": "GPU-" + known["uuid"]}}
        ])},
        "rdma": {
            "gids": Fact("value", "ssh {user}@{host} show_gids".format_map(known), [
                {"at": f"{known['host']}:1", "host": known["host"], "device": "mlx5_0", "port": 1, "index": 0,
                 "gid": known["gid"], "kind": "v2"},
            ]),
            "ports": Fact(
                "failed", "/sys", reason="node {guid} {hardware} of {full}, {long_hardware}".format_map(known)
            ),
        },
        "network": {"devices": Fact("value", "ip addr", [
            {"at": "ip:1", "name": "eth0", "mtu_bytes": 1500, "up": True, "networks": [f"{known['near']}/24"]}
        ])},
        "log": {"nccl": Fact("value", "/home/{user}/{host}.log".format_map(known), events)},
        "other": {"by_host": Fact("value", "x", {known["host"]: [known["serial"]], known["near"]: known["full"]})},
    }  # fmt: skip
    return Facts(host=known["host"], rank=3, sections=sections)


def told(facts: Facts) -> str:
    """All that the document and its findings say, in lower case."""
    return facts.to_json().decode().lower() + str([msgspec.to_builtins(finding) for finding in judged([facts])]).lower()


@cache
def vocabulary() -> set[str]:
    """Words that are there whoever the machine belongs to."""
    names = (
        "host",
        "user",
        "four",
        "near",
        "six",
        "hardware",
        "long_hardware",
        "bare_hardware",
        "bare_gid",
        "guid",
        "gid",
        "uuid",
        "serial",
        "key",
    )
    nobody = dict.fromkeys(names, "0") | {"full": "0.0.example.org", "secret": "00000"}
    return set(re.findall("[a-z]+", told(document(nobody)))) | {"host", "user", "domain", "serial", "hidden", "db"}


@given(details())
@settings(max_examples=100, deadline=None)
def test_no_detail_is_left_anywhere_and_the_verdicts_are_those_of_the_original(known: dict[str, Any]) -> None:
    original = document(known)

    (neutral,) = anonymised([original], anonymous())

    said = told(neutral)
    for name, detail in known.items():
        assert not re.search(rf"(?<![a-z0-9]){detail.lower().removeprefix('0x')}(?![a-z0-9])", said), name
    assert verdicts([neutral]) == verdicts([original])
    assert set(neutral.sections) == set(original.sections)


@pytest.mark.parametrize("network", ["192.168.86.{}", "10.0.3.{}", "fd00::{:x}"])
def test_no_private_address_stays_itself(network: str) -> None:
    addresses = [network.format(number) for number in range(1, 255)]

    assert [address for address in addresses if Anonymous().text(address) == address] == []
    knows = Anonymous()
    assert len({knows.text(address) for address in addresses}) == len(addresses)


FOUR = st.ip_addresses(v=4)


@given(st.lists(FOUR, min_size=2, max_size=6), st.integers(1, 32))
@settings(max_examples=200, deadline=None)
def test_addresses_of_one_network_stay_in_one_and_others_apart(addresses: list[Any], length: int) -> None:
    knows = Anonymous()
    # Neighbours of the first one, which random addresses never are.
    base = int(addresses[0])
    addresses += [ipaddress.IPv4Address(base ^ 1 << bit) for bit in (0, 3, 8, 17)]

    neutral = [ipaddress.IPv4Address(knows.text(str(address))) for address in addresses]

    def kind(address: ipaddress.IPv4Address) -> tuple[bool, ...]:
        return (address.is_private, address.is_loopback, address.is_link_local, address.is_multicast)

    def same(one: ipaddress.IPv4Address, other: ipaddress.IPv4Address) -> bool:
        return int(one) >> (32 - length) == int(other) >> (32 - length)

    for one, renamed in zip(addresses, neutral, strict=True):
        if one.is_link_local or one.is_loopback or one.is_multicast:
            assert kind(renamed) == kind(one)
        for other, others_name in zip(addresses, neutral, strict=True):
            assert (renamed == others_name) == (one == other)
            if length >= 16 and int(one) >> 24 == int(other) >> 24:
                assert same(renamed, others_name) == same(one, other)


@pytest.mark.parametrize(
    ("text", "neutral"),
    [
        ("127.0.0.1 0.0.0.0 255.255.255.0 ::1 ::", "127.0.0.1 0.0.0.0 255.255.255.0 ::1 ::"),
        ("fe80::e42:a1ff:fe00:1%eth0", "fe80::200:ff:fe00:1%eth0"),
        ("0x0e42a1fffe000001 0e42:a1ff:fe00:0001", "0x020000fffe000001 0200:00ff:fe00:0001"),
        ("fe80:0000:0000:0000:0e42:a1ff:fe00:0001", "fe80:0000:0000:0000:0200:00ff:fe00:0001"),
        ("2001:4860::1, fd12:3456::9", None),
        ("ff:ff:ff:ff:ff:ff 00:02:C9:AA:BB:CC", "ff:ff:ff:ff:ff:ff 02:00:00:00:00:01"),
        ("c10::Error at 12:34:56 in std::vector, libcudnn.so.9.1.0.70", None),
        ("0000:19:00.0 driver 580.65.06", "0000:19:00.0 driver 580.65.06"),
        ("/home/root/x /home/ubuntu/y", "/home/root/x /home/ubuntu/y"),
        ("/home/jane/x by JANE", "/home/user-1/x by user-2"),
        ("/users/jane: password = hunter22", "/users/user-1: password = (hidden)"),
        ("CapEff 000001fffeffffff SigBlk:\tfffffffe7ffbbeff", "CapEff 000001fffeffffff SigBlk:\tfffffffe7ffbbeff"),
        ("at 0x00007f3b2c0a1000, gid:0xfe80000000000000", "at 0x00007f3b2c0a1000, gid:0xfe80000000000000"),
        ("max_tokens=128 token 4", "max_tokens=128 token 4"),
        ("bytes_per_token = 14336, --token 4096", "bytes_per_token = 14336, --token 4096"),
        ("{'password': 'hunter22', \"api_key\":\"k1234567\"}", "{'password': '(hidden)', \"api_key\":\"(hidden)\"}"),
        ("Authorization: Bearer 0123abcd --hf-token hf_abcd1", "Authorization: Bearer (hidden) --hf-token (hidden)"),
        ("password: 12345678; TOKEN='abc123'", "password: (hidden) TOKEN='(hidden)'"),
        ("https://jane:9lives@a.b/x", "https://user-1:(hidden)@a.b/x"),
        (
            "0c:42:a1:12:34:56 0c42a1123456 enx0c42a1123456 0c42.a112.3456",
            "02:00:00:00:00:01 020000000001 enx020000000001 0200.0000.0001",
        ),
        (
            "node 0x2c903000a1b2c, fe800000000000000e42a1fffeb2c3d4",
            "node 0x020000fffe000001, fe80000000000000020000fffe000002",
        ),
        (
            "e42a1000-b2c3-4d5e-8f60-718293a4b5c6 e42a1000b2c34d5e8f60718293a4b5c6",
            "00000001-0000-4000-8000-000000000000 00000001000040008000000000000000",
        ),
        (
            "commHash 0xc903000a1b2c4d5e commId 0xc903000a1b2c4d5e",
            "commHash 0x020000fffe000001 commId 0x020000fffe000001",
        ),
        *(
            (text, text)
            for text in (
                "NCCL 2.28.7 git 0c42a1b2c3d4, UCX revision 0c42a1b2c3d4, 2.28.7+0c42a1b2c3d4",
                "nvidia_nccl_cu13-2.28.7.1-py3-none-manylinux_2_18_x86_64.whl, srcversion 533BB7E5866E52F63B9ACCB",
                "busId 1b000 at 0x7f3b2c0a1000 [7f3b2c0a1b3e], Memory at 3c0000000000 (64-bit), 20251130123456",
                "_ZN2at6native6f32x4IfLi4EE3fooEv _Z18ncclDevKernel_AllReduce_Sum_bf16_RING_LL128",
                "sk-learn-is-a-long-hyphenated-name-2 hf_model_loader_for_something_v2 task-0123456789abcdef0123",
                "sk_ConvolutionForwardKernel, sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
            )
        ),
    ],
)
def test_a_detail_keeps_its_form_and_what_is_none_stays(text: str, neutral: str | None) -> None:
    knows = Anonymous()
    knows.learn(text)
    said = knows.text(text)

    if neutral is not None:
        assert said == neutral
    elif text.startswith("2001"):
        assert said.startswith("2001:db8:")
        assert ", fd" in said
    else:
        assert said == text


LETTERS, HEXADECIMAL, CAPITALS = string.ascii_letters, "0123456789abcdef", string.ascii_uppercase + "234567"


@pytest.mark.parametrize(
    ("prefix", "alphabet", "length"),
    [
        ("hf_", LETTERS, 34),
        ("ghp_", LETTERS + string.digits, 36),
        ("github_pat_", LETTERS + string.digits + "_", 82),
        ("glpat-", LETTERS + string.digits + "_-", 20),
        ("sk-", LETTERS + string.digits, 48),
        ("sk-", HEXADECIMAL, 32),
        ("sk-proj-", LETTERS + string.digits + "_-", 120),
        ("sk-or-v1-", HEXADECIMAL, 64),
        ("nvapi-", LETTERS + string.digits + "_-", 64),
        ("xoxb-123456789012-", LETTERS + string.digits, 24),
        ("AKIA", CAPITALS, 16),
        ("eyJhbGciOiJIUzI1NiJ9.eyJ", LETTERS, 40),
    ],
)  # fmt: skip
def test_a_key_that_stands_alone_is_known_by_how_it_begins(prefix: str, alphabet: str, length: int) -> None:
    draw = random.Random(length)
    for _ in range(50):
        key = "".join(draw.choice(alphabet) for _ in range(length))
        said = Anonymous().text(f"401 for {prefix}{key}: retrying")

        assert said.startswith("401 for ")
        assert said.endswith(": retrying")
        assert not [part for part in re.findall(r"\w{8,}", key) if part in said]


def test_machines_that_are_numbered_are_all_replaced_when_one_is_known() -> None:
    knows = Anonymous()
    knows.learn({"host": "gpu-07.cluster.example.org"})

    assert knows.text(
        "gpu-07 gpu-08 gpu-08.cluster.example.org nfs.cluster.example.org gpu-07.cluster.example.org"
    ) == ("host-1 host-2 host-2.domain-1 host-3.domain-1 host-1.domain-1")


def test_what_is_equal_in_several_documents_gets_the_same_name() -> None:
    ranks = next(iter(RANKS_TRIGGERS.values()))[0]

    neutral = anonymised(ranks.documents(), anonymous())

    names = dict(zip(ranks.hosts, (facts.host for facts in neutral), strict=True))
    assert len(set(names.values())) == len(set(ranks.hosts))
    assert [facts.host for facts in neutral] == [names[host] for host in ranks.hosts]


def doctor(*arguments: object, **env: str) -> str:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments], env=env, prog_name="ncclep-doctor")
    assert done.exit_code in (0, 1), done.output
    return done.output


def test_collect_and_check_tell_nothing_of_this_machine_and_its_user(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "jane"
    folder.mkdir(parents=True)
    (folder / "ep.toml").write_text("num_experts = 64\n")
    arguments = ("--anonymise", "--config", folder / "ep.toml", "--ranks", 7)
    env = {"NCCL_TOPO_FILE": "/data/jane/topo.xml", "VLLM_API_KEY": "hunter22", "USER": "jane"}

    facts = doctor("collect", *arguments, **env)
    findings = doctor("check", *arguments, "--format", "json", **env)

    for text in (facts, findings):
        for detail in ("jane", "hunter22", Path("/proc/sys/kernel/random/boot_id").read_text().strip()):
            assert detail not in text
        assert json.loads(text)["host"] == "host-1"
        assert "/home/user-1/ep.toml" in text
    assert socket.gethostname() not in [finding["host"] for finding in json.loads(findings)["findings"]]


def test_recorded_files_of_several_hosts_are_judged_without_their_names(tmp_path: Path) -> None:
    for number in (1, 2):
        facts = Facts(
            host=f"gpu-0{number}.example.org",
            rank=number,
            sections={"job": {"settings": Fact("value", "environment", [
                {"name": "NCCL_ALGO", "value": ["Ring", "Tree"][number - 1], "source": "environment"}
            ])}},
        )  # fmt: skip
        (tmp_path / f"{number}.json").write_bytes(facts.to_json())
    plain = json.loads(doctor("check", "--format", "json", "--from", tmp_path))
    neutral = doctor("check", "--format", "json", "--anonymise", "--from", tmp_path)

    assert "gpu-0" in str(plain)
    assert "gpu-0" not in neutral
    assert "example.org" not in neutral
    assert [(f["code"], f["verdict"]) for f in json.loads(neutral)["findings"]] == [
        (f["code"], f["verdict"]) for f in plain["findings"]
    ]
    assert "rank 2 on host-2" in neutral


NOISE = st.text(max_size=80) | st.lists(
    st.sampled_from(
        ["10.0.0.1", "fe80::1", "::", "0x", "e4:00", "/home/", "jane", "@", "-", ".", ":", "node7", "GPU-", "dead",
         "00000001-0000-4000-8000-000000000000", "token=", "<1234>", "\n", "\x00", "\ud800", "１", "é"]
    ),
    max_size=12,
).map("".join)  # fmt: skip


@given(st.recursive(NOISE | st.none() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(NOISE, inner)))
@settings(max_examples=300, deadline=None)
def test_nothing_that_a_stranger_writes_makes_it_fail(value: Any) -> None:
    facts = Facts(host="node7", sections={"other": {"noise": Fact("value", "s", value)}})

    (neutral,) = anonymised([facts], anonymous())

    assert (neutral.host, neutral.fact("other.noise").state) == ("host-1", "value")
    assert neutral.to_json()


def test_facts_that_are_nested_without_end_are_refused_in_two_lines(tmp_path: Path) -> None:
    nested: list[Any] = []
    for _ in range(900):
        nested = [nested]
    facts = Facts(host="a", sections={"x": {"y": Fact("value", "s", nested)}})
    (tmp_path / "facts.json").write_bytes(facts.to_json())
    done = CliRunner().invoke(main, ["check", "--anonymise", "--from", str(tmp_path / "facts.json")])

    assert done.exit_code == 2
    assert "nested too deeply" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_variable_that_is_no_text_does_not_keep_facts_from_being_written(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ncclep_bench.doctor_cli", "collect", "-o", str(tmp_path / "facts.json")],
        env={**os.environb, b"NCCL_DEBUG_FILE": b"/tmp/\xff"},
        check=False,
    )

    assert done.returncode == 0
    assert "/tmp/?" in (tmp_path / "facts.json").read_text()


def test_a_document_that_was_made_neutral_once_stays_as_it_is() -> None:
    once = anonymised(next(iter(RANKS_TRIGGERS.values()))[0].documents(), anonymous())

    assert [facts.host for facts in anonymised(once, anonymous())] == [facts.host for facts in once]


def test_a_secret_is_hidden_whether_details_are_wanted_or_not(tmp_path: Path) -> None:
    (tmp_path / "env.txt").write_text("VLLM_API_KEY=hunter22\nNCCL_PSK=hunter22\nVLLM_MAX_NUM_BATCHED_TOKENS=4096\n")

    (facts,) = read_recorded([tmp_path / "env.txt"]).documents

    assert "hunter22" not in facts.to_json().decode()
    assert "4096" in facts.to_json().decode()
    assert "hunter22" not in doctor("collect", VLLM_API_KEY="hunter22", NCCL_PSK="hunter22")
    assert os.environ.get("VLLM_API_KEY") is None
