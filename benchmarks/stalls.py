"""Time for which programs wait when the worker that serves their root dies, on an idle host and beside busy processes.

    PYTHONPATH=tests python -m benchmarks.stalls                     20 deaths idle, 20 beside 15 busy processes
    PYTHONPATH=tests python -m benchmarks.stalls --deaths 5 --busy 4

A program makes, writes, looks at and removes files without a pause, and the worker is killed (SIGKILL). The figure is
the longest of its system calls around each death.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from support.live import Live

_SETTLE_SECONDS = 1.5
"""Time after a death before the next one: the spare process is made anew meanwhile."""
_BUSY = "while True: pass"


def _work(directory: str) -> int:
    """Make files; for each byte on standard input print the longest call since the last one, in milliseconds."""
    os.set_blocking(0, False)
    number, longest = 0, 0.0
    while True:
        name = f"{directory}/{number % 50}"
        times = [time.perf_counter()]
        fd = os.open(name, os.O_RDWR | os.O_CREAT)
        times.append(time.perf_counter())
        os.pwrite(fd, b"x" * 2000, 0)
        times.append(time.perf_counter())
        os.stat(name)
        times.append(time.perf_counter())
        os.close(fd)
        times.append(time.perf_counter())
        os.unlink(name)
        times.append(time.perf_counter())
        longest = max(longest, *(end - start for start, end in pairwise(times)))
        number += 1
        try:
            asked = os.read(0, 1)
        except BlockingIOError:
            continue
        if not asked:
            return 0
        print(f"{longest * 1000:.1f}", flush=True)
        longest = 0.0


def _worker_pid(live: Live) -> int:
    status = live.status()
    assert status is not None
    return int(status["roots"][0]["worker_pid"])


def _deaths(live: Live, root: Path, count: int) -> list[float]:
    """Return the longest call around each death, in milliseconds."""
    program = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.stalls", "--work", str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert program.stdin is not None
    assert program.stdout is not None
    found = []
    try:
        for _ in range(count):
            time.sleep(_SETTLE_SECONDS)
            pid = _worker_pid(live)
            program.stdin.write(b"-")
            program.stdin.flush()
            program.stdout.readline()
            os.kill(pid, signal.SIGKILL)
            time.sleep(_SETTLE_SECONDS)
            program.stdin.write(b"-")
            program.stdin.flush()
            found.append(float(program.stdout.readline()))
    finally:
        program.stdin.close()
        program.wait(30)
    return found


def _report(what: str, found: list[float]) -> None:
    print(
        f"{what:32} median {statistics.median(found):7.0f} ms   longest {max(found):7.0f} ms   of {len(found)}",
        flush=True,
    )


def main() -> int:
    """Print the median and the longest stall of each kind of host."""
    parser = argparse.ArgumentParser(prog="benchmarks.stalls")
    parser.add_argument("--deaths", type=int, default=20, help="of each kind (20)")
    parser.add_argument("--busy", type=int, default=15, help="busy processes beside it (15)")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return _work(options.work)
    with tempfile.TemporaryDirectory(prefix="ciuic-stalls-") as top:
        root = Path(top) / "root"
        root.mkdir()
        with Live(Path(top), interval="52w") as live:
            live.start()
            live.run("protect", str(root))
            _report("idle", _deaths(live, root, options.deaths))
            busy = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(options.busy)]
            try:
                _report(f"beside {options.busy} busy processes", _deaths(live, root, options.deaths))
            finally:
                for one in busy:
                    one.kill()
                    one.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
