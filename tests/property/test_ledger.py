"""The ledger tells a successor what the kernel refers to: replayed, it gives the tables that were, whatever happened to them."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ciuic.fuse_layer import ledger
from ciuic.fuse_layer.caller import ROOT
from ciuic.fuse_layer.core import ROOT_ID, OverlayCore
from ciuic.fuse_layer.handle_book import HandleBook
from ciuic.fuse_layer.ledger import Inherited, Ledger, Opened, OpenedDirectory

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
    """A core with its ledger, and what a kernel would remember of it."""

    def __init__(self, root: Path, base: Path, rewrite_from_bytes: int) -> None:
        self._fd = os.open(root, os.O_PATH)
        self.ledger = Ledger(base, rewrite_from_bytes=rewrite_from_bytes)
        self.ledger.begin(45, 7, 1 << 20)
        self.core = OverlayCore(self._fd, session="s", ledger=self.ledger)
        self.book = HandleBook(self.ledger)
        self.ledger.rewrites_from(self._records)
        self.folders = [ROOT_ID]
        self.known: dict[int, int] = {ROOT_ID: 1}
        """Node → how often it was looked up."""

    def _records(self) -> Iterator[bytes]:
        yield from self.core.records()
        yield from self.book.records()

    def do(self, step: Step) -> None:
        kind, one, name, other, other_name = step
        folder, target = self.folders[one % len(self.folders)], self.folders[other % len(self.folders)]
        with contextlib.suppress(OSError):
            getattr(self, f"_{kind}")(folder, name, target, other_name)

    def _learn(self, node: int) -> int:
        self.known[node] = self.known.get(node, 0) + 1
        return node

    def _create(self, folder: int, name: bytes, _target: int, _other: bytes) -> None:
        attr, handle = self.core.create(folder, name, 0o644, os.O_RDWR, ROOT)
        self._learn(attr.node)
        self.book.opened(Opened(handle, attr.node, 2 * handle, os.O_RDWR, 0, 0))

    def _mkdir(self, folder: int, name: bytes, _target: int, _other: bytes) -> None:
        self.folders.append(self._learn(self.core.mkdir(folder, name, 0o755, ROOT).node))

    def _link(self, folder: int, name: bytes, target: int, other: bytes) -> None:
        node = self._learn(self.core.lookup(folder, name).node)
        self._learn(self.core.link(node, target, other).node)

    def _rename(self, folder: int, name: bytes, target: int, other: bytes) -> None:
        self._learn(self.core.lookup(folder, name).node)
        self.core.rename(folder, name, target, other, 0)

    def _exchange(self, folder: int, name: bytes, target: int, other: bytes) -> None:
        self.core.rename(folder, name, target, other, _EXCHANGE)

    def _unlink(self, folder: int, name: bytes, _target: int, _other: bytes) -> None:
        self.core.unlink(folder, name)

    def _rmdir(self, folder: int, name: bytes, _target: int, _other: bytes) -> None:
        self.core.rmdir(folder, name)

    def _lookup(self, folder: int, name: bytes, _target: int, _other: bytes) -> None:
        self._learn(self.core.lookup(folder, name).node)

    def _forget(self, folder: int, name: bytes, _target: int, _other: bytes) -> None:
        node = self.core.lookup(folder, name).node
        self.core.forget(node, self.known.pop(node, 0) + 1)
        self.folders = [known for known in self.folders if known != node]

    def _open(self, folder: int, name: bytes, _target: int, _other: bytes) -> None:
        found = self.core.lookup(folder, name)
        node = self._learn(found.node)
        if not stat.S_ISREG(found.st.st_mode):
            return  # a kernel opens nothing else through its server
        handle = self.core.open(node, os.O_RDONLY)
        self.book.opened(Opened(handle, node, 2 * handle, os.O_RDONLY, 0, 0))

    def _close(self, _folder: int, _name: bytes, target: int, _other: bytes) -> None:
        handles = sorted(self.book.files)
        handle = handles[target % len(handles)] if handles else 0
        if self.book.closed(handle):
            self.core.release(handle)

    def answers(self) -> dict[int, tuple[int, int, int] | None]:
        """What a kernel would be told of each node that it remembers."""
        nodes = self.known.keys() | {opened.node for opened in self.book.files.values()}
        return {node: answer(self.core, node) for node in nodes}

    def end(self) -> None:
        self.core.close()
        os.close(self._fd)


def answer(core: OverlayCore, node: int) -> tuple[int, int, int] | None:
    """Inode number, mode and visible link count; None when it is stale."""
    try:
        attr = core.getattr(node)
    except OSError:
        return None
    return attr.st.st_ino, attr.st.st_mode, attr.nlink


@contextlib.contextmanager
def session(rewrite_from_bytes: int) -> Iterator[tuple[Session, Path, Path]]:
    with tempfile.TemporaryDirectory() as top:
        root, base = Path(top, "root"), Path(top, "ledger")
        root.mkdir()
        made = Session(root, base, rewrite_from_bytes)
        try:
            yield made, root, base
        finally:
            made.end()


def settle(written: Ledger) -> None:
    """A rewrite that was begun is over."""
    deadline = time.monotonic() + 30
    while written.rewriting and time.monotonic() < deadline:
        time.sleep(0.001)


@pytest.mark.parametrize("rewrite_from_bytes", [1 << 20, 600])
@settings(max_examples=100, deadline=None)
@given(steps=STEPS)
def test_a_successor_answers_as_its_predecessor(rewrite_from_bytes: int, steps: list[Step]) -> None:
    """Every node that the kernel remembers is the same inode, every handle is open on it, also when the ledger was rewritten."""
    with session(rewrite_from_bytes) as (before, root, base):
        for step in steps:
            before.do(step)
        settle(before.ledger)
        expected, open_files = before.answers(), before.book.files
        inherited = ledger.replay(base)
        assert inherited is not None
        assert (inherited.minor, inherited.flags) == (45, 7)
        assert inherited.files == open_files
        fd = os.open(root, os.O_PATH)
        after = OverlayCore(fd, session="t", ledger=Ledger(base.with_name("other")), inherited=inherited)
        try:
            removed = {node for node, facts in inherited.nodes.items() if facts.gone}
            for node, told in expected.items():
                # A directory that was removed leads nowhere after the death of who had it open: nothing can be done in it.
                if told is not None and not (node in removed and node not in _open_nodes(inherited)):
                    assert answer(after, node) == told, node
            for opened in open_files.values():
                assert os.fstat(after.descriptor(opened.handle)).st_ino == expected[opened.node][0]  # type: ignore[index]
        finally:
            after.close()
            os.close(fd)


def _open_nodes(inherited: Inherited) -> set[int]:
    return {opened.node for opened in inherited.files.values()}


def test_a_torn_ledger_is_believed_up_to_its_last_whole_record(tmp_path: Path) -> None:
    """Cut anywhere, it replays without an error, and what it says grows with its length."""
    written = Ledger(tmp_path / "l")
    written.begin(45, 0, 4096)
    book = HandleBook(written)
    for number in range(1, 6):
        written.append(ledger.node_record(number + 1, 1, number + 1, 1, 0o100000, b"name %d" % number))
        book.opened(Opened(number, number + 1, number, 0, 0, 0))
    book.directory_opened(OpenedDirectory(9, 2, 9))
    book.listed(9, [b"n%d" % number for number in range(64)])
    book.intends(7, 12)
    whole = (tmp_path / "l.1").read_bytes()
    seen = 0
    for length in range(len(whole) + 1):
        (tmp_path / "l.1").write_bytes(whole[:length])
        inherited = ledger.replay(tmp_path / "l")
        if inherited is not None:
            size = (
                len(inherited.nodes) + len(inherited.files) + len(inherited.listings) + len(inherited.intents)
            )
            assert size >= seen
            seen = size
    assert seen == 12


def test_a_ledger_that_cannot_be_written_is_given_up(tmp_path: Path) -> None:
    """The job does not notice; nobody takes what is left of it for the truth."""
    written = Ledger(tmp_path / "l")
    written.begin(45, 0, 4096)
    os.close(written._fd)
    written._fd = os.open("/dev/full", os.O_WRONLY)
    written.append(ledger.dropped_record(5))
    assert not written.kept
    assert ledger.replay(tmp_path / "l") is None
