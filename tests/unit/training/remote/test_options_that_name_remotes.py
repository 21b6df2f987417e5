"""Options of a manager that name remotes, and the labels of its snapshots there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.cli_repository import CliRepository

from ciuic import SnapshotManager
from ciuic.config import RemoteConfig
from ciuic.errors import UsageError
from ciuic.remote.object_names import manifest_name
from ciuic.remote.uploader import Labels
from ciuic.repository import Repository
from ciuic.training.remote.place import is_url, place_of
from ciuic.training.remote.remote_options import local_directory, remotes_from
from ciuic.training.remote.uploads import UploadOrder, labels_of, store_variables
from ciuic.types import SnapshotId

FULL: dict[str, Any] = {
    "url": "s3://bucket/team/run",
    "endpoint": "https://minio.example:9000",
    "region": "eu-central-1",
    "bandwidth": "50MiB",
    "key_file": Path("/run/secrets/key"),
    "storage_class": "STANDARD_IA",
    "schedule": {"interval": "10m"},
    "keep": {"keep_last": 40, "keep_within": "90d", "keep_tags": ["paper"]},
}


def _without_status(remote: RemoteConfig) -> RemoteConfig:
    """Return a remote as a training uploads to it: its host's daemon stores the status."""
    return msgspec.structs.replace(remote, status_every_seconds=0)


def test_all_keys_reach_the_process_that_uploads() -> None:
    """A mapping has the keys of `[remote]`, and the process that uploads gets all of them on its command line."""
    (remote,) = remotes_from(FULL)
    assert remote.bandwidth_bytes == 50 << 20
    assert remote.key_file == FULL["key_file"]
    assert remote.schedule.interval_seconds == 600
    assert (remote.keep.keep_last, remote.keep.keep_within_seconds) == (40, 90 * 86400)
    sent = msgspec.json.decode(msgspec.json.encode(UploadOrder.of(remote)), type=UploadOrder)
    assert sent.config() == _without_status(remote)


def test_the_way_over_ssh_reaches_the_process_that_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Command and program of an ssh URL are sent with the order; those of the environment, and the agent, with it."""
    (remote,) = remotes_from(
        {"url": "ssh://me@nas/~/d", "ssh_command": "ssh -i /k", "ssh_program": "/opt/ciuic"}
    )
    sent = msgspec.json.decode(msgspec.json.encode(UploadOrder.of(remote)), type=UploadOrder)
    assert sent.config() == _without_status(remote)
    variables = {"CIUIC_SSH_COMMAND": "ssh -v", "CIUIC_SSH_PROGRAM": "c", "SSH_AUTH_SOCK": "/tmp/agent"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert store_variables().items() >= variables.items()


def test_a_url_has_the_defaults_of_the_configuration() -> None:
    """A URL alone is sealed and kept for 30 days, at least 10 snapshots, as a remote of the configuration is."""
    (remote,) = remotes_from("s3://bucket/run/")
    assert (remote.url, remote.encryption) == ("s3://bucket/run", True)
    assert (remote.keep.keep_within_seconds, remote.keep.keep_last) == (30 * 86400, 10)


def test_names_follow_places() -> None:
    """What is recorded of one place is never taken for another: URL and endpoint decide the name, nothing else."""
    options: list[Any] = [
        "s3://bucket/run",
        "s3://bucket/other/run",
        {"url": "s3://bucket/run", "endpoint": "https://minio.example"},
        "gs://bucket/run",
    ]
    names = [remotes_from(one)[0].name for one in options]
    assert len(set(names)) == 4
    again = remotes_from({"url": "s3://bucket/run/", "bandwidth": "1MiB"})[0].name
    config = RemoteConfig(name="anything", url="s3://bucket/run")
    assert names[0] == again == remotes_from([config])[0].name
    assert all(len(name) <= 32 and name.startswith("run-") for name in names)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("bucket/run", "a remote is a URL"),
        ("ftp://bucket/run", "scheme"),
        ({"endpoint": "https://x"}, "must have a URL"),
        ({"url": "s3://bucket/run", "keyfile": "x"}, "no key 'keyfile'"),
        ({"url": "s3://bucket/run", "bandwidth": "much"}, "bandwidth of a remote"),
        ({"url": "s3://bucket/run", "endpoint": "https://user:secret@x"}, "endpoint of a remote"),
        (["s3://bucket/run", "s3://bucket/run/"], "named once"),
    ],
)
def test_mistakes_are_named(wrong: Any, text: str) -> None:
    """Each mistake is one sentence that says what is wrong and shows no password."""
    with pytest.raises(UsageError, match=text) as caught:
        remotes_from(wrong)
    assert "secret" not in str(caught.value)


def test_no_remote_is_a_type_error() -> None:
    """A number is no remote, and None is none."""
    assert remotes_from(None) == ()
    for wrong in (3, [3]):
        with pytest.raises(TypeError, match="remote must be"):
            remotes_from(wrong)


def test_a_url_has_one_local_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A URL as save_dir is the first remote, once, and its directory depends on it alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    url = "s3://bucket/run"
    directory, remotes = place_of(url, {"url": f"{url}/", "region": "us-east-1"})
    assert Path(directory).parent == tmp_path / "ciuic" / "trainings"
    assert [(one.url, one.region) for one in remotes] == [(url, "us-east-1")]
    assert [one.url for one in place_of(url, "gs://second/run").remotes] == [url, "gs://second/run"]
    assert Path(directory) == local_directory(f"{url}/") != local_directory("s3://bucket/runs")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert local_directory(url).parent == Path.home() / ".local" / "state" / "ciuic" / "trainings"


@pytest.mark.parametrize(
    ("save_dir", "result"),
    [("s3://b/x", True), ("./snapshots", False), ("a:/b", False), (Path("s3://b"), False), ("/s3://", False)],
)
def test_what_is_a_url(save_dir: Any, result: bool) -> None:
    """Only text with a scheme and two slashes is a URL."""
    assert is_url(save_dir) is result


def test_true_means_the_remotes_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """remote=True takes the configured remotes with their settings; where there are none it says so."""
    config = tmp_path / "ciuic.toml"
    config.write_text('[remote]\nurl = "s3://bucket/all"\nkey_file = "/keys/host"\nbandwidth = "10MiB"\n')
    monkeypatch.setenv("CIUIC_CONFIG", str(config))
    (remote,) = remotes_from(True)
    assert (remote.url, remote.key_file, remote.bandwidth_bytes) == (
        "s3://bucket/all",
        Path("/keys/host"),
        10 << 20,
    )
    assert remotes_from(False) == ()
    config.write_text("")
    with pytest.raises(UsageError, match="names none"):
        remotes_from(True)


@pytest.mark.parametrize(
    ("epoch", "step", "labels"), [(3, 70, (3, 70)), (None, 1, (None, 1)), (-1, 5, (None, 5))]
)
def test_a_state_has_name_epoch_and_step(
    epoch: int | None, step: int | None, labels: tuple[int | None, int | None], tmp_path: Path
) -> None:
    """A training state is labelled as it was saved; a number that no manifest's name has is left out."""
    with SnapshotManager(tmp_path / "states") as manager:
        save = manager.save_snapshot(weights={"w": np.ones(10)}, epoch=epoch, step=step, wait=True)
        assert save is not None
        assert save.id is not None, save.error
    with Repository.open(tmp_path / "states") as repository:
        found = labels_of(repository, repository.snapshots.load(SnapshotId.parse(save.id)))
    assert (found.epoch, found.step) == labels
    assert found.job
    manifest_name(job=found.job, epoch=found.epoch, step=found.step, host="host")


def test_snapshots_of_files_have_no_labels(tmp_path: Path) -> None:
    """A snapshot of files has no labels, whatever its tags say."""
    made = CliRepository(tmp_path / "repository", tmp_path / "root")
    id_ = made.snapshot({b"snapshot.json": b"{}"}, tags=("epoch-3",))
    with Repository.open(made.path) as repository:
        assert labels_of(repository, repository.snapshots.load(id_)) == Labels()
