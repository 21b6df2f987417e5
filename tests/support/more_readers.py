"""Decoders of input from trainers, kernels and sockets: second half of `support.readers`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sqlite3
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from support.readers import Reader

from ciuic.compare.restore_records import RestoreRecord
from ciuic.config import repository_mark
from ciuic.daemon import upkeep_process
from ciuic.daemon.trainers import watch_journal, watch_socket
from ciuic.errors import CiuicError
from ciuic.fuse_layer import fuse_protocol as p
from ciuic.fuse_layer.core.core import Attr, OverlayCore
from ciuic.fuse_layer.journal import inherited_session, records
from ciuic.fuse_layer.kernel.driver import KernelDriver
from ciuic.fuse_layer.kernel.negotiation import Negotiated
from ciuic.maintenance.scrub_state import Pass
from ciuic.protocol import control_types
from ciuic.protocol.heartbeat_page import HeartbeatPage, check_page, read_page
from ciuic.protocol.stored_remotely import StoredRecord, decode_record, encode_record
from ciuic.protocol.watch_client import Hello
from ciuic.repository.codecs import byte_planes
from ciuic.repository.disk import lock
from ciuic.repository.format import snapshot_format
from ciuic.repository.index.database import IndexDatabase
from ciuic.repository.promised import Promise
from ciuic.restore.files.attributes import denied_to_nobody
from ciuic.retention import RetentionPolicy
from ciuic.system import mountinfo
from ciuic.training.compare.stored_tensors import described_tensors
from ciuic.training.dcp.pointer import decode_checkpoint_pointer
from ciuic.training.format import unpacking
from ciuic.training.format.layout import TensorInFile, decode_header
from ciuic.training.format.reading import STATE_VERSION, _decode_facts
from ciuic.training.format.resolution import check_document
from ciuic.training.importing.inert_pickle import read_pickle
from ciuic.training.protocol import messages
from ciuic.training.util.documents import MALFORMED, decode_json

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


def _page(data: bytes) -> object:
    """Read a heartbeat page as the daemon does, and check it as a new one."""
    fd = _memfd(data)
    try:
        with contextlib.suppress(ValueError):
            check_page(fd)
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
        return watch_socket.WatchSocket._checked(self, registration)
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
        self.names = self.files = self.attributes = self.directories = self.swaps = self
        self.held_by_kernel: Callable[[int], bool] = lambda node: False

    def __getattr__(self, name: str) -> Any:
        status = os.fstat(self._fd)
        attr = cast(Any, Attr)(**dict.fromkeys(Attr._fields, 1) | {"st": status, "node": 7, "nlink": 1})
        answers: dict[str, object] = {
            "create": (attr, 3), "tmpfile": (attr, 3), "descriptor": self._fd, "open": 3, "opendir": 4, "dot": 1,
            "readlink": b"target", "read": b"data", "read_nowait": None, "write": 1, "lseek": 0, "copy_file_range": 0,
            "listxattr": [b"user.a"], "getxattr": b"v", "statfs": os.fstatvfs(self._fd), "readdir": [(b"n", attr, 1)],
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
        Path(top, watch_journal.FILE_NAME).write_bytes(data)
        return watch_journal.read_journal(Path(top))


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
    return {name: unpacking.unpack(value, tensor) for name, value in document["objects"].items()}


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
    """Decode JSON as daemon/api/api.py, scrub_state.py and repository/notes.py do."""
    return _refusing(lambda data: msgspec.json.decode(data, type=kind), UnicodeDecodeError, RecursionError)


def _tensors(data: bytes) -> object:
    """Read the names of tensors as `SavedState` does."""
    return described_tensors(data, lambda name: {"c": f"{name}/c", "d@0,1": f"{name}/d"})


def _needed(data: bytes) -> object:
    """Look for the tensors of `state.json` in two files, as before a snapshot is called verified."""
    check_document(data, {"model": _HELD})
    return None


def _owner(data: bytes) -> object:
    """Read the owner of a lock as shown to a program that finds the repository locked."""
    fd = _memfd(data)
    try:
        return lock._busy("/r", fd, time).message
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
        Reader("mark of a repository", _mark, msgspec.msgpack.encode(repository_mark.RepositoryMark(b"/r", b"/", "ab" * 16))),
        Reader("watched trainers", _book, msgspec.json.encode(watch_journal.WatchJournal())),
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
        Reader("job of upkeep", _json(upkeep_process.UpkeepJob), msgspec.json.encode(upkeep_process.UpkeepJob(repository="/r", policy=RetentionPolicy()))),
        Reader("record of a remote", decode_record, encode_record(StoredRecord(repository="ab" * 16, stored=frozenset({"cs-abcdef"}), tail_ns=5))),
        Reader("pass of a scrub", _json(Pass), b"{}"),
        Reader("promise of a snapshot", _json(Promise), msgspec.json.encode(Promise(id="cs-abcdef", time_ns=1, reason="r"))),
        Reader("note of a restore", _json(RestoreRecord), msgspec.json.encode(RestoreRecord(paths=(b"/r/a",)))),
        Reader("owner of a lock", _owner, msgspec.json.encode(lock.Owner(1, "h", "c", 5))),
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
