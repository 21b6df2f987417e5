"""Tests of docs/remote-format.md: a reader written from that page alone, and known answers."""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec
import pytest
from support import format_page as page
from support import remote_recipe as recipe

from ciuic.remote import documents, object_names
from ciuic.remote.documents import decode_round
from ciuic.remote.pack import RemotePackReader
from ciuic.remote.sealing import key_slots
from ciuic.remote.sealing.key_slots import SlotKind, SlotSecret
from ciuic.remote.sealing.sealer import MasterKey
from ciuic.repository.identity import Identity

KINDS = ("sealed", "clear")


def stored(kind: str) -> dict[str, bytes]:
    """Return the stored objects by their names."""
    top = recipe.VECTORS / kind
    return {path.relative_to(top).as_posix(): path.read_bytes() for path in top.rglob("*") if path.is_file()}


def page_remote(kind: str, below: str = "") -> page.PageRemote:
    return page.PageRemote(recipe.VECTORS / kind / below, recipe.MASTER if kind == "sealed" else None)


@pytest.mark.parametrize("kind", KINDS)
def test_writers_give_the_known_answers(kind: str) -> None:
    """Each writer gives byte for byte the object that was stored when this version was made."""
    found = recipe.objects(sealed=kind == "sealed")
    known = stored(kind)
    assert found.keys() == known.keys()
    assert [name for name in known if found[name] != known[name]] == []


def test_the_reader_of_the_page_knows_nothing_of_ciuic() -> None:
    """The reader imports no module of ciuic, so that it proves the page."""
    tree = ast.parse(Path(page.__file__).read_text())
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] + [getattr(node, "module", "") or ""])
    }
    assert imported
    assert not any(name.startswith(("ciuic", "support")) for name in imported)


@pytest.mark.parametrize("kind", ["key-file", "command", "recovery"])
def test_the_page_names_the_slot_of_a_key(kind: SlotKind) -> None:
    """The digits at the end of a host's slot are those that the page derives from the key."""
    info = b"ciuic key slot name v1 " + kind.encode()
    digits = page.hkdf(recipe.KEY_FILE, recipe.REMOTE_ID, info)[:6].hex()
    secret = SlotSecret(kind, recipe.KEY_FILE)
    assert key_slots.own_slot(recipe.REMOTE_ID, secret, "Node_7.example") == f"host-node-7-example-{digits}"


def test_the_page_opens_every_key_slot() -> None:
    """A passphrase in either normal form, a key file, a command's output and a recovery key open their slots."""
    top = recipe.VECTORS / "sealed" / "keys"
    decomposed = recipe.PASSPHRASE.replace("ü", "u\u0308").replace("Ä", "A\u0308")
    typed = recipe.RECOVERY_TEXT.lower().replace("-", " ").replace("0", "o").replace("1", "l")
    for slot, secret in {
        "main": recipe.PASSPHRASE,
        "file": page.key_text(recipe.KEY_FILE.hex().encode() + b"\n"),
        "kms": recipe.COMMAND_KEY,
        "paper": page.recovery_key(typed),
    }.items():
        found = page.master_key(slot, (top / slot).read_bytes(), recipe.REMOTE_ID, secret)
        assert found == recipe.MASTER, slot
    assert decomposed != recipe.PASSPHRASE
    assert page.master_key("main", (top / "main").read_bytes(), recipe.REMOTE_ID, decomposed) == recipe.MASTER


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_finds_the_identity(kind: str) -> None:
    """The page's reader has the identity of the remote, and that of a repository of its own."""
    remote = page_remote(kind)
    assert (remote.config["block_size"], remote.config["created_ns"]) == (recipe.BLOCK, recipe.TIME_NS)
    data = (recipe.VECTORS / kind / "remote.json").read_bytes()
    opened = documents.open_remote(data, MasterKey(recipe.MASTER) if kind == "sealed" else None)
    assert opened.identity == Identity("blake3-128", remote.naming_key, remote.border_seed)
    if kind == "clear":
        assert opened.identity == recipe.identity()
    own = page_remote(kind, f"repositories/{recipe.OLD_REPOSITORY_ID.hex()}")
    assert (own.naming_key, own.border_seed) == (None, recipe.OLD_SEED)
    assert [id_ for id_, _ in own.pack(recipe.DATA_PACK)] == [recipe.chunk_id(1)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_reads_packs(kind: str) -> None:
    """Every record comes out of its pack with lengths, flags and base."""
    remote = page_remote(kind)
    assert sorted(remote.pack_refs()) == sorted([recipe.DATA_PACK, recipe.META_PACK])
    for ref, records in ((recipe.DATA_PACK, recipe.DATA_RECORDS), (recipe.META_PACK, recipe.META_RECORDS)):
        for (id_, chunk), expected in zip(remote.pack(ref), records, strict=True):
            assert (id_, chunk.length, chunk.flags, chunk.base) == (
                expected.id,
                expected.raw_bytes,
                expected.flags,
                expected.base,
            )
    numbers = {recipe.chunk_id(number): number for number in range(10)}
    for id_, chunk in remote.chunks().items():
        assert chunk.payload == recipe.chunk(numbers[id_], len(chunk.payload))


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_reads_logs_manifests_and_rounds(kind: str) -> None:
    """The page's reader finds the snapshot that the logs commit, its manifest and the round."""
    remote = page_remote(kind)
    assert remote.writers() == [recipe.WRITER, recipe.RETIRED_WRITER]
    kinds = [entry["kind"] for writer in remote.writers() for entry in remote.log(writer)]
    assert kinds == ["hello", "commit", "fence", "remove", "state", "retired"]
    assert remote.log(recipe.WRITER)[1]["packs"] == [recipe.META_PACK, recipe.DATA_PACK]
    ((name, digest),) = remote.snapshots().items()
    assert name == recipe.MANIFEST
    found = remote.manifest(name, digest)
    assert (found["snapshot"], found["marks"]) == (recipe.SNAPSHOT_FILE, recipe.MARKS_FILE)
    assert (found["job"], found["host"], found["epoch"], found["step"]) == (
        "große job",
        "..node-1",
        3,
        12000,
    )
    assert remote.round(0, "")["manifests"] == [recipe.MANIFEST]
    assert remote.round(0, ".final") == remote.round(0, "")
    assert remote.round(0, ".done")["condemned"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_reads_the_status_of_a_host(kind: str) -> None:
    """The key that signs a status is the one that its name is made from, and all fields are as the page names them."""
    found = page_remote(kind).status(recipe.STATUS_KEY.reporter)
    assert found == msgspec.json.decode(msgspec.json.encode(recipe.STATUS))
    text = (Path(__file__).parents[2] / "docs/remote-format.md").read_text()
    assert [name for name in found if f"| `{name}` |" not in text] == []


@pytest.mark.parametrize("kind", KINDS)
def test_ciuic_reads_the_known_answers(kind: str) -> None:
    """The stored objects of this version are read by every later ciuic."""
    known = stored(kind)
    master = None
    if kind == "sealed":
        remote_id = documents.read_remote_id(known["remote.json"])
        for slot, secret in recipe.secrets().items():
            decoded = key_slots.decode_slot(slot, known[object_names.slot_name(slot)])
            master = key_slots.unwrap_master_key(decoded, remote_id, secret)
            assert master.reveal() == recipe.MASTER
    remote = documents.open_remote(known["remote.json"], master)
    sealer = remote.sealer
    data = known[recipe.MANIFEST]
    digest = documents.object_digest(data)
    for number, entry in enumerate(recipe.entries(digest)):
        name = object_names.log_entry_name(recipe.WRITER, number)
        assert documents.decode_log_entry(sealer, recipe.WRITER, number, known[name]) == entry
    assert documents.decode_manifest(sealer, recipe.MANIFEST, data).snapshot == recipe.SNAPSHOT_FILE
    assert decode_round(sealer, 0, "final", known["gc/0000000000.final"]).manifests == (recipe.MANIFEST,)
    records = RemotePackReader(sealer, recipe.META_PACK).check(
        known[object_names.pack_name(recipe.META_PACK)]
    )
    assert [record.id for record in records] == [record.id for record in recipe.META_RECORDS]
