"""`ciuic drill --game-day`: a small training is killed on a copy, resumed from a snapshot of it, and compared bit by bit."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from click.testing import CliRunner
from support.site import CHECKOUT, Site, ended, site_in
from support.until import until

from ciuic.cli.app import cli
from ciuic.protocol.last_drill import read_drills
from ciuic.system import mountinfo

# Momentum on noise: any state that is not resumed shows in the next checkpoint. A step takes as long as a small one on a GPU.
TRAINING = """
import glob, json, os, sys, time
import numpy as np

resumes_noise, steps = sys.argv[1] == "all", int(sys.argv[2])
os.makedirs("ckpt", exist_ok=True)
noise = np.random.Generator(np.random.PCG64(7))
step, weights, momentum = 0, np.zeros(64), np.zeros(64)
found = sorted(glob.glob(os.getcwd() + "/ckpt/step-*.npz"))
if found:
    with np.load(found[-1]) as state:
        step, weights, momentum = int(state["step"]), state["weights"], state["momentum"]
        if resumes_noise:
            noise.bit_generator.state = json.loads(str(state["noise"]))
while step < steps:
    step += 1
    momentum = 0.9 * momentum + noise.standard_normal(64)
    weights = weights - 0.01 * momentum
    time.sleep(0.02)
    if step % 10 == 0:
        with open("ckpt/new", "wb") as file:
            np.savez(file, step=step, weights=weights, momentum=momentum, noise=json.dumps(noise.bit_generator.state))
        os.rename("ckpt/new", f"ckpt/step-{step:05}.npz")
"""


_ENDLESS = b"1000003"
"""Steps of a training that goes on, by which its process is known."""


class Trained:
    """Site whose protected root has a training that has got to step 20, and a snapshot of it."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.root = site.root("training")
        self.scratch = site.top / "scratch"
        self.scratch.mkdir()
        (self.root / "train.py").write_text(TRAINING)
        subprocess.run(
            [sys.executable, "train.py", "all", "20"], cwd=self.root, env={**os.environ}, check=True
        )
        site.start()
        site.snapshot()

    env: ClassVar = {**os.environ, "PYTHONPATH": str(CHECKOUT)}

    def words(self, resumes: str, steps: int, *more: str, glob: str = "ckpt/step-*.npz") -> list[str]:
        """Return the command line of a game day."""
        command = shlex.join([sys.executable, "train.py", resumes, str(steps)])
        return [
            *(sys.executable, "-m", "ciuic", "--config", str(self.site.config), "drill", "--json"),
            *("--scratch", str(self.scratch), "--game-day", command, "--compare", glob, *more),
        ]

    def pids(self) -> list[int]:
        """Return the processes of a game day."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                text = path.read_bytes()
                if (b"ciuic-game-day-" in text and os.fsencode(self.scratch) in text) or _ENDLESS in text:
                    found.append(int(path.parts[2]))
        return found

    def game_day(
        self, resumes: str = "all", steps: int = 80, *more: str, glob: str = "ckpt/step-*.npz"
    ) -> Any:
        """Run a game day; return the process with what it said."""
        return subprocess.run(
            self.words(resumes, steps, *more, glob=glob),
            cwd=self.site.top, env=self.env, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip

    def assert_untouched(self) -> None:
        """Nothing is left in the scratch directory, no mount but the root's own, and the run is as it was."""
        assert os.listdir(self.scratch) == []
        below = os.fsencode(self.scratch)
        assert not [one for one in mountinfo.read() if one.mount_point.startswith(below)]
        assert sorted(os.listdir(self.root / "ckpt")) == ["step-00010.npz", "step-00020.npz"]
        assert sorted(os.listdir(self.root)) == ["ckpt", "train.py"]


@pytest.fixture(scope="module")
def shared(run_dir: Path) -> Iterator[Trained]:
    with site_in(Path(tempfile.mkdtemp(dir=run_dir))) as site:
        yield Trained(site)
        site.stop()


@pytest.fixture
def trained(shared: Trained) -> Iterator[Trained]:
    """Provide the training of all tests, which none of them touches."""
    yield shared
    shared.assert_untouched()


@pytest.mark.mount
def test_a_training_that_resumes_exactly_is_exact(trained: Trained) -> None:
    """All checkpoints after the kill are those of the undisturbed training, and it is told what the kill cost."""
    done = trained.game_day()
    assert done.returncode == 0, done.stderr
    (document,) = json.loads(done.stdout)["drills"]
    day = document["game_day"]
    assert day["exact"] is True
    assert day["difference"] is None
    resumed_at = int(day["resumed_from"].removeprefix("ckpt/step-").removesuffix(".npz"))
    assert resumed_at > 20
    assert day["compared"] == [f"ckpt/step-{step:05}.npz" for step in range(resumed_at + 10, 90, 10)]
    assert 0 <= day["lost_seconds"] <= day["run_seconds"]
    last = read_drills(trained.site.top / "repository")[0]
    assert (last.verdict, last.snapshot) == ("good", document["snapshot"])


@pytest.mark.mount
def test_a_training_that_loses_state_is_told(trained: Trained) -> None:
    """A training that does not resume its noise differs in the first checkpoint after the kill, which is named with the place."""
    done = trained.game_day("weights")
    assert done.returncode == 1, done.stderr
    (document,) = json.loads(done.stdout)["drills"]
    difference = document["game_day"]["difference"]
    resumed_at = int(document["game_day"]["resumed_from"].removeprefix("ckpt/step-").removesuffix(".npz"))
    assert difference["path"] == f"ckpt/step-{resumed_at + 10:05}.npz"
    assert difference["what"] == "content"
    assert difference["offset"] > 0
    assert "is not the same" in document["reason"]
    assert read_drills(trained.site.top / "repository")[0].verdict == "failed"


@pytest.mark.mount
def test_a_training_without_an_end_is_compared_as_far_as_it_went(trained: Trained) -> None:
    """Runs that are ended after their time are compared but for the file that may have been written to."""
    done = trained.game_day("all", 1_000_000, "--run-timeout", "5s")
    assert done.returncode == 0, done.stderr
    (document,) = json.loads(done.stdout)["drills"]
    assert document["game_day"]["exact"] is True
    assert len(document["game_day"]["compared"]) >= 1


@pytest.mark.mount
def test_what_cannot_be_a_game_day_is_told(trained: Trained) -> None:
    """A command that ends, or writes nothing that --compare names, fails the drill and leaves nothing."""
    named, other = "ckpt/step-*.npz", "ckpt/other-*"
    for steps, more, glob, said in (
        (20, (), named, "before it could be killed"),
        (80, ("--run-timeout", "1s"), other, "without a new checkpoint"),
        (80, ("-p", str(trained.root / "train.py")), named, "no snapshot has a GOOD checkpoint"),
    ):
        done = trained.game_day("all", steps, *more, glob=glob)
        assert done.returncode != 0
        assert said in done.stderr
        trained.assert_untouched()


@pytest.mark.mount
def test_a_game_day_that_is_killed_leaves_nothing_for_the_next(trained: Trained) -> None:
    """When the drill is killed its training and daemon end, and the next one removes what it has left."""
    process = subprocess.Popen(trained.words("all", int(_ENDLESS)), cwd=trained.site.top, env=trained.env)
    try:
        until(
            "training",
            lambda: trained.pids() and any(trained.scratch.glob("*/interrupted/*/ckpt/step-00030.npz")),
        )
        pids = trained.pids()
    finally:
        process.kill()
        process.wait()
    until("the end of its processes", lambda: all(ended(pid) for pid in pids))
    assert trained.game_day().returncode == 0


def test_options_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    """--compare and --game-day need one another, and --run is another drill."""
    for options in (
        ["--game-day", "true"],
        ["--compare", "*"],
        ["--game-day", "true", "--compare", "*", "--run", "true"],
    ):
        done = CliRunner().invoke(cli, ["--repo", str(tmp_path), "drill", *options])
        assert done.exit_code == 2, done.output


def test_the_training_of_these_tests_is_deterministic(tmp_path: Path) -> None:
    """Two runs write the same files: what the game day compares is the resume."""
    for name in ("a", "b"):
        place = tmp_path / name
        place.mkdir()
        (place / "train.py").write_text(TRAINING)
        subprocess.run([sys.executable, "train.py", "all", "10"], cwd=place, env={**os.environ}, check=True)
    files = [(tmp_path / name / "ckpt/step-00010.npz").read_bytes() for name in ("a", "b")]
    assert files[0] == files[1]
    with np.load(tmp_path / "a/ckpt/step-00010.npz") as state:
        assert int(state["step"]) == 10
