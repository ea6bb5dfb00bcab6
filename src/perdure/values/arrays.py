"""numpy arrays and scalars: their dtype as text, their shape, and their bytes in base64.

Saving never imports numpy: a program that has an array has loaded it. Loading imports it for the first array. Dtypes
follow a closed grammar without object dtypes, which would be pickled. An array is made only if its shape and dtype need
exactly the stored bytes.
"""

from __future__ import annotations

import importlib
import re
import sys
from binascii import a2b_base64, b2a_base64
from math import prod
from typing import Any

from perdure.errors import Undecodable, UnknownType

_SIMPLE = re.compile(r"[<>|][biufcSUVmM][0-9]{1,9}(\[[0-9]{0,9}[A-Za-z]{1,7}\])?")
_DIMENSIONS_MAX = 64


class Unfit(Exception):
    """An array or scalar that cannot be kept; the text says why."""


def is_numpy(value: object) -> bool:
    """Return whether this is an array or a scalar of numpy, not of a subclass."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return False
    kind = type(value)
    return kind is numpy.ndarray or (isinstance(value, numpy.generic) and kind.__module__ == "numpy")


def dump(value: Any) -> tuple[str, Any]:
    """Return the tag of an array or scalar, and its plain content."""
    numpy: Any = sys.modules["numpy"]
    kind = type(value)
    if kind is numpy.ndarray:
        order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        description = _describe(value.dtype)
        content = [description, list(value.shape), _base64(value.tobytes(order))]
        return "^ndarray", [*content, "F"] if order == "F" else content
    # The array form of these drops trailing nulls, and has no room for empty ones.
    if kind is numpy.str_:
        return "^npstr", _base64(str.__str__(value).encode("utf-8", "surrogatepass"))
    if kind is numpy.bytes_:
        return "^npbytes", _base64(bytes(value))
    return "^npscalar", [_describe(value.dtype), _base64(value.tobytes())]


def load(tag: str, content: Any) -> Any:
    """Rebuild an array or scalar. Raises Undecodable for hostile content."""
    numpy = _numpy()
    if tag == "^npstr":
        return numpy.str_(_bytes(content).decode("utf-8", "surrogatepass"))
    if tag == "^npbytes":
        return numpy.bytes_(_bytes(content))
    if tag == "^npscalar":
        description, data = content
        return _array(numpy, _dtype(numpy, description), [], data, "C")[()]
    description, shape, data = content[:3]
    order = "C" if len(content) == 3 else content[3]
    if order not in ("C", "F") or len(content) > 4:
        raise Undecodable("a stored array has no known order")
    return _array(numpy, _dtype(numpy, description), shape, data, order)


def _array(numpy: Any, dtype: Any, shape: Any, data: Any, order: str) -> Any:
    if type(shape) is not list or len(shape) > _DIMENSIONS_MAX:
        raise Undecodable("a stored array has no valid shape")
    if any(type(size) is not int or size < 0 for size in shape):
        raise Undecodable("a stored array has no valid shape")
    raw = _bytes(data)
    if dtype.itemsize == 0 or prod(shape) * dtype.itemsize != len(raw):
        raise Undecodable(f"a stored array of shape {str(shape)[:100]} does not fit its {len(raw)} bytes")
    flat = numpy.frombuffer(raw, dtype=dtype) if raw else numpy.empty(0, dtype)
    return flat.reshape(shape, order=order).copy(order="K")  # a copy, because the bytes are read-only


def _describe(dtype: Any) -> str:
    if dtype.hasobject:
        raise Unfit("an array of Python objects cannot be kept; use a list, or an array of numbers")
    # Structured types, and types that other libraries add to numpy (bfloat16, …), describe themselves as bytes.
    description = str(dtype.str)
    if dtype.itemsize == 0 or not _SIMPLE.fullmatch(description) or sys.modules["numpy"].dtype(description) != dtype:
        raise Unfit(f"the dtype {dtype} cannot be kept; convert it to a standard one with .astype()")
    return description


def _dtype(numpy: Any, description: Any) -> Any:
    if type(description) is not str or not _SIMPLE.fullmatch(description):
        raise Undecodable(f"a stored array has the dtype {str(description)[:50]!r}, which is not a known one")
    return numpy.dtype(description)


def _numpy() -> Any:
    try:
        return importlib.import_module("numpy")
    except ImportError as problem:
        raise UnknownType(
            "a stored value is a numpy array, and numpy is not installed here: pip install numpy",
            type_name="numpy.ndarray",
        ) from problem


def _base64(data: bytes) -> str:
    return b2a_base64(data, newline=False).decode("ascii")


def _bytes(text: Any) -> bytes:
    if type(text) is not str:
        raise Undecodable("stored bytes are not in base64")
    return a2b_base64(text, strict_mode=True)
