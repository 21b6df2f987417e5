"""Two hosts of one cloned disk upload to one remote: neither harms the other, and everything can be restored."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from support.cli_repository import CliRepository, Host
from support.live import installed


def clone(host: Host, top: Path) -> Host:
    """Return a host with a copy of everything that the other one has on its disk."""
    copied = Host(top)
    for name in ("repository", "upload"):
        shutil.copytree(host.top / name, top / name)
    shutil.copy2(host.key_file, copied.key_file)
    copied.config.write_text(host.config.read_text().replace(str(host.top), str(top)))
    return copied


def snapshot(host: Host, number: int, content: bytes) -> str:
    made = CliRepository(host.repository, host.top / "root", make=False)
    return str(made.snapshot({b"file": content}, id_=f"cs-{number:06x}"))


def upload_at_once(*hosts: Host) -> None:
    processes = [
        subprocess.Popen(
            [str(installed()), "remote", "upload", "--once"],
            env=host.env,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for host in hosts
    ]
    for process in processes:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said.decode()


def test_both_hosts_of_a_cloned_disk_upload_everything(short_tmp: Path) -> None:
    """Common, pending and new snapshots of both are in the remote and restored; ids that exist twice are qualified."""
    url = f"file://{short_tmp}/nas"
    one = Host(short_tmp / "one")
    one.run("remote", "init", url)
    contents = {"common": os.urandom(300_000), "pending": os.urandom(300_000)}
    common = snapshot(one, 1, contents["common"])
    one.run("remote", "upload", "--once")
    pending = snapshot(one, 2, contents["pending"])
    two = clone(one, short_tmp / "two")
    # The same id for different content, and one of each host's own; then once more when each log goes on.
    expected: dict[tuple[str, str], bytes] = {}
    for first in (3, 5):
        for at, host in enumerate((one, two)):
            for number in (first, 16 * (at + 1) + first):
                content = contents["common"][:100_000] + os.urandom(50_000)
                expected[snapshot(host, number, content), str(at)] = content
        upload_at_once(one, two)
    reader = Host(short_tmp / "reader")
    reader.env["CIUIC_REMOTE_KEY_FILE"] = str(one.key_file)
    listed = [found["id"] for found in reader.json("--repo", url, "list")["snapshots"]]
    assert len(listed) == len(set(listed)) == 2 + len(expected)
    assert {name.rpartition("/")[2] for name in listed} == {common, pending, *(id_ for id_, _ in expected)}
    twice = {id_ for id_, _ in expected if sum(one_id == id_ for one_id, _ in expected) == 2}
    assert len(twice) == 2
    assert all(("/" in name) == (name.rpartition("/")[2] in twice) for name in listed)
    assert not reader.json("--repo", url, "verify", "--all", "--checksum")["damaged"]
    restored: dict[str, list[bytes]] = {}
    for number, name in enumerate(listed):
        id_ = name.rpartition("/")[2]
        target = short_tmp / f"restored-{number}"
        # Both roots have the name "root"; which host's it is says the list.
        (found,) = reader.json("--repo", url, "show", name)["roots"]
        reader.run("--repo", url, "restore", "-s", name, "-p", found["path"], "-d", str(target))
        restored.setdefault(id_, []).append((target / "root" / "file").read_bytes())
    assert restored.pop(common) == [contents["common"]]
    assert restored.pop(pending) == [contents["pending"]]
    for id_, found_contents in restored.items():
        assert sorted(found_contents) == sorted(
            data for (one_id, _), data in expected.items() if one_id == id_
        )
