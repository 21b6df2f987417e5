"""Manifest of a snapshot, sealed msgpack: the snapshot file, its marks and where it came from.

References:
    docs/remote-format.md, section 7
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from blake3 import blake3

from ciuic.remote.format.document import decode_document, encode_document
from ciuic.remote.format.log_entry import PackRefs
from ciuic.remote.format.names import MAX_STEP, HexId
from ciuic.remote.sealing.sealer import Sealer
from ciuic.repository.config import MAX_FILE_BYTES

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
    return encode_document(sealer, name, manifest, RemoteManifest, msgpack=True)


def decode_manifest(sealer: Sealer, name: str, data: bytes) -> RemoteManifest:
    """Return the manifest; the snapshot file in it is not decoded.

    Raises:
        DamagedRemote: it does not open, or is no manifest.
        UnsupportedFormat: a later version of ciuic wrote it.
    """
    return decode_document(sealer, name, data, RemoteManifest, msgpack=True)


def object_digest(data: bytes) -> str:
    """Return BLAKE3-256 of an object's bytes in hexadecimal digits, as a commit names its manifest by."""
    return blake3(data).hexdigest()
