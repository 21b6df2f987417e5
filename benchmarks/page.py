"""Time of the pages of `ciuic web` over a large repository: `python -m benchmarks.page`.

A repository of 10,000 snapshots, one of whose folders has 100,000 files, without a daemon. Wall time of whole answers over loopback, from a server
that has answered each before: the median and the longest of several. The bytes are those of the page without its style and script.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.cli_repository import FIRST_NS, SECOND_NS, directory, store_file, store_tree

from ciuic.repository import Repository
from ciuic.types import RootRecord, SnapshotDraft, SnapshotId

_PAGES = (
    "/",
    "/snapshots",
    "/snapshots?from=5000",
    "/snapshots?q=step+77",
    "/snapshot?s=cs-000100",
    "/files?p=/data",
    "/files?p=/data/many",
    "/files?p=/data/many&after=f050000",
    "/files?p=/data/many&start=f0999",
    "/files?p=/data/step",
    "/versions?p=/data/many/f000007",
    "/hosts",
    "/changes?since=1w",
    "/compare?a=cs-000100&b=cs-000200",
)


def _fill(path: Path, snapshots: int, files: int) -> None:
    with Repository.create(path) as repository, repository.writer() as writer:
        one = store_file(writer, repository.block_size, b"", b"content")
        many = store_tree(writer, repository.block_size, {b"f%06d" % number: one for number in range(files)})
        for number in range(snapshots):
            time_ns = FIRST_NS + number * 600 * SECOND_NS
            step = store_tree(writer, repository.block_size, {b"step": b"step %d" % number})
            tree = writer.update_tree(step.id, {b"many": directory(b"many", many)})
            root = RootRecord(path=b"/data", entry=directory(b"", tree), mode="tracked", not_held=0)
            writer.commit(
                SnapshotDraft(
                    id=SnapshotId.parse(f"cs-{number:06x}"),
                    time_ns=time_ns,
                    host="h",
                    roots=(root,),
                    message=f"step {number}",
                )
            )


def _ask(
    port: int, target: str, cookie: str, body: str | None = None
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    headers = {"Cookie": cookie} | ({"Origin": f"http://127.0.0.1:{port}"} if body is not None else {})
    connection.request("GET" if body is None else "POST", target, body, headers)
    answer = connection.getresponse()
    found = answer.status, answer.headers, answer.read()
    connection.close()
    return found


def main() -> None:
    """Measure, and print a table and one JSON document."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--snapshots", type=int, default=10_000)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", type=Path, default=None)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.dir) as made:
        top = Path(made)
        began = time.perf_counter()
        _fill(top / "repository", given.snapshots, given.files)
        print(f"filled in {time.perf_counter() - began:.0f} s", file=sys.stderr)
        (top / "c.toml").write_text(
            f'[repository]\npath = "{top}/repository"\n[daemon]\nruntime_dir = "{top}/run"\n'
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        ciuic = [str(Path(sys.executable).with_name("ciuic")), "--config", str(top / "c.toml")]
        environment = {**os.environ, "XDG_STATE_HOME": str(top / "state")}
        with subprocess.Popen(
            [*ciuic, "web", "--listen", f"127.0.0.1:{port}"], env=environment, cwd="/"
        ) as server:
            try:
                report = _measure(port, ciuic, environment, given.rounds)
                peak = _peak_mib(server.pid)
            finally:
                server.send_signal(signal.SIGTERM)
    for target, (median_ms, longest_ms, size_bytes) in report.items():
        print(f"{target:40} {median_ms:8.1f} ms {longest_ms:8.1f} ms {size_bytes:9,} bytes")
    print(f"memory of the process that faces browsers: {peak} MiB at most")
    print(json.dumps({"pages": report, "peak_mib": peak}))


def _measure(
    port: int, ciuic: list[str], environment: dict[str, str], rounds: int
) -> dict[str, tuple[float, float, int]]:
    link = ""
    while not link:
        asked = subprocess.run(
            [*ciuic, "web", "--login"], env=environment, cwd="/", capture_output=True, text=True
        )
        link = asked.stdout.strip()
        time.sleep(0.2)
    headers = _ask(port, "/login", "", f"token={link.rpartition('=')[2]}")[1]
    cookie = headers["set-cookie"].partition(";")[0]
    report = {}
    for target in _PAGES:
        took, size_bytes = [], 0
        for number in range(rounds + 1):
            began = time.perf_counter()
            status, _, body = _ask(port, target, cookie)
            if status != 200:
                raise SystemExit(f"{target}: {status}\n{body.decode()}")
            size_bytes = len(body)
            if number:
                took.append(1000 * (time.perf_counter() - began))
            else:
                first_ms = 1000 * (time.perf_counter() - began)
                print(f"{target}: the first time {first_ms:.0f} ms", file=sys.stderr)
        report[target] = (statistics.median(took), max(took), size_bytes)
    return report


def _peak_mib(server: int) -> int:
    children = [
        pid for task in Path(f"/proc/{server}/task").glob("*/children") for pid in task.read_text().split()
    ]
    status = next(
        Path(f"/proc/{pid}/status").read_text()
        for pid in children
        if b"front_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return int(status.partition("VmHWM:")[2].split()[0]) >> 10


if __name__ == "__main__":
    main()
