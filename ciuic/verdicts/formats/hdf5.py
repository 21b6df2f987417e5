"""Structure of HDF5: the superblock, and every object that can be reached from the root group by structures of the first version.

The superblock is written last, and says how long the file is. A file that was copied into allocated space has a complete superblock
and lacks what follows: so objects, their tables of names and the places of their data are followed, as far as the default format of
the library (`libver="earliest"`) has them. A file with newer structures ends with a checksum in none of its parts that can be found
without them; it is not judged.

References:
    HDF5 File Format Specification, version 3.0, sections II to IV
"""

from __future__ import annotations

from typing import Final

from ciuic.verdicts.bounded_reader import BoundedReader
from ciuic.verdicts.formats.hdf5_objects import Hdf5File, Hdf5Objects
from ciuic.verdicts.model import NotJudged, OtherFormat, Piece, Structure, TornContent

SUFFIXES: Final = (".h5", ".hdf5")
_MAGIC: Final = b"\x89HDF\r\n\x1a\n"
_USER_BLOCKS: Final = (0, 512, 1024, 2048)
"""Offsets at which the superblock may begin; further powers of two are allowed, and no library uses them."""
_OPEN_FLAGS: Final = 1 | 4
"""Open for writing, or for writing beside readers (SWMR)."""


def read_hdf5(reader: BoundedReader) -> Structure:
    """Return the structure; raise TornContent, OtherFormat or NotJudged."""
    base = next((at for at in _USER_BLOCKS if reader.up_to(at, 8, "the beginning") == _MAGIC), None)
    if base is None:
        if reader.has_suffix(*SUFFIXES):
            raise TornContent("it does not begin as HDF5: its first part was never written")
        raise OtherFormat
    version = reader.at(base + 8, 1, "its superblock")[0]
    if version > 3:
        raise NotJudged(f"HDF5 with a superblock of version {version} is not known here")
    file, end, root = _superblock(reader, base, version)
    if reader.size_bytes not in (end, base + end):
        raise TornContent(f"it was closed with {end} bytes, and has {reader.size_bytes}")
    objects = Hdf5Objects(file)
    objects.follow(root)
    last = max(objects.data, key=lambda data: data.stop, default=None)
    last_item = None
    # Structures at the very end were read; numbers there may be zeros that were never written.
    if last is not None and last.stop >= objects.structures_end:
        last_item = (max(last.start, last.stop - last.item_bytes), last.stop)
    data = [Piece(one.start, one.stop) for one in objects.data]
    return Structure("hdf5", f"{objects.datasets} datasets", (*data, *file.structures), last_item)


def _superblock(reader: BoundedReader, base: int, version: int) -> tuple[Hdf5File, int, int]:
    """Return the file, where it ends, and the address of its root group."""
    if version >= 2:
        block = reader.at(base, 48, "its superblock")
        offsets, lengths, flags = block[9:12]
        if flags & _OPEN_FLAGS:
            raise TornContent("it was not closed: its superblock says that a program writes to it")
        at = 12
        end, root = block[at + 16 : at + 24], block[at + 24 : at + 32]
    else:
        at = 28 if version else 24
        block = reader.at(base, at + 48, "its superblock")
        offsets, lengths = block[13:15]
        end, root = block[at + 16 : at + 24], block[at + 40 : at + 48]
    if (offsets, lengths) != (8, 8):
        raise NotJudged("HDF5 with addresses of another size than 8 bytes is not known here")
    start = int.from_bytes(block[at : at + 8], "little")
    # Some writers leave the base address 0 behind a user block.
    if start not in (0, base):
        raise TornContent("its superblock is damaged")
    file = Hdf5File(reader, start)
    return file, int.from_bytes(end, "little"), int.from_bytes(root, "little")
