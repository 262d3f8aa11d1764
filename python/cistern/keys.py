# SPDX-License-Identifier: Apache-2.0
"""Keys without a space: single links and foreign keys. No daemon needed."""

from __future__ import annotations

from ._convert import KEY_SIZE, Tokens, tokens_to_c
from ._ffi import ffi, lib
from .errors import check


def key_block(parent: bytes, tokens: Tokens, extra: bytes = b"") -> bytes:
    """One link of a chain: the key of a block of `tokens` under `parent`. `extra` enters the hash
    (multimodal ids and the like; such blocks belong in flat spaces)."""
    if len(parent) != KEY_SIZE:
        raise ValueError(f"a key has {len(parent)} bytes instead of {KEY_SIZE}")
    c_tokens, n = tokens_to_c(tokens)
    out = ffi.new("uint8_t[32]")
    c_parent = ffi.from_buffer("uint8_t[]", parent)
    c_extra = ffi.from_buffer("uint8_t[]", extra)
    check(lib().cistern_key_block(c_parent, c_tokens, n, c_extra, len(extra), out))
    return bytes(out)


def key_from_bytes(data: bytes) -> bytes:
    """A key for flat spaces from any bytes (an engine's own block hash)."""
    out = ffi.new("uint8_t[32]")
    check(lib().cistern_key_from_bytes(ffi.from_buffer("uint8_t[]", data), len(data), out))
    return bytes(out)
