"""MLflow: log the saves of a `SnapshotManager` to a run, and find a run's snapshots.

    mlflow.start_run()
    ciuic.integrations.mlflow.track(manager)
    …
    manager.resume(tracker_run=RUN_ID)                       # the newest whole snapshot of that run
    latest(RUN_ID)                                           # the same from the run's tags alone

Of each save one request sets, in the run that was active at the save:

* metrics at its step: ``ciuic.size_bytes``, ``ciuic.new_bytes``, ``ciuic.write_seconds``, and ``ciuic.good`` (1: the
  verdict is GOOD);
* the tag ``ciuic.snapshot.ID``: JSON with ``step``, ``verdict``, the sizes, and ``uri`` (``ciuic://``, for
  `mlflow_artifacts`). It stays when the snapshot goes;
* the tags ``ciuic.snapshot`` (the last one), ``ciuic.verdict`` (its verdict), ``ciuic.repository`` and
  ``ciuic.training``, and after a save that failed ``ciuic.error``.

Guarantees: those of `ciuic.training.trackers`; snapshots store ``run`` and ``experiment``. Needs ``mlflow-skinny``.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import quote

import mlflow
from mlflow.entities import Metric, RunTag
from mlflow.exceptions import MlflowException

from ciuic.errors import NotFound, NotPermitted
from ciuic.printable import one_line
from ciuic.training.manager import SnapshotManager
from ciuic.training.snapshots import TrainingSnapshots
from ciuic.training.trackers import Rejected, TrackedSave

NAME: Final = "mlflow"
SCHEME: Final = "ciuic"
_LOST_IN_URIS: Final = re.compile(r"[%#?\t\n\r]")
_MAX_TAG_LENGTH: Final = 4000
"""Characters of a tag's value; servers refuse more than 5,000."""
_TRANSIENT: Final = (408, 425, 429)
"""Statuses of HTTP below 500 after which a request may be repeated."""


class MlflowTracker:
    """Runs of MLflow, on one server."""

    name = NAME

    def __init__(
        self, run: Callable[[], Mapping[str, str] | None], *, tracking_uri: str | None = None
    ) -> None:
        """Ask no server.

        Args:
            run: Returns the ids ``run`` and ``experiment`` without asking a server; None: there is none yet.
            tracking_uri: The server; None: as mlflow is set by now.
        """
        self._run = run
        self._uri = tracking_uri or mlflow.get_tracking_uri()
        self._client: Any = None

    def run(self) -> Mapping[str, str]:
        """Return the ids of run and experiment; empty while there is no run."""
        return self._run() or {}

    def log(self, save: TrackedSave) -> None:
        """Log a save to its run, in one request."""
        if self._client is None:
            self._client = mlflow.MlflowClient(self._uri)
        now_ms, step = time.time_ns() // 10**6, save.result.step or 0
        tags = {"ciuic.repository": save.repository, "ciuic.training": save.training}
        if save.result.id is None:
            tags["ciuic.error"] = str(save.result.error)
        else:
            uri = artifact_uri(save.repository, save.result.id)
            tags["ciuic.snapshot"], tags["ciuic.verdict"] = save.result.id, save.verdict
            tags[f"ciuic.snapshot.{save.result.id}"] = json.dumps({**save.facts, "uri": uri})
        try:
            self._client.log_batch(
                save.result.trackers[NAME]["run"],
                metrics=[Metric(f"ciuic.{key}", value, now_ms, step) for key, value in save.numbers.items()],
                tags=[RunTag(key, value[:_MAX_TAG_LENGTH]) for key, value in tags.items()],
            )
        except MlflowException as error:
            # No such run, no access, not understood: another attempt gets the same answer.
            status = error.get_http_status_code()
            if 400 <= status < 500 and status not in _TRANSIENT:
                raise Rejected(str(error)) from error
            raise


def track(
    manager: SnapshotManager,
    run_id: str | None = None,
    *,
    experiment_id: str | None = None,
    tracking_uri: str | None = None,
) -> None:
    """Log the saves that begin from now on to a run of MLflow. Asks no server.

    Args:
        manager: The manager.
        run_id: The run; None: the one that is active in the training thread at each save (nothing is logged of a
            save without one).
        experiment_id: Experiment of ``run_id``, to be stored in the snapshots.
        tracking_uri: The server; None: as mlflow is set now.

    Raises:
        ValueError: The manager is closed.
    """

    def run() -> dict[str, str] | None:
        active = mlflow.active_run()
        if active is not None and run_id in (None, active.info.run_id):
            return {"run": active.info.run_id, "experiment": active.info.experiment_id}
        return None if run_id is None else {"run": run_id, "experiment": experiment_id or ""}

    manager.track(MlflowTracker(run, tracking_uri=tracking_uri))


def latest(run_id: str, *, tracking_uri: str | None = None) -> str:
    """Return the URI of the newest snapshot of a run that is still in its repository, ``ciuic://REPOSITORY/ID``.

    The server is asked where the repository is; which snapshots are of the run the snapshots themselves tell.

    Args:
        run_id: The run.
        tracking_uri: The server; None: as mlflow is set.

    Raises:
        NotFound: Nothing was logged to the run, or no snapshot of it is left.
        NotPermitted: The repository that the server names is another user's.
        mlflow.exceptions.MlflowException: The server does not answer, or has no such run.
        CiuicError: The repository cannot be opened.
    """
    tags = mlflow.MlflowClient(tracking_uri).get_run(run_id).data.tags
    if "ciuic.repository" not in tags:
        raise NotFound(
            f"no save of a SnapshotManager was logged to the run {run_id}",
            hint="ciuic.integrations.mlflow.track(manager)",
        )
    repository = tags["ciuic.repository"]
    _require_own(repository)
    training = TrainingSnapshots(repository, tags.get("ciuic.training", "training"))
    for saved in training.list_snapshots():
        if saved.facts.trackers.get(NAME, {}).get("run") == run_id:
            return artifact_uri(training.save_dir, saved.id)
    raise NotFound(f"no snapshot of the run {run_id} is left in {training.save_dir}")


def _require_own(repository: str) -> None:
    """Refuse a repository that another user may have prepared: the place is the server's word alone."""
    shown, by_hand = (
        one_line(repository),
        "SnapshotManager(PATH).resume(tracker_run=RUN_ID) takes it from you",
    )
    if not os.path.isabs(repository) or "\0" in repository:
        raise NotFound(f"the run names no absolute path of a repository but {shown}", hint=by_hand)
    try:
        owner = os.stat(repository).st_uid
    except OSError as error:
        raise NotFound(f"the repository {shown} of the run is not here: {error.strerror}") from error
    if owner not in (os.geteuid(), 0):
        raise NotPermitted(f"the repository {shown} that the run names belongs to another user", hint=by_hand)


def artifact_uri(repository: str | os.PathLike[str], snapshot: str, path: str = "") -> str:
    """Return the location of a snapshot, or of a path in it, for MLflow: ``ciuic://REPOSITORY/SNAPSHOT/PATH``.

    Args:
        repository: Directory of a local repository.
        snapshot: Id of the snapshot.
        path: Path in the snapshot, such as ``training/model.safetensors.index.json``; empty: all of it.
    """
    # Quoted: URIs are taken apart at # and ?, and lose tabs and line ends.
    parts = [os.path.abspath(repository), snapshot, *filter(None, [path.strip("/")])]
    return f"{SCHEME}://" + _LOST_IN_URIS.sub(lambda found: quote(found[0]), "/".join(parts))
