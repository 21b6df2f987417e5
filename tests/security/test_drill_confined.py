"""The drill of a rescue, under its unit in a real systemd: it restores from an object store with the credentials of the unit alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ci import needs
from support.object_servers import ACCESS_KEY, SECRET_KEY, SeaweedFS
from support.real_systemd import RealSystemd, reason_against
from support.service_host import CODE, ServiceHost

pytestmark = [pytest.mark.mount, pytest.mark.slow, pytest.mark.full]
_UNIT = "ciuic-drill.service"
_CREDENTIALS = "/etc/credstore/ciuic.aws-credentials"
_SNAPSHOT = """
import os, sys
sys.path[:0] = sys.argv[1:]
from pathlib import Path
from support.cli_repository import CliRepository
tree = {b"log-%02d" % number: os.urandom(9000) for number in range(20)}
tree[b"model-100.safetensors"] = os.urandom(3 << 20)
CliRepository(Path("/srv/repository"), Path("/srv/root"), make=False).snapshot(tree)
"""


@pytest.fixture
def host(short_tmp: Path, seaweedfs: SeaweedFS) -> Iterator[ServiceHost]:
    """Provide a host whose remote in an object store has its snapshot, with the units installed."""
    needs(reason_against())
    with RealSystemd(short_tmp, [CODE]) as systemd:
        for command in (
            ["rm", "-rf", "/var/lib/ciuic-upload", "/var/lib/private/ciuic-upload"],
            ["mount", "-t", "tmpfs", "tmpfs", "/srv"],
            # Credentials are mounts that must reach the host, as where systemd boots a machine.
            ["mount", "--make-rshared", "/"],
        ):
            done = systemd.run(command)
            assert done.returncode == 0, done.stderr
        one = ServiceHost(systemd, "/srv")
        one.write(
            _CREDENTIALS,
            f"[default]\naws_access_key_id={ACCESS_KEY}\naws_secret_access_key={SECRET_KEY}\n",
        )
        init = (
            "remote",
            "init",
            seaweedfs.new_url(),
            "--endpoint",
            seaweedfs.endpoint,
            "--region",
            "us-east-1",
        )
        for arguments in (init, ("remote", "upload", "--once")):
            if arguments[1] == "upload":
                packages = [
                    str(CODE),
                    str(CODE / "tests"),
                    *(p for p in sys.path if p.endswith("site-packages")),
                ]
                made = systemd.python(_SNAPSHOT, *packages)
                assert made.returncode == 0, made.stderr
            variables = ("CIUIC_CONFIG=/etc/mine.toml", f"AWS_SHARED_CREDENTIALS_FILE={_CREDENTIALS}")
            one("env", *variables, str(one.program), *arguments)
        one.ciuic("--config", "/etc/mine.toml", "service", "install", "--no-start")
        yield one


def test_the_unit_proves_a_rescue_and_fails_where_there_is_none(
    host: ServiceHost, seaweedfs: SeaweedFS
) -> None:
    """It leaves its outcome for `remote status` and no file; without the packs the unit fails, and its timer comes again."""
    # By way of env: this interpreter may lie where only root can go, and the capability counts from the first exec on.
    host.drop_in(_UNIT, f"[Service]\nExecStart=\nExecStart=/usr/bin/env {host.program} remote drill\n")
    host("systemctl", "start", _UNIT, expect=None)
    assert host.shown(_UNIT, "Result") == "success", host("cat", "/srv/log")
    (remote,) = json.loads(host.ciuic("remote", "status", "--json"))["remotes"]
    assert (remote["last_drill"]["verdict"], remote["last_drill"]["files"]) == ("good", 21)
    assert host("ls", "-A", "/var/cache/private/ciuic-drill") == ""
    url = remote["url"]
    objects = seaweedfs.connect(url)
    objects.delete([info.name for info in objects.list("packs/data/")])
    host("systemctl", "start", _UNIT, expect=1)
    assert host.shown(_UNIT, "ExecMainStatus") == "4", host("cat", "/srv/log")
    host("systemctl", "start", "ciuic-drill.timer")
    assert host.shown("ciuic-drill.timer", "ActiveState") == "active"
    assert host.shown("ciuic-drill.timer", "NextElapseUSecRealtime")
