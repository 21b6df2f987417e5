"""Find names over all snapshots of a root: those of today, and those that are gone.

Guarantees: a node of a directory's tree is read once, however many snapshots have it.
"""

from __future__ import annotations

import fnmatch
import re
import stat
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ciuic.errors import Damaged
from ciuic.history.versions import MAX_PATH_BYTES, OnDamage, PathTooLong, Timeline, raise_damage
from ciuic.repository import Repository
from ciuic.repository.directory_trees import Lineage
from ciuic.repository.errors import DamagedTree
from ciuic.repository.lookup import is_within, join, resolve
from ciuic.repository.tree_format import TreeNode
from ciuic.types import ChunkId, Entry, Snapshot


class GlobMatcher:
    """Shell pattern over text, component by component as in gitignore.

    ``*``, ``?`` and ``[ ]`` never match a slash; ``**`` alone between slashes stands for any number of directories. A pattern
    without a slash is compared with the name, one that begins with a slash with the whole path, any other with the end of the
    path. A slash at the end means directories alone.

    Args:
        pattern: Pattern as bytes. ``?`` and ``[ ]`` match one character of UTF-8, and one byte of what is not UTF-8.

    Raises:
        ValueError: no name can match.
    """

    def __init__(self, pattern: bytes) -> None:
        stripped = _text(pattern).rstrip("/")
        parts = [part for part in stripped.split("/") if part]
        if not parts:
            raise ValueError('it names nothing: write a name, such as "*.safetensors"')
        self._only_directories = pattern.endswith(b"/")
        # "**" at the end is everything below, and not the directory itself.
        last = "*" if parts[-1] == "**" else parts.pop()
        above = parts if stripped.startswith("/") else ["**", *parts]
        self._above = [None if part == "**" else _component(part) for part in above]
        self._name = _component(last)

    def of(self, folder: bytes, entries: list[Entry]) -> list[Entry]:
        """Return those entries of a directory that are looked for."""
        if not self._leads_to(folder):
            return []
        name, only_directories = self._name, self._only_directories
        return [
            entry for entry in entries if name(_text(entry.name)) and (entry.is_dir or not only_directories)
        ]

    def _leads_to(self, folder: bytes) -> bool:
        """Return True if what stands before the last component matches a directory."""
        above = self._above
        if above == [None]:
            return True
        # Positions in the pattern that the components so far lead to: one pass, however many ** there are.
        states = _past_stars(above, {0})
        for part in _text(folder).split("/"):
            if part:
                states = _past_stars(
                    above, {following for at in states for following in _step(above, at, part)}
                )
        return len(above) in states


_Component = Callable[[str], "re.Match[str] | None"]


def _text(name: bytes) -> str:
    # A byte that is not UTF-8 becomes a character by itself.
    return name.decode("utf-8", "surrogateescape")


def _component(part: str) -> _Component:
    return re.compile(fnmatch.translate(part)).match


def _step(above: list[_Component | None], at: int, part: str) -> list[int]:
    """Return the positions behind one more directory."""
    if at == len(above):
        return []
    token = above[at]
    if token is None:
        return [at]
    return [at + 1] if token(part) else []


def _past_stars(above: list[_Component | None], states: set[int]) -> set[int]:
    """Add the positions behind each ``**``, which may stand for no directory at all."""
    for at, token in enumerate(above):
        if token is None and at in states:
            states.add(at + 1)
    return states


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
        on_damage: Called for what cannot be read, a tree once however many snapshots have it, and for directories that
            are not looked into because of their long paths (`PathTooLong`).
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
            for entry in node.entries:
                if not is_dir(entry.mode) or not entry.content:
                    continue
                path = join(folder, entry.name)
                if len(path) > MAX_PATH_BYTES:
                    self._on_damage(snapshot, path, PathTooLong(path))
                else:
                    below.append((path, entry.content))
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
