"""What the agent of a node asks of a real daemon: the snapshot, its verdict, and where it is stored."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    pytest.skip("Kopf needs Python 3.11", allow_module_level=True)

from support.site import Site
from support.site import kernel_site as kernel_site

from ciuic.config.owners import refuse_foreign_file
from ciuic.errors import CiuicError, ConfigError
from ciuic.operator.agent import LocalDaemon, copy_configuration
from ciuic.protocol.stored_remotely import StoredRecord, write_record
from ciuic.repository import Repository
from ciuic.types import SnapshotId

pytestmark = pytest.mark.mount


def test_a_snapshot_of_the_node_and_what_is_said_of_it(
    site: Site, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cut with tags and a hold, waited for, judged by its checkpoint, and found on the remote once the upload has recorded it."""
    root, state = site.root("a"), short_tmp / "upload"
    (root / "model.safetensors").write_bytes((16).to_bytes(8, "little") + b'{"__metadata__":')
    os.utime(root / "model.safetensors", (1, 1))
    site.start()
    monkeypatch.setenv("CIUIC_CONFIG", str(site.config))
    monkeypatch.setenv("CIUIC_UPLOAD_STATE", str(state))
    daemon = LocalDaemon(site.socket)
    cut = daemon.take("TrainingSnapshot default/x", ["kubernetes-job=default.llm"], hold=True)
    daemon.wait(cut.id)
    assert cut.step is None
    assert daemon.verdict(cut.id) == "TORN"
    with Repository.open(short_tmp / "repository") as repository:
        stored = repository.snapshots.load(SnapshotId(cut.id))
        assert "kubernetes-job=default.llm" in stored.tags
        identity = repository.id
    assert daemon.remote(cut.id) == "None"
    with open(site.config, "a") as config:
        config.write('[remote]\nname = "r"\nurl = "s3://my-bucket/x"\nencryption = false\n')
    daemon.reload()
    assert daemon.remote(cut.id) == "Waiting"
    state.mkdir()
    write_record("r", StoredRecord(repository=identity, passed_over=frozenset({cut.id})), state)
    assert daemon.remote(cut.id) == "PassedOver"
    write_record("r", StoredRecord(repository=identity, stored=frozenset({cut.id})), state)
    assert daemon.remote(cut.id) == "Stored"
    site.stop()
    with pytest.raises(CiuicError):
        daemon.take("", [], hold=False)


def test_the_configuration_is_copied_to_where_root_obeys_it(short_tmp: Path) -> None:
    """The volume of a ConfigMap, as kubelet lays it out, is writable by everybody and refused; the copy is not, and is made once."""
    volume, target = short_tmp / "configmap", short_tmp / "etc/ciuic.toml"
    (volume / "..2026_1").mkdir(parents=True)
    volume.chmod(0o777)
    (volume / "..2026_1/ciuic.toml").write_text("[schedule]\n")
    (volume / "..data").symlink_to("..2026_1")
    (volume / "ciuic.toml").symlink_to("..data/ciuic.toml")
    target.parent.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="writable by others"):
        refuse_foreign_file(volume / "ciuic.toml")
    assert copy_configuration(volume / "ciuic.toml", target)
    assert not copy_configuration(volume / "ciuic.toml", target)
    refuse_foreign_file(target)
    assert target.read_text() == "[schedule]\n"
