"""Verdict on a checkpoint: a file, or a directory with an index, a marker or several files that belong together.

A file is GOOD with all of: a structure that is complete; no hole, and no zero at the very end, where the headers promise data,
unless a checksum proves that it belongs there; no open writer at the instant, and no sign that an older version of the content is
left in it. A structure that is incomplete is TORN also while a writer has it open. Everything else is UNKNOWN.

A directory is GOOD with its index or marker, every file that it names, and GOOD for each of these files. Where one is TORN or
missing the checkpoint is TORN, else UNKNOWN.

Limits: of a file without checksums that several threads wrote into allocated space at once, a gap smaller than a block that neither
touches the headers nor the end is not seen; nor is an end that was cut within an integer.
"""

from __future__ import annotations

import hashlib
import posixpath
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from ciuic.errors import Damaged
from ciuic.excludes import ExcludeMatcher
from ciuic.units import human_size, plural
from ciuic.verdicts.checkpoint_directories import (
    RECOGNISERS,
    STATE_FILE,
    PartsNeeded,
    is_of_one_step,
    is_step,
    shown_name,
)
from ciuic.verdicts.formats.hdf5 import read_hdf5
from ciuic.verdicts.formats.npy import read_npy
from ciuic.verdicts.formats.pickles import read_pickle
from ciuic.verdicts.formats.safetensors import read_safetensors
from ciuic.verdicts.formats.zip_archive import read_zip
from ciuic.verdicts.model import (
    DEFECT,
    UNREADABLE,
    BoundedReader,
    Checkpoint,
    NotJudged,
    OtherFormat,
    Piece,
    Structure,
    TornContent,
    Verdict,
)
from ciuic.verdicts.not_finite import NumberBudget, count_not_finite
from ciuic.verdicts.sources import DirectorySource, FileSource

# Formats with a mark at their beginning first; pickles and safetensors have hardly any.
_FORMATS: Final[tuple[Callable[[BoundedReader], Structure], ...]] = (
    read_zip,
    read_hdf5,
    read_npy,
    read_safetensors,
    read_pickle,
)
_MAX_CHECKED_BYTES: Final = 256 << 20
"""Limit of content that is read to compare checksums, where holes leave a doubt."""
_MAX_STEPS: Final = 2_000_000
"""Limit of pairs of a hole and a piece that are compared: pieces of a crafted file lie over each other."""
_STEP_BYTES: Final = 1 << 20
_NUMBER_BYTES: Final = 8
"""Size of the largest number of a file format."""
_MAX_HOLES: Final = 1 << 16
_KEY_BYTES: Final = 16


def judge_file(source: FileSource, *, thorough: bool = False, budget: NumberBudget | None = None) -> Verdict:
    """Return the verdict on a file, without its directory.

    Reads a few kilobytes of most files; with ``thorough`` all data that have a checksum, of any size; with a budget floating numbers
    as far as it goes, to count those that are not finite.
    """
    reader = BoundedReader(source.read, source.size_bytes, source.name)
    try:
        structure = _read_structure(reader)
        found = judge_structure(source, structure)._replace(not_finite=_not_finite(source, structure, budget))
        if thorough and found.is_good and not source.is_committed:
            for piece in structure.pieces:
                if piece.crc32 is not None and _crc32(source, piece) != piece.crc32:
                    return Verdict("TORN", "a part of its data does not match its checksum", structure.format)
        return found
    except OtherFormat:
        return Verdict("UNKNOWN", "its format is not known here")
    except TornContent as error:
        return Verdict("TORN", str(error))
    except NotJudged as error:
        return Verdict("UNKNOWN", str(error))
    except (Damaged, OSError) as error:
        return Verdict("UNKNOWN", f"{UNREADABLE}: {error}")
    # No file ends the look at all others. The fuzzer looks for this reason.
    except Exception as error:
        return Verdict("UNKNOWN", f"{DEFECT} ({type(error).__name__})")


def _not_finite(source: FileSource, structure: Structure, budget: NumberBudget | None) -> int | None:
    if budget is None or structure.numbers is None:
        return None
    try:
        return count_not_finite(source.read, structure.numbers(), budget)
    # Nothing of its structure: that was complete without it.
    except (TornContent, NotJudged, Damaged, OSError):
        return None


def _read_structure(reader: BoundedReader) -> Structure:
    """Return the structure of a file; raise TornContent, OtherFormat or NotJudged."""
    if not reader.size_bytes:
        raise TornContent("it is empty")
    for read in _FORMATS:
        try:
            return read(reader)
        except OtherFormat:
            continue
    raise OtherFormat


def judge_structure(source: FileSource, structure: Structure) -> Verdict:
    """Return the verdict on a file whose structure is complete."""
    try:
        if source.is_committed:
            # Its block map alone is read, of which a part may be lost.
            for _ in source.holes(0, source.size_bytes):
                pass
            return Verdict("GOOD", structure.content, structure.format)
        found = _gap(source, structure)
        if found is not None:
            return found._replace(format=structure.format)
        doubt = source.doubt()
        if not doubt and (doubt := source.mixture()):
            checked = _checked(source, structure)
            if checked is not None:
                return checked
    except (Damaged, OSError) as error:
        return Verdict("UNKNOWN", f"{UNREADABLE}: {error}", structure.format)
    if doubt:
        return Verdict("UNKNOWN", doubt, structure.format)
    return Verdict("GOOD", structure.content, structure.format)


def _gap(source: FileSource, structure: Structure) -> Verdict | None:
    """Return the verdict that a gap in the data leads to; None for none."""
    # Not by checksum: two pieces of the same range may have one and none.
    pieces = sorted(structure.pieces, key=lambda piece: (piece.start, piece.stop))
    if not pieces:
        return None
    checked: set[Piece] = set()
    left_bytes = _MAX_CHECKED_BYTES
    at = 0
    left_steps = _MAX_STEPS
    for number, (start, stop) in enumerate(
        source.holes(pieces[0].start, max(piece.stop for piece in pieces))
    ):
        if number >= _MAX_HOLES:
            return Verdict("UNKNOWN", "it has more holes than are looked at for a verdict")
        # Both ascend, so that each piece is passed once.
        while at < len(pieces) and pieces[at].stop <= start:
            at += 1
        for index in range(at, len(pieces)):
            piece = pieces[index]
            left_steps -= 1
            if left_steps < 0:
                return Verdict("UNKNOWN", "it has more holes than are looked at for a verdict")
            if piece.start >= stop:
                break
            if piece in checked or piece.stop <= start:
                continue
            # The end of a number that lies in the file's last block: no writer stops within a number.
            if stop >= source.size_bytes and stop - start < _NUMBER_BYTES and piece.start < start:
                continue
            left_bytes -= piece.stop - piece.start
            if piece.crc32 is None or left_bytes < 0:
                size = min(stop, piece.stop) - max(start, piece.start)
                return Verdict(
                    "UNKNOWN", f"{human_size(size)} of its data are a hole: zeros, or never written"
                )
            if _crc32(source, piece) != piece.crc32:
                return Verdict("TORN", "a part of its data was never written: it does not match its checksum")
            checked.add(piece)
    if structure.last_item is not None:
        start, stop = structure.last_item
        start = max(start, stop - _STEP_BYTES)
        if not any(source.read(start, stop - start)):
            return Verdict("UNKNOWN", "its data end in zeros, as if the end was never written")
    return None


def _checked(source: FileSource, structure: Structure) -> Verdict | None:
    """Return the verdict of the checksums, if there is one of all data and not too much of it."""
    total = sum(piece.stop - piece.start for piece in structure.pieces)
    if total > _MAX_CHECKED_BYTES or any(piece.crc32 is None for piece in structure.pieces):
        return None
    if any(_crc32(source, piece) != piece.crc32 for piece in structure.pieces):
        reason = "it was overwritten in part: it does not match its checksums"
        return Verdict("TORN", reason, structure.format)
    return Verdict("GOOD", structure.content, structure.format)


def _crc32(source: FileSource, piece: Piece) -> int:
    value = 0
    for at in range(piece.start, piece.stop, _STEP_BYTES):
        value = zlib.crc32(source.read(at, min(_STEP_BYTES, piece.stop - at)), value)
    return value


SUFFIXES: Final = (
    *(b".safetensors", b".pt", b".pth", b".ckpt", b".bin", b".npz", b".npy", b".h5", b".hdf5", b".keras"),
    b".pkl",
)
"""Ends of the names of files that may be checkpoints."""
MARKS: Final = (
    b".distcp",
    b".index",
    b".index.json",
    b".metadata",
    b"latest",
    b"latest_checkpointed_iteration.txt",
    b"_CHECKPOINT_METADATA",
    b"manifest.ocdbt",
    STATE_FILE,
)
"""Ends of the names of files that show a checkpoint of several files."""
_MAX_DEPTH: Final = 4
"""Limit of directories in each other that are one checkpoint."""
JudgeFile = Callable[[FileSource], Verdict]


def file_key(source: FileSource) -> str | None:
    """Return a key that two files share only if the verdict on both is the same; None where there is none.

    It covers the content with its holes, the name (which some formats are told by), an open writer, and traces of an older version.
    """
    if not source.identity:
        return None
    doubt = mixture = ""
    if not source.is_committed:
        try:
            doubt = source.doubt()
            mixture = source.mixture() if not doubt else ""
        except (Damaged, OSError):
            return None
    facts = (source.identity, source.name, source.is_committed, doubt, mixture)
    return hashlib.blake2b(msgspec.msgpack.encode(facts), digest_size=_KEY_BYTES).hexdigest()


class FileVerdicts:
    """Verdicts on files, each content read once.

    ``stored`` yields what is known of files in other snapshots, by `file_key`; it is asked once, for the first file of which nothing is known.
    ``counted_bytes`` is the limit of the numbers that are read to count those that are not finite, of all files together; 0: none are.
    """

    def __init__(
        self, stored: Callable[[], Iterable[Mapping[str, Verdict]]] = tuple, *, counted_bytes: int = 0
    ) -> None:
        self._budget = NumberBudget(counted_bytes) if counted_bytes else None
        self._stored: Callable[[], Iterable[Mapping[str, Verdict]]] | None = stored
        self._known: dict[str, Verdict] = {}
        self.used: dict[str, Verdict] = {}
        """Verdicts that `judge` has returned, by `file_key`."""

    def judge(self, source: FileSource) -> Verdict:
        """Return the verdict on a file."""
        key = file_key(source)
        if key is None:
            return judge_file(source, budget=self._budget)
        if key not in self._known and self._stored is not None:
            stored, self._stored = self._stored, None
            for known in stored():
                self._known = {**known, **self._known}
        verdict = self._known.get(key)
        if verdict is None:
            verdict = judge_file(source, budget=self._budget)
            # Nothing of the content: the disk or a defect is to blame.
            if verdict.reason.startswith((UNREADABLE, DEFECT)):
                return verdict
        self._known[key] = self.used[key] = verdict
        return verdict


def may_hold_checkpoints(names: list[bytes], path: bytes = b"") -> bool:
    """Return whether a directory with these names, and perhaps this path, is worth a look."""
    return is_step(path.rpartition(b"/")[2]) or any(
        name.endswith((*SUFFIXES, *MARKS)) or is_step(name) for name in names
    )


Named = Callable[[bytes, bool], bool]
"""Returns whether the user has named this absolute path, of a directory or not, as a checkpoint."""


def named_by(root: bytes, patterns: Sequence[str]) -> Named | None:
    """Return the rule that patterns are for what is below a root; None for no patterns.

    Args:
        root: Absolute path of the root.
        patterns: Patterns in the form of `ciuic.excludes.effective_patterns`.
    """
    matcher = ExcludeMatcher(root, patterns)

    def named(path: bytes, is_dir: bool) -> bool:
        inside = posixpath.relpath(path, root)
        # What a checkpoint has below it is a part of it, and none by itself.
        return matcher.match(inside, is_dir) and not matcher.match(posixpath.dirname(inside), True)

    return named if matcher else None


def checkpoints_in(
    directory: DirectorySource,
    judge: JudgeFile = judge_file,
    depth: int = _MAX_DEPTH,
    named: Named | None = None,
) -> list[Checkpoint]:
    """Return the checkpoints in a directory, without those below its directories that are not a part of it, by path.

    Args:
        directory: The directory.
        judge: Judges one file; a caller with a cache gives its own.
        depth: How many directories in each other may be one checkpoint.
        named: Tells what is one checkpoint each, whatever it looks like.
    """
    names = directory.names()
    found: list[Checkpoint] = []
    if named is not None:
        for name in names:
            path = _path(directory, name)
            # First, as a look at what it is takes longer.
            if named(path, True) or named(path, False):
                below, source = directory.directory(name), directory.file(name)
                if (below or source) and named(path, below is not None):
                    found.append(_judge_named(directory, name, judge))
        mine = {name for one in found for name in one.files}
        return sorted(
            [*found, *_found_in(directory, [name for name in names if name not in mine], judge, depth)]
        )
    return sorted(_found_in(directory, names, judge, depth))


def _judge_named(directory: DirectorySource, name: bytes, judge: JudgeFile) -> Checkpoint:
    """Return a file or directory that is a checkpoint because the user says so."""
    path, source, below = _path(directory, name), directory.file(name), directory.directory(name)
    if source is not None:
        verdict = judge(source)
        format_ = verdict.format or "named"
        return Checkpoint(path, verdict._replace(format=format_), source.size_bytes, (name,))
    found = [] if below is None else _found_in(below, below.names(), judge, _MAX_DEPTH, is_one=True)
    if not found:
        nothing = Verdict("UNKNOWN", "it has no file of a known format", "named")
        return Checkpoint(path, nothing, 0, (name,))
    whole = found[0]
    files = (name, *(posixpath.normpath(posixpath.join(name, file)) for file in whole.files))
    verdict = whole.verdict._replace(format=whole.verdict.format or "named")
    return Checkpoint(path, verdict, whole.size_bytes, files)


def _found_in(
    directory: DirectorySource, names: list[bytes], judge: JudgeFile, depth: int, *, is_one: bool = False
) -> list[Checkpoint]:
    """Return the checkpoints among these names; where they are parts of one, that one."""
    found: list[Checkpoint] = []
    taken: set[bytes] = set()
    is_one = is_one or is_of_one_step(directory.path, names)
    for recognise in RECOGNISERS:
        for parts in _recognised(recognise, directory, names):
            # What one format has found belongs to no other.
            if parts.taken and taken.issuperset(parts.taken):
                continue
            taken |= parts.taken
            # A directory with an index or marker of its own has the rest of its step beside it.
            is_one = is_one or (not parts.name and bool(parts.taken))
            found.append(_judge_parts(directory, parts, judge))
        if directory.holds_state and found:
            return found
    for name in names:
        if name.endswith(SUFFIXES) and name not in taken:
            source, linked = directory.file(name), directory.linked(name)
            # Where a link leads to a file that is judged under its own name, that one counts.
            if linked is not None and (is_one or not linked.path.endswith(SUFFIXES)):
                source = linked.file
            if source is not None:
                files = [name] if linked is None else [name, _relative(directory, linked.path)]
                found.append(
                    Checkpoint(_path(directory, name), judge(source), source.size_bytes, tuple(files))
                )
    is_nested = False
    if is_one and depth:
        for name in names:
            below = directory.directory(name) if name not in taken else None
            for one in checkpoints_in(below, judge, depth - 1) if below is not None else ():
                below_here = (name, *(posixpath.normpath(posixpath.join(name, file)) for file in one.files))
                found.append(one._replace(files=below_here))
                is_nested = True
    if is_one and (len(found) > 1 or is_nested):
        # Files of no known format are not a part of what the trainer loads.
        known = [one for one in found if not one.verdict.is_foreign]
        found = [_together(directory, known or found)]
    return found


def _relative(directory: DirectorySource, path: bytes) -> bytes:
    return posixpath.relpath(path, directory.path)


def _recognised(
    recognise: Callable[[DirectorySource, list[bytes]], Iterator[PartsNeeded]],
    directory: DirectorySource,
    names: list[bytes],
) -> Iterator[PartsNeeded]:
    """Yield what a recogniser finds; one that fails makes the directory UNKNOWN, and does not end the look at others."""
    try:
        yield from recognise(directory, names)
    except (Damaged, OSError):
        raise
    except Exception as error:
        yield PartsNeeded("directory", doubt=f"{DEFECT} ({type(error).__name__})")


def _path(directory: DirectorySource, name: bytes) -> bytes:
    return directory.path.rstrip(b"/") + b"/" + name if name else directory.path


def _together(directory: DirectorySource, found: list[Checkpoint]) -> Checkpoint:
    verdict = _worst(
        [
            one.verdict._replace(reason=f"{shown_name(_relative(directory, one.path))}: {one.verdict.reason}")
            if one.path != directory.path
            else one.verdict
            for one in found
        ]
    )
    files = tuple(sorted({file for one in found for file in one.files}))
    # With the directories in which they are.
    count = len(set(files).difference(map(posixpath.dirname, files)))
    good = Verdict("GOOD", plural(count, "file"), "directory")
    return Checkpoint(
        directory.path,
        (good if verdict.is_good else verdict._replace(format="directory"))._replace(
            not_finite=_summed([one.verdict for one in found])
        ),
        sum(one.size_bytes for one in found),
        files,
    )


def _judge_parts(directory: DirectorySource, parts: PartsNeeded, judge: JudgeFile) -> Checkpoint:
    # First: what is missing tells more than a verdict on one file.
    verdicts = [Verdict("TORN", parts.torn)] if parts.torn else []
    verdicts += [Verdict("UNKNOWN", parts.doubt)] if parts.doubt else []
    judged: list[Verdict] = []
    size_bytes = 0
    needed = [*((name, -1) for name in parts.files), *parts.raw]
    links = {}
    for name, least_bytes in needed:
        source, target = directory.below(name), directory.link_below(name)
        if target is not None:
            links[name] = _relative(directory, target) if target else name
        if target == b"":
            verdicts.append(
                Verdict("UNKNOWN", f"{shown_name(name)} is a link that leads out of the root, or in a circle")
            )
            continue
        if source is None:
            verdicts.append(Verdict("TORN", f"{shown_name(name)} is missing"))
            continue
        size_bytes += source.size_bytes
        verdict = judge(source) if least_bytes < 0 else _judge_raw(source, least_bytes, parts.tail_bytes)
        judged.append(verdict)
        if not verdict.is_good:
            verdict = verdict._replace(reason=f"{shown_name(name)}: {verdict.reason}")
        verdicts.append(verdict)
    # The index itself, which may be open as well.
    for name in sorted(parts.taken - {name for name, _ in needed}):
        source = directory.below(name)
        if source is not None and (doubt := source.doubt()):
            verdicts.append(Verdict("UNKNOWN", f"{shown_name(name)}: {doubt}"))
    verdict = _worst(verdicts)
    if verdict.is_good:
        verdict = Verdict("GOOD", plural(len(needed), "file"))
    files = tuple(sorted({name for name, _ in needed} | parts.taken | set(links.values())))
    verdict = verdict._replace(format=parts.format, not_finite=_summed(judged))
    return Checkpoint(_path(directory, parts.name), verdict, size_bytes, files)


def _judge_raw(source: FileSource, least_bytes: int, tail_bytes: int) -> Verdict:
    """Return the verdict on a file of which an index says only how long it is."""
    if source.size_bytes < least_bytes:
        return Verdict("TORN", f"its index promises {least_bytes} bytes, the file has {source.size_bytes}")
    if not least_bytes:
        return Verdict("GOOD", "no data")
    last_item = (max(0, least_bytes - tail_bytes), least_bytes)
    return judge_structure(source, Structure("data", "data", (Piece(0, least_bytes),), last_item))


def _summed(verdicts: list[Verdict]) -> int | None:
    """Return how many numbers of all files are not finite; None if none is known to be, and not all are known."""
    found = sum(one.not_finite or 0 for one in verdicts)
    return found if found or all(one.not_finite is not None for one in verdicts) else None


def _worst(verdicts: list[Verdict]) -> Verdict:
    for state in ("TORN", "UNKNOWN"):
        for verdict in verdicts:
            if verdict.state == state:
                return verdict
    return Verdict("GOOD", "")
