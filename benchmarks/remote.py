"""Cost of a remote: uploads and restores next to restic and rclone, on one SeaweedFS, in one run.

    make bench-remote                              the figures that are reported
    make bench-remote ARGS="--mib 64 --rounds 1"   smoke test; its figures mean nothing

Each turn of a round is a process of its own, and contenders take turns. *first*: a directory of noise that the
bucket does not have, from the call to its last byte; ciuic's is a local snapshot and its upload, which are also given apart
(*first snapshot*, *first upload*). *changed*: the same with a twentieth of the blocks changed. rclone only copies files, and is what the
server and the wire allow. *restore*: all of it, to an empty directory, from the bucket alone, until syncfs(2) has returned: ciuic
syncs each file before it gets its name, others leave that to the kernel; *returns* is when the command ended. *processor*: seconds of the
contender itself for each GiB of the directory; *memory*: its largest resident set. *kills*: bytes that the server received
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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from support.object_servers import SeaweedFS

_RESULTS: Final = Path(__file__).with_name("results")
_FILES: Final = 16
_BLOCK: Final = 262144
_MIB: Final = 1 << 20
_KILLS: Final = 40
_KILLS_RATE: Final = 12 << 20
WORKS: Final = ("first", "changed", "restore")


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


class Ciuic:
    """Local snapshot and upload, and a restore on a machine that has the key alone."""

    name = "ciuic"

    def __init__(self, bench: Bench, top: Path, url: str, source: Path) -> None:
        self._bench, self._top, self._url, self._source = bench, top, url, source
        self.parts: list[Turn] = []
        top.mkdir()
        (top / "settings").write_text(json.dumps({"url": url, "source": str(source)}))
        bench.run(*_child(top, "init"))

    def back_up(self) -> Turn:
        snapshot, upload = self.parts = [
            self._bench.run(*_child(self._top, what)) for what in ("store", "upload")
        ]
        return Turn(
            snapshot.seconds + upload.seconds,
            snapshot.processor_seconds + upload.processor_seconds,
            max(snapshot.memory_bytes, upload.memory_bytes),
            snapshot.returned_seconds + upload.returned_seconds,
        )

    def restore(self, target: Path) -> Turn:
        return self._bench.run(
            str(Path(sys.executable).with_name("ciuic")),
            "--repo",
            self._url,
            "restore",
            "-s",
            "latest",
            "-p",
            str(self._source),
            "-d",
            str(target),
            CIUIC_REMOTE_KEY_FILE=str(self._top / "key"),
            XDG_CACHE_HOME=str(target.with_name("cache")),
            synced=target.parent,
        )


class Restic:
    """restic to the same server."""

    name = "restic"

    def __init__(self, bench: Bench, top: Path, url: str, source: Path) -> None:
        self._bench, self._source = bench, source
        self._variables: dict[str, Any] = {
            "RESTIC_REPOSITORY": f"s3:{bench.environment['AWS_ENDPOINT_URL']}/{url.removeprefix('s3://')}",
            "RESTIC_PASSWORD": "benchmark",
            "RESTIC_CACHE_DIR": str(top / "cache"),
        }
        top.mkdir()
        self._options = (f"--cacert={bench.authority}",) if bench.authority else ()
        bench.run("restic", *self._options, "init", **self._variables)

    def back_up(self) -> Turn:
        return self._bench.run("restic", *self._options, "backup", str(self._source), **self._variables)

    def restore(self, target: Path) -> Turn:
        return self._bench.run(
            "restic",
            *self._options,
            "restore",
            "latest",
            "--target",
            str(target),
            synced=target.parent,
            **self._variables,
        )


class Rclone:
    """rclone, which copies files: the rate of the server."""

    name = "rclone"

    def __init__(self, bench: Bench, top: Path, url: str, source: Path) -> None:
        self._bench, self._source = bench, source
        self._place = f":s3:{url.removeprefix('s3://')}"
        self._options = (
            "--s3-provider=Other",
            "--s3-env-auth",
            f"--s3-endpoint={bench.environment['AWS_ENDPOINT_URL']}",
            "--config=/dev/null",
            *((f"--ca-cert={bench.authority}",) if bench.authority else ()),
        )

    def back_up(self) -> Turn:
        return self._bench.run("rclone", *self._options, "sync", str(self._source), self._place)

    def restore(self, target: Path) -> Turn:
        return self._bench.run(
            "rclone", *self._options, "sync", self._place, str(target), synced=target.parent
        )


Contender = Callable[[Bench, Path, str, Path], "Ciuic | Restic | Rclone"]


def measure(bench: Bench, mib: int, rounds: int) -> dict[str, dict[str, list[Turn]]]:
    """Return the turns of each work by contender."""
    found: dict[str, dict[str, list[Turn]]] = {}
    makers: list[Contender] = [Ciuic]
    makers += [maker for name, maker in (("restic", Restic), ("rclone", Rclone)) if shutil.which(name)]
    for number in range(rounds):
        contenders = []
        for maker in makers[number % len(makers) :] + makers[: number % len(makers)]:
            top = bench.top / f"{maker.__name__}-{number}"
            source = bench.top / f"source-{maker.__name__}-{number}"
            make_files(source, mib, number)
            contenders.append((maker(bench, top, bench.server.new_url(), source), source))
        for work in WORKS:
            for contender, source in contenders:
                if work == "changed":
                    change_files(source, 1000 + number)
                os.sync()
                if work == "restore":
                    target = bench.top / f"restored-{contender.name}-{number}" / "r"
                    target.parent.mkdir()
                    turn = contender.restore(target)
                    _assert_restored(source, target)
                    shutil.rmtree(target.parent)
                else:
                    turn = contender.back_up()
                    if isinstance(contender, Ciuic):
                        for part, of_part in zip(("snapshot", "upload"), contender.parts, strict=True):
                            found.setdefault(f"{work} {part}", {}).setdefault("ciuic", []).append(of_part)
                found.setdefault(work, {}).setdefault(contender.name, []).append(turn)
    return found


def _assert_restored(source: Path, target: Path) -> None:
    for path in source.iterdir():
        copies = [copy for copy in target.rglob(path.name) if copy.is_file()]
        if not copies or copies[0].read_bytes() != path.read_bytes():
            raise RuntimeError(f"{path.name} was not restored")


def measure_kills(bench: Bench, mib: int) -> dict[str, float]:
    """Kill the uploader forty times during an upload; return bytes sent by bytes stored."""
    source = bench.top / "source-kills"
    make_files(source, mib, 77)
    top = bench.top / "kills"
    contender = Ciuic(bench, top, bench.server.new_url(), source)
    bench.run(*_child(top, "store"))
    del contender
    # At a rate at which forty kills fall into the upload; each process takes a second to begin.
    settings = json.loads((top / "settings").read_text())
    (top / "settings").write_text(json.dumps({**settings, "bandwidth": _KILLS_RATE}))
    kills = 0
    chance = random.Random(5)
    while True:
        process = subprocess.Popen(_child(top, "upload"), env={**os.environ, **bench.environment})
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
    from ciuic.config import Config, RemoteConfig
    from ciuic.remote import replication
    from ciuic.remote.access import add_slot, init_remote
    from ciuic.remote.objects.opening import open_objects
    from ciuic.remote.objects.urls import StoreSettings
    from ciuic.remote.sealing.key_slots import new_key_text, read_key_file
    from ciuic.remote.sealing.sealer import MasterKey
    from ciuic.repository import Repository

    settings = json.loads((top / "settings").read_text())
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    key = top / "key"
    if what == "init":
        objects = open_objects(settings["url"], StoreSettings(endpoint=endpoint))
        remote = init_remote(objects, master=MasterKey.generate(), block_size=_BLOCK)
        key.write_bytes(new_key_text())
        key.chmod(0o600)
        add_slot(remote, "host", read_key_file(str(key)))
        Repository.create(top / "repository", identity=remote.identity).close()
        return
    if what == "store":
        _store(top, Path(settings["source"]))
    if what == "upload":
        config = Config(
            remotes=(
                RemoteConfig(
                    name="remote",
                    url=settings["url"],
                    endpoint=endpoint,
                    key_file=key,
                    bandwidth_bytes=settings.get("bandwidth"),
                ),
            )
        )
        replication.run(config, top / "repository", once=True, state_dir=top / "state")
    if what == "check":
        _check(top, settings["url"], endpoint)


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


def report(turns: dict[str, dict[str, list[Turn]]], mib: int, rounds: int) -> str:
    """Return the table."""
    lines = [
        "| work | contender | s (median) | of restic | returns | of restic | processor s/GiB | of restic | memory MiB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for work, by_name in turns.items():
        # Parts are compared with the whole that they are of.
        whole = turns[work.partition(" ")[0]]
        restic = whole.get("restic", [Turn(1, 1, 0, 1)])
        base = [statistics.median(column) for column in zip(*restic, strict=True)]
        for name, some in by_name.items():
            seconds, processor, _, returned = (
                statistics.median(column) for column in zip(*some, strict=True)
            )
            memory = max(turn.memory_bytes for turn in some) / (1 << 20)
            lines.append(
                f"| {work} | {name} | {seconds:.2f} | {seconds / base[0]:.2f} | {returned:.2f} | {returned / base[3]:.2f} "
                f"| {processor / (mib / 1024):.2f} | {processor / base[1]:.2f} | {memory:.0f} |"
            )
    return (
        f"{mib} MiB, {rounds} rounds, medians; noise, sealed; load {os.getloadavg()[0]:.1f}.\n\n"
        + "\n".join(lines)
        + "\n"
    )


def main() -> int:
    """Measure, print the table, and keep it."""
    parser = argparse.ArgumentParser(prog="benchmarks.remote", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-kills", action="store_true")
    parser.add_argument("--tls", action="store_true", help="over TLS; the table is only printed")
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
            text = report(measure(bench, options.mib, options.rounds), options.mib, options.rounds)
            if not options.no_kills:
                text += f"\nKills: {json.dumps(measure_kills(bench, options.mib))}\n"
        finally:
            server.stop()
    sys.stdout.write(text)
    if not options.tls:
        (_RESULTS / f"{time.strftime('%Y-%m')}-remote.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
