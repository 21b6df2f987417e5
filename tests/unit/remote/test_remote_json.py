"""Tests of remote.json: identity, and what somebody who can write to the bucket can make of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support import remote_recipe as recipe

from ciuic.remote.documents import encode_remote, encode_repository, is_sealed, open_remote, read_remote_id
from ciuic.remote.errors import DamagedRemote, WrongKey
from ciuic.remote.sealing.sealer import MasterKey, add_check, xxh3_check
from ciuic.repository.errors import UnsupportedFormat
from ciuic.repository.identity import Identity

MASTER = MasterKey(recipe.MASTER)
XXH3 = Identity("xxh3-128", None, recipe.OLD_SEED)
OWN = {"repository_id": recipe.OLD_REPOSITORY_ID, "block_size": 4096, "created_ns": 5}
TOP = {"remote_id": recipe.REMOTE_ID, "block_size": 4096, "created_ns": 5}


def written(*, sealed: bool, own: bool) -> bytes:
    master = MASTER if sealed else None
    if own:
        return encode_repository(**OWN, master=master, identity=XXH3)  # type: ignore[arg-type]
    return encode_remote(**TOP, master=master, identity=None if sealed else recipe.identity())  # type: ignore[arg-type]


def changed(data: bytes, **fields: object) -> bytes:
    """Return the file with other fields and an XXH3 check, which needs no key."""
    found = {**msgspec.json.decode(data), **fields}
    del found["check"]
    kept = {name: value for name, value in found.items() if value is not None}
    return add_check(msgspec.json.encode(kept), xxh3_check)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("sealed", [False, True])
def test_every_changed_byte_is_refused(sealed: bool, own: bool) -> None:
    """No bit of the file can change without being noticed."""
    data = written(sealed=sealed, own=own)
    master = MASTER if sealed else None
    opened = open_remote(data, master)
    assert opened.stored.sealed is sealed
    assert is_sealed(data) is sealed
    for at in range(len(data) - 1):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            with pytest.raises((DamagedRemote, WrongKey, UnsupportedFormat)):
                open_remote(bytes(flipped), master)
    for length in range(len(data) - 1):
        with pytest.raises(DamagedRemote):
            open_remote(data[:length], master)


@pytest.mark.parametrize("key", [None, bytes(range(32))])
def test_a_repository_keeps_its_identity(key: bytes | None) -> None:
    """A repository with an identity of its own has it again, sealed under the key of the remote."""
    identity = Identity("xxh3-128" if key is None else "blake3-128", key, 2**64 - 1)
    for master in (MASTER, None):
        data = encode_repository(**OWN, master=master, identity=identity)  # type: ignore[arg-type]
        assert open_remote(data, master, expected_id=recipe.OLD_REPOSITORY_ID).identity == identity
    with pytest.raises(DamagedRemote, match="not of"):
        open_remote(data, None, expected_id=recipe.REMOTE_ID)


def test_identities_differ_between_remotes_and_keys() -> None:
    """The derived identity depends on the master key and on the id of the remote."""
    found = {
        open_remote(
            encode_remote(remote_id=remote_id, master=master, block_size=4096, created_ns=5), master
        ).identity
        for remote_id in (recipe.REMOTE_ID, bytes(16))
        for master in (MASTER, MasterKey(bytes(32)))
    }
    assert len(found) == 4
    assert all(identity.key is not None and len(identity.key) == 32 for identity in found)


def test_sealing_cannot_be_turned_off() -> None:
    """A remote.json that says the remote is in clear is refused by a host that has a key."""
    forged = changed(
        written(sealed=True, own=False), sealed=False, naming_key="00" * 32, border_seed="00" * 8
    )
    assert open_remote(forged, None).sealer.sealed is False
    with pytest.raises(WrongKey, match="not sealed, but a key was given"):
        open_remote(forged, MASTER)
    with pytest.raises(WrongKey, match="a passphrase or key is needed"):
        open_remote(written(sealed=True, own=False), None)


def test_the_size_of_blocks_is_authentic() -> None:
    """Another block size, by which files would be put together wrongly, is refused."""
    with pytest.raises(DamagedRemote, match="check"):
        open_remote(changed(written(sealed=True, own=False), block_size=8192), MASTER)


def test_keys_in_clear_are_refused_where_none_belong() -> None:
    """A repository with an identity of its own has no second one in clear, and a sealed remote none at all."""
    in_clear = {"naming_key": "00" * 32, "border_seed": "00" * 8}
    with pytest.raises(DamagedRemote, match="contradict"):
        open_remote(changed(written(sealed=False, own=True), **in_clear), None)
    with pytest.raises(DamagedRemote, match="contradict"):
        open_remote(changed(written(sealed=True, own=False), **in_clear), MASTER)


@pytest.mark.parametrize(
    "fields",
    [
        {"block_size": 5000},
        {"block_size": 1 << 40},
        {"id": "ab"},
        {"hash": "md5"},
        {"hash": "xxh3-128"},
        {"naming_key": None},
        {"border_seed": "0"},
        {"identity": "AAAA"},
        {"naming_key": None, "border_seed": None, "identity": "AAAA"},
        {"naming_key": None, "border_seed": None, "identity": "%"},
        {"created_ns": -1},
        {"padding": "x" * 9000},
    ],
    ids=str,
)
def test_impossible_fields_are_refused(fields: dict[str, Any]) -> None:
    """Fields that contradict the page or each other are damage, whatever the check says."""
    with pytest.raises(DamagedRemote, match=r"remote\.json"):
        open_remote(changed(written(sealed=False, own=False), **fields), None)


def test_the_identity_of_another_hash_is_refused() -> None:
    """A repository's identity must fit the hash that its remote.json names."""
    with pytest.raises(DamagedRemote, match="another hash"):
        open_remote(changed(written(sealed=False, own=True), hash="blake3-128"), None)


def test_a_later_version_is_named() -> None:
    """A remote of a later version is no damage."""
    data = changed(written(sealed=False, own=False), version=2)
    for read in (is_sealed, read_remote_id, lambda data: open_remote(data, None)):
        with pytest.raises(UnsupportedFormat, match="version 2"):
            read(data)


@pytest.mark.parametrize(
    "fields",
    [
        {"block_size": 5000},
        {"remote_id": b"short"},
        {"created_ns": -1},
        {"identity": recipe.identity()},
        {"master": None},
        {"master": None, "identity": XXH3},
    ],
    ids=str,
)
def test_a_remote_that_no_reader_accepts_is_not_made(fields: dict[str, Any]) -> None:
    """Arguments outside of the limits are refused when the remote is made."""
    with pytest.raises(ValueError, match=r".+"):
        encode_remote(**{**TOP, "master": MASTER, **fields})


def test_secrets_are_not_shown() -> None:
    """Neither the identity nor an open remote shows its key or seed."""
    opened = open_remote(written(sealed=False, own=False), None)
    for text in (repr(opened), str(opened), repr(opened.identity), repr(opened.stored)):
        assert recipe.NAMING_KEY.hex() not in text
        assert str(recipe.BORDER_SEED) not in text
        assert f"{recipe.BORDER_SEED:x}" not in text
