"""Check the consistency of a repository, and repair it without deleting what a snapshot needs.

Guarantees: nothing is changed without ``repair``. With it, the index is rebuilt from packs and snapshot files. A chunk with one
damaged and one good copy is read from the good one from then on. A damaged chunk without a good copy is healed from the live
files, where they still have its content. A damaged pack of which every chunk that a snapshot needs is good, there or elsewhere,
is replaced by its good chunks. What cannot be repaired is reported with what to do about it. Unreadable files stay where they
are, because other tools may still read them.

A check reads the structure of every snapshot, and header, size and footer of every pack; with ``read_data`` also every byte of
every pack. What was not read is not called sound. Its `CheckReport`, which checks of remotes return as well, has the findings
with their severity. ciuic.maintenance.verify names the files of snapshots that damage touches.

Of a live file, a block is accepted only when its id, computed by the writer, is the lost one. Every reference of every readable
snapshot is tried, under each name of a file that has several, and damage to one hides no other. Only regular files are opened, and no
link is followed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ciuic.errors import Damaged, NotFound
from ciuic.maintenance.chunkset import ChunkSet
from ciuic.maintenance.references import ReferenceFinder
from ciuic.maintenance.sweep import add_bases, all_listed
from ciuic.repository import Repository, Walker, Writer
from ciuic.repository import log as _log
from ciuic.repository.locks import is_claimed
from ciuic.repository.snapshot_walk import Reached
from ciuic.system.disk import open_regular
from ciuic.types import ChunkId, Snapshot, SnapshotId
from ciuic.units import human_size, plural

Kind = Literal[
    "configuration",
    "snapshot",
    "index",
    "structure",
    "missing chunk",
    "pack",
    "damaged chunk",
    "orphaned pack",
    "key slot",
    "log",
    "round",
]
Severity = Literal["error", "warning", "info"]


@dataclass
class CheckFinding:
    """A problem that a check found."""

    severity: Severity
    kind: Kind
    message: str
    hint: str = ""
    snapshot: str = ""
    """A snapshot that the problem concerns; there may be more."""
    chunk: ChunkId | None = None
    repaired: bool = False


@dataclass
class CheckReport:
    """Result of a check: the findings, and how much was read."""

    findings: list[CheckFinding] = field(default_factory=list)
    snapshots: int = 0
    packs: int = 0
    stored_bytes: int = 0
    orphaned_bytes: int = 0
    """Size of packs that nothing refers to; `ciuic prune` frees them."""
    garbage_bytes: int = 0
    """Size of stored chunks that nothing refers to, in any pack."""
    data_read: bool = False
    """True if every byte of every pack was read."""
    damaged_snapshots: set[str] = field(default_factory=set)
    """Snapshots of a remote that cannot be read whole."""

    @property
    def damaged(self) -> bool:
        """True if an error remains: exit code 4."""
        return any(finding.severity == "error" and not finding.repaired for finding in self.findings)


def summary(report: CheckReport) -> str:
    """Return the report in one sentence."""
    errors = sum(finding.severity == "error" and not finding.repaired for finding in report.findings)
    repaired = sum(finding.repaired for finding in report.findings)
    looked = f"{plural(report.snapshots, 'snapshot')}, {plural(report.packs, 'pack')}, {human_size(report.stored_bytes)}"
    if errors:
        return f"{looked}: {plural(errors, 'error')}" + (f", {repaired} repaired" if repaired else "")
    verdict = f"{repaired} repaired" if repaired else "in order"
    if not report.data_read:
        verdict += "; the content of the packs was not read (`ciuic check --read-data` reads it)"
    return f"{looked}: {verdict}"


def _heal_from_live_files(
    repository: Repository, writer: Writer, lost: Collection[ChunkId]
) -> Iterator[tuple[ChunkId, bytes]]:
    """Yield each chunk that was stored anew, with the path of its live file. Durable when the writer has flushed."""
    left = set(lost)
    # Newest first: the paths of the newest snapshot are the most likely to exist still.
    for id_ in repository.snapshots.ids():
        if not left:
            return
        try:
            snapshot = repository.snapshots.load(id_)
        except Damaged:
            # The check has reported it; other snapshots may lead to the same blocks.
            continue
        for chunk, path, offset, length in list(_places(repository, snapshot, left)):
            data = _live_block(path, offset, length) if chunk in left else None
            # The file may have changed since the snapshot: the id decides.
            if data is not None and writer.chunk_id(data) == chunk:
                writer.put_chunk(data)
                left.discard(chunk)
                yield chunk, path


def _places(
    repository: Repository, snapshot: Snapshot, lost: Collection[ChunkId]
) -> Iterator[tuple[ChunkId, bytes, int, int]]:
    """Yield (chunk, absolute path, offset, length) for every lost block of the snapshot."""
    bad = set(lost)
    lengths: dict[ChunkId, int] = {}
    block_size = repository.block_size

    def unreadable(reached: Reached, _error: Damaged) -> None:
        # Names below a damaged node cannot be found; all others can.
        bad.add(reached.id)

    for reached in Walker(repository).walk(snapshot, on_damage=unreadable):
        if reached.kind == "data" and reached.id in lost and reached.entry is not None:
            # The last block of a file is shorter than the others.
            lengths[reached.id] = min(block_size, reached.entry.size_bytes - reached.block * block_size)
    if not lengths:
        return
    for place in ReferenceFinder(repository, bad).references(snapshot):
        if place.kind == "data" and place.chunk in lengths:
            yield place.chunk, place.path, place.block * block_size, lengths[place.chunk]


def _live_block(path: bytes, offset: int, length: int) -> bytes | None:
    """Return the block as the live file has it now; None if there is no such file or it is too short."""
    try:
        descriptor = open_regular(path, os.O_RDONLY)
    except (OSError, ValueError):
        # Removed, not readable, no regular file any more, or no possible path (ValueError: a null byte).
        return None
    try:
        data = os.pread(descriptor, length, offset)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return data if len(data) == length and length > 0 else None


Progress = Callable[[str, int, int], None]

_VERIFY = "`ciuic verify --all` names the files and snapshots that it touches"
_VERIFY_DATA = "`ciuic verify --all --checksum` names the files and snapshots that it touches; `ciuic check --repair --read-data` heals what it can"


def check(
    repository: Repository,
    *,
    repair: bool = False,
    read_data: bool = False,
    live_files: bool = True,
    wait_seconds: float = 0,
    progress: Progress | None = None,
) -> CheckReport:
    """Check everything; repairs are durable on return.

    Args:
        repository: the open repository.
        repair: take the repository's lock and repair what can be repaired.
        read_data: read every byte of every pack.
        live_files: a repair may read the protected directories, at the paths in the snapshots, for lost blocks; never done for
            a repository that other users may have written.
        wait_seconds: time to wait for the lock.
        progress: called with (what is being done, how much is done, of how much).

    Raises:
        Busy: the lock could not be taken.
    """
    # The paths come from the repository. Another user's repository could have root read any file, and would learn from what is
    # healed whether the content was guessed right.
    live_files = live_files and not repository.foreign_reason()
    run = _Check(repository, read_data, live_files, progress, CheckReport(data_read=read_data))
    # Before the lock is taken: a writer begins by updating the catalogue to the files that exist, which hides what vanished.
    run.find_vanished_files()
    if not repair:
        run.run(None)
    else:
        with repository.writer(wait_seconds=wait_seconds, command="check --repair") as writer:
            run.run(writer)
    return run.report


class _Reached:
    """Chunks that a snapshot refers to: a predicate with a length."""

    def __init__(self, nodes: set[ChunkId], data: ChunkSet) -> None:
        self._nodes = nodes
        self._data = data

    def __call__(self, chunk: ChunkId) -> bool:
        return chunk in self._nodes or chunk in self._data

    def __len__(self) -> int:
        return len(self._nodes) + len(self._data)


@dataclass
class _Check:
    """A check from beginning to end."""

    repository: Repository
    read_data: bool
    live_files: bool
    progress: Progress | None
    report: CheckReport = field(default_factory=CheckReport)
    lost: dict[ChunkId, CheckFinding] = field(default_factory=dict)
    """Chunks without a good copy."""
    pack_sizes: dict[int, int] = field(default_factory=dict)
    harmless: set[int] = field(default_factory=set)
    """Packs that cannot be listed completely and cannot hide anything that is needed."""
    by_pack: dict[int, list[CheckFinding]] = field(default_factory=dict)
    """Findings of damage, by pack."""

    def run(self, writer: Writer | None) -> None:
        self.pack_sizes = {pack.number: pack.size_bytes for pack in self.repository.packs()}
        self.check_configuration(writer)
        self.check_snapshot_files()
        # Before the structure: with a stale index, existing chunks seem to be missing.
        self.check_index(writer)
        reached = self.check_structure()
        self.check_packs(reached)
        if self.read_data:
            self.read_everything(writer)
        # Healing comes before packs are replaced: a healed chunk is a good copy elsewhere.
        if writer is not None and self.lost and self.live_files:
            self._heal_from_live_files(writer)
        if writer is not None and reached is not None and self.by_pack:
            self.replace_damaged_packs(writer, reached)

    def found(
        self, severity: Severity, kind: Kind, message: str, hint: str = "", snapshot: str = ""
    ) -> CheckFinding:
        finding = CheckFinding(severity, kind, message, hint, snapshot)
        self.report.findings.append(finding)
        return finding

    def show_progress(self, what: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(what, done, total)

    def check_configuration(self, writer: Writer | None) -> None:
        findings = [
            self.found(
                "error", "configuration", words, "`ciuic check --repair` rewrites it from the good copy"
            )
            for words in self.repository.config_damage()
        ]
        if findings and writer is not None:
            writer.repair_config()
            left = self.repository.config_damage()
            _repaired(findings, left, "it was rewritten from the good copy")

    def check_snapshot_files(self) -> None:
        for snapshot in self.repository.snapshots.unreadable():
            message = f"{snapshot.path} cannot be read as a snapshot: {snapshot.reason}"
            hint = (
                f"restore the file from another copy, or give the snapshot up: `ciuic forget {snapshot.id}`"
            )
            self.found("error", "snapshot", message, hint, snapshot.id)

    def find_vanished_files(self) -> None:
        hint = "unless it was removed on purpose, restore the file from another copy before the next snapshot"
        for words in self.repository.snapshots.vanished():
            self.found("warning", "snapshot", words, hint)

    # --- index

    def check_index(self, writer: Writer | None) -> None:
        problems = self.repository.check_index()
        # A new repository has no packs, and no index yet.
        if not problems or not self.pack_sizes:
            return
        findings = [
            self.found("warning", "index", words, "`ciuic check --repair` rebuilds it") for words in problems
        ]
        if writer is None:
            return
        writer.rebuild_index()
        left = self.repository.check_index()
        _repaired(findings, left, "the index was rebuilt")

    # --- structure

    def check_structure(self) -> _Reached | None:
        """Walk every snapshot; return the chunks that were reached, or None when a snapshot could not be read completely."""
        nodes: set[ChunkId] = set()
        data = ChunkSet()
        unreadable = {snapshot.id for snapshot in self.repository.snapshots.unreadable()}
        complete = not unreadable
        # What cannot be read was named by check_snapshot_files; the catalogue may list it all the same.
        ids = [id_ for id_ in self.repository.snapshots.ids() if id_ not in unreadable]
        for done, id_ in enumerate(ids):
            self.show_progress("reading snapshots", done, len(ids))
            # `&=` and not `and`: every snapshot is checked, whatever was found before.
            complete &= self.check_snapshot(id_, Walker(self.repository, seen=nodes, seen_data=data))
            self.report.snapshots += 1
        # What an unreadable snapshot needs is not known, so nothing can be called unneeded.
        if not complete:
            return None
        reached = _Reached(nodes, data)
        add_bases(self.repository, reached, data.add)
        return reached

    def check_snapshot(self, id_: SnapshotId, walker: Walker) -> bool:
        try:
            snapshot = self.repository.snapshots.load(id_)
            for reached in walker.walk(snapshot, paths=True):
                if reached.kind == "data" and not self.present(reached.id):
                    self.missing(id_, reached)
        except Damaged as error:
            self.found("error", "structure", f"{id_}: {error.message}", _VERIFY, id_)
            return False
        return True

    def present(self, chunk: ChunkId) -> bool:
        """Return whether an existing pack holds the chunk."""
        try:
            # The index does not notice that a pack file is gone or cut short, so its answer is compared with the files' sizes.
            located = self.repository.chunks.locate_all(chunk)
            sizes = self.pack_sizes
            if any(where.offset + where.stored_bytes > sizes.get(where.pack, 0) for where in located):
                self.repository.chunks.get(chunk)
        except Damaged:
            return False
        return True

    def missing(self, id_: SnapshotId, reached: Reached) -> None:
        message = f"{id_}: block {reached.block} of {os.fsdecode(reached.path)} is missing"
        finding = self.found("error", "missing chunk", message, _VERIFY, id_)
        finding.chunk = reached.id
        self.lost.setdefault(reached.id, finding)

    # --- packs

    def check_packs(self, reached: _Reached | None) -> None:
        packs = self.repository.packs()
        orphans = 0
        damaged: dict[int, Damaged] = {}
        for done, pack in enumerate(packs):
            self.show_progress("reading pack tables", done, len(packs))
            self.report.packs += 1
            self.report.stored_bytes += pack.size_bytes
            try:
                records = list(self.repository.pack_records(pack.number))
            except NotFound:
                # Without the lock a prune may remove packs meanwhile.
                continue
            except Damaged as error:
                damaged[pack.number] = error
                continue
            # With an unreadable snapshot it is not known which chunks are needed.
            if reached is None:
                continue
            unneeded = [record for record in records if not reached(record.id)]
            self.report.garbage_bytes += sum(record.stored_bytes for record in unneeded)
            if records and len(unneeded) == len(records):
                orphans += 1
                self.report.orphaned_bytes += pack.size_bytes
        self.report_damaged_packs(damaged, reached)
        if not self.read_data:
            for number, words in self.repository.pack_problems():
                if number not in damaged:
                    self.found("error", "pack", words, _VERIFY_DATA)
        if orphans:
            message = f"{plural(orphans, 'pack')} with {human_size(self.report.orphaned_bytes)} that no snapshot needs"
            self.found("info", "orphaned pack", message, self.orphans_hint())

    def orphans_hint(self) -> str:
        """Return the advice that frees orphaned packs: prune, unless prune would refuse because snapshots may be missing."""
        if self.repository.snapshots.names() or self.repository.misses_no_snapshot():
            return "`ciuic prune` frees them"
        return "restore snapshots/ from a copy if there was a snapshot; otherwise `ciuic prune` frees them after the next snapshot"

    def report_damaged_packs(self, damaged: dict[int, Damaged], reached: _Reached | None) -> None:
        """Report packs that cannot be listed completely.

        An interrupted write leaves a torn pack, which is no damage if everything that is needed is listed elsewhere.
        """
        if damaged and reached is not None and all_listed(self.repository, reached, len(reached)):
            self.harmless.update(damaged)
        for number, error in damaged.items():
            if number in self.harmless:
                message = f"{error.message}; nothing that a snapshot needs is in the unreadable part"
                self.found(
                    "warning",
                    "pack",
                    message,
                    "an interrupted write leaves such packs; `ciuic prune` removes it",
                )
            else:
                finding = self.found("error", "pack", error.message, _VERIFY_DATA)
                self.by_pack.setdefault(number, []).append(finding)

    def read_everything(self, writer: Writer | None) -> None:
        findings: dict[ChunkId, CheckFinding] = {}
        known = 0
        for damage in self.repository.scrub(
            lambda done, total: self.show_progress("reading packs", done, total)
        ):
            where = f"pack {damage.pack:016x}, offset {damage.offset}: {damage.reason}"
            if damage.chunk is None and damage.pack in self.harmless:
                continue
            # An earlier repair has marked this copy, and its chunk is read from another one.
            if self.repository.is_spent_copy(damage):
                # Its pack is rewritten by a repair all the same, so that the bad copy goes.
                known += 1
                self.by_pack.setdefault(damage.pack, [])
                continue
            what = where if damage.chunk is None else f"chunk {damage.chunk.hex()}, {where}"
            finding = self.found(
                "error", "pack" if damage.chunk is None else "damaged chunk", what, _VERIFY_DATA
            )
            self.by_pack.setdefault(damage.pack, []).append(finding)
            if damage.chunk is not None:
                finding.chunk = damage.chunk
                findings[damage.chunk] = finding
        if known:
            message = f"{known} damaged copies are no longer read: each chunk has a good copy"
            self.found("info", "damaged chunk", message, "no action is needed; the next repair removes them")
        if writer is None or not findings:
            return
        # Marked copies are not read any more; what comes back are chunks that have no other copy.
        without_good_copy = set(writer.mark_damaged(findings))
        for chunk, finding in findings.items():
            if chunk in without_good_copy:
                self.lost.setdefault(chunk, finding)
            else:
                finding.repaired = True
                finding.hint = "another copy is good and is read from now on"

    def replace_damaged_packs(self, writer: Writer, reached: _Reached) -> None:
        """Store the good chunks of damaged packs elsewhere, and remove these packs: every scrub would find the damage again.

        A pack stays if something that a snapshot needs has no good copy, or if its list may be incomplete.
        """
        # Several processes are storing one snapshot: their chunks belong to no snapshot yet, and would seem unneeded.
        if is_claimed(str(self.repository.path)):
            return
        for number, findings in self.by_pack.items():
            try:
                writer.rewrite_pack(number, reached)
            except (Damaged, NotFound) as error:
                _log.info("damaged_pack_stays", pack=f"{number:016x}", error=str(error))
                continue
            except OSError as error:
                _log.warning("damaged_pack_stays", pack=f"{number:016x}", error=str(error))
                # A writer that failed to store can only be closed.
                return
            for finding in findings:
                if not finding.repaired:
                    finding.repaired = True
                    finding.hint = "what snapshots need of the pack was stored anew, and the pack was removed"

    def _heal_from_live_files(self, writer: Writer) -> None:
        """Store lost blocks anew from the files that they came from, where these still have the same bytes."""
        before = len(self.lost)
        for chunk, path in _heal_from_live_files(self.repository, writer, self.lost):
            del self.lost[chunk]
            for finding in self.report.findings:
                if finding.chunk == chunk:
                    finding.repaired = True
                    finding.hint = f"healed from the live file {os.fsdecode(path)}"
        # Durable before the report says healed.
        writer.flush()
        if len(self.lost) == before:
            return
        # Chunks that are stored as differences from healed ones can be read again.
        still = set(writer.mark_damaged(list(self.lost)))
        for chunk in self.lost.keys() - still:
            finding = self.lost.pop(chunk)
            finding.repaired, finding.hint = (
                True,
                "the chunk that it is stored as a difference from is good again",
            )


def _repaired(findings: list[CheckFinding], left: Sequence[str], done: str) -> None:
    """Mark the findings whose problem is not found any more as repaired."""
    for finding in findings:
        if finding.message not in left:
            finding.repaired, finding.hint = True, done
