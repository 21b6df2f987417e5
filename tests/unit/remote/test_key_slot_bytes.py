"""Tests of key slots: what opens them, and what a hostile bucket can put in their place."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support import remote_recipe as recipe

from ciuic.remote.errors import DamagedRemote, WrongKey
from ciuic.remote.sealing import key_slots
from ciuic.remote.sealing.key_slots import (
    SlotSecret,
    decode_slot,
    passphrase_secret,
    unlock,
    unwrap_master_key,
    wrap_master_key,
)
from ciuic.remote.sealing.passphrase_key import Argon2Cost
from ciuic.remote.sealing.sealer import MasterKey, add_check, xxh3_check
from ciuic.repository.errors import UnsupportedFormat

MASTER = MasterKey(recipe.MASTER)
KEY = SlotSecret("key-file", recipe.KEY_FILE)


def wrapped(secret: SlotSecret = KEY, slot: str = "main", **options: Any) -> bytes:
    return wrap_master_key(
        MASTER, recipe.REMOTE_ID, slot, secret, **{"created_ns": 5, "cost": recipe.COST, **options}
    )


def changed(data: bytes, **fields: object) -> bytes:
    """Return the slot with other fields and a right check, as an attacker makes it."""
    found = msgspec.json.decode(data)
    del found["check"]
    kdf = {**found["kdf"], **fields.pop("kdf", {})}  # type: ignore[dict-item]
    return add_check(msgspec.json.encode({**found, "kdf": kdf, **fields}), xxh3_check)


def test_each_slot_is_new() -> None:
    """Salt and nonce are new in each slot, so that equal secrets give other bytes."""
    assert wrapped() != wrapped()


@pytest.mark.parametrize(
    "secret",
    [SlotSecret("key-file", bytes(32)), SlotSecret("command", recipe.KEY_FILE), passphrase_secret("x")],
)
def test_another_secret_is_a_wrong_key(secret: SlotSecret) -> None:
    """A wrong key, or a right one of another kind, is told apart from damage."""
    with pytest.raises(WrongKey, match="main"):
        unwrap_master_key(decode_slot("main", wrapped()), recipe.REMOTE_ID, secret)


def test_a_wrong_passphrase_is_told_apart_from_a_decayed_slot() -> None:
    """A wrong passphrase is a wrong key; any bit of the slot that changed is damage of the slot."""
    data = wrapped(passphrase_secret("right"))
    with pytest.raises(WrongKey, match="passphrase does not open"):
        unwrap_master_key(decode_slot("main", data), recipe.REMOTE_ID, passphrase_secret("wrong"))
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            if at == len(data) - 1 and not flipped[at:].strip():
                continue
            with pytest.raises(DamagedRemote, match="keys/main"):
                decode_slot("main", bytes(flipped))


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_cut_slot_is_damaged(length: int) -> None:
    """A slot that was cut is damaged; only its line end may be missing."""
    data = wrapped().rstrip(b"\n")
    with pytest.raises(DamagedRemote):
        decode_slot("main", data[:length])
    decode_slot("main", data)


def test_a_slot_belongs_to_its_name_and_remote() -> None:
    """A slot that was copied to another name or another remote does not open."""
    data = wrapped()
    with pytest.raises(DamagedRemote, match="it is the slot main"):
        decode_slot("other", data)
    renamed = decode_slot("other", changed(data, slot="other"))
    with pytest.raises(WrongKey):
        unwrap_master_key(renamed, recipe.REMOTE_ID, KEY)
    with pytest.raises(WrongKey):
        unwrap_master_key(decode_slot("main", data), recipe.REMOTE_ID[::-1], KEY)


@pytest.mark.parametrize(
    "kdf",
    [
        {"memory_kib": key_slots.MIN_MEMORY_KIB - 1},
        {"memory_kib": key_slots.MAX_MEMORY_KIB + 1},
        {"memory_kib": 1 << 40},
        {"memory_kib": 0},
        {"memory_kib": -1},
        {"memory_kib": 1 << 20, "passes": 9},
        {"passes": 0},
        {"passes": 65},
        {"passes": 1 << 31},
        {"lanes": 0},
        {"lanes": 17},
        {"salt": ""},
        {"salt": "ab" * 17},
        {"name": "hkdf-sha256"},
        {"name": "scrypt"},
    ],
    ids=str,
)
def test_a_hostile_derivation_is_refused_before_it_runs(kdf: dict[str, object]) -> None:
    """A slot that asks for too much memory or time, or makes guesses cheap, is refused when it is read."""
    data = changed(wrapped(passphrase_secret("x")), kdf=kdf)
    with pytest.raises(DamagedRemote, match="keys/main"):
        decode_slot("main", data)


def test_the_largest_derivation_is_accepted() -> None:
    """The limits themselves are allowed."""
    kdf = {"memory_kib": 1 << 20, "passes": 8, "lanes": 16}
    assert decode_slot("main", changed(wrapped(passphrase_secret("x")), kdf=kdf)).kdf
    assert decode_slot("main", changed(wrapped(passphrase_secret("x")), kdf={"memory_kib": 19 << 10})).kdf


@pytest.mark.parametrize(
    "fields",
    [
        {"wrapped": "00" * 59},
        {"wrapped": "0G" * 60},
        {"kind": "passphrase"},
        {"kind": "other"},
        {"slot": 5},
        {"created_ns": -1},
        {"padding": "x" * 9000},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_impossible_fields_are_refused(fields: dict[str, object]) -> None:
    """A slot with fields that contradict the page is damaged."""
    with pytest.raises(DamagedRemote):
        decode_slot("main", changed(wrapped(), **fields))


def test_a_later_version_is_named() -> None:
    """A slot of a later version is no damage."""
    with pytest.raises(UnsupportedFormat, match="version 2"):
        decode_slot("main", changed(wrapped(), version=2))


@pytest.mark.parametrize(
    "options",
    [
        {"slot": "Main"},
        {"slot": ""},
        {"slot": "a/b"},
        {"created_ns": -1},
        {"cost": Argon2Cost(1024)},
    ],
    ids=str,
)
def test_a_slot_that_no_reader_accepts_is_not_made(options: dict[str, Any]) -> None:
    """Impossible names, times and costs are refused when the slot is made."""
    with pytest.raises(ValueError, match="invalid key slot"):
        wrapped(passphrase_secret("x"), **options)


def test_the_first_slot_that_opens_is_used() -> None:
    """A secret is tried with the slots of its kind; if it opens none, the message names them."""
    slots = [
        decode_slot("a", wrapped(SlotSecret("key-file", bytes(32)), "a")),
        decode_slot("b", wrapped(passphrase_secret("x"), "b")),
        decode_slot("c", wrapped(slot="c")),
    ]
    slot, master = unlock(slots, recipe.REMOTE_ID, KEY)
    assert (slot.slot, master) == ("c", MASTER)
    with pytest.raises(WrongKey, match="a, c") as caught:
        unlock(slots, recipe.REMOTE_ID, SlotSecret("key-file", b"x" * 32))
    # What else opens it, and where that goes; nothing of kinds that it has no slot of.
    assert all(variable in caught.value.hint for variable in ("REMOTE_KEY_FILE", "REMOTE_PASSPHRASE"))
    assert "RECOVERY" not in caught.value.hint
    with pytest.raises(WrongKey, match="no key slot for a key command"):
        unlock(slots, recipe.REMOTE_ID, SlotSecret("command", recipe.KEY_FILE))


def test_a_bucket_full_of_slots_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A passphrase is tried with slots that take a minute together, however many there are."""
    cost = key_slots.DEFAULT_COST
    slot = decode_slot("main", wrapped(passphrase_secret("x"), cost=cost))
    derived = []

    def refuse(slot: object, remote_id: bytes, secret: SlotSecret) -> MasterKey:
        derived.append(slot)
        raise WrongKey("no")

    monkeypatch.setattr(key_slots, "unwrap_master_key", refuse)
    with pytest.raises(WrongKey):
        unlock([slot] * 1000, recipe.REMOTE_ID, passphrase_secret("y"))
    assert len(derived) * cost.memory_kib * cost.passes == key_slots.MAX_PASSPHRASE_WORK_KIB
