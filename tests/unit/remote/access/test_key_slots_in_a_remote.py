"""Tests of the key slots in a remote: thousands of hosts, planted slots, and objects that are no slots."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.remote.access import KeySlots, Remote, add_slot, init_remote, open_remote, remove_slot
from ciuic.remote.errors import DamagedRemote, WrongKey
from ciuic.remote.object_names import parse_slot
from ciuic.remote.objects.memory_objects import forget_bucket
from ciuic.remote.objects.model import Objects, RemoteRefused
from ciuic.remote.objects.opening import open_objects
from ciuic.remote.objects.wrappers import CountingObjects
from ciuic.remote.sealing import key_slots
from ciuic.remote.sealing.key_slots import (
    KeySlot,
    SlotSecret,
    own_slot,
    passphrase_secret,
    unwrap_master_key,
    wrap_master_key,
)
from ciuic.remote.sealing.passphrase_key import Argon2Cost
from ciuic.remote.sealing.sealer import MasterKey

FLEET = 5000
CHEAP = Argon2Cost(key_slots.MIN_MEMORY_KIB, 1, 1)
WORDS = passphrase_secret("correct horse")


@pytest.fixture
def remote() -> Iterator[Remote]:
    name = f"slots-{os.urandom(6).hex()}"
    yield init_remote(open_objects(f"memory://{name}"), master=MasterKey.generate(), block_size=1 << 16)
    forget_bucket(name)


def key(number: int) -> SlotSecret:
    return SlotSecret("key-file", number.to_bytes(32, "big"))


def id_of(remote: Remote) -> bytes:
    return bytes.fromhex(remote.id)


def asked(objects: CountingObjects) -> dict[str, int]:
    """Return how many requests of each kind were made."""
    return {kind: count.requests for kind, count in objects.counts().items() if count.requests}


def plant(remote: Remote, names: Iterable[str], secret: SlotSecret, cost: Argon2Cost = CHEAP) -> None:
    """Store slots of another master key, as somebody does who can write to the bucket."""
    theirs = MasterKey.generate()
    made = wrap_master_key(theirs, id_of(remote), "model", secret, created_ns=1, cost=cost)
    body = made[: made.index(b',"check"')] + b"}"
    for name in names:
        named = body.replace(b'"slot":"model"', b'"slot":"%s"' % name.encode())
        remote.objects.put(f"keys/{name}", [key_slots.add_check(named, key_slots.xxh3_check)])


def opens(remote: Remote, secret: SlotSecret) -> bool:
    return open_remote(remote.objects, [secret]).master == remote.master


@pytest.fixture
def derived(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Provide the names of the slots whose key is derived; derivations of a passphrase cost nothing."""
    names: list[str] = []

    def noted(slot: KeySlot, remote_id: bytes, secret: SlotSecret) -> MasterKey:
        names.append(slot.slot)
        if slot.kind == "passphrase" and slot.slot.startswith("planted"):
            raise WrongKey("another one")
        return unwrap_master_key(slot, remote_id, secret)

    def derive(passphrase: bytes, salt: bytes, cost: Argon2Cost) -> bytes:
        return hashlib.blake2b(b"%d %d %d" % cost + salt + passphrase, digest_size=32).digest()

    monkeypatch.setattr(key_slots, "unwrap_master_key", noted)
    monkeypatch.setattr(key_slots, "derive_key", derive)
    return names


def test_every_host_of_a_fleet_opens_the_remote_with_few_requests(remote: Remote) -> None:
    """Of 5,000 hosts each finds its slot, with one request that no other host makes dearer, and after it got another name."""
    for number in range(FLEET):
        add_slot(remote, own_slot(id_of(remote), key(number), f"node{number}"), key(number))
    for number in (0, 17, 2500, FLEET - 1):
        counted = CountingObjects(remote.objects)
        slot, master = KeySlots(counted, host=f"node{number}").unlock(id_of(remote), key(number))
        assert (master, slot.slot) == (remote.master, own_slot(id_of(remote), key(number), f"node{number}"))
        assert asked(counted) == {"get": 1}
        renamed = CountingObjects(remote.objects)
        assert KeySlots(renamed, host="another").unlock(id_of(remote), key(number))[1] == remote.master
        assert asked(renamed)["get"] == 4
    # A key of nobody is refused without reading the slots of everybody.
    counted = CountingObjects(remote.objects)
    with pytest.raises(WrongKey) as caught:
        KeySlots(counted).unlock(id_of(remote), key(FLEET))
    assert asked(counted)["get"] <= 4
    assert len(caught.value.message) < 500


def test_slots_of_earlier_versions_are_still_opened(remote: Remote) -> None:
    """Of thousands of slots with random names, as earlier versions gave them, each key opens its own."""
    for number in range(FLEET):
        add_slot(remote, f"host-node{number}-{number % 65536:04x}", key(number))
    for number in (0, 17, FLEET - 1):
        assert opens(remote, key(number))


def test_planted_slots_lock_no_key_out(remote: Remote) -> None:
    """Key files, commands and recovery keys open their slots behind 5,000 planted ones of their kind that sort before."""
    secrets = [key(1), SlotSecret("command", bytes(range(32))), SlotSecret("recovery", bytes(range(32)))]
    for number, secret in enumerate(secrets):
        add_slot(remote, f"z{number}", secret)
    plant(remote, (f"a-{number}" for number in range(FLEET)), key(2))
    digits = own_slot(id_of(remote), key(1), "x")
    plant(remote, (f"host-{number}-{digits[-12:]}" for number in range(20)), key(2))
    assert all(opens(remote, secret) for secret in secrets)


@pytest.mark.parametrize("slot", ["passphrase", "words"])
def test_planted_slots_lock_no_passphrase_out(remote: Remote, slot: str, derived: list[str]) -> None:
    """A passphrase opens the slot with the usual name, or that was there before 5,000 planted ones, with one derivation."""
    data = wrap_master_key(MasterKey(remote.master.reveal()), id_of(remote), slot, WORDS, created_ns=2)  # type: ignore[union-attr]
    assert remote.objects.create(f"keys/{slot}", data)
    plant(remote, (f"planted-{number}" for number in range(FLEET)), WORDS, key_slots.DEFAULT_COST)
    assert opens(remote, WORDS)
    assert derived == [slot]


def test_a_passphrase_is_bounded_by_cost_and_goes_on_when_told(
    remote: Remote, derived: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind 5,000 planted slots that came before it a slot is reached by going on, or by its name; else the refusal says so."""
    plant(remote, (f"planted-{number}" for number in range(FLEET)), WORDS, key_slots.DEFAULT_COST)
    add_slot(remote, "words", WORDS)
    with pytest.raises(WrongKey, match="there are more") as caught:
        open_remote(remote.objects, [WORDS])
    assert "CIUIC_REMOTE_SLOT" in caught.value.hint
    work = key_slots.DEFAULT_COST.memory_kib * key_slots.DEFAULT_COST.passes
    assert len(derived) == key_slots.MAX_PASSPHRASE_WORK_KIB // work
    asked: list[int] = []

    def goes_on(tried: int) -> bool:
        asked.append(tried)
        return True

    assert open_remote(remote.objects, [WORDS], goes_on=goes_on).master == remote.master
    assert asked == [64 * turn for turn in range(1, FLEET // 64 + 1)]
    del derived[:]
    monkeypatch.setenv("CIUIC_REMOTE_SLOT", "words")
    assert opens(remote, WORDS)
    assert derived == ["words"]


def test_cheap_slots_do_not_use_up_the_attempts(remote: Remote, derived: list[str]) -> None:
    """What counts is what derivations cost, and slots of the usual cost come before all others."""
    plant(remote, (f"planted-{number}" for number in range(200)), WORDS, CHEAP)
    add_slot(remote, "words", WORDS)
    assert opens(remote, WORDS)
    assert derived == ["words"]


@given(st.text(max_size=300), st.binary(min_size=32, max_size=32))
def test_every_host_has_a_slot(host: str, secret: bytes) -> None:
    """Whatever a host is called, its slot has a valid name, which ends with digits of its key."""
    name = own_slot(bytes(16), SlotSecret("key-file", secret), host)
    assert name.startswith("host-")
    assert parse_slot(f"keys/{name}") == name
    assert key_slots.digits_of(name) == key_slots.own_digits(bytes(16), SlotSecret("key-file", secret))
    assert name != own_slot(bytes(16), SlotSecret("command", secret), host)


def test_a_name_with_digits_is_for_its_key_alone(remote: Remote) -> None:
    """No other key, and no passphrase, gets a slot that readers would not try, or whose name would tell a guess."""
    name = own_slot(id_of(remote), key(1), "node")
    for secret in (key(2), WORDS):
        with pytest.raises(ValueError, match="another key"):
            add_slot(remote, name, secret)
    with pytest.raises(ValueError, match="passphrase"):
        own_slot(id_of(remote), WORDS, "node")


BAD = {
    "aa-garbage": os.urandom(300),
    "aa-page": b"<!DOCTYPE html><html><body>Sign in to the network</body></html>",
    "aa-large": bytes(key_slots.MAX_SLOT_BYTES + 1),
    "aa-empty": b"",
    "Not_A.Slot": b"anything",
    "deeper/slot": b"anything",
    "aa-later": b'{"version":2',
    "aa-refused": b"",
}


class RefusingObjects:
    """Objects of which one cannot be read."""

    def __init__(self, objects: Objects, name: str) -> None:
        self._objects = objects
        self._name = name

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[object]:
        if name == self._name:
            raise RemoteRefused(f"cannot read {name}")
        return self._objects.get_ranges(name, ranges)

    def __getattr__(self, name: str) -> object:
        return getattr(self._objects, name)


def put_bad(remote: Remote) -> Remote:
    """Store objects below keys/ that are no slots; return the remote as one sees it who may not read one of them."""
    for name, data in BAD.items():
        remote.objects.put(f"keys/{name}", [data])
    later = b'{"version":2,"slot":"aa-later"}'
    remote.objects.put("keys/aa-later", [key_slots.add_check(later, key_slots.xxh3_check)])
    return remote._replace(objects=RefusingObjects(remote.objects, "keys/aa-refused"))  # type: ignore[arg-type]


def test_objects_that_are_no_slots_are_skipped_named_and_removable(
    remote: Remote, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside garbage, pages, large and unreadable objects every kind of key opens the remote; each can be removed, the last slot not."""
    secrets = [key(1), SlotSecret("command", bytes(range(32))), SlotSecret("recovery", bytes(range(32)))]
    for number, secret in enumerate(secrets):
        add_slot(remote, f"z{number}", secret)
    seen = put_bad(remote)
    assert all(opens(seen, secret) for secret in secrets)
    assert "aa-garbage" in "".join(capsys.readouterr())
    slots = KeySlots(seen.objects)
    assert [one.slot for one in slots.all()] == ["z0", "z1", "z2"]
    assert {one.slot for one in slots.unusable} == set(BAD)
    assert all(one.problem.message for one in slots.unusable)
    with pytest.raises(WrongKey, match=r"not usable as key slots: .*aa-garbage"):
        open_remote(seen.objects, [key(2)])
    remove_slot(seen, "z1")
    remove_slot(seen, "z2")
    with pytest.raises(ValueError, match="last key slot"):
        remove_slot(seen, "z0")
    for name in BAD:
        remove_slot(seen, name)
    assert [info.name for info in remote.objects.list("keys/")] == ["keys/z0"]


def test_a_remote_whose_slots_are_all_damaged_says_so(remote: Remote) -> None:
    """Where no usable slot is left, damage is told, and not a wrong key."""
    remote.objects.put("keys/host", [b"garbage"])
    with pytest.raises(DamagedRemote, match="keys/host"):
        open_remote(remote.objects, [key(1)])
