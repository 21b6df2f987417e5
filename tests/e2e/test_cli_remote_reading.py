"""The installed command reads a remote on a machine that never saw the host."""

from __future__ import annotations

import json
import os
import pty
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import trees
from support.live import Commands
from support.remote_host import Elsewhere, RemoteHost, new_remote
from support.restoring import write

from ciuic.remote.access import add_slot
from ciuic.remote.objects.opening import open_objects
from ciuic.remote.sealing.key_slots import make_key_file, passphrase_secret
from ciuic.system.poll import readable
from ciuic.types import Snapshot

PASSPHRASE = "four words for tests"


class Uploaded:
    """Two hosts, one with an identity of its own, and their snapshots."""

    def __init__(self, place: Path) -> None:
        self.url = f"file://{place}/nas"
        remote = new_remote(open_objects(self.url, make=True))
        add_slot(remote, "people", passphrase_secret(PASSPHRASE))
        self.key_file = place / "key"
        add_slot(remote, "file", make_key_file(str(self.key_file)))
        self.host = RemoteHost(place / "alpha", remote, name="alpha")
        write(self.host.root / "model", random.Random(1).randbytes(300_000))
        write(self.host.root / "deep" / "log", b"line\n" * 5000)
        os.link(self.host.root / "model", self.host.root / "deep" / "same")
        self.first_manifest = trees.manifest(self.host.root)
        self.first: Snapshot = self.host.snapshot()
        write(self.host.root / "deep" / "log", b"another\n")
        self.second: Snapshot = self.host.snapshot()
        self.host.upload()
        old = RemoteHost(place / "old", remote, name="old", own_identity=True)
        write(old.root / "note", b"of an older repository")
        self.old_root = old.root
        self.old: Snapshot = old.snapshot()
        old.upload()
        for host in (self.host, old):
            shutil.rmtree(host.repository.path)


@pytest.fixture(scope="module")
def uploaded(tmp_path_factory: pytest.TempPathFactory) -> Uploaded:
    """Return a remote that no test changes."""
    return Uploaded(tmp_path_factory.mktemp("uploaded"))


@pytest.fixture
def elsewhere(tmp_path: Path, uploaded: Uploaded) -> Elsewhere:
    # The file, which costs no argon2id for each command.
    return Elsewhere(tmp_path, uploaded.url, {"CIUIC_REMOTE_KEY_FILE": str(uploaded.key_file)})


def test_everything_that_reads_works(uploaded: Uploaded, elsewhere: Elsewhere, tmp_path: Path) -> None:
    """List, show, diff, verify, export and restore give what the host had, with nothing but the URL and the key."""
    first, second, root = uploaded.first, uploaded.second, uploaded.host.root
    lines = elsewhere.run("list", "--machine-readable").splitlines()
    assert [line.split("|")[0] for line in lines] == [uploaded.old.id, second.id, first.id]
    listed = json.loads(elsewhere.run("list", "--json"))
    assert (listed["repository"], len(listed["snapshots"])) == (uploaded.url, 3)
    assert "HOST" in elsewhere.run("list")
    space = json.loads(elsewhere.run("stats", first.id, second.id, "--json"))
    assert space["together_frees_bytes"] > max(one["frees_bytes"] for one in space["snapshots"]) > 0
    assert first.id in elsewhere.run("show", first.id)
    assert "note" in elsewhere.run("show", "latest", str(uploaded.old_root))
    assert elsewhere.run("diff", first.id, second.id).split("\n")[0].startswith(f"M {root}/deep/log")
    assert "every byte is right" in elsewhere.run("verify", "--all", "--checksum")
    assert "everything is there" in elsewhere.run("verify", first.id, uploaded.old.id)
    for form in ("git-lfs", "dvc"):
        words = ("-p", str(root), "--as", form, str(tmp_path / form), "--json")
        assert json.loads(elsewhere.run("export", first.id, *words))["files"] == 3
        # What the first export has written is known by its content.
        assert json.loads(elsewhere.run("export", second.id, *words))["written_bytes"] == len(b"another\n")
    assert (tmp_path / "git-lfs/deep/log").read_bytes() == b"another\n"
    elsewhere.run("restore", "-s", first.id, "-p", str(root), "-d", str(tmp_path / "there"))
    trees.assert_same(uploaded.first_manifest, trees.manifest(tmp_path / "there" / "root"))
    # The root itself is as at the second snapshot: an interrupted restore would go on just so.
    elsewhere.run("restore", "-s", first.id, "-p", str(root), "--overwrite=if-changed")
    trees.assert_same(uploaded.first_manifest, trees.manifest(root))


def test_one_host_is_chosen(uploaded: Uploaded, elsewhere: Elsewhere) -> None:
    """--as-host restricts everything to one host, and a host without snapshots is named as such."""
    listed = elsewhere.run("list", "--machine-readable", "--as-host", "old")
    assert [line.split("|")[0] for line in listed.splitlines()] == [uploaded.old.id]
    assert uploaded.second.id in elsewhere.run("show", "latest", "--as-host", "alpha")
    assert uploaded.second.id in elsewhere.run("show", "alpha/latest")
    assert "hosts there are: alpha, old" in elsewhere.run("list", "--as-host", "gamma", code=3)
    assert "name chunks differently" in elsewhere.run("diff", uploaded.first.id, uploaded.old.id, code=2)


def test_what_writes_is_refused(uploaded: Uploaded, elsewhere: Elsewhere) -> None:
    """Commands that need a repository on this host say so."""
    for arguments in (
        ("hold", uploaded.first.id),
        ("release", uploaded.first.id),
        ("verify", "--checksum", "--max-duration", "1m"),
    ):
        assert "needs a repository on this host" in elsewhere.run(*arguments, code=2)


def test_secrets_come_from_the_environment(uploaded: Uploaded, elsewhere: Elsewhere) -> None:
    """A passphrase opens the remote as the key file does; a wrong one and none are refused."""
    elsewhere.secrets = {"CIUIC_REMOTE_PASSPHRASE": PASSPHRASE}
    assert uploaded.first.id in elsewhere.run("list", "--machine-readable")
    elsewhere.secrets = {}
    assert "a passphrase or key is needed" in elsewhere.run("list", code=7)
    elsewhere.secrets = {"CIUIC_REMOTE_PASSPHRASE": "another"}
    elsewhere.run("list", code=7)


def test_a_passphrase_is_asked_for(uploaded: Uploaded, elsewhere: Elsewhere) -> None:
    """On a terminal the passphrase is asked for, and not shown."""
    ours, theirs = pty.openpty()
    asking = subprocess.Popen(
        # With the terminal as its controlling one, which the question goes to.
        [
            "setsid",
            "--ctty",
            sys.executable,
            "-m",
            "ciuic",
            "--repo",
            uploaded.url,
            "list",
            "--machine-readable",
        ],
        env=elsewhere.environment,
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    os.close(theirs)
    try:
        shown = b""
        # Typed before the question it would be discarded with what else was typed ahead (getpass).
        while b": " not in shown:
            assert readable(ours, 60)
            shown += os.read(ours, 1000)
        assert shown.startswith(b"passphrase or recovery key of file://")
        os.write(ours, PASSPHRASE.encode() + b"\n")
        output, _ = asking.communicate(timeout=60)
        assert PASSPHRASE.encode() not in os.read(ours, 1000)
    finally:
        asking.kill()
        asking.wait()
        os.close(ours)
    assert uploaded.first.id in output.decode()


def test_a_place_without_a_remote_is_named(tmp_path: Path, elsewhere: Elsewhere) -> None:
    """An empty directory, a missing one and an impossible URL are refused with words."""
    (tmp_path / "empty").mkdir()
    elsewhere.url = f"file://{tmp_path}/empty"
    assert "there is no remote" in elsewhere.run("list", code=3)
    elsewhere.url = f"file://{tmp_path}/missing"
    assert elsewhere.start("list").returncode != 0
    elsewhere.url = "ftp://host/path"
    assert "scheme" in elsewhere.run("list", code=2)


def test_the_url_may_stand_in_the_environment(uploaded: Uploaded, elsewhere: Elsewhere) -> None:
    """CIUIC_REPO names a remote as --repo does."""
    env = elsewhere.environment | elsewhere.secrets | {"CIUIC_REPO": uploaded.url}
    assert uploaded.first.id in Commands.run("list", "--machine-readable", env=env).stdout


def test_the_configured_remote_shows_all_hosts(uploaded: Uploaded, elsewhere: Elsewhere) -> None:
    """`list --all-hosts` reads the remote of the configuration, with the key that it names."""
    config = elsewhere.home / "ciuic.toml"
    config.write_text(f'[remote]\nurl = "{uploaded.url}"\nkey_file = "{uploaded.key_file}"\n')
    words = ("list", "--all-hosts", "--machine-readable")
    done = Commands.run("--config", str(config), *words, env=elsewhere.environment)
    assert done.returncode == 0, done.stderr
    assert {line.split("|")[0] for line in done.stdout.splitlines()} == {
        uploaded.first.id,
        uploaded.second.id,
        uploaded.old.id,
    }
