"""Verdict on one file.

GOOD needs all of: a structure that is complete; no hole, and no zero at the very end, where the headers promise data, unless a checksum
proves that it belongs there; no open writer at the instant, and no sign that an older version of the content is left in it. A structure
that is incomplete is TORN also while a writer has it open. Everything else is UNKNOWN.

Limits: of a file without checksums that several threads wrote into allocated space at once, a gap smaller than a block that neither
touches the headers nor the end is not seen; nor is an end that was cut within an integer.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Final

from ciuic.errors import Damaged
from ciuic.units import human_size
from ciuic.verdicts.bounded_reader import BoundedReader
from ciuic.verdicts.formats.gguf import read_gguf
from ciuic.verdicts.formats.hdf5 import read_hdf5
from ciuic.verdicts.formats.npy import read_npy
from ciuic.verdicts.formats.pickles import read_pickle
from ciuic.verdicts.formats.safetensors import read_safetensors
from ciuic.verdicts.formats.zip_archive import read_zip
from ciuic.verdicts.model import NotJudged, OtherFormat, Piece, Structure, TornContent, Verdict
from ciuic.verdicts.sources import FileSource

# Formats with a mark at their beginning first; pickles and safetensors have hardly any.
_FORMATS: Final[tuple[Callable[[BoundedReader], Structure], ...]] = (
    read_zip,
    read_hdf5,
    read_gguf,
    read_npy,
    read_safetensors,
    read_pickle,
)
_MAX_CHECKED_BYTES: Final = 256 << 20
"""Limit of content that is read to compare checksums, where holes leave a doubt."""
_MAX_STEPS: Final = 2_000_000
"""Limit of pairs of a hole and a piece that are compared: pieces of a crafted file lie over each other."""
DEFECT: Final = "its reader failed, which is a defect in ciuic"
"""Beginning of the reason of a file that a reader has not refused as it should."""
_STEP_BYTES: Final = 1 << 20
_NUMBER_BYTES: Final = 8
"""Size of the largest number of a file format."""
_MAX_HOLES: Final = 1 << 16


def judge_file(source: FileSource) -> Verdict:
    """Return the verdict on a file, without its directory. Reads a few kilobytes of most files."""
    reader = BoundedReader(source.read, source.size_bytes, source.name)
    try:
        return judge_structure(source, read_structure(reader))
    except OtherFormat:
        return Verdict("UNKNOWN", "its format is not known here")
    except TornContent as error:
        return Verdict("TORN", str(error))
    except NotJudged as error:
        return Verdict("UNKNOWN", str(error))
    except (Damaged, OSError) as error:
        return Verdict("UNKNOWN", f"it cannot be read: {error}")
    # No file ends the look at all others. The fuzzer looks for this reason.
    except Exception as error:
        return Verdict("UNKNOWN", f"{DEFECT} ({type(error).__name__})")


def read_structure(reader: BoundedReader) -> Structure:
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
        return Verdict("UNKNOWN", f"it cannot be read: {error}", structure.format)
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
