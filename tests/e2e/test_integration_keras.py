"""Keras 3 on TensorFlow, torch and JAX, killed and resumed, ends with the same bits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.runs import EXAMPLES, lose_last, remote_for, run, with_url
from support.warm_python import WarmPython

missing = find_spec("keras") is None or find_spec("tensorflow") is None
# In CI .ci/setup has installed it.
if missing and not os.environ.get("CI"):
    pytest.skip("Keras with TensorFlow is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

MODULES = "tensorflow keras ciuic.integrations.keras"
EXAMPLE = EXAMPLES / "keras_fit.py"
BY_EPOCHS = {
    "import keras\n": "import keras\n\n"
    "class Ordered(keras.utils.PyDataset):\n"
    "    def __len__(self):\n        return 10\n"
    "    def __getitem__(self, at):\n        return x[at * 8 : at * 8 + 8], y[at * 8 : at * 8 + 8]\n\n",
    "    x,\n    y,\n    batch_size=8,\n    epochs=3": "    Ordered(),\n    epochs=4",
    "save_freq=4": "double_checkpoint=True",
    'metrics=["accuracy"]': 'metrics=["accuracy"], steps_per_execution=5',
}
CALLBACKS = """
history = model.fit(
    x,
    y,
    batch_size=8,
    epochs=12,
    validation_data=(x[:16], y[:16]),
    callbacks=[
        SnapshotCallback(save_dir, save_freq=5),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.98 * rate),
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.05),
        keras.callbacks.EarlyStopping("loss", patience=2, min_delta=0.05, restore_best_weights=True),
    ],
    verbose=0,
)
FACTS = {"epochs": history.epoch, "history": history.history}
"""

AS_WRITTEN = """
from ciuic import SnapshotManager
optimizer = model.optimizer
start_epoch = 0
manager = SnapshotManager(save_dir=save_dir, interval=3600, max_snapshots=10)
state = manager.load_latest_snapshot()
if state is not None:
    model.set_weights(state["model_state_dict"])
    optimizer.build(model.trainable_variables)
    for variable, value in zip(optimizer.variables, state["optimizer_state_dict"], strict=True):
        variable.assign(value)
    start_epoch = state["epoch"] + 1
for epoch in range(start_epoch, min(start_epoch + EPOCHS, 4)):
    model.fit(x, y, batch_size=8, initial_epoch=epoch, epochs=epoch + 1, verbose=0, shuffle=False)
    manager.save_snapshot(model, optimizer, epoch)
manager.close()
"""


DAMAGE = """
import os, sys, types
from ciuic.repository import Repository
with Repository.open(sys.argv[1]) as repository:
    newest, before = repository.snapshots.ids()
    with open(repository.snapshots.path(newest), "wb") as file:
        file.write(b"torn")
model = types.SimpleNamespace(get_weights=lambda: [])
"""


@pytest.fixture(scope="module")
def python() -> Iterator[WarmPython]:
    """Provide programs that find TensorFlow imported: Keras batches arrays by it, whatever the backend."""
    with WarmPython("tensorflow") as one:
        yield one


@pytest.fixture(scope="module")
def found(python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return the results of all runs by test name; one process imports Keras once for all."""
    where = tmp_path_factory.mktemp("keras")
    source = EXAMPLE.read_text()
    for old, new in BY_EPOCHS.items():
        assert old in source
        source = source.replace(old, new)
    (where / "epochs.py").write_text(source)
    (where / "damage.py").write_text(DAMAGE)
    _write_lines(where)
    (where / "callbacks.py").write_text(EXAMPLE.read_text().partition("history = model.fit(")[0] + CALLBACKS)
    elsewhere = with_url(EXAMPLE, where)
    runs = {
        # Killed, its host lost when the other runs have given it time to upload, and resumed on another from the remote.
        "lost": (f"i:9@{elsewhere}",),
        "steps": tuple(f"{name}@{EXAMPLE}" for name in ("a", "b:9", "b:7", "b", "b")),
        "epochs": ("c@epochs.py", "d:6@epochs.py", "d@damage.py", "d@epochs.py"),
        "elsewhere": (f"j@{elsewhere}",),
        # Snapshots after the last batch of the second epoch, and in the middle of the fourth.
        "callbacks": tuple(f"{name}@callbacks.py" for name in ("g", "h:21", "h:17", "h", "h")),
        "lines": ("e@all_epochs.py", "f@two_epochs.py", "f@two_epochs.py"),
    }
    results = iter(
        run(MODULES, *(name for names in runs.values() for name in names), where=where, python=python)
    )
    lose_last(str(remote_for(EXAMPLE, where)))
    return {test: [next(results) for _ in names] for test, names in runs.items()}


def _write_lines(where: Path) -> None:
    head = EXAMPLE.read_text().partition("history = model.fit(")[0].replace("Dropout(0.3)", "Dropout(0.0)")
    (where / "all_epochs.py").write_text(head + AS_WRITTEN.replace("EPOCHS", "4"))
    (where / "two_epochs.py").write_text(head + AS_WRITTEN.replace("EPOCHS", "2"))


def test_fit_goes_on_in_the_middle_of_an_epoch_to_the_same_bits(
    found: dict[str, list[dict[str, Any]]],
) -> None:
    """The example, killed twice in an epoch, ends with the same bits, and then has nothing left to do."""
    uninterrupted, _, _, last, again = found["steps"]
    assert last["digest"] == again["digest"] == uninterrupted["digest"]
    assert (uninterrupted["steps"], last["steps"], again["steps"]) == (30, 30 - 12, 0)


def test_fit_goes_on_elsewhere_to_the_same_bits(found: dict[str, list[dict[str, Any]]]) -> None:
    """The example, given the URL of a remote, is killed, and goes on where nothing is but the URL and the key."""
    uninterrupted, (last,) = found["steps"][0], found["elsewhere"]
    assert last["digest"] == uninterrupted["digest"]
    assert 0 < last["steps"] < uninterrupted["steps"]


def test_fit_goes_on_between_epochs_with_two_snapshots_kept(found: dict[str, list[dict[str, Any]]]) -> None:
    """A `fit` with save_freq="epoch" and a damaged newest snapshot resumes from the one before it."""
    uninterrupted, _, _, last = found["epochs"]
    assert (uninterrupted["steps"], last["steps"]) == (8, 6)
    assert last["digest"] == uninterrupted["digest"]


def test_other_callbacks_decide_as_if_fit_had_not_been_interrupted(
    found: dict[str, list[dict[str, Any]]],
) -> None:
    """Rates, the early end, the best weights and `History` are those of a `fit` that was not killed.

    After the end there is nothing left to do, also where it came early.
    """
    uninterrupted, _, _, last, again = found["callbacks"]
    assert len(uninterrupted["facts"]["epochs"]) < 12, "it was not stopped early"
    assert len(set(uninterrupted["facts"]["history"]["learning_rate"])) > 1
    assert last["facts"] == again["facts"] == uninterrupted["facts"]
    assert last["digest"] == again["digest"] == uninterrupted["digest"]
    assert 0 < last["steps"] < uninterrupted["steps"]
    assert again["steps"] == 0


def test_the_lines_that_users_write_run_as_they_stand(found: dict[str, list[dict[str, Any]]]) -> None:
    """The documented lines for SnapshotManager with a Keras model and optimizer run without a callback."""
    uninterrupted, _, last = found["lines"]
    assert last["digest"] == uninterrupted["digest"]


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_other_backends_go_on_to_the_same_bits(
    python: WarmPython, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example resumes in the middle of an epoch with torch and JAX, and the documented lines run."""
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    monkeypatch.setenv("KERAS_BACKEND", backend)
    _write_lines(tmp_path)
    (tmp_path / "callbacks.py").write_text(
        EXAMPLE.read_text().partition("history = model.fit(")[0] + CALLBACKS
    )
    names = (
        "g@callbacks.py",
        "h:21@callbacks.py",
        "h@callbacks.py",
        f"a@{EXAMPLE}",
        f"b:16@{EXAMPLE}",
        f"b@{EXAMPLE}",
        "e@all_epochs.py",
        "f@two_epochs.py",
        "f@two_epochs.py",
    )
    called, _, last_called, uninterrupted, _, last, lines, _, last_lines = run(
        f"{backend} tensorflow keras ciuic.integrations.keras",
        *names,
        where=tmp_path,
        python=python,
    )
    assert (uninterrupted["steps"], last["steps"]) == (30, 30 - 12)
    assert last["digest"] == uninterrupted["digest"]
    assert (last_called["facts"], last_called["digest"]) == (called["facts"], called["digest"])
    assert last_lines["digest"] == lines["digest"]
