"""Orbax: a directory that is renamed into place when it is complete, with ``_CHECKPOINT_METADATA`` and a database of arrays.

References:
    https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html
    https://google.github.io/tensorstore/kvstore/ocdbt/ (manifest)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from ciuic.verdicts.bounded_reader import BoundedReader
from ciuic.verdicts.directories.parts import MAX_PARTS, PartsNeeded, document_of
from ciuic.verdicts.formats.tensor_bundle import crc32c
from ciuic.verdicts.model import NotJudged, TornContent
from ciuic.verdicts.sources import DirectorySource

_MARKER: Final = b"_CHECKPOINT_METADATA"
_MANIFEST: Final = b"manifest.ocdbt"
_UNFINISHED: Final = b".orbax-checkpoint-tmp"
_MANIFEST_MAGIC: Final = bytes.fromhex("0cdb3a2a")
_MAX_MANIFEST_BYTES: Final = 1 << 20


class _Marker(msgspec.Struct):
    commit_timestamp_nsecs: int | None = None


def recognise(directory: DirectorySource, names: list[bytes]) -> Iterator[PartsNeeded]:
    """Yield the checkpoint that the directory is."""
    if _MARKER not in names and _MANIFEST not in names:
        return
    taken = frozenset(names)
    if _UNFINISHED in directory.path.rpartition(b"/")[2]:
        yield PartsNeeded("orbax", torn="it was never renamed to its name: its save did not end", taken=taken)
        return
    try:
        _check_marker(directory)
        raw = tuple(_check_database(directory))
    except TornContent as error:
        yield PartsNeeded("orbax", torn=str(error), taken=taken)
    except NotJudged as error:
        yield PartsNeeded("orbax", doubt=str(error), taken=taken)
    else:
        # An item of a checkpoint lies below the directory with the marker.
        doubt = "" if _MARKER in names else "it has no _CHECKPOINT_METADATA of its own"
        yield PartsNeeded("orbax", raw=raw, tail_bytes=4, doubt=doubt, taken=taken)


def _check_marker(directory: DirectorySource) -> None:
    text = document_of(directory, _MARKER, "_CHECKPOINT_METADATA")
    if text is None:
        return
    try:
        marker = msgspec.json.decode(text, type=_Marker)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise TornContent("_CHECKPOINT_METADATA is not the JSON of one") from None
    if marker.commit_timestamp_nsecs is None:
        raise TornContent("_CHECKPOINT_METADATA has no time of the commit: its save did not end")


def _check_database(directory: DirectorySource) -> Iterator[tuple[bytes, int]]:
    """Check the manifests of the directory and of its items, and yield the files of data."""
    names = directory.names()
    found = False
    for item in [b"", *names]:
        place = directory.directory(item) if item else directory
        manifest = None if place is None else place.file(_MANIFEST)
        if place is None or manifest is None:
            continue
        found = True
        _check_manifest(BoundedReader(manifest.read, manifest.size_bytes, _MANIFEST))
        yield from _data(place, item + b"/" if item else b"")
    if not found:
        raise NotJudged("it has no database of arrays (manifest.ocdbt)")


def _check_manifest(reader: BoundedReader) -> None:
    head = reader.at(0, 12, "manifest.ocdbt")
    length = int.from_bytes(head[4:], "little")
    if head[:4] != _MANIFEST_MAGIC or length != reader.size_bytes:
        raise TornContent("manifest.ocdbt is incomplete")
    if length > _MAX_MANIFEST_BYTES:
        raise NotJudged("manifest.ocdbt is larger than what is read for a verdict")
    data = reader.at(0, length, "manifest.ocdbt")
    if crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise TornContent("manifest.ocdbt does not match its checksum")


def _data(place: DirectorySource, prefix: bytes) -> Iterator[tuple[bytes, int]]:
    below = place.directory(b"d")
    names = [] if below is None else below.names()
    if not names or len(names) > MAX_PARTS:
        raise (
            TornContent("it has no data") if not names else NotJudged("it has more files than are looked at")
        )
    for name in names:
        yield prefix + b"d/" + name, 1
