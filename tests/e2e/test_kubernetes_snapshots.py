"""TrainingSnapshots on an API server, with a controller and the agents of two nodes: each state, failures, restarts, rights."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

if sys.version_info < (3, 11):
    pytest.skip("Kopf and kmock need Python 3.11", allow_module_level=True)

from support.kubernetes_api import NAMESPACE, Cluster, cluster, controller, rendered, rights
from support.site import CHECKOUT

from ciuic.errors import CiuicError, NotPermitted
from ciuic.operator.agent import Agent, Cut
from ciuic.operator.api import LeaderLease

JOBS = {
    "Job": {"batch.kubernetes.io/job-name": "llm"},
    "JobSet": {"jobset.sigs.k8s.io/jobset-name": "llm"},
    "TrainJob": {"jobset.sigs.k8s.io/jobset-name": "llm"},
    "PyTorchJob": {"training.kubeflow.org/job-name": "llm"},
}


class Node:
    """A daemon that does what the test says."""

    def __init__(self, number: int) -> None:
        self.taken: list[tuple[str, list[str], bool]] = []
        self.committing = asyncio.Event()
        self.error: CiuicError | None = None
        self.checkpoint: str | None = "GOOD"
        self.stored = "Stored"
        self.reloaded = asyncio.Event()
        self._number = number
        self._loop = asyncio.get_running_loop()

    def take(self, message: str, tags: list[str], *, hold: bool) -> Cut:
        self.taken.append((message, tags, hold))
        if self.error is not None:
            raise self.error.anew()
        return Cut(f"cs-00000{self._number}", 100 + self._number)

    def wait(self, snapshot: str) -> None:
        asyncio.run_coroutine_threadsafe(self.committing.wait(), self._loop).result()

    def verdict(self, snapshot: str) -> str | None:
        return self.checkpoint

    def remote(self, snapshot: str) -> str:
        return self.stored

    def reload(self) -> None:
        self._loop.call_soon_threadsafe(self.reloaded.set)


@asynccontextmanager
async def agent(
    where: Cluster,
    name: str,
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
    configuration: tuple[Path, Path] | None = None,
) -> AsyncIterator[None]:
    stop = asyncio.Event()
    async with where.api_of("agent", monkeypatch) as api:
        running = asyncio.create_task(
            Agent(api, name, node, configuration=configuration, poll_seconds=0.05).run(stop)
        )
        try:
            yield
        finally:
            stop.set()
            node.committing.set()
            await running


def pod(name: str, node: str, labels: dict[str, str]) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default", "labels": labels}
    container = {"name": "train", "image": "registry.example/train"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"nodeName": node, "containers": [container]},
    }


async def run_pod(where: Cluster, name: str, node: str, labels: dict[str, str]) -> None:
    await run_pods(where, (name, node, labels))


async def run_pods(where: Cluster, *pods: tuple[str, str, dict[str, str]]) -> None:
    """Let pods run, all from the same moment: a snapshot that waits takes those that run when it sees the first."""
    made = [await where.make(pod(*one)) for one in pods]
    await asyncio.gather(*(where.api.patch_status(body, {"phase": "Running"}) for body in made))


def snapshot(name: str, kind: str = "Job", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "ciuic.io/v1alpha1",
        "kind": "TrainingSnapshot",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"jobRef": {"kind": kind, "name": "llm"}, **spec},
    }


def test_a_snapshot_from_its_request_to_the_remote_with_no_right_to_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for pods, is cut on their nodes, committed, looked at and uploaded; all under the chart's rights, of which none is left over."""
    granted = {
        "controller": rights(one for one in rendered() if one["kind"].endswith("Role") and one["metadata"]["name"] == "ciuic-operator"),
        "agent": rights(one for one in rendered() if one["kind"] == "ClusterRole" and one["metadata"]["name"] == "ciuic-node"),
    }  # fmt: skip

    async def run() -> None:
        async with cluster(tmp_path, monkeypatch) as where:
            if where.mock is not None:
                where.mock.granted = granted
            one, two = Node(1), Node(2)
            two.stored = "Waiting"
            async with (
                controller(where, monkeypatch),
                agent(where, "n1", one, monkeypatch),
                agent(where, "n2", two, monkeypatch),
            ):
                made = await where.make(snapshot("before-merge", hold=True))
                told = await where.condition(made, "NoRunningPods")
                assert "batch.kubernetes.io/job-name=llm" in told["message"]
                index = "batch.kubernetes.io/job-completion-index"
                await run_pods(
                    where,
                    ("llm-0-x", "n1", {**JOBS["Job"], index: "0"}),
                    ("llm-1-x", "n2", {**JOBS["Job"], index: "1"}),
                )
                told = await where.condition(made, "Capturing")
                await where.until(
                    made,
                    lambda body: (
                        body["status"]["nodes"]["n1"]["phase"]
                        == "Cut"
                        == body["status"]["nodes"]["n2"]["phase"]
                    ),
                )
                one.committing.set()
                await where.until(made, lambda body: body["status"]["nodes"]["n1"].get("remote") == "Stored")
                two.committing.set()
                assert (await where.condition(made, "Committed"))["status"] == "True"
                assert (await where.condition(made, "Uploading", "Stored"))["status"] == "False"
                assert (await where.condition(made, "Good", "Verified"))["status"] == "True"
                two.stored = "Stored"
                assert (await where.condition(made, "Stored", "Stored"))["status"] == "True"
                status = await where.status(made)
                assert (status["step"], status["verdict"], status["remote"]) == (101, "GOOD", "Stored")
                assert status["nodes"]["n2"] == {
                    "phase": "Committed",
                    "ranks": ["1"],
                    "snapshot": "cs-000002",
                    "step": 102,
                    "verdict": "GOOD",
                    "remote": "Stored",
                }
                assert one.taken == [
                    (
                        "TrainingSnapshot default/before-merge",
                        ["kubernetes-job=default.llm", "kubernetes-kind=Job"],
                        True,
                    )
                ]
                await where.events(
                    made, ("Normal", "NoRunningPods"), ("Normal", "Capturing"), ("Normal", "Committed")
                )
                # What the other tests do, for the sake of the rights.
                await where.make({"apiVersion": "ciuic.io/v1alpha1", "kind": "SnapshotPolicy", "metadata": {"name": "p"}, "spec": {"roots": [{"path": "/data"}]}})  # fmt: skip
                await where.condition(
                    where_policy := {
                        "apiVersion": "ciuic.io/v1alpha1",
                        "kind": "SnapshotPolicy",
                        "metadata": {"name": "p"},
                    },
                    "Starting",
                )
                await where.api.patch(
                    "/apis/ciuic.io/v1alpha1/snapshotpolicies/p", {"spec": {"interval": "5m"}}
                )
                await where.until(where_policy, lambda body: body["status"]["observedGeneration"] == 2)
                async with where.api_of("controller", monkeypatch) as api:
                    lease = LeaderLease(api, NAMESPACE, "pod-1", duration_seconds=1)
                    await lease.acquire()
                    await lease.release()
            if where.mock is not None:
                assert where.mock.used["controller"] == granted["controller"]
                assert where.mock.used["agent"] == granted["agent"]

    asyncio.run(run())


def test_failures_are_said_and_a_silent_node_counts_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that refuses, a node without an agent, a torn checkpoint and a remote that passes a snapshot over; each of the four kinds of jobs.

    What may pass is tried again until the timeout. Pods that do not run yet are named.
    """

    async def run() -> None:
        async with cluster(tmp_path, monkeypatch) as where:
            node = Node(1)
            node.committing.set()
            async with controller(where, monkeypatch), agent(where, "n1", node, monkeypatch):
                for kind, labels in JOBS.items():
                    if kind != "TrainJob":  # its pods are those of a JobSet
                        await run_pod(where, f"llm-{kind.lower()}", "n1", labels)
                node.error = NotPermitted("no root is protected")
                refused = await where.make(snapshot("refused", "PyTorchJob"))
                told = await where.condition(refused, "NodeFailed")
                assert told["message"] == "1 of 1 node failed: n1: no root is protected"
                node.error = CiuicError("the daemon is starting")
                passing = await where.make(snapshot("passing", "PyTorchJob"))
                await where.until(
                    passing,
                    lambda body: "n1 (the daemon is starting)" in body["status"]["conditions"][0]["message"],
                )
                never = await where.make(snapshot("never", "PyTorchJob", timeoutSeconds=1))
                told = await where.condition(never, "NodeFailed")
                assert told["message"] == "1 of 1 node failed: n1: the daemon is starting"
                node.error = None
                await where.condition(passing, "Committed")
                assert "message" not in (await where.status(passing))["nodes"]["n1"]
                node.checkpoint, node.stored = "TORN", "PassedOver"
                torn = await where.make(snapshot("torn", "JobSet"))
                await where.condition(torn, "Torn", "Verified")
                await where.condition(torn, "PassedOver", "Stored")
                node.checkpoint, node.stored = None, "None"
                bare = await where.make(snapshot("bare", "TrainJob"))
                await where.condition(bare, "NoCheckpoint", "Verified")
                await where.condition(bare, "NoRemote", "Stored")
                await run_pod(where, "llm-far", "n9", JOBS["Job"])
                silent = await where.make(snapshot("silent", timeoutSeconds=1))
                told = await where.condition(silent, "NodeFailed")
                assert "n9: no answer from the agent" in told["message"]
                await where.events(silent, ("Warning", "NodeFailed"))
                waiting = await where.make(pod("llm-late", "n1", JOBS["PyTorchJob"]))
                partial = await where.make(snapshot("partial", "PyTorchJob"))
                told = await where.condition(partial, "Partial")
                assert (told["status"], told["message"]) == (
                    "True",
                    "committed on 1 node, without 1 of the job that did not run: llm-late",
                )
                late = await where.make(snapshot("late", "PyTorchJob", requireAll=True, timeoutSeconds=1))
                told = await where.condition(late, "TimedOut")
                assert "not every pod of PyTorchJob llm ran" in told["message"]
                whole = await where.make(snapshot("whole", "PyTorchJob", requireAll=True))
                told = await where.condition(whole, "NoRunningPods")
                assert told["message"].endswith("; waiting for llm-late")
                await where.api.patch_status(waiting, {"phase": "Running"})
                told = await where.condition(whole, "Committed")
                assert told["message"] == "committed on 1 node"

    asyncio.run(run())


def test_a_new_controller_and_a_new_agent_go_on_where_the_old_ones_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut that an agent left is waited for by its successor and not taken again; a changed configuration is read by the daemon."""
    configuration = tmp_path / "mounted.toml", tmp_path / "ciuic.toml"
    for path in configuration:
        path.write_text("a")

    async def run() -> None:
        async with cluster(tmp_path, monkeypatch) as where:
            await run_pod(where, "llm-0", "n1", JOBS["Job"])
            made = await where.make(snapshot("handed-over"))
            first, second = Node(1), Node(2)
            async with controller(where, monkeypatch), agent(where, "n1", first, monkeypatch, configuration):
                await where.until(made, lambda body: body["status"]["nodes"]["n1"]["phase"] == "Cut")
                configuration[0].write_text("b")
                await asyncio.wait_for(first.reloaded.wait(), 30)
                assert configuration[1].read_text() == "b"
                if where.mock is not None:
                    where.mock.failing["agent"] = [500] * 1000  # this agent's last report does not arrive
            if where.mock is not None:
                where.mock.failing.clear()
            second.committing.set()
            async with controller(where, monkeypatch), agent(where, "n1", second, monkeypatch):
                await where.condition(made, "Committed")
            assert second.taken == []

    asyncio.run(run())


def test_a_node_that_dies_after_the_cut_fails_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that is cut and never committed fails within the timeout, counted from the cut and not from the request."""

    async def run() -> None:
        async with cluster(tmp_path, monkeypatch) as where:
            await run_pod(where, "llm-0", "n1", JOBS["Job"])
            async with controller(where, monkeypatch):
                made = await where.make(snapshot("lost", timeoutSeconds=1))
                async with agent(where, "n1", Node(1), monkeypatch):
                    await where.until(made, lambda body: body["status"]["nodes"]["n1"]["phase"] == "Cut")
                    if where.mock is not None:
                        where.mock.failing["agent"] = [500] * 1000
                    told = await where.condition(made, "NodeFailed")
                assert "n1: the snapshot was cut, and not reported as committed in time" in told["message"]

    asyncio.run(run())


def test_a_snapshot_of_a_job_that_never_runs_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pods it ends after its timeout, and no controller lists pods for it afterwards."""

    async def run() -> None:
        async with cluster(tmp_path, monkeypatch) as where:
            if where.mock is None:
                return
            async with controller(where, monkeypatch):
                made = await where.make(snapshot("never", timeoutSeconds=1))
                await where.condition(made, "NoRunningPods")
                told = await where.condition(made, "TimedOut")
                assert "no pod of Job llm ran in default within 1 s" in told["message"]
                await where.events(made, ("Warning", "TimedOut"))
            lists = where.mock.pod_lists.count("batch.kubernetes.io/job-name=llm")
            assert lists < 12
            async with controller(where, monkeypatch):
                # Watches give objects in their order: the controller has seen the older one when it answers for this one.
                await where.condition(await where.make(snapshot("later", "JobSet")), "NoRunningPods")
            assert where.mock.pod_lists.count("batch.kubernetes.io/job-name=llm") == lists

    asyncio.run(run())


def test_one_leader_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second controller waits until the lease is given back, or was not renewed for its duration; one that lost it learns of it."""

    async def run() -> None:
        async with cluster(tmp_path, monkeypatch) as where:
            first = LeaderLease(where.api, NAMESPACE, "a", duration_seconds=1)
            second = LeaderLease(where.api, NAMESPACE, "b", duration_seconds=1)
            await first.acquire()
            waiting = asyncio.create_task(second.acquire())
            lease = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": "ciuic-operator", "namespace": NAMESPACE},
            }
            assert (await where.get(lease))["spec"]["holderIdentity"] == "a"
            await first.release()
            await waiting
            third = LeaderLease(where.api, NAMESPACE, "c", duration_seconds=1)
            await third.acquire()  # b renews no more
            spec = (await where.get(lease))["spec"]
            assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("c", 3)
            await asyncio.wait_for(second.keep(), 10)
            await where.delete(lease)

    asyncio.run(run())


def test_the_program_leads_gives_the_lease_back_and_ends_when_it_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ciuic-operator` carries out a policy; SIGTERM ends it with 0 and a free lease; one whose lease another takes ends at once."""
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "ciuic-operator", "namespace": NAMESPACE},
    }
    policy = {
        "apiVersion": "ciuic.io/v1alpha1",
        "kind": "SnapshotPolicy",
        "metadata": {"name": "p"},
        "spec": {"roots": [{"path": "/data"}]},
    }
    variables = {
        "POD_NAMESPACE": NAMESPACE,
        "CIUIC_IMAGE": "registry.example/ciuic:1",
        "CIUIC_HEALTH_PORT": "0",
    }

    async def start(name: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", "from ciuic.operator.program import main; main()",
            env={**os.environ, **variables, "POD_NAME": name}, cwd=CHECKOUT,
        )  # fmt: skip

    async def run() -> None:
        async with cluster(tmp_path, monkeypatch) as where:
            made = await where.make(policy)
            first, second = await start("one"), None
            try:
                await where.condition(made, "Starting")
                second = await start("two")
                first.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(first.wait(), 30) == 0
                await where.until(lease, lambda body: body["spec"]["holderIdentity"] == "two")
                taken = await where.get(lease)
                taken["spec"]["holderIdentity"] = "three"
                await where.api.replace(taken)
                assert await asyncio.wait_for(second.wait(), 30) == 75
            finally:
                for process in (first, second):
                    if process is not None and process.returncode is None:
                        process.kill()
                        await process.wait()
            await where.delete(lease)

    asyncio.run(run())
