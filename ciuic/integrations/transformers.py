"""Hugging Face: save a `Trainer` through a `SnapshotManager` and resume it.

    callback = SnapshotCallback("./snapshots", every_steps=500, max_snapshots=10)
    trainer = Trainer(model, args, train_dataset=…, callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume(trainer))

Guarantees: a snapshot is the state between two steps, with logs, evaluation and learning rate of the last
one. A resumed run takes the same steps on the same batches with the same dropout, to the bit on one machine,
and its `log_history` is that of a run that was never interrupted. The Trainer resumes by its own way
(`resume_from_checkpoint`), with the state taken from the repository instead of files. Of several processes
(torchrun, accelerate launch) the first one writes, and each gets its own generators and unlogged loss back.
A snapshot has the model's configuration files too, so that an exported one is a folder for `from_pretrained`.

Not repeated: what a data set draws from the global generators while it is read. Refused: DeepSpeed and FSDP,
which shard the state.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import tempfile
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from accelerate.state import AcceleratorState
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from ciuic.integrations.loggers import track_transformers_callbacks
from ciuic.integrations.preconditions import ManagerOrDir, open_manager, refusal, refuse_kind, refuse_sharded
from ciuic.system.ownership import temporary_directory
from ciuic.training.convert.exporting import CONFIGURATION, is_configuration_name
from ciuic.training.logs import log, quietly
from ciuic.training.manager import SnapshotManager
from ciuic.training.results import State
from ciuic.training.state import rank_state, stateful

_STATE_FILE: Final = "trainer_state.json"


class SnapshotCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Save by the manager's policy, when the Trainer saves (``save_strategy``), and at the end."""

    def __init__(self, where: ManagerOrDir = "./snapshots", **options: Any) -> None:
        """Open the manager.

        Args:
            where: a manager, or the directory of one that is opened with ``options``.
            options: arguments of `SnapshotManager`.
        """
        self.manager: SnapshotManager = open_manager(where, options)
        self._progress = _Progress()
        self._unlogged = _UnloggedLoss()
        self._checked_step = 0
        """Last step after which the manager was asked whether a snapshot is due."""
        self._first_step = 0
        """Step at which this process began."""
        self._save_requested = False
        """True if the Trainer saved since the last snapshot."""
        self._resumed: _StoredCheckpoint | None = None

    def resume(self, trainer: Trainer, *, tracker_run: str | None = None) -> str | None:
        """Return the value of ``resume_from_checkpoint`` for `Trainer.train`. Collective.

        Args:
            trainer: The Trainer that will be resumed.
            tracker_run: Id of a run of MLflow, Weights & Biases or TensorBoard: only snapshots that were logged to it
                (docs/trackers.md).

        Returns:
            A directory; None if there is no snapshot. All processes get the same snapshot.

        Raises:
            Damaged: there are snapshots, and none is whole.
            NotFound: none that was logged to ``tracker_run`` is left.
            NotImplementedError: the state is sharded (DeepSpeed, FSDP).
        """
        for kind in ("deepspeed", "fsdp"):
            if getattr(trainer, f"is_{kind}_enabled", False):
                raise refusal(kind)
        self._progress.attach(trainer)
        self._unlogged.attach(trainer)
        self.manager.framework.join_ranks()
        find = None if tracker_run is None else lambda: self.manager.load_snapshot(tracker_run=tracker_run)
        state = self.manager.framework.load_state(find)
        if state is None:
            return None
        self._resumed = _StoredCheckpoint(trainer, state)
        self.manager.framework.continue_from(state)
        self._checked_step = self._first_step = int(state["progress_state_dict"]["state"]["global_step"])
        log.info("ciuic: the Trainer resumes from %s, step %d", state.id, self._first_step)
        return self._resumed.directory

    # -- the Trainer's hooks

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Register what is to be saved: everything is known now."""
        refuse_kind(AcceleratorState().distributed_type)
        refuse_sharded(kwargs["model"])
        self.manager.framework.join_ranks()
        optimizer = kwargs["optimizer"]
        scaler = getattr(optimizer, "scaler", None)
        self._progress.state = state
        if state.is_world_process_zero:
            track_transformers_callbacks(self.manager)
        with quietly("the model's configuration is not saved: `ciuic export --to hf` will not have it"):
            processing = kwargs.get("processing_class") or kwargs.get("tokenizer")
            self._progress.files = configuration_files(kwargs["model"], processing)
        objects = {
            "model": kwargs["model"],
            "optimizer": optimizer,
            "scheduler": kwargs["lr_scheduler"],
            "progress": self._progress,
            "unlogged": self._unlogged,
        }
        if scaler is not None:
            objects["scaler"] = scaler
        # Not `register`: the Trainer's hooks say when a step is over, optimizers are not watched.
        self.manager.framework.set_objects(objects, with_position=True)
        if self._resumed is not None:
            self._resumed.finish()
            self._unlogged.load_state_dict(self._resumed.state["unlogged_state_dict"])

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save if due; here the Trainer sets the generators when it resumes between two epochs."""
        self._between_steps(state)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save if due; here the Trainer sets the generators when it resumes within an epoch.

        The batch is fetched and the step before is logged by then.
        """
        self._between_steps(state)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Tell that the training lives while it evaluates."""
        self.manager.framework.evaluates()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report metrics; a snapshot that is due for them is taken before the next step."""
        self.manager.report(_numbers(kwargs.get("metrics") or {}))

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Request a snapshot before the next step, because the Trainer saved a checkpoint of its own."""
        self._save_requested = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the final state, unless the weights are those of the best step by now."""
        # With load_best_model_at_end the weights are those of an earlier step by now.
        if not args.load_best_model_at_end and state.global_step > self._first_step:
            # -1: the last step may have been checked already, and is saved all the same.
            self._save_requested, self._checked_step = True, -1
            self._between_steps(state)
        self.manager.wait()

    def _between_steps(self, state: TrainerState) -> None:
        # Both hooks may run between the same two steps.
        if state.global_step == self._checked_step:
            return
        self._checked_step = state.global_step
        self._progress.state = state
        self.manager.step, self.manager.epoch = state.global_step, int(state.epoch or 0)
        # A line that was logged after this very step: its metrics belong to this state.
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            self.manager.report(_numbers(state.log_history[-1]))
        if self._save_requested:
            self._save_requested = False
            self.manager.save_snapshot()
        else:
            self.manager.boundary()


class _Progress:
    """Object with the `TrainerState`, the states of callbacks that have one, and the model's configuration."""

    alike_on_ranks = True

    def __init__(self) -> None:
        self.state = TrainerState()
        self.files: dict[str, torch.Tensor] = {}
        """Configuration files of the model by name (`configuration_files`)."""
        self._trainer: Callable[[], Trainer | None] = lambda: None

    def attach(self, trainer: Trainer) -> None:
        """Take the callbacks' states from this Trainer."""
        self._trainer = weakref.ref(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the Trainer's state and the configuration files."""
        trainer = self._trainer()
        state = dataclasses.asdict(self.state)
        if trainer is not None:
            # The constructor of TrainerState turns callbacks into their states.
            state["stateful_callbacks"] = TrainerState(
                stateful_callbacks=_stateful(trainer)
            ).stateful_callbacks
        return {"state": state, CONFIGURATION: self.files}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state of this object; the Trainer reads its own."""
        self.state = TrainerState(**state["state"])


class _UnloggedLoss:
    """Loss and operations since the last line of the log, of this process.

    It is read, and restored, where the Trainer asks whether the loss is to be logged.
    """

    def __init__(self) -> None:
        self._trainer: Callable[[], Trainer | None] = lambda: None
        self._loss: torch.Tensor | None = None
        """Loss of the Trainer after the last step."""
        self._saved: dict[str, Any] = {}
        """State to restore after the first step."""

    def attach(self, trainer: Trainer) -> None:
        """Wrap the Trainer's method that logs."""
        if self._trainer() is trainer:
            return
        self._trainer = weakref.ref(trainer)
        # Private API of transformers: no callback sees the running loss, which this method gets after each
        # step.
        own: Callable[..., Any] = trainer._maybe_log_save_evaluate

        def asked(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._put_back(loss)
            result = own(loss, *args, **kwargs)
            self._loss = loss
            return result

        trainer._maybe_log_save_evaluate = asked

    def state_dict(self) -> dict[str, Any]:
        """Return the loss and the step of the last line of the log."""
        trainer = self._trainer()
        if self._saved or self._loss is None or trainer is None:
            return self._saved
        # The Trainer adds the operations to its state only when it logs or saves a checkpoint of its own.
        flos = float(trainer.current_flos)
        return {"loss": self._loss, "since_step": trainer._globalstep_last_logged, "flos": flos}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state, so that the next line of the log is a mean over the usual number of steps."""
        self._saved = state

    def _put_back(self, loss: torch.Tensor) -> None:
        saved, self._saved = self._saved, {}
        trainer = self._trainer()
        if saved and trainer is not None:
            loss += saved["loss"].to(loss.device)
            # Subtracted from the total: these steps were not taken by this call of train().
            trainer._total_loss_scalar -= float(saved["loss"])
            # The mean of the next line of the log covers the steps before the resume as well.
            trainer._globalstep_last_logged = saved["since_step"]
            trainer.current_flos += saved.get("flos", 0.0)


def _stateful(trainer: Trainer) -> list[Any]:
    callbacks = (*trainer.callback_handler.callbacks, trainer.control)
    return [callback for callback in callbacks if isinstance(callback, ExportableState)]


class _StoredCheckpoint:
    """Directory with `trainer_state.json` that the Trainer takes for a checkpoint.

    All other parts of the checkpoint are answered from memory.
    """

    def __init__(self, trainer: Trainer, state: State) -> None:
        self.state = state
        self._trainer = trainer
        self._made = tempfile.TemporaryDirectory(
            prefix="ciuic-resume-", dir=temporary_directory(), ignore_cleanup_errors=True
        )
        self.directory = self._made.name
        TrainerState(**state["progress_state_dict"]["state"]).save_to_json(
            os.path.join(self.directory, _STATE_FILE)
        )
        self._answer("_load_from_checkpoint", self._load_model)
        self._answer("_load_optimizer_and_scheduler", self._load_optimizer)
        if hasattr(trainer, "_load_scaler"):
            self._answer("_load_scaler", lambda: None)  # loaded together with the optimizer
        self._answer("_load_rng_state", self._load_generators)

    def finish(self) -> None:
        """Free what the Trainer has loaded, all but the random generators."""
        # The generators stay: the Trainer asks for them right before the first step.
        self._made.cleanup()
        for name in ("model_state_dict", "optimizer_state_dict"):
            self.state.pop(name, None)

    def _answer(self, name: str, load: Callable[[], None]) -> None:
        """Replace a method of this Trainer for our directory only.

        Raises:
            AttributeError: this version of transformers has no such method.
        """
        own: Callable[..., Any] = getattr(self._trainer, name)

        def answered(checkpoint: str | None, *args: Any, **kwargs: Any) -> Any:
            return load() if checkpoint == self.directory else own(checkpoint, *args, **kwargs)

        # On this Trainer only, and for our directory only: other checkpoints load as ever.
        setattr(self._trainer, name, answered)

    def _load_model(self) -> None:
        model = self._trainer.model
        model.load_state_dict(_with_ties(model, self.state["model_state_dict"]))
        # Buffers that DistributedDataParallel leaves different are each process's own.
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
        for problem in stateful.restore_random_states(self.state["random_state"]):
            log.warning("ciuic: not resumed exactly: %s", problem)


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    return {
        key: float(value) for key, value in line.items() if isinstance(value, (int, float)) and key != "step"
    }


# A tokenizer of a large vocabulary has some 10 MB; more belongs to no configuration.
_MAX_BYTES: Final = 64 << 20


def configuration_files(model: Any, processing: Any = None) -> dict[str, torch.Tensor]:
    """Return the files that `save_pretrained` writes beside the weights, by name, each as a tensor of bytes.

    As tensors they are stored once, however many snapshots have them.

    Args:
        model: Model of transformers; of any other there are no files.
        processing: Tokenizer or processor of the model, if there is one.

    Raises:
        ValueError: The files are too large.
        OSError: There is no room for a temporary copy.
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return {}
    with tempfile.TemporaryDirectory(prefix="ciuic-config-", dir=temporary_directory()) as folder:
        # First, so that the model's own files replace any of the same name.
        if hasattr(processing, "save_pretrained"):
            processing.save_pretrained(folder)
        if hasattr(model, "can_generate") and model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        _described(model, config).save_pretrained(folder)
        return _read_files(folder)


def _described(model: Any, config: Any) -> Any:
    """Return the configuration with what `save_pretrained` of a model adds: its class and its dtype."""
    described = copy.deepcopy(config)
    described.architectures = [type(model).__name__]
    name = "dtype" if hasattr(described, "dtype") else "torch_dtype"
    setattr(described, name, str(model.dtype).removeprefix("torch."))
    return described


def _read_files(folder: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    size_bytes = 0
    for entry in os.scandir(folder):
        if not entry.is_file() or not is_configuration_name(entry.name):
            continue
        with open(entry.path, "rb") as file:
            content = file.read()
        size_bytes += len(content)
        if size_bytes > _MAX_BYTES:
            raise ValueError(f"the configuration files must have at most {_MAX_BYTES} bytes together")
        if content:
            found[entry.name] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return found


def _with_ties(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return a model's state with every name of a tied weight.

    Folders of `save_pretrained`, which `ciuic import` reads, have one name of each.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    filled = copy.copy(state)
    for tied in names.values():
        there = [name for name in tied if name in state]
        for name in tied:
            if there and name not in state:
                filled[name] = state[there[0]]
    return filled
