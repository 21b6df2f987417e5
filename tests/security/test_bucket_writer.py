"""A person who may write anything to the bucket, against the installed commands: nothing is lost, and every fault can be mended."""

from __future__ import annotations

import os
import re
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from support.cli_repository import Host
from support.remote_host import reading

from ciuic.cli.commands.web.reading import Catalogue
from ciuic.remote.access import open_remote
from ciuic.remote.documents import (
    LiveManifest,
    LogCommit,
    LogEntry,
    LogHello,
    LogState,
    StoredRound,
    decode_log_entry,
    decode_manifest,
    encode_log_entry,
    encode_manifest,
    encode_round,
    object_digest,
)
from ciuic.remote.log_reader import LogReader
from ciuic.remote.object_names import log_entry_name, manifest_name, new_hex_id, parse_manifest, round_name
from ciuic.remote.objects.opening import open_objects
from ciuic.remote.sealing.key_slots import read_key_file
from ciuic.repository.snapshot_format import decode_any_snapshot

REPAIR = "ciuic check --remote --repair"


class Bucket:
    """A remote in a directory with one snapshot each of two hosts; everything there is two days old."""

    def __init__(self, top: Path) -> None:
        self.top = top / "nas"
        self.victim, self.other = Host(top / "one"), Host(top / "two")
        for host in (self.victim, self.other):
            host.env["XDG_CACHE_HOME"] = str(host.top / "cache")
        url = f"file://{self.top}"
        self.victim.run("remote", "init", url)
        self.victim.snapshot_of(os.urandom(70_000))
        self.victim.run("remote", "upload", "--once")
        (self.log,) = (self.top / "w").iterdir()
        self.other.run("remote", "join", url, "--open-with", str(self.victim.key_file))
        self.other.snapshot_of(os.urandom(70_000))
        self.other.run("remote", "upload", "--once")
        self.age()
        self.stored = self.content()

    def age(self) -> None:
        then = time.time() - 2 * 86_400
        for path in self.top.rglob("*"):
            if path.is_file() and not path.is_symlink():
                os.utime(path, (then, then))

    def content(self) -> set[Path]:
        """Return the packs and manifests that are there."""
        return {
            path for part in ("packs", "manifests") for path in (self.top / part).rglob("*") if path.is_file()
        }

    @property
    def last(self) -> Path:
        """The last entry of the victim's log."""
        return max(self.log.iterdir())

    def assert_whole(self) -> None:
        """Assert that both hosts list and verify both snapshots, collect, and upload, and that nothing was lost."""
        for host in (self.victim, self.other):
            host.run("remote", "upload", "--once")
            assert host.json("prune", "--remote")["freed_bytes"] == 0
            assert len(host.json("list", "--all-hosts")["snapshots"]) == 2
            assert host.json("verify", "--remote", "--checksum")["damaged"] is False
        assert self.stored <= self.content()


@pytest.fixture(scope="module")
def built(run_dir: Path) -> Iterator[Bucket]:
    place = run_dir / "bucket"
    place.mkdir()
    made = Bucket(place)
    shutil.copytree(place, run_dir / "bucket.built", symlinks=True)
    yield made
    shutil.rmtree(place)
    shutil.rmtree(run_dir / "bucket.built")


@pytest.fixture
def bucket(built: Bucket) -> Bucket:
    """Return the bucket and its hosts as they were built."""
    place = built.top.parent
    shutil.rmtree(place)
    shutil.copytree(f"{place}.built", place, symlinks=True)
    return built


def page(path: Path) -> None:
    path.write_bytes(b"<!DOCTYPE html><html>sign in</html>")


def oversized(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(65 << 20)


def after_all_others(path: Path) -> None:
    (path.parent / "9999999999").write_bytes(b"x" * 400)


@pytest.mark.parametrize(
    "plant",
    [
        page,
        pytest.param(oversized, marks=pytest.mark.full),
        pytest.param(after_all_others, marks=pytest.mark.full),
    ],
)
def test_an_unreadable_entry_stops_only_deletion_until_it_is_mended(
    bucket: Bucket, plant: Callable[[Path], None]
) -> None:
    """Damage of a log is told by readers, refused by a collection, and mended, whatever it consists of."""
    plant(bucket.last)
    assert REPAIR in bucket.other.fails("list", "--all-hosts", code=4)
    assert REPAIR in bucket.other.fails("prune", "--remote", code=4)
    bucket.victim.run("remote", "upload", "--once")
    report = bucket.other.json("check", "--remote", "--repair")
    # Not information: the victim has begun another log, so that two upload its repository until the old one is retired.
    damages = [finding for finding in report["findings"] if finding["severity"] != "info"]
    assert damages
    assert all(finding["repaired"] for finding in damages), damages
    bucket.assert_whole()


@pytest.mark.parametrize(
    "kind", ["pipe", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("link", "directory"))]
)
def test_a_name_that_is_no_file_ends_an_upload_with_its_name(bucket: Bucket, kind: str) -> None:
    """What lies in place of an entry in a directory is damage by name; an upload does not wait for it."""
    last = bucket.last
    last.unlink()
    if kind == "pipe":
        os.mkfifo(last)
    elif kind == "link":
        last.symlink_to("/etc/passwd")
    else:
        last.mkdir()
    said = bucket.victim.fails("remote", "upload", "--once", code=4)
    assert last.name in said
    assert "no regular file" in said
    assert bucket.stored == bucket.content()


def test_a_deleted_log_is_damage_and_is_committed_again(bucket: Bucket) -> None:
    """Without the log of one writer nothing is deleted, its snapshot is missed, and a repair brings it back."""
    shutil.rmtree(bucket.log)
    assert "its writer, is gone" in bucket.other.fails("list", "--all-hosts", code=4)
    assert "nothing was deleted" in bucket.other.fails("prune", "--remote", code=4)
    assert bucket.content() == bucket.stored
    assert bucket.other.json("check", "--remote", expect=4)["damaged"]
    bucket.other.run("check", "--remote", "--repair")
    assert len(bucket.other.json("list", "--all-hosts")["snapshots"]) == 2


def test_a_log_that_was_cut_locks_its_host_out_only_until_it_is_told_to_go_on(bucket: Bucket) -> None:
    """A host that remembers more of a log than is there names what to remove; then everything is there again."""
    bucket.other.run("list", "--all-hosts")
    bucket.last.unlink()
    assert b"older than it was" in bucket.other.run("remote", "upload", "--once").stdout
    for host, command in (
        (bucket.victim, ("remote", "upload", "--once")),
        (bucket.other, ("list", "--all-hosts")),
    ):
        said = host.fails(*command, code=4)
        assert "the remote is older than it was" in said
        (memory,) = re.findall("remove ([^,]*),", said)
        assert Path(memory).is_relative_to(host.top)
        shutil.rmtree(memory)
    bucket.other.run("check", "--remote", "--repair")
    bucket.assert_whole()


def test_logs_that_are_all_gone_delete_nothing(bucket: Bucket) -> None:
    """A bucket without any log, as an empty listing shows it, is a refusal."""
    shutil.rmtree(bucket.top / "w")
    assert "nothing was deleted" in bucket.other.fails("prune", "--remote", code=4)
    assert bucket.content() == bucket.stored


def test_planted_keys_lock_nobody_out(bucket: Bucket) -> None:
    """Junk, pages and oversized objects below keys/ are passed over, named, and removable."""
    keys = bucket.top / "keys"
    for number in range(40):
        (keys / f"a{number}").write_bytes(b"{}")
    page(keys / "0page")
    oversized(keys / "0huge")
    (keys / "a\x1b[31m\nname").write_bytes(b"x")
    bucket.victim.run("remote", "upload", "--once")
    said = bucket.other.run("check", "--remote", expect=4)
    assert b"ciuic remote keys remove 0huge" in said.stdout
    assert b"\x1b" not in said.stdout + said.stderr
    bucket.other.run("remote", "keys", "remove", "-y", "0huge")
    assert not (keys / "0huge").exists()
    bucket.assert_whole()


@pytest.mark.parametrize(
    "name",
    [
        "0000000000",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("0000000005.done", "0000000000.final", "9999999999")
        ),
    ],
)
def test_a_planted_round_is_mended(bucket: Bucket, name: str) -> None:
    """An unreadable object of a collection's round keeps nobody from reading, and a repair lets uploads go on."""
    rounds = bucket.top / "gc"
    rounds.mkdir(exist_ok=True)
    (rounds / name).write_bytes(b"junk")
    assert len(bucket.other.json("list", "--all-hosts")["snapshots"]) == 2
    assert bucket.other.json("verify", "--remote", "--checksum")["damaged"] is False
    assert "gc/" in bucket.victim.fails("prune", "--remote", code=4)
    assert REPAIR in bucket.victim.run("check", "--remote", expect=4).stdout.decode()
    bucket.other.run("check", "--remote", "--repair")
    bucket.assert_whole()


class _Forger:
    """A writer of the bucket with the key of a host, and a log of its own."""

    def __init__(self, bucket: Bucket) -> None:
        self.remote = open_remote(
            open_objects(f"file://{bucket.top}"), [read_key_file(str(bucket.victim.key_file))]
        )
        logs = [(log.name, sorted(log.iterdir())) for log in (bucket.top / "w").iterdir()]
        entries = {
            writer: [
                decode_log_entry(self.remote.sealer, writer, int(one.name), one.read_bytes()) for one in names
            ]
            for writer, names in logs
        }
        self.commit = {
            writer: next(one for one in found if isinstance(one, LogCommit))
            for writer, found in entries.items()
        }
        self.victims = self.commit[bucket.log.name]
        (self.own,) = (one for writer, one in self.commit.items() if writer != bucket.log.name)
        self._writer, self._number, self._nonce = new_hex_id(), 0, new_hex_id()
        self._add(LogHello(nonce=self._nonce, host="evil", repository=self.own.repository))

    def _add(self, entry: LogEntry) -> None:
        data = encode_log_entry(self.remote.sealer, self._writer, self._number, entry)
        self.remote.objects.put(log_entry_name(self._writer, self._number), [data])
        self._number += 1

    def snapshot(self, name: str, **fields: Any) -> None:
        """Commit a snapshot that is another host's with these fields, in whatever words a reader may find."""
        sealer = self.remote.sealer
        manifest = decode_manifest(sealer, self.own.manifest, self.remote.objects.get(self.own.manifest))
        stored = decode_any_snapshot(manifest.snapshot)
        content = {key: getattr(stored, key) for key in stored.__struct_fields__} | fields
        payload = msgspec.msgpack.encode(content)
        head = struct.pack("<8sIQ16s", b"CIUICSNP", 1, len(payload), bytes(16))
        file = head[:-16] + xxhash.xxh3_128_digest(head + payload) + payload
        data = encode_manifest(sealer, name, msgspec.structs.replace(manifest, snapshot=file))
        self.remote.objects.put(name, [data])
        self._add(
            msgspec.structs.replace(
                self.own, nonce=self._nonce, snapshot=content["id"], manifest=name, digest=object_digest(data)
            )
        )

    def round(self, number: int) -> Path:
        """Begin a round of a collection that never was; return its file."""
        data = encode_round(self.remote.sealer, number, "begun", StoredRound(nonce=self._nonce))
        self.remote.objects.put(round_name(number, "begun"), [data])
        return Path(self.remote.objects.url.removeprefix("file://")) / round_name(number, "begun")

    def missing(self, count: int) -> None:
        """Commit snapshots of which there are no manifests."""
        live = tuple(
            LiveManifest(
                self.own.repository,
                f"cs-{number:012x}",
                manifest_name(job="files", epoch=None, step=None, host="h"),
                "0" * 64,
            )
            for number in range(count)
        )
        self._add(LogState(nonce=self._nonce, live=live, removed=()))


@pytest.mark.parametrize("number", [1, pytest.param(9_999_999_999, marks=pytest.mark.full)])
def test_a_round_made_up_with_a_key_is_said_how_to_be_deleted(bucket: Bucket, number: int) -> None:
    """Rounds before it seem to be lost, and nobody goes on: what to delete in the store is said, and mends it."""
    made_up = _Forger(bucket).round(number)
    for words in (("remote", "upload", "--once"), ("check", "--remote", "--repair")):
        said = bucket.victim.fails(*words, code=4)
        assert "made up the later objects below gc/" in said
        assert "delete these objects in the store" in said
    assert bucket.stored <= bucket.content()
    made_up.unlink()
    # As the next error says: this host has taken the word of that round for it that those before it had ended.
    shutil.rmtree(bucket.victim.env["XDG_CACHE_HOME"], ignore_errors=True)
    bucket.assert_whole()


def test_no_forged_name_hides_a_snapshot(bucket: Bucket) -> None:
    """A snapshot is listed and can be named, also where another writer's manifest has its id, its host and its random part."""
    forger = _Forger(bucket)
    victims = forger.victims
    name = parse_manifest(victims.manifest)
    assert name is not None
    for job, random in (("files", name.random[:8] + "f" * 24), ("other", name.random)):
        made = manifest_name(job=job, epoch=None, step=None, host=name.host, random=random)
        forger.snapshot(made, id=victims.snapshot, message=job)
    listed = [one["id"] for one in bucket.other.json("list", "--all-hosts")["snapshots"]]
    assert len(listed) == len(set(listed)) == 4
    roots = {
        bucket.other.json("--repo", f"file://{bucket.top}", "show", one)["roots"][0]["path"] for one in listed
    }
    assert str(bucket.victim.top / "root") in roots


def test_snapshots_of_one_id_are_searched_on_the_page(bucket: Bucket) -> None:
    """Snapshots of two hosts with one id do not end the searches of `ciuic web --repo URL`."""
    with reading(_Forger(bucket).remote, bucket.top.parent / "cache") as opened:
        names = set(opened.snapshots.ids())
        assert all("~" in name for name in names)
        found = Catalogue().loaded(opened.repository_of(opened.snapshots.ids()))
    assert {snapshot.id for snapshot in found} == names


def test_texts_of_a_forged_snapshot_are_shown_on_their_line(bucket: Bucket) -> None:
    """No text that a snapshot file has gets to a terminal as control characters, whatever its field."""
    forger = _Forger(bucket)
    bad = "\x1b]0;title\x07\nx|y\r\u202e"
    id_ = "cs-" + "e" * 32
    name = manifest_name(job=bad, epoch=None, step=None, host=bad)
    root = {"path": b"/" + bad.encode(), "entry": [b"", 0o40755], "session": bad, "excludes_digest": bad}
    pair = {"of": "training", "repository": f"/{bad}", "roots": [bad], "problem": bad}
    left_out = [{"path": root["path"], "reason": bad}]
    forger.snapshot(
        name, id=id_, host=bad, message=bad, parent=bad, tags=[bad, "partial", "paired"], roots=[root], pair=pair,
        left_out=left_out, incomplete=[root["path"]],
    )  # fmt: skip
    url = f"file://{bucket.top}"
    for words in (["show", id_], ["list"], ["verify", id_], ["fleet", "verify"], ["find", "*"], ["stats"]):
        done = bucket.other.run("--repo", url, *words, expect=None)
        assert done.returncode in (0, 4, 8)
        text = (done.stdout + done.stderr).decode()
        assert all(character.isprintable() or character == "\n" for character in text), words
        assert "\nx|y" not in text
    lines = bucket.other.run("--repo", url, "list", "--machine-readable").stdout.decode().splitlines()
    assert all(re.fullmatch(r"[^|]+\|[-0-9]{10} [:0-9]{8}\|[0-9]+", line) for line in lines)
    assert len(lines) == 3


@pytest.mark.parametrize("field", ["roots", "tags", "left_out", "incomplete", "set_member", "pair", "xattrs"])
def test_a_snapshot_of_any_number_of_items_is_refused_as_it_is_read(bucket: Bucket, field: str) -> None:
    """Small items by the million, which would take many times their bytes, make one snapshot unreadable and no other one."""
    forger = _Forger(bucket)
    many = 40_000
    attributes = [0o40755, *[0] * 10, b"", 0, b"", [[b"user.a", b""]] * many]
    fields: dict[str, Any] = {
        "roots": {"roots": [{"path": b"/a", "entry": [b"", 0o40755]}] * many},
        "tags": {"tags": [""] * many},
        "left_out": {"left_out": [{"path": b"/a"}] * many},
        "incomplete": {"incomplete": [b""] * many},
        "set_member": {
            "set_member": {"id": "1" * 32, "name": "night", "member": "a", "members": ["a"] * many}
        },
        "pair": {"pair": {"of": "filesystem", "roots": [""] * many}},
        "xattrs": {"roots": [{"path": b"/a", "entry": [b"", *attributes]}]},
    }
    name = manifest_name(job="files", epoch=None, step=None, host="evil")
    forger.snapshot(name, id="cs-" + "e" * 32, **fields[field])
    done = bucket.other.run("list", "--all-hosts", "--machine-readable")
    assert len(done.stdout.splitlines()) == 2
    # Of the decoder, before the items are made.
    assert b"Expected `array` of length <= " in done.stderr


def test_missing_manifests_cost_one_look_at_the_logs(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs are read once more for all manifests that are missing together, which are named as damage."""
    forger = _Forger(bucket)
    forger.missing(50)
    refreshed = 0
    refresh = LogReader.refresh

    def counted(self: LogReader) -> Any:
        nonlocal refreshed
        refreshed += 1
        return refresh(self)

    with reading(forger.remote, bucket.top.parent / "cache") as opened:
        monkeypatch.setattr(LogReader, "refresh", counted)
        loaded, unreadable = opened.snapshots.load_all()
    assert (len(loaded), len(unreadable), refreshed) == (2, 50, 1)
    assert all("is missing in the remote" in one.reason for one in unreadable)
