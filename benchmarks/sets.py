"""Time for which programs are held while hosts agree on one instant, against a SeaweedFS on this machine.

    PYTHONPATH=tests python -m benchmarks.sets                 4 hosts and 16
    PYTHONPATH=tests python -m benchmarks.sets --hosts 4 --rounds 2

Each host is a process that cuts sets one after the other with the program's own protocol (ciuic.remote.sets); its daemon
is replaced by one that holds nothing, so that the figure is what agreeing costs. The hold of a real one begins a
moment later and ends a moment later: its own cut adds 2 to 5 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ciuic.remote.objects.opening import open_objects
from ciuic.remote.objects.urls import StoreSettings
from ciuic.remote.sealing.sealer import MasterKey, Sealer
from ciuic.remote.sets import SetMeeting, SetRequest
from ciuic.types import SetMember

_SEALER = Sealer(b"r" * 16, MasterKey(b"k" * 32))


class _Nothing:
    """A daemon and its hold, which only take the time."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def flush(self) -> bool:
        return True

    def hold(self, member: SetMember, limit_seconds: float, *, flushed: bool) -> _Nothing:
        self._began = time.monotonic()
        return self

    def cut(self) -> float:
        self.release()
        return self.seconds[-1]

    def release(self) -> None:
        self.seconds.append(time.monotonic() - self._began)


def _take_part(url: str, endpoint: str, hosts: int, host: int, rounds: int) -> None:
    """Cut sets as one host, and print how long it was held for each."""
    objects = open_objects(url, StoreSettings(endpoint=endpoint, region="us-east-1"))
    members = tuple(f"h{number:02}" for number in range(hosts))
    daemon = _Nothing()
    for number in range(rounds):
        request = SetRequest(f"round {number}", members, members[host], hold_limit_seconds=10.0)
        SetMeeting(objects, _SEALER, request).take(daemon)
    print(json.dumps(daemon.seconds))


def measure(url: str, endpoint: str, environment: dict[str, str], hosts: int, rounds: int) -> str:
    """Return a line of the table."""
    command = [sys.executable, "-m", "benchmarks.sets", "--url", url, "--endpoint", endpoint]
    children = [
        subprocess.Popen(
            [*command, "--hosts", str(hosts), "--rounds", str(rounds), "--host", str(host)],
            env={**os.environ, **environment},
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE,
        )
        for host in range(hosts)
    ]
    held = [json.loads(child.communicate()[0]) for child in children]
    # The first round has the imports and the connections in it.
    longest = [max(of_host[-at] for of_host in held) for at in range(1, rounds)]
    attempts = max(map(len, held))
    every = [seconds for of_host in held for seconds in of_host[1:]]
    return (
        f"| {hosts} | {1000 * statistics.median(every):.0f} | {1000 * statistics.median(longest):.0f} "
        f"| {1000 * max(longest):.0f} | {rounds} of {attempts} |"
    )


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.sets", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--hosts", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=11)
    for hidden in ("--url", "--endpoint"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    parser.add_argument("--host", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.host >= 0:
        _take_part(options.url, options.endpoint, options.hosts, options.host, options.rounds)
        return 0
    from support.object_servers import SeaweedFS

    with tempfile.TemporaryDirectory(prefix="ciuic-sets-") as folder:
        server = SeaweedFS(Path(folder))
        try:
            server.start()
            print("| hosts | held, median ms | longest of a set, median ms | longest of all ms | attempts |")
            print("| --- | --- | --- | --- | --- |")
            for hosts in [options.hosts] if options.hosts else [4, 16]:
                line = measure(server.new_url(), server.endpoint, server.environment(), hosts, options.rounds)
                print(line, flush=True)
        finally:
            server.stop()
    print(f"\nLoad {os.getloadavg()[0]:.1f}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
