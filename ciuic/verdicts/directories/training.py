"""State of a `SnapshotManager`: ``snapshot.json``, ``state.json`` and tensors below a directory for each object (docs/snapshot-manager.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from ciuic.verdicts.directories.parts import PartsNeeded, document_of
from ciuic.verdicts.directories.sharded import shards_of
from ciuic.verdicts.model import NotJudged, TornContent
from ciuic.verdicts.sources import DirectorySource

FACTS_FILE: Final = b"snapshot.json"
STATE_FILE: Final = b"state.json"
_TENSORS: Final = b".safetensors"
_INDEX: Final = b".safetensors.index.json"
_VERSION: Final = 1


class _Facts(msgspec.Struct):
    objects: tuple[str, ...] = ()


class _State(msgspec.Struct):
    version: int
    objects: dict[str, Any]


def recognise(directory: DirectorySource, names: list[bytes]) -> Iterator[PartsNeeded]:
    """Yield the state that a snapshot of a training is. Its files in another directory are judged by their own formats."""
    if not directory.holds_state or STATE_FILE not in names:
        return
    taken = frozenset(names)
    try:
        _check_documents(directory)
        files = tuple(sorted(set(_tensor_files(directory, names))))
    except TornContent as error:
        yield PartsNeeded("training", torn=str(error), taken=taken)
    except NotJudged as error:
        yield PartsNeeded("training", doubt=str(error), taken=taken)
    else:
        yield PartsNeeded("training", files=files, taken=taken)


def _check_documents(directory: DirectorySource) -> None:
    facts, state = (
        _decoded(document_of(directory, name, name.decode()), kind, name.decode())
        for name, kind in ((FACTS_FILE, _Facts), (STATE_FILE, _State))
    )
    if state.version != _VERSION:
        raise NotJudged("it was written by a later version of ciuic")
    missing = [name for name in facts.objects if name not in state.objects]
    if missing:
        raise TornContent(f"state.json lacks the object {missing[0]!r}")


def _decoded(text: bytes | None, kind: type[Any], what: str) -> Any:
    if text is None:
        raise TornContent(f"{what} is missing")
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TornContent(f"{what} is not the JSON of one: {error}") from None


def _tensor_files(directory: DirectorySource, names: list[bytes]) -> Iterator[bytes]:
    """Yield the files of tensors, those that are there and those that an index names."""
    yield from (name for name in names if name.endswith(_TENSORS))
    for name in names:
        below = directory.directory(name)
        for inner in [] if below is None else below.names():
            if inner.endswith(_TENSORS):
                yield name + b"/" + inner
            elif below is not None and inner.endswith(_INDEX):
                index = document_of(below, inner, "the index") or b""
                yield from (name + b"/" + shard for shard in shards_of(index))
