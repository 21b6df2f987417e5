"""The manifests of etc/kubernetes and etc/training, those in the documentation, and the objects that the controller makes."""

from __future__ import annotations

import asyncio
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info < (3, 11):
    pytest.skip("Kopf and kmock need Python 3.11", allow_module_level=True)

import msgspec
import yaml
from support.late_modules import LateModule

from ciuic.cli.commands.doctor import reach_seconds
from ciuic.config.load import parse_config
from ciuic.errors import CiuicError, ConfigError
from ciuic.operator.policies import _KEEP, ALIVE, HEALTH_PORT, READY, configuration_of, objects_of, parents_of
from ciuic.retention import RetentionPolicy

CHECKOUT = Path(__file__).parents[3]
CHART = CHECKOUT / "etc/kubernetes/chart"
kubernetes_api: Any = LateModule("support.kubernetes_api")
kubernetes_validate: Any = LateModule("kubernetes_validate")
openapi: Any = LateModule("openapi_schema_validator")
POLICY: dict[str, Any] = {
    "apiVersion": "ciuic.io/v1alpha1",
    "kind": "SnapshotPolicy",
    "metadata": {"name": "gpu", "uid": "5"},
    "spec": {
        "nodes": {"matchLabels": {"pool": "gpu"}, "tolerations": [{"operator": "Exists"}]},
        "roots": [{"path": "/data/a", "exclude": ['*"tmp"', "\\x"]}, {"path": "/data/b"}, {"path": "/srv"}],
        "interval": "30m",
        "keep": {"within": "7d", "last": 3, "monthly": 12},
        "repository": "/data/repository",
        "remote": {
            "url": "s3://bucket/run",
            "endpoint": "https://minio:9000",
            "secretRef": {"name": "store"},
            "keep": {"monthly": 12},
        },
    },
}
# Kinds of other projects, whose schemas are not here.
_FOREIGN = {"TrainJob", "PyTorchJob", "JobSet", "TrainingRuntime", "ClusterTrainingRuntime"}


def test_every_place_knows_the_rules_of_retention() -> None:
    """The CRD offers what the operator knows, which is what the configuration has; doctor counts how far back each reaches."""
    (crd,) = yaml.safe_load_all((CHART / "crds/snapshotpolicies.yaml").read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    local, remote = spec["keep"], spec["remote"]["properties"]["keep"]
    assert set(local["properties"]) == set(remote["properties"]) == set(_KEEP)
    # What has a reach of its own, but for a number and what special snapshots have.
    off = RetentionPolicy(**dict.fromkeys(("keep_within_seconds", "keep_last"), 0))
    others = {"keep_last", "keep_tags", "keep_emergency", "keep_safety_seconds"}
    by_age = set(RetentionPolicy.__struct_fields__) - others
    assert {name.removesuffix("_seconds") for name in by_age} | {"keep_last"} == set(_KEEP.values())
    for name in by_age:
        assert reach_seconds(msgspec.structs.replace(off, **{name: 5})) > reach_seconds(off), name


def manifests() -> list[Any]:
    """Return each document of the examples and pages."""
    found = []
    for path in sorted((CHECKOUT / "etc").rglob("*.yaml")):
        if CHART not in path.parents:
            found += [(path.name, one) for one in yaml.safe_load_all(path.read_text())]
    for path in sorted((CHECKOUT / "docs").glob("*.md")):
        for block in re.findall(r"^```yaml\n(.*?)^```", path.read_text(), re.M | re.S):
            found += [(path.name, one) for one in yaml.safe_load_all(block) if "apiVersion" in (one or {})]
    return [pytest.param(one, id=f"{name}-{one['kind']}") for name, one in found]


def check(body: dict[str, Any]) -> None:
    if body["apiVersion"].startswith("ciuic.io/"):
        assert kubernetes_api.flaws_of(body) == []
    elif body["kind"] in _FOREIGN:
        for template in _pod_specs(body):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": template}
            kubernetes_validate.validate(pod, "1.34", strict=True)
    else:
        kubernetes_validate.validate(body, "1.34", strict=True)


def _pod_specs(value: Any) -> list[Any]:
    """Return all pod specs within an object."""
    if isinstance(value, dict):
        own = [value] if "containers" in value else []
        return own + [one for part in value.values() for one in _pod_specs(part)]
    return [one for part in value for one in _pod_specs(part)] if isinstance(value, list) else []


@pytest.mark.parametrize("body", manifests())
def test_examples_are_valid(body: dict[str, Any]) -> None:
    """Each manifest in etc and docs is one that an API server takes."""
    check(body)


def test_what_the_chart_and_the_controller_make_is_valid() -> None:
    """Objects are those of their schemas; the definitions themselves are valid."""
    for body in [
        *kubernetes_api.rendered(),
        *kubernetes_api.definitions(),
        *objects_of(POLICY, kubernetes_api.INSTALLATION),
    ]:
        check(body)


def test_the_definitions_are_structural() -> None:
    """Each field of the schemas has a type, and nothing is allowed that is not described."""

    def walk(schema: dict[str, Any], where: str) -> None:
        assert schema.get("type") in ("object", "array", "string", "integer", "boolean"), where
        for name, one in schema.get("properties", {}).items():
            walk(one, f"{where}.{name}")
        if schema["type"] == "array":
            walk(schema["items"], f"{where}[]")
        if isinstance(one := schema.get("additionalProperties"), dict):
            walk(one, f"{where}.*")
        if "default" in schema:
            openapi.OAS30Validator(schema).validate(schema["default"])

    for one in kubernetes_api.definitions():
        for version in one["spec"]["versions"]:
            walk(version["schema"]["openAPIV3Schema"], one["metadata"]["name"])
            assert version["subresources"] == {"status": {}}
            fields = version["schema"]["openAPIV3Schema"]["properties"]
            for column in version["additionalPrinterColumns"]:
                place = fields
                for name in column["jsonPath"].split("[")[0].strip(".").split(".")[:2]:
                    place = place.get(name, {}).get("properties", {}) if name != "metadata" else fields


@pytest.mark.parametrize(
    ("kind", "spec", "flaw"),
    [
        ("SnapshotPolicy", {}, "roots"),
        ("SnapshotPolicy", {"roots": []}, "roots"),
        ("SnapshotPolicy", {"roots": [{"path": "data"}]}, "path"),
        ("SnapshotPolicy", {"roots": [{"path": "/"}]}, "path"),
        ("SnapshotPolicy", {"roots": [{"path": "/a"}], "interval": "often"}, "interval"),
        ("SnapshotPolicy", {"roots": [{"path": "/a"}], "remote": {"url": "https://x"}}, "url"),
        ("TrainingSnapshot", {"jobRef": {"kind": "CronJob", "name": "a"}}, "kind"),
        ("TrainingSnapshot", {"jobRef": {"kind": "Job", "name": "A_"}}, "name"),
        ("TrainingSnapshot", {"jobRef": {"kind": "Job", "name": "a"}, "timeoutSeconds": 0}, "timeout"),
    ],
)
def test_what_an_api_server_refuses(kind: str, spec: dict[str, Any], flaw: str) -> None:
    """Wrong kinds, paths, durations and addresses do not get as far as the controller."""
    body = {"apiVersion": "ciuic.io/v1alpha1", "kind": kind, "metadata": {"name": "x"}, "spec": spec}
    assert flaw in "".join(kubernetes_api.flaws_of(body))


def test_the_configuration_says_what_the_policy_says(tmp_path: Path) -> None:
    """The daemon reads the policy's roots, patterns, interval, retention and remote."""
    config = parse_config(configuration_of(POLICY["spec"]), tmp_path / "ciuic.toml")
    assert [str(root.path) for root in config.roots] == ["/data/a", "/data/b", "/srv"]
    assert config.roots[0].exclude == ('*"tmp"', "\\x")
    assert config.retention.keep_monthly == 12
    assert config.remotes[0].url == "s3://bucket/run"
    assert config.remotes[0].endpoint == "https://minio:9000"


def test_the_daemon_sees_the_directories_above_its_roots() -> None:
    """Each root lies below one mount that propagates both ways, and no mount lies in another."""
    assert parents_of(["/data/a", "/data/b", "/data/c/d", "/srv"]) == ["/data", "/srv"]
    _, daemons = objects_of(POLICY, kubernetes_api.INSTALLATION)
    assert daemons["metadata"]["namespace"] == kubernetes_api.NAMESPACE
    pod = daemons["spec"]["template"]["spec"]
    by_name = {one["name"]: one for one in pod["containers"]}
    assert list(by_name) == ["daemon", "agent", "upload"]
    both = [one["mountPath"] for one in by_name["daemon"]["volumeMounts"] if "mountPropagation" in one]
    assert both == ["/data", "/srv"]
    # Only the daemon is privileged, only the agent has the token, only the upload has the key.
    assert [name for name, one in by_name.items() if one["securityContext"].get("privileged")] == ["daemon"]
    for volume, owner in (("account", "agent"), ("key", "upload")):
        assert [
            name
            for name, one in by_name.items()
            if volume in [mount["name"] for mount in one["volumeMounts"]]
        ] == [owner]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"roots": [{"path": "/data/../etc"}]}, "'..'"),
        ({"roots": [{"path": "/data"}, {"path": "/data/inner"}]}, "/data/inner"),
        ({"roots": [{"path": "/data"}, {"path": "/data"}]}, "/data and /data"),
        ({"roots": [{"path": "/data/a"}], "repository": "/data/a/store"}, "/data/a/store and /data/a"),
        ({"roots": [{"path": "/store/a"}], "repository": "/store"}, "/store and /store/a"),
        ({"roots": [{"path": "/var/lib"}], "repository": "/store"}, "/var/lib and /var/lib/ciuic"),
        ({"roots": [{"path": "/opt/data"}]}, "/opt of the node would hide /opt/ciuic"),
        ({"roots": [{"path": "/usr/data"}]}, "/usr of the node would hide"),
        ({"roots": [{"path": "/etc/data"}]}, "/etc of the node would hide"),
        ({"roots": [{"path": "/data/a"}], "repository": "/usr/lib/store"}, "/usr/lib"),
        ({"roots": [{"path": "/data"}], "interval": "0s"}, "interval"),
    ],
)
def test_a_policy_that_the_daemon_would_refuse_is_refused(change: dict[str, Any], message: str) -> None:
    """What the schema cannot say is said by the daemon's own reading of the configuration."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        configuration_of(change)


def test_probes_start_no_program_and_end_no_overlay() -> None:
    """Probes are requests to ports that are open, of controller and agents; what serves overlays is never ended for a probe or its memory."""
    _, daemons = objects_of(POLICY, kubernetes_api.INSTALLATION)
    operator = next(one for one in kubernetes_api.rendered() if one["kind"] == "Deployment")
    pods = [one["spec"]["template"]["spec"] for one in (daemons, operator)]
    containers = {one["name"]: one for pod in pods for one in pod["containers"]}
    assert "livenessProbe" not in containers["daemon"]
    assert "limits" not in containers["daemon"]["resources"]
    for name in ("agent", "operator"):
        ports = {one["name"]: one["containerPort"] for one in containers[name]["ports"]}
        probes = [
            containers[name][one] for one in ("livenessProbe", "readinessProbe") if one in containers[name]
        ]
        assert {ports.get(one["httpGet"]["port"], one["httpGet"]["port"]) for one in probes} == {HEALTH_PORT}
        assert "memory" in containers[name]["resources"]["limits"]
    assert containers["daemon"]["readinessProbe"]["httpGet"] == {"path": READY, "port": HEALTH_PORT}
    assert {
        one["livenessProbe"]["httpGet"]["path"] for one in containers.values() if "livenessProbe" in one
    } == {ALIVE}


def test_a_probe_says_what_is_wrong_and_one_check_serves_all_who_ask() -> None:
    """Status 200 while a check returns, 503 with its words where it raises; callers at one time share it."""
    health: Any = importlib.import_module("ciuic.operator.program")
    aiohttp: Any = importlib.import_module("aiohttp")
    flaws: list[str] = []
    checks = 0

    async def check() -> None:
        nonlocal checks
        checks += 1
        begun.set()
        await gate.wait()
        if flaws:
            raise CiuicError(flaws[0])

    async def run() -> None:
        nonlocal gate, begun
        gate, begun = asyncio.Event(), asyncio.Event()
        async with (
            health.serving_health({ALIVE: health.alive, READY: check}, 0, "127.0.0.1") as port,
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client,
        ):

            async def ask(path: str) -> tuple[int, str]:
                async with client.get(path) as answer:
                    return answer.status, await answer.text()

            asked = [asyncio.create_task(ask(READY)) for _ in range(20)]
            assert (await ask(ALIVE))[0] == 200
            await begun.wait()
            gate.set()
            assert {status for status, _ in await asyncio.gather(*asked)} == {200}
            assert checks <= 2
            flaws.append("the daemon is not running")
            assert await ask(READY) == (503, "the daemon is not running\n")
            assert (await ask("/other"))[0] == 404

    gate, begun = asyncio.Event(), asyncio.Event()
    asyncio.run(run())
