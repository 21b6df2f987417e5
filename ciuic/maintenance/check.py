"""Check the consistency of a repository, and repair it without deleting what a snapshot needs.

Guarantees: nothing is changed without ``repair``. With it, the index is rebuilt from packs and snapshot files. A chunk with one
damaged and one good copy is read from the good one from then on. A damaged chunk without a good copy is healed from the live
files, where they still have its content. A damaged pack of which every chunk that a snapshot needs is good, there or elsewhere,
is replaced by its good chunks. What cannot be repaired is reported with what to do about it. Unreadable files stay where they
are, because other tools may still read them.

A check reads the structure of every snapshot, and header, size and footer of every pack; with ``read_data`` also every byte of
every pack. What was not read is not called sound. Its `CheckReport`, which checks of remotes return as well, has the findings
with their severity. What snapshots need is verified, and the files that damage touches are named, by ciuic.maintenance.verify, as of
a remote.

Of a live file, a block is accepted only when its id, computed by the writer, is the lost one. Every reference of every readable
snapshot is tried, under each name of a file that has several, and damage to one hides no other. Only regular files are opened, and no
link is followed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from ciuic.errors import Damaged, NotFound
from ciuic.maintenance.chunkset import NeededChunks
from ciuic.maintenance.sweep import Progress, add_bases, all_listed, survey
from ciuic.maintenance.verify import Damage, Verification, VerifyProgress
from ciuic.repository import Repository, Writer
from ciuic.repository import log as _log
from ciuic.repository.locks import is_claimed
from ciuic.repository.model import PackDamage
from ciuic.repository.snapshots import UNREADABLE_MARKS
from ciuic.system.disk import open_regular
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
    snapshots: tuple[str, ...] = ()
    """Snapshots that the problem concerns, as far as they are known."""
    chunk: ChunkId | None = None
    repaired: bool = False
    place: str = ""
    """Location and reason of the damage, without the snapshots that share it: the same at each check."""


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
    """Snapshots that cannot be read whole."""

    def found(
        self,
        severity: Severity,
        kind: Kind,
        message: str,
        hint: str = "",
        snapshots: tuple[str, ...] = (),
        chunk: ChunkId | None = None,
    ) -> CheckFinding:
        """Add a finding."""
        finding = CheckFinding(severity, kind, message, hint, snapshots, chunk)
        self.findings.append(finding)
        return finding

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


_HEAL: Final = "`ciuic check --repair --read-data` heals what it can"
_VERIFY_DATA: Final = (
    f"`ciuic verify --all --checksum` names the files and snapshots that it touches; {_HEAL}"
)
# A finding is a sentence; the record of damage has all ids.
_MAX_NAMED: Final = 5
_DAMAGED_CHUNKS: Final = ("data", "xattrs")


def add_damage(report: CheckReport, damage: Damage, hint: str, *, in_pack: bool) -> CheckFinding:
    """Add to the report what a verification found, of a repository or a remote; ``in_pack``: a pack has the chunk, or is damaged itself."""
    where = damage.path.decode(errors="surrogateescape") if damage.path else damage.file or "the repository"
    where += f", block {damage.block}" if damage.block >= 0 else ""
    place = f"{where}: {damage.reason}"
    named = ", ".join(damage.snapshots[:_MAX_NAMED])
    if len(damage.snapshots) > _MAX_NAMED:
        named += f" and {len(damage.snapshots) - _MAX_NAMED} more"
    text = place + (f"; in {named}" if named else "")
    kind: Kind = "structure"
    if damage.chunk is not None and not in_pack:
        kind = "missing chunk"
    elif damage.kind in _DAMAGED_CHUNKS or (damage.kind == "pack" and damage.chunk is not None):
        kind = "damaged chunk"
    elif damage.kind in ("snapshot", "pack"):
        kind = damage.kind
    report.damaged_snapshots.update(map(str, damage.snapshots))
    finding = report.found("error", kind, text, hint, tuple(map(str, damage.snapshots)), damage.chunk)
    finding.place = place
    return finding


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


class _Contents(Verification):
    """Verification of all snapshots and packs, which notes in what packs it met damaged chunks."""

    def __init__(
        self,
        repository: Repository,
        read_data: bool,
        covered: bool,
        progress: Callable[[VerifyProgress], None],
    ) -> None:
        super().__init__(repository, read_data, progress)
        self._covered = covered
        self.packs: set[int] = set()
        self.spent = 0
        """Damaged copies that are not read any more."""

    def _verify_files(self, ids: Sequence[SnapshotId] | None) -> bool:
        self._verify_snapshot_files()
        if self.result.checksum:
            self._scrub()
        # The scrub reads what the index covers.
        return self.result.checksum and not self._covered

    def _pack_damaged(self, found: PackDamage) -> bool:
        # The pack of a copy that is not read any more is rewritten by a repair all the same, so that the bad copy goes.
        if found.chunk is not None:
            self.packs.add(found.pack)
        is_news = super()._pack_damaged(found)
        self.spent += not is_news
        return is_news


@dataclass
class _Check:
    """A check from beginning to end."""

    repository: Repository
    read_data: bool
    live_files: bool
    progress: Progress | None
    report: CheckReport = field(default_factory=CheckReport)
    lost: set[ChunkId] = field(default_factory=set)
    """Chunks without a good copy."""
    pack_sizes: dict[int, int] = field(default_factory=dict)
    harmless: set[int] = field(default_factory=set)
    """Packs that cannot be listed completely and cannot hide anything that is needed."""
    by_pack: dict[int, list[CheckFinding]] = field(default_factory=dict)
    """Findings of damage, by pack."""

    def run(self, writer: Writer | None) -> None:
        self.pack_sizes = {pack.number: pack.size_bytes for pack in self.repository.packs()}
        self.check_configuration(writer)
        # Before the content: with a stale index, existing chunks seem to be missing.
        covered = self.check_index(writer)
        content = _Contents(self.repository, self.read_data, covered, self.show_verified)
        result = content.run(None)
        self.report.snapshots = len(result.snapshots)
        reached = None
        # What an unreadable snapshot needs is not known, so nothing can be called unneeded.
        if content.is_complete:
            reached = content.reached
            add_bases(self.repository, reached.__contains__, reached.add)
        self.check_packs(reached)
        self.report_damage(content, writer)
        # Healing comes before packs are replaced: a healed chunk is a good copy elsewhere.
        if writer is not None and self.lost and self.live_files:
            self.heal_from_live_files(writer, content)
        if writer is not None and reached is not None and self.by_pack:
            self.replace_damaged_packs(writer, reached)

    def show_progress(self, what: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(what, done, total)

    def check_configuration(self, writer: Writer | None) -> None:
        findings = [
            self.report.found(
                "error", "configuration", words, "`ciuic check --repair` rewrites it from the good copy"
            )
            for words in self.repository.config_damage()
        ]
        if findings and writer is not None:
            writer.repair_config()
            left = self.repository.config_damage()
            _repaired(findings, left, "it was rewritten from the good copy")

    def find_vanished_files(self) -> None:
        hint = "unless it was removed on purpose, restore the file from another copy before the next snapshot"
        for words in self.repository.snapshots.vanished():
            self.report.found("warning", "snapshot", words, hint)

    # --- index

    def check_index(self, writer: Writer | None) -> bool:
        """Return whether the index agrees with the packs now."""
        problems = self.repository.check_index()
        # A new repository has no packs, and no index yet.
        if not problems or not self.pack_sizes:
            return True
        findings = [
            self.report.found("warning", "index", words, "`ciuic check --repair` rebuilds it")
            for words in problems
        ]
        if writer is None:
            return False
        writer.rebuild_index()
        left = self.repository.check_index()
        _repaired(findings, left, "the index was rebuilt")
        return not left

    # --- packs

    def check_packs(self, reached: NeededChunks | None) -> None:
        # With an unreadable snapshot it is not known which chunks are needed: all of them may be.
        needed = (lambda _: True) if reached is None else reached.__contains__
        found = survey(self.repository, needed, progress=self.progress)
        damaged = found.damaged
        self.report.packs = len(found.uses) + len(damaged)
        self.report.stored_bytes = sum(use.size_bytes for use in found.uses)
        self.report.stored_bytes += sum(self.pack_sizes.get(number, 0) for number in damaged)
        self.report.garbage_bytes = sum(use.dead_bytes for use in found.uses)
        orphans = [use.size_bytes for use in found.uses if use.dead_bytes and not use.live_chunks]
        self.report.orphaned_bytes = sum(orphans)
        self.report_damaged_packs(damaged, reached)
        if not self.read_data:
            for number, words in self.repository.pack_problems():
                if number not in damaged:
                    self.report.found("error", "pack", words, _VERIFY_DATA)
        if orphans:
            message = f"{plural(len(orphans), 'pack')} with {human_size(self.report.orphaned_bytes)} that no snapshot needs"
            self.report.found("info", "orphaned pack", message, self.orphans_hint())

    def orphans_hint(self) -> str:
        """Return the advice that frees orphaned packs: prune, unless prune would refuse because snapshots may be missing."""
        if self.repository.snapshots.names() or self.repository.misses_no_snapshot():
            return "`ciuic prune` frees them"
        return "restore snapshots/ from a copy if there was a snapshot; otherwise `ciuic prune` frees them after the next snapshot"

    def report_damaged_packs(self, damaged: dict[int, Damaged], reached: NeededChunks | None) -> None:
        """Report packs that cannot be listed completely.

        An interrupted write leaves a torn pack, which is no damage if everything that is needed is listed elsewhere.
        """
        if (
            damaged
            and reached is not None
            and all_listed(self.repository, reached.__contains__, len(reached))
        ):
            self.harmless.update(damaged)
        for number, error in damaged.items():
            if number in self.harmless:
                message = f"{error.message}; nothing that a snapshot needs is in the unreadable part"
                self.report.found(
                    "warning",
                    "pack",
                    message,
                    "an interrupted write leaves such packs; `ciuic prune` removes it",
                )
            else:
                finding = self.report.found("error", "pack", error.message, _VERIFY_DATA)
                self.by_pack.setdefault(number, []).append(finding)

    # --- content

    def show_verified(self, state: VerifyProgress) -> None:
        if self.read_data:
            self.show_progress("reading packs", state.bytes_done, state.bytes_total)
        else:
            self.show_progress("reading snapshots", state.files_done, 0)

    def report_damage(self, content: _Contents, writer: Writer | None) -> None:
        """Report what the verification found; a repair marks bad copies."""
        numbers = {self.repository.pack_path(number): number for number in self.pack_sizes}
        for number in content.packs:
            self.by_pack.setdefault(number, [])
        damaged: set[ChunkId] = set()
        readable: dict[ChunkId, bool] = {}
        for damage in content.result.damages:
            number = numbers.get(damage.file, -1)
            if damage.kind == "pack" and damage.chunk is None and number in self.harmless:
                continue
            hint = _HEAL
            if damage.kind == "snapshot" and damage.reason == UNREADABLE_MARKS:
                # The snapshot itself is whole.
                id_ = damage.snapshots[0]
                hint = f"`ciuic release {id_}` or `ciuic hold {id_}` writes it anew; its tags are lost"
            elif damage.kind == "snapshot" and damage.file:
                hint = f"restore the file from another copy, or give the snapshot up: `ciuic forget {damage.snapshots[0]}`"
            finding = add_damage(self.report, damage, hint, in_pack=number >= 0)
            if number < 0:
                self.lost.update(() if damage.chunk is None else (damage.chunk,))
                continue
            if damage.chunk is not None:
                if damage.chunk not in readable:
                    readable[damage.chunk] = self.is_readable(damage.chunk)
                # What is read as it was stored, and does not fit what refers to it, is mended by no other copy.
                if readable[damage.chunk] and damage.kind != "pack":
                    continue
                damaged.add(damage.chunk)
            self.by_pack.setdefault(number, []).append(finding)
        if content.spent:
            message = f"{content.spent} damaged copies are no longer read: each chunk has a good copy"
            self.report.found(
                "info", "damaged chunk", message, "no action is needed; the next repair removes them"
            )
        if writer is None or not damaged:
            return
        # Marked copies are not read any more; what comes back are chunks that have no other copy.
        without_good_copy = set(writer.mark_damaged(damaged))
        self.lost |= without_good_copy
        for chunk in damaged - without_good_copy:
            self.mend(chunk, "another copy is good and is read from now on")

    def is_readable(self, chunk: ChunkId) -> bool:
        try:
            self.repository.chunks.get(chunk)
        except Damaged:
            return False
        return True

    def mend(self, chunk: ChunkId, done: str) -> None:
        """Mark the findings of a chunk as repaired."""
        self.lost.discard(chunk)
        for finding in self.report.findings:
            if finding.chunk == chunk:
                finding.repaired, finding.hint = True, done

    def replace_damaged_packs(self, writer: Writer, reached: NeededChunks) -> None:
        """Store the good chunks of damaged packs elsewhere, and remove these packs: every scrub would find the damage again.

        A pack stays if something that a snapshot needs has no good copy, or if its list may be incomplete.
        """
        # Several processes are storing one snapshot: their chunks belong to no snapshot yet, and would seem unneeded.
        if is_claimed(str(self.repository.path)):
            return
        for number, findings in self.by_pack.items():
            try:
                writer.rewrite_pack(number, reached.__contains__)
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

    def heal_from_live_files(self, writer: Writer, content: _Contents) -> None:
        """Store lost blocks anew from the files that they came from, where these still have the same bytes."""
        before = len(self.lost)
        # Places in the newest snapshots come first: they are the most likely to exist still.
        for damage in content.result.damages:
            chunk = damage.chunk
            if damage.kind != "data" or chunk not in self.lost or chunk not in content.lengths:
                continue
            data = _live_block(damage.path, damage.offset, content.lengths[chunk])
            # The file may have changed since the snapshot: the id decides.
            if data is not None and self.repository.identity.chunk_id(data) == chunk:
                writer.put_chunk(data)
                self.mend(chunk, f"healed from the live file {os.fsdecode(damage.path)}")
        # Durable before the report says healed.
        writer.flush()
        if len(self.lost) == before:
            return
        # Chunks that are stored as differences from healed ones can be read again.
        for chunk in self.lost - set(writer.mark_damaged(self.lost)):
            self.mend(chunk, "the chunk that it is stored as a difference from is good again")


def _repaired(findings: list[CheckFinding], left: Sequence[str], done: str) -> None:
    """Mark the findings whose problem is not found any more as repaired."""
    for finding in findings:
        if finding.message not in left:
            finding.repaired, finding.hint = True, done
