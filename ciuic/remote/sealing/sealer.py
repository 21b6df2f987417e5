"""Seals of a remote: the master key, authenticated encryption of objects and packs, and the check of JSON that people read.

Guarantees: an object opens under its own name, in its own remote, as a whole and unaltered, or not at all
(DamagedRemote). Without a master key nothing is encrypted, and the same calls only guard against decay. An
object that is not sealed never opens in a sealed remote, nor the other way round. Every other key is derived from
the master key.

The last field of a JSON object that people read is ``check``: hexadecimal digits over the bytes before it. It stands
in the JSON itself, so that the object stays one JSON document, and covers the bytes as they are written, so that no
reader has to know in which form another one writes JSON.

References:
    docs/remote-format.md, sections 3 to 5; AES-256-GCM: NIST SP 800-38D; HKDF: RFC 5869
"""

from __future__ import annotations

import hmac
import os
import re
import struct
from collections.abc import Callable
from typing import Final, NoReturn

import xxhash
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ciuic.remote.errors import DamagedRemote
from ciuic.repository.errors import UnsupportedFormat
from ciuic.repository.identity import Bytes

MASTER_KEY_BYTES: Final = 32
REMOTE_ID_BYTES: Final = 16
_NAMING_INFO: Final = b"ciuic naming key v1"
_BORDER_INFO: Final = b"ciuic border seed v1"


def hkdf(secret: bytes, salt: bytes, info: bytes, length: int = 32) -> bytes:
    """Return ``length`` bytes of HKDF-SHA256 (RFC 5869) of the secret."""
    return HKDF(algorithm=SHA256(), length=length, salt=salt, info=info).derive(secret)


class MasterKey:
    """32 secret bytes. They appear in no repr and no pickle; `reveal` is for wrapping them alone."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if len(secret) != MASTER_KEY_BYTES:
            raise ValueError(f"a master key must have {MASTER_KEY_BYTES} bytes, got {len(secret)}")
        self._secret = bytes(secret)

    @classmethod
    def generate(cls) -> MasterKey:
        """Return a new random key."""
        return cls(os.urandom(MASTER_KEY_BYTES))

    def derive(self, salt: bytes, info: bytes, length: int = 32) -> bytes:
        """Return ``length`` bytes of HKDF-SHA256 of this key."""
        return hkdf(self._secret, salt, info, length)

    def naming_key(self, remote_id: bytes) -> bytes:
        """Return the BLAKE3 key of chunk ids of the remote, 32 bytes."""
        return self.derive(remote_id, _NAMING_INFO)

    def border_seed(self, remote_id: bytes) -> int:
        """Return the seed of tree borders of the remote, a 64-bit number."""
        return int.from_bytes(self.derive(remote_id, _BORDER_INFO, 8), "big")

    def reveal(self) -> bytes:
        """Return the secret bytes, for a key slot or a recovery key."""
        return self._secret

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MasterKey) and hmac.compare_digest(self._secret, other._secret)

    # Not hashable: a key in a set or dict would be compared by hash, which depends on the secret.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "MasterKey(<secret>)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a master key cannot be pickled or copied")


TAG_BYTES: Final = 16
"""Bytes by which AES-GCM lengthens what it seals; also the size of the checksum of an object in clear."""
OBJECT_VERSION: Final = 1
_MAGIC: Final = b"CIUICOBJ"
# Magic, version, sealed, 0, salt.
_ENVELOPE: Final = struct.Struct("<8sHHI16s")
ENVELOPE_BYTES: Final = _ENVELOPE.size
_SALT_BYTES: Final = 16
_NONCE_BYTES: Final = 12
_HIDING_INFO: Final = b"ciuic hidden names v1"
_OBJECT_INFO: Final = b"ciuic object v1"
_PACK_INFO: Final = b"ciuic pack v1"


class PackSeal:
    """Seals of the records and the table of one pack; may be used by several threads at once.

    With a key each piece is AES-256-GCM with its offset as the nonce and `tag_bytes` longer; without one it
    is stored as it is.
    """

    __slots__ = ("_aead", "_header", "_name", "tag_bytes")

    def __init__(self, name: str, header: bytes, key: bytes | None) -> None:
        self._name = name
        self._header = header
        self._aead = None if key is None else AESGCM(key)
        self.tag_bytes: Final = 0 if key is None else TAG_BYTES

    def seal_into(self, offset: int, data: Bytes, out: memoryview, *, bound: bytes = b"") -> None:
        """Write the sealed ``data``, which will lie at ``offset`` of the pack, to ``out``.

        A pack must never have two contents for one offset: the offset is the nonce.

        Args:
            offset: position in the pack.
            data: stored bytes.
            out: view of ``len(data) + tag_bytes`` bytes.
            bound: bytes that are authenticated together with the header.
        """
        if self._aead is None:
            out[:] = data
        else:
            self._aead.encrypt_into(_nonce(offset), data, self._header + bound, out)

    def open(self, offset: int, data: Bytes, *, bound: bytes = b"") -> bytes:
        """Return what was sealed at ``offset``.

        Without a key these are the bytes themselves, not verified: the caller checks them.

        Raises:
            DamagedRemote: it was altered or moved, or belongs to another pack.
        """
        if self._aead is None:
            return bytes(data)
        try:
            return self._aead.decrypt(_nonce(offset), data, self._header + bound)
        except InvalidTag:
            raise self._refused(offset) from None

    def open_into(self, offset: int, data: Bytes, out: memoryview) -> None:
        """Write what was sealed at ``offset`` to ``out``, which is ``tag_bytes`` shorter than ``data``.

        Raises:
            DamagedRemote: as `open`; what ``out`` then has is undefined.
        """
        if len(out) != len(data) - self.tag_bytes:
            raise DamagedRemote(self._name, f"the record at offset {offset} is cut short")
        if self._aead is None:
            out[:] = data
            return
        try:
            self._aead.decrypt_into(_nonce(offset), data, self._header, out)
        except InvalidTag:
            raise self._refused(offset) from None

    def _refused(self, offset: int) -> DamagedRemote:
        return DamagedRemote(self._name, f"what lies at offset {offset} is not what was sealed there")


class Sealer:
    """Seals of one remote; may be used by several threads at once.

    Args:
        remote_id: id in remote.json, 16 bytes.
        master: master key; None for a remote that is not sealed.
        random_bytes: source of salts.
    """

    __slots__ = ("_master", "_random_bytes", "remote_id")

    def __init__(
        self,
        remote_id: bytes,
        master: MasterKey | None,
        *,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        if len(remote_id) != REMOTE_ID_BYTES:
            raise ValueError(f"the id of a remote must have {REMOTE_ID_BYTES} bytes, got {len(remote_id)}")
        self.remote_id: Final = remote_id
        self._master = master
        self._random_bytes = random_bytes

    @property
    def sealed(self) -> bool:
        """True if objects and packs are encrypted."""
        return self._master is not None

    def seal(self, name: str, content: bytes) -> bytes:
        """Return the bytes of the object ``name``, which is relative to the directory of remote.json.

        Each call gives other bytes, so that one object is never sealed twice with one key.
        """
        salt = self._random_bytes(_SALT_BYTES)
        envelope = _ENVELOPE.pack(_MAGIC, OBJECT_VERSION, int(self.sealed), 0, salt)
        bound = self._bound(name, envelope)
        if self._master is None:
            return b"".join((envelope, _digest(bound, content), content))
        key = self._master.derive(salt, _OBJECT_INFO)
        return envelope + AESGCM(key).encrypt(bytes(_NONCE_BYTES), content, bound)

    def open(self, name: str, data: bytes) -> bytes:
        """Return the content of the object ``name``.

        Raises:
            DamagedRemote: it was altered, cut or moved, is of another remote or not sealed as this remote is.
            UnsupportedFormat: a later version of ciuic wrote it.
        """
        if len(data) < ENVELOPE_BYTES + TAG_BYTES:
            raise DamagedRemote(name, "it is cut short")
        envelope = data[:ENVELOPE_BYTES]
        magic, version, sealed, zero, salt = _ENVELOPE.unpack(envelope)
        if magic != _MAGIC:
            raise DamagedRemote(name, "it does not begin as an object of ciuic")
        if version != OBJECT_VERSION:
            raise UnsupportedFormat(
                f"{name} in the remote has version {version}; this ciuic reads version {OBJECT_VERSION}"
            )
        # An attacker who can write to the bucket could otherwise put objects in clear, which need no key, in place
        # of sealed ones.
        if sealed != int(self.sealed) or zero:
            kind = "sealed" if self.sealed else "not sealed"
            raise DamagedRemote(name, f"the remote is {kind}, but this object is not marked so")
        bound = self._bound(name, envelope)
        body = memoryview(data)[ENVELOPE_BYTES:]
        if self._master is None:
            content = bytes(body[TAG_BYTES:])
            if not hmac.compare_digest(_digest(bound, content), body[:TAG_BYTES]):
                raise DamagedRemote(name, "it does not match its checksum, or belongs elsewhere")
            return content
        key = self._master.derive(salt, _OBJECT_INFO)
        try:
            return AESGCM(key).decrypt(bytes(_NONCE_BYTES), body, bound)
        except InvalidTag:
            raise DamagedRemote(
                name, "it was altered, or sealed under another name, in another remote or with another key"
            ) from None

    def hide(self, text: str) -> str:
        """Return 32 hexadecimal digits that stand for the text in names of objects; they tell nothing without the key."""
        master = self._master
        key = (
            hkdf(b"", self.remote_id, _HIDING_INFO)
            if master is None
            else master.derive(self.remote_id, _HIDING_INFO)
        )
        return blake3(text.encode(), key=key).hexdigest(16)

    def for_pack(self, name: str, pack_id: bytes, header: bytes) -> PackSeal:
        """Return the seals of a pack with this id and header; ``name`` is for messages."""
        if self._master is None:
            return PackSeal(name, header, None)
        return PackSeal(name, header, self._master.derive(pack_id, _PACK_INFO + self.remote_id))

    def _bound(self, name: str, envelope: bytes) -> bytes:
        """Return the associated data of an object."""
        return envelope + self.remote_id + name.encode()


def _nonce(offset: int) -> bytes:
    return offset.to_bytes(_NONCE_BYTES, "big")


def _digest(bound: bytes, content: bytes) -> bytes:
    """Return the checksum of an object in clear."""
    return blake3(bound + b"\0" + content).digest()[:TAG_BYTES]


_CHECK: Final = re.compile(rb'(\{.*),"check":"([0-9a-f]{16,64})"\}\n?\Z', re.DOTALL)
Check = Callable[[bytes], str]
"""Returns the hexadecimal digits of the check over these bytes."""


xxh3_check: Final[Check] = xxhash.xxh3_64_hexdigest
"""XXH3-64, which guards against decay and typing errors."""


def add_check(document: bytes, check: Check) -> bytes:
    """Return the JSON object with ``check`` as its last field, and a line end."""
    body = document[:-1]
    return body + b',"check":"%s"}\n' % check(body).encode()


def split_check(name: str, data: bytes, check: Check) -> bytes:
    """Return the JSON object without ``check``.

    Raises:
        DamagedRemote: there is none, or it is not that of these bytes.
    """
    found = _CHECK.match(data)
    if found is None or not hmac.compare_digest(check(found[1]).encode(), found[2]):
        raise DamagedRemote(name, "it does not match its check")
    return found[1] + b"}"
