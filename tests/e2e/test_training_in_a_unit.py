"""A training in a unit of systemd that is stopped goes on at the very step, also where its directory is lost with the machine."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ci import needs
from support.elastic_hosts import Event, read_events
from support.real_systemd import RealSystemd, reason_against
from support.until import until

from ciuic.remote.sealing.key_slots import make_key_file

pytestmark = [pytest.mark.full, pytest.mark.mount, pytest.mark.usefixtures("torch_distributed")]
_CODE = Path(__file__).parents[2]
_STEPS = 300
_UNIT = "training.service"
_PATIENCE_SECONDS = 120.0


class _Service:
    """Training as a transient unit, whose files are in a directory that this machine shares."""

    def __init__(self, systemd: RealSystemd, top: Path) -> None:
        self._systemd, self.top = systemd, top
        self.key = top / "key"
        make_key_file(str(self.key))

    def __call__(self, *command: str) -> str:
        done = self._systemd.run(command)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}{self._log()}"
        return str(done.stdout)

    def _log(self) -> str:
        path = self.top / "log"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""

    def start(self, name: str, seconds_a_step: float, *remote: str) -> None:
        """Start the training of a name, or start it again."""
        (self.top / "pace").write_text(str(seconds_a_step))
        variables = {
            "PYTHONPATH": f"{_CODE}:{_CODE / 'tests'}",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "HOME": str(self.top),
        }
        program = [sys.executable, str(_CODE / "tests/support/elastic_training.py"), str(self.top / name)]
        how = [f"--setenv={key}={value}" for key, value in variables.items()]
        how += [f"--property=StandardError=append:{self.top / 'log'}", "--property=SuccessExitStatus=143"]
        words = [str(_STEPS), str(self.events(name)), "plain", str(self.top / "pace"), *remote]
        self("systemd-run", f"--unit={_UNIT}", "--collect", *how, *program, *words)

    def events(self, name: str) -> Path:
        return self.top / f"events-{name}"

    def told(self, name: str, word: str) -> list[Event]:
        path = self.events(name)
        return [event for event in read_events(path) if event.word == word] if path.exists() else []

    def until_step(self, name: str, step: int) -> None:
        until(
            f"step {step}",
            lambda: any(int(one.value) >= step for one in self.told(name, "step")),
            _PATIENCE_SECONDS,
        )

    def ended(self, name: str) -> str:
        """Return the digest of the training's end."""
        return str(until("the end", lambda: self.told(name, "digest"), _PATIENCE_SECONDS)[0].value)

    def until_inactive(self) -> None:
        """Wait for the end of the unit."""
        until(
            "the end of the unit",
            lambda: self._systemd.run(["systemctl", "is-active", "--quiet", _UNIT]).returncode,
        )


@pytest.fixture
def service(short_tmp: Path) -> Iterator[_Service]:
    """Provide a systemd and an empty directory of its trainings."""
    needs(reason_against())
    shared, place = short_tmp / "d", short_tmp / "s"
    shared.mkdir()
    place.mkdir()
    with RealSystemd(place, [shared, _CODE]) as systemd:
        yield _Service(systemd, shared)


def test_a_stopped_unit_loses_no_step(service: _Service) -> None:
    """After two stops, which signal all processes of the unit at once, it goes on at the step it had made, the second time from its remote alone, and to the bits of an undisturbed run."""
    (service.top / "nas").mkdir()
    remote = (f"file://{service.top}/nas", str(service.key))
    service.start("whole", 0.0)
    expected = service.ended("whole")
    service.until_inactive()
    service.start("run", 0.1, *remote)
    for stops in (1, 2):
        first = int(service.told("run", "began")[-1].value) if stops == 2 else 0
        service.until_step("run", first + 23)
        service("systemctl", "stop", _UNIT)
        service.until_inactive()
        made = int(service.told("run", "step")[-1].value)
        if stops == 2:
            shutil.rmtree(service.top / "run")
        service.start("run", 0.1 if stops == 1 else 0.0, *remote)
        until("a resume", lambda stops=stops: len(service.told("run", "began")) > stops, _PATIENCE_SECONDS)
        # The program ends at the boundary, where it may not have told of the step yet.
        assert made <= int(service.told("run", "began")[-1].value) <= made + 1
    assert service.ended("run") == expected
