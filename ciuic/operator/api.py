"""The Kubernetes API: watches by Kopf, and what Kopf leaves to its operators: objects, statuses, events and the Lease of the leader.

Guarantees: the token is read for each request, because kubelet replaces it. Only merge patches, whole objects and create are used, each of
which needs one verb. An event that cannot be written is logged and fails nothing.

References: Kubernetes API concepts; API conventions; coordination.k8s.io/v1 Lease, used as client-go's leaderelection does.

Events of the watches come to the caller's event loop in their order. Guarantees: each event loop of Kopf has a thread
of its own, because Kopf ends every task of the loop that it runs in, takes the process's signals, and watches one set
of namespaces only. Its handlers are those of raw events, which write nothing into objects; it looks at nothing else, so
that list and watch of these resources are the only rights that it needs. A watch that breaks is begun anew, with all
objects.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, Final
from urllib.parse import urlencode

import aiohttp
import kopf
import structlog

from ciuic.errors import CiuicError
from ciuic.operator.policies import GROUP, OPERATOR_NAME, VERSION


@dataclass(frozen=True)
class Watch:
    """A resource to watch, in the whole cluster or in one namespace, and what is called with each event."""

    group: str
    version: str
    plural: str
    handle: Callable[[Mapping[str, Any]], None]
    namespace: str | None = None
    label: str | None = None
    """Label that the objects must have."""


async def watch(
    watches: Iterable[Watch], stop: asyncio.Event, connection: Callable[[], kopf.ConnectionInfo]
) -> None:
    """Watch until ``stop`` is set. Handlers are called in this event loop. Raises what ended a watch before."""
    loop, ending = asyncio.get_running_loop(), threading.Event()
    places: dict[str | None, list[Watch]] = {}
    for one in watches:
        places.setdefault(one.namespace, []).append(one)
    running = [
        asyncio.create_task(asyncio.to_thread(_run, namespace, found, loop, ending, connection))
        for namespace, found in places.items()
    ]
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([*running, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        ending.set()
        stopping.cancel()
        await asyncio.gather(*running)


def _run(
    namespace: str | None,
    watches: list[Watch],
    loop: asyncio.AbstractEventLoop,
    ending: threading.Event,
    connection: Callable[[], kopf.ConnectionInfo],
) -> None:
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(_login_by(connection))
    kopf.on.startup(registry=registry)(_configure)
    for one in watches:
        labels: Any = None if one.label is None else {one.label: kopf.PRESENT}
        forward = _forward_to(one.handle, loop)
        kopf.on.event(one.group, one.version, one.plural, labels=labels, registry=registry)(forward)
    place: dict[str, Any] = {"clusterwide": True} if namespace is None else {"namespaces": [namespace]}
    asyncio.run(kopf.operator(registry=registry, standalone=True, stop_flag=ending, **place))


def _forward_to(handle: Callable[[Mapping[str, Any]], None], loop: asyncio.AbstractEventLoop) -> Any:
    async def forward(event: Mapping[str, Any], **_: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: it is the end
            loop.call_soon_threadsafe(handle, event)

    return forward


def _login_by(connection: Callable[[], kopf.ConnectionInfo]) -> Any:
    def login(**_: Any) -> kopf.ConnectionInfo:
        return connection()

    return login


async def _configure(settings: kopf.OperatorSettings, **_: Any) -> None:
    settings.scanning.disabled = True
    settings.posting.enabled = False


_REQUEST_SECONDS: Final = 30.0
_MAX_EVENT_MESSAGE: Final = 1024
_NOT_FOUND, _CONFLICT = 404, 409
PLURALS: Final = {
    "ConfigMap": "configmaps",
    "DaemonSet": "daemonsets",
    "Event": "events",
    "Lease": "leases",
    "Pod": "pods",
    "SnapshotPolicy": "snapshotpolicies",
    "TrainingSnapshot": "trainingsnapshots",
}
_log = structlog.get_logger(__name__)


class ApiError(CiuicError):
    """The API server refused a request, or did not answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def login() -> kopf.ConnectionInfo:
    """Return how to reach the API: by the service account of the pod, or by the kubeconfig.

    Raises:
        ApiError: there is neither.
    """
    settings = kopf.OperatorSettings()
    info = kopf.login_with_service_account(settings=settings) or kopf.login_with_kubeconfig(settings=settings)
    if info is None:
        raise ApiError(
            0, "no access to a cluster: neither the service account of a pod nor a kubeconfig (KUBECONFIG)"
        )
    return info


class Api:
    """The API server, for as long as the context lasts."""

    def __init__(self, connection: Callable[[], kopf.ConnectionInfo] = login) -> None:
        self.connection = connection
        info = connection()
        self._server = info.server.rstrip("/")
        self._tls: ssl.SSLContext | None = (
            info.as_ssl_context() if self._server.startswith("https:") else None
        )

    async def __aenter__(self) -> Api:
        connector = aiohttp.TCPConnector(ssl=self._tls) if self._tls else aiohttp.TCPConnector()
        self._session = aiohttp.ClientSession(connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, url: str) -> dict[str, Any]:
        """Return the object or the list at the URL."""
        return await self._request("GET", url)

    async def create(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object. ApiError with status 409 if it exists."""
        return await self._request("POST", url_of(body, in_collection=True), body)

    async def replace(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Replace an object. ApiError with status 409 if it has changed since it was read."""
        return await self._request("PUT", url_of(body), body)

    async def patch(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Merge ``body`` into the object at the URL."""
        return await self._request("PATCH", url, body)

    async def apply(self, body: Mapping[str, Any]) -> None:
        """Make the object, or change it to be so."""
        try:
            await self.patch(url_of(body), body)
        except ApiError as error:
            if error.status != _NOT_FOUND:
                raise
            await self.create(body)

    async def patch_status(self, body: Mapping[str, Any], status: Mapping[str, Any]) -> None:
        """Merge ``status`` into the status of the object; nothing if the object is gone."""
        try:
            await self.patch(f"{url_of(body)}/status", {"status": status})
        except ApiError as error:
            if error.status != _NOT_FOUND:
                raise

    async def pods(self, namespace: str, selector: str) -> tuple[list[dict[str, Any]], str]:
        """Return the pods with these labels, and the version of the list, from which they can be watched."""
        answer = await self.get(_pods_url(namespace, labelSelector=selector))
        return answer["items"], answer["metadata"]["resourceVersion"]

    async def pods_changed(self, namespace: str, selector: str, version: str, seconds: float) -> None:
        """Wait until a pod with these labels changes after a version of their list, or the server ends the watch.

        Raises:
            ApiError: the time is over, or the watch is refused.
        """
        query = {"resourceVersion": version, "watch": "true", "timeoutSeconds": str(max(1, int(seconds)))}
        url = _pods_url(namespace, labelSelector=selector, **query)
        await self._request("GET", url, watch_seconds=max(1.0, seconds))

    async def post_event(
        self, body: Mapping[str, Any], reason: str, message: str, *, is_trouble: bool
    ) -> None:
        """Write an event about the object; a failure is logged."""
        metadata = body["metadata"]
        # Events of objects of the cluster are in the namespace "default", and name none: so `kubectl describe` finds them.
        namespace = metadata.get("namespace")
        when = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{metadata['name']}.", "namespace": namespace or "default"},
            "involvedObject": {
                "apiVersion": body["apiVersion"],
                "kind": body["kind"],
                "name": metadata["name"],
                "uid": metadata.get("uid", ""),
                **({"namespace": namespace} if namespace else {}),
            },
            "type": "Warning" if is_trouble else "Normal",
            "reason": reason,
            "message": message[:_MAX_EVENT_MESSAGE],
            "source": {"component": OPERATOR_NAME},
            "firstTimestamp": when,
            "lastTimestamp": when,
            "count": 1,
        }
        try:
            await self.create(event)
        except ApiError as error:
            _log.warning("event_not_written", reason=reason, error=str(error))

    async def _request(
        self, method: str, url: str, body: Mapping[str, Any] | None = None, *, watch_seconds: float = 0.0
    ) -> dict[str, Any]:
        headers = self.connection().as_http_headers()
        if body is not None:
            headers["Content-Type"] = (
                "application/merge-patch+json" if method == "PATCH" else "application/json"
            )
        try:
            timeout = aiohttp.ClientTimeout(total=watch_seconds or _REQUEST_SECONDS)
            async with self._session.request(
                method, self._server + url, json=body, headers=headers, timeout=timeout
            ) as answer:
                if watch_seconds and answer.status < 400:
                    # Whatever comes is an event, also an error such as a version that is too old: the caller lists anew.
                    await answer.content.readany()
                    return {}
                document = await answer.json(content_type=None)
                if answer.status >= 400:
                    told = document.get("message", "") if isinstance(document, dict) else ""
                    raise ApiError(answer.status, f"{method} {url}: {answer.status} {told}".rstrip())
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
            raise ApiError(0, f"{method} {url}: {error or type(error).__name__}") from error
        if not isinstance(document, dict):
            raise ApiError(0, f"{method} {url}: expected an object, got {type(document).__name__}")
        return document


def _pods_url(namespace: str, **query: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods?{urlencode(query)}"


def url_of(body: Mapping[str, Any], *, in_collection: bool = False) -> str:
    """Return the path of an object, or of the collection in which it is created."""
    version, metadata = body["apiVersion"], body["metadata"]
    top = f"/apis/{version}" if "/" in version else f"/api/{version}"
    place = f"/namespaces/{metadata['namespace']}" if metadata.get("namespace") else ""
    url = f"{top}{place}/{PLURALS[body['kind']]}"
    return url if in_collection else f"{url}/{metadata['name']}"


def reference(kind: str, name: str, namespace: str = "") -> dict[str, Any]:
    """Return a body that names an object of our own kinds and nothing else."""
    metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": kind, "metadata": metadata}


class LeaderLease:
    """Lease of the leader: one controller of all that run acts.

    It is taken when it is free, or when its holder has not renewed it for its whole duration, as seen by the clock here: the
    clocks of two nodes are never compared. A holder that cannot renew it stops before another may take it.
    """

    def __init__(self, api: Api, namespace: str, identity: str, *, duration_seconds: float = 15.0) -> None:
        self._api = api
        self._identity = identity
        self._duration_seconds = duration_seconds
        self._body: dict[str, Any] = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": OPERATOR_NAME, "namespace": namespace},
        }
        self._seen: tuple[str, float] = ("", 0.0)

    async def acquire(self) -> None:
        """Return when this process is the leader."""
        while not await self._try():  # noqa: ASYNC110, the lease is another process's
            await asyncio.sleep(self._duration_seconds / 5)

    async def keep(self) -> None:
        """Renew the lease; return when it is lost, or could not be renewed for two thirds of its duration."""
        clock = asyncio.get_running_loop().time
        renewed = clock()
        while clock() - renewed < self._duration_seconds * 2 / 3:
            await asyncio.sleep(self._duration_seconds / 5)
            try:
                if not await self._try():
                    _log.error("lease_lost")
                    return
                renewed = clock()
            except ApiError as error:
                _log.warning("lease_not_renewed", error=str(error))
        _log.error("lease_not_renewed_in_time")

    async def release(self) -> None:
        """Give the lease back, so that the next controller need not wait."""
        try:
            lease = await self._api.get(url_of(self._body))
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"].update(holderIdentity="", leaseDurationSeconds=1)
                await self._api.replace(lease)
        except ApiError as error:
            _log.warning("lease_not_released", error=str(error))

    async def _try(self) -> bool:
        """Return whether the lease is ours now."""
        clock = asyncio.get_running_loop().time()
        try:
            lease = await self._api.get(url_of(self._body))
        except ApiError as error:
            if error.status != _NOT_FOUND:
                raise
            lease = {**self._body, "spec": {"leaseTransitions": 0}}
        spec = lease["spec"]
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", self._identity):
            seen = f"{holder} {spec.get('renewTime')}"
            if seen != self._seen[0]:
                self._seen = (seen, clock)
            if clock - self._seen[1] < float(spec.get("leaseDurationSeconds") or self._duration_seconds):
                return False
        moment = datetime.now(timezone.utc)
        time = moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if holder != self._identity:
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
            spec["acquireTime"] = time
        spec["holderIdentity"], spec["renewTime"] = self._identity, time
        spec["leaseDurationSeconds"] = max(
            1, round(timedelta(seconds=self._duration_seconds).total_seconds())
        )
        try:
            await (self._api.replace if "resourceVersion" in lease["metadata"] else self._api.create)(lease)
        except ApiError as error:
            if error.status != _CONFLICT:
                raise
            return False  # another one was faster
        return True
