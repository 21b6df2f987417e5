"""Answers of a repository to the screen: names, versions, verdicts, previews and differences. Each function yields its answer in parts.

Guarantees: text for the screen is lines of printable characters, whatever names and contents have in them; of a file not more than
`_MAX_TEXT_BYTES` are read for a preview, of tensors their headers alone.
"""

from __future__ import annotations

import difflib
import itertools
import os
import socket
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ciuic.cli.commands.pick.reader import Place, Question
from ciuic.cli.shared import times
from ciuic.cli.shared.contents import as_recorded
from ciuic.cli.shared.messages import lines_to, plural, shown, shown_text
from ciuic.cli.shared.session import Session
from ciuic.cli.shared.timelines import PassedOver, all_timelines
from ciuic.compare.diff import PathChange, diff_live, diff_snapshots
from ciuic.errors import CiuicError, Damaged, NotFound
from ciuic.history import GlobMatcher, PathVersion, search, versions
from ciuic.printable import one_line
from ciuic.repository import Repository
from ciuic.repository.lookup import Located, is_within
from ciuic.types import Entry, Snapshot
from ciuic.units import human_size
from ciuic.verdicts.model import Verdict
from ciuic.verdicts.records import VerdictRecords
from ciuic.verdicts.sources import SnapshotFile
from ciuic.verdicts.verdict import SUFFIXES, judge_file

_MAX_TEXT_BYTES: Final = 64 << 10
"""Limit of what a preview reads of a file."""
_MAX_DIFF_BYTES: Final = 256 << 10
_MAX_DIFF_LINES: Final = 4000
"""Limits of files that are compared line by line, which takes time with the square of the lines."""
_MAX_LINE: Final = 4096
"""Limit of the characters of a line."""
_DUMPED_BYTES: Final = 256
_MAX_CHANGES: Final = 2000
_MAX_SHOWN_TENSORS: Final = 10_000
MAX_FOUND: Final = 10_000
"""Limit of the paths that a search shows."""
_SIGNS: Final = {
    "added": ("+", "green"),
    "removed": ("-", "red"),
    "changed": ("M", "yellow"),
    "retyped": ("T", "magenta"),
}
STATE_STYLES: Final = {"GOOD": "green", "TORN": "red", "UNKNOWN": "yellow"}


class Line(NamedTuple):
    """A line of text with a style."""

    text: str
    style: str = ""


@dataclass(eq=False)
class Node:
    """A name of the tree: as the newest snapshot that has it."""

    place: Place
    path: bytes
    entry: Entry
    is_gone: bool = False
    depth: int = 0
    is_open: bool = False
    name: str = ""
    """Name as it is shown."""

    @property
    def size_bytes(self) -> int:
        """Size of the file, or of all below a directory."""
        return size_of(self.entry)


@dataclass(eq=False)
class Version:
    """A version of a path."""

    place: Place
    path: bytes
    found: PathVersion
    older: Snapshot | None = None
    """Newest snapshot with the version before; None until it is known, and for the oldest."""
    verdict: Verdict | None = None
    is_marked: bool = False

    @property
    def snapshot(self) -> Snapshot:
        """Newest snapshot with the version, if possible no safety snapshot, which is removed soon."""
        return self.found.ordinary or self.found.last


def size_of(entry: Entry) -> int:
    """Return the size of a file, or of all below a directory."""
    return entry.total_bytes if entry.is_dir else entry.size_bytes


def is_below(node: Node, top: Node) -> bool:
    """Return whether a name is another one, or below it."""
    return node.place is top.place and is_within(node.path, top.path)


class Opened(NamedTuple):
    """Roots of a repository."""

    nodes: list[Node]
    path: bytes | None
    """Path to begin with, as the snapshots have it."""
    said: list[str]
    """Warnings."""
    title: str
    """Directory of the repository, or URL."""


def opened(session: Session, path: bytes | None) -> Iterator[Opened]:
    """Open the repository or remote, and yield its roots.

    Raises:
        NotFound: there is no snapshot, or none has the path.
    """
    said: list[str] = []
    passed_over = PassedOver()
    with lines_to(said.append):
        places = [Place(*one) for one in all_timelines(session, None, passed_over)]
        passed_over.tell()
    if not places:
        raise NotFound("there is no snapshot to look into", hint="ciuic snapshot takes one")
    several = len({place.timeline.host for place in places}) > 1
    nodes = []
    for place in places:
        timeline = place.timeline
        root = timeline.root_of(timeline.snapshots[0])
        name = shown(timeline.path) + (f"  ({shown_text(timeline.host)})" if several else "")
        nodes.append(Node(place, timeline.path, root.entry, name=name))
    if path is not None:
        path = as_recorded(places[0].timeline.snapshots[0], path)
        if not any(is_within(path, node.path) for node in nodes):
            known = ", ".join(shown(node.path) for node in nodes)
            raise NotFound(f"no snapshot has {shown(path)}", hint=f"roots of the snapshots: {known}")
    yield Opened(nodes, path, said, shown_text(session.place))


def children(question: Question, node: Node) -> Iterator[Node | Line]:
    """Yield the names in a directory: those of the newest snapshot, then those that only older ones have."""
    damaged: list[Line] = []
    found = search(
        node.place.repository,
        question.watched(node.place.timeline),
        GlobMatcher(b"*"),
        node.path,
        deep=False,
        on_damage=lambda snapshot, path, error: damaged.append(_damage(snapshot, path, error)),
    )
    for one in found:
        name = shown(one.path.rpartition(b"/")[2])
        yield Node(node.place, one.path, one.entry, one.is_deleted or node.is_gone, node.depth + 1, name=name)
    yield from damaged[:1]


def is_pattern(text: str) -> bool:
    """Return whether what is looked for is a shell pattern."""
    return any(mark in text for mark in "*?[")


def named(nodes: Sequence[Node | Line], text: str) -> list[Node]:
    """Return the names that contain the text, or match it as a pattern as in `ciuic find`."""
    found = [node for node in nodes if isinstance(node, Node)]
    if is_pattern(text):
        matcher = GlobMatcher(os.fsencode(text))
        return [node for node in found if matcher.matches(node.path, is_directory=node.entry.is_dir)]
    return [node for node in found if text.casefold() in node.name.casefold()]


def searched(question: Question, nodes: Sequence[Node], text: str) -> Iterator[Node | Line]:
    """Yield the paths in all roots with a name that contains the text, or matches it as a pattern."""
    pattern = text if is_pattern(text) or "/" in text else f"*{text}*"
    matcher = GlobMatcher(os.fsencode(pattern))
    damaged: list[Line] = []
    count = 0
    for node in nodes:
        found = search(
            node.place.repository,
            question.watched(node.place.timeline),
            matcher,
            on_damage=lambda snapshot, path, error: damaged.append(_damage(snapshot, path, error)),
        )
        for one in found:
            count += 1
            if count > MAX_FOUND:
                yield Line(f"more than {MAX_FOUND:,} paths: the others are not shown")
                return
            yield Node(node.place, one.path, one.entry, one.is_deleted, name=shown(one.path))
    yield from damaged[:1]


def _damage(snapshot: Snapshot, path: bytes, error: Damaged) -> Line:
    return Line(f"{shown(path)} cannot be read in {snapshot.id}: {shown_text(error.message)}", "red")


def versions_of(question: Question, node: Node) -> Iterator[Version | Line]:
    """Yield the versions of a path, newest first."""
    damaged: list[Line] = []
    last: Version | None = None
    for found in versions(
        node.place.repository,
        question.watched(node.place.timeline),
        node.path,
        on_damage=lambda snapshot, path, error: damaged.append(_damage(snapshot, path, error)),
    ):
        version = Version(node.place, node.path, found)
        if last is not None:
            last.older = version.snapshot
        yield version
        last = version
    yield from damaged[:1]


def verdicts_of(
    question: Question, rows: Sequence[Version], patterns: Sequence[str] = ()
) -> Iterator[tuple[Version, Verdict]]:
    """Yield the stored verdicts on versions, and judge files that may be checkpoints."""
    records: dict[int, VerdictRecords] = {}
    for row in rows:
        question.pause()
        entry = row.found.entry
        if entry is None:
            continue
        repository = row.place.repository
        # Opened once: each reads the key of this host.
        stored = records.setdefault(id(repository), VerdictRecords(repository, patterns=patterns))
        verdict = stored_verdict(stored, row)
        if verdict is None and entry.is_file and row.path.endswith(SUFFIXES):
            verdict = judge_file(source_of(row))
        # A file of no known format is no checkpoint.
        if verdict is not None and (verdict.format or verdict.state != "UNKNOWN"):
            yield row, verdict


def stored_verdict(records: VerdictRecords, row: Version) -> Verdict | None:
    """Return the stored verdict on a version; None if there is none."""
    record = records.record(row.snapshot)
    if record is None:
        return None
    found = dict(record.roots).get(row.place.timeline.path, ())
    # A file of a checkpoint directory is as good as the whole.
    return next(
        (one.checkpoint.verdict for one in found if is_within(row.path, one.checkpoint.path)),
        None,
    )


def source_of(row: Version) -> SnapshotFile:
    """Return the content of a version of a file."""
    entry, snapshot = row.found.entry, row.snapshot
    assert entry is not None
    root = row.place.timeline.root_of(snapshot)
    located = Located(root, row.path, entry)
    return SnapshotFile(row.place.repository, snapshot, located, row.place.timeline.before)


def preview(question: Question, row: Version, now: bool) -> Iterator[Line]:
    """Yield the lines of a preview.

    Args:
        question: What is answered.
        row: The version.
        now: Of a directory: compare with what is on the disk now, in place of the version before.
    """
    found = row.found
    entry = found.entry
    if entry is None:
        yield Line("GONE", "bold red")
        yield Line(f"since {times.clock(found.first.time_ns)}, {found.first.id}")
        yield Line("the version below it is the last that there was", "dim")
        return
    try:
        if now:
            yield from _against_now(question, row)
        elif entry.is_dir:
            yield from _against_older(row)
        elif entry.is_symlink:
            yield Line(f"symbolic link to {shown(entry.target)}")
        elif entry.is_file:
            yield from file_preview(row)
        else:
            yield Line("a special file: it has no content", "dim")
    except CiuicError as error:
        yield Line(shown_text(error.message), "red")


def _against_now(question: Question, row: Version) -> Iterator[Line]:
    snapshot = row.snapshot
    yield Line(f"from {snapshot.id} to now:", "bold")
    if snapshot.host != socket.gethostname():
        yield Line(f"(these are the files of this host, not of {shown_text(snapshot.host)})", "yellow")
    yield from _changes(diff_live(row.place.repository, snapshot, row.path, question.pause))


def _against_older(row: Version) -> Iterator[Line]:
    if row.older is None:
        entry = row.found.entry
        assert entry is not None
        yield Line(
            f"the oldest version: {plural(entry.total_files, 'file')}, {human_size(entry.total_bytes)}",
            "bold",
        )
        return
    yield from between(row.place.repository, row.older, row.found.first, row.path)


def between(repository: Repository, old: Snapshot, new: Snapshot, path: bytes) -> Iterator[Line]:
    """Yield the names that differ at and below a path."""
    yield Line(
        f"from {old.id} ({times.clock(old.time_ns)}) to {new.id} ({times.clock(new.time_ns)}):", "bold"
    )
    yield from _changes(diff_snapshots(repository, old, new, path))


def _changes(changes: Iterator[PathChange]) -> Iterator[Line]:
    count = 0
    for change in itertools.islice(changes, _MAX_CHANGES + 1):
        count += 1
        if count > _MAX_CHANGES:
            yield Line("and more: ciuic diff shows all (key y for the command)", "dim")
            return
        sign, style = _SIGNS[change.kind]
        details = f"  [{', '.join(change.details)}]" if change.details else ""
        yield Line(f"{sign} {shown(change.path)}{details}", style)
    if not count:
        yield Line("no difference", "dim")


def file_preview(row: Version) -> Iterator[Line]:
    """Yield the lines of a preview of a file: its text, its tensors, or its first bytes."""
    tensors = list(tensor_lines(row)) if row.path.endswith(SUFFIXES) else []
    yield from tensors or first_lines(row)


def first_lines(row: Version) -> Iterator[Line]:
    """Yield the beginning of a file: of a text its lines, of others their first bytes."""
    source = source_of(row)
    data = source.read(0, _MAX_TEXT_BYTES)
    if not data:
        yield Line("empty", "dim")
    elif is_binary(data):
        yield Line(
            f"not text; its first {min(len(data), _DUMPED_BYTES)} of {source.size_bytes:,} bytes:", "bold"
        )
        for at in range(0, min(len(data), _DUMPED_BYTES), 16):
            piece = data[at : at + 16]
            signs = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in piece)
            yield Line(f"{at:06x}  {piece.hex(' '):<47}  {signs}")
    else:
        yield from map(Line, text_lines(data))
        if source.size_bytes > len(data):
            yield Line(f"… {human_size(source.size_bytes - len(data))} more: c copies the file", "dim")


def is_binary(data: bytes) -> bool:
    """Return whether the beginning of a file is not text."""
    return b"\0" in data[:8192]


def text_lines(data: bytes) -> list[str]:
    """Return the lines of a text; what would control a terminal is escaped."""
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [one_line(line.removesuffix(b"\r").expandtabs()[:_MAX_LINE]) for line in lines]


def tensor_lines(row: Version) -> Iterator[Line]:
    """Yield the names, types and shapes of the tensors in a file; nothing if it has none that are known."""
    from ciuic.training.stored_tensors import BlockReader
    from ciuic.training.tensor_files import FileTensors, NotTensors

    entry = row.found.entry
    assert entry is not None
    try:
        tensors = FileTensors(row.place.repository, entry, row.path, BlockReader(row.place.repository))
    except NotTensors:
        return
    except CiuicError as error:
        # NumPy is missing, or the file is damaged: its bytes still show.
        yield Line(shown_text(error.message), "yellow")
        return
    names = list(tensors.names())
    yield Line(f"{plural(len(names), 'tensor')}, {human_size(tensors.size_bytes)}", "bold")
    for name in names[:_MAX_SHOWN_TENSORS]:
        shape = "x".join(map(str, tensors.shape(name))) or "scalar"
        yield Line(f"{shown_text(name)}  {shown_text(tensors.tensor(name).kind.name)}  {shape}")
    if len(names) > _MAX_SHOWN_TENSORS:
        yield Line(f"and {len(names) - _MAX_SHOWN_TENSORS:,} more: ciuic tensors shows all", "dim")


def difference(question: Question, old: Version, new: Version) -> Iterator[Line]:
    """Yield the difference of two versions of a path: of text files line by line, else what differs by name."""
    try:
        repository = new.place.repository
        yield from between(repository, old.snapshot, new.snapshot, new.path)
        one, other = old.found.entry, new.found.entry
        if one is None or other is None or not (one.is_file and other.is_file):
            return
        question.pause()
        yield from text_difference(source_of(old), source_of(new))
    except CiuicError as error:
        yield Line(shown_text(error.message), "red")


def text_difference(old: SnapshotFile, new: SnapshotFile) -> Iterator[Line]:
    """Yield the difference of two files line by line, or why there is none. Raises Damaged."""
    if max(old.size_bytes, new.size_bytes) > _MAX_DIFF_BYTES:
        yield Line(f"files of more than {human_size(_MAX_DIFF_BYTES)} are not compared line by line", "dim")
        return
    texts = [source.read(0, _MAX_DIFF_BYTES) for source in (old, new)]
    if any(map(is_binary, texts)):
        yield Line("not text: not compared line by line", "dim")
        return
    before, after = map(text_lines, texts)
    if max(len(before), len(after)) > _MAX_DIFF_LINES:
        yield Line(f"texts of more than {_MAX_DIFF_LINES:,} lines are not compared line by line", "dim")
        return
    styles = {"+": "green", "-": "red", "@": "cyan"}
    for text in itertools.islice(difflib.unified_diff(before, after, lineterm=""), 2, None):
        yield Line(text, styles.get(text[:1], ""))


def kind_of(entry: Entry) -> str:
    """Return the sign behind a name, as ``ls -F`` has it."""
    return {stat.S_IFDIR: "/", stat.S_IFLNK: "@", stat.S_IFIFO: "|", stat.S_IFSOCK: "="}.get(
        stat.S_IFMT(entry.mode), ""
    )
