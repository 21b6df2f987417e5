"""Hugging Face's sharded weights: ``*.index.json`` names the file of each weight.

References:
    https://huggingface.co/docs/transformers/big_models
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from ciuic.verdicts.directories.parts import MAX_PARTS, PartsNeeded, document_of
from ciuic.verdicts.model import NotJudged, TornContent
from ciuic.verdicts.sources import DirectorySource

_SUFFIXES: Final = (b".safetensors.index.json", b".bin.index.json")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_decoder = msgspec.json.Decoder(_Index)


def recognise(directory: DirectorySource, names: list[bytes]) -> Iterator[PartsNeeded]:
    """Yield the sharded weights in a directory."""
    for name in names:
        if name.endswith(_SUFFIXES):
            taken = frozenset({name})
            try:
                shards = shards_of(document_of(directory, name, "the index") or b"")
            except TornContent as error:
                yield PartsNeeded("sharded", name, torn=str(error), taken=taken)
            except NotJudged as error:
                yield PartsNeeded("sharded", name, doubt=str(error), taken=taken)
            else:
                yield PartsNeeded("sharded", name, tuple(shards), taken=taken.union(shards))


def shards_of(text: bytes) -> list[bytes]:
    """Return the names of the files that an index names; raise TornContent or NotJudged."""
    try:
        index = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TornContent(f"the index is not the JSON of one: {error}") from None
    # Half of a surrogate pair, which JSON allows, has no bytes.
    shards = {value.encode("utf-8", "replace") for value in index.weight_map.values()}
    if not shards:
        raise TornContent("the index names no file")
    if len(shards) > MAX_PARTS:
        raise NotJudged("the index names more files than are looked at for a verdict")
    return sorted(shards)
