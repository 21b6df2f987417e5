"""Locks by which one process uploads, and ends when nobody saves."""

from __future__ import annotations

from pathlib import Path

import pytest

from ciuic.training.remote import upload_process
from ciuic.training.remote.uploads import UploadLock, UploadOrder, Uploads, is_uploading, store_variables


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
