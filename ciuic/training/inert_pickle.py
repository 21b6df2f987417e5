"""Interpretation of a pickle as data: names stay names, and nothing is imported, called or made.

For the metadata of `torch.distributed.checkpoint`, which torch itself unpickles, and for what `torch.save` wrote. Opcodes come
from the standard library's own parser, `pickletools.genops`, which executes nothing either.

References:
    https://docs.python.org/3/library/pickletools.html
"""

from __future__ import annotations

import pickletools
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ciuic.training.json_documents import MALFORMED

_BYTES_FOR_EACH: Final = 48
"""Limit of the memory that a value takes, for each byte of its pickle; what torch writes takes 40 at most by this measure."""
_MIN_BYTES: Final = 128 << 20
_MAX_KEY: Final = 1 << 60


class Name(NamedTuple):
    """A class or function that the pickle names."""

    module: str
    name: str


class Persistent(NamedTuple):
    """Reference to something outside of the pickle, such as torch's storages."""

    id: Any


class Made:
    """An object that the pickle wants made: what would be called, with what, and the state set afterwards."""

    __slots__ = ("arguments", "function", "state")

    def __init__(self, function: Any, arguments: Any) -> None:
        """Note what would be called."""
        self.function = function
        self.arguments = arguments
        self.state: Any = None

    def is_of(self, module: str, name: str) -> bool:
        """Return whether this would be an object of a class."""
        return bool(self.function == Name(module, name))


def read_pickle(data: bytes) -> Any:
    """Return the value of a pickle of protocol 2 to 5: plain values, `Name`, `Persistent` and `Made`; an OrderedDict as a dict.

    Raises:
        ValueError: The data is no pickle, has an opcode that plain objects do not need, or stands for far more than its size.
    """
    machine = _Machine(max(_MIN_BYTES, _BYTES_FOR_EACH * len(data)))
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.stack.pop()
            machine.execute(opcode.name, argument)
    except (*MALFORMED, ValueError) as error:
        raise ValueError(f"the pickle is malformed: {error}") from None
    raise ValueError("the pickle has no end")


class _Machine:
    def __init__(self, left_bytes: int) -> None:
        self._left_bytes = left_bytes
        self.stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def execute(self, name: str, argument: Any) -> None:
        if name in _IGNORED:
            return
        # An opcode of a byte makes an empty set of 216.
        self._left_bytes -= _MADE_BYTES.get(name, _SLOT_BYTES)
        if type(argument) in (str, bytes, int):
            self._left_bytes -= sys.getsizeof(argument)
        if self._left_bytes < 0:
            raise ValueError("the pickle stands for far more than its size")
        if name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _LITERALS:
            self.stack.append(argument)
        elif name in _STEPS:
            _STEPS[name](self)
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self._memo[argument])
        elif name == "GLOBAL":
            module, _, attribute = argument.partition(" ")
            self.stack.append(Name(module, attribute))
        else:
            raise ValueError(f"the pickle has the opcode {name}, which no metadata needs")

    def mark(self) -> None:
        self._marks.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self._marks.pop()
        return items

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self.stack[-1]

    def make_tuple(self, count: int | None = None) -> None:
        if count is None:
            # In two statements: `since_mark` changes which list the stack is.
            marked = tuple(self.since_mark())
            self.stack.append(marked)
            return
        items = tuple(self.stack[-count:])
        if len(items) < count:
            raise ValueError("the pickle takes more from its stack than there is")
        del self.stack[-count:]
        self.stack.append(items)

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        # A Made here would be a list of some class, which no metadata has.
        if type(target) is not list:
            raise ValueError("the pickle appends to what is no list")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError("the pickle sets items of what is no dict")
        target.update(zip(map(_hashable, items[::2]), items[1::2], strict=True))

    def add_items(self) -> None:
        items = self.since_mark()
        if type(self.stack[-1]) is not set:
            raise ValueError("the pickle adds to what is no set")
        self.stack[-1].update(map(_hashable, items))

    def pop(self, count: int = 1) -> list[Any]:
        items = [self.stack.pop() for _ in range(count)]
        return items[::-1]

    def call(self) -> None:
        function, arguments = self.pop(2)
        is_dict = function == Name("collections", "OrderedDict") and arguments == ()
        self.stack.append({} if is_dict else Made(function, arguments))

    def refer(self) -> None:
        (id_,) = self.pop()
        self.stack.append(Persistent(id_))

    def stack_global(self) -> None:
        module, name = self.pop(2)
        if type(module) is not str or type(name) is not str:
            raise ValueError("the pickle names a class by what is no text")
        self.stack.append(Name(module, name))

    def build(self) -> None:
        (state,) = self.pop()
        if type(self.stack[-1]) is dict:
            # Attributes of an OrderedDict, as `_metadata` of torch's state dicts.
            return
        if not isinstance(self.stack[-1], Made):
            raise ValueError("the pickle sets the state of what is no object")
        self.stack[-1].state = state


def _hashable(value: Any) -> Any:
    # Tuples that hold each other twice are hashed as often as they could be reached: for years. So is what refers to such a tuple.
    if isinstance(value, tuple):
        raise ValueError("the pickle has a tuple as a key, which no metadata needs")
    # Integers that differ by multiples of 2^61 - 1 have one hash, and each is compared with all others.
    if type(value) is int and not -_MAX_KEY < value < _MAX_KEY:
        raise ValueError("the pickle has a key that is too large, which no metadata needs")
    return value


_IGNORED: Final = ("PROTO", "FRAME")
_CONSTANTS: Final[dict[str, Callable[[], Any]]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": set,
}
_SLOT_BYTES: Final = 8
_MADE_BYTES: Final = {
    # With the place on the stack, and what the first item adds; of calls, names and references the object and its parts.
    **dict.fromkeys(
        ("MARK", "EMPTY_LIST", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE", "NEWOBJ", "BINPERSID"), 72
    ),
    "EMPTY_DICT": 72,
    "EMPTY_SET": 224,
    "GLOBAL": 168,
    "STACK_GLOBAL": 64,
    "BINFLOAT": 32,
    **dict.fromkeys(("MEMOIZE", "BINPUT", "LONG_BINPUT"), 96),
}
"""Memory that opcodes take, beyond what their arguments do; all others take a place on the stack."""
_LITERALS: Final = (
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
)
_STEPS: Final[dict[str, Callable[[_Machine], None]]] = {
    "MARK": _Machine.mark,
    "MEMOIZE": _Machine.memoize,
    "TUPLE": _Machine.make_tuple,
    "TUPLE1": lambda machine: machine.make_tuple(1),
    "TUPLE2": lambda machine: machine.make_tuple(2),
    "TUPLE3": lambda machine: machine.make_tuple(3),
    "APPEND": lambda machine: machine.append(machine.pop()),
    "APPENDS": lambda machine: machine.append(machine.since_mark()),
    "SETITEM": lambda machine: machine.set_items(machine.pop(2)),
    "SETITEMS": lambda machine: machine.set_items(machine.since_mark()),
    "ADDITEMS": _Machine.add_items,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "STACK_GLOBAL": _Machine.stack_global,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.refer,
}
