"""Ranks and one remote: made and opened by several at the same time, and uploaded to by one process."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ciuic.remote.access import add_slot, init_remote
from ciuic.remote.errors import DamagedRemote, WrongKey
from ciuic.remote.objects.memory_objects import forget_bucket
from ciuic.remote.objects.opening import open_objects
from ciuic.remote.sealing.key_slots import typed_secret
from ciuic.remote.sealing.sealer import MasterKey
from ciuic.training.remote import remote_options, upload_process
from ciuic.training.remote.remote_options import remotes_from
from ciuic.training.remote.uploads import UploadLock, UploadOrder, Uploads, is_uploading, store_variables

PASSPHRASE = "a passphrase of many words"


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    bucket = f"bucket-{uuid.uuid4().hex}"
    monkeypatch.setenv("CIUIC_REMOTE_PASSPHRASE", PASSPHRASE)
    yield f"memory://{bucket}/run"
    forget_bucket(bucket)


@pytest.mark.parametrize("arrives", ["while it is waited for", "right after the attempt"])
def test_a_rank_waits_for_the_first_key_slot_of_another(
    url: str, arrives: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that comes between the making of a remote and its first slot opens it, whenever the slot arrives."""
    made = init_remote(open_objects(url), master=MasterKey.generate(), block_size=1 << 20)
    added = []

    def add(*_: object) -> None:
        if not added:
            added.append(True)
            add_slot(made, "training", typed_secret(PASSPHRASE))

    if arrives == "while it is waited for":
        monkeypatch.setattr(remote_options, "time", SimpleNamespace(monotonic=time.monotonic, sleep=add))
    else:
        look = remote_options.KeySlots.any_object

        def any_object(slots: remote_options.KeySlots) -> bool:
            add()
            return look(slots)

        monkeypatch.setattr(remote_options.KeySlots, "any_object", any_object)
    (remote,) = remotes_from(url)
    naming = remote_options.naming_of(remote)
    assert added
    assert naming.block_size == 1 << 20


def test_a_wrong_key_is_refused_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that opens no slot, and a remote whose slots never come, are told and not waited for without end."""
    made = init_remote(open_objects(url), master=MasterKey.generate(), block_size=1 << 20)
    monkeypatch.setattr(remote_options, "_OTHERS_SECONDS", 0.0)
    (remote,) = remotes_from(url)
    with pytest.raises(DamagedRemote):
        remote_options.naming_of(remote)
    add_slot(made, "training", typed_secret("another passphrase"))
    monkeypatch.setattr(remote_options, "_OTHERS_SECONDS", 60.0)
    waited: list[float] = []
    monkeypatch.setattr(
        remote_options, "time", SimpleNamespace(monotonic=time.monotonic, sleep=waited.append)
    )
    with pytest.raises(WrongKey):
        remote_options.naming_of(remote)
    assert waited == []


def test_one_process_uploads_and_asking_does_not_change_that(tmp_path: Path) -> None:
    """The lock has one holder; asking whether there is one leaves it free."""
    first, second = (UploadLock.uploader(str(tmp_path), "remote") for _ in range(2))
    assert not is_uploading(str(tmp_path), "remote")
    assert first.acquire()
    assert is_uploading(str(tmp_path), "remote")
    assert not is_uploading(str(tmp_path), "other")
    assert not second.acquire()
    first.release()
    assert second.acquire()
    second.release()
    assert not is_uploading(str(tmp_path), "remote")


def test_several_save_and_the_last_one_lets_go(tmp_path: Path) -> None:
    """The end can lock `users` only when nobody saves any more."""
    savers = [UploadLock.users(str(tmp_path), "remote") for _ in range(2)]
    end = UploadLock.users(str(tmp_path), "remote")
    assert all(one.acquire(shared=True) for one in savers)
    for one in savers:
        assert not end.acquire()
        one.release()
    assert end.acquire()
    assert not savers[0].acquire(shared=True)
    end.release()
    savers[0].release()


def test_the_end_comes_when_the_repository_is_gone(tmp_path: Path) -> None:
    """A process whose directory was removed ends once nobody saves, and holds the lock from then on."""
    saver = UploadLock.users(str(tmp_path), "remote")
    users = UploadLock.users(str(tmp_path), "remote")
    end = upload_process._End(str(tmp_path), UploadOrder(name="remote", url="memory://bucket"), users)
    assert saver.acquire(shared=True)
    assert not end.has_come()
    saver.release()
    assert end.has_come()
    assert not saver.acquire(shared=True)
    users.release()
    saver.release()


def test_a_failure_is_told_and_raised_nowhere(tmp_path: Path) -> None:
    """Where nothing can be locked the training hears why, and goes on."""
    from ciuic.training.remote.uploads import UploadOrder

    (tmp_path / "remotes").write_text("no directory")
    told: list[str] = []
    uploads = Uploads(str(tmp_path), [UploadOrder(name="remote", url="file:///x")], told.append)
    uploads.saved()
    uploads.finish(60)
    assert len(told) == 1
    assert "cannot be uploaded" in told[0]


def test_credentials_of_stores_reach_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of stores and proxies are passed on, also by a process of root, and no others."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "t")
    monkeypatch.setenv("https_proxy", "p")
    monkeypatch.setenv("LD_PRELOAD_OTHER", "x")
    found = store_variables()
    assert (found["AWS_SESSION_TOKEN"], found["https_proxy"]) == ("t", "p")
    assert "LD_PRELOAD_OTHER" not in found
