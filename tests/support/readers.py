"""Decoders of all bytes from disks or sockets, with valid input for each: seeds for fuzzing.

They read repositories, messages of trainers, kernels and sockets, and checkpoints of any user, which are judged.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import socket
import sqlite3
import stat
import struct
import tempfile
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from urllib.parse import quote_from_bytes

import msgspec
import numpy
import zstandard

from ciuic.artefacts.folder import Manifest, Written
from ciuic.cli.commands.web import broker
from ciuic.compare.restore_records import RestoreRecord
from ciuic.config import parse_config, repository_mark
from ciuic.daemon import jobs
from ciuic.daemon.capture.job import (
    CaptureJob,
    Failed,
    decode_job,
    decode_message,
    encode_job,
    encode_message,
)
from ciuic.daemon.jobs import NumberJob
from ciuic.daemon.roots import view_process
from ciuic.daemon.snapshots.space_watch import decode_samples
from ciuic.daemon.trainers import registry, watch
from ciuic.errors import CiuicError
from ciuic.fuse_layer import fuse_protocol as p
from ciuic.fuse_layer import sealed_format
from ciuic.fuse_layer import undo_format as undo
from ciuic.fuse_layer.core.overlay_core import Attr, Epochs, OverlayCore
from ciuic.fuse_layer.journal import inherited_session, records
from ciuic.fuse_layer.kernel.driver import KernelDriver
from ciuic.fuse_layer.kernel.session import Negotiated
from ciuic.fuse_layer.state.passthrough_state import RecentChanges
from ciuic.fuse_layer.tracking.changes import Tracker
from ciuic.maintenance.verify import Pass
from ciuic.number_files import NumberPlace, NumbersRead, json_lines, tensorboard_events
from ciuic.protocol import control_types
from ciuic.protocol.heartbeat_page import HeartbeatPage, check_page, read_losses, read_page
from ciuic.protocol.known_damage import DamagedPlace, decode_damage, encode_damage
from ciuic.protocol.last_drill import LastDrill, decode_drill, decode_drills
from ciuic.protocol.pairing import Cut, Files, Taken, decode_answer, decode_question
from ciuic.protocol.span_spool import Span, decode_span
from ciuic.protocol.stored_remotely import StoredRecord, decode_record, encode_record
from ciuic.protocol.watch_client import Hello
from ciuic.protocol.worker_frames import MAX_REQUEST_BYTES, FrameError, receive_frame
from ciuic.repository import byte_planes, locks, snapshot_format
from ciuic.repository import pack_format as pf
from ciuic.repository.block_maps import decode_map_node, encode_map_node
from ciuic.repository.chunk_reader import BadCopyError, unpack
from ciuic.repository.config import StoredConfig, decode_config, encode_config
from ciuic.repository.index_database import IndexDatabase
from ciuic.repository.model import PackRecord
from ciuic.repository.promised import Promise
from ciuic.repository.tree_format import (
    NodeRef,
    decode_node,
    decode_xattrs,
    encode_inner,
    encode_leaf,
    encode_xattrs,
)
from ciuic.restore.attributes import denied_to_nobody
from ciuic.restore.journal import RestoreMark
from ciuic.retention import RetentionPolicy
from ciuic.system import mountinfo
from ciuic.system.cloud_notices import MetadataService
from ciuic.system.spill import Spill
from ciuic.training import ranks
from ciuic.training.dcp.metadata import decode_checkpoint_pointer
from ciuic.training.format import structure
from ciuic.training.format.layout import TensorInFile, decode_header
from ciuic.training.format.reading import STATE_VERSION, _decode_facts, check_document
from ciuic.training.inert_pickle import read_pickle
from ciuic.training.json_documents import MALFORMED, decode_json
from ciuic.training.loading_sets import FileStart, PartTold, decode_from_rank
from ciuic.training.stored_tensors import described_tensors
from ciuic.training.tensor_files import FileTensors
from ciuic.training.writer import messages
from ciuic.types import ChunkId, Entry, Pair, RootRecord, Snapshot, SnapshotId
from ciuic.verdicts import records as verdict_records
from ciuic.verdicts.model import DEFECT, Checkpoint, Verdict
from ciuic.verdicts.not_finite import NumberBudget
from ciuic.verdicts.records import DatedCheckpoint, VerdictRecord
from ciuic.verdicts.verdict import checkpoints_in, judge_file

ID = ChunkId(b"i" * 16)
_NAME = "cs-abcdef"
_ENTRY = Entry(name=b"a", mode=stat.S_IFREG | 0o644, size_bytes=5, content=ID, xattrs=((b"user.x", b"y"),))
_ROOT = RootRecord(path=b"/r", entry=Entry(name=b"", mode=stat.S_IFDIR | 0o755, content=ID))
_RECORDS = [PackRecord(ID, 4096 + 88, 10, 10, 0, 7)]
_PAIR = Pair(of="training", id="cs-123456", repository="/x", time_ns=7, roots=("/a",))
_SNAPSHOT = Snapshot(
    id=SnapshotId(_NAME), time_ns=5, host="h", roots=(_ROOT,), tags=("t",), message="m", pair=_PAIR
)
_FILES = Files(roots=("/a",), message="m", tags=("slurm-job=1",))
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
        return ranks.decode(data)
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
    from support.remote_readers import remote_readers

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
        Reader("question of a job", decode_question, msgspec.msgpack.encode(_FILES)),
        Reader("answer to a trainer", decode_answer, msgspec.msgpack.encode(_TAKEN)),
        Reader("message of a rank", _rank_message, ranks.encode({"states": {"a": (1, b"x", float("nan"))}, "n": numpy.arange(3)})),
        Reader("parts that a rank tells of", partial(decode_from_rank, kind=PartTold), msgspec.msgpack.encode(PartTold({"model/x": FileStart(9, b"h", True)}, {"state.json": 2}))),
        Reader("sealed file", _from_file(_sealed), _valid_sealed()),
    ]  # fmt: skip
    return known + more_readers() + remote_readers() + verdict_readers()


def refused_or_read(reader: Reader, data: bytes) -> bool:
    """Return True if the input was read and False if it was refused with a message. Raise anything else."""

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


_BLOCK = 4096
_OPCODES = sorted(
    {value for name, value in vars(p).items() if name.isupper() and isinstance(value, int) and 0 < value < 64}
)


class RefusedError(Exception):
    """Raised for an exception that a decoder's callers treat as a refusal, where it is no CiuicError."""


def _refusing(read: Callable[[bytes], object], *kinds: type[BaseException]) -> Callable[[bytes], object]:
    def wrapped(data: bytes) -> object:
        try:
            return read(data)
        except kinds as error:
            raise RefusedError(str(error)) from None

    return wrapped


def _memfd(data: bytes) -> int:
    fd = os.memfd_create("reader", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    return fd


# Two records of TensorBoard: "loss" as simple_value 2.5 at step 7, and as a tensor of one float.
_EVENTS = bytes.fromhex(
    "1a00000000000000129bd82d09000000000000f03f10072a0d0a0b0a046c6f7373150000204087ccc43d1f00000000000000514b441809000000000000f03f10082a120a100a046c6f73734208080122040000204008f43d73"
)


def _page(data: bytes) -> object:
    """Read a heartbeat page as the daemon does, and check it as a new one."""
    fd = _memfd(data)
    try:
        with contextlib.suppress(ValueError):
            check_page(fd)
        read_losses(fd, 0)
        return read_page(fd)
    except struct.error as error:
        # Shorter than a page: `check_page` prevents this case.
        raise RefusedError(str(error)) from None
    finally:
        os.close(fd)


def _hello(data: bytes) -> object:
    """Decode a hello as WatchSocket does, with valid descriptors."""
    page, life = HeartbeatPage(), os.pidfd_open(os.getpid())
    registration: Any = SimpleNamespace(
        caller=SimpleNamespace(uid=os.geteuid()), fds=[life, page.fd], data=data
    )
    self: Any = SimpleNamespace(_permitted=lambda caller: True)
    try:
        return watch.WatchSocket._checked(self, registration)
    finally:
        os.close(life)
        page.close()


def _session_journal(data: bytes) -> object:
    found = inherited_session.InheritedSession()
    for _ in found.apply(data):
        pass
    for node_id in list(found.nodes):
        found.node(node_id)
    return found.files, found.directories, found.listings, found.intents


class _StubCore:
    """Core that answers every request of the kernel driver."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.pending = True
        # The groups of operations, too.
        self.nodes = self.names = self.files = self.attributes = self.directories = self
        self.recent = RecentChanges()

    def __getattr__(self, name: str) -> Any:
        status = os.fstat(self._fd)
        attr = cast(Any, Attr)(**dict.fromkeys(Attr._fields, 1) | {"st": status, "node": 7, "nlink": 1})
        answers: dict[str, object] = {
            "create": (attr, 3), "tmpfile": (attr, 3), "descriptor": self._fd, "open": 3, "opendir": 4, "dot": 1,
            "readlink": b"target", "read": b"data", "read_nowait": None, "write": 1, "lseek": 0, "copy_file_range": 0,
            "listxattr": [b"user.a"], "getxattr": b"v", "statfs": os.fstatvfs(self._fd), "readdir": [(b"n", attr, 1)],
            "list_names": [(b"n", 1, 0o100644, 1)],
            "kill_setgid": None, "remember": None, "forget": None, "release": None, "releasedir": None, "flush": None,
        }  # fmt: skip
        return lambda *arguments, **more: answers.get(name, attr)


def _request(data: bytes) -> object:
    """Decode one request of the kernel: opcode, node, extension, flags of the session, and its body."""
    if len(data) < 12:
        raise RefusedError("no request")
    opcode, extension, flags = _OPCODES[data[0] % len(_OPCODES)], data[1] % 21, data[2] % 2
    fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        core = cast(OverlayCore, _StubCore(fd))
        driver = KernelDriver(core, fd, Negotiated(45, p.SETXATTR_EXT if flags else 0))
        handler = driver._handlers().get(opcode)
        if handler is None or opcode == p.STATX:
            raise RefusedError("not served")
        request = p.FuseRequest(opcode, 2, int.from_bytes(data[4:12], "little"), 0, 0, 1, extension * 8)
        return handler(request, memoryview(data[12:]))
    except (OSError, p.MalformedRequest, struct.error) as error:
        # The session answers these with an errno.
        raise RefusedError(str(error)) from None
    finally:
        os.close(fd)


def _mark(data: bytes) -> object:
    """Read a mark as from the state directory."""
    with tempfile.TemporaryDirectory() as top:
        place = os.open(top, os.O_RDONLY | os.O_DIRECTORY)

        @contextlib.contextmanager
        def directory(root_fd: int) -> Any:
            yield place

        Path(top, os.fsdecode(repository_mark._NAME)).write_bytes(data)
        before, repository_mark._state_directory = repository_mark._state_directory, directory
        try:
            if repository_mark.read_mark(place) is None:
                raise RefusedError("no mark")
            return None
        finally:
            repository_mark._state_directory = before
            os.close(place)


def _book(data: bytes) -> object:
    with tempfile.TemporaryDirectory() as top:
        Path(top, registry.JOURNAL_NAME).write_bytes(data)
        return registry.read_journal(Path(top))


def _index(data: bytes) -> object:
    """Read a database file as the index of the caller's own repository."""
    with tempfile.TemporaryDirectory() as top:
        path = os.path.join(top, "index.sqlite")
        Path(path).write_bytes(data)
        try:
            index = IndexDatabase.open(path, "read")
            try:
                return index.find(b"i" * 16), index.packs(), index.unsealed(), index.fact("packs_seen_ns")
            finally:
                index.close()
        except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
            raise RefusedError(str(error)) from None


def _valid_index() -> bytes:
    with tempfile.TemporaryDirectory() as top:
        path = os.path.join(top, "index.sqlite")
        index = IndexDatabase.open(path, "write")
        index.add(1, 8192, True, [])
        index.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        index.db.execute("PRAGMA journal_mode=DELETE")
        index.close()
        return Path(path).read_bytes()


def _from_trainer(data: bytes) -> object:
    """Receive a trainer's message as the writer process does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(data[:60_000] or b"\0")
        got = messages.receive_from_trainer(ours)
    if got is None:
        raise RefusedError("nonsense")
    return got


def _header(data: bytes) -> object:
    return decode_header(data, len(data))


def _state(data: bytes) -> object:
    """Decode `state.json` without its tensors."""
    document = decode_json(data, "state.json")

    def tensor(name: str, packed: object) -> object:
        return name

    if not isinstance(document, dict) or not isinstance(document.get("objects"), dict):
        raise ValueError("no state")
    return {name: structure.unpack(value, tensor) for name, value in document["objects"].items()}


def _dcp(data: bytes) -> object:
    from ciuic.training.dcp.metadata import decode_metadata

    return decode_metadata(data)


def _has_dcp() -> bool:
    try:
        import torch.distributed.checkpoint  # noqa: F401
    except ImportError:
        return False
    return True


_DCP = {
    "version": 1,
    "tensors": {
        "w": {
            "dtype": "float32", "shape": [4], "requires_grad": False,
            "chunks": [{"offsets": [0], "sizes": [4], "file": "w", "start": 64}],
        }
    },
    "objects": {"lr": {"folder": "_rank_0"}},
    "planner": None,
    "storage": {"checkpoint_id": "/a", "save_id": "0f", "modules": [], "version": "1.0.0"},
}  # fmt: skip
_DCP_POINTER = {"version": 1, "repository": "ciuic", "name": "dcp", "tag": "0f", "path": "/a"}
_STATE = {
    "objects": {
        "model": {
            "a": [1, None, {"$": "float", "bits": "7ff8000000000000"}],
            "b": {"$": "dict", "type": "ordered", "items": [[{"$": "tuple", "items": [1]}, {"$": "bytes", "base64": "eA=="}]]},
            "c": {"$": "tensor", "name": "c"},
            "d": {"$": "scalar", "dtype": "<f8", "base64": "AAAAAAAA8D8="},
            "e": {"$": "int", "hex": "ff"},
            "f": {"$": "complex", "real": 1.0, "imag": 2.0},
        }
    }
}  # fmt: skip
_HELD = {
    "c": TensorInFile("F32", (4,), 0, 16),
    "d@0,0": TensorInFile("F32", (1, 4), 16, 32),
    "d@1,0": TensorInFile("F32", (1, 4), 32, 48),
    "e": TensorInFile("U8", (8,), 48, 56),
}
_NEEDING = {
    "version": STATE_VERSION,
    "objects": {
        "model": [
            {"$": "tensor", "name": "c"},
            {"$": "sharded", "name": "d", "dtype": "float32", "shape": [2, 4]},
            {"$": "tensor", "name": "e", "dtype": "float8_e8m0fnu", "shape": [2, 4]},
        ]
    },
    "values": {},
}
_TENSOR = {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "__metadata__": {"format": "pt"}}
_MOUNTS = rb"""36 35 98:0 /mnt1 /mnt\0402 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
37 36 0:44 / /mnt\0402/x rw shared:7 - fuse.ciuic ciuic rw,user_id=0
"""


def _json(kind: Any) -> Callable[[bytes], object]:
    """Decode JSON as daemon/service.py, maintenance/verify.py and repository/record_files.py do."""
    return _refusing(lambda data: msgspec.json.decode(data, type=kind), UnicodeDecodeError, RecursionError)


def _tensors(data: bytes) -> object:
    """Read the names of tensors as `SavedState` does."""
    return described_tensors(data, lambda name: {"c": f"{name}/c", "d@0,1": f"{name}/d"})


def _needed(data: bytes) -> object:
    """Look for the tensors of `state.json` in two files, as before a snapshot is called verified."""
    check_document(data, {"model": _HELD})
    return None


_VERDICTS = VerdictRecord(
    repository="ab" * 16,
    snapshot="cs-abcdef",
    content="cd" * 16,
    newest=DatedCheckpoint(Checkpoint(b"/r/a.pt", Verdict("GOOD", "2 tensors", "torch"), 9, (b"a.pt",)), 5),
    files={"ef" * 16: Verdict("TORN", "it is cut")},
)


def _signed(data: bytes) -> bytes:
    """Return a record whose key its writer knew, so that the bytes behind it are decoded."""
    body = data.replace(b"\n", b" ")
    mac = hashlib.blake2b(body, key=b"k", digest_size=16).hexdigest().encode()
    return body + b"\n" + mac + b"\n"


def _owner(data: bytes) -> object:
    """Read the owner of a lock as shown to a program that finds the repository locked."""
    fd = _memfd(data)
    try:
        return locks._busy("/r", fd, time).message
    finally:
        os.close(fd)


def more_readers() -> list[Reader]:
    """Return every decoder that is not in `support.readers`."""
    text = json.dumps(_TENSOR).encode()
    page = HeartbeatPage()
    valid_page = os.pread(page.fd, 4096, 0)
    page.close()
    hello = Hello(name="a", where="/w", kind="pid", pid=5, start_ticks=7)
    save = messages.SaveRequest(number=1, arena=0, manifest_offset=0, manifest_bytes=5)
    manifest = messages.Manifest(
        time_ns=1, message="m", tags=("a",), files=[messages.ManifestFile("a/b", 0, 10, 4)], stored=[]
    )
    base = bytes(range(256)) * 16
    plane, difference = byte_planes.encode(base, 4), byte_planes.encode(base, 4, bytes(_BLOCK))
    acl = (
        b"\2\0\0\0"
        + struct.pack("<HHI", 1, 6, 0)
        + struct.pack("<HHI", 2, 7, 5)
        + struct.pack("<HHI", 32, 4, 0)
    )
    journal = b"".join(
        (
            records.begin_record(45, 0, 1 << 20),
            records.node_record(7, 1, 7, 1, 0o100000, b"name"),
            records.renamed_record(7, 1, b"name", 1, b"new"),
            records.listing_record(3, [b"a", b"b"]),
            records.unlinked_record(7, 1, b"new", gone=True),
        )
    )
    readers = [
        Reader("heartbeat page", _refusing(_page, ValueError), valid_page),
        Reader("hello of a trainer", _refusing(_hello, CiuicError), msgspec.msgpack.encode(hello)),
        Reader("message of a trainer to its writer", _from_trainer, msgspec.msgpack.encode(save)),
        Reader("manifest of a save", _refusing(lambda data: msgspec.msgpack.decode(data, type=messages.Manifest), UnicodeDecodeError, RecursionError), msgspec.msgpack.encode(manifest)),
        Reader("session journal of a worker", _refusing(_session_journal, struct.error, IndexError, KeyError), journal),
        Reader("request of the kernel", _request, bytes([_OPCODES.index(p.RENAME)]) + bytes(11) + p.RENAME_IN.pack(1) + b"a\0b\0"),
        Reader("security contexts", _refusing(p.security_contexts, p.MalformedRequest, struct.error), p.SECCTX_HEADER.pack(p.SECCTX_HEADER.size, 0)),
        Reader("manifest of an artefact", Manifest.decode, Manifest("cs-000001", "ab" * 16, b"/r", "1", {b"a": Written("ab" * 16, "git:" + "ab" * 20, 1)}).encode()),
        Reader("mark of a repository", _mark, msgspec.msgpack.encode(repository_mark.RepositoryMark(b"/r", b"/", "ab" * 16))),
        Reader("watched trainers", _book, msgspec.json.encode(registry.WatchJournal())),
        Reader("index", _index, _valid_index()),
        Reader("planes", _refusing(lambda data: byte_planes.decode(data, _BLOCK), ValueError), plane),
        Reader("difference in planes", _refusing(lambda data: byte_planes.decode(data, _BLOCK, bytes(_BLOCK)), ValueError), difference),
        Reader("access ACL", denied_to_nobody, acl),
        Reader("safetensors header", _refusing(_header, ValueError), struct.pack("<Q", len(text)) + text + bytes(16)),
        Reader("state of a training", _refusing(_state, ValueError), json.dumps(_STATE).encode()),
        Reader("tensors of a training", _refusing(_tensors, ValueError), json.dumps({"version": 1, **_STATE}).encode()),
        Reader("tensors that a state needs", _refusing(_needed, ValueError, *MALFORMED), json.dumps(_NEEDING).encode()),
        Reader("pickle that is read as data", _refusing(read_pickle, ValueError), b"\x80\x02}(X\x01\x00\x00\x00actorch\nSize\nK\x01K\x02\x86\x85R}bX\x01\x00\x00\x00b](K\x03N\x85eu."),
        Reader("facts of a training", _refusing(_decode_facts, ValueError), b'{"version":1,"step":5,"metrics":{"loss":0.5},"objects":["model"]}'),
        Reader("request for a snapshot", _json(control_types.SnapshotRequest), b'{"message":"m","tags":["a"],"hold":true}'),
        Reader("order of the page", _refusing(lambda data: broker.words_of(msgspec.json.decode(data, type=broker.Order)), UnicodeDecodeError, RecursionError), b'{"kind":"restore","who":"a","snapshot":"cs-abcdef","paths":["/a%25b","/c"],"dest":"","delete":true}'),
        Reader("question of the page", _refusing(lambda data: broker.question_of(quote_from_bytes(data)), UnicodeDecodeError, RecursionError), b'{"type":"compare","old":"cs-abcdef","new":"cs-abcdee","path":"/a%25b","old_path":"/a"}'),
        Reader("job of upkeep", _json(jobs.UpkeepJob), msgspec.json.encode(jobs.UpkeepJob(repository="/r", policy=RetentionPolicy()))),
        Reader("job of notices", _json(jobs.NoticeJob), msgspec.json.encode(jobs.NoticeJob(services=(MetadataService("aws"),)))),
        Reader("line of a notice", _json(jobs.NoticeLine), msgspec.json.encode(jobs.NoticeLine(kind="notice", key="1", text="AWS", seconds=5.0))),
        Reader("job of a drill", _json(jobs.DrillJob), msgspec.json.encode(jobs.DrillJob(repository="/r", scratch="/s"))),
        Reader("job of verdicts", _json(jobs.VerdictJob), msgspec.json.encode(jobs.VerdictJob(repository="/r", snapshots=("cs-abcdef",)))),
        Reader("job of a view", _json(view_process.ViewJob), msgspec.json.encode(view_process.ViewJob(repository="/r", root="/d", socket="/s"))),
        Reader("verdicts on a snapshot", _json(VerdictRecord), msgspec.json.encode(_VERDICTS)),
        Reader("record of verdicts", lambda data: verdict_records.decode_record(_signed(data), b"k", VerdictRecord), msgspec.json.encode(_VERDICTS)),
        Reader("span of a snapshot", decode_span, msgspec.json.encode(Span(repository="0f", snapshot="cs-abcdef", start_ns=1, end_ns=2, attributes={"n": 1.5, "roots": ["/d"]}))),
        Reader("record of a drill", decode_drill, msgspec.json.encode(LastDrill(time_ns=5, verdict="good", seconds=1.5, snapshot="cs-abcdef"))),
        Reader("record of damage", decode_damage, encode_damage([DamagedPlace(where="/r/a", reason="bad", snapshots=("cs-abcdef",))])),
        Reader("records of drills", decode_drills, b"[" + msgspec.json.encode(LastDrill(time_ns=5, verdict="good", seconds=1.5)) + b"]"),
        Reader("lines with numbers", lambda data: json_lines(data, "loss"), b'{"loss": 1.5, "step": 3}\n{"loss": NaN}\n'),
        Reader("TensorBoard events", _refusing(lambda data: tensorboard_events(data, "loss"), ValueError), _EVENTS),
        Reader("job of numbers", _json(NumberJob), msgspec.json.encode(NumberJob(places=(NumberPlace(file="/f", key="loss"),)))),
        Reader("numbers that were read", _json(NumbersRead), msgspec.json.encode(NumbersRead(path="/f", numbers=((3, "nan"),)))),
        Reader("history of space", decode_samples, b"[[5,6,7],[8,9,10]]"),
        Reader("record of a remote", decode_record, encode_record(StoredRecord(repository="ab" * 16, stored=frozenset({"cs-abcdef"}), tail_ns=5))),
        Reader("pass of a scrub", _json(Pass), b"{}"),
        Reader("promise of a snapshot", _json(Promise), msgspec.json.encode(Promise(id="cs-abcdef", time_ns=1, reason="r"))),
        Reader("note of a restore", _json(RestoreRecord), msgspec.json.encode(RestoreRecord(paths=(b"/r/a",)))),
        Reader("owner of a lock", _owner, msgspec.json.encode(locks.Owner(1, "h", "c", 5))),
        Reader("mounts of a process", _refusing(mountinfo.parse, ValueError, IndexError), _MOUNTS),
        Reader("marks file", lambda data: snapshot_format.decode_marks("cs-abcdef", data), snapshot_format.encode_marks(snapshot_format.StoredMarks(id="cs-abcdef"))),
    ]  # fmt: skip
    readers.append(
        Reader(
            "pointer to a DCP checkpoint",
            _refusing(decode_checkpoint_pointer, ValueError),
            json.dumps(_DCP_POINTER).encode(),
        )
    )
    if _has_dcp():
        readers.append(Reader("DCP metadata", _refusing(_dcp, ValueError), json.dumps(_DCP).encode()))
    return readers


_SUFFIXES = (b".safetensors", b".npz", b".npy", b".h5", b".pt", b".bin")
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
    from support.checkpoint_files import MemoryFile

    name = b"a" + _SUFFIXES[data[0] % len(_SUFFIXES)] if data else b"a.bin"
    verdict = judge_file(MemoryFile(name, data[1:]), budget=NumberBudget(1 << 30))
    assert not verdict.reason.startswith(DEFECT), verdict.reason
    return verdict


def _judge_directory(data: bytes) -> object:
    """Judge a directory; the first byte chooses the document that it has."""
    from support.checkpoint_files import MemoryDirectory

    name = _INDEXES[data[0] % len(_INDEXES)] if data else _INDEXES[0]
    others = {b"__0_0.distcp": b"data", b"ck.data-00000-of-00001": b"data", b"d": {b"0": b"data"}}
    found = checkpoints_in(MemoryDirectory(others | {name: data[1:]}))
    assert not any(DEFECT in one.verdict.reason for one in found), found
    return found


_TENSOR_NAMES = (b"a.safetensors", b"a.npz", b"a.pt")
_TORCH_PICKLE = (
    b"\x80\x02}X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x02tQK\x00K\x02\x85K\x01\x85\x89}tRs."
)


def _tensor_file(data: bytes) -> object:
    """List the tensors of one file; the first byte chooses its name."""
    content = data[1:]
    entry = Entry(name=b"a", mode=stat.S_IFREG | 0o644, size_bytes=len(content), content=ID)
    reader: Any = SimpleNamespace(
        block_size=4096,
        read=lambda entry, start, stop: memoryview(content)[start:stop],
        ids=lambda *where: {},
    )
    unused: Any = None
    try:
        found = FileTensors(unused, entry, b"/" + _TENSOR_NAMES[data[0] % 3 if data else 0], reader)
    except struct.error as error:
        raise AssertionError(error) from error
    for name in found.names():
        for place in found.tensor(name).ranges:
            assert 0 <= place.start <= place.start + place.size_bytes <= len(content), (
                found._tensors,
                len(content),
            )
    return [found.identity(name) for name in found.names()]


def _npy() -> bytes:
    file = io.BytesIO()
    numpy.save(file, numpy.ones(2, "<f4"))
    return file.getvalue()


def _archive(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def verdict_readers() -> list[Reader]:
    """Return the readers of files and of directories."""
    return [
        Reader(
            "checkpoint that is judged",
            _judge,
            b"\0" + struct.pack("<Q", len(_HEADER)) + _HEADER + b"\1\2\3\4",
        ),
        Reader(
            "tensors of a safetensors file",
            _tensor_file,
            b"\0" + struct.pack("<Q", len(_HEADER)) + _HEADER + b"\1\2\3\4",
        ),
        Reader(
            "tensors of an archive of torch",
            _tensor_file,
            b"\2" + _archive(**{"a/data.pkl": _TORCH_PICKLE, "a/data/0": bytes(8)}),
        ),
        Reader("tensors of an archive of NumPy", _tensor_file, b"\1" + _archive(**{"a.npy": _npy()})),
        Reader("directory that is judged", _judge_directory, b'\1{"weight_map": {"a": "m-1.safetensors"}}'),
    ]
