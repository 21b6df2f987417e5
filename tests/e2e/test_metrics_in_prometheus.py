"""Metrics of the real daemon, through the exporter, in a real Prometheus with the shipped rules."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.ci import needs
from support.site import CHECKOUT, Site, site_in
from support.until import until

from ciuic.cli.commands.fleet import metrics
from ciuic.daemon.base.metrics import Metrics
from ciuic.exporter.server import ExporterServer, metrics_text
from ciuic.protocol.control_types import (
    Alert,
    DrillStatus,
    RepositoryStatus,
    RootStatus,
    StatusDocument,
    rfc3339,
)
from ciuic.protocol.metrics_file import write_metrics

RULES = CHECKOUT / "etc/monitoring"


class MonitoredSite(Site):
    """Directory with a daemon whose metrics an exporter shows at `port`."""

    port = 0

    def write_config(self) -> None:
        super().write_config()
        with open(self.config, "a") as config:
            config.write(f'[exporter]\nlisten = "127.0.0.1:{self.port}"\n')


def program(name: str) -> str:
    """Return the path of a program of Prometheus, which `.ci/setup` unpacks into the virtual environment."""
    path = f"{sys.prefix}/share/prometheus/usr/bin{os.pathsep}{os.environ['PATH']}"
    found = shutil.which(name, path=path)
    needs("" if found else f"{name} is not installed")
    assert found is not None
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def running(arguments: list[str], cwd: Path, log: Path) -> Iterator[None]:
    with open(log, "ab") as stream:
        process = subprocess.Popen(
            arguments, cwd=cwd, env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, stdout=stream, stderr=stream
        )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def fetch(port: int, target: str) -> bytes:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{target}", timeout=10) as answer:
            body: bytes = answer.read()
            return body
    except OSError:  # not there yet
        return b""


def test_the_rules_pass_their_tests() -> None:
    """promtool accepts the shipped rules, and their tests pass; each rule fires in one of them."""
    fires = r"alertname: (\w+)\s+exp_alerts:\s+- exp_labels"
    fired = set(re.findall(fires, (RULES / "rules_test.yml").read_text()))
    assert fired == set(re.findall(r"- alert: (\w+)", (RULES / "rules.yml").read_text()))
    promtool = program("promtool")
    for command in (["check", "rules", "rules.yml"], ["test", "rules", "rules_test.yml"]):
        done = subprocess.run([promtool, *command], cwd=RULES, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    """Each metric that the dashboard and the rules name is in docs/monitoring.md's table or in the daemon's registry."""
    known = Metrics().text(StatusDocument(version="1", pid=1, since="", now="")) + metrics_text(
        Path("/absent")
    )
    names = set(re.findall(r"^# HELP (\S+)", known.decode() + metrics(0, "nas", []), re.MULTILINE))
    names |= {f"{name}_bucket" for name in names}
    dashboard = json.loads((RULES / "dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += re.findall(r"expr: (.*(?:\n {10}.*)*)", (RULES / "rules.yml").read_text())
    used = {name for text in asked for name in re.findall(r"\bciuic_\w+", text)}
    assert len(used) > 15
    assert used <= names


@pytest.mark.mount
def test_a_rule_fires_while_the_daemon_is_down(short_tmp: Path) -> None:
    """Prometheus reads the daemon's metrics; `CiuicDaemonDown` fires when the daemon stops and clears when it is back."""
    prometheus, promtool = program("prometheus"), program("promtool")
    with site_in(short_tmp) as plain:
        site = MonitoredSite(plain.top)
        site.port, port = free_port(), free_port()
        site.root("a")
        site.start()
        exporter = [sys.executable, "-m", "ciuic", "--config", str(site.config), "exporter"]
        try:
            with running(exporter, site.top, site.log):
                mounted = f'ciuic_root_mounted{{root="{site.roots[0]}"}} 1.0'.encode()
                until("metrics", lambda: mounted in fetch(site.port, "/metrics"))
                metrics = fetch(site.port, "/metrics")
                done = subprocess.run(
                    [promtool, "check", "metrics"], input=metrics, capture_output=True, check=False
                )
                assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
                write_prometheus_config(site)
                server = [
                    prometheus, "--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}",
                    "--storage.tsdb.path=tsdb", "--log.level=error",
                ]  # fmt: skip
                with running(server, site.top, site.top / "prometheus.log"):
                    until("the scrape", lambda: answers(port, "ciuic_up == 1"))
                    assert "CiuicDaemonDown" not in firing(port)
                    site.stop()
                    until("the alert", lambda: "CiuicDaemonDown" in firing(port))
                    site.start()
                    until("its end", lambda: "CiuicDaemonDown" not in firing(port))
                    assert answers(port, "ciuic_up == 1")
        finally:
            if site.process is not None and site.process.poll() is None:
                site.stop()


def status_of(*, is_bad: bool) -> StatusDocument:
    """Return the status of a daemon where everything that is told in time is late, or nothing is."""
    root = RootStatus(path="/data/run", state="mounted", seconds_since_last=90_000.0 if is_bad else 5.0)
    alert = Alert(
        key="last-good:/data/run", severity="problem", since=rfc3339(1), message="old", root="/data/run"
    )
    return StatusDocument(
        version="1",
        pid=1,
        since=rfc3339(1),
        now=rfc3339(1),
        interval_seconds=600,
        roots=[root],
        repository=RepositoryStatus(path="/data/.ciuic", full_in_seconds=3600.0 if is_bad else None),
        drill=DrillStatus(time=rfc3339(time.time_ns()), verdict="damaged" if is_bad else "good"),
        alerts=[alert] if is_bad else [],
    )


def test_rules_fire_and_clear_for_what_is_told_in_time(tmp_path: Path) -> None:
    """A real Prometheus scrapes the exporter: overdue, full, drill and last good checkpoint fire, and end with their cause."""
    wanted = {"CiuicSnapshotOverdue", "CiuicStoreFullInDays", "CiuicDrillFailed", "CiuicLastGoodTooOld"}
    prometheus = program("prometheus")
    metrics, file = Metrics(), tmp_path / "metrics.prom"
    write_metrics(file, metrics.text(status_of(is_bad=True)))
    with served(ExporterServer("127.0.0.1:0", file)) as exported:
        site = MonitoredSite(tmp_path)
        site.port, port = exported, free_port()
        write_prometheus_config(site)
        server = [
            prometheus, "--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}",
            "--storage.tsdb.path=tsdb", "--log.level=error",
        ]  # fmt: skip
        with running(server, tmp_path, tmp_path / "prometheus.log"):
            until("all alerts", lambda: wanted <= firing(port))
            write_metrics(file, metrics.text(status_of(is_bad=False)))
            until("their end", lambda: not wanted & firing(port))
            assert answers(port, "ciuic_up == 1")


@contextmanager
def served(server: ExporterServer) -> Iterator[int]:
    """Serve the metrics, and yield the port."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def write_prometheus_config(site: MonitoredSite) -> None:
    """Write the shipped configuration and rules with another port, and seconds in place of minutes."""
    shipped = (RULES / "prometheus.yml").read_text()
    assert "127.0.0.1:9847" in shipped
    assert "scrape_interval: 30s" in shipped
    config = shipped.replace("127.0.0.1:9847", f"127.0.0.1:{site.port}").replace("30s", "1s")
    (site.top / "prometheus.yml").write_text(f"global: {{evaluation_interval: 1s}}\n{config}")
    rules = (RULES / "rules.yml").read_text()
    assert "for: 2m" in rules
    (site.top / "ciuic-rules.yml").write_text(re.sub(r"for: \d+[mh]", "for: 1s", rules))


def answers(port: int, query: str) -> bool:
    """Return whether the query has a result."""
    answer = ask(port, f"/api/v1/query?query={query.replace(' ', '%20')}")
    return bool(answer and answer["result"])


def firing(port: int) -> set[str]:
    """Return the names of the alerts that fire."""
    answer = ask(port, "/api/v1/alerts") or {"alerts": []}
    return {alert["labels"]["alertname"] for alert in answer["alerts"] if alert["state"] == "firing"}


def ask(port: int, target: str) -> dict[str, Any] | None:
    body = fetch(port, target)
    data: dict[str, Any] | None = json.loads(body)["data"] if body else None
    return data
