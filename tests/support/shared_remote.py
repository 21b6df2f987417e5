"""Hosts that share one remote, a collector and an operator, all of whose processes are killed at random moments.

Hosts take snapshots of files from a small stock, so that what one of them gives up another stores at the same time. Meanwhile run,
and are killed and begun again: the upload of each host, its prune and forget, collections, and ``forget --remote``; hosts are lost with
their disks and begin anew. Nothing counts as young for long, so that collections meet uploads.

After each round every snapshot that is listed is restored and compared with what was stored. When the hosts then end their uploads and a
collection ends, nothing is left of what no snapshot needs, of unfinished collections, or of killed writers.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from support import trees
from support.live import Commands
from support.remote_host import reading
from support.upload_trials import Server, UploadingHost
from support.warm_python import Program

from ciuic.remote.access import open_remote
from ciuic.remote.object_names import MANIFESTS_PREFIX, PACKS_PREFIX, ROUNDS_PREFIX, PackRef, parse_pack
from ciuic.remote.pack import RemotePackReader
from ciuic.remote.reading.opening import ReadableRemote
from ciuic.remote.upkeep.collection_round import live_chunks
from ciuic.restore import execute, plan_restore

_HOSTS: Final = 3
_STOCK: Final = 24
"""Contents of files; each host has a few of them at a time."""
_FILES: Final = 5
_EVENTS: Final = 80
_MAX_RUNNING: Final = 4
_KINDS: Final = ("upload", "upload", "collect", "collect", "prune", "forget", "snapshot", "give up")
_CONFIG: Final = """
[remote.keep]
keep_within = "0s"
keep_last = 3
[retention]
keep_within = "0s"
keep_last = 2
"""
_BEFORE: Final = """
import random, time
from ciuic.remote import writer_log
from ciuic.remote.upkeep import check, collection_round as round_
check.UPLOADING_NS = 400_000_000
round_.DEFAULT_POLICY = round_.DEFAULT_POLICY._replace(young_ns=500_000_000, repack_share=0.6)
commit = writer_log.WriterLog.commit
def late(*arguments, **named):
    time.sleep(random.random() / 2)
    return commit(*arguments, **named)
writer_log.WriterLog.commit = late
"""
"""Prologue of each command: collections spare objects for half a second instead of a day, repairs for a little less, and commits wait,
so that kills fall between a manifest and its commit."""
_DAMAGED: Final = 4


class SharedRemote:
    """A remote and its hosts; end it with `close`.

    Args:
        server: Object store.
        place: Empty directory.
        rng: Source of every choice.
    """

    def __init__(self, server: Server, place: Path, rng: random.Random) -> None:
        self.kills: Counter[str] = Counter()
        """Killed processes by their command; hosts that were lost."""
        self.ended: Counter[tuple[str, int]] = Counter()
        """Processes that ended before they were killed, by their command and exit code."""
        self.restored = 0
        """Snapshots that were restored and compared."""
        self.repaired = 0
        """Collections that a host's death between manifest and commit made refuse until the remote was repaired."""
        self.flaws: list[str] = []
        self._place = place
        self._rng = rng
        self._server = server
        self._url = server.new_url()
        self._objects = server.connect(self._url)
        self._stock = [rng.randbytes(rng.choice((3_000, 90_000, 300_000, 700_000))) for _ in range(_STOCK)]
        self._taken: dict[str, tuple[Path, trees.Manifest]] = {}
        self._listed: list[str] = []
        self._number = 0
        self._running: dict[tuple[str, int], Program] = {}
        first = self._new_host(None)
        self._hosts = [first, *(self._new_host(first) for _ in range(1, _HOSTS))]
        self._secrets = first.secrets(server.environment())
        self._remote = open_remote(self._objects, first.remote_secrets())
        self._operator = {
            **{name: value for name, value in first.env.items() if not name.startswith("CIUIC_")},
            **self._secrets,
            "HOME": str(place),
            "XDG_CACHE_HOME": str(place / "operator"),
            "CIUIC_CONFIG": "/dev/null",
        }

    def _new_host(self, shared: UploadingHost | None) -> UploadingHost:
        self._number += 1
        place = self._place / f"host-{self._number}"
        host = UploadingHost(place, self._url, self._objects, self._server.environment(), shared=shared)
        host.env["XDG_CACHE_HOME"] = str(host.top / "cache")
        with open(host.config, "a", encoding="utf-8") as config:
            config.write(_CONFIG)
        return host

    def close(self) -> None:
        """End everything and remove the hosts."""
        for key in list(self._running):
            self._kill(key)
        for host in self._hosts:
            host.lose()

    def round(self) -> None:
        """Kill and begin again for a while; then judge the remote as it is, and after that at rest."""
        for host in range(_HOSTS):
            self._snapshot(host)
        for _ in range(_EVENTS):
            if len(self._running) < _MAX_RUNNING:
                self._event(self._rng.choice(_KINDS), self._rng.randrange(_HOSTS))
            else:
                # Commands end soon: often the newest is chosen.
                self._kill(self._rng.choice([*self._running][-self._rng.choice((1, 1, _MAX_RUNNING)) :]))
            time.sleep(self._rng.uniform(0, 0.25))
        lost = self._rng.randrange(_HOSTS)
        for key in list(self._running):
            self._kill(key)
        if self._rng.random() < 0.4:
            self._hosts[lost].lose()
            self.kills["host lost"] += 1
            self._hosts[lost] = self._new_host(self._hosts[lost])
        self._judge("after kills")
        self._rest()

    def _event(self, what: str, number: int) -> None:
        """Begin such a process, unless one runs."""
        host = self._hosts[number]
        if (what, number) in self._running:
            return
        if what == "snapshot":
            self._snapshot(number)
        elif what == "upload":
            self._begin((what, number), host.env, "remote", "upload")
        elif what == "prune":
            self._begin((what, number), host.env, "prune")
        elif what == "forget":
            self._begin(
                (what, number), host.env, "forget", "-y", self._rng.choice([*host.taken][:-1] or [""])
            )
        elif what == "collect":
            # The operator, or a host beside its own upload.
            words = ("--repo", self._url) if number == 0 else ()
            self._begin((what, number), host.env if number else self._operator, *words, "prune", "--remote")
        elif self._listed:
            chosen = self._rng.choice(self._listed)
            self._begin(
                (what, number), self._operator, "--repo", self._url, "forget", "--remote", "-y", chosen
            )

    def _begin(self, key: tuple[str, int], env: dict[str, str], *words: str) -> None:
        self._running[key] = Commands.start(*words, env=env, before=_BEFORE)

    def _kill(self, key: tuple[str, int]) -> None:
        program = self._running.pop(key)
        program.kill()
        out, err = program.communicate(60)
        if program.returncode == -9:
            self.kills[key[0]] += 1
            return
        self.ended[key[0], program.returncode or 0] += 1
        if "Traceback" in err or key[0] == "upload":
            self.flaws.append(f"{key[0]} ended by itself with {program.returncode}: {(out + err)[-1500:]}")

    def _snapshot(self, number: int) -> None:
        host = self._hosts[number]
        for name in self._rng.sample(range(_FILES), 2):
            (host.root / f"{name}").write_bytes(self._rng.choice(self._stock))
        id_ = host.snapshot_root()
        self._taken[id_] = host.root, host.taken[id_]

    # -- judgement

    @contextmanager
    def _reading(self) -> Iterator[ReadableRemote]:
        """Read with a cache that knows earlier states, or one that knows nothing."""
        fresh = self._rng.random() < 0.5
        cache = Path(tempfile.mkdtemp(dir=self._place)) if fresh else self._place / "reader"
        with reading(self._remote, cache) as opened:
            yield opened
        if fresh:
            shutil.rmtree(cache)

    def _judge(self, when: str) -> None:
        """Restore every snapshot that is listed."""
        with self._reading() as opened:
            self.flaws += [f"{when}: {damage}" for damage in opened.log_damage]
            self._listed = sorted(opened.snapshots.ids())
            for id_ in self._listed:
                self.flaws += [f"{when}, {id_}: {line}" for line in self._differences(opened, id_)]
                self.restored += 1

    def _differences(self, opened: ReadableRemote, id_: str) -> list[str]:
        if id_ not in self._taken:
            return ["it was never taken"]
        root, expected = self._taken[id_]
        there = Path(tempfile.mkdtemp(dir=self._place))
        try:
            snapshot = opened.snapshots.load(opened.snapshots.resolve(id_))
            repository = opened.repository_of([snapshot.id])
            plan = plan_restore(
                repository, snapshot, [os.fsencode(root)], dest=os.fsencode(there), special=True
            )
            result = execute(plan)
            if not result.complete:
                return [str(result.error())]
            return trees.differences(expected, trees.manifest(there / root.name))
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]
        finally:
            shutil.rmtree(there)

    def _rest(self) -> None:
        """Let all hosts end their uploads, and a collection end; judge what there is then."""
        for host in self._hosts:
            self._done(host.env, "remote", "upload", "--once")
        self._judge("at rest")
        newest = {list(host.taken)[-1] for host in self._hosts if host.taken}
        self.flaws += [f"at rest: {id_} is not on the remote" for id_ in newest.difference(self._listed)]
        # What killed writers leave is removed a day later.
        for path in self._unlisted():
            os.utime(path, (0, 0))
        # Stores tell whole seconds.
        time.sleep(1.6)
        began_ns = time.time_ns()
        collection = ("--repo", self._url, "prune", "--remote")
        if self._done(self._operator, *collection, codes=(0, _DAMAGED)) == _DAMAGED:
            # A host died between its manifest and the commit.
            self.repaired += 1
            self._done(self._operator, "--repo", self._url, "check", "--remote", "--repair")
            self._done(self._operator, *collection)
        for host in self._hosts:
            self._done(host.env, "verify", "--all", "--checksum")
        self._done(self._operator, "--repo", self._url, "check", "--remote")
        self._judge("collected")
        self._judge_leaks(began_ns)

    def _done(self, env: dict[str, str], *words: str, codes: tuple[int, ...] = (0,)) -> int:
        """Run a command to its end; return its exit code, and note one that it must not have."""
        program = Commands.start(*words, env=env, before=_BEFORE)
        out, err = program.communicate(180)
        assert program.returncode is not None
        if program.returncode not in codes or "Traceback" in err:
            self.flaws.append(f"{' '.join(words)} ended with {program.returncode}: {(out + err)[-1500:]}")
        return program.returncode

    def _judge_leaks(self, began_ns: int) -> None:
        """Note what the collection that began then has left."""
        with self._reading() as opened:
            (reader,) = opened.readers
            live = {entry.live.manifest: entry.live for entry in opened.snapshots.entries.values()}
            needed = live_chunks(reader)(live)
        old = {
            info.name
            for info in self._objects.list("")
            if info.modified_ns < began_ns and info.name.startswith((MANIFESTS_PREFIX, PACKS_PREFIX))
        }
        packs = {ref: name for name in old if (ref := parse_pack(name)) is not None}
        manifests = {name for name in old if name.startswith(MANIFESTS_PREFIX)}
        self.flaws += [f"{name} is of no snapshot, and stays" for name in manifests - live.keys()]
        self.flaws += [
            f"{packs[ref]} has nothing that is needed, and stays" for ref in self._dead(packs, needed)
        ]
        rounds = {info.name for info in self._objects.list(ROUNDS_PREFIX)}
        begun = {name for name in rounds if "." not in name}
        self.flaws += [f"{name} has no end" for name in begun if f"{name}.done" not in rounds]
        self.flaws += [f"{path} was left by a killed writer" for path in self._unlisted()]

    def _unlisted(self) -> list[Path]:
        """Return the files of a directory that are no objects."""
        top = Path(self._url.removeprefix("file://"))
        known = {info.name for info in self._objects.list("")} if top.is_dir() else set()
        files = (path for path in top.rglob("*") if path.is_file())
        return [path for path in files if str(path.relative_to(top)) not in known]

    def _dead(self, packs: dict[PackRef, str], needed: object) -> set[PackRef]:
        """Return the packs without a chunk that is needed, bases of differences included."""
        tables = {ref: RemotePackReader(self._remote.sealer, ref).read_table(self._objects) for ref in packs}
        bases: set[bytes] = set()
        while more := {
            record.base
            for table in tables.values()
            for record in table
            if record.base and record.base not in bases and (record.id in needed or record.id in bases)  # type: ignore[operator]
        }:
            bases |= more
        return {
            ref
            for ref, table in tables.items()
            if not any(record.id in needed or record.id in bases for record in table)  # type: ignore[operator]
        }
