"""Ranks on hosts without a file system in common: each host stores its part, and any host takes the place of another."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.late_modules import LateModule, torch
from support.leftovers import living_children
from support.rank_processes import Ranks
from support.until import until

from ciuic import SnapshotManager
from ciuic.cli.app import cli
from ciuic.errors import NotFound
from ciuic.remote.sealing.key_slots import make_key_file
from ciuic.repository import Repository
from ciuic.training.snapshot_taker import RunProgress
from ciuic.training.writer.housekeeping import read_back
from ciuic.types import SetMember

ranks_apart: Any = LateModule("support.ranks_apart")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("torch_distributed")]


class Hosts:
    """Directories of a few hosts, and what ranks that ran there have written."""

    def __init__(self, top: Path) -> None:
        self.top = top
        (top / "nas").mkdir()
        make_key_file(str(top / "key"))
        self.remote = (f"file://{top / 'nas'}", str(top / "key"))
        self._runs = 0

    def named(self, *names: str) -> list[str]:
        return [str(self.top / f"host-{name}") for name in names]

    def run(self, main: Any, hosts: Sequence[str], *args: Any) -> list[dict[str, Any]]:
        """Run a rank on each host to the end; return what they wrote."""
        self._runs += 1
        result = self.top / f"result-{self._runs}"
        Ranks(self.top / f"logs-{self._runs}", len(hosts), main, list(hosts), *args, str(result)).check()
        return [json.loads(Path(f"{result}-{rank}").read_text()) for rank in range(len(hosts))]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    yield Hosts(tmp_path)
    # An upload outlives the manager that started it, and ends by itself.
    until(
        "the end of the uploads",
        lambda: (
            not any("training.remote.upload_process" in command for command in living_children().values())
        ),
    )


def _newest_member(directory: str) -> SetMember | None:
    with Repository.open(directory) as repository:
        return repository.snapshots.load(repository.snapshots.list()[0].id).set_member


def _newest_time(directory: str) -> int:
    with Repository.open(directory) as repository:
        return repository.snapshots.list()[0].time_ns


def test_a_state_is_later_than_what_the_run_has_resumed() -> None:
    """A clock that was ahead when an earlier state was saved, here or on another host, makes no old state the newest."""
    run = RunProgress()
    assert abs(run.next_time_ns() - time.time_ns()) < 60 * 10**9
    run.newest_ns = ahead = time.time_ns() + 3600 * 10**9
    assert run.next_time_ns() == ahead + 1


def test_hosts_resume_what_each_has_stored_itself(hosts: Hosts) -> None:
    """Without a remote ranks resume to the bit where each finds its own part; a part that is gone is named."""
    two = hosts.named("a", "b")
    saved = hosts.run(ranks_apart.save_sharded, two, None)
    members = [_newest_member(one) for one in two]
    assert members[0] is not None
    assert members[1] is not None
    assert (members[0].id, members[0].members) == (members[1].id, members[1].members)
    assert sorted(one.member for one in members if one) == list(members[0].members)
    assert len({_newest_time(one) for one in two}) == 1
    # Each stores its own shards alone, tells what it has stored, and rank 0 tells the callbacks.
    assert [one["id"] is not None for one in saved] == [True, True]
    assert [one["told"] for one in saved] == [3, 0]
    for directory in two:
        with Repository.open(directory) as repository:
            newest = repository.snapshots.list()[0]
            assert not read_back(repository, newest.id)
    facts = []
    for directory in two:
        with SnapshotManager(directory) as manager:
            facts.append([one.facts for one in manager.list_snapshots()])
    assert facts[0] == facts[1]
    assert facts[0][0].metrics == {"loss": 0.5}
    resumed = hosts.run(ranks_apart.resume_sharded, two, None)
    for before, after in zip(saved, resumed, strict=True):
        assert (after["step"], after["digest"], after["own"]) == (12, before["digest"], before["own"])
    with SnapshotManager(two[0]) as manager, pytest.raises(NotFound, match="one of the 2 parts"):
        manager.load_snapshot("latest")

    # A remote that cannot be reached is no reason to take a part for lost.
    with pytest.raises(AssertionError, match="cannot be loaded without the remote"):
        hosts.run(
            ranks_apart.resume_sharded,
            hosts.named("b", "a"),
            (f"file://{hosts.top / 'gone'}", hosts.remote[1]),
        )

    # The newest set loses a member: the one before it is loaded, and the loss is told.
    with Repository.open(two[1]) as repository, repository.writer(command="test") as writer:
        writer.remove_snapshots([repository.snapshots.list()[0].id])
    older = hosts.run(ranks_apart.resume_sharded, two, None)
    assert all(one["step"] == 10 for one in older)
    assert members[1].member in older[0]["passed_over"][0]


def test_any_host_takes_the_place_of_another_from_the_remote(hosts: Hosts) -> None:
    """With a remote a lost host, other places, three ranks and a process alone resume the same set to the bit."""
    a, b, c, d = hosts.named("a", "b", "c", "d")
    saved = hosts.run(ranks_apart.save_sharded, [a, b], hosts.remote)
    digest = saved[0]["digest"]
    _read_as_one(hosts, a)
    # Whose part lies on its own disk asks the remote for nothing; rank 0 looks whether there is a newer state.
    cache = Path(f"{b}.cache")
    shutil.rmtree(cache, ignore_errors=True)
    assert {one["digest"] for one in hosts.run(ranks_apart.resume_sharded, [a, b], hosts.remote)} == {digest}
    assert not cache.exists()
    shutil.rmtree(b)
    for where in ([d, a], [c, a, d]):
        resumed = hosts.run(ranks_apart.resume_sharded, where, hosts.remote)
        assert {(one["step"], one["digest"]) for one in resumed} == {(12, digest)}, where
        for directory in where:
            if directory != a:
                shutil.rmtree(directory)
    with SnapshotManager(a, remote={"url": hosts.remote[0], "key_file": hosts.remote[1]}) as manager:
        state = manager.load_latest_snapshot()
    assert state is not None
    assert state["note"] == {"a": 1.5}
    assert state["model_state_dict"]["0.weight"].shape == (1026, 16)


def _read_as_one(hosts: Hosts, one_host: str) -> None:
    """Read the states with commands: joined in the remote, and in the repository of one host by what is there."""
    key = {"CIUIC_REMOTE_KEY_FILE": hosts.remote[1], "CIUIC_CONFIG": "/dev/null"}
    cache = {"XDG_CACHE_HOME": str(hosts.top / "reader")}

    def run(place: str, *words: str, code: int = 0) -> str:
        done = CliRunner().invoke(cli, ["--repo", place, *words], env=key | cache)
        assert done.exit_code == code, done.output
        return done.stdout + (done.stderr if code else "")

    url = hosts.remote[0]
    newest = json.loads(run(url, "list", "--sets", "--json"))["sets"][0]
    assert newest["whole"]
    ids = [member["snapshot"] for member in newest["members"]]
    # Any member stands for all, and so does the set.
    for number, name in enumerate((*ids, f"set:{newest['id']}", "training@12")):
        file = hosts.top / f"exported-{number}"
        run(url, "export", name, str(file), "--to", "torch")
        state = torch.load(file, weights_only=True)
        assert state["model_state_dict"]["0.weight"].shape == (1026, 16)
    # Each stands for the same whole state.
    same = json.loads(run(url, "diff", "--tensors", *ids, "--json"))
    assert (same["tensors"], same["identical"] > 0) == ([], True)
    figures = json.loads(run(url, "tensors", "/training", "-t", "model.*", "--json"))["versions"][0]
    assert figures["tensors"]
    # Older states may lack a part in the remote: that is told of them alone. Each set is there once.
    history = CliRunner().invoke(
        cli, ["--repo", url, "tensors", "/training", "--history", "--json"], env=key | cache
    )
    assert history.exit_code in (0, 8), history.output
    versions = json.loads(history.stdout)["versions"]
    assert len({one["last"] for one in versions}.intersection(ids)) == 1
    assert versions[0]["problem"] is None
    # One host alone has a part, which is not damaged.
    assert "one of the 2 parts of" in run(
        one_host, "export", "latest", str(hosts.top / "none"), "--to", "torch", code=3
    )
    assert "has a part of the state" in run(one_host, "diff", "--tensors", "latest~1", "latest", code=2)
    assert "has a part of the state" in run(one_host, "tensors", "/training", code=2)
    for place in (one_host, url):
        found = json.loads(run(place, "checkpoints", "--json"))["checkpoints"]
        assert {one["verdict"] for one in found} == {"GOOD"}
    assert "every byte is right" in run(one_host, "verify", "--all", "--checksum")


def test_a_state_that_ranks_have_alike_is_sent_to_hosts_without_it(hosts: Hosts) -> None:
    """With DDP rank 0's host stores the state; on resume every other host gets it, with what was its rank's own."""
    two = hosts.named("a", "b")
    saved = hosts.run(ranks_apart.save_alike, two)
    with Repository.open(two[1]) as repository:
        assert repository.snapshots.list() == []
    assert hosts.run(ranks_apart.resume_alike, two) == saved


@pytest.mark.parametrize(("names", "sharded"), [("aa", False), ("ab", False), ("aa", True)])
def test_large_states_of_each_rank_come_back_and_the_job_keeps_its_store(
    hosts: Hosts, names: str, sharded: bool
) -> None:
    """Every rank gets back what is its own, of any size, and the job's next process group is made as without a save."""
    for rank, found in enumerate(hosts.run(ranks_apart.save_own_states, hosts.named(*names), sharded)):
        content = [[10 + rank], [20 + rank], [30], [40 + rank]]
        assert found == {"found": [[0, *content], [1, *content]], "failed": 0}


def test_ranks_meet_before_any_of_them_waits_for_a_remote(hosts: Hosts) -> None:
    """A rank that needs long for its remote belongs to the others; one whose remote refuses leaves them to themselves."""
    found = hosts.run(ranks_apart.come_late, hosts.named("a", "b"))
    assert [one["together"] for one in found] == [["True", "False"], ["True", "refused"]]
