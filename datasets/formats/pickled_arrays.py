"""Reads pickled dictionaries of arrays and torch tensors, as `numpy.save` writes them, and runs nothing from the file.

A pickle is a program: it imports and calls what it names, so Python's reader would run code of strangers. This module
interprets the operations itself. A name in the file is only looked up in a table of functions of this module, which
make arrays from bytes; all other names and operations are errors. Neither Python's unpickler nor torch sees the file.
"""

import io
import math
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

_MAX_OPERATIONS = 100_000
"""Maximum number of operations in a pickle. A dictionary of the maps of 100 classes has about 2,000."""
_MAX_STORAGE_OPERATIONS = 100
"""The same for the pickles in a storage of torch, which are plain values. They have about 20."""
_MAX_ENCODED = 2**28
"""Maximum number of bytes that a pickle makes from texts. A short one could make many from the same text."""
_MAX_NAME = 200
"""Maximum length of a name that a pickle imports, with its module, characters. Those of arrays have at most 35."""
_MAX_DIMENSIONS = 64
"""Maximum number of dimensions of an array in NumPy 2."""
_DTYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
_OBJECT = "O8"
_STORAGES = {
    "BoolStorage": "b1",
    "CharStorage": "i1",
    "ShortStorage": "i2",
    "IntStorage": "i4",
    "LongStorage": "i8",
    "ByteStorage": "u1",
    "HalfStorage": "f2",
    "FloatStorage": "f4",
    "DoubleStorage": "f8",
}
"""Names of torch's storages in files, and the types of their values."""
_TORCH_MAGIC = 0x1950A86A20F9469CFC6C
"""First number in a storage that torch has written."""


class RejectedPickle(ValueError):
    """A file that is not a pickled dictionary of arrays and tensors."""


def read_pickled_arrays(data: bytes) -> dict[str | int, Any]:
    """Reads a file of `numpy.save(file, {...})`.

    Args:
        data: Content of the file.

    Returns:
        The dictionary. Arrays and tensors are arrays; other values are numbers, texts, lists, tuples or dictionaries.

    Raises:
        RejectedPickle: The file is no such file, is damaged, or contains anything but arrays, tensors and plain values.
        MemoryError: Not enough memory. No content raises any other exception.
    """
    try:
        stream = io.BytesIO(data)
        version = npy.read_magic(stream)
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read_header(stream)
        if not dtype.hasobject:
            raise RejectedPickle(f"an array of {dtype} with the shape {shape}; expected a pickled dictionary")
        array = _PickleMachine(_FUNCTIONS).run(stream, _MAX_OPERATIONS)
        (content,) = array.objects
        if not isinstance(content, dict):
            raise RejectedPickle(f"a pickled {type(content).__name__}; expected a dictionary")
        return {key: _finished(value) for key, value in content.items()}
    except (RejectedPickle, MemoryError):
        raise
    except Exception as error:  # hostile bytes can raise any error
        raise RejectedPickle(f"not a pickled dictionary of arrays ({type(error).__name__})") from None


def _finished(value: Any) -> Any:
    """Returns the NumPy array of an `_Array`. Other values are returned unchanged."""
    if isinstance(value, _Array):
        if value.array is None:
            raise RejectedPickle("an array of objects; expected numbers")
        return value.array
    return value


@dataclass(frozen=True)
class _Name:
    """A name that a pickle imports, `module.name`, of at most _MAX_NAME characters."""

    text: str

    def __post_init__(self) -> None:
        if len(self.text) > _MAX_NAME:
            raise RejectedPickle(f"a pickle that imports a name of more than {_MAX_NAME} characters")


class _DType:
    """A type of numbers that is being read; its state holds the byte order."""

    def __init__(self, code: Any, *_: Any) -> None:
        if code not in (*_DTYPES, _OBJECT):
            raise RejectedPickle("an array of another type than numbers")
        self.code = code
        self.order = "="

    def set_state(self, state: Any) -> None:
        order = state[1]
        if order not in ("<", ">", "=", "|"):
            raise RejectedPickle("an unknown byte order")
        self.order = order

    @property
    def dtype(self) -> np.dtype[Any]:
        if self.code == _OBJECT:
            raise RejectedPickle("an array of objects; expected numbers")
        return np.dtype(self.order + self.code)


class _Array:
    """An array that is being read.

    Attributes:
        array: The array; None if it holds objects.
        objects: The objects.
    """

    def __init__(self, *_: Any) -> None:
        self.array: NDArray[Any] | None = None
        self.objects: list[Any] = []

    def set_state(self, state: Any) -> None:
        _, shape, dtype, is_fortran, content = state
        if dtype.code == _OBJECT:
            if isinstance(content, list):
                self.objects = content
            return
        values = np.frombuffer(content, dtype.dtype)
        self.array = values.reshape(_sides(shape), order="F" if is_fortran else "C")


@dataclass(frozen=True)
class _Stored:
    """The values of a torch tensor's storage."""

    values: NDArray[Any]


def _sides(shape: Any) -> tuple[int, ...]:
    """Checks the shape of an array, or the steps in a storage."""
    if not isinstance(shape, tuple) or len(shape) > _MAX_DIMENSIONS:
        raise RejectedPickle("an array with an invalid shape")
    if not all(isinstance(side, int) and side >= 0 for side in shape):
        raise RejectedPickle("an array with an invalid shape")
    return shape


def _scalar(dtype: _DType, content: bytes) -> Any:
    (value,) = np.frombuffer(content, dtype.dtype)
    return value


def _encoded(text: str, encoding: str) -> bytes:
    """Bytes that an old pickle stores as text."""
    if encoding != "latin1":
        raise RejectedPickle("bytes in another encoding than latin1")
    return text.encode("latin1")


def _no_hooks() -> dict[str, Any]:
    """The empty OrderedDict of a tensor's hooks."""
    return {}


def _tensor(stored: _Stored, offset: int, shape: Any, steps: Any, *_: Any) -> NDArray[Any]:
    """Makes the array of a tensor, which may be a part of its storage."""
    sides = _sides(shape)
    (first,) = _sides((offset,))
    values = stored.values[first:]
    if math.prod(sides) == 0:
        return np.zeros(sides, values.dtype)
    last = sum((side - 1) * step for side, step in zip(sides, _sides(steps), strict=True))
    if last >= len(values) or math.prod(sides) > len(values):
        raise RejectedPickle("a tensor that is larger than its storage")
    strides = tuple(step * values.itemsize for step in steps)
    return np.lib.stride_tricks.as_strided(values, sides, strides, writeable=False)


def _storage(content: bytes) -> _Stored:
    """Reads a storage in torch's format: four small pickles, the list of keys, the number of values, the values."""
    stream = io.BytesIO(content)
    # A constant, the version of the format, the byte order of the writing machine, the storage, and its keys.
    pickles = [_PickleMachine({}).run(stream, _MAX_STORAGE_OPERATIONS) for _ in range(5)]
    if pickles[0] != _TORCH_MAGIC:
        raise RejectedPickle("a tensor in an unknown format")
    kind, name, key, _, count, *_ = pickles[3]
    keys = pickles[4]
    if kind != "storage" or not isinstance(name, _Name):
        raise RejectedPickle("a tensor in an unknown format")
    # Texts only: a short pickle can make nested tuples that take years to compare.
    if not isinstance(key, str) or not isinstance(keys, list) or len(keys) != 1 or not isinstance(keys[0], str):
        raise RejectedPickle("a tensor in an unknown format")
    if keys[0] != key:
        raise RejectedPickle("a tensor in an unknown format")
    code = _STORAGES.get(name.text.removeprefix("torch."))
    if code is None:
        raise RejectedPickle(f"a tensor of another type than {', '.join(_STORAGES.values())}")

    start = stream.tell() + 8  # after the number of values, which is repeated
    return _Stored(np.frombuffer(content, np.dtype(f"<{code}"), count=count, offset=start))


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "numpy.dtype": _DType,
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
    "_codecs.encode": _encoded,
    "collections.OrderedDict": _no_hooks,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch.storage._load_from_bytes": _storage,
}
"""What a call of each name in a pickle does here."""
_VALUES = {
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINBYTES8",
}
"""Operations that add their argument to the stack."""
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
"""Operations that add a constant to the stack."""
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
"""Operations that make a tuple of this many values."""
_WITHOUT_EFFECT = {"PROTO", "FRAME", "BINPERSID"}
"""Operations that change nothing here. After BINPERSID, the description of a storage stays on the stack."""


class _PickleMachine:
    """Interprets the operations of a pickle.

    Arrays share the bytes of the file, so the memory that it needs is bounded. Each method `_run_<group>` runs an
    operation of its group, and returns False for any other.

    Args:
        functions: What the pickle may call, by name.

    Attributes:
        stack: The values that later operations take.
        marks: Sizes of the stack when a collection of items began, the outermost first.
        memo: Values that the pickle refers to again, by their numbers.
        encoded_bytes: Number of bytes that calls have made from texts.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]]):
        self.functions = functions
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[Any, Any] = {}
        self.encoded_bytes = 0

    def run(self, stream: io.BytesIO, max_operations: int) -> Any:
        """Interprets the pickle that begins at the position of a stream. Returns its value.

        Args:
            stream: The bytes. Afterwards, its position is the end of the pickle.
            max_operations: Maximum number of operations.
        """
        for number, (operation, argument, _) in enumerate(pickletools.genops(stream)):
            if number >= max_operations:
                raise RejectedPickle(f"a pickle with more than {max_operations} operations")

            name = operation.name
            if name == "STOP":
                return self.stack.pop()
            is_known = (
                name in _WITHOUT_EFFECT
                or self._run_value(name, argument)
                or self._run_container(name)
                or self._run_call(name, argument)
                or self._run_memo(name, argument)
            )
            if not is_known:
                raise RejectedPickle(f"a pickle with the operation {name}, which dictionaries of arrays do not need")
        raise RejectedPickle("a pickle without an end")

    def _run_value(self, operation: str, argument: Any) -> bool:
        """Adds a plain value to the stack."""
        if operation in _VALUES:
            self.stack.append(argument)
        elif operation in _CONSTANTS:
            self.stack.append(_CONSTANTS[operation])
        else:
            return False
        return True

    def _run_container(self, operation: str) -> bool:
        """Makes or fills a tuple, list or dictionary."""
        match operation:
            case "MARK":
                self.marks.append(len(self.stack))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = _TUPLES[operation]
                self.stack[-count:] = [tuple(self.stack[-count:])]
            case "TUPLE":
                items = self._pop_to_mark()
                self.stack.append(tuple(items))
            case "EMPTY_LIST":
                self.stack.append([])
            case "APPEND":
                item = self.stack.pop()
                self.stack[-1].append(item)
            case "APPENDS":
                items = self._pop_to_mark()
                self.stack[-1].extend(items)
            case "EMPTY_DICT":
                self.stack.append({})
            case "SETITEM":
                value = self.stack.pop()
                key = self.stack.pop()
                self.stack[-1][_key(key)] = value
            case "SETITEMS":
                items = self._pop_to_mark()
                for key, value in zip(items[::2], items[1::2], strict=True):
                    self.stack[-1][_key(key)] = value
            case _:
                return False
        return True

    def _run_call(self, operation: str, argument: Any) -> bool:
        """Imports a name, calls one, or sets the state of what a call has made."""
        match operation:
            case "GLOBAL":
                self.stack.append(_Name(str(argument).replace(" ", ".")))
            case "STACK_GLOBAL":
                name = self.stack.pop()
                module = self.stack.pop()
                self.stack.append(_imported(module, name))
            case "REDUCE":
                arguments = self.stack.pop()
                called = self.stack.pop()
                self.stack.append(self._call(called, arguments))
            case "BUILD":
                state = self.stack.pop()
                self.stack[-1].set_state(state)
            case _:
                return False
        return True

    def _run_memo(self, operation: str, argument: Any) -> bool:
        """Puts the last value of the stack into the memo, or adds a value of the memo to the stack."""
        match operation:
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.stack[-1]
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = self.stack[-1]
            case "BINGET" | "LONG_BINGET":
                self.stack.append(self.memo[argument])
            case _:
                return False
        return True

    def _pop_to_mark(self) -> list[Any]:
        """Takes the values after the last mark from the stack."""
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def _call(self, called: Any, arguments: Any) -> Any:
        """Makes the value of a call in a pickle."""
        if not isinstance(called, _Name):
            raise RejectedPickle("a pickle that calls a value")
        function = self.functions.get(called.text)
        if function is None:
            raise RejectedPickle(f"a pickle that calls {called.text}, which could run code; nothing was run")

        value = function(*arguments)
        if isinstance(value, bytes):
            self.encoded_bytes += len(value)
            if self.encoded_bytes > _MAX_ENCODED:
                raise RejectedPickle(f"a pickle with more than {_MAX_ENCODED} bytes as text")
        return value


def _imported(module: Any, name: Any) -> _Name:
    """Returns the name that a pickle imports. Values other than texts are not formatted, because they may be huge."""
    if not isinstance(module, str) or not isinstance(name, str):
        raise RejectedPickle("a pickle that imports a name that is no text")
    return _Name(f"{module}.{name}")


def _key(key: Any) -> str | int:
    """Checks the key of a dictionary."""
    if isinstance(key, np.integer):
        return int(key)
    if not isinstance(key, str | int):
        raise RejectedPickle("a dictionary with keys other than texts and integers")
    return key
