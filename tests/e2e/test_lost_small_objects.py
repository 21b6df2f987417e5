"""Each kind of object of a remote, lost: nothing goes that is then nowhere, and the command of the table brings it back (docs/remote.md)."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from support.cli_repository import Host, MadeHost
from support.live import module_tmp

from ciuic.repository import Repository

__all__ = ["module_tmp"]

_REPAIR: Final = ("check", "--remote", "--repair")
_UPLOAD: Final = ("remote", "upload", "--once")
_ADD_KEY: Final = ("remote", "keys", "add", "--key-file")
_FORGET: Final = ("forget what this host remembers, as the refusal says",)


class Loss(NamedTuple):
    """Loss of an object."""

    place: str
    """Where it is: a pattern, of which the last match that the host itself made is deleted."""
    verify: int = 0
    """Exit code of verify on a machine that never read the remote."""
    upload: int = 0
    """Exit code of the next upload."""
    says: str = ""
    """Part of what an upload that refuses says."""
    heals: tuple[tuple[str, ...], ...] = ()
    """Commands that bring it back where no upload does."""
    lacks: str = ""
    """Part of what prune says of the remote, for which it then keeps everything."""


KINDS: Final = {
    "identity": Loss(
        "remote.json",
        4,
        4,
        "ciuic remote repair-identity",
        (("remote", "repair-identity"),),
        "the remote has no object remote.json",
    ),
    "key slot": Loss("keys/host", 7, 7, "its recovery key opens it", (_ADD_KEY,)),
    "recovery slot": Loss("keys/recovery", heals=(("remote", "keys", "add", "--recovery"),)),
    "last entry of a log": Loss(
        "w/*/*", 4, 4, "ciuic check --remote --repair", (_FORGET, _REPAIR), "the remote is older than it was"
    ),
    "log": Loss(
        "w/*", 4, 4, "ciuic check --remote --repair", (_FORGET, _REPAIR), "the remote is older than it was"
    ),
    "manifest": Loss("manifests/*/*/*", 4, lacks="it lacks 1 manifest that it had"),
    "data pack": Loss("packs/data/*/*", 4, lacks="it lacks 1 pack that it had"),
    "meta pack": Loss("packs/meta/*/*", 4, lacks="it lacks 1 pack that it had"),
    "beginning of a round": Loss("gc/0000000000", heals=(_REPAIR,)),
    "decision of a round": Loss("gc/0000000000.final", heals=(_REPAIR,)),
    "end of a round": Loss(
        "gc/0000000000.done", 0, 4, "the remote is older than it was", (("prune", "--remote"),)
    ),
    "status": Loss("status/*"),
}


def _age(nas: Path) -> None:
    then = time.time() - 2 * 86_400
    for path in nas.rglob("*"):
        os.utime(path, (then, then))


@pytest.fixture(scope="module")
def made(module_tmp: Path) -> MadeHost:
    """Return a host with three snapshots of which it keeps one, and a collection behind it; another one shares its remote."""

    def make(one: Host) -> None:
        nas = one.top.parent / "nas"
        recovery = one.json("remote", "init", f"file://{nas}")["recovery_key"]
        (one.top / "recovery").write_text(recovery)
        first = one.snapshot_of(os.urandom(50_000))
        one.snapshot_of(os.urandom(50_000))
        one.run(*_UPLOAD)
        _age(nas)
        one.run("forget", "--remote", "-y", first)
        one.run("prune", "--remote")
        one.snapshot_of(os.urandom(50_000))
        one.run(*_UPLOAD)
        own = sorted(str(path.relative_to(nas)) for path in nas.rglob("*"))
        (one.top / "own").write_text("\n".join(own))
        two = Host(one.top.parent / "two")
        two.env["CIUIC_REMOTE_KEY_FILE"] = str(one.key_file)
        two.run("remote", "join", f"file://{nas}")
        two.snapshot_of(os.urandom(50_000))
        two.run(*_UPLOAD)
        _age(nas)
        text = one.config.read_text()
        one.config.write_text(f'{text}\n[retention]\nkeep_within = "0s"\nkeep_last = 1\n')

    return MadeHost(module_tmp, make)


def _lose(host: Host, place: str) -> None:
    nas = host.top.parent / "nas"
    own = (host.top / "own").read_text().splitlines()
    found = [path for path in nas.glob(place) if str(path.relative_to(nas)) in own]
    # The collector has a log of its own, which is short.
    if place.startswith("w/"):
        log = max((nas / "w").iterdir(), key=lambda path: len(list(path.iterdir())))
        found = [path for path in found if log in (path, path.parent)]
    lost = max(found)
    (shutil.rmtree if lost.is_dir() else os.unlink)(lost)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_object(made: MadeHost, kind: str) -> None:
    """Without it a machine reads the remote or is told why not, prune keeps what may be lost, and a command heals it."""
    host, loss = made.again(), KINDS[kind]
    _lose(host, loss.place)
    shutil.rmtree(host.top / "cache")
    host.run("verify", "--remote", expect=loss.verify)
    pruned = host.run("prune", "--dry-run")
    assert loss.lacks in pruned.stderr.decode()
    assert f"{0 if loss.lacks else 2} snapshots would go" in pruned.stdout.decode()
    refused = host.run(*_UPLOAD, expect=loss.upload).stderr.decode()
    assert loss.says in refused
    for words in loss.heals:
        if words == _FORGET:
            (remembered,) = (path for path in host.state.glob("remote/*") if path.is_dir())
            assert str(remembered) in refused
            shutil.rmtree(remembered)
        elif words == _ADD_KEY:
            host.env["CIUIC_REMOTE_RECOVERY_KEY"] = (host.top / "recovery").read_text()
            host.run(*words, str(host.key_file))
            del host.env["CIUIC_REMOTE_RECOVERY_KEY"]
        else:
            host.run(*words)
    host.run(*_UPLOAD)
    host.run("verify", "--remote", "--checksum")
    host.run("check", "--remote")
    # The oldest was given up there before.
    stored = {one["id"].rpartition("/")[2] for one in host.json("list", "--all-hosts")["snapshots"]}
    assert {row.id for row in host.list()[:2]} <= stored
    # The remote has everything again, and is relied on.
    assert "2 snapshots removed" in host.run("prune").stdout.decode()


@pytest.fixture(scope="module")
def made_apart(module_tmp: Path) -> MadeHost:
    """Return a host whose repository has an identity of its own, with two snapshots on the remote."""

    def make(one: Host) -> None:
        Repository.create(one.repository).close()
        one.snapshot_of(os.urandom(50_000), os.urandom(50_000))
        one.run("remote", "init", f"file://{one.top.parent / 'nas'}")
        one.run(*_UPLOAD)
        _age(one.top.parent / "nas")
        text = one.config.read_text()
        one.config.write_text(f'{text}\n[retention]\nkeep_within = "0s"\nkeep_last = 1\n')

    place = module_tmp / "apart"
    place.mkdir()
    return MadeHost(place, make)


def test_the_identity_of_a_repository(made_apart: MadeHost) -> None:
    """Without it readers say that snapshots are missing, and prune keeps them; the next upload brings it back."""
    host = made_apart.again()
    (lost,) = (host.top.parent / "nas").glob("repositories/*/remote.json")
    lost.unlink()
    name = f"repositories/{lost.parent.name}/remote.json"
    for words in (("verify", "--remote"), ("list", "--all-hosts"), ("prune", "--remote")):
        assert name in host.run(*words, expect=4).stderr.decode()
    fleet = (("fleet", "status"), ("fleet", "drill"), ("fleet", "verify"))
    for words in (("remote", "status", "--contact"), ("remote", "drill"), *fleet):
        assert name in host.run(*words, expect=4).stderr.decode()
    assert name in host.run("check", "--remote", expect=4).stdout.decode()
    pruned = host.run("prune", "--dry-run")
    assert f"the remote has no object {name}" in pruned.stderr.decode()
    assert "0 snapshots would go" in pruned.stdout.decode()
    host.run(*_UPLOAD)
    host.run("verify", "--remote", "--checksum")
    host.run("check", "--remote")
    assert len(host.json("list", "--all-hosts")["snapshots"]) == 2
    assert "1 snapshot removed" in host.run("prune").stdout.decode()
