"""Tests that the unit files are valid, shipped, and neither hide mounts nor kill the job's file system."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.ci import needs

from ciuic.cli.shared.systemd import UNITS, for_program, unit_text
from ciuic.daemon.service import WORKER_SERVICE
from ciuic.errors import ConfigError, NotFound
from ciuic.protocol.stored_remotely import DEFAULT_STATE_DIR
from ciuic.system import syscall_profiles
from ciuic.system.privileges import CAPTURE, OVERLAY_WORKER, UPKEEP
from ciuic.system.seccomp import Profile

_RATED_BY = "252"
"""Version of systemd whose figures docs/security.md has; others differ by a tenth or two."""
MOUNT_NAMESPACE_OPTIONS = [
    "PrivateTmp",
    "PrivateDevices",
    "ProtectSystem",
    "ProtectHome",
    "ProtectKernelTunables",
    "ProtectKernelModules",
    "ProtectKernelLogs",
    "ProtectControlGroups",
    "ProtectProc",
    "PrivateIPC",
    "ReadOnlyPaths",
    "ReadWritePaths",
    "InaccessiblePaths",
    "BindPaths",
    "TemporaryFileSystem",
    "RootDirectory",
    "RootImage",
    "DynamicUser",
    "MountFlags",
]


def settings(name: str) -> list[tuple[str, str]]:
    lines = (line.strip() for line in unit_text(name).splitlines())
    return [
        (line.partition("=")[0], line.partition("=")[2]) for line in lines if "=" in line and line[0] != "#"
    ]


def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    """systemd-analyze verify accepts every unit as it is installed."""
    analyze = shutil.which("systemd-analyze")
    needs("" if analyze else "systemd-analyze is not installed")
    assert analyze is not None
    for name in UNITS:
        (tmp_path / name).write_text(for_program(unit_text(name), Path("/bin/true")))
    result = subprocess.run(
        [analyze, "verify", "--man=no", *(str(tmp_path / name) for name in UNITS)],
        capture_output=True,
        text=True,
        check=False,
    )
    complaints = [line for line in result.stderr.splitlines() if "ciuic" in line]
    assert (result.returncode, complaints) == (0, [])


@pytest.mark.parametrize(
    ("unit", "tenths"),
    [
        ("ciuic.service", 40),
        ("ciuic-workers.service", 40),
        ("ciuic-scrub.service", 20),
        ("ciuic-upload.service", 20),
        ("ciuic-drill.service", 20),
        ("ciuic-exporter.service", 14),
        ("ciuic-web.service", 56),
    ],
)
def test_systemd_rates_the_units_no_worse_than_they_can_be(tmp_path: Path, unit: str, tenths: int) -> None:
    """The exposure level of systemd-analyze, of 10, is what processes that mount for others need."""
    analyze = shutil.which("systemd-analyze")
    needs("" if analyze else "systemd-analyze is not installed")
    assert analyze is not None
    version = subprocess.run(
        [analyze, "--version"], capture_output=True, text=True, check=True
    ).stdout.split()[1]
    slack = 0 if version == _RATED_BY else 2
    path = tmp_path / unit
    path.write_text(for_program(unit_text(unit), Path("/bin/true")))
    done = subprocess.run(
        [analyze, "security", "--no-pager", "--offline=true", f"--threshold={tenths + slack}", str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze rates no files")
    assert done.returncode == 0, done.stdout[-300:] + done.stderr
    level = re.search(r"exposure level for \S+: ([0-9.]+)", done.stdout)
    assert level is not None
    assert float(level[1]) * 10 < tenths + slack


@pytest.mark.parametrize("unit", ["ciuic.service", "ciuic-workers.service"])
def test_the_service_gets_no_mount_namespace_of_its_own(unit: str) -> None:
    """The service has no option that would hide the overlays from jobs, or jobs' mounts from it."""
    used = {key for key, _ in settings(unit)}
    assert used.isdisjoint(MOUNT_NAMESPACE_OPTIONS)
    # PrivateNetwork= would imply PrivateMounts=yes from systemd 255 on.
    assert dict(settings(unit))["PrivateMounts"] == "no"


def test_a_crash_of_the_daemon_leaves_the_workers_alone() -> None:
    """Only the main process is signalled, an out-of-memory kill stops only it, and sockets stay."""
    for unit in ("ciuic.service", "ciuic-workers.service"):
        values = dict(settings(unit))
        assert values["KillMode"] == "process"
        assert values["OOMPolicy"] == "continue"
    assert dict(settings("ciuic.service"))["RuntimeDirectoryPreserve"] == "yes"


def test_the_daemon_asks_for_workers_where_the_socket_is() -> None:
    """The path of the workers' socket is the same in three places, and only root may connect.

    The privileges of workers are in their unit and not in the daemon's.
    """
    service, socket = dict(settings("ciuic.service")), dict(settings("ciuic-workers.socket"))
    assert service["Environment"] == f"{WORKER_SERVICE}={socket['ListenSequentialPacket']}"
    assert service["Requires"] == "ciuic-workers.socket"
    assert socket["SocketMode"] == "0600"
    given = {
        unit: {
            word for key, value in settings(unit) if key == "CapabilityBoundingSet" for word in value.split()
        }
        for unit in ("ciuic.service", "ciuic-workers.service")
    }
    assert {f"CAP_{one.name}" for one in OVERLAY_WORKER} <= given["ciuic-workers.service"]
    assert {f"CAP_{one.name}" for one in CAPTURE | UPKEEP} <= given["ciuic.service"]


def _calls_of(analyze: str, name: str) -> set[str]:
    """Return the system calls of a group of systemd's, and of the groups in it."""
    if not name.startswith("@"):
        return {name}
    done = subprocess.run(
        [analyze, "syscall-filter", "--no-pager", name], capture_output=True, text=True, check=True
    )
    words = {line.strip() for line in done.stdout.splitlines()[1:]} - {""}
    return set().union(*(_calls_of(analyze, word) for word in words if not word.startswith("#")))


@pytest.mark.parametrize(
    ("unit", "profile", "without"),
    [
        ("ciuic-workers.service", syscall_profiles.WORKER, {"setpriority"}),
        ("ciuic-web.service", syscall_profiles.PAGE, set()),
    ],
)
def test_the_unit_allows_the_system_calls_of_its_processes(
    unit: str, profile: Profile, without: set[str]
) -> None:
    """The unit allows the calls in its processes' own filter, and to install it, but for calls of priority and those newer than this systemd.

    The latter get ENOSYS.
    """
    analyze = shutil.which("systemd-analyze")
    needs("" if analyze else "systemd-analyze is not installed")
    assert analyze is not None
    allowed: set[str] = set()
    for key, value in settings(unit):
        if key == "SystemCallFilter":
            calls = set().union(*(_calls_of(analyze, word) for word in value.lstrip("~").split()))
            allowed = allowed - calls if value.startswith("~") else allowed | calls
    known = _calls_of(analyze, "@known")
    wanted = profile.allowed | {"seccomp"}
    assert {name for name in wanted if name not in allowed and name in known} == without


def test_the_workers_are_not_throttled_and_captures_are() -> None:
    """The workers have an ordinary share, and the slice of captures the least one."""
    service, capture = dict(settings("ciuic-workers.service")), dict(settings("ciuic-capture.slice"))
    assert service["IOSchedulingClass"] != "idle"
    assert int(service["CPUWeight"]) >= 100
    assert (capture["CPUWeight"], capture["IOWeight"]) == ("1", "1")


def test_scrub_runs_in_slices_at_idle_priority() -> None:
    """The scrub runs a slice a night at idle priority, and a repository that does not exist is no failure."""
    scrub, timer = dict(settings("ciuic-scrub.service")), dict(settings("ciuic-scrub.timer"))
    assert scrub["ExecStart"].endswith(" verify --checksum --max-duration 30m")
    assert (scrub["Slice"], scrub["Nice"], scrub["IOSchedulingClass"]) == (
        "ciuic-capture.slice",
        "19",
        "idle",
    )
    assert set(scrub["SuccessExitStatus"].split()) == {"3", "75"}
    assert timer["Persistent"] == "true"


def test_the_drill_is_the_uploads_own_user_and_restores_into_its_cache() -> None:
    """The drill has the user, keys and confinement of the upload, runs monthly, and restores nowhere but into its cache directory."""
    upload, drill, timer = (
        settings(f"ciuic-{name}") for name in ("upload.service", "drill.service", "drill.timer")
    )
    values = dict(drill)
    assert values["ExecStart"].endswith("/ciuic remote drill")
    assert values["SuccessExitStatus"] == "3"
    assert ("Environment", f"TMPDIR=/var/cache/{values['CacheDirectory']}") in drill
    # ExecStart, Restart and what else belongs to a process that stays are the upload's alone.
    own = {
        "Description",
        "ExecStart",
        "Type",
        "SuccessExitStatus",
        "Environment",
        "MemoryMax",
        "CacheDirectory",
        "CacheDirectoryMode",
    }
    assert set(drill) - set(upload) == {
        (key, value) for key, value in drill if key in own and (key, value) not in upload
    }
    assert {
        pair
        for pair in set(upload) - set(drill)
        if pair[0].startswith(("Restrict", "Protect", "System", "Inaccess"))
    } == set()
    assert dict(timer)["Persistent"] == "true"


def test_the_upload_has_a_network_and_hardly_anything_else() -> None:
    """The upload runs as a user of its own with one capability, may write to its state alone, and to the network."""
    unit = settings("ciuic-upload.service")
    values = dict(unit)
    assert values["ExecStart"].endswith("/ciuic remote upload")
    assert (values["DynamicUser"], values["ProtectSystem"]) == ("yes", "strict")
    assert values["AmbientCapabilities"] == values["CapabilityBoundingSet"] == "CAP_DAC_READ_SEARCH"
    assert (values["StateDirectory"], values["StateDirectoryMode"]) == ("ciuic-upload", "0700")
    assert Path("/var/lib") / values["StateDirectory"] == DEFAULT_STATE_DIR
    assert set(values["RestrictAddressFamilies"].split()) == {"AF_INET", "AF_INET6", "AF_UNIX"}
    assert "PrivateNetwork" not in values
    assert not {"ReadWritePaths", "BindPaths"} & values.keys()
    hidden = {path for key, value in unit if key == "InaccessiblePaths" for path in value.split()}
    assert {"-/etc/shadow", "-/etc/ssh", "-/root/.ssh", "-/etc/credstore"} <= hidden


def test_the_upload_yields_to_the_job_and_comes_back() -> None:
    """The upload has the priority of captures and a limit of memory, and is started again unless that is in vain."""
    values = dict(settings("ciuic-upload.service"))
    assert (values["Slice"], values["Nice"], values["IOSchedulingClass"]) == (
        "ciuic-capture.slice",
        "19",
        "idle",
    )
    assert values["MemoryMax"] == "400M"
    assert (values["Restart"], values["StartLimitIntervalSec"]) == ("always", "0")
    assert set(values["RestartPreventExitStatus"].split()) == {
        str(ConfigError.exit_code),
        str(NotFound.exit_code),
    }
    assert values["SuccessExitStatus"] == str(NotFound.exit_code)


def test_credentials_of_the_upload_may_be_missing() -> None:
    """Each credential of the unit has no path, so that the unit starts without it; the variable leads to one of them."""
    unit = settings("ciuic-upload.service")
    names = {value for key, value in unit if key == "LoadCredential"}
    assert names
    assert not any(":" in name or "/" in name for name in names)
    variable, _, path = dict(unit)["Environment"].partition("=")
    assert variable == "AWS_SHARED_CREDENTIALS_FILE"
    assert Path(path).parent == Path("/run/credentials/ciuic-upload.service")
    assert Path(path).name in names


def test_the_service_waits_for_readiness_and_is_watched() -> None:
    """systemd knows when the roots are mounted, and notices a hanging event loop."""
    values = dict(settings("ciuic.service"))
    assert (values["Type"], values["NotifyAccess"], values["Restart"]) == ("notify", "main", "on-failure")
    assert int(values["WatchdogSec"]) > 0
    assert int(values["FileDescriptorStoreMax"]) > 0


def test_the_example_configuration_means_the_defaults() -> None:
    """The example configuration changes no default, and every commented key exists."""
    from ciuic.config import Config, parse_config

    path = Path(__file__).parents[3] / "etc/ciuic.toml"
    text = path.read_text()
    config, default = parse_config(text, path), Config()
    assert (config.roots, config.schedule, config.retention, config.capture, config.control, config.log) == (
        default.roots,
        default.schedule,
        default.retention,
        default.capture,
        default.control,
        default.log,
    )
    lines = [
        line.removeprefix("# ") if " = " in line or line.startswith("# [") else line
        for line in text.splitlines()
    ]
    everything = parse_config("\n".join(lines), path)
    assert everything.roots
    assert everything.min_free is not None
    assert len(everything.remotes) == 1
