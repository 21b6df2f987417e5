"""MLflow: saves in a run over REST and in a store of files, servers that are away, and snapshots as artifacts."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import tomli
from support.late_modules import LateModule, skipped_without
from support.restoring import take
from support.stored import put_file
from support.tiny_training import Model, Optimizer

from ciuic import SnapshotManager
from ciuic.repository import Repository
from ciuic.training import trackers
from ciuic.types import Entry, RootRecord, SnapshotDraft, SnapshotId

# Warnings are MLflow's own, which differ from version to version.
pytestmark = [pytest.mark.filterwarnings("ignore"), skipped_without("mlflow")]
mlflow: Any = LateModule("mlflow")

ROOT = Path(__file__).resolve().parents[2]
RUN = "0123456789abcdef0123456789abcdef"


class RestServer(ThreadingHTTPServer):
    """REST API of a tracking server, as far as one run needs it; it records what is asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.batches: list[dict[str, Any]] = []
        self.changed = threading.Condition()
        self.status = 200
        self.asked, self.may_answer = threading.Event(), threading.Event()
        self.may_answer.set()
        self.answered = threading.Semaphore(0)
        self.tags: dict[str, str] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def wait(self, count: int) -> list[dict[str, Any]]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.batches) >= count, 60)
            return self.batches


class _Handler(BaseHTTPRequestHandler):
    server: RestServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        tags = [{"key": key, "value": value} for key, value in self.server.tags.items()]
        info = {"run_id": RUN, "run_uuid": RUN, "experiment_id": "7", "status": "RUNNING", "start_time": 0}
        self._answer({"run": {"info": info | {"lifecycle_stage": "active"}, "data": {"tags": tags}}})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.set()
        assert self.server.may_answer.wait(60)
        self._answer({})
        if self.server.status == 200:
            with self.server.changed:
                self.server.batches.append({"path": self.path, **asked})
                self.server.tags |= {one["key"]: one["value"] for one in asked.get("tags", [])}
                self.server.changed.notify_all()

    def _answer(self, body: dict[str, Any]) -> None:
        if self.server.status == 404:
            body = {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such run"}
        data = json.dumps(body).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.server.answered.release()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RestServer]:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(trackers, "_MIN_PAUSE_SECONDS", 0.01)
    with RestServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.may_answer.set()
        server.shutdown()
        thread.join()


def train(manager: SnapshotManager, steps: int, model: Model | None = None) -> None:
    model = model or Model()
    optimizer = Optimizer(model)
    manager.register(model=model, optimizer=optimizer)
    for _ in range(steps):
        optimizer.step()
        manager.wait()


def test_a_save_is_one_request_to_its_run(server: RestServer, tmp_path: Path) -> None:
    """Id, step, verdict and sizes of each save come in one log-batch, and the run's newest snapshot is found by its tags."""
    from ciuic.integrations import mlflow as tracking

    with SnapshotManager(tmp_path / "snapshots", every_steps=1, name="mine") as manager:
        tracking.track(manager, RUN, experiment_id="7", tracking_uri=server.url)
        train(manager, 2)
    listed = manager.list_snapshots()
    assert [one.facts.trackers for one in listed] == [{"mlflow": {"run": RUN, "experiment": "7"}}] * 2
    batches = server.wait(2)
    assert [(one["path"], one["run_id"]) for one in batches] == [("/api/2.0/mlflow/runs/log-batch", RUN)] * 2
    newest = listed[0]
    metrics = {one["key"]: (one["value"], one["step"]) for one in batches[1]["metrics"]}
    assert metrics["ciuic.size_bytes"] == (newest.size_bytes, 2)
    assert metrics["ciuic.new_bytes"] == (newest.new_bytes, 2)
    assert metrics["ciuic.good"] == (1, 2)
    tags = {one["key"]: one["value"] for one in batches[1]["tags"]}
    uri = tracking.artifact_uri(tmp_path / "snapshots", newest.id)
    assert (tags["ciuic.snapshot"], tags["ciuic.verdict"]) == (newest.id, "GOOD")
    facts = json.loads(tags[f"ciuic.snapshot.{newest.id}"])
    assert (facts["step"], facts["verdict"], facts["uri"]) == (2, "GOOD", uri)
    assert tracking.latest(RUN, tracking_uri=server.url) == uri
    with SnapshotManager(tmp_path / "snapshots", name="mine") as again:
        model = Model()
        again.register(model=model, optimizer=Optimizer(model))
        resumed = again.resume(tracker_run=RUN)
    assert resumed is not None
    assert (resumed.id, resumed.step) == (newest.id, 2)


@pytest.mark.parametrize("trouble", ["500", "hangs", "refused"])
def test_a_server_in_trouble_neither_delays_nor_fails_a_save(
    trouble: str,
    server: RestServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the server answers 500, does not answer, or is away, saves become durable and name the run; the log tells once."""
    from ciuic.integrations import mlflow as tracking

    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.5)
    url = server.url
    if trouble == "500":
        server.status = 500
    elif trouble == "hangs":
        server.may_answer.clear()
    else:
        with socket.create_server(("127.0.0.1", 0)) as free:
            url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with SnapshotManager(tmp_path / "snapshots", every_steps=1) as manager:
        tracking.track(manager, RUN, tracking_uri=url)
        train(manager, 3)
        assert manager.stats.saved == 3
        assert trouble == "refused" or server.asked.wait(60)
    assert [one.facts.trackers["mlflow"]["run"] for one in manager.list_snapshots()] == [RUN] * 3
    told = [one for one in caplog.messages if one.startswith("ciuic:")]
    assert sum("does not take what is logged" in one for one in told) <= 1
    assert told[-1].startswith("ciuic: 3 saves were not logged to mlflow")
    assert not server.batches


def test_a_run_that_is_gone_holds_up_no_other(
    server: RestServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A save that the server rejects, because its run was deleted, is told once; the next run gets the next save."""
    from ciuic.integrations import mlflow as tracking

    server.status = 404
    with SnapshotManager(tmp_path / "snapshots") as manager:
        tracking.track(manager, "f" * 32, tracking_uri=server.url)
        manager.save_snapshot(Model(), step=1, wait=True)
        assert server.asked.wait(60)
        server.answered.acquire()
        server.status = 200
        tracking.track(manager, RUN, tracking_uri=server.url)
        manager.save_snapshot(step=2, wait=True)
        (batch,) = server.wait(1)
    assert batch["run_id"] == RUN
    assert (
        sum(
            "does not take what is logged of a save, which is not tried again" in one
            for one in caplog.messages
        )
        == 1
    )


def test_the_active_run_is_logged_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a run id the run that is active at the save is logged to; of a save without one nothing is."""
    from ciuic.integrations import mlflow as tracking

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setattr(mlflow.tracking.fluent, "_active_experiment_id", None, raising=False)
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    try:
        experiment = mlflow.create_experiment("ours")
        with SnapshotManager(tmp_path / "snapshots") as manager:
            tracking.track(manager)
            manager.save_snapshot(Model(), step=1, wait=True)
            with mlflow.start_run(experiment_id=experiment) as run:
                manager.save_snapshot(step=2, wait=True)
        newest, first = manager.list_snapshots()
        assert first.facts.trackers == {}
        assert newest.facts.trackers == {"mlflow": {"run": run.info.run_id, "experiment": experiment}}
        data = mlflow.MlflowClient().get_run(run.info.run_id).data
        assert data.tags["ciuic.snapshot"] == newest.id
        assert data.metrics["ciuic.size_bytes"] == newest.size_bytes
        assert tracking.latest(run.info.run_id).endswith(f"/{newest.id}")
    finally:
        mlflow.set_tracking_uri(before)


# -- snapshots as artifacts


@pytest.fixture
def snapshot(tmp_path: Path) -> tuple[Path, str]:
    """Repository with one snapshot of a training."""
    with SnapshotManager(tmp_path / "snapshots") as manager:
        save = manager.save_snapshot(Model(), step=1, wait=True)
    assert save is not None
    assert save.id is not None
    return tmp_path / "snapshots", save.id


def plugin(location: str) -> Any:
    """Return the artifact repository that MLflow gets by the entry point of the package."""
    points = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    ((name, value),) = points["mlflow.artifact_repository"].items()
    assert name == "ciuic"
    from mlflow.store.artifact.artifact_repository_registry import ArtifactRepositoryRegistry

    registry = ArtifactRepositoryRegistry()
    registry.register(name, EntryPoint(name, value, "mlflow.artifact_repository").load())
    return registry.get_artifact_repository(location)


def test_a_snapshot_is_an_artifact_location(snapshot: tuple[Path, str], tmp_path: Path) -> None:
    """MLflow lists and downloads what a restore gives, byte for byte, from any level of a location."""
    where, id_ = snapshot
    restored, downloaded = tmp_path / "restored", tmp_path / "downloaded"
    command = ["restore", "-s", id_, "-p", "/training", "--dest", str(restored)]
    subprocess.run(
        [sys.executable, "-m", "ciuic", "--repo", where, *command],
        check=True,
        capture_output=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    downloaded.mkdir()
    artifacts = plugin(f"ciuic://{where}/{id_}")
    assert [(one.path, one.is_dir) for one in artifacts.list_artifacts()] == [("training", True)]
    listed = {one.path: one.file_size for one in artifacts.list_artifacts("training")}
    top = next(restored.rglob("snapshot.json")).parent
    assert listed["training/snapshot.json"] == (top / "snapshot.json").stat().st_size
    assert artifacts.list_artifacts("training/snapshot.json") == []
    artifacts.download_artifacts("training", str(downloaded))
    found = {one.relative_to(top): one.read_bytes() for one in top.rglob("*") if one.is_file()}
    assert len(found) > 4
    got = downloaded / "training"
    assert {one.relative_to(got): one.read_bytes() for one in got.rglob("*") if one.is_file()} == found
    assert [one.path for one in plugin(f"ciuic:{where}").list_artifacts()] == [id_]
    below = plugin(f"ciuic:{where}/{id_}/training")
    assert Path(below.download_artifacts("state.json")).read_bytes() == found[Path("state.json")]


def test_names_that_uris_cannot_hold_are_quoted(tmp_path: Path) -> None:
    """A file of any name is downloaded by its URI, which MLflow takes apart, and by the name that a listing gives."""
    from mlflow.tracking.artifact_utils import _get_root_uri_and_artifact_path

    from ciuic.integrations import mlflow as tracking

    root = tmp_path / "root"
    root.mkdir()
    names = ["#", "?x", "tab\there", "line\nend", "%20", "a%23b", "caf\u00e9", " "]
    # The name of one may be the quoted name of another: then a URI names neither.
    names += ["x?", "x%3F"]
    for name in names:
        (root / name).write_text(name)
    with Repository.create(tmp_path / "a #repository") as repository:
        made = take(repository, root)
    for name in names:
        uri = tracking.artifact_uri(tmp_path / "a #repository", str(made.id), f"{root}/{name}")
        top, path = _get_root_uri_and_artifact_path(uri)
        artifacts = plugin(top)
        if name[0] == "x":
            with pytest.raises(mlflow.exceptions.MlflowException, match="both are there"):
                artifacts.download_artifacts("x%3F")
        else:
            assert Path(artifacts.download_artifacts(path)).read_text() == name
        assert name in [one.path for one in artifacts.list_artifacts()]
        artifacts._download_file(name, str(tmp_path / "got"))
        assert (tmp_path / "got").read_text() == name


HOSTILE = [
    "../../etc/passwd",
    "training/../../etc",
    "/etc/passwd",
    "training/\0state.json",
    "training/./state.json",
]


@pytest.mark.parametrize("path", HOSTILE)
def test_hostile_paths_are_refused(path: str, snapshot: tuple[Path, str], tmp_path: Path) -> None:
    """A path that leads out, is absolute or has a NUL is refused in the path and in the location, and nothing is written."""
    where, id_ = snapshot
    artifacts = plugin(f"ciuic://{where}/{id_}")
    into = tmp_path / "into"
    into.mkdir()
    with pytest.raises(mlflow.exceptions.MlflowException) as refused:
        artifacts.list_artifacts(path)
    assert refused.value.error_code == "INVALID_PARAMETER_VALUE"
    with pytest.raises(mlflow.exceptions.MlflowException):
        artifacts._download_file(path, str(into / "file"))
    with pytest.raises((mlflow.exceptions.MlflowException, ValueError)):
        artifacts.download_artifacts(path, str(into))
    if not path.startswith("/"):
        with pytest.raises(mlflow.exceptions.MlflowException):
            plugin(f"ciuic://{where}/{id_}/{path}").list_artifacts()
    assert not list(into.rglob("*"))


@pytest.mark.parametrize("location", ["ciuic://host/snapshots/cs-123456", "ciuic:snapshots", "ciuic:////etc"])
def test_other_locations_are_refused(location: str) -> None:
    """A location with a host or a relative path is refused with what is expected."""
    with pytest.raises(mlflow.exceptions.MlflowException, match="must be ciuic:///REPOSITORY/SNAPSHOT/PATH"):
        plugin(location).list_artifacts()


def test_links_and_special_files_are_left_out(tmp_path: Path) -> None:
    """Of a captured directory only files and directories are listed; a link in it is not followed, a hole stays one."""
    where = tmp_path / "repository"
    with Repository.create(where) as repository, repository.writer() as writer:
        special = {
            b"link": Entry(name=b"link", mode=stat.S_IFLNK | 0o777, target=b"/etc/passwd"),
            b"out": Entry(name=b"out", mode=stat.S_IFLNK | 0o777, target=b"/etc"),
            b"pipe": Entry(name=b"pipe", mode=stat.S_IFIFO | 0o644),
        }
        tree: dict[bytes, Entry | None] = {
            b"file": put_file(writer, b"file", b"a" * 5000),
            b"sparse": put_file(writer, b"sparse", bytes(8 << 20)),
        }
        top = writer.update_tree(b"", tree | special)
        entry = Entry(name=b"", mode=stat.S_IFDIR | 0o755, content=top.id, total_files=5, total_bytes=0)
        roots = tuple(RootRecord(path=path, entry=entry) for path in (b"/home/job", b"/home/other"))
        id_ = writer.commit(SnapshotDraft(id=SnapshotId("cs-123456"), time_ns=1, host="test", roots=roots)).id
    above = plugin(f"ciuic:{where}/{id_}")
    assert [one.path for one in above.list_artifacts()] == ["home"]
    assert [one.path for one in above.list_artifacts("home")] == ["home/job", "home/other"]
    artifacts = plugin(f"ciuic://{where}/{id_}/home/job")
    listed = [(one.path, one.is_dir, one.file_size) for one in artifacts.list_artifacts()]
    assert listed == [("file", False, 5000), ("sparse", False, 8 << 20)]
    for path in ("link", "out/passwd", "pipe", "nothing"):
        with pytest.raises(mlflow.exceptions.MlflowException) as refused:
            artifacts._download_file(path, str(tmp_path / "into"))
        assert refused.value.error_code == "RESOURCE_DOES_NOT_EXIST"
    artifacts._download_file("sparse", str(tmp_path / "into"))
    assert (tmp_path / "into").read_bytes() == bytes(8 << 20)
    assert (tmp_path / "into").stat().st_blocks == 0


def test_a_damaged_file_is_not_left_in_part(snapshot: tuple[Path, str], tmp_path: Path) -> None:
    """A file of which a byte of the repository was flipped is refused, and nothing is left of it."""
    where, id_ = snapshot
    for pack in (where / "packs").rglob("*"):
        if pack.is_file() and pack.stat().st_size > 1 << 20:
            with open(pack, "r+b") as file:
                file.seek(pack.stat().st_size // 2)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1]))
    into = tmp_path / "into"
    into.mkdir()
    with pytest.raises(mlflow.exceptions.MlflowException):
        plugin(f"ciuic://{where}/{id_}").download_artifacts("training/model", str(into))
    assert all(one.stat().st_size in _sizes(where, id_) for one in into.rglob("*") if one.is_file())


def _sizes(where: Path, id_: str) -> set[int]:
    artifacts = plugin(f"ciuic://{where}/{id_}")
    return {one.file_size for one in artifacts.list_artifacts("training/model")}


def test_a_snapshot_takes_no_artifacts(snapshot: tuple[Path, str], tmp_path: Path) -> None:
    """Logging to a snapshot and deleting from it are refused plainly, and change nothing."""
    where, id_ = snapshot
    artifacts = plugin(f"ciuic://{where}/{id_}")
    (tmp_path / "file").write_text("x")
    for call in (
        lambda: artifacts.log_artifact(str(tmp_path / "file")),
        lambda: artifacts.log_artifacts(str(tmp_path)),
        lambda: artifacts.delete_artifacts("training"),
    ):
        with pytest.raises(mlflow.exceptions.MlflowException, match="a snapshot cannot be changed"):
            call()
    with Repository.open(where) as repository:
        assert len(repository.snapshots.list()) == 1


# -- a real server


@pytest.mark.slow
def test_a_real_server_takes_what_is_logged(tmp_path: Path) -> None:
    """A real tracking server (the whole of MLflow, where it is installed) has metrics and tags of each save."""
    pytest.importorskip("flask_cors", reason="only mlflow-skinny is installed, which has no server")
    from ciuic.integrations import mlflow as tracking

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        "server",
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/mlflow.db",
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", *command],
            cwd=tmp_path,
            env=dict(os.environ),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        client = mlflow.MlflowClient(url)
        run = client.create_run(client.create_experiment("ours")).info
        with SnapshotManager(tmp_path / "snapshots", every_steps=1) as manager:
            tracking.track(manager, run.run_id, tracking_uri=url)
            train(manager, 3)
        data = client.get_run(run.run_id).data
        newest = manager.list_snapshots()[0]
        assert data.tags["ciuic.snapshot"] == newest.id
        history = client.get_metric_history(run.run_id, "ciuic.size_bytes")
        assert [one.step for one in history] == [1, 2, 3]
        assert tracking.latest(run.run_id, tracking_uri=url).endswith(newest.id)
    finally:
        os.killpg(process.pid, 15)
        process.wait(60)
    shutil.rmtree(tmp_path / "snapshots")
