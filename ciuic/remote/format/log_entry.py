"""Entries of a writer's log, sealed JSON: hello, commit, fence, remove, move, state, retired.

References:
    docs/remote-format.md, section 6
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ciuic.remote.format.document import decode_document, encode_document
from ciuic.remote.format.names import HexId, Number, StoredManifestName, StoredPackRef, log_entry_name
from ciuic.remote.sealing.sealer import Sealer

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
    return encode_document(sealer, log_entry_name(writer, number), entry, LogEntry)


def decode_log_entry(sealer: Sealer, writer: str, number: int, data: bytes) -> LogEntry:
    """Return entry ``number`` of a writer's log.

    Raises:
        DamagedRemote: it does not open, or is no entry.
        UnsupportedFormat: a later version of ciuic wrote it.
    """
    name = log_entry_name(writer, number)
    return decode_document(sealer, name, data, LogEntry)  # type: ignore[arg-type]
