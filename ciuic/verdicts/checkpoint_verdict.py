"""Verdict on a checkpoint: a file, or a directory with an index, a marker or several files that belong together.

GOOD needs the directory's index or marker, every file that it names, and GOOD for each of these files. Where one is TORN or missing
the checkpoint is TORN, else UNKNOWN.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from ciuic.errors import Damaged
from ciuic.units import plural
from ciuic.verdicts.directories import deepspeed, distributed, orbax, sharded, tensorflow, training
from ciuic.verdicts.directories.parts import PartsNeeded, shown_name
from ciuic.verdicts.file_verdict import DEFECT, judge_file, judge_structure
from ciuic.verdicts.model import Piece, Structure, Verdict
from ciuic.verdicts.sources import DirectorySource, FileSource

SUFFIXES: Final = (
    *(b".safetensors", b".pt", b".pth", b".ckpt", b".bin", b".npz", b".npy", b".h5", b".hdf5", b".keras"),
    *(b".gguf", b".pkl"),
)
"""Ends of the names of files that may be checkpoints."""
MARKS: Final = (
    b".distcp",
    b".index",
    b".index.json",
    b".metadata",
    b"latest",
    b"_CHECKPOINT_METADATA",
    b"manifest.ocdbt",
    training.STATE_FILE,
)
"""Ends of the names of files that show a checkpoint of several files."""
_STEP_DIRECTORY: Final = re.compile(
    rb"(?:checkpoint|ckpt|step|epoch|global_step|iter)[-_]?\d+\Z", re.IGNORECASE
)
_RECOGNISERS: Final[tuple[Callable[[DirectorySource, list[bytes]], Iterator[PartsNeeded]], ...]] = (
    training.recognise,
    distributed.recognise,
    orbax.recognise,
    deepspeed.recognise,
    tensorflow.recognise,
    sharded.recognise,
)
JudgeFile = Callable[[FileSource], Verdict]


class Checkpoint(NamedTuple):
    """A checkpoint and the verdict on it."""

    path: bytes
    """Absolute path of the file or directory; of a TensorFlow checkpoint, its prefix."""
    verdict: Verdict
    size_bytes: int
    files: tuple[bytes, ...]
    """Relative paths of its files, from the directory in which it was found."""


def may_hold_checkpoints(names: list[bytes]) -> bool:
    """Return whether a directory with these names is worth a look."""
    return any(name.endswith((*SUFFIXES, *MARKS)) for name in names)


def checkpoints_in(directory: DirectorySource, judge: JudgeFile = judge_file) -> list[Checkpoint]:
    """Return the checkpoints in a directory, without those below its directories, by path.

    Args:
        directory: The directory.
        judge: Judges one file; a caller with a cache gives its own.
    """
    names = directory.names()
    found: list[Checkpoint] = []
    taken: set[bytes] = set()
    for recognise in _RECOGNISERS:
        for parts in _recognised(recognise, directory, names):
            taken |= parts.taken
            found.append(_judge_parts(directory, parts, judge))
        if directory.holds_state and found:
            return found
    single = [name for name in names if name.endswith(SUFFIXES) and name not in taken]
    # What a trainer writes into a directory of one step belongs together.
    if _STEP_DIRECTORY.match(directory.path.rpartition(b"/")[2]) and (len(single) > 1 or (found and single)):
        needed = PartsNeeded("directory", files=tuple(single))
        found = [_together(directory, [*found, _judge_parts(directory, needed, judge)])]
        single = []
    for name in single:
        source = directory.file(name)
        if source is not None:
            path = _path(directory, name)
            found.append(Checkpoint(path, judge(source), source.size_bytes, (name,)))
    return sorted(found)


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
    verdict = _worst([one.verdict for one in found])
    files = tuple(sorted({file for one in found for file in one.files}))
    good = Verdict("GOOD", plural(len(files), "file"), "directory")
    return Checkpoint(
        directory.path,
        good if verdict.is_good else verdict._replace(format="directory"),
        sum(one.size_bytes for one in found),
        files,
    )


def _judge_parts(directory: DirectorySource, parts: PartsNeeded, judge: JudgeFile) -> Checkpoint:
    verdicts = []
    size_bytes = 0
    needed = [*((name, -1) for name in parts.files), *parts.raw]
    for name, least_bytes in needed:
        source = directory.below(name)
        if source is None:
            verdicts.append(Verdict("TORN", f"{shown_name(name)} is missing"))
            continue
        size_bytes += source.size_bytes
        verdict = judge(source) if least_bytes < 0 else _judge_raw(source, least_bytes, parts.tail_bytes)
        if not verdict.is_good:
            verdict = verdict._replace(reason=f"{shown_name(name)}: {verdict.reason}")
        verdicts.append(verdict)
    if parts.torn:
        verdicts.append(Verdict("TORN", parts.torn))
    if parts.doubt:
        verdicts.append(Verdict("UNKNOWN", parts.doubt))
    # The index itself, which may be open as well.
    for name in sorted(parts.taken - {name for name, _ in needed}):
        source = directory.file(name)
        if source is not None and (doubt := source.doubt()):
            verdicts.append(Verdict("UNKNOWN", f"{shown_name(name)}: {doubt}"))
    verdict = _worst(verdicts)
    if verdict.is_good:
        verdict = Verdict("GOOD", plural(len(needed), "file"))
    files = tuple(sorted({name for name, _ in needed} | parts.taken))
    return Checkpoint(_path(directory, parts.name), verdict._replace(format=parts.format), size_bytes, files)


def _judge_raw(source: FileSource, least_bytes: int, tail_bytes: int) -> Verdict:
    """Return the verdict on a file of which an index says only how long it is."""
    if source.size_bytes < least_bytes:
        return Verdict("TORN", f"its index promises {least_bytes} bytes, the file has {source.size_bytes}")
    if not least_bytes:
        return Verdict("GOOD", "no data")
    last_item = (max(0, least_bytes - tail_bytes), least_bytes)
    return judge_structure(source, Structure("data", "data", (Piece(0, least_bytes),), last_item))


def _worst(verdicts: list[Verdict]) -> Verdict:
    for state in ("TORN", "UNKNOWN"):
        for verdict in verdicts:
            if verdict.state == state:
                return verdict
    return Verdict("GOOD", "")
