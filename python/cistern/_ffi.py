# SPDX-License-Identifier: Apache-2.0
"""The declarations of libcistern and the loaded library (cffi, ABI mode).

`cdef.txt` holds the declarations of cistern.h and llama.h; a test compares it with the headers.
The library is opened at the first call that needs it, from the first of

1. ``$CISTERN_LIBRARY``, a path;
2. the build tree, when the package runs from a checkout;
3. the soname, through the system's loader.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import cffi

_HERE = Path(__file__).resolve().parent
SONAME = "libcistern.so.0"

ffi: Any = cffi.FFI()
ffi.cdef((_HERE / "cdef.txt").read_text(encoding="utf-8"))


def library_path(soname: str = SONAME, variable: str = "CISTERN_LIBRARY", folder: str = "client") -> str:
    """Where a library of this project would be loaded from: a path, or the soname."""
    configured = os.environ.get(variable)
    if configured:
        return configured
    built = _HERE.parents[1] / "build" / folder / soname
    return str(built) if built.exists() else soname


@functools.cache
def lib() -> Any:
    """The loaded library. Raises OSError with the path that was tried."""
    path = library_path()
    try:
        return ffi.dlopen(path)
    except OSError as error:
        raise OSError(
            f"can't load libcistern from {path}: {error}; install it or set CISTERN_LIBRARY"
        ) from error


def text(pointer: Any) -> str:
    """A C string as str; NULL reads as the empty string."""
    if pointer == ffi.NULL:
        return ""
    data: bytes = ffi.string(pointer)
    return data.decode("utf-8", "replace")
