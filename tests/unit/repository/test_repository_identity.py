"""Tests of a repository's identity, and of the configuration that has it."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.small_repository import BLOCK, content, make_snapshot, read_files
from support.stored import IDENTITIES, KEYED, SEED, SEEDED

from ciuic import __version__
from ciuic.repository import DamagedRepository, Identity, Repository, UnsupportedFormat
from ciuic.repository import pack_format as pf
from ciuic.repository.compression import Codec, Content
from ciuic.repository.config import decode_config, encode_config, new_config, read_config, repair_config
from ciuic.repository.identity import MissingHash
from ciuic.system.disk import Disk

_TOP = Path(__file__).parents[3]


def test_keyed_blake3_has_the_published_value() -> None:
    """An id is the first 16 bytes of keyed BLAKE3, as its authors' test vectors have it."""
    identity = Identity("blake3-128", b"whats the Elvish word for friend", 1)
    assert identity.chunk_id(b"").hex() == "92b2b75604ed3c761f9d6f62392c8a92"
    assert identity.chunk_id(b"\0").hex() == "6d7878dfff2f485635d39013278ae14f"


@given(data=st.binary(max_size=200).map(lambda data: data[: len(data) // 8 * 8]))
def test_an_id_depends_on_the_bytes_alone(data: bytes) -> None:
    """Bytes, bytearrays and memoryviews of any item have the same id."""
    for identity in (SEEDED, KEYED):
        wanted = identity.chunk_id(data)
        assert len(wanted) == 16
        views = [memoryview(bytearray(data)).cast(item) for item in ("B", "b", "c", "Q", "f")]
        for other in (bytearray(data), memoryview(data), *views):
            assert identity.chunk_id(other) == wanted


def test_ids_follow_from_the_secrets() -> None:
    """The key alone decides the ids of BLAKE3, the seed alone those of XXH3."""
    other_key = Identity("blake3-128", bytes(32), SEED)
    other_seed = Identity("blake3-128", KEYED.key, 0)
    assert other_key.chunk_id(b"same") != KEYED.chunk_id(b"same") == other_seed.chunk_id(b"same")
    assert Identity("xxh3-128", None, 0).chunk_id(b"same") != SEEDED.chunk_id(b"same")


def test_equal_identities_are_equal() -> None:
    """Identities are compared by hash, key and seed."""
    assert Identity("blake3-128", KEYED.key, SEED) == KEYED
    others = [SEEDED, Identity("blake3-128", bytes(32), SEED), Identity("blake3-128", KEYED.key, 1)]
    assert len({KEYED, Identity("blake3-128", KEYED.key, SEED), *others}) == 4


def test_secrets_are_not_shown() -> None:
    """Key and seed are not in the text that a log or traceback would have."""
    assert repr(KEYED) == "Identity('blake3-128')"


@pytest.mark.parametrize(
    ("hash_name", "key", "seed"),
    [
        ("blake3-128", None, 1),
        ("blake3-128", bytes(31), 1),
        ("blake3-128", bytes(33), 1),
        ("xxh3-128", bytes(32), 1),
        ("md5", None, 1),
        ("xxh3-128", None, -1),
        ("blake3-128", bytes(32), 1 << 64),
    ],
)
def test_impossible_identities_are_refused(hash_name: Any, key: bytes | None, seed: int) -> None:
    """A key of another length, or for a hash that takes none, and a seed of more than 64 bits are refused."""
    with pytest.raises(ValueError, match=r"key of 32 bytes|64 bits"):
        Identity(hash_name, key, seed)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package blake3 snapshots are listed, and whatever reads chunks says what to install."""
    with Repository.create(tmp_path / "r", identity=KEYED) as repository, repository.writer() as writer:
        make_snapshot(writer, "cs-000001", {})
    monkeypatch.setitem(sys.modules, "blake3", None)
    with Repository.open(tmp_path / "r") as repository:
        assert [info.id for info in repository.snapshots.list()] == ["cs-000001"]
        with pytest.raises(MissingHash) as caught:
            repository.chunks  # noqa: B018
    assert caught.value.hint == f"{sys.executable} -m pip install --upgrade ciuic"


def test_blake3_is_imported_for_its_repositories_alone(tmp_path: Path) -> None:
    """Storing and reading a repository of XXH3 does not import blake3."""
    code = (
        "import sys; from ciuic.repository import Repository\n"
        "with Repository.create(sys.argv[1]) as repository, repository.writer() as writer:\n"
        "    chunk = writer.put_chunk(b'x'); writer.flush(); repository.chunks.get(chunk)\n"
        "print('blake3' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "r")]
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd=_TOP).stdout == "False\n"


def test_a_repository_is_made_with_an_identity(tmp_path: Path) -> None:
    """`create` gives a keyed repository format 3; its identity is there when it is opened again."""
    for identity, version in ((KEYED, 3), (SEEDED, 1)):
        with Repository.create(tmp_path / identity.hash, identity=identity) as made:
            assert (made.config.format, made.identity) == (version, identity)
        with Repository.open(tmp_path / identity.hash) as repository:
            assert (repository.config.format, repository.identity) == (version, identity)
            assert repository.chunks.identity.chunk_id(b"x") == identity.chunk_id(b"x")
            assert repository.config_damage() == []


def test_repositories_of_one_identity_share_ids(tmp_path: Path) -> None:
    """Two repositories of one identity give a snapshot's content equal ids, trees included."""
    contents = []
    for name in ("a", "b"):
        with (
            Repository.create(tmp_path / name, block_size=BLOCK, identity=KEYED) as repository,
            repository.writer() as writer,
        ):
            files = {b"n%03d" % number: content(number % 7, 2) for number in range(300)}
            contents.append(make_snapshot(writer, "cs-000001", files).roots[0].entry.content)
    assert contents[0] == contents[1]


def test_format_3_is_not_raised(tmp_path: Path) -> None:
    """Planes and differences leave the format at 3, in both copies, and the configuration as it was."""
    with Repository.create(tmp_path / "r", block_size=BLOCK, identity=KEYED) as repository:
        before = [(repository.path / name).read_bytes() for name in ("config", "config.copy")]
        numbers = content(3, 1)
        with repository.writer() as writer:
            writer.put_chunks([Content(numbers, codec=Codec("planes", 4))])
            writer.flush()
        flags = {
            record.flags for pack in repository.packs() for record in repository.pack_records(pack.number)
        }
        assert pf.FLAG_PLANES in flags
        assert [(repository.path / name).read_bytes() for name in ("config", "config.copy")] == before
        assert repository.may_have_bases


def test_a_configuration_without_a_key_is_as_before() -> None:
    """The configuration of formats 1 and 2 has no field for a key, so that earlier versions of ciuic read it."""
    line = encode_config(new_config(None, 4096)).partition(b"\n")[0]
    assert list(json.loads(line)) == ["format", "id", "hash", "seed", "block_size", "created_ns"]


def test_a_damaged_copy_is_repaired_with_its_key(tmp_path: Path) -> None:
    """Either copy of the configuration brings back the other, key included."""
    with (
        Repository.create(tmp_path / "r", block_size=BLOCK, identity=KEYED) as repository,
        repository.writer() as writer,
    ):
        make_snapshot(writer, "cs-000001", {b"a": content(2, 3)})
    for name in ("config", "config.copy"):
        (tmp_path / "r" / name).write_bytes(b"garbage")
        assert repair_config(Disk(), str(tmp_path / "r")) == [name]
        with Repository.open(tmp_path / "r") as repository:
            assert repository.identity == KEYED
            assert read_files(repository, "cs-000001") == {b"a": content(2, 3)}


_KEY = "ab" * 32


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 3},
        {"format": 3, "hash": "blake3-128"},
        {"format": 3, "key": _KEY},
        {"format": 3, "hash": "blake3-128", "key": _KEY[:-2]},
        {"format": 3, "hash": "blake3-128", "key": _KEY + "00"},
        {"format": 3, "hash": "blake3-128", "key": "g" * 64},
        {"format": 3, "hash": "blake3-128", "key": " " + _KEY[:-1]},
        {"format": 3, "hash": "blake3-128", "key": 7},
        {"format": 3, "hash": "blake2", "key": _KEY},
        {"format": 1, "hash": "blake3-128", "key": _KEY},
        {"format": 2, "hash": "blake3-128", "key": _KEY},
        {"format": 1, "key": _KEY},
        {"format": 2, "key": _KEY},
        {"seed": "12 34 56 78 9a bc de f0"},
        {"seed": "\u0660" * 16},
        {"seed": "0x" + "12" * 7},
        {"id": "12" * 15},
    ],
)
def test_impossible_configurations_are_damage(changes: dict[str, object]) -> None:
    """A hash, key, seed or id that does not fit the format is damage, whatever the checksum says."""
    fields = json.loads(encode_config(new_config(None, 4096)).partition(b"\n")[0])
    body = json.dumps(fields | changes).encode()
    with pytest.raises(DamagedRepository, match="its content is invalid"):
        decode_config(body + b"\ncrc32 %08x\n" % zlib.crc32(body))


@pytest.mark.parametrize("identity", IDENTITIES)
def test_a_configuration_round_trips(identity: Identity | None) -> None:
    """A configuration is read as it was written."""
    config = new_config(identity, 65536)
    assert decode_config(encode_config(config)) == config


def test_a_later_format_is_named_as_such() -> None:
    """Format 4 is refused as a later format, not as damage, with the version that refuses it."""
    config = msgspec.structs.replace(new_config(KEYED, 4096), format=4)
    with pytest.raises(UnsupportedFormat, match="format 4; this ciuic reads formats up to 3") as refused:
        decode_config(encode_config(config))
    assert f"this is ciuic {__version__}: use the version that wrote it" in refused.value.hint


def test_a_pack_of_another_hash_is_damage(tmp_path: Path) -> None:
    """A pack whose header names another hash than the repository is reported."""
    with Repository.create(tmp_path / "r", block_size=BLOCK, identity=KEYED) as repository:
        with repository.writer() as writer:
            make_snapshot(writer, "cs-000001", {b"a": content(2, 3)})
        assert list(repository.scrub()) == []
        number = repository.packs()[0].number
        header = pf.PackHeader(number, repository.packs()[0].kind, bytes.fromhex(repository.id), "xxh3-128")
        with open(repository.pack_path(number), "r+b") as file:
            file.write(pf.encode_header(header))
        reasons = [damage.reason for damage in repository.scrub()]
    assert len(reasons) == 1
    assert "the header says xxh3-128, the repository blake3-128" in reasons[0]
    assert read_config(str(tmp_path / "r")).hash == "blake3-128"
