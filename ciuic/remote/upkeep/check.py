"""Check a remote: key slots, rounds, manifests, tables and records of packs, the structure of snapshots and, on request, every byte.

Guarantee: damage is reported, never raised, and does not end the check.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

from ciuic.errors import Damaged
from ciuic.maintenance.check import CheckFinding, CheckReport, Kind, Severity
from ciuic.maintenance.verify import Damage, VerifyProgress, verify_snapshots
from ciuic.remote.access import KeySlots
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.format.documents import read_document
from ciuic.remote.format.names import PACKS_PREFIX, PackRef, is_slot, parse_pack, split_ref
from ciuic.remote.format.pack import MAX_PACK_BYTES, RemotePackReader
from ciuic.remote.log.rounds import Rounds
from ciuic.remote.objects.model import ArchivedObject, NoSuchObject, Objects
from ciuic.remote.reading.opening import ReadableRemote
from ciuic.remote.reading.remote_repository import RemoteRepository, SpaceReader
from ciuic.remote.sealing.sealer import Sealer
from ciuic.remote.upkeep.log_repair import check_logs
from ciuic.repository.errors import UnsupportedFormat
from ciuic.repository.model import PackKind, PackRecord
from ciuic.types import ChunkId
from ciuic.units import plural

# Whole packs in memory at once: 64 MiB each.
_WHOLE_PACKS_AT_ONCE: Final = 2


class _CheckedPack(NamedTuple):
    """Result of the check of one pack."""

    ref: PackRef
    size_bytes: int
    """Size as the listing says."""
    records: list[PackRecord]
    """Its table; empty if it is damaged."""
    problem: str
    """Defect in words; empty if there is none."""


def listed_packs(objects: Objects) -> dict[PackRef, int]:
    """Return the packs that are there, with their sizes."""
    return {
        ref: info.size_bytes
        for info in objects.list(PACKS_PREFIX)
        if (ref := parse_pack(info.name)) is not None
    }


def check_packs(
    objects: Objects,
    sealer: Sealer,
    packs: dict[PackRef, int],
    *,
    read_share: float = 0.0,
    rng: random.Random | None = None,
    threads: int = 8,
) -> Iterator[_CheckedPack]:
    """Yield each pack with what is wrong with it. A pack that was deleted meanwhile is left out.

    Args:
        objects: The remote.
        sealer: Its seals.
        packs: Packs to check, as `listed_packs` returns them.
        read_share: Share of the packs of which every byte is read and verified, from 0 to 1; of the others only the
            table.
        rng: Chooses those that are read.
        threads: Tables that are read at the same time.
    """
    rng = rng or random.Random()
    refs = list(packs)
    whole = set(rng.sample(refs, round(len(refs) * min(max(read_share, 0.0), 1.0))))
    tables = (ref for ref in refs if ref not in whole)
    yield from _in_threads(objects, sealer, packs, tables, threads, whole=False)
    yield from _in_threads(
        objects, sealer, packs, sorted(whole), min(threads, _WHOLE_PACKS_AT_ONCE), whole=True
    )


def _in_threads(
    objects: Objects,
    sealer: Sealer,
    packs: dict[PackRef, int],
    refs: Iterable[PackRef],
    threads: int,
    *,
    whole: bool,
) -> Iterator[_CheckedPack]:
    check = partial(_check_pack, objects, sealer, packs, whole=whole)
    waiting = list(refs)
    with ThreadPoolExecutor(threads) as pool:
        # In groups, so that results do not pile up faster than the caller takes them.
        for start in range(0, len(waiting), 4 * threads):
            for result in pool.map(check, waiting[start : start + 4 * threads]):
                if result is not None:
                    yield result


def _check_pack(
    objects: Objects, sealer: Sealer, packs: dict[PackRef, int], ref: PackRef, *, whole: bool
) -> _CheckedPack | None:
    reader = RemotePackReader(sealer, ref)
    try:
        if packs[ref] > MAX_PACK_BYTES:
            raise DamagedRemote(reader.name, f"it has {packs[ref]} bytes, which no pack has")
        if whole:
            records = read_document(objects, reader.name, reader.check, MAX_PACK_BYTES)
            return _CheckedPack(ref, packs[ref], records, "")
        return _CheckedPack(ref, packs[ref], reader.read_table(objects), "")
    except NoSuchObject:
        return None
    except (Damaged, UnsupportedFormat, ArchivedObject) as error:
        return _CheckedPack(ref, packs[ref], [], error.message)


_REPAIR_HINT = "ciuic check --remote --repair, on a host whose repository has it"
_KINDS: dict[str, Kind] = {
    "snapshot": "snapshot",
    "pack": "pack",
    "data": "damaged chunk",
    "xattrs": "damaged chunk",
}


class SpaceDamage(NamedTuple):
    """Damage in one space, for a repair."""

    chunks: dict[ChunkId, PackKind]
    """Chunks of which a copy is missing or damaged, with the kind of pack that they belong in."""
    packs: frozenset[PackRef]
    """Packs of which any byte is damaged."""
    snapshots: frozenset[str]
    """Snapshots, by their names in the remote, whose manifests cannot be read."""

    def __bool__(self) -> bool:
        return bool(self.chunks or self.packs or self.snapshots)


def check_remote(
    opened: ReadableRemote,
    *,
    read_data: bool = False,
    progress: Callable[[VerifyProgress], None] | None = None,
) -> CheckReport:
    """Check the remote; only reads.

    Args:
        opened: The remote.
        read_data: Read and verify every byte.
        progress: Called with the progress.

    Raises:
        RemoteUnreachable: the store did not answer for too long.
    """
    report = CheckReport(data_read=read_data)
    check_slots(opened, report)
    for reader, repository in zip(opened.readers, opened.repositories, strict=True):
        check_logs(reader, report)
        check_space(reader, repository, report, read_data=read_data, progress=progress)
    return report


def check_slots(opened: ReadableRemote, report: CheckReport) -> None:
    """Add the key slots that cannot be used to the report."""
    slots = KeySlots(opened.remote.objects)
    opened.readers[0].retry.call(slots.all)
    for one in slots.unusable:
        # Another name is nobody's slot.
        is_ours = is_slot(one.slot)
        hint = f"ciuic remote keys remove {shlex.quote(one.slot)}" + (
            ", and keys add with another key" if is_ours else ""
        )
        severity: Severity = "error" if is_ours else "warning"
        report.findings.append(CheckFinding(severity, "key slot", one.problem.message, hint))


def check_space(
    reader: SpaceReader,
    repository: RemoteRepository,
    report: CheckReport,
    *,
    read_data: bool,
    progress: Callable[[VerifyProgress], None] | None = None,
) -> SpaceDamage:
    """Check one space, add what is found to the report, and return what a repair has to mend."""
    space = reader.space
    check_rounds(reader, report)
    packs = listed_packs(space.objects)
    damaged: set[PackRef] = set()
    for pack in check_packs(space.objects, space.sealer, packs):
        if pack.problem:
            damaged.add(pack.ref)
            hint = "what snapshots need of it is reported as well, and nothing else is lost"
            report.findings.append(CheckFinding("error", "pack", pack.problem, hint))
    # Tables that decayed since the cache learned them say nothing any more.
    reader.lookup.refresh()
    reader.lookup.forget(damaged)
    result = verify_snapshots(repository, checksum=read_data, progress=progress)
    chunks: dict[ChunkId, PackKind] = {}
    snapshots: set[str] = set()
    for damage in result.damages:
        ref = parse_pack(damage.file.removeprefix(f"{space.objects.url}/"))
        if damage.kind == "pack" and damage.chunk is None and ref in damaged:
            continue
        report.findings.append(_finding(damage))
        if ref is not None:
            damaged.add(ref)
        if damage.chunk is not None:
            chunks[damage.chunk] = _pack_kind(damage, ref)
        if damage.kind == "snapshot":
            snapshots.update(map(str, damage.snapshots))
    if reader.archived:
        text = f"{plural(len(reader.archived), 'pack is', 'packs are')} archived, and not read"
        report.findings.append(CheckFinding("info", "pack", text, "thaw them first: ciuic remote thaw"))
    report.snapshots += len(result.snapshots)
    report.packs += len(packs)
    report.stored_bytes += sum(packs.values())
    return SpaceDamage(chunks, frozenset(damaged), frozenset(snapshots))


def _pack_kind(damage: Damage, ref: PackRef | None) -> PackKind:
    if ref is not None:
        return split_ref(ref)[0]
    return "data" if damage.kind == "data" else "meta"


def _finding(damage: Damage) -> CheckFinding:
    where = damage.path.decode(errors="surrogateescape") if damage.path else damage.file
    snapshots = ", ".join(damage.snapshots)
    text = f"{where}: {damage.reason}" + (f"; in {snapshots}" if snapshots else "")
    missing = damage.chunk is not None and not damage.file
    kind: Kind = "missing chunk" if missing else _KINDS.get(damage.kind, "structure")
    snapshot = str(damage.snapshots[0]) if damage.snapshots else ""
    return CheckFinding("error", kind, text, _REPAIR_HINT, snapshot=snapshot, chunk=damage.chunk)


def check_rounds(reader: SpaceReader, report: CheckReport) -> None:
    """Add a round that cannot be read, or that is under way, to the report."""
    rounds = Rounds(reader.space.objects, reader.space.sealer)
    try:
        rounds.refresh()
    except (Damaged, UnsupportedFormat) as error:
        hint = "" if isinstance(error, UnsupportedFormat) else "ciuic check --remote --repair"
        report.findings.append(CheckFinding("error", "round", error.message, hint))
        return
    if rounds.unfinished is not None:
        text = f"the collection {rounds.unfinished} is under way or was interrupted"
        report.findings.append(
            CheckFinding("info", "round", text, "ciuic prune --remote ends it; uploads go on")
        )
