"""SnapshotPolicies on an API server: each state of a policy, and what is made of it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info < (3, 11):
    pytest.skip("Kopf and kmock need Python 3.11", allow_module_level=True)

from support.kubernetes_api import NAMESPACE, Cluster, cluster, controller


def policy(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "ciuic.io/v1alpha1",
        "kind": "SnapshotPolicy",
        "metadata": {"name": name},
        "spec": {"roots": [{"path": "/data/run"}], **spec},
    }


def daemon_set(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": f"ciuic-{name}", "namespace": NAMESPACE},
    }


def config_map(name: str) -> dict[str, Any]:
    return {**daemon_set(name), "apiVersion": "v1", "kind": "ConfigMap"}


async def report_nodes(where: Cluster, name: str, nodes: int, ready: int) -> None:
    """Write what the controller of DaemonSets would."""
    body = await where.get(daemon_set(name))
    status = {
        "observedGeneration": body["metadata"]["generation"],
        "desiredNumberScheduled": nodes,
        "currentNumberScheduled": nodes,
        "numberMisscheduled": 0,
        "numberReady": ready,
    }
    await where.api.patch_status(daemon_set(name), status)


def test_a_policy_from_its_first_pod_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects are made; Ready follows the daemons; a change reaches the ConfigMap alone; what is deleted by others is made again."""

    async def run() -> None:
        async with cluster(tmp_path, monkeypatch) as where, controller(where, monkeypatch):
            made = await where.make(policy("gpu", interval="30m", nodes={"matchLabels": {"pool": "gpu"}}))
            await where.condition(made, "Starting")
            await report_nodes(where, "gpu", 0, 0)
            await where.condition(made, "NoNodes")
            await report_nodes(where, "gpu", 3, 1)
            told = await where.condition(made, "DaemonsNotReady")
            assert "1 of 3 nodes" in told["message"]
            await report_nodes(where, "gpu", 3, 3)
            ready = await where.condition(made, "DaemonsReady")
            assert ready["status"] == "True"
            status = await where.status(made)
            assert (status["nodes"], status["nodesRunning"]) == (3, 3)

            before = await where.get(daemon_set("gpu"))
            assert before["metadata"]["ownerReferences"][0]["uid"] == made["metadata"]["uid"]
            assert before["spec"]["template"]["spec"]["nodeSelector"] == {
                "kubernetes.io/os": "linux",
                "pool": "gpu",
            }
            await where.api.patch(
                "/apis/ciuic.io/v1alpha1/snapshotpolicies/gpu", {"spec": {"interval": "10m"}}
            )
            await where.until(config_map("gpu"), lambda one: 'interval = "10m"' in one["data"]["ciuic.toml"])
            await where.until(made, lambda one: one["status"]["observedGeneration"] == 2)
            after = await where.get(daemon_set("gpu"))
            assert after["metadata"]["generation"] == before["metadata"]["generation"], "no pod is replaced"

            await where.delete(daemon_set("gpu"))
            await where.condition(made, "Starting")
            await where.until(
                daemon_set("gpu"), lambda one: one["metadata"]["uid"] != before["metadata"]["uid"]
            )
            await where.events(
                made, ("Normal", "Starting"), ("Warning", "NoNodes"), ("Normal", "DaemonsNotReady"),
                ("Normal", "DaemonsReady"), ("Normal", "Starting"),
            )  # fmt: skip

    asyncio.run(run())


@pytest.mark.full
def test_a_policy_that_cannot_be_carried_out_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that the schema lets pass is refused in words; a mended policy is carried out; so is one that the API refused for a while."""

    async def run() -> None:
        async with cluster(tmp_path, monkeypatch) as where, controller(where, monkeypatch):
            made = await where.make(policy("wrong", roots=[{"path": "/data/../etc"}]))
            told = await where.condition(made, "InvalidPolicy")
            assert "'..'" in told["message"]
            # The event follows the condition, and must not be what fails.
            await where.events(made, ("Warning", "InvalidPolicy"))
            if where.mock is not None:
                where.mock.failing["controller"] = [403]
            await where.api.patch(
                "/apis/ciuic.io/v1alpha1/snapshotpolicies/wrong", {"spec": {"roots": [{"path": "/data/x"}]}}
            )
            await where.condition(made, "Starting")
            if where.mock is not None:
                await where.events(made, ("Warning", "NotApplied"))

    asyncio.run(run())
