"""Names of a remote's objects: build and parse.

A pack is referred to, in JSON and in Python, by a `PackRef`: ``d`` or ``m`` for its kind (data, meta) and the
32 hexadecimal digits of its id. Functions named ``parse_…`` return None for a name that is none of its kind:
a bucket may have objects that are not ours.

References:
    docs/remote-format.md, section 2
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Final, Literal, NamedTuple, NewType

import msgspec

from ciuic.repository.model import PackKind

REMOTE_JSON: Final = "remote.json"
KEYS_PREFIX: Final = "keys/"
LOGS_PREFIX: Final = "w/"
MANIFESTS_PREFIX: Final = "manifests/"
PACKS_PREFIX: Final = "packs/"
TABLES_PREFIX: Final = "tables/"
ROUNDS_PREFIX: Final = "gc/"
STATUS_PREFIX: Final = "status/"
REPOSITORIES_PREFIX: Final = "repositories/"
SETS_PREFIX: Final = "sets/"
SET_PLANS_PREFIX: Final = "sets/plans/"
MAX_NUMBER: Final = 10**10 - 1
"""Largest number of a log entry or a round: ten digits."""
MAX_ATTEMPT: Final = 9999
"""Largest number of an attempt to cut a set of one name, from 1."""
MAX_STEP: Final = 2**63 - 1
MAX_LABEL_CHARACTERS: Final = 64

PackRef = NewType("PackRef", str)
"""Kind and id of a pack: ``d`` or ``m``, and 32 hexadecimal digits."""
RoundPart = Literal["begun", "final", "done"]
SetMark = Literal["here", "go", "ready", "decision"]

_KIND_LETTERS: Final[dict[PackKind, str]] = {"data": "d", "meta": "m"}
_KINDS: Final[dict[str, PackKind]] = {"d": "data", "m": "meta"}
_PARTS: Final[dict[RoundPart, str]] = {"begun": "", "final": ".final", "done": ".done"}
_SUFFIXES: Final[dict[str, RoundPart]] = {suffix: part for part, suffix in _PARTS.items()}

# \Z and not $, which also matches before a line end.
HEX_ID_PATTERN: Final = r"^[0-9a-f]{32}\Z"
PACK_REF_PATTERN: Final = r"^[dm][0-9a-f]{32}\Z"
# A label does not begin with a dot: "." and ".." are directories where the remote is one.
_LABEL: Final = "[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}"
_STEP: Final = "(?:0|[1-9][0-9]{0,18})"
MANIFEST_PATTERN: Final = rf"^manifests/({_LABEL})/({_STEP})-({_STEP})/({_LABEL})-([0-9a-f]{{32}})\Z"
_HEX_ID: Final = re.compile(HEX_ID_PATTERN)
_PACK_REF: Final = re.compile(PACK_REF_PATTERN)
_MANIFEST: Final = re.compile(MANIFEST_PATTERN)
_SLOT: Final = re.compile(r"[a-z0-9-]{1,32}\Z")
_SLOT_NAME: Final = re.compile(r"keys/([a-z0-9-]{1,32})\Z")
_LOG_ENTRY: Final = re.compile(r"w/([0-9a-f]{32})/([0-9]{10})\Z")
_PACK: Final = re.compile(r"packs/(data|meta)/([0-9a-f]{2})/(\2[0-9a-f]{30})\Z")
_TABLE: Final = re.compile(r"tables/([0-9a-f]{2})/(\1[0-9a-f]{30})\Z")
_ROUND: Final = re.compile(r"gc/([0-9]{10})(|\.final|\.done)\Z")
_STATUS: Final = re.compile(r"status/([0-9a-f]{32})(?:\.([0-9]{10}))?\Z")
_NOT_LABEL: Final = re.compile("[^A-Za-z0-9._-]")

# Types of the fields of JSON and msgpack documents; msgspec checks them when it decodes.
HexId = Annotated[str, msgspec.Meta(pattern=HEX_ID_PATTERN)]
"""128 bits in hexadecimal digits: ids, writers, nonces."""
StoredPackRef = Annotated[str, msgspec.Meta(pattern=PACK_REF_PATTERN)]
StoredManifestName = Annotated[str, msgspec.Meta(pattern=MANIFEST_PATTERN)]
Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]


class LogPosition(NamedTuple):
    """Place of an entry in the log of a writer."""

    writer: str
    number: int


class ManifestName(NamedTuple):
    """Labels in the name of a manifest; nothing depends on them but what people read."""

    job: str
    epoch: int
    step: int
    host: str
    random: str
    """32 hexadecimal digits."""


class RoundName(NamedTuple):
    """Object of a collector's round."""

    round: int
    part: RoundPart


class StatusName(NamedTuple):
    """Object with the status of a host."""

    reporter: str
    """Digits of the key that signs it."""
    hour: int | None
    """Hours since 1970 of one that the store does not let its host replace; None: it is replaced in place."""


def new_hex_id() -> str:
    """Return 128 random bits in hexadecimal digits: a writer, a nonce, an id."""
    return os.urandom(16).hex()


def new_pack_ref(kind: PackKind) -> PackRef:
    """Return a reference with 128 random bits, which no pack has had."""
    return PackRef(_KIND_LETTERS[kind] + new_hex_id())


def pack_ref(kind: PackKind, pack_id: bytes) -> PackRef:
    """Return the reference of the pack with this id of 16 bytes."""
    return _checked_ref(_KIND_LETTERS[kind] + pack_id.hex())


def split_ref(ref: str) -> tuple[PackKind, bytes]:
    """Return kind and id (16 bytes) of a pack. ValueError for what is no reference."""
    checked = _checked_ref(ref)
    return _KINDS[checked[0]], bytes.fromhex(checked[1:])


def _checked_ref(text: str) -> PackRef:
    if not _PACK_REF.match(text):
        raise ValueError(f"a pack must be d or m and 32 hexadecimal digits, got {text!r}")
    return PackRef(text)


def pack_name(ref: str) -> str:
    """Return the name of the pack's object. ValueError for what is no reference."""
    checked = _checked_ref(ref)
    return f"{PACKS_PREFIX}{_KINDS[checked[0]]}/{checked[1:3]}/{checked[1:]}"


def pack_prefix(kind: PackKind) -> str:
    """Return the prefix of the names of all packs of this kind."""
    return f"{PACKS_PREFIX}{kind}/"


def parse_pack(name: str) -> PackRef | None:
    """Return the reference of the pack with this name; None for what names no pack."""
    found = _PACK.match(name)
    return PackRef(found[1][0] + found[3]) if found else None


def table_name(ref: str) -> str:
    """Return the name of the copy of a data pack's table, which stays readable when the pack is cold.

    ValueError for what is no reference to a data pack.
    """
    checked = _checked_ref(ref)
    if _KINDS[checked[0]] != "data":
        raise ValueError(f"only data packs become cold, got {checked}")
    return f"{TABLES_PREFIX}{checked[1:3]}/{checked[1:]}"


def parse_table(name: str) -> PackRef | None:
    """Return the data pack whose table has a copy of this name, or None."""
    found = _TABLE.match(name)
    return PackRef(f"d{found[2]}") if found else None


def is_slot(slot: str) -> bool:
    """Return whether a key slot may have this name."""
    return _SLOT.match(slot) is not None


def slot_name(slot: str) -> str:
    """Return the name of a key slot's object. ValueError for a slot that cannot be."""
    if not is_slot(slot):
        raise ValueError(f"a key slot must be 1 to 32 characters of a-z 0-9 -, got {slot!r}")
    return KEYS_PREFIX + slot


def parse_slot(name: str) -> str | None:
    """Return the slot of the object of this name; None for what names no slot."""
    found = _SLOT_NAME.match(name)
    return found[1] if found else None


def log_prefix(writer: str) -> str:
    """Return the prefix of the names of a writer's log."""
    if not _HEX_ID.match(writer):
        raise ValueError(f"a writer must be 32 hexadecimal digits, got {writer!r}")
    return f"{LOGS_PREFIX}{writer}/"


def log_entry_name(writer: str, number: int) -> str:
    """Return the name of entry ``number`` (from 0) of a writer's log."""
    return f"{log_prefix(writer)}{_digits(number)}"


def parse_log_entry(name: str) -> LogPosition | None:
    """Return writer and number of the entry of this name, or None."""
    found = _LOG_ENTRY.match(name)
    return LogPosition(found[1], int(found[2])) if found else None


def round_name(round_: int, part: RoundPart = "begun") -> str:
    """Return the name of the beginning, the decision or the end of round ``round_``."""
    return f"{ROUNDS_PREFIX}{_digits(round_)}{_PARTS[part]}"


def parse_round(name: str) -> RoundName | None:
    """Return round and part of the object of this name, or None."""
    found = _ROUND.match(name)
    return RoundName(int(found[1]), _SUFFIXES[found[2]]) if found else None


def status_name(reporter: str, hour: int | None = None) -> str:
    """Return the name of a host's status: the one that is replaced in place, or that of an hour since 1970."""
    if not _HEX_ID.match(reporter):
        raise ValueError(f"a reporter must be 32 hexadecimal digits, got {reporter!r}")
    return f"{STATUS_PREFIX}{reporter}" + ("" if hour is None else f".{_digits(hour)}")


def parse_status(name: str) -> StatusName | None:
    """Return reporter and hour of the status of this name, or None."""
    found = _STATUS.match(name)
    return StatusName(found[1], int(found[2]) if found[2] else None) if found else None


def set_plan_name(hidden: str, attempt: int) -> str:
    """Return the name of the plan of an attempt to cut the set whose name is hidden as these 32 hexadecimal digits."""
    if not _HEX_ID.match(hidden) or not 1 <= attempt <= MAX_ATTEMPT:
        raise ValueError(
            f"a plan must have 32 hexadecimal digits and 1 to {MAX_ATTEMPT}, got {hidden!r}, {attempt}"
        )
    return f"{SET_PLANS_PREFIX}{hidden}/{attempt:04}"


def set_mark_name(set_id: str, mark: SetMark, hidden: str = "") -> str:
    """Return the name of a mark of a set; those of one member have that member's hidden name."""
    if not _HEX_ID.match(set_id) or (mark in ("here", "ready")) != bool(_HEX_ID.match(hidden)):
        raise ValueError(f"not a mark of a set: {set_id!r}, {mark}, {hidden!r}")
    return f"{SETS_PREFIX}{set_id}/{mark}" + (f"/{hidden}" if hidden else "")


def _digits(number: int) -> str:
    if not 0 <= number <= MAX_NUMBER:
        raise ValueError(f"a number must be from 0 to {MAX_NUMBER}, got {number}")
    return f"{number:010}"


def as_label(text: str) -> str:
    """Return the text as a label for people: 1 to 64 characters of ``A-Z a-z 0-9 . _ -``, no dot first."""
    label = _NOT_LABEL.sub("_", text[:MAX_LABEL_CHARACTERS])
    return "_" + label[1:] if not label or label[0] == "." else label


def manifest_name(
    *, job: str, epoch: int | None, step: int | None, host: str, random: str | None = None
) -> str:
    """Return the name of a manifest's object; a new one at each call unless ``random`` is given.

    Args:
        job: name of the job, any text; ``files`` for a snapshot of files.
        epoch: not negative; None for none.
        step: not negative; None for none.
        host: name of the host, any text.
        random: 32 hexadecimal digits.
    """
    numbers = (epoch or 0, step or 0)
    if not all(0 <= number <= MAX_STEP for number in numbers):
        raise ValueError(f"epoch and step must be from 0 to {MAX_STEP}, got {numbers}")
    unique = new_hex_id() if random is None else random
    if not _HEX_ID.match(unique):
        raise ValueError(f"the random part must be 32 hexadecimal digits, got {unique!r}")
    return f"{MANIFESTS_PREFIX}{as_label(job)}/{numbers[0]}-{numbers[1]}/{as_label(host)}-{unique}"


def parse_manifest(name: str) -> ManifestName | None:
    """Return the labels in the name of a manifest; None for what names none."""
    found = _MANIFEST.match(name)
    return ManifestName(found[1], int(found[2]), int(found[3]), found[4], found[5]) if found else None


def repository_prefix(repository_id: str) -> str:
    """Return the prefix of a repository with an identity of its own; the names in it are as at the top."""
    if not _HEX_ID.match(repository_id):
        raise ValueError(f"a repository's id must be 32 hexadecimal digits, got {repository_id!r}")
    return f"{REPOSITORIES_PREFIX}{repository_id}/"


def space_json(repository_id: str) -> str:
    """Return the name of the remote.json of a repository with an identity of its own."""
    return f"{repository_prefix(repository_id)}{REMOTE_JSON}"
