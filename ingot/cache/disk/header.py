"""What a record's file says of itself: a safetensors header under a checksum, which knows the sum of every tensor.

The checksum is under a mac by a secret of the server's own, so that nobody else can make a file that is believed. Who
only looks whether files are whole need not know the secret.

A header says all that the states behind it depend on (`key`), whose they are and of which tokens; so a file can be
found again with nothing but itself, and one that does not belong here is known for what it is. Pure Python.
"""

from __future__ import annotations

import hmac
import json
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Final

from ingot.cache.stored import StoredRecord, entries, fields_of, listed

FORMAT: Final = "ingot record, version 2"
LONGEST: Final = 1 << 26
"""Bytes of a header."""
LENGTH: Final = 8
"""Bytes at a file's beginning that say how long its header is."""
_SUM_DIGITS: Final = 32
UNSUMMED: Final = "0" * _SUM_DIGITS
PathHash = blake2b
_DIGITS: Final = 64
_ZEROS: Final = "0" * _DIGITS
_OPENING: Final = re.compile(rb'\{"__metadata__": \{"checksum": "([0-9a-f]{64})", "mac": "([0-9a-f]{64})", "ingot": "')
_WITHOUT_MAC: Final = re.compile(rb'\{"__metadata__": \{"checksum": "[0-9a-f]{64}", "ingot": "')


class Damaged(Exception):
    """A file that is not what it was when it was written, or no record's at all."""


def digest(*parts: str | Iterable[int]) -> str:
    """Of texts and tokens, in order."""
    whole = blake2b(digest_size=16)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else array("q", part).tobytes()
        whole.update(len(raw).to_bytes(8, "little") + raw)
    return whole.hexdigest()


def path_hash() -> PathHash:
    """Of no tokens yet: that of a longer path goes on from a copy of a shorter one's, so that no token is hashed twice
    however many records a path has."""
    return blake2b(digest_size=16, person=b"ingot path")


def extended(hashed: PathHash, tokens: Iterable[int]) -> PathHash:
    """Of a path and the tokens that it goes on with."""
    longer = hashed.copy()
    longer.update(array("q", tokens).tobytes())
    return longer


def scope_of(key: Mapping[str, str]) -> str:
    """Names all that states depend on: who has another one can do nothing with them."""
    return digest(FORMAT, *(part for name in sorted(key) for part in (name, key[name])))


def sealed_scope(key: Mapping[str, str], secret: bytes) -> str:
    """Names that and the secret of who wrote them, for files: servers with different ones leave each other's alone."""
    return digest("sealed", scope_of(key), _mac(secret, "scope"))


def tenant_digest(tenant: str) -> str:
    return digest("tenant", tenant)


@dataclass(frozen=True, slots=True)
class RecordOwner:
    """Whose a record is, as digests from which nobody gets back to a tenant or a salt."""

    tenant: str
    salt: str  # and the adapter that its states went through, if there was one

    @classmethod
    def of(cls, tenant: str, salt: str, lora: str = "") -> RecordOwner:
        return cls(tenant_digest(tenant), digest("salt", tenant, salt, *(("lora", lora) if lora else ())))


@dataclass(frozen=True, slots=True)
class Header:
    key: Mapping[str, str]
    owner: RecordOwner
    before: str  # the digest of all tokens up to its beginning, as who ends there calls it,
    path: str  # and of those up to its end
    within: str  # the identity of a record amid whose tokens it goes on, if it does
    oldest: tuple[int, ...]  # by group of layers, the first token that it has keys and values of
    record: StoredRecord
    sums: tuple[str, ...] = ()  # of each tensor's bytes
    variant: str = ""  # what its name ends with, where that is settled by whoever has another part of the same states

    @property
    def identity(self) -> str:
        """The same for whatever is written of the same tokens."""
        return identity(self.key, self.owner, self.path, self.record.begin)

    @property
    def name(self) -> str:
        """Of its file. Another one holds another part of the same tokens' states, such as a checkpoint too."""
        held = json.dumps([self.record.deltas, self.record.checkpoint])
        return named(self.identity, self.variant or digest(held)[:8])

    @property
    def nbytes(self) -> int:
        """Of a file with this header; it need not know its sums yet."""
        summed = self if self.sums else replace(self, sums=(UNSUMMED,) * len(self.record.tensors))
        return len(summed.encoded(b"")) + self.record.nbytes

    def encoded(self, secret: bytes) -> bytes:
        """How the file begins."""
        manifest = {
            "format": FORMAT,
            "key": dict(self.key),
            "tenant": self.owner.tenant,
            "salt": self.owner.salt,
            "before": self.before,
            "path": self.path,
            "within": self.within,
            "oldest": self.oldest,
            "record": listed(self.record),
            "sums": self.sums,
            **({"variant": self.variant} if self.variant else {}),
        }
        names = [str(place) for place in range(len(self.record.tensors))]
        metadata = {"checksum": _ZEROS, "mac": _ZEROS, "ingot": json.dumps(manifest)}
        raw = json.dumps({"__metadata__": metadata, **entries(names, self.record.tensors)}).encode()
        raw += b" " * (-len(raw) % 8)
        checksum = _checksum(raw)
        return len(raw).to_bytes(LENGTH, "little") + _opened(raw, checksum, _mac(secret, checksum))


def identity(key: Mapping[str, str], owner: RecordOwner, path: str, begin: int) -> str:
    return digest(scope_of(key), owner.tenant, owner.salt, path, [begin])


def named(identity: str, variant: str) -> str:
    return f"{identity}-{variant}.safetensors"


def variant_of(name: str) -> str:
    return name.removesuffix(".safetensors").rpartition("-")[2]


def sums_of(data: Sequence[bytes | memoryview]) -> tuple[str, ...]:
    """All of the same length, so that a file's is known before its sums are."""
    return tuple(blake2b(raw, digest_size=_SUM_DIGITS // 2).hexdigest() for raw in data)


def length_of(beginning: bytes) -> int:
    """How long the header is whose file begins so. Raises Damaged."""
    length = int.from_bytes(beginning, "little")
    if len(beginning) != LENGTH or not 0 < length <= LONGEST:
        raise Damaged("it has no header")
    return length


def decoded(raw: bytes, secret: bytes | None = None) -> Header:
    """A header without its length, which who wrote it sealed with this secret, if one is given. Raises Damaged."""
    opening = _OPENING.match(raw)
    if opening is None and _WITHOUT_MAC.match(raw):
        raise Damaged("it has no mac, as an earlier version wrote it")
    if opening is None:
        raise Damaged("its header is no record's")
    checksum, mac = opening[1].decode(), opening[2].decode()
    if _checksum(_opened(raw, _ZEROS, _ZEROS)) != checksum:
        raise Damaged("its header has another checksum")
    if secret is not None and not hmac.compare_digest(mac, _mac(secret, checksum)):
        raise Damaged("its mac is not by this server's key")
    try:
        return _read(json.loads(json.loads(raw)["__metadata__"]["ingot"]))
    except (KeyError, TypeError, ValueError, RecursionError):
        raise Damaged("its header makes no sense") from None


def _read(manifest: dict[str, Any]) -> Header:
    record = StoredRecord(**fields_of(manifest["record"]))
    sums = tuple(str(each) for each in manifest["sums"])
    if manifest["format"] != FORMAT or not record.whole or len(sums) != len(record.tensors):
        raise ValueError("not whole")
    return Header(
        {str(name): str(value) for name, value in manifest["key"].items()},
        RecordOwner(str(manifest["tenant"]), str(manifest["salt"])),
        str(manifest["before"]),
        str(manifest["path"]),
        str(manifest["within"]),
        tuple(int(first) for first in manifest["oldest"]),
        record,
        sums,
        str(manifest.get("variant", "")),
    )


def _checksum(zeroed: bytes) -> str:
    return blake2b(zeroed, digest_size=_DIGITS // 2).hexdigest()


def _mac(secret: bytes, text: str) -> str:
    return hmac.new(secret, text.encode(), "sha256").hexdigest()


def _opened(raw: bytes, checksum: str, mac: str) -> bytes:
    """The header with these in their places."""
    opening = _OPENING.match(raw)
    assert opening is not None
    (checksum_at, checksum_end), (mac_at, mac_end) = opening.span(1), opening.span(2)
    return b"".join((raw[:checksum_at], checksum.encode(), raw[checksum_end:mac_at], mac.encode(), raw[mac_end:]))
