"""A small but real training job: a two-layer network, Adam, checkpoints, log, configuration, state.

It does not use ciuic. Every run of the same configuration computes the same bits, interrupted and resumed or
not: all that decides the next step (parameters, both Adam moments, the step number, the random generator) is
in the checkpoint. A checkpoint is an archive of NumPy, written to a temporary name, synced and renamed, as careful jobs do; a job that
resumes takes the newest one whose checksums are right.

Lines on standard output report progress: ``half STEP`` in the middle of a save, ``saved STEP`` after it,
``done STEP`` at the end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

# One thread: the order in which partial sums are added is then the same in every run.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np

CONFIG = {
    "seed": 20260,
    "inputs": 256,
    "hidden": 1024,
    "outputs": 128,
    "samples": 4096,
    "batch": 64,
    "learning_rate": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "epsilon": 1e-8,
    "save_every": 15,
    "keep": 4,
}
Arrays = dict[str, np.ndarray]


class Job:
    """State that a step changes, with the step's number."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        data = np.random.default_rng(config["seed"])
        shape = (config["samples"], config["inputs"])
        self.inputs = data.standard_normal(shape, dtype=np.float32)
        teacher = data.standard_normal((config["inputs"], config["outputs"]), dtype=np.float32)
        self.targets = np.tanh(self.inputs @ teacher / np.float32(8))
        self.generator = np.random.default_rng(config["seed"] + 1)
        self.step = 0
        self.parameters = self._initial()
        self.moment1 = {name: np.zeros_like(value) for name, value in self.parameters.items()}
        self.moment2 = {name: np.zeros_like(value) for name, value in self.parameters.items()}

    def _initial(self) -> Arrays:
        sizes = [self.config["inputs"], self.config["hidden"], self.config["hidden"], self.config["outputs"]]
        arrays = {}
        for layer, (rows, columns) in enumerate(itertools.pairwise(sizes)):
            weight = self.generator.standard_normal((rows, columns), dtype=np.float32)
            arrays[f"weight{layer}"] = weight / np.float32(rows**0.5)
            arrays[f"bias{layer}"] = np.zeros(columns, dtype=np.float32)
        return arrays

    def advance(self) -> float:
        """Do one Adam step on one random batch; return the loss before it."""
        chosen = self.generator.integers(0, self.config["samples"], self.config["batch"])
        loss, gradients = self._gradients(self.inputs[chosen], self.targets[chosen])
        self.step += 1
        beta1, beta2 = np.float32(self.config["beta1"]), np.float32(self.config["beta2"])
        rate = np.float32(
            self.config["learning_rate"]
            * (1 - self.config["beta2"] ** self.step) ** 0.5
            / (1 - self.config["beta1"] ** self.step)
        )
        for name, gradient in gradients.items():
            first, second = self.moment1[name], self.moment2[name]
            first += (1 - beta1) * (gradient - first)
            second += (1 - beta2) * (gradient * gradient - second)
            self.parameters[name] -= rate * first / (np.sqrt(second) + np.float32(self.config["epsilon"]))
        return loss

    def _gradients(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[float, Arrays]:
        p = self.parameters
        hidden0 = np.tanh(inputs @ p["weight0"] + p["bias0"])
        hidden1 = np.tanh(hidden0 @ p["weight1"] + p["bias1"])
        error = hidden1 @ p["weight2"] + p["bias2"] - targets
        loss = float(np.mean(error * error))
        out = error * np.float32(2 / error.size)
        back1 = (out @ p["weight2"].T) * (1 - hidden1 * hidden1)
        back0 = (back1 @ p["weight1"].T) * (1 - hidden0 * hidden0)
        return loss, {
            "weight2": hidden1.T @ out, "bias2": out.sum(0),
            "weight1": hidden0.T @ back1, "bias1": back1.sum(0),
            "weight0": inputs.T @ back0, "bias0": back0.sum(0),
        }  # fmt: skip

    # -- as bytes

    def arrays(self) -> Arrays:
        """Return every array of the state by its name in a checkpoint, in a fixed order."""
        groups = {"parameter": self.parameters, "moment1": self.moment1, "moment2": self.moment2}
        return {
            f"{group}/{name}": array for group, part in groups.items() for name, array in sorted(part.items())
        }

    def adopt(self, found: Arrays) -> None:
        """Adopt the state that a checkpoint holds."""
        self.step = int(found["step"])
        self.generator.bit_generator.state = json.loads(found["generator"].tobytes())
        for name, array in self.arrays().items():
            array[...] = found[name]


def save(job: Job, folder: Path) -> None:
    """Write step-NNNNNN.npz: to a temporary name, synced, renamed, the directory synced."""
    final = folder / f"step-{job.step:06d}.npz"
    temporary = folder / f".{final.name}.tmp"
    generator = np.frombuffer(json.dumps(job.generator.bit_generator.state).encode(), np.uint8)
    arrays = {"step": np.array(job.step), "generator": generator, **job.arrays()}
    with open(temporary, "wb") as file:
        # As np.savez writes it, with a line in the middle.
        with zipfile.ZipFile(file, "w") as archive:
            for number, (name, array) in enumerate(arrays.items()):
                if number == len(arrays) // 2:
                    file.flush()
                    print(f"half {job.step}", flush=True)
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, final)
    sync_directory(folder)
    print(f"saved {job.step}", flush=True)


def load(job: Job, file: Path) -> bool:
    """Load ``file`` and return True, or return False if it is no whole checkpoint."""
    try:
        with np.load(file, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return False
    job.adopt(found)
    return True


def sync_directory(folder: Path) -> None:
    """Make the names in the directory durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Replace the file so that it has the old content or the new one at any moment."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def rotate(folder: Path, keep: int) -> None:
    """Remove all but the newest checkpoints."""
    for old in sorted(folder.glob("step-*.npz"))[:-keep]:
        old.unlink()


def resume(job: Job, checkpoints: Path, log: Path) -> None:
    """Take the newest whole checkpoint and drop the log lines after it."""
    for file in sorted(checkpoints.glob("step-*.npz"), reverse=True):
        if load(job, file):
            break
        print(f"damaged {file.name}", flush=True)
    for torn in checkpoints.glob(".step-*.tmp"):
        torn.unlink()
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    log.write_text("".join(line for line in lines if int(re.match(r"step (\d+) ", line)[1]) <= job.step))
    print(f"resumed {job.step}", flush=True)


def main() -> int:
    """Train up to a step; see --help."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("training", type=Path, help="gets config/, checkpoints/ and logs/")
    parser.add_argument("state", type=Path, help="gets run/state.json, rewritten at every save")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=CONFIG["seed"])
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    config_file = options.training / "config/run.json"
    if options.resume:
        config = json.loads(config_file.read_text())
    else:
        config = CONFIG | {"seed": options.seed}
        for folder in (
            options.training / "config",
            options.training / "checkpoints",
            options.training / "logs",
        ):
            folder.mkdir()
        (options.state / "run").mkdir()
        replace_text(config_file, json.dumps(config, indent=1))
    checkpoints, log_file = options.training / "checkpoints", options.training / "logs/train.log"
    job = Job(config)
    if options.resume:
        resume(job, checkpoints, log_file)
    with open(log_file, "a") as log:
        while job.step < options.steps:
            loss = job.advance()
            log.write(f"step {job.step} loss {loss.hex()}\n")
            log.flush()
            if job.step % config["save_every"] == 0 or job.step == options.steps:
                save(job, checkpoints)
                rotate(checkpoints, config["keep"])
                replace_text(
                    options.state / "run/state.json", json.dumps({"step": job.step, "loss": loss.hex()})
                )
    print(f"done {job.step}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
