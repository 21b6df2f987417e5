"""Readers of checkpoints of any user, for the fuzzer: each input is judged."""

from __future__ import annotations

import json
import struct

from support.readers import Reader

from ciuic.verdicts.verdict import DEFECT, checkpoints_in, judge_file

_SUFFIXES = (b".safetensors", b".npz", b".npy", b".gguf", b".h5", b".pt", b".bin")
_INDEXES = (
    b".metadata",
    b"m.safetensors.index.json",
    b"ck.index",
    b"latest",
    b"_CHECKPOINT_METADATA",
    b"manifest.ocdbt",
)
_HEADER = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()


def _judge(data: bytes) -> object:
    """Judge one file; the first byte chooses its name."""
    from support.verdict_files import MemoryFile

    name = b"a" + _SUFFIXES[data[0] % len(_SUFFIXES)] if data else b"a.bin"
    verdict = judge_file(MemoryFile(name, data[1:]))
    assert not verdict.reason.startswith(DEFECT), verdict.reason
    return verdict


def _judge_directory(data: bytes) -> object:
    """Judge a directory; the first byte chooses the document that it has."""
    from support.verdict_files import MemoryDirectory

    name = _INDEXES[data[0] % len(_INDEXES)] if data else _INDEXES[0]
    others = {b"__0_0.distcp": b"data", b"ck.data-00000-of-00001": b"data", b"d": {b"0": b"data"}}
    found = checkpoints_in(MemoryDirectory(others | {name: data[1:]}))
    assert not any(DEFECT in one.verdict.reason for one in found), found
    return found


def verdict_readers() -> list[Reader]:
    """Return the readers of files and of directories."""
    return [
        Reader(
            "checkpoint that is judged",
            _judge,
            b"\0" + struct.pack("<Q", len(_HEADER)) + _HEADER + b"\1\2\3\4",
        ),
        Reader("directory that is judged", _judge_directory, b'\1{"weight_map": {"a": "m-1.safetensors"}}'),
    ]
