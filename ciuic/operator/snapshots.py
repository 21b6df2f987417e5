"""What the status of a TrainingSnapshot says: the nodes of its job, and the sum of what their agents wrote.

Guarantees: pure functions. A part is a node's, and it names the ranks that ran there: pods come and go, and their names say nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ciuic.operator.conditions import Condition

JOB_LABELS: Final = {
    "Job": "batch.kubernetes.io/job-name",
    "JobSet": "jobset.sigs.k8s.io/jobset-name",
    # Kubeflow Trainer makes a JobSet of the same name.
    "TrainJob": "jobset.sigs.k8s.io/jobset-name",
    "PyTorchJob": "training.kubeflow.org/job-name",
}
"""Label of the pods of a job, by its kind, with the job's name as its value. So no right to read jobs is needed."""
_INDEX: Final = "batch.kubernetes.io/job-completion-index"
_DONE: Final = ("Committed", "Failed")
_MAX_SHOWN: Final = 8


def rank_of(pod: Mapping[str, Any]) -> str:
    """Return the rank of a pod within its job: role and index, as far as its labels say them; empty if they do not."""
    metadata = pod["metadata"]
    labels = {**metadata.get("annotations", {}), **metadata.get("labels", {})}
    if index := labels.get("training.kubeflow.org/replica-index"):
        return f"{labels.get('training.kubeflow.org/replica-type', 'worker')}-{index}"
    words = [labels.get("jobset.sigs.k8s.io/replicatedjob-name"), labels.get("jobset.sigs.k8s.io/job-index")]
    return "-".join(word for word in (*words, labels.get(_INDEX)) if word)


def nodes_of(pods: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the parts to request: the nodes on which pods of the job run, with their ranks."""
    ranks: dict[str, set[str]] = {}
    for pod in pods:
        node = pod.get("spec", {}).get("nodeName")
        if node and pod.get("status", {}).get("phase") == "Running":
            ranks.setdefault(node, set()).add(rank_of(pod))
    return {
        node: {"phase": "Requested", "ranks": sorted(rank for rank in found if rank)}
        for node, found in sorted(ranks.items())
    }


def left_out(pods: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the pods of a job that are to run and do not yet: their ranks, or their names where these say none."""
    waiting = (pod for pod in pods if pod.get("status", {}).get("phase", "Pending") in ("Pending", "Unknown"))
    return sorted(rank_of(pod) or pod["metadata"]["name"] for pod in waiting)


def summary_of(nodes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return step, verdict and remote state of the whole: those of its weakest part."""
    steps = [part["step"] for part in nodes.values() if "step" in part]
    verdicts = {part.get("verdict") for part in nodes.values()}
    remotes = {part.get("remote") for part in nodes.values()}
    found: dict[str, Any] = {"step": min(steps)} if steps else {}
    # A node without any checkpoint has no verdict: rank 0 alone may write.
    for verdict in ("TORN", "UNKNOWN", "GOOD"):
        if verdict in verdicts:
            found["verdict"] = verdict
            break
    for remote in ("PassedOver", "Waiting", "None", "Stored"):
        if remote in remotes:
            found["remote"] = "Waiting" if remote == "Stored" and None in remotes else remote
            break
    return found


def conditions_of(nodes: Mapping[str, Mapping[str, Any]], left_out: Sequence[str] = ()) -> list[Condition]:
    """Return the conditions Ready, Stored and Verified of parts that have been requested.

    Args:
        nodes: parts by node.
        left_out: ranks of the job that did not run, and so have no part.
    """
    total = _nodes(len(nodes))
    failed = {node: part for node, part in nodes.items() if part["phase"] == "Failed"}
    waiting = sorted(node for node, part in nodes.items() if part["phase"] not in _DONE)
    if failed:
        told = "; ".join(
            f"{node}: {part.get('message', 'no reason given')}" for node, part in sorted(failed.items())
        )
        ready = Condition(
            "Ready", "False", "NodeFailed", f"{len(failed)} of {total} failed: {told}", is_trouble=True
        )
        rest = "the snapshot is not complete"
        return [
            ready,
            Condition("Stored", "False", "NodeFailed", rest),
            Condition("Verified", "False", "NodeFailed", rest),
        ]
    if waiting:
        message = f"waiting for {len(waiting)} of {total}: {some(_with_error(node, nodes[node]) for node in waiting)}"
        return [
            Condition(one, "False" if one == "Ready" else "Unknown", "Capturing", message)
            for one in ("Ready", "Stored", "Verified")
        ]
    summary = summary_of(nodes)
    ready = Condition("Ready", "True", "Committed", f"committed on {total}")
    if left_out:
        message = (
            f"committed on {total}, without {len(left_out)} of the job that did not run: {some(left_out)}"
        )
        ready = Condition("Ready", "True", "Partial", message, is_trouble=True)
    return [
        ready,
        _stored(summary.get("remote"), total),
        _verified(summary.get("verdict"), nodes),
    ]


def _stored(remote: str | None, total: str) -> Condition:
    if remote == "Stored":
        return Condition("Stored", "True", "Stored", f"stored on all remotes of {total}")
    if remote == "PassedOver":
        message = "the schedule or the retention of a remote leaves the snapshot out"
        return Condition("Stored", "False", "PassedOver", message, is_trouble=True)
    if remote == "None":
        return Condition("Stored", "False", "NoRemote", "a node has no remote: its policy names none")
    return Condition("Stored", "False", "Uploading", "not all nodes have uploaded their part yet")


def _verified(verdict: str | None, nodes: Mapping[str, Mapping[str, Any]]) -> Condition:
    if verdict == "GOOD":
        return Condition("Verified", "True", "Good", "the newest checkpoint of each node is whole")
    if verdict == "TORN":
        torn = ", ".join(sorted(node for node, part in nodes.items() if part.get("verdict") == "TORN"))
        return Condition(
            "Verified", "False", "Torn", f"the newest checkpoint is not whole on {torn}", is_trouble=True
        )
    if verdict == "UNKNOWN":
        return Condition(
            "Verified", "Unknown", "Unknown", "the format of a checkpoint does not tell whether it is whole"
        )
    return Condition(
        "Verified",
        "Unknown",
        "NoCheckpoint",
        "there is no checkpoint in the snapshot, or none was looked at yet",
    )


def _with_error(node: str, part: Mapping[str, Any]) -> str:
    return f"{node} ({part['message']})" if part.get("message") else node


def some(names: Iterable[str]) -> str:
    """Return the first names, for a message."""
    shown = list(names)
    return ", ".join(shown[:_MAX_SHOWN]) + (", …" if len(shown) > _MAX_SHOWN else "")


def _nodes(number: int) -> str:
    return "1 node" if number == 1 else f"{number} nodes"
