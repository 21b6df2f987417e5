"""Remotes that ranks make and open at the same time."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from ciuic.remote.access import add_slot, init_remote
from ciuic.remote.errors import DamagedRemote, WrongKey
from ciuic.remote.objects.memory_objects import forget_bucket
from ciuic.remote.objects.opening import open_objects
from ciuic.remote.sealing.key_slots import typed_secret
from ciuic.remote.sealing.sealer import MasterKey
from ciuic.training.remote import remote_options
from ciuic.training.remote.remote_options import remotes_from

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
