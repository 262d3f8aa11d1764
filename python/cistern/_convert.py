# SPDX-License-Identifier: Apache-2.0
"""What callers may pass (lists, buffers, numpy arrays) into C arrays, without a copy where the
memory fits already. Every function returns an object that must stay alive during the C call."""

from __future__ import annotations

import array
import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Union, overload

from ._ffi import ffi

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

KEY_SIZE = 32


class Keys(Sequence[bytes]):
    """Keys in one run of bytes, 32 each. A slice is again Keys; an item is bytes."""

    __slots__ = ("raw",)

    def __init__(self, raw: bytes = b"") -> None:
        if len(raw) % KEY_SIZE:
            raise ValueError(f"{len(raw)} bytes are not a whole number of {KEY_SIZE}-byte keys")
        self.raw = raw
        """The keys, contiguous."""

    @classmethod
    def of(cls, keys: KeysLike) -> Keys:
        """Keys from Keys, contiguous bytes, or an iterable of 32-byte keys."""
        if isinstance(keys, Keys):
            return keys
        if isinstance(keys, (bytes, bytearray, memoryview)):
            return cls(bytes(keys))
        items = list(keys)
        for item in items:
            if len(item) != KEY_SIZE:
                raise ValueError(f"a key has {len(item)} bytes instead of {KEY_SIZE}")
        return cls(b"".join(items))

    def __len__(self) -> int:
        return len(self.raw) // KEY_SIZE

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Keys: ...
    def __getitem__(self, index: int | slice) -> bytes | Keys:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return Keys(self.raw[start * KEY_SIZE : max(start, stop) * KEY_SIZE])
            return Keys.of([self[i] for i in range(start, stop, step)])
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError("key index out of range")
        return self.raw[index * KEY_SIZE : (index + 1) * KEY_SIZE]

    def __add__(self, other: Keys) -> Keys:
        return Keys(self.raw + other.raw)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keys) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __repr__(self) -> str:
        return f"<{len(self)} keys>"


KeysLike = Union[Keys, bytes, bytearray, memoryview, Iterable[bytes]]
"""Keys, their contiguous bytes, or any iterable of 32-byte keys."""

Tokens = Any
"""Token ids: a sequence of ints or a one-dimensional buffer of integers (numpy, array)."""

Numbers = Any
"""Surprisals: a sequence of floats or a one-dimensional buffer of float16, float32 or float64."""


def _as_view(values: object) -> memoryview | None:
    """The buffer of an object, one-dimensional and contiguous; None if it isn't such a thing."""
    try:
        view = memoryview(values)  # type: ignore[arg-type]
    except TypeError:
        return None
    return view if view.ndim == 1 and view.contiguous else None


def tokens_view(tokens: Tokens) -> memoryview:
    """Token ids as a buffer of uint32. A negative or fractional id is refused."""
    view = _as_view(tokens)
    if view is not None and view.format in ("I", "<I"):
        return view
    items = view if view is not None else tokens
    try:
        if hasattr(tokens, "tolist"):  # numpy knows more formats than memoryview
            items = tokens.tolist()
        return memoryview(array.array("I", items))
    except (OverflowError, TypeError, NotImplementedError) as error:
        raise ValueError(f"token ids are integers from 0 to 4294967295: {error}") from error


def tokens_to_c(tokens: Tokens) -> tuple[Any, int]:
    """const uint32_t * and the number of tokens."""
    view = tokens_view(tokens)
    return ffi.from_buffer("uint32_t[]", view), len(view)


def surprisals_to_c(values: Numbers) -> tuple[Any, int]:
    """const uint16_t * of IEEE half floats and how many."""
    view = _as_view(values)
    if view is None or view.format not in ("e", "<e"):
        items = view if view is not None else values
        numbers = items.tolist() if hasattr(items, "tolist") else list(items)
        view = memoryview(struct.pack(f"<{len(numbers)}e", *numbers)).cast("H")
    else:
        view = view.cast("B").cast("H")
    return ffi.from_buffer("uint16_t[]", view), len(view)


def keys_to_c(keys: Keys) -> Any:
    """const uint8_t * of n x 32 bytes."""
    return ffi.from_buffer("uint8_t[]", keys.raw)


class Buffers:
    """Parallel arrays of addresses and sizes over buffers that stay exported while this lives.

    `buffers` is an iterable of buffers, or one contiguous buffer that is cut into n equal parts.
    """

    def __init__(
        self, buffers: Iterable[ReadableBuffer] | ReadableBuffer, n: int, *, writable: bool = False
    ) -> None:
        whole = None if isinstance(buffers, (list, tuple)) else _bytes_view(buffers)
        if whole is not None:
            if n and len(whole) % n:
                raise ValueError(f"{len(whole)} bytes don't divide into {n} equal blocks")
            part = len(whole) // n if n else 0
            parts = [whole[i * part : (i + 1) * part] for i in range(n)]
        else:
            parts = []
            for item in buffers:  # type: ignore[union-attr]
                view = _bytes_view(item)
                if view is None:
                    raise TypeError(f"a block is a contiguous buffer, not {type(item).__name__}")
                parts.append(view)
        if len(parts) != n:
            raise ValueError(f"{len(parts)} blocks for {n} keys")
        self._keep = [ffi.from_buffer("char[]", part, require_writable=writable) for part in parts]
        self.pointers = ffi.new("void *[]", [ffi.cast("void *", item) for item in self._keep])
        self.sizes = ffi.new("size_t[]", [len(part) for part in parts])

    def require(self, size: int) -> None:
        """Raises unless every buffer has exactly this size."""
        for i, part in enumerate(self.sizes):
            if part != size:
                raise ValueError(f"block {i} has {part} bytes instead of {size}")


def _bytes_view(item: object) -> memoryview | None:
    try:
        view = memoryview(item)  # type: ignore[arg-type]
    except TypeError:
        return None
    if not view.c_contiguous:
        raise ValueError("a block must be C-contiguous")
    return view.cast("B") if view.nbytes else memoryview(b"")
