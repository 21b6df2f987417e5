"""Attacker: a host whose key for a remote may only add objects, and that gives up all snapshots of all hosts."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest
from support.remote_host import BLOCK, Elsewhere, RemoteHost, reading
from support.restoring import write
from support.ssh_server import SshServer

from ciuic.remote.access import add_slot, init_remote
from ciuic.remote.documents import GivenUp, LogState, StoredApproval, create_approval, create_entry
from ciuic.remote.log_reader import LogReader, Rounds
from ciuic.remote.object_names import new_hex_id
from ciuic.remote.objects.model import RemoteRefused
from ciuic.remote.objects.opening import open_objects
from ciuic.remote.objects.urls import parse_url
from ciuic.remote.sealing.key_slots import recovery_secret, show_recovery_key
from ciuic.remote.sealing.sealer import MasterKey
from ciuic.remote.upkeep.collect import collect_remote
from ciuic.remote.writer_log import WriterLog, WriterState

SNAPSHOTS = 6
RECOVERY = show_recovery_key(bytes(range(32)))


@pytest.mark.parametrize("attack", ["removals", "sums"])
def test_a_host_that_gives_up_all_hides_nothing(ssh_server: SshServer, tmp_path: Path, attack: str) -> None:
    """All is listed and restored, and a collection deletes nothing, until a person approves; the host itself cannot."""
    url = ssh_server.new_url()
    directory = Path(parse_url(url).prefix)
    objects = open_objects(f"file://{directory}", make=True)
    remote = init_remote(objects, master=MasterKey.generate(), block_size=BLOCK)
    add_slot(remote, "recovery", recovery_secret(RECOVERY))
    for name in ("alpha", "beta"):
        host = RemoteHost(tmp_path / name, remote, name=name)
        for number in range(SNAPSHOTS):
            write(host.root / "file", random.Random(number).randbytes(3 * BLOCK))
            host.snapshot()
            host.upload()
    # Three days ago, by the clock of the server.
    for path in directory.rglob("*"):
        os.utime(path, (time.time() - 3 * 86_400,) * 2)
    known = LogReader(objects, remote.sealer)
    known.refresh()
    victims = known.live()
    assert len(victims) == 2 * SNAPSHOTS
    forced = f"{ssh_server.program} remote serve --stdio --append-only {directory}"
    try:
        ssh_server.admit(f'restrict,command="{forced}"')
        evil = ssh_server.connect(url)
        if attack == "removals":
            state = WriterState(str(tmp_path / "evil"))
            log = WriterLog(
                evil, remote.sealer, state, Rounds(evil, remote.sealer), host="evil", repository="e" * 32
            )
            log.hello()
            log.remove(list(victims), [GivenUp(one.repository, one.snapshot) for one in victims.values()])
        else:
            for writer, summary in known.logs.items():
                sum_ = LogState(nonce=new_hex_id(), live=(), removed=tuple(victims))
                assert create_entry(evil, remote.sealer, writer, summary.next, sum_)
        approval = StoredApproval(host="evil", manifests=tuple(victims))
        with pytest.raises(RemoteRefused, match="approve"):
            create_approval(evil, remote.sealer, new_hex_id(), approval)
        evil.close()
    finally:
        ssh_server.admit()
    before = {info.name for info in objects.list("") if not info.name.startswith(("w/", "gc/"))}
    (tmp_path / "elsewhere").mkdir()
    secrets = {"CIUIC_REMOTE_RECOVERY_KEY": RECOVERY, "PYTHONPATH": str(Path(__file__).parents[2])}
    person = Elsewhere(tmp_path / "elsewhere", f"file://{directory}", secrets)
    names = person.listed()
    assert len(names) == 2 * SNAPSHOTS
    for turn in range(2):
        with reading(remote, tmp_path / f"cache-{turn}") as opened:
            collect_remote(opened, host="operator")
        # Whatever the collection has made of the logs.
        assert before == {info.name for info in objects.list("") if not info.name.startswith(("w/", "gc/"))}
        assert person.listed() == names
    done = person.start("list", "--all-claims", "--json")
    assert {one["id"] for one in json.loads(done.stdout)["snapshots"]} == names
    assert b"fleet approve" in done.stderr
    person.run("verify", "--all", "--checksum")
    assert "nobody to ask" in person.run("fleet", "approve", f"file://{directory}", code=2)
    person.run("fleet", "approve", f"file://{directory}", "alpha", "-y")
    assert len(person.listed()) == SNAPSHOTS
    person.run("fleet", "approve", f"file://{directory}", "-y")
    assert not person.listed()
    with reading(remote, tmp_path / "cache-0") as opened:
        collect_remote(opened, host="operator")
    assert not list(objects.list("manifests/"))
    objects.close()
