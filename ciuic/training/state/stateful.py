"""State of an object, or of the global random generators: reading it, checking that a saved one fits, restoring it, by the methods that its kind has for that.

====================================  =================================================
methods                               examples
====================================  =================================================
get_weights, set_weights              Keras models, of any backend (with torch's they have a state_dict as well)
state_dict, load_state_dict           torch modules, optimizers, schedulers, scalers, StatefulDataLoader, what people write
get_state, set_state                  torch.Generator, numpy.random.RandomState
bit_generator                         numpy.random.Generator
getstate, setstate                    random.Random
variables with assign                 Keras optimizers
====================================  =================================================

A dict or a list is its own state.

Guarantees: `problem_of` changes nothing. For modules and optimizers of torch and for Keras it finds every
reason for which their own loading raises, and those for which it would silently load something else: another
dtype, moments of another shape, parameters on the meta device. For any other object only its own loading can
tell, so `Undo` keeps what the object was and restores it. Names of tensors are compared without the prefixes of
wrappers (`format.shards.bare_names`).

`random_states` has the state of every global random generator: Python's, NumPy's and torch's. Only modules that have been
imported are looked at: a generator that does not exist yet has drawn nothing.
"""

from __future__ import annotations

import copy
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from ciuic.training.format.shards import bare_names, by_bare_name
from ciuic.training.logs import log, quietly


def random_states() -> dict[str, Any]:
    """Return the states of all global generators, on the CPU and on every device in use."""
    found: dict[str, Any] = {"python": random.getstate()}
    numpy_random, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy_random is not None:
        # As a dict: the legacy tuple is for MT19937 alone.
        found["numpy"] = numpy_random.get_state(legacy=False)
    if torch is not None:
        found["torch"] = torch.get_rng_state()
        for name, device in _devices(torch):
            found[name] = device.get_rng_state_all()
        if _mps(torch) is not None:
            found["mps"] = torch.mps.get_rng_state()
    return found


def restore_random_states(found: dict[str, Any]) -> list[str]:
    """Restore the states; return a sentence for each generator that could not be restored."""
    problems = []
    random.setstate(_tupled(found["python"]))
    if "numpy" in found:
        import numpy.random

        numpy.random.set_state(found["numpy"])
    if "torch" in found:
        import torch  # type: ignore[import-not-found, unused-ignore]

        torch.set_rng_state(found["torch"])
        for name, device in _devices(torch):
            states = found.get(name)
            if states is None:
                continue
            # Another number of devices: those that both have get their state.
            if len(states) != device.device_count():
                problems.append(f"{name} had {len(states)} devices and has {device.device_count()}")
            for number, one in enumerate(states[: device.device_count()]):
                device.set_rng_state(one, number)
        if "mps" in found and _mps(torch) is not None:
            torch.mps.set_rng_state(found["mps"])
    return problems


def _devices(torch: Any) -> list[tuple[str, Any]]:
    """Return (name, torch module) of each kind of accelerator that this program has begun to use."""
    # Only those in use: asking for the state of any other would initialize that device.
    kinds = [(name, getattr(torch, name, None)) for name in ("cuda", "xpu")]
    return [(name, kind) for name, kind in kinds if kind is not None and kind.is_initialized()]


def _mps(torch: Any) -> Any:
    mps = getattr(torch.backends, "mps", None)
    return mps if mps is not None and mps.is_available() else None


def _tupled(value: Any) -> Any:
    """Return the value with lists made tuples, as random.setstate requires."""
    return tuple(_tupled(item) for item in value) if isinstance(value, (list, tuple)) else value


class StateAccess(NamedTuple):
    """Functions that read and restore the state of one kind of object."""

    get: Callable[[Any], Any]
    put: Callable[[Any, Any], object]


def state_access(value: object, name: str) -> StateAccess:
    """Return how to read and restore the state of an object.

    Args:
        value: The object.
        name: What errors call it.

    Raises:
        TypeError: The object has no state.
    """
    for has, way in _ACCESSES:
        if has(value):
            return way
    kind = type(value)
    if inspect.isclass(value):
        raise TypeError(f"{name} must be an object, got the class {value.__qualname__}")
    called = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    raise TypeError(f"{name} must have state_dict() and load_state_dict(), got an object of type {called}")


def has_state(value: object) -> bool:
    """Return whether a value given to one save is an object, not a plain value."""
    # A dict or list that is given to one save is a value; only a registered one is restored in place.
    if isinstance(value, (dict, list)):
        return False
    try:
        state_access(value, "")
    except TypeError:
        return False
    return True


def is_loader(value: object) -> bool:
    """Return whether a value with a state is a loader of data: asking for its state may begin a pass."""
    # torchdata's nodes.Loader has a root node in place of a data set.
    return hasattr(value, "__iter__") and (hasattr(value, "dataset") or hasattr(value, "root"))


def state_of(value: object, name: str) -> Any:
    """Return the state of an object, for `load_into`.

    Raises:
        TypeError: The object has no state.
    """
    return state_access(value, name).get(value)


def load_into(value: object, state: Any, name: str) -> None:
    """Restore the state of an object in place.

    Raises:
        TypeError: The object has no state.
        Exception: Anything that the object raises for a state that does not fit.
    """
    state_access(value, name).put(value, state)


def _is_keras_model(value: object) -> bool:
    return hasattr(value, "trainable_variables") and _has_weights(value)


def _callables(*names: str) -> Callable[[object], bool]:
    def has(value: object) -> bool:
        # A class has these methods as well, and no state.
        return not inspect.isclass(value) and all(callable(getattr(value, name, None)) for name in names)

    return has


def _put_dict(value: dict[Any, Any], state: dict[Any, Any]) -> None:
    # In place: the program goes on with this object.
    value.clear()
    value.update(state)


def _put_list(value: list[Any], state: list[Any]) -> None:
    value[:] = state


def _put_bit_generator(value: Any, state: Any) -> None:
    value.bit_generator.state = state


def _weights(value: Any) -> Any:
    sync = getattr(value, "jax_state_sync", None)
    if callable(sync):
        sync()  # Within fit() of the JAX backend the trainer holds the state, not the model.
    return value.get_weights()


def _variables(value: Any) -> list[Any]:
    found = value.variables() if callable(value.variables) else value.variables
    # A property in Keras 3, and a method of older optimizers.
    return [variable.numpy() for variable in found]


def _put_variables(value: Any, state: list[Any]) -> None:
    found = value.variables() if callable(value.variables) else value.variables
    if len(found) != len(state):
        raise ValueError(
            f"the optimizer has {len(found)} variables, and {len(state)} were saved: "
            "call optimizer.build(model.trainable_variables) first, with the same model"
        )
    for variable, saved in zip(found, state, strict=True):
        variable.assign(saved)


_has_weights: Callable[[object], bool] = _callables("get_weights", "set_weights")
_WEIGHTS = StateAccess(_weights, lambda value, state: value.set_weights(state))
# In this order: a Keras model on torch has a state_dict as well, but get_weights is what its loading
# counterpart takes.
_ACCESSES: list[tuple[Callable[[object], bool], StateAccess]] = [
    (_is_keras_model, _WEIGHTS),
    (
        _callables("state_dict", "load_state_dict"),
        StateAccess(lambda value: value.state_dict(), lambda value, state: value.load_state_dict(state)),
    ),
    (
        _callables("get_state", "set_state"),
        StateAccess(lambda value: value.get_state(), lambda value, state: value.set_state(state)),
    ),
    (
        lambda value: hasattr(value, "bit_generator"),
        StateAccess(lambda value: value.bit_generator.state, _put_bit_generator),
    ),
    (
        _callables("getstate", "setstate"),
        StateAccess(lambda value: value.getstate(), lambda value, state: value.setstate(_tupled(state))),
    ),
    (_has_weights, _WEIGHTS),
    (
        lambda value: hasattr(value, "variables") and hasattr(value, "apply_gradients"),
        StateAccess(_variables, _put_variables),
    ),
    (lambda value: isinstance(value, dict), StateAccess(dict, _put_dict)),
    (lambda value: isinstance(value, list), StateAccess(list, _put_list)),
]


# State of torch's optimizers that has the shape of its parameter; others (Adafactor's rows and columns) have
# shapes of their own.
_LIKE_PARAMETER: Final = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "exp_inf",
    "momentum_buffer",
    "square_avg",
    "grad_avg",
    "acc_delta",
    "sum",
    "prev",
    "ax",
)
_MAX_WRAPPERS: Final = 4
# Differences that a message names; a model of another size differs in all of its tensors.
_NAMED: Final = 3
# A copy of a state that only its own loading can check is held in memory up to this size. No object of torch
# or Keras needs one; a larger custom optimizer is loaded without it rather than not at all.
_MAX_COPY_BYTES: Final = 4 << 30


def renamed_as(value: Any, saved: Any) -> Any:
    """Return the saved state of a module with its keys named as the module names them.

    Returns:
        The same object where the names agree, or differ by more than the prefixes of wrappers.
    """
    if not is_module(value) or not isinstance(saved, dict):
        return saved
    own = value.state_dict()
    if own.keys() == saved.keys():
        return saved
    own_of = by_bare_name(own)
    saved_of = by_bare_name(saved)
    if own_of is None or saved_of is None or own_of.keys() != saved_of.keys():
        return saved
    made: Any = type(saved)()
    for bare, key in saved_of.items():
        made[own_of[bare]] = saved[key]
    # Versions of modules, by the path of the module: a BatchNorm without its own is taken for an old one.
    versions, own_versions = getattr(saved, "_metadata", None), getattr(own, "_metadata", None)
    if versions is not None and own_versions is not None:
        # A wrapper and what it wraps have one bare path; the wrapper comes first, and its version matters to
        # nobody.
        found = {bare: versions[path] for path, bare in bare_names(versions).items()}
        wanted = bare_names(own_versions)
        made._metadata = {path: found[bare] for path, bare in wanted.items() if bare in found}
    return made


def problem_of(value: Any, saved: Any) -> str:
    """Return why a saved state does not fit an object; empty where it does, or where only loading can tell.

    Args:
        value: The object; nothing of it is changed.
        saved: Its saved state, renamed by `renamed_as`.
    """
    if _is_keras_model(value):
        return _shapes_problem(state_of(value, ""), saved, "weights")
    if is_module(value):
        return _module_problem(value, saved)
    if hasattr(value, "param_groups") and isinstance(saved, dict) and "param_groups" in saved:
        return _optimizer_problem(value, saved)
    if hasattr(value, "variables") and hasattr(value, "apply_gradients"):
        return _shapes_problem(state_of(value, ""), saved, "variables")
    return ""


class Undo:
    """States of objects from before they were loaded into."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []

    def remember(self, name: str, value: Any) -> None:
        """Keep what an object is, unless `problem_of` has checked all that its loading checks."""
        if is_checked_wholly(value):
            return
        # A loader of data may start its workers when it is asked for its state, so its attributes are kept
        # instead: loading replaces them and changes none of them in place.
        if is_loader(value):
            attributes = dict(vars(value))
            self._steps.append(lambda: _restore_attributes(value, attributes))
            return
        # Loading replaces the entries of a dict or list, which are kept themselves: the program may hold them.
        if isinstance(value, (dict, list)):
            entries = copy.copy(value)
            self._steps.append(lambda: load_into(value, entries, name))
            return
        try:
            before = state_of(value, name)
            if _size_bytes(before) > _MAX_COPY_BYTES:
                return
            kept = copied(before)
        # An object may have no state, or none that can be copied, before it is loaded: then it is loaded
        # without a way back, which is better than no resume.
        except Exception as error:
            log.debug("ciuic: %s could not be kept as it was: %r", name, error)
            return
        self._steps.append(lambda: load_into(value, kept, name))

    def restore(self) -> None:
        """Restore every object, the last one first; an object that refuses its own state is logged."""
        while self._steps:
            with quietly("an object could not be restored to what it was before"):
                self._steps.pop()()


def is_module(value: object) -> bool:
    """Return whether a value is a module of torch, other than a Keras model."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module) and not _is_keras_model(value)


def is_checked_wholly(value: Any) -> bool:
    """Return whether `problem_of` finds every reason for which an object cannot load its state."""
    if _is_keras_model(value) or (hasattr(value, "variables") and hasattr(value, "apply_gradients")):
        return True
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if is_module(value):
        return not _loads_by_own_code(value)
    return _is_of_torch(value)


def _loads_by_own_code(module: Any) -> bool:
    """Return whether loading a module runs code that may keep something besides copying tensors."""
    return any(_loads_more(type(one)) for one in module.modules())


def _loads_more(kind: Any) -> bool:
    plain = sys.modules["torch"].nn.Module
    if kind.get_extra_state is not plain.get_extra_state or kind.set_extra_state is not plain.set_extra_state:
        return True
    own = kind._load_from_state_dict is not plain._load_from_state_dict
    own = own or kind.load_state_dict is not plain.load_state_dict
    # Those of torch itself (BatchNorm, torch.compile's wrapper) only rename or add keys.
    return own and not kind.__module__.startswith("torch.")


def _module_problem(module: Any, saved: Any) -> str:
    if not isinstance(saved, Mapping):
        return f"the state of a module is a dict of tensors, and a {type(saved).__name__} was saved"
    own = module.state_dict()
    on_meta = [name for name, tensor in own.items() if getattr(tensor, "is_meta", False)]
    if on_meta:
        # torch copies nothing into such a tensor, and only warns.
        return (
            f"{_named(on_meta)} {'is' if len(on_meta) == 1 else 'are'} on the meta device, without memory: "
            "call to_empty(device=…) first"
        )
    other = [
        f"{name} is {_dtype(tensor)} here and {_dtype(saved[name])} there"
        for name, tensor in own.items()
        if name in saved and _dtype(tensor) != _dtype(saved[name])
    ]
    if other:
        # torch converts such tensors without a word, and the run goes on from rounded weights.
        return f"{_named(other)}: convert the model first, or load the state with load_latest_snapshot"
    return "" if _loads_by_own_code(module) else _dry_run(module, saved)


def _dry_run(module: Any, saved: Mapping[str, Any]) -> str:
    """Load a state without copying any tensor, and return what torch says against it.

    So hooks that rename or fill in keys are respected, which a comparison of names here would not do.
    """
    from torch.overrides import TorchFunctionMode  # type: ignore[import-not-found, unused-ignore]

    class NoCopies(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") == "copy_":
                return args[0]
            return func(*args, **(kwargs or {}))

    try:
        with NoCopies():
            module.load_state_dict(saved)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        return str(error)
    return ""


def _optimizer_problem(optimizer: Any, saved: dict[str, Any]) -> str:
    groups, kept = optimizer.param_groups, saved["param_groups"]
    if len(groups) != len(kept):
        return f"the optimizer has {len(groups)} parameter groups, and {len(kept)} were saved"
    parameters: dict[Any, Any] = {}
    for at, (group, old) in enumerate(zip(groups, kept, strict=True)):
        if len(group["params"]) != len(old["params"]):
            return f"parameter group {at} has {len(group['params'])} parameters, and {len(old['params'])} were saved"
        parameters |= dict(zip(old["params"], group["params"], strict=True))
    # The moments of a sharded parameter are sharded alike, and their whole shape is compared.
    shapes = [
        (key, number, tuple(tensor.shape), tuple(parameters[number].shape))
        for number, state in saved.get("state", {}).items()
        if number in parameters and isinstance(state, dict)
        for key, tensor in state.items()
        if key in _LIKE_PARAMETER and hasattr(tensor, "shape")
    ]
    wrong = [one for one in shapes if one[2] != one[3]]
    if not _is_of_torch(optimizer):
        # It may keep moments of a lower rank. Those of the shapes of other parameters are of parameters in another order.
        wrong = [one for one in wrong if _is_reordered([other for other in shapes if other[0] == one[0]])]
    return _named(
        [
            f"{key} of parameter {number} has the shape {list(has)}, and the parameter {list(parameter)}"
            for key, number, has, parameter in wrong
        ]
    )


def _is_reordered(shapes: list[tuple[str, Any, tuple[int, ...], tuple[int, ...]]]) -> bool:
    return sorted(one[2] for one in shapes) == sorted(one[3] for one in shapes)


def _is_of_torch(optimizer: Any) -> bool:
    torch = sys.modules.get("torch")
    is_optimizer = torch is not None and isinstance(optimizer, torch.optim.Optimizer)
    return is_optimizer and type(optimizer).__module__.startswith("torch.optim")


def optimizer_class(value: Any) -> str:
    """Return the qualified name of an optimizer's class, without wrappers; empty for anything else."""
    if not hasattr(value, "param_groups"):
        return ""
    # Those of Accelerate and DeepSpeed, of Lightning, and torch's ZeroRedundancyOptimizer.
    for _ in range(_MAX_WRAPPERS):
        inner = (getattr(value, name, None) for name in ("optimizer", "_optimizer", "optim"))
        value = next((one for one in inner if hasattr(one, "param_groups")), value)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _shapes_problem(own: Iterable[Any], saved: Any, what: str) -> str:
    shapes = [tuple(array.shape) for array in own]
    if not isinstance(saved, list):
        return f"a list of {what} is needed, and a {type(saved).__name__} was saved"
    if len(shapes) != len(saved):
        hint = ": call optimizer.build(model.trainable_variables) first, with the same model"
        return f"there are {len(shapes)} {what} here, and {len(saved)} were saved{hint if what == 'variables' else ''}"
    wrong = [
        f"number {at} of the {what} has the shape {list(shape)} here and {list(getattr(array, 'shape', ()))} there"
        for at, (shape, array) in enumerate(zip(shapes, saved, strict=True))
        if shape != tuple(getattr(array, "shape", ()))
    ]
    return _named(wrong)


def _restore_attributes(value: Any, attributes: dict[str, Any]) -> None:
    vars(value).clear()
    vars(value).update(attributes)


def copied(state: Any) -> Any:
    """Return a deep copy with tensors on the CPU, where there is room for them."""
    if isinstance(state, dict):
        made = copy.copy(state)
        made.update({key: copied(item) for key, item in state.items()})
        return made
    if type(state) in (list, tuple):
        return type(state)(copied(item) for item in state)
    if hasattr(state, "detach") and hasattr(state, "clone"):
        return state.detach().cpu().clone()
    return copy.deepcopy(state)


def _size_bytes(state: Any) -> int:
    if isinstance(state, dict):
        return sum(map(_size_bytes, state.values()))
    if isinstance(state, (list, tuple)):
        return sum(map(_size_bytes, state))
    return int(getattr(state, "nbytes", 0) or 0)


def _dtype(tensor: Any) -> str:
    return str(getattr(tensor, "dtype", "")).removeprefix("torch.")


def _named(differences: list[str]) -> str:
    more = f" and {len(differences) - _NAMED} more" if len(differences) > _NAMED else ""
    return ", ".join(differences[:_NAMED]) + more


def unregistered(objects: Mapping[str, Any], *, has_position: bool) -> list[str]:
    """Return a sentence for each missing object, with what to do; empty if none is known to be missing."""
    notes = []
    values = list(objects.values())
    modules = [value for value in values if is_module(value)]
    optimizers = [value for value in values if hasattr(value, "param_groups") and hasattr(value, "step")]
    if modules and not optimizers:
        notes.append("no optimizer is saved: a resumed run would start with fresh moments")
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    for optimizer in optimizers:
        groups = optimizer.param_groups
        if known and any(id(one) not in known for group in groups for one in group["params"]):
            notes.append(
                "the optimizer has parameters that are in no module that is saved: register their module"
            )
        # Schedulers of torch write the rate they began with into the groups.
        scheduled = any("initial_lr" in group for group in groups)
        if scheduled and not any(getattr(value, "optimizer", None) is optimizer for value in values):
            notes.append("a learning rate scheduler is at work and is not saved: register(scheduler=…)")
    if "torch" in sys.modules and modules and not has_position:
        notes.append(
            "no data loader is registered: a resumed run begins its epoch again; register(loader=…), best a StatefulDataLoader"
        )
    return notes
