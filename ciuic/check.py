"""Check: does the repository agree with itself? And repair, which never deletes what a snapshot needs.

Guarantees: nothing is changed without ``repair``; with it, the index is made anew from packs and snapshot files,
and a chunk with one damaged and one good copy is read from the good one from then on. A damaged chunk of which no
copy is good is healed from the live files where they still hold its content. A damaged pack of which every chunk that a snapshot
needs is good, there or elsewhere, is replaced by what is good of it. Whatever cannot be mended is named
with what to do. Unreadable files stay where they are: somebody may yet read them.

Leaves to ciuic.verify: which files of which snapshots damage touches. Reads the structure of every snapshot, and header, size and
footer of every pack; with ``read_data`` also every byte of every pack. What was not read is not called sound.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ciuic.chunkset import ChunkSet
from ciuic.errors import Damaged, NotFound
from ciuic.healing import heal_from_live_files
from ciuic.repository import Repository, Walker, Writer
from ciuic.repository import log as _log
from ciuic.repository.claim import is_claimed
from ciuic.repository.ownership import foreign_reason
from ciuic.repository.walk import Reached
from ciuic.sweep import add_bases, all_listed
from ciuic.types import ChunkId, SnapshotId
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
]
Severity = Literal["error", "warning", "info"]
Progress = Callable[[str, int, int], None]

_VERIFY = "`ciuic verify --all` names the files and snapshots that it touches"
_VERIFY_DATA = "`ciuic verify --all --checksum` names the files and snapshots that it touches; `ciuic check --repair --read-data` heals what it can"


@dataclass
class Finding:
    """One thing that is not as it should be."""

    severity: Severity
    kind: Kind
    message: str
    hint: str = ""
    snapshot: str = ""
    """A snapshot that it concerns; there may be more."""
    chunk: ChunkId | None = None
    repaired: bool = False


@dataclass
class CheckReport:
    """What was found, and how much was looked at."""

    findings: list[Finding] = field(default_factory=list)
    snapshots: int = 0
    packs: int = 0
    stored_bytes: int = 0
    orphaned_bytes: int = 0
    """In packs that nothing refers to; `ciuic prune` frees them."""
    garbage_bytes: int = 0
    """Stored chunks that nothing refers to, in whatever pack."""
    data_read: bool = False
    """Whether every byte of every pack was read."""

    @property
    def damaged(self) -> bool:
        """Whether an error remains: exit code 4."""
        return any(finding.severity == "error" and not finding.repaired for finding in self.findings)


def check(
    repository: Repository,
    *,
    repair: bool = False,
    read_data: bool = False,
    live_files: bool = True,
    wait_seconds: float = 0,
    progress: Progress | None = None,
) -> CheckReport:
    """Look at everything; with ``repair`` take the lock (Busy) and mend what can be mended, durable on return.

    ``live_files``: a repair may read the protected directories, at the paths in the snapshots, for lost blocks; never for a
    repository that others may have written.
    """
    # The paths are those that the repository names: somebody else's would have root read any file, and could tell from what is
    # healed whether its content was guessed.
    live_files = live_files and not foreign_reason(repository.path)
    run = _Check(repository, read_data, live_files, progress, CheckReport(data_read=read_data))
    run.look_for_vanished_files()  # before the lock: a writer begins by making the catalogue say what is there
    if not repair:
        run.look(None)
    else:
        with repository.writer(wait_seconds=wait_seconds, command="check --repair") as writer:
            run.look(writer)
    return run.report


class _Reached:
    """Whether a chunk was reached, and how many were."""

    def __init__(self, nodes: set[ChunkId], data: ChunkSet) -> None:
        self._nodes = nodes
        self._data = data

    def __call__(self, chunk: ChunkId) -> bool:
        return chunk in self._nodes or chunk in self._data

    def __len__(self) -> int:
        return len(self._nodes) + len(self._data)


@dataclass
class _Check:
    repository: Repository
    read_data: bool
    live_files: bool
    progress: Progress | None
    report: CheckReport = field(default_factory=CheckReport)
    lost: dict[ChunkId, Finding] = field(default_factory=dict)
    """Chunks without a good copy."""
    pack_sizes: dict[int, int] = field(default_factory=dict)
    harmless: set[int] = field(default_factory=set)
    """Packs that cannot be listed as a whole, and in which nothing can hide that is needed."""
    by_pack: dict[int, list[Finding]] = field(default_factory=dict)
    """Damage in packs."""

    def look(self, writer: Writer | None) -> None:
        self.pack_sizes = {pack.number: pack.size_bytes for pack in self.repository.packs()}
        self.look_at_configuration(writer)
        self.look_at_snapshot_files()
        self.look_at_index(writer)  # first: without it chunks that are there seem to be missing
        reached = self.look_at_structure()
        self.look_at_packs(reached)
        if self.read_data:
            self.read_everything(writer)
        if writer is not None and self.lost and self.live_files:
            self.heal_from_live_files(writer)
        if writer is not None and reached is not None and self.by_pack:
            self.replace_damaged_packs(writer, reached)

    def found(
        self, severity: Severity, kind: Kind, message: str, hint: str = "", snapshot: str = ""
    ) -> Finding:
        finding = Finding(severity, kind, message, hint, snapshot)
        self.report.findings.append(finding)
        return finding

    def tell(self, what: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(what, done, total)

    def look_at_configuration(self, writer: Writer | None) -> None:
        findings = [
            self.found("error", "configuration", words, "`ciuic check --repair` writes it from the good copy")
            for words in self.repository.config_damage()
        ]
        if findings and writer is not None:
            writer.repair_config()
            left = self.repository.config_damage()
            _repaired(findings, left, "it was written anew from the good copy")

    def look_at_snapshot_files(self) -> None:
        for snapshot in self.repository.snapshots.unreadable():
            message = f"{snapshot.path} is no readable snapshot: {snapshot.reason}"
            hint = f"put it back from another copy, or give it up: `ciuic forget {snapshot.id}`"
            self.found("error", "snapshot", message, hint, snapshot.id)

    def look_for_vanished_files(self) -> None:
        hint = "if nobody removed it, put it back from another copy before the next snapshot is taken"
        for words in self.repository.snapshots.vanished():
            self.found("warning", "snapshot", words, hint)

    # --- index

    def look_at_index(self, writer: Writer | None) -> None:
        problems = self.repository.check_index()
        if not problems or not self.pack_sizes:
            return  # a new repository has no index yet
        findings = [
            self.found("warning", "index", words, "`ciuic check --repair` makes it anew")
            for words in problems
        ]
        if writer is None:
            return
        writer.rebuild_index()
        left = self.repository.check_index()
        _repaired(findings, left, "it was made anew")

    # --- structure

    def look_at_structure(self) -> _Reached | None:
        """Walk every snapshot; what was reached, or None when some could not be."""
        nodes: set[ChunkId] = set()
        data = ChunkSet()
        complete = not self.repository.snapshots.unreadable()
        ids = self.repository.snapshots.ids()
        for done, id_ in enumerate(ids):
            self.tell("reading snapshots", done, len(ids))
            complete &= self.look_at_snapshot(id_, Walker(self.repository, seen=nodes, seen_data=data))
            self.report.snapshots += 1
        if not complete:
            return None
        reached = _Reached(nodes, data)
        add_bases(self.repository, reached, data.add)
        return reached

    def look_at_snapshot(self, id_: SnapshotId, walker: Walker) -> bool:
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
        """Whether a pack that is there holds it. The index is asked first, and may not know that a pack is gone."""
        try:
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

    def look_at_packs(self, reached: _Reached | None) -> None:
        packs = self.repository.packs()
        orphans = 0
        damaged: dict[int, Damaged] = {}
        for done, pack in enumerate(packs):
            self.tell("reading pack tables", done, len(packs))
            self.report.packs += 1
            self.report.stored_bytes += pack.size_bytes
            try:
                records = list(self.repository.pack_records(pack.number))
            except NotFound:
                continue  # without the lock, somebody may collect meanwhile
            except Damaged as error:
                damaged[pack.number] = error
                continue
            if reached is None:
                continue  # what the unreadable part needs is not known
            unneeded = [record for record in records if not reached(record.id)]
            self.report.garbage_bytes += sum(record.stored_bytes for record in unneeded)
            if records and len(unneeded) == len(records):
                orphans += 1
                self.report.orphaned_bytes += pack.size_bytes
        self.look_at_damaged_packs(damaged, reached)
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
        return "put snapshots/ back from a copy if there was a snapshot; if not, the next one lets `ciuic prune` free them"

    def look_at_damaged_packs(self, damaged: dict[int, Damaged], reached: _Reached | None) -> None:
        """An interrupted write leaves a torn pack: no damage, if all that is needed is listed elsewhere."""
        if damaged and reached is not None and all_listed(self.repository, reached, len(reached)):
            self.harmless.update(damaged)
        for number, error in damaged.items():
            if number in self.harmless:
                message = f"{error.message}; nothing that a snapshot needs is in the unreadable part"
                self.found(
                    "warning", "pack", message, "an interrupted write leaves such; `ciuic prune` removes it"
                )
            else:
                finding = self.found("error", "pack", error.message, _VERIFY_DATA)
                self.by_pack.setdefault(number, []).append(finding)

    def read_everything(self, writer: Writer | None) -> None:
        findings: dict[ChunkId, Finding] = {}
        known = 0
        for damage in self.repository.scrub(lambda done, total: self.tell("reading packs", done, total)):
            where = f"pack {damage.pack:016x}, offset {damage.offset}: {damage.reason}"
            if damage.chunk is None and damage.pack in self.harmless:
                continue
            if self.repository.is_spent_copy(damage):
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
            message = f"{known} damaged copies are not read any more: each has a good one"
            self.found(
                "info", "damaged chunk", message, "nothing needs to be done; another repair removes them"
            )
        if writer is None or not findings:
            return
        without_good_copy = set(writer.mark_damaged(findings))
        for chunk, finding in findings.items():
            if chunk in without_good_copy:
                self.lost.setdefault(chunk, finding)
            else:
                finding.repaired = True
                finding.hint = "another copy is good, and is read from now on"

    def replace_damaged_packs(self, writer: Writer, reached: _Reached) -> None:
        """Store elsewhere what is good in damaged packs, and remove these: else every scrub would find the damage again.

        A pack stays where something that a snapshot needs has no good copy, or where its list may lack something.
        """
        if is_claimed(str(self.repository.path)):
            return  # what several processes are storing for one snapshot belongs to none yet
        for number, findings in self.by_pack.items():
            try:
                writer.rewrite_pack(number, reached)
            except (Damaged, NotFound) as error:
                _log.info("damaged_pack_stays", pack=f"{number:016x}", error=str(error))
                continue
            except OSError as error:
                _log.warning("damaged_pack_stays", pack=f"{number:016x}", error=str(error))
                return  # after that the writer is good for nothing but its end
            for finding in findings:
                if not finding.repaired:
                    finding.repaired = True
                    finding.hint = "what snapshots need of the pack was stored anew, and the pack was removed"

    def heal_from_live_files(self, writer: Writer) -> None:
        """Store lost blocks anew from the files they came from, where those still hold the same bytes."""
        before = len(self.lost)
        for chunk, path in heal_from_live_files(self.repository, writer, self.lost):
            del self.lost[chunk]
            for finding in self.report.findings:
                if finding.chunk == chunk:
                    finding.repaired = True
                    finding.hint = f"healed from the live file {os.fsdecode(path)}"
        writer.flush()
        if len(self.lost) == before:
            return
        # What was stored as a difference from them can be read again.
        still = set(writer.mark_damaged(list(self.lost)))
        for chunk in self.lost.keys() - still:
            finding = self.lost.pop(chunk)
            finding.repaired, finding.hint = True, "what it is a difference from is good again"


def summary(report: CheckReport) -> str:
    """One sentence."""
    errors = sum(finding.severity == "error" and not finding.repaired for finding in report.findings)
    repaired = sum(finding.repaired for finding in report.findings)
    looked = f"{plural(report.snapshots, 'snapshot')}, {plural(report.packs, 'pack')}, {human_size(report.stored_bytes)}"
    if errors:
        return f"{looked}: {plural(errors, 'error')}" + (f", {repaired} repaired" if repaired else "")
    verdict = f"{repaired} repaired" if repaired else "in order"
    if not report.data_read:
        verdict += "; what the packs hold was not read (`ciuic check --read-data` reads it)"
    return f"{looked}: {verdict}"


def _repaired(findings: list[Finding], left: Sequence[str], done: str) -> None:
    """Mark those that are not found any more."""
    for finding in findings:
        if finding.message not in left:
            finding.repaired, finding.hint = True, done


def raise_if_damaged(report: CheckReport) -> None:
    """Damaged (exit 4) when an error remains."""
    if report.damaged:
        raise DamageRemains(summary(report))


class DamageRemains(Damaged):
    """The check found damage that it did not, or could not, repair."""
