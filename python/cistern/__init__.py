# SPDX-License-Identifier: Apache-2.0
"""Share transformer KV caches between the processes of one host through cisternd.

    import cistern

    layout = cistern.Descriptor.rows(layers=32, kv_heads=8, head_dim=128, content_id=model_sha256)
    with cistern.Client() as client, client.space(layout) as space:
        with space.fetch(prompt) as hit:                 # leases of the longest stored prefix
            for lease in hit:
                use(lease.data)                          # read-only memoryview, zero copy
            compute(prompt[hit.tokens:])
        space.put(prompt, blocks, start=hit.blocks)      # others see it from now on

A lost daemon is a miss, never an exception: `fetch` finds nothing, `put` answers DISCONNECTED.
"""

from ._convert import KEY_SIZE, Keys
from ._ffi import lib as _lib
from ._ffi import text as _text
from .client import Client, Match, SideData, Space, Submission
from .descriptor import (
    Descriptor,
    DType,
    Kind,
    Layer,
    Quality,
    Rope,
    Scaling,
    Scope,
    Segment,
    Tensor,
    Tier,
)
from .errors import CisternError, Disconnected, Forked, Full, Misuse, Refused, Status
from .keys import key_block, key_from_bytes
from .memory import Lease, Leases, Slot, Slots

__all__ = [
    "KEY_SIZE",
    "CisternError",
    "Client",
    "DType",
    "Descriptor",
    "Disconnected",
    "Forked",
    "Full",
    "Keys",
    "Kind",
    "Layer",
    "Lease",
    "Leases",
    "Match",
    "Misuse",
    "Quality",
    "Refused",
    "Rope",
    "Scaling",
    "Scope",
    "Segment",
    "SideData",
    "Slot",
    "Slots",
    "Space",
    "Status",
    "Submission",
    "Tensor",
    "Tier",
    "abi_version",
    "key_block",
    "key_from_bytes",
    "version",
]


def version() -> str:
    """The version of the loaded libcistern."""
    return _text(_lib().cistern_version())


def abi_version() -> int:
    """The ABI version of the loaded libcistern."""
    return int(_lib().cistern_abi_version())
