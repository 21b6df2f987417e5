"""Two remotes of one host: a hot one that keeps two days, and a cold one that keeps years."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from support.cli_repository import CliRepository, Host
from support.remote_host import Elsewhere

DAY_NS = 86400 * 10**9
AGES_DAYS = (800, 400, 40, 1, 0)
TABLES = """
[[remote]]
name = "hot"
url = "file://{place}/hot"
[remote.keep]
keep_within = "{hot_within}"
keep_last = 1

[[remote]]
name = "cold"
url = "file://{place}/cold"
[remote.keep]
keep_within = "7d"
keep_last = 1
keep_monthly = 12
keep_yearly = 10
"""


def packed_bytes(place: Path) -> int:
    """Return the bytes in packs of a remote, also in those of repositories with an identity of their own."""
    return sum(path.stat().st_size for path in place.rglob("packs/*/*/*"))


@pytest.fixture
def host(short_tmp: Path) -> Host:
    return Host(short_tmp / "one")


def test_the_cold_remote_has_what_the_hot_one_dropped(host: Host, short_tmp: Path) -> None:
    """What the hot remote gave up and deleted, and the host forgot, comes back from the cold one bit for bit."""
    bare = host.config.read_text()
    host.config.write_text(bare + TABLES.format(place=short_tmp, hot_within="900d"))
    for name in ("hot", "cold"):
        host.run("remote", "init", name)
    made = CliRepository(host.repository, host.top / "root", make=False)
    now_ns = time.time_ns()
    contents = [random.Random(age).randbytes(500_000) for age in AGES_DAYS]
    ids = [
        str(made.snapshot({b"file": content}, time_ns=now_ns - age * DAY_NS))
        for age, content in zip(AGES_DAYS, contents, strict=True)
    ]
    host.run("remote", "upload", "--once")
    readers = {}
    for name in ("hot", "cold"):
        (short_tmp / f"reads-{name}").mkdir()
        key = {"CIUIC_REMOTE_KEY_FILE": str(host.top / f"remote-{name}.key")}
        readers[name] = Elsewhere(short_tmp / f"reads-{name}", f"file://{short_tmp}/{name}", key)
        assert readers[name].listed() == set(ids)
    # Time that passes: what was young enough for the hot remote is not any more.
    host.config.write_text(host.config.read_text().replace('keep_within = "900d"', 'keep_within = "2d"'))
    host.run("remote", "upload", "--once")
    assert readers["hot"].listed() == set(ids[-2:])
    assert readers["cold"].listed() == set(ids)
    host.run("forget", "-y", *ids[:3])
    before = {name: packed_bytes(short_tmp / name) for name in readers}
    # Packs of the last day are spared, by the store's clock: for a directory the time of the file.
    for path in (short_tmp / "hot").rglob("*"):
        if path.is_file():
            os.utime(path, ns=(now_ns - 2 * DAY_NS, now_ns - 2 * DAY_NS))
    host.run("prune", "--remote", "--name", "hot")
    assert packed_bytes(short_tmp / "hot") < before["hot"] - sum(map(len, contents[:3])) // 2
    assert packed_bytes(short_tmp / "cold") == before["cold"]
    assert ids[0] in readers["hot"].run("restore", "-s", ids[0], "-p", str(host.top / "root"), code=3)
    for id_, content in zip(ids, contents, strict=True):
        back = short_tmp / "back" / id_
        readers["cold"].run("restore", "-s", id_, "-p", str(host.top / "root"), "-d", str(back))
        assert (back / "root" / "file").read_bytes() == content
    # Nothing goes up again: neither to the remote that gave it up, nor from the one that has it.
    host.run("remote", "upload", "--once")
    assert readers["hot"].listed() == set(ids[-2:])
    assert readers["cold"].listed() == set(ids)
