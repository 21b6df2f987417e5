"""How the state of an object is read and put back, whichever way its kind has for that.

====================================  =================================================
what it has                           for example
====================================  =================================================
get_weights, set_weights              Keras models, of any backend (with torch's they have a state_dict as well)
state_dict, load_state_dict           torch modules, optimizers, schedulers, scalers, StatefulDataLoader, what people write
get_state, set_state                  torch.Generator, numpy.random.RandomState
bit_generator                         numpy.random.Generator
getstate, setstate                    random.Random
variables with assign                 Keras optimizers
====================================  =================================================

A dict or a list stands for itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from ciuic.training.randomness import tupled


class Way(NamedTuple):
    get: Callable[[Any], Any]
    put: Callable[[Any, Any], object]


def way_of(value: object, name: str) -> Way:
    """TypeError naming ``name`` where there is none."""
    for has, way in _WAYS:
        if has(value):
            return way
    kind = type(value)
    if inspect.isclass(value):
        raise TypeError(f"{name} is the class {value.__qualname__}; an object of it is wanted")
    called = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    raise TypeError(f"{name} is of type {called}, which has no state_dict() and load_state_dict()")


def has_state(value: object) -> bool:
    """Whether it is an object and not a plain value."""
    if isinstance(value, (dict, list)):
        return False  # given to one save it is a value; registered, it is an object
    try:
        way_of(value, "")
    except TypeError:
        return False
    return True


def state_of(value: object, name: str) -> Any:
    """What `load_into` takes. TypeError as `way_of`."""
    return way_of(value, name).get(value)


def load_into(value: object, state: Any, name: str) -> None:
    """Puts the state back, in place. TypeError as `way_of`, and whatever the object raises of a state that does not fit."""
    way_of(value, name).put(value, state)


def is_keras_model(value: object) -> bool:
    """Or one of its layers."""
    return hasattr(value, "trainable_variables") and _has_weights(value)


def _callables(*names: str) -> Callable[[object], bool]:
    def has(value: object) -> bool:
        return not inspect.isclass(value) and all(callable(getattr(value, name, None)) for name in names)

    return has


def _put_dict(value: dict[Any, Any], state: dict[Any, Any]) -> None:
    value.clear()
    value.update(state)


def _put_list(value: list[Any], state: list[Any]) -> None:
    value[:] = state


def _put_bit_generator(value: Any, state: Any) -> None:
    value.bit_generator.state = state


def _weights(value: Any) -> Any:
    sync = getattr(value, "jax_state_sync", None)
    if callable(sync):
        sync()  # within fit() the model does not have its state itself
    return value.get_weights()


def _variables(value: Any) -> list[Any]:
    found = value.variables() if callable(value.variables) else value.variables
    return [variable.numpy() for variable in found]


def _put_variables(value: Any, state: list[Any]) -> None:
    found = value.variables() if callable(value.variables) else value.variables
    if len(found) != len(state):
        raise ValueError(
            f"the optimizer has {len(found)} variables, and {len(state)} were saved: optimizer.build(model.trainable_variables) first, "
            "of the same model"
        )
    for variable, saved in zip(found, state, strict=True):
        variable.assign(saved)


_has_weights: Callable[[object], bool] = _callables("get_weights", "set_weights")
_WEIGHTS = Way(_weights, lambda value, state: value.set_weights(state))
_WAYS: list[tuple[Callable[[object], bool], Way]] = [
    (is_keras_model, _WEIGHTS),
    (
        _callables("state_dict", "load_state_dict"),
        Way(lambda value: value.state_dict(), lambda value, state: value.load_state_dict(state)),
    ),
    (
        _callables("get_state", "set_state"),
        Way(lambda value: value.get_state(), lambda value, state: value.set_state(state)),
    ),
    (
        lambda value: hasattr(value, "bit_generator"),
        Way(lambda value: value.bit_generator.state, _put_bit_generator),
    ),
    (
        _callables("getstate", "setstate"),
        Way(lambda value: value.getstate(), lambda value, state: value.setstate(tupled(state))),
    ),
    (_has_weights, _WEIGHTS),
    (
        lambda value: hasattr(value, "variables") and hasattr(value, "apply_gradients"),
        Way(_variables, _put_variables),
    ),
    (lambda value: isinstance(value, dict), Way(dict, _put_dict)),
    (lambda value: isinstance(value, list), Way(list, _put_list)),
]
