"""Configuration of nodes, and objects that the controller applies, made from a SnapshotPolicy.

Guarantees: pure functions of the policy, so that equal policies give equal objects; a configuration that the daemon would refuse is
refused here, with its message. Objects have the policy as owner, and end with it.

The daemon mounts its overlays in the mount namespace of the node: the directory above each root is mounted into its container with
Bidirectional propagation. Everything that must outlive the pod lies in directories of the node. The pod's other containers have no
privilege, and only the agent has the token of the service account.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ciuic.config.load import check_text
from ciuic.config.toml_source import quote
from ciuic.errors import ConfigError

HEALTH_PORT: Final = 9848
"""Port at which agents and controller answer the probes of kubelet."""
ALIVE: Final = "/healthz"
"""Path of the probe that the event loop of the process answers."""
READY: Final = "/readyz"
"""Path of an agent's probe that the daemon of its node answers, too."""
GROUP: Final = "ciuic.io"
VERSION: Final = "v1alpha1"
OPERATOR_LABEL: Final = "app.kubernetes.io/managed-by"
OPERATOR_NAME: Final = "ciuic-operator"
POLICY_LABEL: Final = "ciuic.io/policy"
CONFIG_DIR: Final = "/etc/ciuic"
CONFIG_FILE: Final = "ciuic.toml"
CONFIG_MAP_DIR: Final = "/etc/ciuic-configmap"
KEY_DIR: Final = "/etc/ciuic-key"
KEY_NAME: Final = "remote.key"
RUNTIME_DIR: Final = "/run/ciuic"
STATE_DIR: Final = "/var/lib/ciuic"
UPLOAD_DIR: Final = "/var/lib/ciuic-upload"
SERVICE_ACCOUNT: Final = "ciuic-node"
_CONFIG_HOST_DIR: Final = "/var/lib/ciuic-kubernetes"
_ACCOUNT_DIR: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
# The value of a label has 63 characters, and pods of a DaemonSet are named after it with ten more.
_MAX_NAME: Final = 40
# A first capture or a root in use may delay the end; the daemon leaves what is in use to its workers.
_GRACE_SECONDS: Final = 120
_KEEP: Final = {
    "within": "keep_within",
    "last": "keep_last",
    "hourly": "keep_hourly",
    "daily": "keep_daily",
    "weekly": "keep_weekly",
    "monthly": "keep_monthly",
    "yearly": "keep_yearly",
}


@dataclass(frozen=True)
class Installation:
    """Where and from which image daemons run; the same for all policies."""

    namespace: str
    image: str
    pull_policy: str = "IfNotPresent"


def configuration_of(spec: Mapping[str, Any]) -> str:
    """Return ciuic.toml for the nodes of a policy.

    Raises:
        ConfigError: the daemon would refuse it.
    """
    lines = ["[repository]", f"path = {quote(_repository(spec))}", "", "[schedule]"]
    lines += [f"interval = {quote(str(spec.get('interval', '1h')))}"]
    if keep := _keep_lines(spec.get("keep")):
        lines += ["", "[retention]", *keep]
    _check_places(_repository(spec), [root["path"] for root in spec["roots"]])
    for root in spec["roots"]:
        path = root["path"]
        lines += ["", "[[root]]", f"path = {quote(path)}"]
        if exclude := root.get("exclude"):
            lines += [f"exclude = [{', '.join(quote(pattern) for pattern in exclude)}]"]
    if remote := spec.get("remote"):
        lines += ["", "[remote]"]
        lines += [f"{key} = {quote(remote[key])}" for key in ("url", "endpoint", "region") if key in remote]
        if "secretRef" in remote:
            lines += [f"key_file = {quote(f'{KEY_DIR}/{KEY_NAME}')}"]
        else:
            lines += ["encryption = false"]
        if keep := _keep_lines(remote.get("keep")):
            lines += ["", "[remote.keep]", *keep]
    text = "\n".join(lines) + "\n"
    _, problems = check_text(text, Path(CONFIG_DIR, CONFIG_FILE))
    if errors := [problem.message for problem in problems if problem.severity == "error"]:
        raise ConfigError("; ".join(errors))
    return text


# What the image is made of, its program included (etc/kubernetes/Containerfile): a directory of the node there would hide it.
_IMAGE: Final = (
    "/bin",
    "/dev",
    "/etc",
    "/lib",
    "/lib64",
    "/opt/ciuic",
    "/proc",
    "/sbin",
    "/sys",
    "/usr/bin",
    "/usr/lib",
    "/usr/local/bin",
    "/usr/local/lib",
    "/usr/sbin",
)
_OWN: Final = (RUNTIME_DIR, STATE_DIR, UPLOAD_DIR, _CONFIG_HOST_DIR)


def _check_places(repository: str, roots: Sequence[str]) -> None:
    """Check by the names alone what the daemon would refuse on each node, and what its pod could not be started with.

    Raises:
        ConfigError: a path is not normal, two that must lie apart do not, or one hides a part of the image.
    """
    for path, mounted in ((repository, repository), *((root, mounted_for(root)) for root in roots)):
        if os.path.normpath(path) != path:
            raise ConfigError(f"a path must have no '.' and no '..', got {path}")
        if hidden := [one for one in _IMAGE if _overlap(mounted, one)]:
            raise ConfigError(
                f"{path} cannot be reached from a pod: {mounted} of the node would hide {hidden[0]} of the image"
            )
    for number, root in enumerate(roots):
        if twin := [one for one in roots[:number] if _overlap(root, one)]:
            raise ConfigError(f"roots must lie apart, got {root} and {twin[0]}")
        if _overlap(root, repository):
            raise ConfigError(f"the repository must lie apart from the roots, got {repository} and {root}")
        if own := [one for one in _OWN if _overlap(root, one)]:
            raise ConfigError(
                f"the roots must lie apart from ciuic's own directories, got {root} and {own[0]}"
            )


def _overlap(one: str, other: str) -> bool:
    """Return whether one of two normal paths is the other, or lies in it."""
    return os.path.commonpath((one, other)) in (one, other)


def _keep_lines(keep: Mapping[str, Any] | None) -> list[str]:
    return [
        f"{_KEEP[key]} = {quote(value) if isinstance(value, str) else value}"
        for key, value in sorted((keep or {}).items())
    ]


def _repository(spec: Mapping[str, Any]) -> str:
    return str(spec.get("repository", "/var/lib/ciuic/repository"))


def object_name(policy: str) -> str:
    """Return the name of a policy's ConfigMap and DaemonSet. ConfigError if it would be too long."""
    if len(policy) > _MAX_NAME:
        raise ConfigError(
            f"the name of a SnapshotPolicy may have {_MAX_NAME} characters, got {len(policy)}: {policy}"
        )
    return f"ciuic-{policy}"


def objects_of(
    policy: Mapping[str, Any], installation: Installation
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ConfigMap and the DaemonSet of a policy.

    Raises:
        ConfigError: the policy cannot be carried out.
    """
    name, spec = policy["metadata"]["name"], policy["spec"]
    text = configuration_of(spec)
    metadata = {
        "name": object_name(name),
        "namespace": installation.namespace,
        "labels": _labels(name),
        "ownerReferences": [
            {
                "apiVersion": policy["apiVersion"],
                "kind": policy["kind"],
                "name": name,
                "uid": policy["metadata"]["uid"],
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ],
    }
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {CONFIG_FILE: text}}
    daemons = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": metadata,
        "spec": {
            "selector": {"matchLabels": {POLICY_LABEL: name}},
            # One node at a time: while a daemon is replaced, its roots are plain directories.
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
            "template": {"metadata": {"labels": _labels(name)}, "spec": _pod(name, spec, installation)},
        },
    }
    return config, daemons


def _labels(policy: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "ciuic-daemon",
        OPERATOR_LABEL: OPERATOR_NAME,
        POLICY_LABEL: policy,
    }


def _pod(name: str, spec: Mapping[str, Any], installation: Installation) -> dict[str, Any]:
    nodes = spec.get("nodes", {})
    remote = spec.get("remote")
    secret = remote.get("secretRef", {}).get("name") if remote else None
    tops = parents_of([root["path"] for root in spec["roots"]])
    repository = _repository(spec)
    volumes = [
        {"name": "configmap", "configMap": {"name": object_name(name)}},
        # Volumes of ConfigMaps are writable by everybody (mode 0777), and root's programs obey no file in such a directory: a copy.
        _directory("configuration", _CONFIG_HOST_DIR, make=True),
        _directory("runtime", RUNTIME_DIR, make=True),
        _directory("state", STATE_DIR, make=True),
        _directory("repository", repository, make=True),
        _directory("upload-state", UPLOAD_DIR, make=True),
        *(_directory(f"root-{number}", top, make=False) for number, top in enumerate(tops)),
        {"name": "account", "projected": {"sources": _ACCOUNT}},
    ]
    configuration = _mount("configuration", CONFIG_DIR, read_only=True)
    copied = [_mount("configuration", CONFIG_DIR), _mount("configmap", CONFIG_MAP_DIR, read_only=True)]
    runtime, stored = _mount("runtime", RUNTIME_DIR), _mount("repository", repository)
    upload = _mount("upload-state", UPLOAD_DIR)
    key: list[dict[str, Any]] = []
    if secret:
        items = [{"key": KEY_NAME, "path": KEY_NAME, "mode": 0o400}]
        volumes.append({"name": "key", "secret": {"secretName": secret, "items": items}})
        # By its path alone, for the same reason; a key does not change.
        key = [{**_mount("key", f"{KEY_DIR}/{KEY_NAME}", read_only=True), "subPath": KEY_NAME}]
    image = {"image": installation.image, "imagePullPolicy": installation.pull_policy}
    containers: list[dict[str, Any]] = [
        {
            "name": "daemon",
            **image,
            "command": ["ciuic", "daemon"],
            # FUSE, and mounts that the node sees.
            "securityContext": {"privileged": True},
            # Asked of the agent, which asks the daemon: a program for each probe would cost each node a hundredth of a processor.
            # No liveness probe, and no limit of memory: with this container the overlays below running jobs would end.
            "readinessProbe": _probe(READY),
            "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [
                configuration,
                runtime,
                _mount("state", STATE_DIR),
                stored,
                # It keeps what is not stored on the remote yet.
                {**upload, "readOnly": True},
                *(
                    {"name": f"root-{number}", "mountPath": top, "mountPropagation": "Bidirectional"}
                    for number, top in enumerate(tops)
                ),
            ],
        },
        {
            "name": "agent",
            **image,
            "command": ["ciuic-operator", "agent"],
            "env": [{"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
            "securityContext": _UNPRIVILEGED,
            "ports": [{"name": "health", "containerPort": HEALTH_PORT}],
            "livenessProbe": _probe(ALIVE),
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
            "volumeMounts": [
                *copied,
                runtime,
                {**stored, "readOnly": True},
                {**upload, "readOnly": True},
                _mount("account", _ACCOUNT_DIR, read_only=True),
            ],
        },
    ]
    if remote:
        containers.append(
            {
                "name": "upload",
                **image,
                "command": ["ciuic", "remote", "upload"],
                **({"envFrom": [{"secretRef": {"name": secret}}]} if secret else {}),
                "securityContext": _UNPRIVILEGED,
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "resources": {"requests": {"cpu": "10m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
                "volumeMounts": [configuration, {**stored, "readOnly": True}, upload, *key],
            }
        )
    return {
        "serviceAccountName": SERVICE_ACCOUNT,
        "automountServiceAccountToken": False,
        # Processes that go round an overlay, and trainings that are watched, are processes of the node.
        "hostPID": True,
        "priorityClassName": "system-node-critical",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "nodeSelector": {"kubernetes.io/os": "linux", **nodes.get("matchLabels", {})},
        "tolerations": list(nodes.get("tolerations", [])),
        # A node in two pools runs the daemon of one; the other pod stays Pending, and its policy is not Ready.
        "affinity": {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "ciuic-daemon"}},
                        "topologyKey": "kubernetes.io/hostname",
                    }
                ]
            }
        },
        "initContainers": [
            {
                "name": "configure",
                **image,
                "command": ["ciuic-operator", "configure"],
                "securityContext": _UNPRIVILEGED,
                "volumeMounts": copied,
            }
        ],
        "containers": containers,
        "volumes": volumes,
    }


_ACCOUNT: Final = [
    {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}},
    {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
    {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
]
# Root without capabilities: the control socket, the repository and the key are root's.
_UNPRIVILEGED: Final = {
    "runAsUser": 0,
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def parents_of(roots: Sequence[str]) -> list[str]:
    """Return the directories to mount so that each root lies below one, none of them within another.

    The directory above a root, so that the container sees it mounted and unmounted; a root at the top of the file system itself.
    """
    wanted = {mounted_for(root) for root in roots}
    return sorted(
        top for top in wanted if not any(top != other and top.startswith(f"{other}/") for other in wanted)
    )


def mounted_for(root: str) -> str:
    """Return the directory of the node that is mounted for a root."""
    top = os.path.dirname(root)
    return top if top != "/" else root


def _directory(name: str, path: str, *, make: bool) -> dict[str, Any]:
    kind = "DirectoryOrCreate" if make else "Directory"
    return {"name": name, "hostPath": {"path": path, "type": kind}}


def _probe(path: str) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": HEALTH_PORT}, "periodSeconds": 10, "timeoutSeconds": 6}


def _mount(name: str, path: str, *, read_only: bool = False) -> dict[str, Any]:
    return {"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})}
