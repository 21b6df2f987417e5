"""TensorFlow's checkpoints: ``PREFIX.index`` and ``PREFIX.data-00000-of-00001``; ``checkpoint`` names the newest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from ciuic.verdicts.bounded_reader import BoundedReader
from ciuic.verdicts.directories.parts import PartsNeeded
from ciuic.verdicts.formats.tensor_bundle import SUFFIX, read_index
from ciuic.verdicts.model import NotJudged, OtherFormat, TornContent
from ciuic.verdicts.sources import DirectorySource

_INDEX: Final = SUFFIX.encode("ascii")
_DATA: Final = re.compile(rb"(.+)\.data-\d{5}-of-\d{5}\Z", re.DOTALL)


def recognise(directory: DirectorySource, names: list[bytes]) -> Iterator[PartsNeeded]:
    """Yield the checkpoints in a directory."""
    data: dict[bytes, set[bytes]] = {}
    for name in names:
        if found := _DATA.match(name):
            data.setdefault(found[1], set()).add(name)
    for prefix, files in sorted(data.items()):
        index = prefix + _INDEX
        taken = frozenset([index, *files])
        source = directory.file(index)
        if source is None:
            yield PartsNeeded(
                "tensorflow", prefix, torn="its index, which is written last, is missing", taken=taken
            )
            continue
        try:
            bundle = read_index(BoundedReader(source.read, source.size_bytes, index))
        except (TornContent, OtherFormat) as error:
            yield PartsNeeded("tensorflow", prefix, torn=str(error) or "its index is damaged", taken=taken)
        except NotJudged as error:
            yield PartsNeeded("tensorflow", prefix, doubt=str(error), taken=taken)
        else:
            raw = tuple(
                (b"%s.data-%05d-of-%05d" % (prefix, shard, bundle.shards), bundle.ends.get(shard, 0))
                for shard in range(bundle.shards)
            )
            yield PartsNeeded("tensorflow", prefix, raw=raw, tail_bytes=8, taken=taken)
