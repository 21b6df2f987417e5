"""Documents of a remote: remote.json, entries of logs and objects of rounds (JSON), manifests of snapshots (msgpack).

Guarantees: both directions check the types, patterns and limits that the struct of a document declares. What is read from a
store has limits on what a hostile bucket can make us allocate. With a master key every field of remote.json is authenticated,
so that an attacker who can write to the bucket cannot change the size of blocks, or make a sealed remote look like one that
is not; every other document is sealed as a whole.

References:
    docs/remote-format.md: section 3 (remote.json), section 6 (log entries: hello, commit, fence, remove, move, state,
    retired), section 7 (manifests: the snapshot file, its marks and where it came from), section 8 (rounds of collectors),
    section 12 (sets)
"""

from __future__ import annotations

import base64
import hmac
import os
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

import msgspec
from blake3 import blake3

from ciuic.remote.errors import DamagedRemote, PacksElsewhere, WrongKey
from ciuic.remote.object_names import (
    MAX_STEP,
    REMOTE_JSON,
    HexId,
    Number,
    RoundPart,
    StoredManifestName,
    StoredPackRef,
    log_entry_name,
    round_name,
)
from ciuic.remote.objects.model import Objects, read_verified
from ciuic.remote.sealing.sealer import Check, MasterKey, Sealer, add_check, split_check, xxh3_check
from ciuic.repository.config import MAX_FILE_BYTES, check_block_size
from ciuic.repository.errors import UnsupportedFormat
from ciuic.repository.identity import HashName, Identity
from ciuic.structs import convert, decode_json, decode_msgpack

_T = TypeVar("_T")
MAX_DOCUMENT_BYTES: Final = 64 << 20
"""Limit of a document's object: a manifest with the largest snapshot file, marks file and list of packs."""


def _encode_document(sealer: Sealer, name: str, value: object, kind: Any, *, msgpack: bool = False) -> bytes:
    """Return the bytes of the object ``name``.

    Raises:
        ValueError: ``value`` could not be read back as ``kind``.
    """
    content = msgspec.msgpack.encode(value) if msgpack else msgspec.json.encode(value)
    # Refused here, because an object that no reader accepts would stop every collector.
    try:
        _decode(content, kind, msgpack=msgpack)
    except msgspec.DecodeError as error:
        raise ValueError(f"{name} could not be read back: {error}") from None
    sealed = sealer.seal(name, content)
    if len(sealed) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"{name} would have {len(sealed)} bytes; {MAX_DOCUMENT_BYTES} are the limit")
    return sealed


def _decode_document(sealer: Sealer, name: str, data: bytes, kind: type[_T], *, msgpack: bool = False) -> _T:
    """Return the document in the object ``name``.

    Raises:
        DamagedRemote: the object does not open, or is no document of this kind.
        UnsupportedFormat: a later version of ciuic wrote it.
    """
    # Before it is opened: decoded, a document takes ten times as much.
    if len(data) > MAX_DOCUMENT_BYTES:
        raise DamagedRemote(name, f"it has {len(data)} bytes; {MAX_DOCUMENT_BYTES} are the limit")
    content = sealer.open(name, data)
    try:
        value: _T = _decode(content, kind, msgpack=msgpack)
    except msgspec.DecodeError as error:
        raise DamagedRemote(name, str(error)) from None
    return value


def _decode(content: bytes, kind: Any, *, msgpack: bool) -> Any:
    return decode_msgpack(content, kind) if msgpack else decode_json(content, kind)


MAX_PACKS: Final = 1 << 19
"""Limit of packs in one document: 32 TiB in packs of 64 MiB."""
MAX_MANIFESTS: Final = 1 << 16
"""Limit of snapshots in one document."""
# Names of hosts have at most 64 characters on Linux (HOST_NAME_MAX); 255 is the limit of DNS.
_Host = Annotated[str, msgspec.Meta(max_length=255)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
"""BLAKE3-256 in hexadecimal digits."""
SnapshotName = Annotated[str, msgspec.Meta(pattern=r"^cs-[0-9a-f]{6,32}\Z")]
PackRefs = Annotated[tuple[StoredPackRef, ...], msgspec.Meta(max_length=MAX_PACKS)]
ManifestNames = Annotated[tuple[StoredManifestName, ...], msgspec.Meta(max_length=MAX_MANIFESTS)]


class GivenUp(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Snapshot that an operator gave up: its host must not upload it again by itself."""

    repository: HexId
    snapshot: SnapshotName


_GivenUps = Annotated[tuple[GivenUp, ...], msgspec.Meta(max_length=MAX_MANIFESTS)]


class LogHello(msgspec.Struct, tag_field="kind", tag="hello", frozen=True, kw_only=True):
    """An uploader began to write to this log."""

    nonce: HexId
    host: _Host
    """For people; never an identity."""
    repository: HexId


class LogCommit(msgspec.Struct, tag_field="kind", tag="commit", frozen=True, kw_only=True):
    """A snapshot is stored."""

    nonce: HexId
    repository: HexId
    snapshot: SnapshotName
    manifest: StoredManifestName
    digest: Digest
    """BLAKE3-256 of the bytes of the manifest's object."""
    packs: PackRefs = ()
    """Packs that were uploaded for it."""


class LogFence(msgspec.Struct, tag_field="kind", tag="fence", frozen=True, kw_only=True):
    """A collector's round began; written by the collector."""

    nonce: HexId
    round: Number


class LogRemove(
    msgspec.Struct, tag_field="kind", tag="remove", frozen=True, kw_only=True, omit_defaults=True
):
    """Snapshots are given up by their owner or an operator."""

    nonce: HexId
    manifests: ManifestNames
    snapshots: _GivenUps = ()
    """Those of them that an operator gave up, and no rule of their host's."""


class LogMove(msgspec.Struct, tag_field="kind", tag="move", frozen=True, kw_only=True):
    """Packs begin to move to another storage class or place; those of the entry before have moved."""

    nonce: HexId
    packs: PackRefs


class LiveManifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Snapshot in a `LogState`: an array of these fields, as in the `LogCommit` that it stands for."""

    repository: HexId
    snapshot: SnapshotName
    manifest: StoredManifestName
    digest: Digest


_LiveManifests = Annotated[tuple[LiveManifest, ...], msgspec.Meta(max_length=MAX_MANIFESTS)]


class LogState(msgspec.Struct, tag_field="kind", tag="state", frozen=True, kw_only=True, omit_defaults=True):
    """Everything that the entries of this log before it say, so that they may be deleted."""

    nonce: HexId
    live: _LiveManifests
    """Snapshots that this log committed and no log removed."""
    removed: ManifestNames
    """Snapshots that this log removed."""
    given_up: _GivenUps = ()
    """Snapshots that operators gave up in this log, for ever."""


class LogRetired(
    msgspec.Struct, tag_field="kind", tag="retired", frozen=True, kw_only=True, omit_defaults=True
):
    """Last entry of a writer; otherwise as `LogState`."""

    nonce: HexId
    live: _LiveManifests
    removed: ManifestNames
    given_up: _GivenUps = ()


LogEntry = LogHello | LogCommit | LogFence | LogRemove | LogMove | LogState | LogRetired


def encode_log_entry(sealer: Sealer, writer: str, number: int, entry: LogEntry) -> bytes:
    """Return the bytes of entry ``number`` of a writer's log. ValueError for one that cannot be read back."""
    return _encode_document(sealer, log_entry_name(writer, number), entry, LogEntry)


def decode_log_entry(sealer: Sealer, writer: str, number: int, data: bytes) -> LogEntry:
    """Return entry ``number`` of a writer's log.

    Raises:
        DamagedRemote: it does not open, or is no entry.
        UnsupportedFormat: a later version of ciuic wrote it.
    """
    name = log_entry_name(writer, number)
    return _decode_document(sealer, name, data, LogEntry)  # type: ignore[arg-type]


_File = Annotated[bytes, msgspec.Meta(max_length=MAX_FILE_BYTES)]
_Step = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
_Text = Annotated[str, msgspec.Meta(max_length=4096)]


class RemoteManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a snapshot that is not in packs."""

    snapshot: _File
    """Bytes of the snapshot file (docs/format.md, section 8)."""
    marks: _File = b""
    """Bytes of its marks file; empty for none."""
    packs: PackRefs = ()
    """Packs that were uploaded for it."""
    writer: HexId
    host: _Text
    job: _Text = ""
    """Name of the job as it is; empty for a snapshot of files."""
    epoch: _Step | None = None
    step: _Step | None = None
    previous: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    """Digest of the manifest that this writer committed before; empty for none."""


def encode_manifest(sealer: Sealer, name: str, manifest: RemoteManifest) -> bytes:
    """Return the bytes of the manifest's object. ValueError for one that cannot be read back."""
    return _encode_document(sealer, name, manifest, RemoteManifest, msgpack=True)


def decode_manifest(sealer: Sealer, name: str, data: bytes) -> RemoteManifest:
    """Return the manifest; the snapshot file in it is not decoded.

    Raises:
        DamagedRemote: it does not open, or is no manifest.
        UnsupportedFormat: a later version of ciuic wrote it.
    """
    return _decode_document(sealer, name, data, RemoteManifest, msgpack=True)


def object_digest(data: bytes) -> str:
    """Return BLAKE3-256 of an object's bytes in hexadecimal digits, as a commit names its manifest by."""
    return blake3(data).hexdigest()


class StoredRound(msgspec.Struct, frozen=True, kw_only=True):
    """Packs and manifests that a round condemns; in ``.final`` those that it deletes; in ``.done`` none."""

    nonce: HexId
    condemned: PackRefs = ()
    manifests: ManifestNames = ()
    whole: bool | msgspec.UnsetType = msgspec.UNSET
    """True for a round in place of the one before, whose ``.final`` cannot be read: its own names all that it began with."""


def encode_round(sealer: Sealer, round_: int, part: RoundPart, content: StoredRound) -> bytes:
    """Return the bytes of an object of a round. ValueError for one that cannot be read back."""
    return _encode_document(sealer, round_name(round_, part), content, StoredRound)


def decode_round(sealer: Sealer, round_: int, part: RoundPart, data: bytes) -> StoredRound:
    """Return the content of an object of a round.

    Raises:
        DamagedRemote: it does not open, or is no round.
        UnsupportedFormat: a later version of ciuic wrote it.
    """
    return _decode_document(sealer, round_name(round_, part), data, StoredRound)


MAX_SET_BYTES: Final = 4 << 20
"""Limit of an object of a set: a plan with 10,000 members."""
_SetLabel = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]


class StoredSetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt to cut a set: what all members do alike."""

    id: HexId
    name: _SetLabel
    members: Annotated[tuple[_SetLabel, ...], msgspec.Meta(min_length=1, max_length=10_000)]
    """In order, each once."""
    hold_limit_seconds: Annotated[float, msgspec.Meta(gt=0, le=60)]


class StoredSetMark(msgspec.Struct, frozen=True, kw_only=True):
    """What one command says in an attempt: that it is here, that all are, that it holds, what is decided."""

    by: HexId
    """Nonce of the command."""
    decision: Literal["", "cut", "abort"] = ""
    missing: Annotated[tuple[_SetLabel, ...], msgspec.Meta(max_length=10_000)] = ()
    """Members that did not come, where that is why it was given up."""
    here: Annotated[tuple[HexId, ...], msgspec.Meta(max_length=10_000)] = ()
    """With ``go``: the nonces of the commands that are here, in the order of the members."""
    set: HexId | None = None
    """With ``ready`` and ``cut``: the id of the set, which depends on all these nonces."""


def encode_set_object(sealer: Sealer, name: str, content: StoredSetPlan | StoredSetMark) -> bytes:
    """Return the bytes of an object below ``sets/``. ValueError for one that cannot be read back."""
    return _encode_document(sealer, name, content, type(content))


_SetObject = TypeVar("_SetObject", StoredSetPlan, StoredSetMark)


def decode_set_object(sealer: Sealer, name: str, data: bytes, kind: type[_SetObject]) -> _SetObject:
    """Return the content of an object below ``sets/``.

    Raises:
        DamagedRemote: it does not open, or is none of this kind.
        UnsupportedFormat: a later version of ciuic wrote it.
    """
    return _decode_document(sealer, name, data, kind)


_PAGES: Final = (b"<!doctype html", b"<html")
_Document = TypeVar("_Document")


def read_object(objects: Objects, name: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Return the whole object.

    Raises:
        NoSuchObject: there is none.
        DamagedRemote: it has more than ``max_bytes``, or is a web page.
    """
    # A range and not the whole: an attacker who can write to the bucket chooses the size.
    (data,) = objects.get_ranges(name, [(0, max_bytes + 1)])
    if len(data) > max_bytes:
        raise DamagedRemote(name, f"it has more than {max_bytes} bytes")
    content = bytes(data)
    if content[:64].lstrip().lower().startswith(_PAGES):
        raise DamagedRemote(name, "it is a web page; a proxy may have answered in place of the store")
    return content


def read_document(
    objects: Objects, name: str, decode: Callable[[bytes], _Document], max_bytes: int = MAX_DOCUMENT_BYTES
) -> _Document:
    """Return what ``decode`` makes of the whole object, which is read again where that fails (`read_verified`).

    Raises:
        NoSuchObject: there is none.
        DamagedRemote: it has more than ``max_bytes``, or ``decode`` raises it.
    """
    return read_verified(objects, lambda: decode(read_object(objects, name, max_bytes)))


def read_entry(objects: Objects, sealer: Sealer, writer: str, number: int) -> LogEntry:
    """Return an entry of a writer's log.

    Raises:
        NoSuchObject: there is none.
        DamagedRemote: it does not open.
    """
    return read_document(
        objects, log_entry_name(writer, number), lambda data: decode_log_entry(sealer, writer, number, data)
    )


def create_entry(objects: Objects, sealer: Sealer, writer: str, number: int, entry: LogEntry) -> bool:
    """Create an entry of a writer's log; False if another entry stands there, or this one after a lost reply."""
    return objects.create(log_entry_name(writer, number), encode_log_entry(sealer, writer, number, entry))


def read_round(objects: Objects, sealer: Sealer, round_: int, part: RoundPart) -> StoredRound:
    """Return an object of a round.

    Raises:
        NoSuchObject: there is none.
        DamagedRemote: it does not open.
    """
    return read_document(
        objects, round_name(round_, part), lambda data: decode_round(sealer, round_, part, data)
    )


def create_round(
    objects: Objects, sealer: Sealer, round_: int, part: RoundPart, content: StoredRound
) -> StoredRound:
    """Create an object of a round, unless one stands there; return the one that stands."""
    if objects.create(round_name(round_, part), encode_round(sealer, round_, part, content)):
        return content
    return read_round(objects, sealer, round_, part)


_VERSION: Final = 1
_SPLIT_VERSION: Final = 2
"""Version of a remote whose packs lie in another place than its log, which is refused."""
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
    packs_url: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)] | None = None
    """Place of the packs, where an earlier version put them in another one than the log."""

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
        version=_VERSION,
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
        version=_VERSION,
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
        convert(msgspec.to_builtins(stored), StoredRemote)
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
    return bytes.fromhex(_decode_remote(data).id)


def is_sealed(data: bytes) -> bool:
    """Return whether remote.json says that a key is needed. It is not authenticated yet.

    Raises:
        DamagedRemote: this is no remote.json.
        UnsupportedFormat: a later version of ciuic wrote it.
    """
    return _decode_remote(data).sealed


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
        PacksElsewhere: its packs lie in another place than its log.
    """
    stored = _decode_remote(data)
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
    # Once it is authenticated: what an attacker stores beside it must not stop a rescue from its versions.
    if stored.packs_url is not None:
        raise PacksElsewhere(stored.packs_url)
    sealer = Sealer(remote_id, master)
    return OpenRemote(stored, sealer, _identity(stored, sealer, master))


def _decode_remote(data: bytes) -> StoredRemote:
    """Return the fields without comparing the check."""
    if len(data) > MAX_REMOTE_JSON_BYTES:
        raise DamagedRemote(REMOTE_JSON, f"it has {len(data)} bytes; {MAX_REMOTE_JSON_BYTES} are the limit")
    try:
        # The version before everything else: a later one may have other fields.
        fields = decode_json(data, dict[str, Any])
        version, known = fields.get("version"), _SPLIT_VERSION if "packs_url" in fields else _VERSION
        if version != known:
            raise UnsupportedFormat(f"the remote has version {version}; this ciuic reads version {known}")
        stored = decode_json(data, StoredRemote)
        check_block_size(stored.block_size)
    except (msgspec.DecodeError, ValueError) as error:
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
            found = decode_json(inner, _StoredIdentity)
        except (msgspec.DecodeError, ValueError) as error:
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
