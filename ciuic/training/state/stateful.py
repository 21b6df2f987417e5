"""Reading and restoring the state of an object, by the methods that its kind has for that.

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
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from ciuic.training.util.randomness import tupled


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


def is_keras_model(value: object) -> bool:
    """Return whether a value is a Keras model or layer."""
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
    (is_keras_model, _WEIGHTS),
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
        StateAccess(lambda value: value.getstate(), lambda value, state: value.setstate(tupled(state))),
    ),
    (_has_weights, _WEIGHTS),
    (
        lambda value: hasattr(value, "variables") and hasattr(value, "apply_gradients"),
        StateAccess(_variables, _put_variables),
    ),
    (lambda value: isinstance(value, dict), StateAccess(dict, _put_dict)),
    (lambda value: isinstance(value, list), StateAccess(list, _put_list)),
]
