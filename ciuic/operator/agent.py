"""Agent of a node: has the daemon take what TrainingSnapshots request of this node, and writes what became of it.

Guarantees: it changes nothing in the cluster but its own part, ``status.nodes.<node>``, of TrainingSnapshots. A part goes on where its
status says it was, whichever agent began it: Requested is taken, Cut is waited for, Committed is looked at and waited for on the
remotes. A request is carried out at least once: an agent that is killed between the cut and its report has it taken again.

When the configuration of the policy changes, kubelet changes the mounted file, and the agent has the daemon read it: no pod is replaced,
and the roots stay mounted.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import structlog

from ciuic.config import load_config, repository_path
from ciuic.errors import Busy, CiuicError, NotFound, NotPermitted, Unreachable, UsageError
from ciuic.operator.api import Api, ApiError, Watch, reference, watch
from ciuic.operator.policies import GROUP, VERSION
from ciuic.protocol.control import DEFAULT_SOCKET, ControlClient
from ciuic.protocol.stored_remotely import StoredRecordDamaged, read_record
from ciuic.repository import Repository
from ciuic.system.child_process import environment, module_command
from ciuic.system.disk import Disk

_log = structlog.get_logger(__name__)
_POLL_SECONDS: Final = 5.0
_MAX_RETRY_SECONDS: Final = 60.0
_VERDICT_SECONDS: Final = 600.0
_MAX_MESSAGE: Final = 1024
Body = Mapping[str, Any]


class Cut(NamedTuple):
    """A snapshot whose instant is fixed."""

    id: str
    step: int | None
    """Lowest step of the trainings that run on the node; None: none is known."""


class NodeDaemon(Protocol):
    """What the agent asks of its node. Calls block."""

    def take(self, message: str, tags: list[str], *, hold: bool) -> Cut:
        """Cut a snapshot of all roots. CiuicError."""

    def wait(self, snapshot: str) -> None:
        """Return when the snapshot is committed. CiuicError if it failed."""

    def verdict(self, snapshot: str) -> str | None:
        """Return the verdict on the newest checkpoints, None where there is none."""

    def remote(self, snapshot: str) -> str:
        """Return the remote state: None, Waiting, Stored or PassedOver."""

    def reload(self) -> None:
        """Have the daemon read its configuration. CiuicError."""


class LocalDaemon:
    """The daemon behind the control socket of this node."""

    def __init__(self, socket: Path | str = DEFAULT_SOCKET) -> None:
        self._client = ControlClient(socket)

    def take(self, message: str, tags: list[str], *, hold: bool) -> Cut:
        state = self._client.take_snapshot(message=message, tags=tags, hold=hold)
        trainers = self._client.status().trainers
        return Cut(state.id, min((one.step for one in trainers if one.state == "running"), default=None))

    def wait(self, snapshot: str) -> None:
        self._client.wait_snapshot(snapshot)

    def verdict(self, snapshot: str) -> str | None:
        # In a process of its own, which may be ended: it reads files that users wrote.
        done = subprocess.run(
            module_command("ciuic", "checkpoints", "--json", "--", snapshot),
            cwd="/", env=environment(), stdin=subprocess.DEVNULL, capture_output=True, check=False,
            timeout=_VERDICT_SECONDS,
        )  # fmt: skip
        try:
            found = json.loads(done.stdout)["checkpoints"]
        except (ValueError, KeyError, TypeError):
            _log.warning("no_verdict", snapshot=snapshot, error=done.stderr[-500:].decode(errors="replace"))
            return "UNKNOWN"
        return found[0]["verdict"] if found else None

    def remote(self, snapshot: str) -> str:
        config = load_config()
        if not config.remotes:
            return "None"
        with Repository.open(repository_path(config)) as opened:
            repository = opened.id
        for remote in config.remotes:
            try:
                record = read_record(remote.name)
            except StoredRecordDamaged as error:
                _log.warning("remote_not_known", remote=remote.name, error=str(error))
                return "Waiting"
            if record is None or record.repository != repository or not record.is_of(remote):
                return "Waiting"
            if snapshot not in record.stored:
                return "PassedOver" if snapshot in record.passed_over else "Waiting"
        return "Stored"

    def reload(self) -> None:
        self._client.reload()

    def answer(self) -> None:
        """Return when the daemon has answered. CiuicError."""
        self._client.status()


class Agent:
    """The agent of one node."""

    def __init__(
        self,
        api: Api,
        node: str,
        daemon: NodeDaemon,
        *,
        configuration: tuple[Path, Path] | None = None,
        poll_seconds: float = _POLL_SECONDS,
    ) -> None:
        self._api = api
        self._node = node
        self._daemon = daemon
        self._configuration = configuration
        self._poll_seconds = poll_seconds
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Carry out requests until ``stop`` is set."""
        reloading = asyncio.create_task(self._reload_on_change())
        try:
            await watch(
                [Watch(GROUP, VERSION, "trainingsnapshots", self._on_snapshot)], stop, self._api.connection
            )
        finally:
            tasks = [reloading, *self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _on_snapshot(self, event: Mapping[str, Any]) -> None:
        body = event["object"]
        uid = body["metadata"]["uid"]
        part = body.get("status", {}).get("nodes", {}).get(self._node)
        if event["type"] == "DELETED" or part is None or not _is_open(part):
            # Also what the controller has given up: a part that has failed stays so.
            if (task := self._running.pop(uid, None)) is not None:
                task.cancel()
        elif uid not in self._running:
            # It stays until the part is seen to have ended: events of before its last step may still come.
            self._running[uid] = asyncio.create_task(self._carry_out(body, dict(part)))
            self._running[uid].add_done_callback(lambda task: self._ended(uid, task))

    def _ended(self, uid: str, task: asyncio.Task[None]) -> None:
        """Forget a part that ended by a defect: the next event of it begins it again."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("part_not_carried_out", uid=uid, error=repr(error))
            if self._running.get(uid) is task:
                del self._running[uid]

    async def _carry_out(self, body: Body, part: dict[str, Any]) -> None:
        """Take the part to its end. What may pass is tried again, until the controller gives the part up."""
        delay = self._poll_seconds
        while _is_open(part):
            phase, failing = part["phase"], False
            try:
                found = await self._step(body, part)
                if "message" in part:
                    found["message"] = None
            except (CiuicError, OSError, subprocess.SubprocessError) as error:
                _log.warning("step_failed", phase=phase, error=str(error), again_in_seconds=delay)
                failing, message = True, str(error)[:_MAX_MESSAGE] or type(error).__name__
                found = {} if phase == "Committed" or part.get("message") == message else {"message": message}
                if _is_final(error, phase):
                    found = {"phase": "Failed", "message": message}
            part.update(found)
            if found:
                await self._write(body, found)
            if part["phase"] == phase:
                await asyncio.sleep(delay)
                delay = min(delay * 2, _MAX_RETRY_SECONDS) if failing else self._poll_seconds

    async def _step(self, body: Body, part: Mapping[str, Any]) -> dict[str, Any]:
        """Take one step of the part, and return what is to be reported."""
        metadata, spec = body["metadata"], body["spec"]
        if part["phase"] == "Requested":
            job = f"{metadata['namespace']}.{spec['jobRef']['name']}"
            cut = await asyncio.to_thread(
                self._daemon.take,
                f"TrainingSnapshot {metadata['namespace']}/{metadata['name']}",
                [f"kubernetes-job={job}", f"kubernetes-kind={spec['jobRef']['kind']}"],
                hold=bool(spec.get("hold", False)),
            )
            found: dict[str, Any] = {"phase": "Cut", "snapshot": cut.id}
            return found if cut.step is None else {**found, "step": cut.step}
        if part["phase"] == "Cut":
            await asyncio.to_thread(self._daemon.wait, part["snapshot"])
            verdict = await asyncio.to_thread(self._daemon.verdict, part["snapshot"])
            return {"phase": "Committed"} if verdict is None else {"phase": "Committed", "verdict": verdict}
        remote = await asyncio.to_thread(self._daemon.remote, part["snapshot"])
        return {} if remote == part.get("remote") else {"remote": remote}

    async def _write(self, body: Body, found: dict[str, Any]) -> None:
        """Write a step. It was taken, so that nothing but the report is repeated where the API does not answer."""
        metadata = body["metadata"]
        target = reference("TrainingSnapshot", metadata["name"], metadata["namespace"])
        delay = self._poll_seconds
        while True:
            try:
                await self._api.patch_status(target, {"nodes": {self._node: found}})
                return
            except ApiError as error:
                _log.warning("status_not_written", error=str(error), again_in_seconds=delay)
                await asyncio.sleep(delay)
                delay = min(delay * 2, _MAX_RETRY_SECONDS)

    async def _reload_on_change(self) -> None:
        if self._configuration is None:
            return
        source, target = self._configuration
        is_read = True
        while True:
            try:
                is_read = not copy_configuration(source, target) and is_read
                if not is_read:
                    await asyncio.to_thread(self._daemon.reload)
                    is_read = True
                    _log.info("configuration_reloaded")
            except (CiuicError, OSError) as error:
                _log.error("configuration_not_reloaded", error=str(error))
            await asyncio.sleep(self._poll_seconds)


def copy_configuration(source: Path, target: Path) -> bool:
    """Copy the mounted configuration to where root's programs obey it; return whether it was another one.

    It is not made durable: whatever starts here first copies it again.
    """
    content = source.read_bytes()
    with suppress(FileNotFoundError):
        if target.read_bytes() == content:
            return False
    # Shared: `ciuic` in the container may edit it meanwhile.
    Disk().replace_file(target, content, mode=None, durable=False, shared=True)
    return True


def _is_open(part: Mapping[str, Any]) -> bool:
    if part["phase"] == "Committed":
        return part.get("remote") not in ("None", "Stored", "PassedOver")
    return bool(part["phase"] != "Failed")


def _is_final(error: Exception, phase: str) -> bool:
    """Return whether another try would meet the same error: of a request that is refused, or of a snapshot that is lost."""
    if phase == "Cut":
        return isinstance(error, CiuicError) and not isinstance(error, (Unreachable, Busy))
    return phase == "Requested" and isinstance(error, (UsageError, NotFound, NotPermitted))
