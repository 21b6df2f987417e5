"""Find manifests that no log accounts for: their writers' logs were deleted, or cut at their ends.

A log never vanishes, and never becomes shorter; but the store, or a user who may delete in it, can bring back an older state. A
manifest names the log that its writer wrote when it was stored. It was committed in that log, if at all, before anything
that the writer wrote later.

References:
    docs/remote-format.md, section 7
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Final, NamedTuple

from ciuic.errors import Damaged
from ciuic.remote.format.manifest import RemoteManifest, decode_manifest
from ciuic.remote.format.names import log_entry_name, parse_manifest
from ciuic.remote.log.bounded import read_document
from ciuic.remote.log.log_reader import LogReader
from ciuic.remote.objects.model import NoSuchObject, ObjectInfo, Objects
from ciuic.remote.sealing.sealer import Sealer
from ciuic.repository.errors import UnsupportedFormat

UPLOADING_NS: Final = 3600 * 10**9
"""Age by the store's clock from which a manifest of a writer that has a log is no longer about to be committed."""


class UnloggedManifest(NamedTuple):
    """Manifest whose commit may be lost."""

    name: str
    manifest: RemoteManifest
    data: bytes
    reason: str
    """Fault of its writer's log, in words."""


def unlogged_manifests(
    objects: Objects, sealer: Sealer, stored: Iterable[ObjectInfo], logs: LogReader, young_since: int
) -> list[UnloggedManifest]:
    """Return the manifests that no log commits or removes, though nothing shows that they were never committed.

    Left out are those of damaged logs, which are damage of their own, and those that do not open: nobody could read them.

    Args:
        objects: The remote.
        sealer: Its seals.
        stored: Listing of manifests, made before the logs were read.
        logs: Logs, read.
        young_since: Time by the store's clock; younger manifests count only if their writer has no log.
    """
    live, removed = logs.live(), logs.removed()
    found = []
    for info in stored:
        if info.name in live or info.name in removed or parse_manifest(info.name) is None:
            continue
        try:
            manifest, data = read_document(objects, info.name, partial(_decoded, sealer, info.name))
        except (NoSuchObject, Damaged, UnsupportedFormat):
            continue
        if manifest.writer in logs.damaged:
            continue
        if manifest.writer not in logs.logs:
            reason = f"w/{manifest.writer}/, the log of its writer, is gone"
        elif info.modified_ns < young_since and not _went_on(objects, logs, manifest.writer, info):
            reason = f"w/{manifest.writer}/, the log of its writer, ends before it"
        else:
            continue
        found.append(UnloggedManifest(info.name, manifest, data, reason))
    return found


def _decoded(sealer: Sealer, name: str, data: bytes) -> tuple[RemoteManifest, bytes]:
    return decode_manifest(sealer, name, data), data


def _went_on(objects: Objects, logs: LogReader, writer: str, manifest: ObjectInfo) -> bool:
    """Return whether a writer wrote to its log after it had stored the manifest: then it was never committed."""
    own = logs.last_own(writer)
    entry = objects.info(log_entry_name(writer, own)) if own >= 0 else None
    # Stores tell whole seconds: an entry of the same second may be the one before.
    return entry is not None and entry.modified_ns > manifest.modified_ns
