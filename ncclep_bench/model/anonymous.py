"""Personal details replaced by neutral names: the same detail by the same name in all that one object sees."""

from __future__ import annotations

import ipaddress
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from itertools import pairwise
from typing import Any


def _words_in(text: str) -> frozenset[str]:
    return frozenset(text.split())


IMPERSONAL = _words_in(
    """
    root admin user users nobody ubuntu debian centos rocky ec2-user opc azureuser core nvidia mpi slurm shared runner
    jovyan vagrant app localhost localdomain localhost.localdomain none n/a unknown
    """
)
"""Names that tell nothing about anybody."""

SECRET_NAME = re.compile(r"PSK$|TOKEN(?!S)|SECRET|PASSW|CREDENTIAL|(?:API|ACCESS)_?KEY", re.IGNORECASE)
"""Names of variables whose values are never shown."""

HIDDEN = "(hidden)"

_KEY_PREFIXES = _words_in(
    """
    api_org dapi dckr_pat dop_v1 gho ghp ghr ghs ghu github_pat glc gldt glpat glptt glrt glsa gsk hf hvb hvs
    lin_api npm nvapi pk pplx pypi r8 rk shpat sk sqp tgp_v1 wandb_v1 whsec xai xapp xoxa xoxb xoxe xoxp xoxr xoxs
    """
)
"""With these the makers of keys begin them, so that a key that stands alone is known as one."""

_SERIAL = re.compile(r"serial(?: ?number)?$", re.IGNORECASE)
_VERSION = re.compile(r"version|firmware|packages", re.IGNORECASE)
_NOT_TOLD = re.compile(r"\W*(?:n/?a|none|unknown|unsupported|0*)\W*", re.IGNORECASE)
_HOST_SETTING = re.compile(r"\w*(?:COMM_ID|HOSTID|RAS_ADDR|MASTER_ADDR)")
_HOST_PLACES = re.compile(
    r"(?<![\w.:-])([A-Za-z][\w-]*(?:\.[A-Za-z][\w-]*)*)<\d{4,5}>"  # host<port>
    r"|\(pid \d+ on ([\w.-]+)[,)]"
    r"|^([A-Za-z][\w.-]*):\d+:\d+ \["  # host:pid:tid [gpu]
    r"|^\[(?!rank\d)([A-Za-z][\w.-]*):\d{3,}\]",  # [host:pid]
    re.MULTILINE,
)
_OWNER = r"/(?:home\d*|[Uu]sers)/(?P<owner>[^\s/:;,=*?$&|\\'\"<>()\[\]{}]+)"
_AT = r"(?<![\w.+-])(?P<account>[A-Za-z_][\w.+-]*)@(?P<place>[A-Za-z][\w-]*(?:\.[\w-]+)*)"
_UUID = r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}(?![0-9A-Za-z])"
_NO_MORE_OCTETS = r"(?![0-9A-Za-z])(?!:[0-9a-fA-F])"
_SECRET = r"passw(?:or)?d|secret|api[_-]?key|access[_-]?key|_psk"
_DIGEST = re.compile(
    r"(?:commit|rev(?:ision)?|git|version|build|hash|sha\d*|md5|digest)['\"]?[ :=/.-]*$", re.IGNORECASE
)
_NO_NUMBER = r"(?![\d.,;:)]+(?![^\s'\"]))"  # of tokens of a model there are many
_SHAPES = {
    "secret": rf"(?i:(?:{_SECRET})['\"]?\s*[=:]\s*['\"]?|token['\"]?\s*=\s*['\"]?{_NO_NUMBER}|(?<!\w)bearer\s+"
    rf"|(?<![\w-])--[\w-]{{0,40}}?(?:{_SECRET}|token)\s+(?!-){_NO_NUMBER})(?P<hidden>[^\s'\"]{{4,}})",
    "login": r"(?<=://)(?P<user>[^\s/:@'\"]+):[^\s/@'\"]+(?=@)",
    "key": rf"(?<![A-Za-z0-9])(?:(?:{'|'.join(sorted(_KEY_PREFIXES))})[_-][A-Za-z0-9_-]{{16,}}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|ya29\.[\w-]{16,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}(?:\.[\w-]*)?)(?![A-Za-z0-9])",
    "mask": r"(?<!\w)(?:Cap|Sig|Shd)[A-Z][a-z]{2}:?\s+[0-9a-f]{16}(?!\w)",  # of /proc/PID/status
    "uuid": rf"(?<![0-9A-Za-z]){_UUID}",
    "gpu": rf"(?<!\w)(?:GPU|MIG)-(?:{_UUID}|[0-9a-f]{{4,}}(?:-[0-9a-f]+)*(?![\w-]))",
    "hardware": r"(?<![0-9A-Za-z:])[0-9a-fA-F]{2}(?:(?::[0-9a-fA-F]{2}){5,}|(?:-[0-9a-fA-F]{2}){5,})" + _NO_MORE_OCTETS,
    "bare": r"(?<![0-9A-Za-z:_+])(?:enx|wlx)?(?P<digits>[0-9a-fA-F]{12}|[0-9a-fA-F]{4}(?:\.[0-9a-fA-F]{4}){2}|"
    r"[0-9a-fA-F]{32})" + _NO_MORE_OCTETS,
    "guid": r"(?<![0-9A-Za-z:])(?:0[xX][0-9a-fA-F]{13,16}|[0-9a-fA-F]{4}(?::[0-9a-fA-F]{4}){3}"
    r"|(?=[0-9]*[a-fA-F])[0-9a-fA-F]{16})" + _NO_MORE_OCTETS,
    "six": r"(?<![\w:.])(?:[0-9a-fA-F]{0,4}:){2,7}(?:(?:\d{1,3}\.){3}\d{1,3}|[0-9a-fA-F]{1,4})?(?![\w:])(?!\.\d)",
    "four": r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\w)(?!\.\d)(?!-(?:py|cp)\d)",
    "home": _OWNER,
    "at": _AT,
    "drawn": r"(?<![A-Za-z0-9_])(?:[a-z][a-z0-9]{1,11}[_-])?(?=[a-z0-9]*[A-Z])(?=[A-Z0-9]*[a-z])(?=[A-Za-z]*[0-9])"
    r"(?P<run>[A-Za-z0-9]{20,})(?![A-Za-z0-9])",
}
_SHAPE = re.compile("|".join(f"(?P<{name}>{shape})" for name, shape in _SHAPES.items()))
_WORDS = re.compile(r"[^\W_]+(?:[-_.]+[^\W_]+)*")
_PART = re.compile(r"[^\W_]+")
_PRIVATE = tuple(
    map(ipaddress.IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "100.64.0.0/10"))
)


class Anonymous:
    """Neutral names for details: `learn` first all that is to be replaced, then replace.

    Addresses keep family, kind (loopback, link-local, private, mapped, …) and the prefixes that they share, so that
    what was one network stays one. Hosts, users and serial numbers, which have no shape of their own, are replaced
    wherever one that was learnt stands as a word. Keys in `kept_keys` and values under `kept_values` are never details.
    """

    def __init__(self, kept_keys: Set[str] = frozenset(), kept_values: Set[str] = frozenset()) -> None:
        self._kept_keys = set(kept_keys)
        self._kept_values = kept_values
        self._names: dict[str, str] = {}
        self._kinds: dict[str, str] = {}
        self._domains: dict[str, str] = {}
        self._most_parts = 1
        self._said: dict[tuple[str, bool], str] = {}
        self._numbers: dict[str, dict[Any, int]] = {}
        self._branches: dict[tuple[str, int, int], int] = {}

    def keep_keys(self, value: Any) -> None:
        """The keys in `value` are never details."""
        if isinstance(value, Mapping):
            self._kept_keys |= value.keys()
            value = value.values()
        if isinstance(value, Iterable) and not isinstance(value, str):
            for inner in value:
                self.keep_keys(inner)

    def learn_host(self, name: str) -> None:
        """`name`, its first label and its domain are details from now on."""
        name = name.strip().strip(".")
        label, _, domain = name.partition(".")
        if not re.fullmatch(r"[\w-]+", label) or label.isdecimal() or name in self._names or _is_address(name):
            return
        if name.lower() in IMPERSONAL or re.fullmatch(r"host-\d+", label):
            return
        neutral = self._named("host", label)
        if domain:
            self._know(name, "host", f"{neutral}.{self._domain(domain)}")

    def learn_user(self, name: str) -> None:
        """`name` is a user's from now on."""
        if name and name.lower() not in IMPERSONAL and not re.fullmatch(r"user-\d+", name):
            self._named("user", name)

    def learn_home(self, folder: str) -> None:
        """The last part of a user's home folder is the user's name."""
        self.learn_user(folder.rstrip("/").rpartition("/")[2])

    def learn(self, value: Any) -> None:
        """Hosts, users, serial numbers and UUIDs in `value`, made of dictionaries, lists and texts."""
        accounts: list[tuple[str, str]] = []
        for key, text in _texts(value, ""):
            if key == "host" or key.endswith("hostname"):
                self.learn_host(text)
            elif _SERIAL.search(key) and not _NOT_TOLD.fullmatch(text):
                self._named("serial", text)
            elif _HOST_SETTING.fullmatch(key):
                self.learn_host(text.rpartition(":")[0] or text)
            for match in _HOST_PLACES.finditer(text):
                self.learn_host(next(filter(None, match.groups())))
            if "/" in text:
                for match in re.finditer(_OWNER, text):
                    self.learn_user(match["owner"])
            if "@" in text:
                accounts += [(match["account"], match["place"]) for match in re.finditer(_AT, text)]
            if ":" in text:
                for match in re.finditer(_SHAPES["hardware"], text):
                    self._of_hardware(match)
            if "-" in text:
                for match in re.finditer(_UUID, text):
                    self._uuid(match[0])
        for account, place in accounts:
            if place in self._names or place.partition(".")[0] in self._names:
                self.learn_user(account)

    def value(self, value: Any, *, versions: bool = False) -> Any:
        """`value` with every detail replaced, in keys too; with `versions` four numbers with dots are no address."""
        if isinstance(value, str):
            return self.text(value, versions=versions)
        if isinstance(value, Mapping):
            setting = value.get("name", "") if "value" in value else None
            return {
                key if key in self._kept_keys else self.text(key): self._under(key, inner, setting, versions)
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(inner, versions=versions) for inner in value]
        return value

    def _under(self, key: str, value: Any, setting: Any, versions: bool) -> Any:
        if isinstance(value, str) and (key in self._kept_values or (key == "name" and setting is not None)):
            return value
        if key == "value" and isinstance(setting, str) and SECRET_NAME.search(setting):
            return HIDDEN
        if key == "host" and isinstance(value, str):
            return self.host(value)
        return self.value(value, versions=versions or _VERSION.search(key) is not None)

    def host(self, name: str) -> str:
        """What a host that was learnt is called, however short its name is."""
        return self._names.get(name) or self.text(name)

    def text(self, text: str, *, versions: bool = False) -> str:
        """`text` with every detail replaced."""
        if (text, versions) not in self._said:
            self._said[text, versions] = self._replaced(text, versions)
        return self._said[text, versions]

    def _replaced(self, text: str, versions: bool) -> str:
        done: list[str] = []
        end = position = 0
        while match := _SHAPE.search(text, position):
            kind = next(name for name in _SHAPES if match[name] is not None)
            replace: Callable[[re.Match[str]], str | None] = getattr(self, f"_of_{kind}")
            neutral = None if kind in ("four", "bare") and versions else replace(match)
            if neutral is None:  # it only looks like one, and may have another in it
                position = match.start() + 1
                continue
            done += (_WORDS.sub(self._of_words, text[end : match.start()]), neutral)
            end = position = match.end()
        return "".join((*done, _WORDS.sub(self._of_words, text[end:])))

    def _of_words(self, match: re.Match[str]) -> str:
        """Words joined by hyphens, underscores and dots: the longest names among them, from the left."""
        text = match[0]
        parts = [(part.start(), part.end()) for part in _PART.finditer(text)]
        done: list[str] = []
        end = at = 0
        while at < len(parts):
            for last in range(min(len(parts), at + self._most_parts + 2) - 1, at - 1, -1):
                start, stop = parts[at][0], parts[last][1]
                if (neutral := self._neutral(text[start:stop])) is not None:
                    done += (text[end:start], neutral)
                    end, at = stop, last
                    break
            at += 1
        return "".join((*done, text[end:]))

    def _neutral(self, word: str) -> str | None:
        """What stands for a word that is a detail, or None."""
        if len(word) < 2:
            return None  # as a word it is anything
        if word in self._names:
            return self._names[word]
        if word in self._domains:
            return self._domains[word] if "." in word else None
        label, _, domain = word.partition(".")
        if domain in self._domains and label:
            return f"{self._named('host', label)}.{self._domains[domain]}"
        kind = self._kinds.get(word.lower()) if len(word) > 2 else None
        if kind is None and word[-1:].isdecimal():
            # Machines are numbered: what is called like a known one but for its number is one too.
            kind = self._kinds.get(f"{word.rstrip('0123456789')}#")
        return None if kind is None else self._named(kind, word)

    def _named(self, kind: str, word: str) -> str:
        return self._names.get(word) or self._know(word, kind, f"{kind}-{self._number(kind, word)}")

    def _know(self, word: str, kind: str, neutral: str) -> str:
        self._said.clear()
        self._names[word] = neutral
        self._kinds.setdefault(word.lower(), kind)
        stem = word.rstrip("0123456789")
        if kind == "host" and stem != word and len(stem) > 1:
            self._kinds.setdefault(f"{stem}#", kind)
        self._most_parts = max(self._most_parts, len(_PART.findall(word)))
        return neutral

    def _domain(self, domain: str) -> str:
        if domain.lower() in ("local", "localdomain", "lan", "internal", "cluster.local"):
            return domain
        self._most_parts = max(self._most_parts, 1 + len(_PART.findall(domain)))
        return self._domains.setdefault(domain, f"domain-{self._number('domain', domain)}")

    def _of_secret(self, match: re.Match[str]) -> str:
        return match[0][: match.start("hidden") - match.start()] + HIDDEN

    def _of_login(self, match: re.Match[str]) -> str:
        return f"{self._account(match['user'])}:{HIDDEN}"

    def _of_key(self, match: re.Match[str]) -> str | None:
        prefix = next((p for p in _KEY_PREFIXES if match[0].startswith((f"{p}_", f"{p}-"))), None)
        if prefix is None:
            return HIDDEN
        body = match[0][len(prefix) + 1 :]
        runs = [re.sub("[_-]", "", body), *re.findall("[A-Za-z0-9]{12,}", body)]
        return match[0].removesuffix(body) + HIDDEN if any(map(_is_key, runs)) else None

    def _of_drawn(self, match: re.Match[str]) -> str | None:
        run = match["run"]
        return match[0].removesuffix(run) + HIDDEN if _turns(run, _kind) > 0.4 * len(run) else None

    def _of_mask(self, match: re.Match[str]) -> str:
        return match[0]

    def _of_uuid(self, match: re.Match[str]) -> str:
        return self._uuid(match[0])

    def _uuid(self, uuid: str) -> str:
        if not uuid.strip("0-"):
            return uuid
        # Its first part must do to tell it from others: CUDA takes the beginning of a UUID for the whole.
        return f"{self._number('uuid', uuid.lower()):08x}-0000-4000-8000-000000000000"

    def _of_gpu(self, match: re.Match[str]) -> str:
        prefix, _, digits = match[0].partition("-")
        if len(digits) == 36:
            return f"{prefix}-{self._uuid(digits)}"
        known = self._numbers.get("uuid", {})
        number = next((number for uuid, number in known.items() if uuid.startswith(digits)), None)
        return f"{prefix}-{self._number('uuid', digits) if number is None else number:08x}"

    def _of_hardware(self, match: re.Match[str]) -> str:
        octets = re.split("[:-]", match[0].lower())
        if len(set(octets)) == 1:  # none, or broadcast
            return match[0]
        number = self._number(f"hardware{len(octets)}", tuple(octets))
        digits = f"{0x02 << 8 * (len(octets) - 1) | number:0{2 * len(octets)}x}"
        return match[0][2].join(digits[at : at + 2] for at in range(0, len(digits), 2))

    def _of_bare(self, match: re.Match[str]) -> str | None:
        """Hexadecimal digits without separators: of an adapter, a GID or a UUID, unless they stand for a version."""
        text, digits = match[0], match["digits"].replace(".", "").lower()
        if len(digits) == 32:
            uuid = "-".join(digits[at:end] for at, end in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))
            if uuid in self._numbers.get("uuid", {}):
                return self._uuid(uuid).replace("-", "")
            return f"{self._six(int(digits, 16)):032x}" if digits.startswith("fe80000000000000") else None
        octets = tuple(digits[at : at + 2] for at in range(0, 12, 2))
        known = octets in self._numbers.get("hardware6", {})
        likely = not digits.isdecimal() and not digits.isalpha() and not digits.endswith("0000")
        # The lowest bit of the first octet is 1 for groups only, and in most addresses of memory.
        if not known and (not likely or int(digits[1], 16) & 1 or _DIGEST.search(match.string, 0, match.start())):
            return None
        neutral = f"{0x02 << 40 | self._number('hardware6', octets):012x}"
        if "." in text:
            neutral = ".".join(neutral[at : at + 4] for at in (0, 4, 8))
        return text[: match.start("digits") - match.start()] + neutral

    def _of_guid(self, match: re.Match[str]) -> str:
        text = match[0]
        if ":" not in text and int(text, 16) < 1 << 48:  # no vendor's: an address in memory, a mask, a count
            return text
        prefix = text[:2] if text[1] in "xX" else ""
        digits = f"{self._guid(int(text.replace(':', ''), 16)):016x}"
        return prefix + (":".join(digits[at : at + 4] for at in range(0, 16, 4)) if ":" in text else digits)

    def _guid(self, guid: int) -> int:
        return guid if guid in (0, (1 << 64) - 1, 0xFE80 << 48) else 0x0200_00FF_FE00_0000 + self._number("guid", guid)

    def _of_six(self, match: re.Match[str]) -> str | None:
        text = match[0]
        try:
            address = int(ipaddress.IPv6Address(text))
        except ValueError:
            return None
        neutral = ipaddress.IPv6Address(self._six(address))
        if len(text) == 39:
            return neutral.exploded
        return f"::ffff:{neutral.ipv4_mapped}" if neutral.ipv4_mapped else str(neutral)

    def _six(self, address: int) -> int:
        if address >> 32 == 0xFFFF:
            return 0xFFFF << 32 | self._four(address & 0xFFFF_FFFF)
        if address < 1 << 16 or (address >> 120 == 0xFF and address & ((1 << 112) - 1) < 1 << 16):
            return address  # unspecified, loopback, and well-known groups
        if address >> 118 in (0x3FA, 0x3FB):  # link-local and site-local: the lower half is the port's GUID
            return address >> 64 << 64 | self._guid(address & ((1 << 64) - 1))
        if address >> 121 == 0x7E:  # unique local
            return self._relabelled(address, 120, "six")
        if address >> 120 == 0xFF:
            return self._relabelled(address, 112, "six")
        prefix = 0x2001_0DB8 + self._number("prefix", address >> 96) - 1
        return prefix << 96 | self._relabelled(address, 96, "six") & ((1 << 96) - 1)

    def _of_four(self, match: re.Match[str]) -> str | None:
        try:
            address = ipaddress.IPv4Address(match[0])
        except ValueError:
            return None
        return str(ipaddress.IPv4Address(self._four(int(address))))

    def _four(self, address: int) -> int:
        first = address >> 24
        if first in (0, 127) or first >= 224:
            return address  # this host, loopback, groups, masks
        for network in _PRIVATE:
            if ipaddress.IPv4Address(address) in network:
                return self._relabelled(address, 32 - network.prefixlen, "four")
        public = (197 + self._number("public network", first)) % 224
        return public << 24 | self._relabelled(address, 24, "four") & 0xFF_FFFF

    def _relabelled(self, address: int, bits: int, kind: str) -> int:
        """The lower `bits` renumbered, so that two addresses share as many leading bits as they did.

        At every branch the side that was seen first becomes what a checksum of the way there says, whatever it was:
        the result depends on the order and on nothing else, and looks like no network that people number by hand.
        No address stays itself: where only the last bit could still tell, it changes.
        """
        neutral = address >> bits << bits
        for bit in range(bits - 1, -1, -1):
            own = address >> bit & 1
            first = self._branches.setdefault((kind, bit, address >> (bit + 1)), own)
            side = zlib.crc32(f"{bit} {neutral}".encode()) & 1
            neutral |= (side ^ (own != first)) << bit
        return neutral ^ (neutral == address)

    def _of_home(self, match: re.Match[str]) -> str:
        return match[0].removesuffix(match["owner"]) + self._account(match["owner"])

    def _of_at(self, match: re.Match[str]) -> str:
        return f"{self._account(match['account'])}@{self.text(match['place'])}"

    def _account(self, name: str) -> str:
        self.learn_user(name)
        return self._names.get(name, name)

    def _number(self, kind: str, detail: Any) -> int:
        numbers = self._numbers.setdefault(kind, {})
        return numbers.setdefault(detail, len(numbers) + 1)


def _is_key(text: str) -> bool:
    """Whether letters and digits stand there as if drawn by lot, as they do not in words and their numbers."""
    return _turns(text, str.isdecimal) > 0.2 * len(text) or _turns(text, _kind) > 0.25 * len(text)


def _kind(character: str) -> int:
    return 2 * character.isdecimal() + character.isupper()


def _turns(text: str, kind: Callable[[str], int]) -> int:
    """How often one kind of character follows another."""
    return sum(one != other for one, other in pairwise(map(kind, text)))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Every text in `value` with the key it stands under; a setting's value stands under the setting's name."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        named = value.get("name") if "value" in value else None
        for name, inner in value.items():
            yield "", name
            yield from _texts(inner, named if name == "value" and isinstance(named, str) else name)
    elif isinstance(value, Iterable):
        for inner in value:
            yield from _texts(inner, key)
