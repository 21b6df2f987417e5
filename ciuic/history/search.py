"""Find names over all snapshots of a root: those of today, and those that are gone.

Guarantees: a node of a directory's tree is read once, however many snapshots have it.
"""

from __future__ import annotations

import fnmatch
import re
import stat
from collections.abc import Iterator
from typing import NamedTuple

from ciuic.errors import Damaged
from ciuic.history.timeline import OnDamage, Timeline, raise_damage
from ciuic.repository import Repository
from ciuic.repository.errors import DamagedTree
from ciuic.repository.format.tree_format import TreeNode
from ciuic.repository.lookup import is_within, join, resolve
from ciuic.repository.trees.tree_reader import Lineage
from ciuic.types import ChunkId, Entry, Snapshot


class GlobMatcher:
    """Shell pattern, whose ``*`` also matches a slash.

    A pattern without a slash is compared with the name, one that begins with a slash with the whole path, any other with the
    end of the path.
    """

    def __init__(self, pattern: bytes) -> None:
        text = pattern.decode("latin-1")
        if "/" in text and not text.startswith("/"):
            text = f"*/{text}"
        # As bytes, because names need not be text; latin-1 has a character for each of them.
        self._match = re.compile(fnmatch.translate(text).encode("latin-1")).match
        self._by_path = b"/" in pattern

    def of(self, folder: bytes, entries: list[Entry]) -> list[Entry]:
        """Return those entries of a directory that are looked for."""
        match = self._match
        # Few of 100,000 names match, so that no path is put together where the name alone tells.
        if self._by_path:
            return [entry for entry in entries if match(join(folder, entry.name))]
        return [entry for entry in entries if match(entry.name)]


class FoundPath(NamedTuple):
    """A path that was found, as the newest snapshot that has it."""

    path: bytes
    entry: Entry
    """Complete entry."""
    snapshot: Snapshot
    """Newest snapshot with the path."""
    is_deleted: bool
    """True if the newest snapshot of the root does not have it, as far as that can be read."""
    host: str


def search(
    repository: Repository,
    timeline: Timeline,
    matcher: GlobMatcher,
    below: bytes = b"",
    *,
    on_damage: OnDamage = raise_damage,
) -> Iterator[FoundPath]:
    """Yield every path that matches, newest snapshot first and by name within a directory.

    Args:
        repository: Repository of the snapshots.
        timeline: Root to search.
        matcher: Which paths to yield.
        below: Absolute path; only what lies below it. Empty for the whole root.
        on_damage: Called for what cannot be read, a tree once however many snapshots have it.
    """
    walk = _Walk(repository, timeline, matcher, on_damage)
    names = [name for name in below[len(timeline.path) :].split(b"/") if name]
    top = join(timeline.path, b"/".join(names)) if names else timeline.path
    for snapshot in timeline.snapshots:
        tree: bytes = timeline.root_of(snapshot).entry.content
        try:
            for name in names:
                entry = repository.trees.entry(tree, name) if tree else None
                tree = entry.content if entry is not None and entry.is_dir else b""
        except Damaged as error:
            walk.pass_over(snapshot, top, error)
            continue
        yield from walk.walk(snapshot, tree, top)


class _Walk:
    """Walk over the trees of several snapshots, which passes over what it has seen at the same path."""

    def __init__(
        self, repository: Repository, timeline: Timeline, matcher: GlobMatcher, on_damage: OnDamage
    ) -> None:
        self._repository = repository
        self._timeline = timeline
        self._matcher = matcher
        self._on_damage = on_damage
        # What the newest snapshot has below these is not known.
        self._unknown: list[bytes] = []
        self._seen: dict[bytes, set[bytes]] = {}
        self._found: set[bytes] = set()

    def pass_over(self, snapshot: Snapshot, path: bytes, error: Damaged) -> None:
        """Report a path that cannot be read."""
        self._on_damage(snapshot, path, error)
        if self._is_newest(snapshot):
            self._unknown.append(path)

    def _is_newest(self, snapshot: Snapshot) -> bool:
        return snapshot is self._timeline.snapshots[0]

    def _is_deleted(self, snapshot: Snapshot, path: bytes) -> bool:
        return not self._is_newest(snapshot) and not any(is_within(path, folder) for folder in self._unknown)

    def walk(self, snapshot: Snapshot, tree: bytes, top: bytes) -> Iterator[FoundPath]:
        """Yield what matches below a directory and was not found before."""
        if not tree or self._is_seen(top, tree):
            return
        lineage = Lineage()
        lineage.enter(tree)
        stack = [iter([(top, tree)])]
        while stack:
            here = next(stack[-1], None)
            if here is None:
                stack.pop()
                lineage.leave()
                continue
            folder, tree = here
            matching, below = self._directory(snapshot, folder, tree)
            for entry in matching:
                path = join(folder, entry.name)
                if path not in self._found:
                    try:
                        complete = resolve(self._repository, self._timeline.root_of(snapshot), entry)
                    except Damaged as error:
                        self.pass_over(snapshot, path, error)
                        continue
                    self._found.add(path)
                    yield FoundPath(
                        path, complete, snapshot, self._is_deleted(snapshot, path), self._timeline.host
                    )
            if below:
                try:
                    # Raises Damaged for a tree that contains itself.
                    lineage.enter(tree if folder != top else b"")
                except Damaged as error:
                    self.pass_over(snapshot, folder, error)
                    continue
                stack.append(iter(below))

    def _directory(
        self, snapshot: Snapshot, folder: bytes, tree: bytes
    ) -> tuple[list[Entry], list[tuple[bytes, bytes]]]:
        """Return what matches in the unseen nodes of a directory, and the (path, tree) of unseen directories."""
        is_dir = stat.S_ISDIR
        matching: list[Entry] = []
        below: list[tuple[bytes, bytes]] = []
        for node in self._unseen(snapshot, folder, tree):
            matching += self._matcher.of(folder, node.entries)
            below += [
                (join(folder, entry.name), entry.content)
                for entry in node.entries
                if is_dir(entry.mode) and entry.content
            ]
        return matching, [one for one in below if not self._is_seen(*one)]

    def _is_seen(self, folder: bytes, node: bytes) -> bool:
        return node in self._seen.get(folder, ())

    def _unseen(self, snapshot: Snapshot, folder: bytes, tree: bytes) -> Iterator[TreeNode]:
        """Yield the nodes of a directory that were not seen at this path; one that cannot be read is reported."""
        seen = self._seen.setdefault(folder, set())
        seen.add(tree)
        trees = self._repository.trees
        stack: list[tuple[ChunkId, int | None]] = [(ChunkId(tree), None)]
        while stack:
            id_, level_above = stack.pop()
            try:
                # Not `Trees.child`, which also sums up everything below: nothing here believes the parent's totals.
                node = trees.node(id_)
                if level_above is not None and node.level >= level_above:
                    raise DamagedTree(id_, "it is not the child that its parent describes")
            except Damaged as error:
                self.pass_over(snapshot, folder, error)
                continue
            yield node
            unseen = [ref.id for ref in node.refs if ref.id not in seen]
            seen.update(unseen)
            stack += [(child, node.level) for child in reversed(unseen)]
