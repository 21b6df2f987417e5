"""Tests that the session journal, replayed, gives a successor the tables that the kernel refers to."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.depth import by_depth
from support.until import until

from ciuic.fuse_layer.core.overlay_core import ROOT_ID, OverlayCore
from ciuic.fuse_layer.journal import journal_writer, records
from ciuic.fuse_layer.journal.inherited_session import InheritedSession, JournalArchive
from ciuic.fuse_layer.journal.journal_writer import HandleJournal, JournalWriter
from ciuic.fuse_layer.journal.records import OpenedDirectory, OpenedFile
from ciuic.fuse_layer.system.caller import ROOT

NAMES = [b"a", b"b", b"c", b"d" * 255]
KINDS = (
    "create",
    "mkdir",
    "link",
    "rename",
    "exchange",
    "unlink",
    "rmdir",
    "lookup",
    "forget",
    "list",
    "forget_all",
    "open",
    "close",
)
Step = tuple[str, int, bytes, int, bytes]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, 5),
        st.sampled_from(NAMES),
        st.integers(0, 5),
        st.sampled_from(NAMES),
    ),
    min_size=20,
    max_size=80,
)
_EXCHANGE = 2


class Session:
    """A core with its journal, and what a kernel would remember of it."""

    def __init__(
        self, root: Path, base: Path, full_bytes: int, inherited: InheritedSession | None = None
    ) -> None:
        self._fd = os.open(root, os.O_PATH)
        self._made = root, base, full_bytes
        self._successor: Session | None = None
        self.journal = JournalWriter(base, inherited=inherited, full_bytes=full_bytes)
        self.journal.begin(45, 7, 1 << 20)
        self.core = OverlayCore(self._fd, session="s", journal=self.journal, inherited=inherited)
        self.book = HandleJournal(self.journal, inherited)
        self.folders = [ROOT_ID]
        self.known: dict[int, int] = {ROOT_ID: 1}
        """Node to its number of lookups."""

    def do(self, step: Step) -> None:
        kind, one, name, other, other_name = step
        folder, target = self.folders[one % len(self.folders)], self.folders[other % len(self.folders)]
        with contextlib.suppress(OSError):
            getattr(self, f"_{kind}")(folder, name, target, other_name)

    def _learn(self, node: int) -> int:
        self.known[node] = self.known.get(node, 0) + 1
        return node

    def _create(self, folder: int, name: bytes, _target: int, _other: bytes) -> None:
        attr, handle = self.core.names.create(folder, name, 0o644, os.O_RDWR, ROOT)
        self._learn(attr.node)
        self.book.opened(OpenedFile(handle, attr.node, 2 * handle, os.O_RDWR, 0, 0))

    def _mkdir(self, folder: int, name: bytes, _target: int, _other: bytes) -> None:
        self.folders.append(self._learn(self.core.names.mkdir(folder, name, 0o755, ROOT).node))

    def _link(self, folder: int, name: bytes, target: int, other: bytes) -> None:
        node = self._learn(self.core.names.lookup(folder, name).node)
        self._learn(self.core.names.link(node, target, other).node)

    def _rename(self, folder: int, name: bytes, target: int, other: bytes) -> None:
        self._learn(self.core.names.lookup(folder, name).node)
        self.core.names.rename(folder, name, target, other, 0)

    def _exchange(self, folder: int, name: bytes, target: int, other: bytes) -> None:
        self.core.names.rename(folder, name, target, other, _EXCHANGE)

    def _unlink(self, folder: int, name: bytes, _target: int, _other: bytes) -> None:
        self.core.names.unlink(folder, name)

    def _rmdir(self, folder: int, name: bytes, _target: int, _other: bytes) -> None:
        self.core.names.rmdir(folder, name)

    def _lookup(self, folder: int, name: bytes, _target: int, _other: bytes) -> None:
        self._learn(self.core.names.lookup(folder, name).node)

    def _forget(self, folder: int, name: bytes, _target: int, _other: bytes) -> None:
        node = self.core.names.lookup(folder, name).node
        self.core.nodes.forget(node, self.known.pop(node, 0) + 1)
        self.folders = [known for known in self.folders if known != node]

    def _list(self, folder: int, _name: bytes, _target: int, _other: bytes) -> None:
        handle = self.core.directories.opendir(folder)
        for _, attr, _ in self.core.directories.readdir(handle, 0):
            self._learn(attr.node)
        self.core.directories.releasedir(handle)

    def _forget_all(self, _folder: int, _name: bytes, _target: int, _other: bytes) -> None:
        forgotten = [(node, self.known.pop(node)) for node in list(self.known) if node not in self.folders]
        self.core.nodes.forget_all(forgotten)

    def _open(self, folder: int, name: bytes, _target: int, _other: bytes) -> None:
        found = self.core.names.lookup(folder, name)
        node = self._learn(found.node)
        if not stat.S_ISREG(found.st.st_mode):
            # A kernel opens nothing else through its server.
            return
        handle = self.core.files.open(node, os.O_RDONLY)
        self.book.opened(OpenedFile(handle, node, 2 * handle, os.O_RDONLY, 0, 0))

    def _close(self, _folder: int, _name: bytes, target: int, _other: bytes) -> None:
        handles = sorted(self.book.files)
        handle = handles[target % len(handles)] if handles else 0
        if self.book.closed(handle):
            self.core.files.release(handle)

    def succeeded(self, inherited: InheritedSession) -> Session:
        """Kill the worker and return the session of its successor."""
        after = Session(*self._made, inherited)
        after.folders, after.known = self.folders, self.known
        self._successor = after
        return after

    def answers(self) -> dict[int, tuple[int, int, int] | None]:
        """Return the answer to a kernel for each node that it remembers."""
        nodes = self.known.keys() | {opened.node for opened in self.book.files.values()}
        return {node: answer(self.core, node) for node in nodes}

    def settle(self) -> None:
        """Wait until the running archiving is done."""
        until("archiving", lambda: not self.journal.absorbing)

    def end(self) -> None:
        """Close every descriptor, those of all successors included."""
        if self._successor is not None:
            self._successor.end()
        self.journal.remove()
        # The archiving thread would otherwise write files while the directory is removed.
        self.settle()
        self.core.close()
        os.close(self._fd)


def answer(core: OverlayCore, node: int) -> tuple[int, int, int] | None:
    """Return inode number, mode and visible link count, or None when the node is stale."""
    try:
        attr = core.attributes.getattr(node)
    except OSError:
        return None
    return attr.st.st_ino, attr.st.st_mode, attr.nlink


@contextlib.contextmanager
def session(full_bytes: int) -> Iterator[tuple[Session, Path, Path]]:
    with tempfile.TemporaryDirectory() as top:
        root, base = Path(top, "root"), Path(top, "ledger")
        root.mkdir()
        made = Session(root, base, full_bytes)
        try:
            yield made, root, base
        finally:
            made.end()


@pytest.mark.parametrize("full_bytes", [1 << 20, 600])
@settings(max_examples=by_depth(30, 80), deadline=None)
@given(lives=st.lists(STEPS, min_size=1, max_size=3))
def test_a_successor_answers_as_its_predecessor(full_bytes: int, lives: list[list[Step]]) -> None:
    """A successor, and a successor's successor, has every node the kernel remembers and every handle open.

    This holds also when files of the journal are in the archive.
    """
    with session(full_bytes) as (made, _, base):
        before = made
        for steps in lives:
            for step in steps:
                before.do(step)
            before.settle()
            expected, open_files = before.answers(), before.book.files
            inherited = journal_writer.replay(base)
            assert inherited is not None
            assert (inherited.minor, inherited.flags) == (45, 7)
            assert inherited.files == open_files
            lost = {node for node in expected if _leads_nowhere(inherited, node)}
            after = before.succeeded(inherited)
            for node, facts in expected.items():
                if facts is not None and node in lost and stat.S_ISDIR(facts[1]):
                    assert after.core.attributes.getattr(node).nlink == 0
                    assert list(after.core.directories.readdir(after.core.directories.opendir(node), 0)) == []
                elif facts is not None and node not in lost:
                    assert answer(after.core, node) == facts, node
            for opened in open_files.values():
                assert os.fstat(after.core.files.descriptor(opened.handle)).st_ino == expected[opened.node][0]  # type: ignore[index]
            before = after


def _leads_nowhere(inherited: InheritedSession, node: int) -> bool:
    """Return whether the node was removed and is open in no handle that a successor reopens.

    For a directory there is an empty one in its place.
    """
    facts = inherited.node(node)
    return facts is not None and facts.gone and node not in {file.node for file in inherited.files.values()}


@settings(max_examples=30, deadline=None, phases=[Phase.generate])
@given(steps=STEPS, slices=st.integers(0, 6))
def test_an_interrupted_archive_changes_no_result(steps: list[Step], slices: int) -> None:
    """An archive interrupted between any two transactions gives, with its file, what the file alone says."""
    with session(1 << 20) as (before, _, base):
        for step in steps:
            before.do(step)
        base.with_name("ledger.2").write_bytes(records.begin_record(45, 7, 1 << 20))
        reference = journal_writer.replay(base)
        archive = JournalArchive(base.with_name("ledger.archive-test"))
        for _ in islice(archive.absorb(1, base.with_name("ledger.1").read_bytes()), slices):
            pass
        archive.close()
        both = journal_writer.replay(base)
        assert reference is not None
        assert both is not None
        for node in before.known:
            assert _facts_of(both, node) == _facts_of(reference, node), node
        assert (both.files, both.directories, both.intents) == (
            reference.files,
            reference.directories,
            reference.intents,
        )


def _facts_of(inherited: InheritedSession, node: int) -> tuple[object, ...] | None:
    facts = inherited.node(node)
    return facts and (facts.key, facts.kind, facts.name, facts.aliases, facts.gone)


def _archived(place: Path, data: bytes) -> JournalArchive:
    """Return an archive that has taken a file of the journal in, opened anew."""
    with contextlib.closing(JournalArchive(place / "l.archive-test")) as made:
        list(made.absorb(1, data))
    return JournalArchive(made.path)


def test_a_node_dropped_again_does_not_return_from_the_archive(tmp_path: Path) -> None:
    """A node that this worker dropped, whoever made it, does not come back from the archive."""
    second = _archived(tmp_path, records.node_record(5, 1, 5, 1, 0o100000, b"old"))
    own = JournalArchive(tmp_path / "l.archive-test", generation=second.generation)
    list(own.absorb(2, records.node_record(6, 1, 6, 1, 0o100000, b"new")))
    assert second.node(5) is not None
    forgotten = InheritedSession(second)
    list(forgotten.apply(records.dropped_record(5)))
    assert forgotten.node(5) is None
    assert second.node(6) is None
    third = JournalArchive(tmp_path / "l.archive-test")
    assert third.node(6) is not None
    for archive in (second, own, third):
        archive.close()


def test_inodes_of_nested_file_systems_and_reused_numbers_are_found(tmp_path: Path) -> None:
    """Inodes on nested file systems and reused inode numbers are found in newest file and archive."""
    data = records.node_record(1 << 62, 9, 5, 1, 0o100000, b"elsewhere")
    data += records.node_record(7, 1, 7, 1, 0o100000, b"a") + records.replaced_record(7, 1, 8)
    newest = InheritedSession()
    list(newest.apply(data))
    archive = _archived(tmp_path, data)
    for inherited in (newest, InheritedSession(archive)):
        assert (inherited.odd(9, 5), inherited.odd(1, 8), inherited.odd(1, 7)) == (1 << 62, 7, None)
        assert inherited.last_node == 1 << 62
    archive.close()


def test_an_inode_is_found_after_the_newest_file_went_into_the_archive(tmp_path: Path) -> None:
    """An archived node that the newest file renames is found after that file was archived too."""
    archive = _archived(tmp_path, records.node_record(1 << 62, 1, 5, 1, 0o100000, b"name"))
    inherited = InheritedSession(archive)
    newest = records.renamed_record(1 << 62, 1, b"name", 1, b"new name")
    list(inherited.apply(newest))
    own = JournalArchive(archive.path, generation=archive.generation)
    list(own.absorb(2, newest))
    assert inherited.odd(1, 5) == 1 << 62
    for one in (own, archive):
        one.close()


def test_the_id_of_a_removed_node_is_not_given_out_again(tmp_path: Path) -> None:
    """The id of a removed node that is still open is not reused, and none of its names leads to another file."""
    data = records.node_record(1 << 62, 1, 5, 1, 0o100000, b"name")
    data += records.name_record(1 << 62, 1, b"alias", several=True)
    data += records.unlinked_record(1 << 62, 1, b"name", gone=True)
    archive = _archived(tmp_path, data)
    newest = InheritedSession()
    list(newest.apply(data))
    for inherited in (newest, InheritedSession(archive)):
        assert inherited.last_node == 1 << 62
        facts = inherited.node(1 << 62)
        assert facts is not None
        assert (facts.name, facts.aliases, facts.gone) == (None, set(), True)
    archive.close()


def test_names_that_went_from_an_open_directory_are_counted(tmp_path: Path) -> None:
    """Removals and renames since a handle was opened are counted, interrupted ones too, across the archive; nothing of before is."""
    removal = records.unlinked_record(7, 5, b"gone", gone=True)
    opened = [records.directory_opened_record(OpenedDirectory(handle, 5, handle, 0)) for handle in (1, 2)]
    renamed = records.renamed_record(8, 5, b"a", 6, b"b")
    begun = records.changing_record(records.ChangedNames(5, b"c"), records.ChangedInodes(9))
    elsewhere = records.unlinked_record(10, 6, b"d", gone=True)
    archive = _archived(tmp_path, removal + opened[0] + removal + opened[1] + elsewhere)
    inherited = InheritedSession(archive)
    archive.restore(inherited)
    list(inherited.apply(renamed + begun))
    assert [inherited.removed_since_opened(handle) for handle in (1, 2)] == [3, 2]
    inherited.removals_before.clear()
    assert inherited.removed_since_opened(1) is None
    archive.close()


def test_a_listing_that_is_too_long_is_not_replaced_by_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that is listed anew, beyond the limit of names, has no listing for a successor."""
    written = JournalWriter(tmp_path / "l")
    written.begin(45, 0, 4096)
    book = HandleJournal(written)
    names = [b"n%d" % number for number in range(64)]
    for handle in (8, 9):
        book.directory_opened(OpenedDirectory(handle, 2, handle))
        book.listed(handle, names)
    monkeypatch.setattr(journal_writer, "MAX_LISTED_BYTES", 0)
    book.listed(9, names[::-1])
    inherited = journal_writer.replay(tmp_path / "l")
    assert inherited is not None
    assert inherited.listings == {8: names}


def test_torn_journal_is_read_up_to_its_last_whole_record(tmp_path: Path) -> None:
    """A journal cut anywhere replays without an error, and what it says grows with its length."""
    written = JournalWriter(tmp_path / "l")
    written.begin(45, 0, 4096)
    book = HandleJournal(written)
    for number in range(1, 6):
        written.append(records.node_record(number + 1, 1, number + 1, 1, 0o100000, b"name %d" % number))
        book.opened(OpenedFile(number, number + 1, number, 0, 0, 0))
    book.directory_opened(OpenedDirectory(9, 2, 9))
    book.listed(9, [b"n%d" % number for number in range(64)])
    book.intends(7, 12)
    content = (tmp_path / "l.1").read_bytes()
    seen = 0
    for length in range(len(content) + 1):
        (tmp_path / "l.1").write_bytes(content[:length])
        inherited = journal_writer.replay(tmp_path / "l")
        if inherited is not None:
            size = (
                len(inherited.nodes) + len(inherited.files) + len(inherited.listings) + len(inherited.intents)
            )
            assert size >= seen
            seen = size
    assert seen == 12


@pytest.mark.parametrize("write", [Mock(side_effect=OSError), lambda fd, record: len(record) - 1])
def test_journal_that_cannot_be_written_is_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[int, bytes], int]
) -> None:
    """A journal with a record that is not written whole is abandoned: the job continues without a successor."""
    written = JournalWriter(tmp_path / "l")
    written.begin(45, 0, 4096)
    with monkeypatch.context() as full:
        full.setattr(journal_writer.os, "write", write)
        written.append(records.dropped_record(5))
    assert not written.kept
    assert journal_writer.replay(tmp_path / "l") is None
