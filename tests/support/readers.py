"""Decoders of all bytes from disks or sockets, with valid input for each: seeds for fuzzing."""

from __future__ import annotations

import os
import random
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy
import zstandard

from ciuic.config import parse_config
from ciuic.daemon.capture.job import (
    CaptureJob,
    Failed,
    decode_job,
    decode_message,
    encode_job,
    encode_message,
)
from ciuic.errors import CiuicError
from ciuic.fuse_layer import sealed_format
from ciuic.fuse_layer import undo_format as undo
from ciuic.fuse_layer.core.epochs import Epochs
from ciuic.fuse_layer.tracking.changes import Tracker
from ciuic.protocol.pairing import Cut, Taken, decode_answer, decode_question
from ciuic.protocol.worker_frames import MAX_REQUEST_BYTES, FrameError, receive_frame
from ciuic.repository.config import StoredConfig, decode_config, encode_config
from ciuic.repository.format import pack_format as pf
from ciuic.repository.format import snapshot_format
from ciuic.repository.format.tree_format import (
    NodeRef,
    decode_node,
    decode_xattrs,
    encode_inner,
    encode_leaf,
    encode_xattrs,
)
from ciuic.repository.model import PackRecord
from ciuic.repository.packs.chunk_reader import BadCopyError, unpack
from ciuic.repository.trees.block_maps import decode_map_node, encode_map_node
from ciuic.restore.files.journal import RestoreMark
from ciuic.system.spill import Spill
from ciuic.training.ranks import rank_messages
from ciuic.types import ChunkId, Entry, Pair, RootRecord, Snapshot, SnapshotId

ID = ChunkId(b"i" * 16)
_NAME = "cs-abcdef"
_ENTRY = Entry(name=b"a", mode=stat.S_IFREG | 0o644, size_bytes=5, content=ID, xattrs=((b"user.x", b"y"),))
_ROOT = RootRecord(path=b"/r", entry=Entry(name=b"", mode=stat.S_IFDIR | 0o755, content=ID))
_RECORDS = [PackRecord(ID, 4096 + 88, 10, 10, 0, 7)]
_PAIR = Pair(of="training", id="cs-123456", repository="/x", time_ns=7, roots=("/a",))
_SNAPSHOT = Snapshot(
    id=SnapshotId(_NAME), time_ns=5, host="h", roots=(_ROOT,), tags=("t",), message="m", pair=_PAIR
)
_CUT = Cut(training=_NAME, repository="/x", time_ns=5, message="m", roots=("/a",), hold_reason="h")
_TAKEN = Taken(id=_NAME, repository="/r", time_ns=5, roots=("/a",), note="n")
_REFUSALS = (CiuicError, undo.UndoDamaged, undo.UndoLost, FrameError, BadCopyError, msgspec.MsgspecError)
_TOML = b"""[repository]
path = "/r"
[schedule]
interval = "1h"
[[root]]
path = "/a"
exclude = ["*.tmp", "/x/**"]
[[remote]]
url = "s3://bucket/x"
endpoint = "https://[::1]:9000"
[remote.schedule]
window = "22:00-06:00"
"""
_FLAT = b"protected_directories = /opt/a, /opt/b\n"
DEEP = b"\x91" * 100_000 + b"\x90"


class Reader(NamedTuple):
    """Decoder, and bytes that it accepts."""

    name: str
    read: Callable[[bytes], object]
    valid: bytes


def _body(name: str, links: bool) -> Callable[[bytes], object]:
    return lambda data: decode_node(ID, data, links=links)


def _snapshot_payload(data: bytes) -> object:
    """Decode a snapshot's payload with a corrected checksum: the payload is fuzzed."""
    return snapshot_format.decode_snapshot(_NAME, snapshot_format._wrap(b"CIUICSNP", data), "r")


def _marks_payload(data: bytes) -> object:
    return snapshot_format.decode_marks(_NAME, snapshot_format._wrap(b"CIUICMRK", data))


def _rank_message(data: bytes) -> object:
    """Decode a message between ranks, which is refused with a ValueError like a training's state."""
    try:
        return rank_messages.decode(data)
    except ValueError as error:
        raise CiuicError(str(error)) from error


def _table(data: bytes) -> object:
    head = pf.decode_segment_head(data, 4096)
    return None if head is None else pf.decode_table(data, 1, 4096, head)


def _footer(data: bytes) -> object:
    place = pf.decode_trailer(data[-pf.TRAILER_BYTES :], 8192)
    return None if place is None else pf.decode_footer(data, 1, place[0])


def _table_payload(data: bytes) -> object:
    return _table(data + pf._CHECKSUM.pack(pf.checksum(data)))


def _footer_payload(data: bytes) -> object:
    """Decode a footer's records; the trailer is made to fit."""
    records = len(data) // pf.RECORD_BYTES
    body = data[: records * pf.RECORD_BYTES]
    trailer = pf._TRAILER.pack(pf._FOOTER_MAGIC, records, 0, 8192, 0)
    full_footer = body + pf._TRAILER.pack(pf._FOOTER_MAGIC, records, 0, 8192, pf.checksum(body + trailer))
    return pf.decode_footer(full_footer, 1, 8192)


def _tracking(data: bytes) -> object:
    """Fold tracking into an existing one, and write it again."""
    state: Any = SimpleNamespace(tracker=Tracker(4096))
    epochs: Any = SimpleNamespace(_state=state)
    Epochs.load(epochs, data)
    return Epochs.dump(epochs), state.tracker.current.dirty_bytes(4096)


def _frame(data: bytes) -> object:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        # The size of a socket's buffer.
        theirs.sendall(data[:60_000])
        theirs.close()
        return receive_frame(ours, MAX_REQUEST_BYTES)


def _configuration(name: str) -> Callable[[bytes], object]:
    return lambda data: parse_config(data.decode("utf-8", "replace"), Path(name))


def _from_file(read: Callable[[str], object]) -> Callable[[bytes], object]:
    def from_bytes(data: bytes) -> object:
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            return read(file.name)

    return from_bytes


def _log(path: str) -> object:
    log = undo.LogReader(path, 1)
    try:
        log.poll()
        return log.blocks(5, 0, 1 << 40), log.inode(5), log.names(5), log.swapped(5)
    finally:
        log.close()


def _sealed(path: str) -> object:
    changes = sealed_format.read_sealed(path, Spill(os.path.dirname(path), max_entries=2)).changes
    return [
        (
            next(undo.bitmap_runs(change.data), None) if isinstance(change.data, bytes) else 0,
            [*changes.names(ino)],
        )
        for ino, change in changes.items()
    ]


def _valid_sealed() -> bytes:
    head = sealed_format.SealedHead(
        session="s",
        epoch=1,
        since=0,
        cut_ns=1,
        complete=True,
        root_ino=2,
        block_size=4096,
        open_for_write=[5],
    )
    many = {b"%d" % number: number for number in range(1025)}
    changes = [
        (5, undo.SealedChange(False, True, b"\x05", {b"a": -1})),
        (6, undo.SealedChange(True, True, 0, many)),
    ]
    with tempfile.TemporaryDirectory() as place:
        sealed_format.write_sealed(place, head, changes)
        return Path(place, undo.sealed_name(1)).read_bytes()


def readers() -> list[Reader]:
    """Return every decoder."""
    config = StoredConfig(
        format=1, id="ab" * 16, hash="xxh3-128", seed="cd" * 8, block_size=4096, created_ns=5
    )
    keyed = msgspec.structs.replace(config, format=3, hash="blake3-128", key="ef" * 32)
    log = b"".join(
        undo.encode(record)
        for record in (undo.BlocksRecord(5, 2, 0, 9), undo.NameRecord(5, 1, b"n", 7, 8, -1))
    )
    footer = bytes(pf.encode_footer(8192 - 80, _RECORDS))
    from support.more_readers import more_readers
    from support.remote_readers import remote_readers
    from support.verdict_readers import verdict_readers

    known = [
        Reader("tree leaf", _body("leaf", False), encode_leaf([_ENTRY], False)),
        Reader("tree node", _body("inner", False), encode_inner(1, [NodeRef(b"a", ID, 1, 5)], False)),
        Reader("link table", _body("links", True), encode_leaf([msgspec.structs.replace(_ENTRY, name=b"12345678")], True)),
        Reader("attributes", lambda data: decode_xattrs(ID, data), encode_xattrs([(b"user.x", b"y")])),
        Reader("block map", lambda data: decode_map_node(ID, data, 1), encode_map_node(1, [ID, ID])),
        Reader("snapshot", lambda data: snapshot_format.decode_snapshot(_NAME, data, "r"), snapshot_format.encode_snapshot(_SNAPSHOT, "r")),
        Reader("snapshot payload", _snapshot_payload, snapshot_format.encode_snapshot(_SNAPSHOT, "r")[36:]),
        Reader("marks payload", _marks_payload, snapshot_format.encode_marks(snapshot_format.StoredMarks(id=_NAME, held=True))[36:]),
        Reader("config", decode_config, encode_config(config)),
        Reader("config with a key", decode_config, encode_config(keyed)),
        Reader("pack header", lambda data: pf.decode_header(data, 1, ID, "xxh3-128"), pf.encode_header(pf.PackHeader(1, "data", ID, "xxh3-128"))),
        Reader("segment table", _table, pf.encode_table(4096, _RECORDS, 10)),
        Reader("footer", _footer, footer),
        Reader("undo log", _from_file(_log), log),
        Reader("segment table payload", _table_payload, pf.encode_table(4096, _RECORDS, 10)[:-8]),
        Reader("footer payload", _footer_payload, footer[: pf.RECORD_BYTES]),
        Reader("compressed chunk", lambda data: unpack(data, 4096, pf.FLAG_ZSTD), zstandard.ZstdCompressor().compress(bytes(4096))),
        Reader("saved tracking", _tracking, msgspec.msgpack.encode([1, {5: undo.SealedChange(False, True, b"\x05", {b"a": -1})}])),
        Reader("control frame", _frame, b"\x0b\0\0\0" + msgspec.msgpack.encode({"do": "status"})),
        Reader("configuration", _configuration("ciuic.toml"), _TOML),
        Reader("flat configuration", _configuration("ciuic.conf"), _FLAT),
        Reader("mark of a restore", RestoreMark.decode, RestoreMark("cs-000001", b"/r", "ab" * 8).encode()),
        Reader("capture job", decode_job, encode_job(CaptureJob(repository="/r", id=_NAME, time_ns=1, host="h", roots=()))),
        Reader("capture message", decode_message, encode_message(Failed(error="no", hint="", code=1))),
        Reader("question of a trainer", decode_question, msgspec.msgpack.encode(_CUT)),
        Reader("answer to a trainer", decode_answer, msgspec.msgpack.encode(_TAKEN)),
        Reader("message of a rank", _rank_message, rank_messages.encode({"states": {"a": (1, b"x", float("nan"))}, "n": numpy.arange(3)})),
        Reader("sealed file", _from_file(_sealed), _valid_sealed()),
    ]  # fmt: skip
    return known + more_readers() + remote_readers() + verdict_readers()


def refused_or_read(reader: Reader, data: bytes) -> bool:
    """Return True if the input was read and False if it was refused with a message. Raise anything else."""
    from support.more_readers import RefusedError

    try:
        reader.read(data)
    except (*_REFUSALS, RefusedError):
        return False
    return True


def mutate(data: bytes, dice: random.Random) -> bytes:
    """Make a few changes of kinds that find errors in binary formats."""
    body = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(body) + 1)
        kind = dice.randrange(6)
        if kind == 0 and body:
            body[min(at, len(body) - 1)] ^= 1 << dice.randrange(8)
        elif kind == 1:
            body[at : at + dice.randrange(9)] = b""
        elif kind == 2:
            body[at:at] = dice.choice(
                (
                    b"\xcf" + b"\xff" * 8,
                    b"\xd3\x80" + bytes(7),
                    b"\xdd\xff\xff\xff\xff",
                    b"\xc6\xff\xff\xff\xff",
                    b"\0",
                    b"\xc0",
                )
            )
        elif kind == 3:
            body[at : at + 1] = bytes([dice.randrange(256)])
        elif kind == 4:
            start = dice.randrange(len(body) + 1)
            body[at:at] = body[start : start + dice.randrange(40)]
        else:
            body[at : at + 9] = dice.choice((os.urandom(0), b"\xcf" + b"\xff" * 8, DEEP[-5000:]))
    return bytes(body)
