"""Configuration files of a transformers model, so that an exported snapshot is a folder for `from_pretrained`."""

from __future__ import annotations

import copy
import os
import tempfile
from typing import Any, Final

import torch

from ciuic.system.ownership import temporary_directory
from ciuic.training.convert.exported_files import is_configuration_name

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


def with_ties(model: Any, state: dict[str, Any]) -> dict[str, Any]:
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
