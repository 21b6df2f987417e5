"""Jobs of a real Slurm with two nodes come back where they were: after preemptions, and after the death of a node."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.depth import by_depth
from support.live import Live, installed
from support.site import CHECKOUT
from support.slurm_cluster import Cluster, cluster_in
from support.slurm_training import RUN_STEPS
from support.until import until

from ciuic import SnapshotManager
from ciuic.system import mountinfo

_HOOKS = CHECKOUT / "etc/slurm"
pytestmark = pytest.mark.mount
_TRAINING = CHECKOUT / "tests/support/slurm_training.py"
_CIUIC = f"{shlex.quote(sys.executable)} -m ciuic"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_in(tmp_path_factory.mktemp("slurm")) as made:
        made.environment["PYTHONPATH"] = f"{CHECKOUT}:{CHECKOUT / 'tests'}"
        yield made


@pytest.fixture
def cluster(running: Cluster) -> Iterator[Cluster]:
    """Provide the cluster without jobs."""
    yield running
    running.clear()
    running.set_hooks("exit 0")


@pytest.fixture
def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Provide a cluster for one test, which loses a node of it."""
    with cluster_in(tmp_path_factory.mktemp("slurm")) as made:
        made.environment["PYTHONPATH"] = f"{CHECKOUT}:{CHECKOUT / 'tests'}"
        yield made


def _training(top: Path, steps: int, every: int = 0) -> str:
    return shlex.join([sys.executable, str(_TRAINING), str(top), str(steps), str(every)])


def _submit(cluster: Cluster, top: Path, command: str, *options: str) -> str:
    script = top / "job.sh"
    script.write_text(f"#!/bin/bash\nexec {command}\n")
    return cluster.submit(
        "--partition=low", "--requeue", f"--output={top}/out", "--open-mode=append", *options, script=script
    )


def _lines(top: Path) -> list[str]:
    try:
        return (top / "runs").read_text().splitlines()
    except FileNotFoundError:
        return []


def _until_run(cluster: Cluster, top: Path, job: str, number: int) -> str:
    """Wait for the five steps of a run of the training, and return the node."""
    until(f"run {number} of job {job}", lambda: len(_lines(top)) == 2 * number)
    return _lines(top)[-1].split()[0]


def _whole(top: Path, steps: int) -> str:
    """Return the digest of a training that nothing has interrupted."""
    top.mkdir()
    (top / "finish").touch()
    subprocess.run(
        shlex.split(_training(top, steps)), check=True, timeout=60, cwd=top,
        env={**os.environ, "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'tests'}"},
    )  # fmt: skip
    return (top / "result").read_text()


def test_a_preempted_training_resumes_on_the_other_node_at_its_step(cluster: Cluster, tmp_path: Path) -> None:
    """A training that is preempted again and again saves, is requeued, and resumes on the other node with the bits it had."""
    times = by_depth(1, 3)
    steps = RUN_STEPS * (times + 1)
    job = _submit(
        cluster, tmp_path, f"{_CIUIC} slurm run --grace 20 -- srun {_training(tmp_path, steps)}", "--job-name=my run",
    )  # fmt: skip
    nodes = [_until_run(cluster, tmp_path, job, 1)]
    for number in range(1, times + 1):
        other = cluster.submit(
            "--partition=high", f"--nodelist={nodes[-1]}", "--output=/dev/null", wrap="sleep 600"
        )
        until("the requeue", lambda: cluster.state(job) == "PENDING")
        cluster.start_now(job)
        nodes.append(_until_run(cluster, tmp_path, job, number + 1))
        cluster.ask("scancel", other)
    (tmp_path / "finish").touch()
    until("the end of the training", (tmp_path / "result").exists)
    assert [line.split()[2] for line in _lines(tmp_path)[::2]] == [
        str(RUN_STEPS * at) for at in range(times + 1)
    ]
    assert all(before != after for before, after in pairwise(nodes)), nodes
    assert (tmp_path / "result").read_text() == _whole(tmp_path / "whole", steps)
    with SnapshotManager(tmp_path / "snapshots") as manager:
        tags = [set(one.tags) - {"training"} for one in reversed(manager.list_snapshots())]
    assert tags == [
        {f"slurm-job={job}", "slurm-name=my_run", f"slurm-restart={number}"} for number in range(times)
    ]
    until("the end of the job", lambda: cluster.state(job) == "COMPLETED")


def test_a_job_is_requeued_up_to_a_limit_and_never_for_its_own_fault(
    cluster: Cluster, tmp_path: Path
) -> None:
    """A task of an array that is told of its time limit is requeued, not more often than it may be; a command that fails is not."""
    command = f"{_CIUIC} slurm run --max-requeues 1 -- srun {_training(tmp_path, 3 * RUN_STEPS)}"
    job = f"{_submit(cluster, tmp_path, command, '--array=3')}_3"
    _until_run(cluster, tmp_path, job, 1)
    # As at the end of the time limit with --signal=B:USR1@60: to the batch script alone.
    cluster.ask("scancel", "--batch", "--signal=USR1", job)
    until("the requeue", lambda: cluster.state(job) == "PENDING")
    cluster.start_now(job)
    _until_run(cluster, tmp_path, job, 2)
    assert _lines(tmp_path)[2].endswith(f"begins {RUN_STEPS}")
    # And with --signal=USR1@60: to the steps alone.
    cluster.ask("scancel", "--signal=USR1", job)
    until("the end", lambda: cluster.state(job) == "FAILED")
    assert "ExitCode=138:0" in cluster.ask("scontrol", "show", "job", job)
    assert (
        "was started again 1 times: it is not requeued (--max-requeues 1)" in (tmp_path / "out").read_text()
    )
    with SnapshotManager(tmp_path / "snapshots") as manager:
        assert all("slurm-array=3" in one.tags for one in manager.list_snapshots())
    job = _submit(cluster, tmp_path, f"{_CIUIC} slurm run -- sh -c 'exit 3'")
    until("the end", lambda: cluster.state(job) == "FAILED")
    assert "ExitCode=3:0" in cluster.ask("scontrol", "show", "job", job)


def _steps(top: Path) -> list[int | None]:
    with SnapshotManager(top / "snapshots") as manager:
        return [one.facts.step for one in manager.list_snapshots()]


def _hooks(live: Live, **variables: str) -> str:
    """Return what Prolog and Epilog run: the shipped scripts, for this configuration."""
    given = {
        "CIUIC": str(installed()), "CIUIC_CONFIG": str(live.config), "PYTHONPATH": str(CHECKOUT),
        "CIUIC_SLURM_NOTES": f"{live.top}/notes", **variables,
    }  # fmt: skip
    words = [f"{name}={shlex.quote(value)}" for name, value in given.items()]
    return f"exec env {' '.join(words)} {_HOOKS}/$hook.sh"


def _snapshots(live: Live, job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = live.json("list", "--tag", f"slurm-job={job}")["snapshots"]
    return found


def _is_mounted(path: Path) -> bool:
    return os.fsencode(path) in {mount.mount_point for mount in mountinfo.read()}


def test_a_job_has_its_directory_protected_while_it_runs(
    cluster: Cluster, live: Live, short_tmp: Path
) -> None:
    """Prolog and epilog protect what a job names, each job on its own, and leave a snapshot with its tags and no root.

    Also where two nodes keep their records in one directory: a job of the other node is not lost.
    """
    # A job that ended with its machine has left a root and a record.
    state, lost = short_tmp / "state", short_tmp / "lost"
    lost.mkdir()
    (state / "ciuic/slurm/n1").mkdir(parents=True)
    (state / "ciuic/slurm/n1/99999").write_text(f"{lost}\n")
    live.run("protect", str(lost))
    live.start(lost)
    cluster.set_hooks(_hooks(live, XDG_STATE_HOME=str(state)))
    jobs: list[tuple[str, Path]] = []
    for name, node in (("one", "n1"), ("two", "n2")):
        path = short_tmp / name
        path.mkdir()
        script = (
            f"echo begun > {path}/log; until [ -e {path}/go ]; do sleep 0.05; done; echo ended >> {path}/log"
        )
        jobs.append(
            (
                cluster.submit(
                    f"--comment=ciuic={path}",
                    f"--output={short_tmp}/out",
                    f"--nodelist={node}",
                    "--job-name=n",
                    wrap=script,
                ),
                path,
            )
        )
        until("the job", (path / "log").exists)
    for _, path in jobs:
        assert _is_mounted(path)
    for job, path in jobs:
        (path / "go").touch()
        until("the end of the job", lambda job=job: _snapshots(live, job))  # type: ignore[misc]
        (taken,) = _snapshots(live, job)
        assert f"slurm-job={job}" in taken["tags"]
        assert live.run("cat", taken["id"], str(path / "log")).stdout == b"begun\nended\n"
        until("the end of the mount", lambda path=path: not _is_mounted(path))  # type: ignore[misc]
        assert str(path) not in live.config.read_text()
    assert not _is_mounted(lost)
    assert "[[root]]" not in live.config.read_text()
    assert not list((state / "ciuic/slurm").glob("*/*"))
    until("idle nodes", lambda: cluster.node_states() == ["idle", "idle"])


def test_hooks_that_fail_drain_no_node(cluster: Cluster, live: Live, short_tmp: Path) -> None:
    """Where ciuic is missing or no daemon runs, or a directory is none of the user's, the job runs and its node stays; strict hooks drain it.

    That the directory is not protected is in the log of the job; what the user has named wrongly drains no node.
    """
    theirs, link = short_tmp / "theirs", short_tmp / "link"
    theirs.mkdir()
    os.chown(theirs, 54321, 54321)
    link.symlink_to("/etc")
    own = short_tmp / "own"
    own.mkdir()
    for variables, path in (
        ({"CIUIC": "/nonexistent/ciuic"}, own), ({}, own), ({}, theirs), ({}, link), ({}, short_tmp / "missing"),
    ):  # fmt: skip
        cluster.set_hooks(_hooks(live, XDG_STATE_HOME=str(short_tmp), **variables))
        job = cluster.submit(
            f"--comment=ciuic={path}", f"--output={short_tmp}/out", wrap=f"touch {short_tmp}/ran"
        )
        until("the job", lambda job=job: cluster.state(job) == "COMPLETED")  # type: ignore[misc]
        (short_tmp / "ran").unlink()
        assert "protected" in (short_tmp / "out").read_text()
        until("idle nodes", lambda: cluster.node_states() == ["idle", "idle"])
    assert "[[root]]" not in live.config.read_text()
    cluster.set_hooks(_hooks(live, CIUIC_SLURM_STRICT="1", XDG_STATE_HOME=str(short_tmp)))
    job = cluster.submit(f"--comment=ciuic={link}", f"--output={short_tmp}/out", wrap="true")
    until("the job", lambda: cluster.state(job) == "COMPLETED")
    until("idle nodes", lambda: cluster.node_states() == ["idle", "idle"])
    assert "a symbolic link leads there" in (short_tmp / "out").read_text()
    assert not list((live.top / "notes").iterdir())
    cluster.set_hooks(
        _hooks(live, CIUIC="/nonexistent/ciuic", CIUIC_SLURM_STRICT="1", XDG_STATE_HOME=str(short_tmp))
    )
    cluster.submit("--comment=ciuic=/x", "--output=/dev/null", "--nodelist=n2", wrap="true")
    until("the drained node", lambda: any(state.startswith("drain") for state in cluster.node_states()))
    cluster.set_hooks("exit 0")
    cluster.clear()
    cluster.ask("scontrol", "update", "NodeName=n1,n2", "State=RESUME")
    until("idle nodes", lambda: cluster.node_states() == ["idle", "idle"])


def test_a_job_without_a_manager_goes_on_from_a_snapshot_of_its_directory(
    cluster: Cluster, live: Live, short_tmp: Path
) -> None:
    """A command that does not save by itself is preempted; its directory's last snapshot, from the remote, is where its next run finds it."""
    root = short_tmp / "data"
    root.mkdir()
    live.run("remote", "init", f"file://{short_tmp}/nas", "--key-file", f"{short_tmp}/key")
    live.run("protect", str(root))
    live.start(root)
    program = f"echo $SLURM_RESTART_COUNT >> {root}/log; exec sleep 600"
    job = _submit(
        cluster, short_tmp, f"{_CIUIC} slurm run --grace 20 -p {root} -- srun sh -c {shlex.quote(program)}",
        f"--export=ALL,CIUIC_CONFIG={live.config}",
    )  # fmt: skip
    until("the first run", (root / "log").exists)
    other = cluster.submit(
        "--partition=high", f"--nodelist={cluster.node_of(job)}", "--output=/dev/null", wrap="sleep 600"
    )
    until("the requeue", lambda: cluster.state(job) == "PENDING")
    (taken,) = _snapshots(live, job)
    assert "slurm-restart=0" in taken["tags"]
    live.run("remote", "upload", "--once")
    (root / "log").unlink()
    cluster.start_now(job)
    until("the second run", lambda: (root / "log").exists() and (root / "log").read_text() == "\n1\n")
    cluster.ask("scancel", other, job)
    # On a node where the directory is no root, the files follow behind a mount.
    live.run("unprotect", str(root))
    (root / "log").unlink()
    environment = {**live.env, "SLURM_JOB_ID": job}
    done = subprocess.run(
        [installed(), "slurm", "run", "-p", root, "--", "cat", root / "log"],
        env=environment, cwd="/", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
    assert "is restored from" in done.stderr
    assert [one["destination"] for one in live.json("restore", "--status")["restores"]] == [str(root)]


def test_a_training_outlives_its_node(own_cluster: Cluster, tmp_path: Path) -> None:
    """A node that loses power ends its training, which Slurm requeues, and which resumes on the other node at its last state."""
    cluster, steps = own_cluster, 3 * RUN_STEPS
    job = _submit(
        cluster, tmp_path, f"{_CIUIC} slurm run --grace 20 -- srun {_training(tmp_path, steps, every=2)}"
    )
    node = _until_run(cluster, tmp_path, job, 1)
    until("the last state", lambda: 4 in _steps(tmp_path))
    cluster.kill_node(node)
    if not by_depth(False, True):
        # Slurm finds out by itself within half a minute, and a health check at once.
        cluster.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=power")
    until("the requeue", lambda: cluster.state(job) == "PENDING")
    cluster.start_now(job)
    assert _until_run(cluster, tmp_path, job, 2) != node
    assert _lines(tmp_path)[2].endswith("begins 4")
    (tmp_path / "finish").touch()
    until("the end of the training", (tmp_path / "result").exists)
    assert (tmp_path / "result").read_text() == _whole(tmp_path / "whole", steps)
    until("the end of the job", lambda: cluster.state(job) == "COMPLETED")
