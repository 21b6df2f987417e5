"""Controller: carries out SnapshotPolicies, and requests the parts of TrainingSnapshots from the agents of their nodes.

Guarantees: everything is computed anew from the objects at each event, and nothing is kept that a restart could lose. Nothing is written
to an object but its status, so there are no finalizers and no annotations: what a policy made ends with it through its owner references.
A failed request to the API is repeated.

DaemonSets are watched in the namespace of the operator alone, so that no right on those of others is needed.

What the status of a TrainingSnapshot says: the nodes of its job, and the sum of what their agents wrote.

Guarantees: pure functions. A part is a node's, and it names the ranks that ran there: pods come and go, and their names say nothing.

Conditions of a status, as `kubectl describe` and `kubectl wait` read them (Kubernetes API conventions, "Typical status properties").

Guarantees: a condition that says the same keeps its time of transition, so that a status which is computed anew is equal to the
one that is stored, and nothing is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Final, Literal

import structlog

from ciuic.errors import ConfigError
from ciuic.operator.api import Api, ApiError, Watch, reference, watch
from ciuic.operator.policies import GROUP, POLICY_LABEL, VERSION, Installation, objects_of

Truth = Literal["True", "False", "Unknown"]
# Of the schema. What an event may say is shorter, and cut where it is written.
_MAX_MESSAGE: Final = 4096


@dataclass(frozen=True)
class Condition:
    """One condition; ``reason`` is a word in CamelCase, ``message`` a sentence."""

    type: str
    status: Truth
    reason: str
    message: str
    is_trouble: bool = False
    """True if its event is a Warning."""


def merged(
    previous: Sequence[Mapping[str, Any]], new: Sequence[Condition], generation: int
) -> tuple[list[dict[str, Any]], list[Condition]]:
    """Return the conditions to store, and those of them whose status or reason has changed."""
    known = {one["type"]: one for one in previous}
    stored: list[dict[str, Any]] = []
    changed: list[Condition] = []
    for one in new:
        before = known.get(one.type, {})
        same_status = before.get("status") == one.status
        if not same_status or before.get("reason") != one.reason:
            changed.append(one)
        stored.append(
            {
                "type": one.type,
                "status": one.status,
                "reason": one.reason,
                "message": one.message[:_MAX_MESSAGE],
                "observedGeneration": generation,
                "lastTransitionTime": before["lastTransitionTime"] if same_status else now(),
            }
        )
    return stored, changed


def now() -> str:
    """Return the present time as the API writes it."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


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


_RETRY_SECONDS: Final = 5.0
_MAX_RETRY_SECONDS: Final = 300.0
_MAX_PAUSE_SECONDS: Final = 60.0
"""Longest pause between two lists of a job's pods."""
_MAX_WATCHES: Final = 32
"""Limit of jobs whose pods are watched at a time; those of others are listed after pauses."""
_DEFAULT_TIMEOUT_SECONDS: Final = 600
_OVERDUE: Final = {
    "Requested": "no answer from the agent of this node: does a SnapshotPolicy select the node, and is its pod running?",
    "Cut": "the snapshot was cut, and not reported as committed in time: does the node live, and what does ciuic status say there?",
}
"""Why a part has failed that stayed in a phase for too long, by the phase."""
_log = structlog.get_logger(__name__)
Body = Mapping[str, Any]


class Reconciliations:
    """A task for each object, which brings it up to date when it is woken, and again until that succeeds.

    Steps of one object never run at once, and none is interrupted but by the end of the object.
    """

    def __init__(self, retry_seconds: float) -> None:
        self._retry_seconds = retry_seconds
        self._tasks: dict[str, tuple[asyncio.Event, asyncio.Task[None]]] = {}

    def wake(self, key: str, step: Callable[[], Awaitable[float | None]]) -> None:
        """Have ``step`` run soon. It returns the seconds after which it is to run again, None for not before it is woken."""
        if key not in self._tasks:
            woken = asyncio.Event()
            self._tasks[key] = woken, asyncio.create_task(self._run(key, step, woken))
        self._tasks[key][0].set()

    def end(self, key: str) -> None:
        """End the task of an object."""
        if key in self._tasks:
            self._tasks.pop(key)[1].cancel()

    async def close(self) -> None:
        """End all tasks."""
        tasks = [task for _, task in self._tasks.values()]
        for key in list(self._tasks):
            self.end(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, key: str, step: Callable[[], Awaitable[float | None]], woken: asyncio.Event) -> None:
        failing = self._retry_seconds
        delay: float | None = None
        while True:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(woken.wait(), delay)
            woken.clear()
            try:
                delay, failing = await step(), self._retry_seconds
            except ApiError as error:
                _log.warning("request_failed", of=key, error=str(error), again_in_seconds=failing)
                delay, failing = failing, min(failing * 2, _MAX_RETRY_SECONDS)
            except Exception:  # of one object, which must not end the others' or its own next try
                _log.exception("not_carried_out", of=key, again_in_seconds=failing)
                delay, failing = failing, min(failing * 2, _MAX_RETRY_SECONDS)


class Controller:
    """All policies and training snapshots of a cluster."""

    def __init__(
        self, api: Api, installation: Installation, *, retry_seconds: float = _RETRY_SECONDS
    ) -> None:
        self._api = api
        self._installation = installation
        self._retry_seconds = retry_seconds
        self._reconciliations = Reconciliations(retry_seconds)
        self._policies: dict[str, Body] = {}
        self._daemon_sets: dict[str, Body] = {}
        self._snapshots: dict[str, Body] = {}
        self._statuses: dict[str, dict[str, Any]] = {}
        """Newest status of each object by its uid: that of an event may be older than what was written since."""
        self._seen: dict[str, dict[str, tuple[str, float]]] = {}
        """Phase of each part by uid and node, and when it was first seen by the clock of the event loop."""
        self._watching = asyncio.Semaphore(_MAX_WATCHES)
        self._applied: dict[str, str] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Watch until ``stop`` is set."""
        namespace = self._installation.namespace
        watches = [
            Watch(GROUP, VERSION, "snapshotpolicies", self._on_policy),
            Watch(GROUP, VERSION, "trainingsnapshots", self._on_snapshot),
            Watch("apps", "v1", "daemonsets", self._on_daemon_set, namespace=namespace, label=POLICY_LABEL),
        ]
        try:
            await watch(watches, stop, self._api.connection)
        finally:
            await self._reconciliations.close()

    # -- policies

    def _on_policy(self, event: Mapping[str, Any]) -> None:
        body, name = event["object"], event["object"]["metadata"]["name"]
        if event["type"] == "DELETED":
            self._policies.pop(name, None)
            self._applied.pop(body["metadata"]["uid"], None)
            self._reconciliations.end(f"policy {name}")
            return
        self._policies[name] = body
        self._reconciliations.wake(f"policy {name}", lambda: self._carry_out(name))

    def _on_daemon_set(self, event: Mapping[str, Any]) -> None:
        body = event["object"]
        name = body["metadata"]["labels"][POLICY_LABEL]
        if event["type"] == "DELETED":
            self._daemon_sets.pop(name, None)
            if (policy := self._policies.get(name)) is not None:
                self._applied.pop(policy["metadata"]["uid"], None)
        else:
            self._daemon_sets[name] = body
        if name in self._policies:
            self._reconciliations.wake(f"policy {name}", lambda: self._carry_out(name))

    async def _carry_out(self, name: str) -> None:
        policy = self._policies.get(name)
        if policy is None:
            return
        uid = policy["metadata"]["uid"]
        try:
            objects = objects_of(policy, self._installation)
        except ConfigError as error:
            await self._report(
                policy, {}, [Condition("Ready", "False", "InvalidPolicy", error.message, is_trouble=True)]
            )
            return
        if self._applied.get(uid) != repr(objects):
            try:
                for one in objects:
                    await self._api.apply(one)
            except ApiError as error:
                refused = Condition("Ready", "False", "NotApplied", error.message, is_trouble=True)
                await self._report(policy, {}, [refused])
                raise
            self._applied[uid] = repr(objects)
        status, condition = daemons_of(self._daemon_sets.get(name), objects[1])
        await self._report(policy, status, [condition])

    # -- training snapshots

    def _on_snapshot(self, event: Mapping[str, Any]) -> None:
        body = event["object"]
        key = f"snapshot {body['metadata']['namespace']}/{body['metadata']['name']}"
        if event["type"] == "DELETED":
            self._reconciliations.end(key)
            self._snapshots.pop(key, None)
            self._statuses.pop(body["metadata"]["uid"], None)
            self._seen.pop(body["metadata"]["uid"], None)
            return
        self._snapshots[key] = body
        self._reconciliations.wake(key, lambda: self._follow(self._snapshots[key]))

    async def _follow(self, body: Body) -> float | None:
        """Bring the status up to date; return after how many seconds to look again."""
        status = body.get("status", {})
        nodes: dict[str, dict[str, Any]] = {
            name: dict(part) for name, part in status.get("nodes", {}).items()
        }
        requested = status.get("requestedAt")
        if requested is None and "requestedAt" in self._statuses.get(body["metadata"]["uid"], {}):
            return None  # an event of before the request
        if requested is None:
            job, namespace = body["spec"]["jobRef"], body["metadata"]["namespace"]
            selector = f"{JOB_LABELS[job['kind']]}={job['name']}"
            time_left = self._left_seconds(body, "", "NoRunningPods")
            whole = body["spec"].get("requireAll", False)
            what = f"{'not every' if whole else 'no'} pod of {job['kind']} {job['name']}"
            # A controller that is started later goes by what is written.
            if time_left <= 0 or any(one["reason"] == "TimedOut" for one in status.get("conditions", ())):
                seconds = body["spec"].get("timeoutSeconds", _DEFAULT_TIMEOUT_SECONDS)
                message = f"{what} ran in {namespace} within {seconds} s (label {selector}): make another TrainingSnapshot"
                await self._report(
                    body, {}, [Condition("Ready", "False", "TimedOut", message, is_trouble=True)]
                )
                return None
            pods, version = await self._api.pods(namespace, selector)
            nodes, waiting = nodes_of(pods), left_out(pods)
            if not nodes or (whole and waiting):
                message = f"{what} runs in {namespace} (label {selector})"
                if nodes:
                    message += f"; waiting for {some(waiting)}"
                await self._report(body, {}, [Condition("Ready", "False", "NoRunningPods", message)])
                return await self._pods_change(body, selector, version, time_left)
            # The agents begin when they see this, and only their own part.
            found: dict[str, Any] = {"requestedAt": now(), "nodes": nodes}
            if waiting:
                found["leftOut"] = waiting
            await self._report(body, found, conditions_of(nodes))
            return None
        left = {
            name: self._left_seconds(body, name, part["phase"])
            for name, part in nodes.items()
            if part["phase"] in _OVERDUE
        }
        found = {}
        if overdue := [name for name, seconds in left.items() if seconds <= 0]:
            found["nodes"] = {
                name: {
                    "phase": "Failed",
                    "message": nodes[name].get("message") or _OVERDUE[nodes[name]["phase"]],
                }
                for name in overdue
            }
            nodes |= {name: {**nodes[name], **found["nodes"][name]} for name in overdue}
        await self._report(
            body, {**summary_of(nodes), **found}, conditions_of(nodes, status.get("leftOut", ()))
        )
        return min((seconds for seconds in left.values() if seconds > 0), default=None)

    async def _pods_change(self, body: Body, selector: str, version: str, left: float) -> float:
        """Wait until the pods of a job change; return the seconds after which to list them again."""
        loop = asyncio.get_running_loop()
        waited = float(body["spec"].get("timeoutSeconds", _DEFAULT_TIMEOUT_SECONDS)) - left
        # Pods that start and fail again and again change all the time: the pause doubles, whatever the watch says.
        again: float = loop.time() + min(max(waited, self._retry_seconds), _MAX_PAUSE_SECONDS, left)
        # Each watch is a connection.
        if not self._watching.locked():
            async with self._watching:
                with suppress(ApiError):
                    await self._api.pods_changed(
                        body["metadata"]["namespace"], selector, version, min(left, _MAX_RETRY_SECONDS)
                    )
        # The pods of a job start one after the other, and those that run by then have a part.
        return max(min(self._retry_seconds, left), again - loop.time())

    def _left_seconds(self, body: Body, part: str, phase: str) -> float:
        """Return how long a part may still be in its phase, by this process's clock: those of nodes and API server may be wrong."""
        now_seconds = asyncio.get_running_loop().time()
        seen = self._seen.setdefault(body["metadata"]["uid"], {})
        if part not in seen or seen[part][0] != phase:
            seen[part] = phase, now_seconds
        return float(
            body["spec"].get("timeoutSeconds", _DEFAULT_TIMEOUT_SECONDS) - (now_seconds - seen[part][1])
        )

    # -- statuses

    async def _report(self, body: Body, found: dict[str, Any], conditions: list[Condition]) -> None:
        """Write what has changed of the status, and an event for each condition that did."""
        metadata = body["metadata"]
        uid, generation = metadata["uid"], metadata.get("generation", 1)
        before = self._statuses.get(uid) or body.get("status", {})
        stored, changed = merged(before.get("conditions", []), conditions, generation)
        others = [
            one for one in before.get("conditions", []) if one["type"] not in {new["type"] for new in stored}
        ]
        status = {**found, "observedGeneration": generation, "conditions": [*stored, *others]}
        if body["kind"] != "SnapshotPolicy":
            del status["observedGeneration"]
        if (
            any(before.get(key) != value for key, value in status.items() if key != "nodes")
            or "nodes" in found
        ):
            await self._api.patch_status(
                reference(body["kind"], metadata["name"], metadata.get("namespace", "")), status
            )
            self._statuses[uid] = {**before, **status}
        for one in changed:
            # That nothing is known yet is no event.
            if one.status != "Unknown" or one.is_trouble:
                await self._api.post_event(body, one.reason, one.message, is_trouble=one.is_trouble)


def daemons_of(daemon_set: Body | None, wanted: Body) -> tuple[dict[str, Any], Condition]:
    """Return the figures of a policy's daemons, and its condition Ready."""
    found = (daemon_set or {}).get("status", {})
    if daemon_set is None or found.get("observedGeneration", 0) < daemon_set["metadata"].get("generation", 1):
        return {}, Condition(
            "Ready", "False", "Starting", f"DaemonSet {wanted['metadata']['name']} is being carried out"
        )
    nodes, running = found.get("desiredNumberScheduled", 0), found.get("numberReady", 0)
    figures = {"nodes": nodes, "nodesRunning": running}
    if nodes == 0:
        return figures, Condition(
            "Ready", "False", "NoNodes", "no node has the labels of nodes.matchLabels", is_trouble=True
        )
    if running < nodes:
        told = f"the daemon is ready on {running} of {nodes} nodes: kubectl -n {wanted['metadata']['namespace']} get pods -l {POLICY_LABEL}={wanted['metadata']['labels'][POLICY_LABEL]}"
        return figures, Condition("Ready", "False", "DaemonsNotReady", told)
    return figures, Condition("Ready", "True", "DaemonsReady", f"the daemon is ready on all {nodes} nodes")
