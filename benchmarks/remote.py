"""Cost of a remote: uploads and restores next to restic and rclone, on one SeaweedFS, in one run.

    make bench-remote                              the figures that are reported
    make bench-remote ARGS="--busy 4"              the same beside four processes that compute
    make bench-remote ARGS="--mib 64 --rounds 1"   smoke test; its figures mean nothing

Each turn of a round is a process of its own, and contenders take turns. *first*: a directory of noise that the
bucket does not have, from the call to its last byte; ciuic's is a local snapshot and its upload, which are also given apart
(*first snapshot*, *first upload*). *changed*: the same with a twentieth of the blocks changed. *nothing new*: the upload, or the backup,
of what the bucket has. *list*: the names of its snapshots, of its files for rclone. *one file*: one of the sixteen, without a cache.
rclone only copies files, and is what the server and the wire allow. *restore*: all of it, to an empty directory, from the bucket alone,
until syncfs(2) has returned: ciuic syncs each file before it gets its name, others leave that to the kernel; *returns* is when the
command ended. *processor*: seconds of the contender itself; *memory*: its largest resident set. *kills*: bytes that the server received
for 512 MiB while the uploader was killed forty times, and whether the remote is exact.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from support.object_servers import SeaweedFS

_CIUIC: Final = str(Path(sys.executable).with_name("ciuic"))
_FILES: Final = 16
_BLOCK: Final = 262144
_MIB: Final = 1 << 20
_KILLS: Final = 40
_KILLS_RATE: Final = 12 << 20
WORKS: Final = ("first", "changed", "nothing new", "list", "one file", "restore")


class Bar(NamedTuple):
    """Limit of a ratio of medians, or of ciuic's median in seconds where ``of`` is empty."""

    work: str
    of: str
    idle: float
    busy: float


BARS: Final = (
    Bar("first", "rclone", 1.1, 1.1),
    Bar("changed", "rclone", 1.5, 1.5),
    Bar("restore", "rclone", 1.1, 1.1),
    Bar("one file", "restic", 0.4, 1.0),
    Bar("nothing new", "", 0.2, 0.2),
)


class Turn(NamedTuple):
    """One command of one contender."""

    seconds: float
    processor_seconds: float
    memory_bytes: int
    returned_seconds: float
    """Time until the command ended; shorter where its files were synced afterwards."""


class Bench(NamedTuple):
    """Places and the server of one run."""

    top: Path
    server: SeaweedFS
    environment: dict[str, str]
    authority: str = ""
    """File of the certificate authority; empty without TLS."""

    def run(self, *argv: str, synced: Path | None = None, **variables: str) -> Turn:
        """Run a program to its end, and measure it; ``synced``: until what it wrote there is on the disk."""
        before = time.monotonic()
        process = subprocess.Popen(
            argv,
            env={**_environment(), **self.environment, **variables},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert process.stderr is not None
        text = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        returned = time.monotonic() - before
        if process.returncode:
            raise RuntimeError(f"{argv[0]} failed: {text.decode(errors='replace')[-2000:]}")
        if synced is not None:
            subprocess.run(["sync", "-f", str(synced)], check=True)
        seconds = time.monotonic() - before
        return Turn(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, returned)


def _environment() -> dict[str, str]:
    """Return the environment of a contender.

    Without a bundle of certificates, which rclone cannot use with a plain server; and with compiled modules, which an
    installed package has.
    """
    left_out = ("AWS_CA_BUNDLE", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if name not in left_out}


def make_files(folder: Path, mib: int, seed: int) -> None:
    """Write noise to sixteen files."""
    folder.mkdir(parents=True)
    noise = random.Random(seed)
    for number in range(_FILES):
        with (folder / f"{number:02}").open("wb") as file:
            for _ in range(mib * _MIB // _FILES // _BLOCK):
                file.write(noise.randbytes(_BLOCK))


def change_files(folder: Path, seed: int) -> None:
    """Write a twentieth of the blocks anew."""
    noise = random.Random(seed)
    for path in sorted(folder.iterdir()):
        blocks = path.stat().st_size // _BLOCK
        with path.open("r+b") as file:
            for block in noise.sample(range(blocks), max(1, blocks // 20)):
                file.seek(block * _BLOCK)
                file.write(noise.randbytes(_BLOCK))


def _child(top: Path, what: str) -> tuple[str, ...]:
    return sys.executable, "-m", "benchmarks.remote", "--child", what, str(top)


class Contender(ABC):
    """Program that brings the files of one directory to one prefix of the server, and back."""

    name: str

    def __init__(self, bench: Bench, top: Path, url: str, source: Path) -> None:
        self._bench, self._top, self._url, self._source = bench, top, url, source
        top.mkdir()
        self.parts: dict[str, Turn] = {}
        """Turns that the last `back_up` consisted of."""
        self.make()

    @abstractmethod
    def make(self) -> None:
        """Make the place on the server."""

    @abstractmethod
    def back_up(self) -> Turn:
        """Bring what is new to the server."""

    def look(self) -> Turn:
        """Find out that nothing is new."""
        return self.back_up()

    @abstractmethod
    def list(self) -> Turn:
        """List what is stored."""

    @abstractmethod
    def restore(self, target: Path, file: str = "") -> Turn:
        """Bring all back to ``target``, or the file of this name; nothing of the server is cached."""


class Ciuic(Contender):
    """Local snapshot and upload, and a restore on a machine that has the key alone."""

    name = "ciuic"

    def make(self) -> None:
        (self._top / "settings").write_text(json.dumps({"url": self._url, "source": str(self._source)}))
        self._bench.run(*_child(self._top, "init"))
        self.configure()

    def configure(self, more: str = "") -> None:
        """Write the configuration, with more settings of the remote."""
        (self._top / "ciuic.toml").write_text(
            f'[[remote]]\nname = "remote"\nurl = "{self._url}"\nkey_file = "{self._top}/key"\n'
            f'endpoint = "{self._bench.environment["AWS_ENDPOINT_URL"]}"\n{more}'
        )

    @property
    def upload(self) -> tuple[str, ...]:
        """Command that uploads and ends."""
        return (
            *("env", f"CIUIC_UPLOAD_STATE={self._top}/state", _CIUIC),
            *("--config", f"{self._top}/ciuic.toml", "--repo", f"{self._top}/repository"),
            *("remote", "upload", "--once"),
        )

    def store(self) -> Turn:
        """Take the local snapshot."""
        return self._bench.run(*_child(self._top, "store"))

    def back_up(self) -> Turn:
        snapshot, upload = self.store(), self.look()
        self.parts = {"snapshot": snapshot, "upload": upload}
        return Turn(
            snapshot.seconds + upload.seconds,
            snapshot.processor_seconds + upload.processor_seconds,
            max(snapshot.memory_bytes, upload.memory_bytes),
            snapshot.returned_seconds + upload.returned_seconds,
        )

    def look(self) -> Turn:
        return self._bench.run(*self.upload)

    def list(self) -> Turn:
        return self._run("--repo", self._url, "list", XDG_CACHE_HOME=str(self._top / "cache"))

    def restore(self, target: Path, file: str = "") -> Turn:
        return self._run(
            *("--repo", self._url, "restore", "-s", "latest"),
            *("-p", str(self._source / file), "-d", str(target)),
            synced=target.parent,
            XDG_CACHE_HOME=str(target.with_name("cache")),
        )

    def _run(self, *argv: str, synced: Path | None = None, **variables: str) -> Turn:
        variables["CIUIC_REMOTE_KEY_FILE"] = str(self._top / "key")
        return self._bench.run(_CIUIC, *argv, synced=synced, **variables)


class Restic(Contender):
    """restic to the same server."""

    name = "restic"

    def make(self) -> None:
        self._run("init")

    def back_up(self) -> Turn:
        return self._run("backup", str(self._source))

    def list(self) -> Turn:
        return self._run("snapshots")

    def restore(self, target: Path, file: str = "") -> Turn:
        return self._run(
            *("restore", "latest", "--target", str(target), "--include", str(self._source / file)),
            synced=target.parent,
            cache=target.with_name("cache"),
        )

    def _run(self, *argv: str, synced: Path | None = None, cache: Path | None = None) -> Turn:
        authority = (f"--cacert={self._bench.authority}",) if self._bench.authority else ()
        endpoint = self._bench.environment["AWS_ENDPOINT_URL"]
        return self._bench.run(
            "restic",
            *authority,
            *argv,
            synced=synced,
            RESTIC_REPOSITORY=f"s3:{endpoint}/{self._url.removeprefix('s3://')}",
            RESTIC_PASSWORD="benchmark",
            RESTIC_CACHE_DIR=str(cache or self._top / "cache"),
        )


class Rclone(Contender):
    """rclone, which copies files: the rate of the server."""

    name = "rclone"

    def make(self) -> None:
        """Do nothing: a prefix needs no making."""

    def back_up(self) -> Turn:
        return self._run("sync", str(self._source), self._place)

    def list(self) -> Turn:
        return self._run("lsf", self._place)

    def restore(self, target: Path, file: str = "") -> Turn:
        if file:
            return self._run("copyto", f"{self._place}/{file}", str(target / file), synced=target.parent)
        return self._run("sync", self._place, str(target), synced=target.parent)

    @property
    def _place(self) -> str:
        return f":s3:{self._url.removeprefix('s3://')}"

    def _run(self, *argv: str, synced: Path | None = None) -> Turn:
        return self._bench.run(
            *("rclone", *argv, "--s3-provider=Other", "--s3-env-auth", "--config=/dev/null"),
            f"--s3-endpoint={self._bench.environment['AWS_ENDPOINT_URL']}",
            *((f"--ca-cert={self._bench.authority}",) if self._bench.authority else ()),
            synced=synced,
        )


def measure(bench: Bench, mib: int, rounds: int) -> dict[str, dict[str, list[Turn]]]:
    """Return the turns of each work by contender."""
    found: dict[str, dict[str, list[Turn]]] = {}
    makers: list[type[Contender]] = [Ciuic]
    makers += [maker for maker in (Restic, Rclone) if shutil.which(maker.name)]
    for number in range(rounds):
        contenders = []
        for maker in makers[number % len(makers) :] + makers[: number % len(makers)]:
            source = bench.top / f"source-{maker.name}-{number}"
            make_files(source, mib, number)
            contender = maker(bench, bench.top / f"{maker.name}-{number}", bench.server.new_url(), source)
            contenders.append((contender, source))
        for work in WORKS:
            for contender, source in contenders:
                if work == "changed":
                    change_files(source, 1000 + number)
                os.sync()
                found.setdefault(work, {}).setdefault(contender.name, []).append(
                    _turn(bench, contender, source, work)
                )
                for part, turn in contender.parts.items():
                    found.setdefault(f"{work} {part}", {}).setdefault(contender.name, []).append(turn)
                contender.parts = {}
        for contender, source in contenders:
            shutil.rmtree(source)
            shutil.rmtree(bench.top / f"{contender.name}-{number}")
    return found


def _turn(bench: Bench, contender: Contender, source: Path, work: str) -> Turn:
    if work == "nothing new":
        return contender.look()
    if work == "list":
        # The first one fills the cache.
        contender.list()
        return contender.list()
    if work not in ("one file", "restore"):
        return contender.back_up()
    target = bench.top / f"restored-{contender.name}" / "r"
    target.parent.mkdir()
    names = ["07"] if work == "one file" else [path.name for path in source.iterdir()]
    turn = contender.restore(target, names[0] if work == "one file" else "")
    _assert_restored([source / name for name in names], target)
    shutil.rmtree(target.parent)
    return turn


def _assert_restored(paths: Sequence[Path], target: Path) -> None:
    for path in paths:
        copies = [copy for copy in target.rglob(path.name) if copy.is_file()]
        if not copies or copies[0].read_bytes() != path.read_bytes():
            raise RuntimeError(f"{path.name} was not restored")


def measure_kills(bench: Bench, mib: int) -> dict[str, float]:
    """Kill the uploader forty times during an upload; return bytes sent by bytes stored."""
    source = bench.top / "source-kills"
    make_files(source, mib, 77)
    top = bench.top / "kills"
    contender = Ciuic(bench, top, bench.server.new_url(), source)
    contender.store()
    # At a rate at which forty kills fall into the upload; each process takes a second to begin.
    contender.configure(f'bandwidth = "{_KILLS_RATE >> 20}MiB"\n')
    kills = 0
    chance = random.Random(5)
    while True:
        process = subprocess.Popen(contender.upload, env={**os.environ, **bench.environment})
        try:
            process.wait(1.2 + chance.uniform(0.2, 1.2) if kills < _KILLS else None)
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
    turn = json.loads(
        subprocess.run(
            _child(top, "check"),
            env={**os.environ, **bench.environment},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
    )
    return {"kills": kills, **turn}


def make_certificate(place: Path) -> tuple[Path, Path]:
    """Return the files of a certificate for localhost, which is its own authority, and of its key."""
    certificate, key = place / "certificate.pem", place / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    return certificate, key


def child(what: str, top: Path) -> None:
    """Do one step of ciuic's in a process of its own."""
    settings = json.loads((top / "settings").read_text())
    if what == "store":
        _store(top, Path(settings["source"]))
        return
    from ciuic.remote.access import add_slot, init_remote
    from ciuic.remote.objects.opening import open_objects
    from ciuic.remote.objects.urls import StoreSettings
    from ciuic.remote.sealing.key_slots import new_key_text, read_key_file
    from ciuic.remote.sealing.sealer import MasterKey
    from ciuic.repository import Repository

    endpoint = os.environ["AWS_ENDPOINT_URL"]
    if what == "check":
        _check(top, settings["url"], endpoint)
        return
    objects = open_objects(settings["url"], StoreSettings(endpoint=endpoint))
    remote = init_remote(objects, master=MasterKey.generate(), block_size=_BLOCK)
    key = top / "key"
    key.write_bytes(new_key_text())
    key.chmod(0o600)
    add_slot(remote, "host", read_key_file(str(key)))
    Repository.create(top / "repository", identity=remote.identity).close()


def _store(top: Path, source: Path) -> None:
    """Commit a snapshot of the files below ``source``, as a capture does that compares nothing."""
    from ciuic.repository import Repository
    from ciuic.repository.compression import Content
    from ciuic.types import ChunkId, Entry, RootRecord, SnapshotDraft

    with Repository.open(top / "repository") as repository, repository.writer() as writer:
        changes: dict[bytes, Entry | None] = {}
        for path in sorted(source.iterdir()):
            ids: dict[int, ChunkId] = {}
            with path.open("rb") as file:
                while data := file.read(16 * _BLOCK):
                    blocks = [data[at : at + _BLOCK] for at in range(0, len(data), _BLOCK)]
                    for chunk in writer.put_chunks([Content(block) for block in blocks]):
                        ids[len(ids)] = chunk
            ref = writer.update_block_map((b"", 0), len(ids), ids)
            changes[os.fsencode(path.name)] = Entry(
                name=os.fsencode(path.name),
                mode=0o100644,
                size_bytes=path.stat().st_size,
                content=ref.content,
                map_height=ref.map_height,
            )
        tree = writer.update_tree(b"", changes)
        entry = Entry(
            name=b"",
            mode=0o40755,
            content=tree.id,
            total_files=tree.total_files,
            total_bytes=tree.total_bytes,
        )
        root = RootRecord(path=os.fsencode(source), entry=entry)
        writer.commit(
            SnapshotDraft(
                id=repository.snapshots.new_id(), time_ns=time.time_ns(), host="bench", roots=(root,)
            )
        )


def _check(top: Path, url: str, endpoint: str) -> None:
    from unit.remote.upload.test_replication_of_a_repository import StoredChunks, assert_whole

    from ciuic.remote.access import open_remote
    from ciuic.remote.object_names import PACKS_PREFIX
    from ciuic.remote.objects.opening import open_objects
    from ciuic.remote.objects.urls import StoreSettings
    from ciuic.remote.sealing.key_slots import read_key_file

    objects = open_objects(url, StoreSettings(endpoint=endpoint))
    remote = open_remote(objects, [read_key_file(str(top / "key"))])
    assert assert_whole(remote), "nothing is committed"
    chunks = StoredChunks(remote)
    stored = sum(info.size_bytes for info in objects.list(PACKS_PREFIX))
    sys.stdout.write(json.dumps({"stored_bytes": stored, "copies": chunks.copies, "chunks": len(chunks)}))


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Compute in so many processes meanwhile."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def report(turns: dict[str, dict[str, list[Turn]]], mib: int, rounds: int, busy: int) -> str:
    """Return the tables of figures and of bars."""
    lines = [
        "| work | contender | s (median) | of restic | of rclone | returns | processor s | memory MiB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    medians = {
        work: {name: Turn(*map(statistics.median, zip(*some, strict=True))) for name, some in by_name.items()}
        for work, by_name in turns.items()
    }
    for work, by_name in sorted(medians.items(), key=lambda one: _order(one[0])):
        # Parts are compared with the whole that they are of.
        whole = medians.get(work, {}) if work in WORKS else medians[work.rpartition(" ")[0]]
        for name, turn in by_name.items():
            ratios = [
                f"{turn.seconds / whole[other].seconds:.2f}" if other in whole else "-"
                for other in ("restic", "rclone")
            ]
            lines.append(
                f"| {work} | {name} | {turn.seconds:.2f} | {' | '.join(ratios)} | {turn.returned_seconds:.2f} "
                f"| {turn.processor_seconds:.2f} | {turn.memory_bytes / _MIB:.0f} |"
            )
    lines += ["", "| bar | limit | measured | |", "| --- | --- | --- | --- |"]
    for bar in BARS:
        limit = bar.busy if busy else bar.idle
        measured = medians[bar.work]["ciuic"].seconds
        if bar.of and bar.of not in medians[bar.work]:
            lines.append(f"| {bar.work} | {limit:g} of {bar.of} | not judged | |")
            continue
        if bar.of:
            measured /= medians[bar.work][bar.of].seconds
        unit = f"of {bar.of}" if bar.of else "s"
        verdict = "met" if measured <= limit else "**missed**"
        lines.append(f"| {bar.work} | {limit:g} {unit} | {measured:.2f} | {verdict} |")
    beside = f"; beside {busy} processes that compute" if busy else ""
    return (
        f"{mib} MiB, {rounds} rounds, medians; noise, sealed; load {os.getloadavg()[0]:.1f}{beside}.\n\n"
        + "\n".join(lines)
        + "\n"
    )


def _order(work: str) -> tuple[int, bool]:
    """Order works as they are done, each with its parts before it."""
    return next(number for number, whole in enumerate(WORKS) if work.startswith(whole)), work in WORKS


def main() -> int:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(prog="benchmarks.remote", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside it")
    parser.add_argument("--no-kills", action="store_true")
    parser.add_argument("--tls", action="store_true", help="over TLS")
    parser.add_argument("--server-dir", help="where the server keeps its objects, such as a tmpfs")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "DIR"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], Path(options.child[1]))
        return 0
    # Not for a child, whose time counts: it imports pytest.
    from support.object_servers import SeaweedFS, environment_for_s3, weed_program

    program = weed_program()
    if program is None:
        sys.stderr.write("the program of SeaweedFS is missing: .ci/setup test\n")
        return 2
    with (
        tempfile.TemporaryDirectory(prefix="ciuic-remote-") as folder,
        tempfile.TemporaryDirectory(prefix="ciuic-remote-server-", dir=options.server_dir) as place,
    ):
        top = Path(folder)
        certificate = make_certificate(top) if options.tls else None
        server = SeaweedFS(Path(place), certificate=certificate)
        server.start()
        try:
            environment = environment_for_s3(server.tls_endpoint or server.endpoint)
            if certificate is not None:
                environment["SSL_CERT_FILE"] = str(certificate[0])
            bench = Bench(top, server, environment, environment.get("SSL_CERT_FILE", ""))
            with busy_processes(options.busy):
                turns = measure(bench, options.mib, options.rounds)
            text = report(turns, options.mib, options.rounds, options.busy)
            if not options.no_kills:
                text += f"\nKills: {json.dumps(measure_kills(bench, options.mib))}\n"
        finally:
            server.stop()
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
