"""Checkpoints of `torch.distributed.checkpoint`: ``.metadata`` is written last, and says where each tensor lies in the ``.distcp`` files.

``.metadata`` is a pickle. Its opcodes are read, and nothing is executed or made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from ciuic.verdicts.bounded_reader import BoundedReader
from ciuic.verdicts.directories.parts import MAX_PARTS, PartsNeeded
from ciuic.verdicts.formats.pickles import Opcode, PickleStream
from ciuic.verdicts.model import NotJudged, TornContent
from ciuic.verdicts.sources import DirectorySource, FileSource

_METADATA: Final = b".metadata"
_SUFFIX: Final = b".distcp"
_TAIL_BYTES: Final = 6
"""The last item is a zip archive, which ends with the offset of its directory and the length of a comment, 0."""
_MAX_MEMO: Final = 1 << 20


def recognise(directory: DirectorySource, names: list[bytes]) -> Iterator[PartsNeeded]:
    """Yield the checkpoint that the directory is."""
    data = [name for name in names if name.endswith(_SUFFIX)]
    metadata = directory.file(_METADATA) if _METADATA in names else None
    if metadata is None and not data:
        return
    taken = frozenset([_METADATA, *data])
    if metadata is None:
        yield PartsNeeded("dcp", torn="its .metadata, which is written last, is missing", taken=taken)
        return
    try:
        ends = read_metadata(metadata)
    except TornContent as error:
        yield PartsNeeded("dcp", torn=f".metadata: {error}", taken=taken)
    except NotJudged as error:
        yield PartsNeeded("dcp", doubt=f".metadata: {error}", taken=taken)
    else:
        # A file of this name that is something else names no data.
        if ends or data:
            yield PartsNeeded("dcp", raw=tuple(sorted(ends.items())), tail_bytes=_TAIL_BYTES, taken=taken)


def read_metadata(source: FileSource) -> dict[bytes, int]:
    """Return the offset after the last item of each data file; raise TornContent or NotJudged."""
    reader = BoundedReader(source.read, source.size_bytes, source.name)
    if reader.up_to(0, 1, "its beginning") != b"\x80":
        raise TornContent("it does not begin as a pickle")
    stream = PickleStream(reader)
    places = _Places()
    for code in stream.opcodes():
        places.see(code)
    if stream.at != source.size_bytes:
        raise TornContent("its pickle ends before the file")
    return places.ends


class _Places:
    """Places of items: the states ``{"relative_path": …, "offset": …, "length": …}`` of torch's `_StorageInfo`."""

    def __init__(self) -> None:
        self.ends: dict[bytes, int] = {}
        self._memo: dict[int, Any] = {}
        self._count = 0
        self._last: Any = None
        self._key = b""
        self._path = b""
        self._offset = 0

    def see(self, code: Opcode) -> None:
        """Take the next opcode."""
        name, argument = code
        if name in ("BINGET", "LONG_BINGET"):
            self._value(self._memo.get(argument))
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._remember(argument)
        elif name == "MEMOIZE":
            self._remember(self._count)
            self._count += 1
        elif isinstance(argument, (bytes, int)):
            self._value(argument)
        elif name not in ("FRAME", "PROTO", "MARK"):
            self._last = None

    def _remember(self, index: int) -> None:
        # Texts alone are wanted: paths and keys that occur again.
        if isinstance(self._last, bytes) and len(self._memo) < _MAX_MEMO:
            self._memo[index] = self._last

    def _value(self, value: Any) -> None:
        self._last = value
        if self._key == b"relative_path" and isinstance(value, bytes):
            self._path = value
        elif self._key == b"offset" and isinstance(value, int):
            self._offset = value
        elif self._key == b"length" and isinstance(value, int) and self._path:
            end = self._offset + value
            if not 0 <= end < 1 << 62 or len(self.ends) > MAX_PARTS:
                raise NotJudged("it names impossible places")
            self.ends[self._path] = max(self.ends.get(self._path, 0), end)
        self._key = value if isinstance(value, bytes) else b""
