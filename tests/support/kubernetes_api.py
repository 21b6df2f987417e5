"""An API server of Kubernetes for tests: kmock, a mock and named so, or a real one where CIUIC_TEST_KUBECONFIG names its kubeconfig.

kmock stores objects and serves watches. Added here is what a client of the real one relies on: resource versions and conflicts, generations,
the status as a subresource, generated names, selectors, the schemas of our definitions, and the rights of a role. A real one
must run no controllers, as that of envtest: what they would write, the tests write.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import os
import re
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp.web
import kmock
import kmock._internal.apps
import yaml
from openapi_schema_validator import OAS30Validator
from support.site import CHECKOUT

from ciuic.operator.api import Api, ApiError, login, url_of
from ciuic.operator.controller import Controller
from ciuic.operator.policies import Installation

CHART = CHECKOUT / "etc/kubernetes/chart"
NAMESPACE = "ciuic-system"
_SECONDS = 30.0
_RESOURCES = {
    "v1/configmaps": ("ConfigMap", True),
    "v1/pods": ("Pod", True),
    "v1/events": ("Event", True),
    "v1/namespaces": ("Namespace", False),
    "apps/v1/daemonsets": ("DaemonSet", True),
    "coordination.k8s.io/v1/leases": ("Lease", True),
    "ciuic.io/v1alpha1/snapshotpolicies": ("SnapshotPolicy", False),
    "ciuic.io/v1alpha1/trainingsnapshots": ("TrainingSnapshot", True),
}
Right = tuple[str, str, str]
"""Group, resource with subresource, verb."""


def definitions() -> list[dict[str, Any]]:
    """Return the CustomResourceDefinitions of the chart."""
    return [yaml.safe_load(path.read_text()) for path in sorted((CHART / "crds").glob("*.yaml"))]


def schema_of(kind: str) -> dict[str, Any]:
    """Return the structural schema of one of our kinds."""
    found = next(one for one in definitions() if one["spec"]["names"]["kind"] == kind)
    schema: dict[str, Any] = found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def flaws_of(body: Mapping[str, Any]) -> list[str]:
    """Return what the schema says against an object of ours."""
    return [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in OAS30Validator(schema_of(body["kind"])).iter_errors(body)
    ]


class MockApi(kmock.KubernetesEmulator):
    """kmock with what is listed above; ``used`` has each right that a request with a token has used."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.used: dict[str, set[Right]] = {}
        self.granted: dict[str, set[Right]] = {}
        """Rights of a token, in any namespace; a token that is not here may do everything."""
        self.failing: dict[str, list[int]] = {}
        """Statuses with which the next changes of a token are refused."""
        self.pod_lists: list[str] = []
        """Label selector of each list of pods."""
        self._versions = itertools.count(1)
        for name, (kind, namespaced) in _RESOURCES.items():
            subresources = {"status"} if "ciuic.io" in name or "daemonsets" in name else set()
            self.resources[name] = {"kind": kind, "namespaced": namespaced, "subresources": subresources, "verbs": {"get", "list", "watch", "create", "patch", "update", "delete"}}  # fmt: skip

    async def _handle(self, request: Any) -> aiohttp.web.StreamResponse:
        resource = request.resource
        if resource is None or resource.plural is None:
            return await super()._handle(request)  # discovery, which every account may have
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        right = _right_of(request)
        self.used.setdefault(token, set()).add(right)
        if token in self.granted and right not in self.granted[token]:
            return _refusal(403, f"{token} may not {right[2]} {right[1]}")
        if request.method in ("POST", "PUT", "PATCH"):
            # Not of its lease, which it renews at any time.
            if self.failing.get(token) and "leases" not in str(right):
                return _refusal(self.failing[token].pop(0), "it was to fail")
            try:
                request = self._changed(request)
            except _Refused as error:
                return _refusal(error.status, str(error))
        elif right[2] == "list":
            return await self._list(request)
        return await super()._handle(request)

    def _changed(self, request: Any) -> Any:
        """Return the request as kmock is to carry it out."""
        data = copy.deepcopy(request.data)
        metadata = data.setdefault("metadata", {})
        is_ours = request.resource.group == "ciuic.io"
        if request.method == "POST":
            if request.namespace:
                metadata["namespace"] = request.namespace
            if "generateName" in metadata:
                metadata.setdefault("name", metadata["generateName"] + uuid.uuid4().hex[:5])
            metadata.setdefault("uid", str(uuid.uuid4()))
            metadata["generation"] = 1
            metadata["creationTimestamp"] = "2026-11-26T00:00:00Z"
            if is_ours:
                data.pop("status", None)
            new = data
        else:
            key = (request.resource, request.namespace, request.name)
            if key not in self.objects or self.objects[key].deleted:
                raise _Refused(404, f"{request.name} not found")
            old = copy.deepcopy(self.objects[key].raw)
            stated = metadata.pop("resourceVersion", None)
            if request.method == "PUT" and stated != old["metadata"]["resourceVersion"]:
                raise _Refused(409, "the object has been modified")
            if request.subresource == "status":
                data = {"status": data.get("status", {}), "metadata": {}}
            elif is_ours:
                data.pop("status", None)
            new = _merge(old, data)
            if new == old:
                return _as(request, action=kmock.action.FETCH)
            if new.get("spec") != old.get("spec"):
                data.setdefault("metadata", {})["generation"] = old["metadata"]["generation"] + 1
        data["metadata"]["resourceVersion"] = str(next(self._versions))
        if is_ours and (flaws := flaws_of(new)):
            raise _Refused(422, "; ".join(flaws))
        action = kmock.action.CREATE if request.method == "POST" else kmock.action.UPDATE
        return _as(request, data=data, action=action)

    async def _list(self, request: Any) -> aiohttp.web.StreamResponse:
        if request.resource.plural == "pods":
            self.pod_lists.append(request.params.get("labelSelector", ""))
        wanted = dict(one.split("=", 1) for one in request.params.get("labelSelector", "").split(",") if one)
        items = [
            one.raw
            for (resource, namespace, _), one in self.objects.items()
            if resource == request.resource and not one.deleted
            if request.namespace in (None, namespace)
            if wanted.items() <= one.raw["metadata"].get("labels", {}).items()
        ]
        return aiohttp.web.json_response({"metadata": {"resourceVersion": "0"}, "items": items})


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _as(request: Any, **changes: Any) -> Any:
    """Change a request, which is frozen, and known to kmock's filters by its identity."""
    for name, value in changes.items():
        object.__setattr__(request, name, value)
    return request


def _refusal(status: int, message: str) -> aiohttp.web.StreamResponse:
    document = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status, "message": message}
    return aiohttp.web.json_response(document, status=status)


def _right_of(request: Any) -> Right:
    resource = request.resource
    name = f"{resource.plural}/{request.subresource}" if request.subresource else resource.plural
    if request.method == "GET":
        watches = request.params.get("watch") == "true"
        verb = "watch" if watches else "list" if request.name is None else "get"
    else:
        verb = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[
            str(request.method.value)
        ]
    return resource.group, name, verb


def _merge(old: Any, patch: Any) -> Any:
    """Merge a patch (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge(merged.get(key), value)
    return merged


def _fixed() -> Api:
    """Return a client with the account that the environment names now, whichever it names later."""
    info = login()
    return Api(lambda: info)


def kubeconfig(path: Path, server: str, token: str) -> Path:
    """Write a kubeconfig."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": token}}],
    }
    path.write_text(json.dumps(document))
    return path


class Cluster:
    """The API server as the tests use it, with the rights of an administrator."""

    def __init__(self, api: Api, mock: MockApi | None, files: Path, url: str = "") -> None:
        self.api = api
        self.mock = mock
        self._files = files
        self._url = url
        self._made: list[dict[str, Any]] = []

    def api_of(self, token: str, monkeypatch: Any) -> Api:
        """Return a client with another account, which is in the environment from now on; on a real server it is the administrator's."""
        if self.mock is not None:
            path = kubeconfig(self._files / f"{token}.json", self._url, token)
            monkeypatch.setenv("KUBECONFIG", str(path))
        return _fixed()

    async def make(self, body: dict[str, Any]) -> dict[str, Any]:
        """Create an object, which the end of the test removes."""
        made = await self.api.create(body)
        self._made.append(body)
        return {"apiVersion": body["apiVersion"], "kind": body["kind"], **made}

    async def get(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self.api.get(url_of(body))

    async def delete(self, body: Mapping[str, Any]) -> None:
        await self.api._request("DELETE", url_of(body))

    async def status(self, body: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = (await self.get(body)).get("status", {})
        return found

    async def until(self, body: Mapping[str, Any], holds: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """Return the object as soon as ``holds`` is true of it."""
        found: dict[str, Any] = {}
        end = asyncio.get_running_loop().time() + _SECONDS
        while asyncio.get_running_loop().time() < end:
            with suppress(ApiError, KeyError):
                found = await self.get(body)
                if holds(found):
                    return found
            await asyncio.sleep(0.02)
        raise AssertionError(f"not in time; last seen: {json.dumps(found, indent=1)}")

    async def condition(self, body: Mapping[str, Any], reason: str, kind: str = "Ready") -> dict[str, Any]:
        """Return the condition of that kind as soon as it has the reason."""
        found = await self.until(body, lambda one: _condition(one, kind)["reason"] == reason)
        return _condition(found, kind)

    async def events(self, body: Mapping[str, Any], *wanted: tuple[str, str]) -> None:
        """Wait until these events of the object, by type and reason, were written in this order. Each follows its condition."""
        namespace = body["metadata"].get("namespace", "default")
        name = body["metadata"]["name"]
        found: list[tuple[str, str]] = []
        end = asyncio.get_running_loop().time() + _SECONDS
        while asyncio.get_running_loop().time() < end:
            listed = await self.api.get(f"/api/v1/namespaces/{namespace}/events")
            found = [
                (one["type"], one["reason"])
                for one in listed["items"]
                if one["involvedObject"]["name"] == name
            ]
            left = iter(found)
            if all(one in left for one in wanted):
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"not in time; last seen: {found}")

    async def clear(self) -> None:
        for body in reversed(self._made):
            with suppress(ApiError):
                await self.delete(body)


def _condition(body: Mapping[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next(
        (one for one in body.get("status", {}).get("conditions", []) if one["type"] == kind), {"reason": ""}
    )
    return found


@asynccontextmanager
async def cluster(files: Path, monkeypatch: Any) -> AsyncIterator[Cluster]:
    """Run the mock, or connect to the real API server and define our kinds there."""
    if real := os.environ.get("CIUIC_TEST_KUBECONFIG"):
        monkeypatch.setenv("KUBECONFIG", real)
        async with _fixed() as api:
            found = Cluster(api, None, files)
            await _define(api)
            try:
                yield found
            finally:
                await found.clear()
        return
    async with MockApi() as mock, kmock._internal.apps.Server(mock) as server:
        url = str(server.url).rstrip("/")
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(files / "admin.json", url, "admin")))
        async with _fixed() as api:
            yield Cluster(api, mock, files, url)


async def _define(api: Api) -> None:
    for one in definitions():
        try:
            await api._request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", one)
        except ApiError as error:
            if error.status != 409:
                raise
        while True:
            try:
                await api.get(f"/apis/ciuic.io/v1alpha1/{one['spec']['names']['plural']}")
                break
            except ApiError:
                await asyncio.sleep(0.1)
    try:
        await api._request(
            "POST",
            "/api/v1/namespaces",
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        )
    except ApiError as error:
        if error.status != 409:
            raise


def rendered() -> list[dict[str, Any]]:
    """Return the objects of the chart as Helm makes them with its default values.

    The chart has nothing but values in its templates, which is checked here, so that no Helm is needed to test what it makes.
    """
    values = {
        f".Values.{name}": str(value)
        for name, value in yaml.safe_load((CHART / "values.yaml").read_text()).items()
    }
    values[".Release.Namespace"] = NAMESPACE
    return [
        one
        for path in sorted((CHART / "templates").iterdir())
        for one in yaml.safe_load_all(
            re.sub(r"{{ (\S+) }}", lambda found: values[found[1]], path.read_text())
        )
    ]


def rights(roles: Iterable[Mapping[str, Any]]) -> set[Right]:
    """Return what roles grant."""
    return {
        (group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


INSTALLATION = Installation(NAMESPACE, "registry.example/ciuic:1")


@asynccontextmanager
async def controller(where: Cluster, monkeypatch: Any) -> AsyncIterator[None]:
    stop = asyncio.Event()
    async with where.api_of("controller", monkeypatch) as api:
        running = asyncio.create_task(Controller(api, INSTALLATION, retry_seconds=0.1).run(stop))
        try:
            yield
        finally:
            stop.set()
            await running
