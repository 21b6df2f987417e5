"""Release 0.2 and this tree beside each other: either reads what the other has written, and goes on with it, or refuses in words."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from support import surviving_job, tiny_training, trees
from support.live import module_tmp
from support.restoring import write
from support.two_versions import OLD_VERSION, VERSIONS, Installations, Upgraded, Version
from support.until import until

__all__ = ["module_tmp"]

pytestmark = [pytest.mark.mount, pytest.mark.slow]

both_ways = pytest.mark.parametrize(
    ("first", "second"), [VERSIONS, VERSIONS[::-1]], ids=["upgrade", "way-back"]
)
_THERE_AND_BACK: Final[tuple[Version, ...]] = ("old", "new", "old")
_JOB_SECONDS = 60.0
_TWO_DAYS_SECONDS = 2 * 86_400
_ROUNDS = 3
_KEY = "remote-remote.key"
_TABLE = re.compile(r"^\[(\w+)\]", re.MULTILINE)


@pytest.fixture(scope="module")
def installations(module_tmp: Path) -> Installations:
    return Installations(module_tmp)


@pytest.fixture
def host(short_tmp: Path, installations: Installations) -> Iterator[Upgraded]:
    with Upgraded(short_tmp, installations) as made:
        (made.top / "root").mkdir()
        yield made


class Kept:
    """Files that snapshots of a host have to bring back."""

    def __init__(self, host: Upgraded) -> None:
        self.host = host
        self.root = host.top / "root"
        self.taken: dict[str, trees.Manifest] = {}

    def take(self) -> str:
        snapshot = self.host.snapshot()
        self.taken[snapshot] = trees.manifest(self.root)
        return snapshot

    def check(self) -> None:
        """List, verify, check and restore all of it with the version in use."""
        assert set(self.taken) <= {row.id for row in self.host.list()}
        self.host.run("verify", "--all", "--checksum")
        self.host.run("check", "--read-data")
        for snapshot, files in self.taken.items():
            assert_restored(self.host, snapshot, self.root, files)


def assert_restored(host: Upgraded, snapshot: str, root: Path, files: trees.Manifest, *options: str) -> None:
    """Restore a root elsewhere; compare content, modes, owners, times and attributes."""
    there = host.top / "there"
    host.run(*options, "restore", "-s", snapshot, "-p", str(root), "-d", str(there), "--special")
    trees.assert_same(files, trees.manifest(there / root.name))
    shutil.rmtree(there)


@both_ways
def test_a_repository_is_written_by_both_in_turn(host: Upgraded, first: Version, second: Version) -> None:
    """Snapshots of either are listed, verified, restored exactly, held, forgotten and pruned by the other, which writes more."""
    kept = Kept(host)
    host.use(first)
    host.run("protect", str(kept.root))
    host.start(kept.root)
    trees.make_everything(kept.root)
    given_up = kept.take()
    write(kept.root / "weights", random.Random(1).randbytes(3_000_000))
    held = kept.take()
    host.run("hold", held)
    for version in (second, first):
        host.stop()
        host.use(version)
        kept.check()
        host.start(kept.root)
        with open(kept.root / "weights", "r+b") as file:
            file.seek(1_000_000)
            file.write(os.urandom(300_000))
        write(kept.root / version, os.urandom(100_000))
        os.setxattr(kept.root / version, "user.note", version.encode())
        newest = kept.take()
        assert host.json("show", held)["held"]
        host.run("forget", "-y", given_up)
        del kept.taken[given_up]
        given_up = newest
        host.run("prune")
    host.stop()
    host.use(second)
    kept.check()


class Fleet:
    """Two hosts with one remote, and what must be restorable from it; each command is of a version that is drawn for it."""

    def __init__(
        self, place: Path, installations: Installations, rng: random.Random, *, sealed: bool
    ) -> None:
        self.stored: dict[str, tuple[Path, trees.Manifest]] = {}
        """Snapshots that were uploaded and not given up: their root, and its files."""
        self.collected: set[Version] = set()
        """Versions that have deleted packs."""
        self._given_up: set[str] = set()
        self._nas = place / "nas"
        self._url = f"file://{self._nas}"
        self._rng = rng
        self._hosts: list[Kept] = []
        in_clear = [] if sealed else ["--no-encryption"]
        for number, version in enumerate(rng.sample(VERSIONS, 2)):
            top = place / str(number)
            (top / "root").mkdir(parents=True)
            host = Upgraded(top, installations)
            host.env |= {"CIUIC_UPLOAD_STATE": str(top / "upload"), "XDG_CACHE_HOME": str(top / "cache")}
            host.use(version)
            if not self._hosts:
                host.run("remote", "init", self._url, *in_clear, "-y")
            elif sealed:
                host.run("remote", "join", self._url, "--open-with", str(self._hosts[0].host.top / _KEY))
            else:
                host.run("remote", "join", self._url, *in_clear)
            if sealed:
                host.env["CIUIC_REMOTE_KEY_FILE"] = str(top / _KEY)
            host.run("protect", str(top / "root"))
            host.start(top / "root")
            self._hosts.append(Kept(host))

    def close(self) -> None:
        for kept in self._hosts:
            kept.host.close()

    def _draw(self) -> Kept:
        """Return a host, whose next commands are of either version."""
        kept = self._rng.choice(self._hosts)
        kept.host.use(self._rng.choice(VERSIONS))
        return kept

    def upload(self) -> None:
        """Take a snapshot of files that the other host has in part, and upload it."""
        kept = self._draw()
        write(kept.root / "shared", random.Random(self._rng.randrange(3)).randbytes(100_000))
        write(kept.root / "own", self._rng.randbytes(400_000))
        snapshot = kept.take()
        kept.host.use(self._rng.choice(VERSIONS))
        kept.host.run("remote", "upload", "--once")
        self.stored[snapshot] = (kept.root, kept.taken[snapshot])

    def forget(self) -> None:
        """Give up an uploaded snapshot of either host."""
        if self.stored:
            snapshot = self._rng.choice(sorted(self.stored))
            self._draw().host.run("forget", "--remote", "-y", snapshot)
            del self.stored[snapshot]
            self._given_up.add(snapshot)

    def collect(self, version: Version) -> None:
        """Delete what is not needed, two days later: younger objects are spared."""
        then = time.time() - _TWO_DAYS_SECONDS
        for path in self._nas.rglob("*"):
            if path.is_file():
                os.utime(path, (then, then))
        host = self._draw().host
        host.use(version)
        if any(space["packs"] for space in host.json("prune", "--remote")["spaces"]):
            self.collected.add(version)

    def check(self) -> None:
        """List, verify and restore all that must be there with each version."""
        for kept, version in zip(self._hosts, self._rng.sample(VERSIONS, 2), strict=True):
            host = kept.host
            host.use(version)
            lines = host.run("--repo", self._url, "list", "--machine-readable").stdout.decode().splitlines()
            listed = {line.split("|")[0] for line in lines}
            assert self.stored.keys() <= listed, version
            assert not listed & self._given_up, version
            host.run("--repo", self._url, "verify", "--all", "--checksum")
            for snapshot, (root, files) in self.stored.items():
                assert_restored(host, snapshot, root, files, "--repo", self._url)
            host.run("check", "--remote")


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "in clear"])
def test_a_remote_of_a_mixed_fleet(short_tmp: Path, installations: Installations, sealed: bool) -> None:
    """Hosts, uploaders and collectors of both versions share a remote, in any order, and lose nothing that is kept."""
    # Of pytest-randomly, which prints its seed.
    rng = random.Random(random.randrange(1 << 31))
    with closing(Fleet(short_tmp, installations, rng, sealed=sealed)) as fleet:
        for _ in range(_ROUNDS):
            acts = [
                fleet.upload,
                fleet.upload,
                fleet.forget,
                *(partial(fleet.collect, one) for one in VERSIONS),
            ]
            rng.shuffle(acts)
            for act in acts:
                act()
        for version in VERSIONS:
            fleet.upload()
            fleet.forget()
            fleet.collect(version)
        fleet.check()
        assert fleet.collected == set(VERSIONS)


@contextmanager
def job_in(root: Path, stop: Path) -> Iterator[Callable[[], None]]:
    """Run a job that checks each of its calls; provide what waits for two more of its rounds. At the end none may have failed."""
    rounds = stop.with_name(f"{stop.name}.rounds")
    process = subprocess.Popen(
        [sys.executable, surviving_job.__file__, str(root), "0", str(stop), "mounts-change"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    def done() -> int:
        assert process.poll() is None, process.communicate()[1]
        return int(rounds.read_text() or 0) if rounds.exists() else 0

    def goes_on() -> None:
        before = done()
        until("the job's next rounds", lambda: done() >= before + 2, _JOB_SECONDS)

    try:
        goes_on()
        yield goes_on
        goes_on()
        stop.touch()
        _, complaint = process.communicate(timeout=_JOB_SECONDS)
        assert process.returncode == 0, complaint
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_mounted_root_is_taken_over(host: Upgraded, end: signal.Signals) -> None:
    """The daemon of the new version and again of the old one serves the root on below a job that meets no failure; what was written meanwhile is whole."""
    kept = Kept(host)
    host.use("old")
    host.run("protect", str(kept.root))
    host.start(kept.root)
    with job_in(kept.root, host.top / "stop") as job_goes_on:
        write(kept.root / "before", os.urandom(1_000_000))
        earlier = host.snapshot()
        content = (kept.root / "before").read_bytes()
        for version in _THERE_AND_BACK[1:]:
            host.stop(end)
            write(kept.root / f"between {version}", content)
            host.use(version)
            host.start(kept.root)
            assert (host.json("status")["version"] == OLD_VERSION) == (version == "old")
            job_goes_on()
            write(kept.root / f"after {version}", content)
            newest = host.snapshot()
            assert {earlier, newest} <= {row.id for row in host.list()}
    kept.take()
    host.stop()
    kept.check()


@both_ways
def test_commands_of_the_other_version(host: Upgraded, first: Version, second: Version) -> None:
    """Every command that talks to a daemon works with a daemon of the other version."""
    kept = Kept(host)
    other = host.top / "other"
    other.mkdir()
    host.use(first)
    host.run("protect", str(kept.root))
    host.start(kept.root)
    host.use(second)
    write(kept.root / "file", b"content")
    found = host.json("status")
    assert [(one["path"], one["state"]) for one in found["roots"]] == [(str(kept.root), "mounted")]
    assert "version" in host.run("status").stdout.decode()
    snapshot = host.json("snapshot", "--wait", "-m", "why", "--tag", "one", "--hold")["id"]
    kept.taken[snapshot] = trees.manifest(kept.root)
    kept.check()
    shown = host.json("show", snapshot)
    assert (shown["message"], shown["held"]) == ("why", True)
    host.run("snapshot")
    host.run("release", snapshot)
    host.run("protect", str(other))
    host.wait_mounted(kept.root, other)
    host.run("unprotect", str(other))
    assert not any(one["path"] == str(other) for one in host.json("status")["roots"])
    host.run("reload")
    host.run("metrics")
    host.run("doctor", expect=None)
    host.run("forget", "-y", snapshot)
    host.run("prune")
    assert host.run("watch", "--", "true").returncode == 0
    host.run("stop")
    until("the daemon's end", lambda: host.daemon is not None and host.daemon.poll() is not None)


@both_ways
def test_a_training_goes_on(
    tmp_path: Path, installations: Installations, first: Version, second: Version
) -> None:
    """A training that is resumed by either version in turn ends with the bits of one that no version interrupted."""
    results = []
    for name, runs in (("turns", [(first, 9), (second, 18), (first, 27)]), ("whole", [(second, 27)])):
        began = 0
        for version, steps in runs:
            result = tmp_path / f"{name}.json"
            installations.python(version, tiny_training.__file__, tmp_path / name, steps, result)
            found = json.loads(result.read_text())
            assert found["began"] == began, version
            began = steps
        results.append(found["digest"])
    assert results[0] == results[1]


_TORCH = """
    import sys, torch
    from torch.distributed import checkpoint as dcp
    from ciuic import SnapshotManager
    from ciuic.training.dcp import FileSystemReader, FileSystemWriter
    from ciuic.training.dcp.storage import CiuicStorageReader, CiuicStorageWriter

    def train(place, began, steps):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(1024, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        manager = SnapshotManager(place, every_steps=5)
        manager.register(model=model, optimizer=optimizer, scheduler=scheduler)
        manager.resume()
        assert manager.step == began, manager.step
        while manager.step < steps:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(torch.rand(4, 64)), torch.randint(3, (4,))).backward()
            optimizer.step()
            scheduler.step()
        manager.close()
        return [*model.state_dict().values(), torch.rand(2)]

    def state(number):
        return {"weights": torch.full((300, 200), number), "small": torch.full((3,), number), "step": number}

    def check(reader, number):
        found = state(-1)
        dcp.load(found, storage_reader=reader, no_dist=True)
        assert found["step"] == number
        assert all(found[name].eq(number).all() for name in ("weights", "small"))

    torch.set_num_threads(1)
    place, number, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if number:
        check(FileSystemReader(f"{place}/moving"), number - 1)
        check(FileSystemReader(f"{place}/{number - 1}"), number - 1)
        check(CiuicStorageReader(f"{place}/states"), number - 1)
    dcp.save(state(number), storage_writer=FileSystemWriter(f"{place}/moving"), no_dist=True)
    dcp.save(state(number), storage_writer=FileSystemWriter(f"{place}/{number}", repository=f"{place}/all"), no_dist=True)
    writer = CiuicStorageWriter(f"{place}/states")
    dcp.save(state(number), checkpoint_id=f"step-{number}", storage_writer=writer, no_dist=True)
    writer.close()
    found = train(f"{place}/training", number * 5, number * 5 + 5)
    if number == last:
        assert all(map(torch.equal, found, train(f"{place}/whole", 0, number * 5 + 5)))
"""


def test_states_and_checkpoints_of_torch(tmp_path: Path, installations: Installations) -> None:
    """States of PyTorch, directories and repositories of sharded checkpoints are loaded and saved by either version in turn."""
    pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")
    script = tmp_path / "states.py"
    script.write_text(textwrap.dedent(_TORCH))
    for number, version in enumerate(_THERE_AND_BACK):
        installations.python(version, script, tmp_path, number, 2)


def test_the_configuration_of_either(host: Upgraded, installations: Installations) -> None:
    """This tree takes the configuration of 0.2; 0.2 names every table of this one's that it does not know, with its line."""
    earlier = (installations.old_source / "etc/ciuic.toml").read_text()
    host.config.write_text(earlier)
    host.use("new")
    assert "usable" in host.run("config", "check").stdout.decode()
    todays = host.run("config", "example").stdout.decode()
    host.config.write_text(todays)
    assert "usable" in host.run("config", "check").stdout.decode()
    # None where the history lacks 0.2.
    unknown = set(_TABLE.findall(todays)) - set(_TABLE.findall(earlier))
    host.use("old")
    refused = host.run("config", "check", expect=2 if unknown else 0).stderr.decode()
    assert (
        set(re.findall(rf"error: {re.escape(str(host.config))}:\d+: unknown key (\w+)", refused)) == unknown
    )
