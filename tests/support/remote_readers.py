"""Decoders of a remote's objects, which anybody who can write to the bucket may have made."""

from __future__ import annotations

import io
import struct

import msgspec
import xxhash
from support import remote_recipe as recipe
from support.readers import Reader

from ciuic.remote import documents, object_names
from ciuic.remote.documents import decode_round
from ciuic.remote.host_status import decode_status
from ciuic.remote.objects.pipe_protocol import (
    HEAD,
    MESSAGE,
    Reply,
    Request,
    decode_reply,
    decode_request,
    read_frame,
)
from ciuic.remote.pack import RemotePackReader
from ciuic.remote.sealing import key_slots
from ciuic.remote.sealing.sealer import Sealer, add_check, xxh3_check

# In clear, so that what is fuzzed is the decoder and not the seal.
_CLEAR = Sealer(recipe.REMOTE_ID, None)
_PACK = RemotePackReader(_CLEAR, recipe.META_PACK)
_ENTRY = object_names.log_entry_name(recipe.WRITER, 0)
_ROUND = object_names.round_name(0)
_STATUS = object_names.status_name(recipe.STATUS_KEY.reporter)
_PLAN = object_names.set_plan_name("ab" * 16, 1)
_ID = "0123456789abcdef" * 2


def _log_entry(data: bytes) -> object:
    return documents.decode_log_entry(_CLEAR, recipe.WRITER, 0, _CLEAR.seal(_ENTRY, data))


def _manifest(data: bytes) -> object:
    return documents.decode_manifest(_CLEAR, recipe.MANIFEST, _CLEAR.seal(recipe.MANIFEST, data))


def _round(data: bytes) -> object:
    return decode_round(_CLEAR, 0, "begun", _CLEAR.seal(_ROUND, data))


def _status(data: bytes) -> object:
    """Decode a status with a key and a signature that fit."""
    return decode_status(_CLEAR, _STATUS, recipe.STATUS_KEY.seal(_CLEAR, _STATUS, data))


def _set_plan(data: bytes) -> object:
    return documents.decode_set_object(_CLEAR, _PLAN, _CLEAR.seal(_PLAN, data), documents.StoredSetPlan)


def _set_mark(data: bytes) -> object:
    return documents.decode_set_object(_CLEAR, _PLAN, _CLEAR.seal(_PLAN, data), documents.StoredSetMark)


def _table(data: bytes) -> object:
    """Decode the table of a pack with a trailer and checksum that fit."""
    header = _PACK.layout.header
    count = len(data) // 64
    trailer = struct.pack("<8sIIQ", b"CIUICRPT", count, 0, 564)
    tail = data[: 64 * count] + trailer
    tail += struct.pack("<Q", xxhash.xxh3_64_intdigest(header + tail))
    found = _PACK.layout.decode_trailer(tail, 564 + len(tail))
    return _PACK.layout.decode_table(found, tail[:-32])


def _remote_json(data: bytes) -> object:
    """Decode remote.json with a check that fits."""
    return documents.open_remote(add_check(data, xxh3_check), None)


def _slot(data: bytes) -> object:
    """Decode a key slot with a check that fits."""
    return key_slots.decode_slot("main", add_check(data, xxh3_check))


def _without_check(data: bytes) -> bytes:
    return data.rpartition(b',"check":')[0] + b"}"


def remote_readers() -> list[Reader]:
    """Return the decoders of a remote."""
    clear, sealed = recipe.objects(sealed=False), recipe.objects(sealed=True)
    commit = clear[object_names.log_entry_name(recipe.WRITER, 1)]
    pack = clear[_PACK.name]
    own = clear[f"repositories/{recipe.OLD_REPOSITORY_ID.hex()}/remote.json"]
    return [
        Reader("object of a remote", lambda data: _CLEAR.open(_ENTRY, data), clear[_ENTRY]),
        Reader("log entry of a remote", _log_entry, commit[48:]),
        Reader("manifest of a remote", _manifest, clear[recipe.MANIFEST][48:]),
        Reader("round of a remote", _round, clear[_ROUND][48:]),
        Reader("status of a host", _status, clear[_STATUS][48 + 96 :]),
        Reader("pack of a remote", _PACK.check, pack),
        Reader(
            "plan of a set",
            _set_plan,
            b'{"id":"%s","name":"n","members":["a","b"],"hold_limit_seconds":2.0}' % _ID.encode(),
        ),
        Reader("mark of a set", _set_mark, b'{"by":"%s","decision":"cut"}' % _ID.encode()),
        Reader("table of a remote's pack", _table, pack[564:-32]),
        Reader("remote.json", _remote_json, _without_check(clear[object_names.REMOTE_JSON])),
        Reader("remote.json of a repository", _remote_json, _without_check(own)),
        Reader("key slot", _slot, _without_check(sealed["keys/main"])),
        Reader("frame of a pipe", lambda data: read_frame(io.BytesIO(data).read), HEAD.pack(7, MESSAGE, 3) + b"abc"),
        Reader("request over a pipe", decode_request, msgspec.msgpack.encode(Request("ranges", "packs/a", ranges=[(0, 5)]))),
        Reader("reply over a pipe", decode_reply, msgspec.msgpack.encode(Reply(infos=[("w/a", 1, 2)], lengths=[3], body_bytes=3))),
        Reader("text of a key", lambda data: key_slots.parse_key_text(data, "a file"), recipe.KEY_FILE.hex().encode()),
        Reader(
            "recovery key",
            lambda data: key_slots.parse_recovery_key(data.decode("utf-8", "replace")),
            recipe.RECOVERY_TEXT.encode(),
        ),
    ]  # fmt: skip
