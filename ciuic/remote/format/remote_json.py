"""remote.json: what a remote is, and the identity of what is stored in it.

Guarantees: with a master key every field is authenticated, so that an attacker who can write to the bucket cannot
change the size of blocks, or make a sealed remote look like one that is not.

References:
    docs/remote-format.md, section 3
"""

from __future__ import annotations

import base64
import hmac
import os
from collections.abc import Callable
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from ciuic.remote.errors import DamagedRemote, WrongKey
from ciuic.remote.format.names import REMOTE_JSON, HexId
from ciuic.remote.sealing.sealer import Check, MasterKey, Sealer, add_check, split_check, xxh3_check
from ciuic.repository.config import check_block_size
from ciuic.repository.errors import UnsupportedFormat
from ciuic.repository.identity import HashName, Identity

REMOTE_VERSION: Final = 1
MAX_REMOTE_JSON_BYTES: Final = 8192
_CHECK_INFO: Final = b"ciuic remote.json v1"
_HexKey = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
_HexSeed = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]


class StoredRemote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields of remote.json; its last field, ``check``, is that of `add_check`."""

    version: int
    id: HexId
    hash: HashName
    block_size: int
    sealed: bool
    created_ns: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    naming_key: _HexKey | None = None
    border_seed: _HexSeed | None = None
    identity: Annotated[str, msgspec.Meta(max_length=4096)] | None = None
    """Identity of a repository that was not made for this remote: an object in base64."""

    def __repr__(self) -> str:
        return f"StoredRemote(id={self.id!r}, sealed={self.sealed!r})"


class _StoredIdentity(msgspec.Struct, frozen=True, kw_only=True):
    naming_key: _HexKey | None
    border_seed: _HexSeed


class OpenRemote(NamedTuple):
    """A remote whose remote.json was read and, if it is sealed, authenticated."""

    stored: StoredRemote
    sealer: Sealer
    identity: Identity

    def __repr__(self) -> str:
        return f"OpenRemote(id={self.stored.id!r}, sealed={self.stored.sealed!r})"


def encode_remote(
    *,
    remote_id: bytes,
    master: MasterKey | None,
    block_size: int,
    created_ns: int,
    identity: Identity | None = None,
) -> bytes:
    """Return the bytes of the remote.json of a new remote.

    Args:
        remote_id: 16 random bytes.
        master: master key; None for a remote that is not sealed.
        block_size: bytes in a block of a file.
        created_ns: ns since 1970, for people.
        identity: of a remote that is not sealed; that of a sealed one is derived from its master key.

    Raises:
        ValueError: an argument is outside of its limits.
    """
    if (master is None) is (identity is None):
        raise ValueError("a remote has either a master key or an identity in clear")
    stored = StoredRemote(
        version=REMOTE_VERSION,
        id=remote_id.hex(),
        hash="blake3-128",
        block_size=block_size,
        sealed=master is not None,
        created_ns=created_ns,
    )
    if identity is not None:
        if identity.hash != "blake3-128" or identity.key is None:
            raise ValueError(f"the hash of a remote must be blake3-128, got {identity.hash}")
        fields = _stored_identity(identity)
        stored = msgspec.structs.replace(stored, naming_key=fields.naming_key, border_seed=fields.border_seed)
    return _encode(stored, master)


def encode_repository(
    *,
    repository_id: bytes,
    master: MasterKey | None,
    block_size: int,
    created_ns: int,
    identity: Identity,
    random_bytes: Callable[[int], bytes] = os.urandom,
) -> bytes:
    """Return the bytes of remote.json below ``repositories/``, of a repository with its own identity.

    Args:
        repository_id: id of the repository, 16 bytes.
        master: master key of the remote; None if it is not sealed.
        block_size: bytes in a block of a file.
        created_ns: ns since 1970, for people.
        identity: of the repository.
        random_bytes: source of the salt.

    Raises:
        ValueError: an argument is outside of its limits.
    """
    inner = msgspec.json.encode(_stored_identity(identity))
    sealer = Sealer(repository_id, master, random_bytes=random_bytes)
    stored = StoredRemote(
        version=REMOTE_VERSION,
        id=repository_id.hex(),
        hash=identity.hash,
        block_size=block_size,
        sealed=master is not None,
        created_ns=created_ns,
        identity=base64.b64encode(sealer.seal(REMOTE_JSON, inner)).decode(),
    )
    return _encode(stored, master)


def _encode(stored: StoredRemote, master: MasterKey | None) -> bytes:
    try:
        # A struct that is made does not check its fields; one that is converted does.
        msgspec.convert(msgspec.to_builtins(stored), StoredRemote)
        check_block_size(stored.block_size)
    except msgspec.ValidationError as error:
        raise ValueError(f"invalid remote.json: {error}") from None
    return add_check(msgspec.json.encode(stored), _check(bytes.fromhex(stored.id), master))


def read_remote_id(data: bytes) -> bytes:
    """Return the id, 16 bytes, with which the key slots are opened. It is not authenticated yet.

    Raises:
        DamagedRemote: this is no remote.json.
        UnsupportedFormat: a later version of ciuic wrote it.
    """
    return bytes.fromhex(_decode(data).id)


def is_sealed(data: bytes) -> bool:
    """Return whether remote.json says that a key is needed. It is not authenticated yet.

    Raises:
        DamagedRemote: this is no remote.json.
        UnsupportedFormat: a later version of ciuic wrote it.
    """
    return _decode(data).sealed


def open_remote(data: bytes, master: MasterKey | None, *, expected_id: bytes | None = None) -> OpenRemote:
    """Return what the bytes of remote.json describe, authenticated by the master key if there is one.

    Args:
        data: bytes of remote.json.
        master: master key, from a key slot; None only for a remote that was made without a key.
        expected_id: id that is known from elsewhere: of the repository below ``repositories/``, or of the
            remote that a host joined.

    Raises:
        DamagedRemote: it was altered, or is that of another remote.
        WrongKey: the remote is sealed and no key was given, or the other way round.
        UnsupportedFormat: a later version of ciuic wrote it.
    """
    stored = _decode(data)
    remote_id = bytes.fromhex(stored.id)
    if expected_id is not None and expected_id != remote_id:
        raise DamagedRemote(REMOTE_JSON, f"it is that of {stored.id}, not of {expected_id.hex()}")
    if stored.sealed and master is None:
        raise WrongKey("the remote is sealed: a passphrase or key is needed")
    # An attacker who can write to the bucket could otherwise have everything sent in clear from now on.
    if not stored.sealed and master is not None:
        raise WrongKey(
            "remote.json says that the remote is not sealed, but a key was given",
            hint="somebody replaced remote.json, or the key belongs to another remote; nothing was sent",
        )
    split_check(REMOTE_JSON, data, _check(remote_id, master))
    sealer = Sealer(remote_id, master)
    return OpenRemote(stored, sealer, _identity(stored, sealer, master))


def _decode(data: bytes) -> StoredRemote:
    """Return the fields without comparing the check."""
    if len(data) > MAX_REMOTE_JSON_BYTES:
        raise DamagedRemote(REMOTE_JSON, f"it has {len(data)} bytes; {MAX_REMOTE_JSON_BYTES} are the limit")
    try:
        # The version before everything else: a later one may have other fields.
        version = msgspec.json.decode(data, type=dict[str, Any]).get("version")
        if version != REMOTE_VERSION:
            raise UnsupportedFormat(
                f"the remote has version {version}; this ciuic reads version {REMOTE_VERSION}"
            )
        stored = msgspec.json.decode(data, type=StoredRemote)
        check_block_size(stored.block_size)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise DamagedRemote(REMOTE_JSON, f"its content is invalid: {error}") from None
    in_clear = stored.naming_key is not None, stored.border_seed is not None
    own = stored.identity is not None
    wanted = not stored.sealed and not own
    if in_clear != (wanted, wanted) or (stored.hash != "blake3-128" and not own):
        raise DamagedRemote(REMOTE_JSON, "its fields contradict each other")
    return stored


def _identity(stored: StoredRemote, sealer: Sealer, master: MasterKey | None) -> Identity:
    if stored.identity is not None:
        try:
            inner = sealer.open(REMOTE_JSON, base64.b64decode(stored.identity, validate=True))
            found = msgspec.json.decode(inner, type=_StoredIdentity)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise DamagedRemote(REMOTE_JSON, f"its identity is invalid: {error}") from None
    elif master is None:
        assert stored.border_seed is not None
        found = _StoredIdentity(naming_key=stored.naming_key, border_seed=stored.border_seed)
    else:
        key, seed = master.naming_key(sealer.remote_id), master.border_seed(sealer.remote_id)
        return Identity(stored.hash, key, seed)
    if (found.naming_key is None) is not (stored.hash == "xxh3-128"):
        raise DamagedRemote(REMOTE_JSON, "its identity is that of another hash")
    own_key = None if found.naming_key is None else bytes.fromhex(found.naming_key)
    return Identity(stored.hash, own_key, int(found.border_seed, 16))


def _stored_identity(identity: Identity) -> _StoredIdentity:
    if not 0 <= identity.seed < 1 << 64 or (identity.key is None) is not (identity.hash == "xxh3-128"):
        raise ValueError(f"blake3-128 has a key, xxh3-128 none, and both a seed of 64 bits; got {identity!r}")
    key = None if identity.key is None else identity.key.hex()
    return _StoredIdentity(naming_key=key, border_seed=f"{identity.seed:016x}")


def _check(remote_id: bytes, master: MasterKey | None) -> Check:
    """Return the check of remote.json: a message authentication code where there is a key."""
    if master is None:
        return xxh3_check
    key = master.derive(remote_id, _CHECK_INFO)
    return lambda data: hmac.new(key, data, "sha256").hexdigest()
