"""Hugging Face: a `Trainer` that is saved through a `SnapshotManager` and goes on from it.

    callback = SnapshotCallback("./snapshots", every_steps=500, max_snapshots=10)
    trainer = Trainer(model, args, train_dataset=…, callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume(trainer))

Guarantees: what is saved is the state between two steps, logs, evaluation and learning rate of the last one included: a resumed run takes
the same steps on the same batches with the same dropout, to the bit on one machine, and its `log_history` is that of a run that was
never interrupted. The Trainer goes on by its own way (`resume_from_checkpoint`), with the state taken from the store instead of files.
Of several processes (torchrun, accelerate launch) the first one writes, and each gets its own generators and unlogged loss back.

Not repeated: what a data set draws from the global generators while it is read. Refused: DeepSpeed and FSDP, whose state is in parts.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from accelerate.state import AcceleratorState
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from ciuic.integrations.in_parts import refusal, refuse_kind, refuse_sharded
from ciuic.integrations.opening import Where, opened
from ciuic.training import randomness, rank_state
from ciuic.training.manager import SnapshotManager
from ciuic.training.outcome import State

log = logging.getLogger("ciuic")

_STATE_FILE: Final = "trainer_state.json"


class SnapshotCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Saves when the manager's policy says so, whenever the Trainer saves by itself (``save_strategy``), and at the end of the training."""

    def __init__(self, where: Where = "./snapshots", **options: Any) -> None:
        """``where``: a manager, or the directory of one that is made with ``options``."""
        self.manager: SnapshotManager = opened(where, options)
        self._progress = _Progress()
        self._unlogged = _Unlogged()
        self._checked_step = 0
        """The last step after which it was asked whether a snapshot is due."""
        self._first_step = 0
        """With which this process began."""
        self._asked = False
        """The Trainer has saved since."""
        self._resumed: _FromStore | None = None

    def resume(self, trainer: Trainer) -> str | None:
        """What `Trainer.train` takes as ``resume_from_checkpoint``: None if there is no snapshot.

        To be called by every process of the training, and finds the same snapshot in all. Damaged if there are some and none is whole;
        NotImplementedError where the state is in parts (DeepSpeed, FSDP).
        """
        for kind in ("deepspeed", "fsdp"):
            if getattr(trainer, f"is_{kind}_enabled", False):
                raise refusal(kind)
        self._progress.of(trainer)
        self._unlogged.of(trainer)
        self.manager.join_ranks()
        state = self.manager.load_to_resume()
        if state is None:
            return None
        self._resumed = _FromStore(trainer, state)
        self.manager.goes_on_from(state)
        self._checked_step = self._first_step = int(state["progress_state_dict"]["state"]["global_step"])
        log.info("ciuic: the Trainer goes on from %s, step %d", state.id, self._first_step)
        return self._resumed.directory

    # -- the Trainer's hooks

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Everything there is to save is known now."""
        refuse_kind(AcceleratorState().distributed_type)
        refuse_sharded(kwargs["model"])
        self.manager.join_ranks()
        optimizer = kwargs["optimizer"]
        scaler = getattr(optimizer, "scaler", None)
        self._progress.state = state
        objects = {
            "model": kwargs["model"],
            "optimizer": optimizer,
            "scheduler": kwargs["lr_scheduler"],
            "progress": self._progress,
            "unlogged": self._unlogged,
        }
        if scaler is not None:
            objects["scaler"] = scaler
        self.manager.take(objects, with_position=True)
        if self._resumed is not None:
            self._resumed.finish()
            self._unlogged.load_state_dict(self._resumed.state["unlogged_state_dict"])

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Where the Trainer sets the generators when it resumes between two epochs."""
        self._between_steps(state)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Where the Trainer sets the generators when it resumes within an epoch: the batch is fetched, the step before is logged."""
        self._between_steps(state)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """For rules that look at metrics: what is due for them is saved before the next step."""
        self.manager.report(_numbers(kwargs.get("metrics") or {}))

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The Trainer's own checkpoint; a snapshot follows before the next step."""
        self._asked = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The end is a state like others, unless the weights are those of the best step by now."""
        if not args.load_best_model_at_end and state.global_step > self._first_step:
            self._asked, self._checked_step = True, -1
            self._between_steps(state)
        self.manager.wait()

    def _between_steps(self, state: TrainerState) -> None:
        if state.global_step == self._checked_step:
            return
        self._checked_step = state.global_step
        self._progress.state = state
        self.manager.step, self.manager.epoch = state.global_step, int(state.epoch or 0)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            self.manager.report(_numbers(state.log_history[-1]))
        if self._asked:
            self._asked = False
            self.manager.save_snapshot()
        else:
            self.manager.boundary()


class _Progress:
    """The `TrainerState`, with the states of callbacks that have one."""

    alike_on_ranks = True

    def __init__(self) -> None:
        self.state = TrainerState()
        self._trainer: Callable[[], Trainer | None] = lambda: None

    def of(self, trainer: Trainer) -> None:
        self._trainer = weakref.ref(trainer)

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer()
        state = dataclasses.asdict(self.state)
        if trainer is not None:
            state["stateful_callbacks"] = TrainerState(
                stateful_callbacks=_stateful(trainer)
            ).stateful_callbacks
        return {"state": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of this object alone: the Trainer reads its state itself."""
        self.state = TrainerState(**state["state"])


class _Unlogged:
    """The loss since the last line of the log, of this process: seen, and put back, where the Trainer asks whether it is to be logged."""

    def __init__(self) -> None:
        self._trainer: Callable[[], Trainer | None] = lambda: None
        self._loss: torch.Tensor | None = None
        """The Trainer's own, as it was after the last step."""
        self._saved: dict[str, Any] = {}
        """To be put back after the first step."""

    def of(self, trainer: Trainer) -> None:
        if self._trainer() is trainer:
            return
        self._trainer = weakref.ref(trainer)
        own: Callable[..., Any] = trainer._maybe_log_save_evaluate

        def asked(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._put_back(loss)
            result = own(loss, *args, **kwargs)
            self._loss = loss
            return result

        trainer._maybe_log_save_evaluate = asked

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer()
        if self._saved or self._loss is None or trainer is None:
            return self._saved
        return {"loss": self._loss, "since_step": trainer._globalstep_last_logged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """So that the next line of the log is a mean over as many steps as ever."""
        self._saved = state

    def _put_back(self, loss: torch.Tensor) -> None:
        saved, self._saved = self._saved, {}
        trainer = self._trainer()
        if saved and trainer is not None:
            loss += saved["loss"].to(loss.device)
            trainer._total_loss_scalar -= float(
                saved["loss"]
            )  # of steps that this call of train() did not take
            trainer._globalstep_last_logged = saved["since_step"]


def _stateful(trainer: Trainer) -> list[Any]:
    callbacks = (*trainer.callback_handler.callbacks, trainer.control)
    return [callback for callback in callbacks if isinstance(callback, ExportableState)]


class _FromStore:
    """A checkpoint of the Trainer that is a directory with its `trainer_state.json`; all else is answered from memory."""

    def __init__(self, trainer: Trainer, state: State) -> None:
        self.state = state
        self._trainer = trainer
        self._made = tempfile.TemporaryDirectory(prefix="ciuic-resume-", ignore_cleanup_errors=True)
        self.directory = self._made.name
        TrainerState(**state["progress_state_dict"]["state"]).save_to_json(
            os.path.join(self.directory, _STATE_FILE)
        )
        self._answer("_load_from_checkpoint", self._load_model)
        self._answer("_load_optimizer_and_scheduler", self._load_optimizer)
        if hasattr(trainer, "_load_scaler"):
            self._answer("_load_scaler", lambda: None)  # with the optimizer
        self._answer("_load_rng_state", self._load_generators)

    def finish(self) -> None:
        """The Trainer has everything but the generators, which are small."""
        self._made.cleanup()
        for name in ("model_state_dict", "optimizer_state_dict"):
            self.state.pop(name, None)

    def _answer(self, name: str, load: Callable[[], None]) -> None:
        """Of this Trainer alone, and for our directory alone. AttributeError in a transformers that has no such method."""
        own: Callable[..., Any] = getattr(self._trainer, name)

        def answered(checkpoint: str | None, *args: Any, **kwargs: Any) -> Any:
            return load() if checkpoint == self.directory else own(checkpoint, *args, **kwargs)

        setattr(self._trainer, name, answered)

    def _load_model(self) -> None:
        self._trainer.model.load_state_dict(self.state["model_state_dict"])
        rank_state.load_buffers(
            {"model": self._trainer.model}, self.state.ranks, self._trainer.args.process_index
        )

    def _load_optimizer(self) -> None:
        self._trainer.optimizer.load_state_dict(self.state["optimizer_state_dict"])
        self._trainer.lr_scheduler.load_state_dict(self.state["scheduler_state_dict"])
        scaler = getattr(self._trainer.optimizer, "scaler", None)
        if scaler is not None and "scaler_state_dict" in self.state:
            scaler.load_state_dict(self.state["scaler_state_dict"])

    def _load_generators(self) -> None:
        for problem in randomness.restore(self.state["random_state"]):
            log.warning("ciuic: not resumed exactly: %s", problem)


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    return {
        key: float(value) for key, value in line.items() if isinstance(value, (int, float)) and key != "step"
    }
