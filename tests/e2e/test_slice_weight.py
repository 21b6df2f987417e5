"""Deadlines under a real systemd: the slice's weight, and a nice value restored without CAP_SYS_NICE."""

from __future__ import annotations

import configparser
import os
import sys
from pathlib import Path

import pytest
from support.ci import needs
from support.real_systemd import RealSystemd, reason_against

from ciuic.system.privileges import permitted

pytestmark = pytest.mark.mount

_CAP_SYS_RESOURCE = 24
_CODE = Path(__file__).parents[2]
_WEIGH = "import sys, trio; from ciuic.daemon.base.process_priority import SliceWeight; trio.run(SliceWeight().set, float(sys.argv[1]))"
_RISE = """
import os, time
from ciuic.system.privileges import Capability, keep_only, permitted
from ciuic.system.precedence import Precedence
assert Capability.SYS_NICE not in permitted()
place = Precedence("idle"); place.take(0.01); keep_only(()); low = os.getpriority(os.PRIO_PROCESS, 0)
place.take(0.5); half = os.getpriority(os.PRIO_PROCESS, 0)
place.take(1.0); print(low, half, os.getpriority(os.PRIO_PROCESS, 0))
"""


def test_the_slice_is_given_its_weight_and_a_capture_may_rise(short_tmp: Path) -> None:
    """The daemon gets the weight it asks systemd for, and a nice limit that lets a capture rise again."""
    needs(reason_against())
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string((_CODE / "systemd" / "ciuic.service").read_text())
    service = unit["Service"]
    with RealSystemd(short_tmp, [_CODE]) as systemd:
        for share, weight in (("0.5", "64"), ("1", "100"), ("0", "1")):
            done = systemd.python(_WEIGH, share)
            assert done.returncode == 0, done.stderr
            shown = systemd.run(
                ["systemctl", "show", "--property=CPUWeight", "--property=IOWeight", "ciuic-capture.slice"]
            )
            assert shown.stdout.split() == [f"CPUWeight={weight}", f"IOWeight={weight}"], done.stdout
        done = systemd.run(
            [
                *("systemd-run", "--pipe", "--wait", "--quiet"),
                f"--property=LimitNICE={service['LimitNICE']}",
                f"--property=CapabilityBoundingSet={service['CapabilityBoundingSet']}",
                *(sys.executable, "-c", _RISE),
            ]
        )
    # A systemd that may not raise limits itself cannot set this one: then no process rises above where it began.
    began = str(max(10, os.getpriority(os.PRIO_PROCESS, 0)))
    expected = ["19", "3", "0"] if _CAP_SYS_RESOURCE in permitted() else [began] * 3
    assert done.stdout.split() == expected, done.stderr
