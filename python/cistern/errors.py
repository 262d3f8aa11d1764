# SPDX-License-Identifier: Apache-2.0
"""Status codes and exceptions.

Two channels. Calls on the path of a request (`lookup`, `acquire`, `fetch`, `get_into`, `put`,
`commit`, `touch`) never raise because of the state of the daemon: a lost, full or stopping daemon
reads as a miss and shows in the statuses. They raise for mistakes of the caller. Calls that manage
(opening, `ping`, `pin`, `erase`, `explain`, `stats`) raise whatever went wrong.
"""

from __future__ import annotations

import enum

from ._ffi import lib, text


class Status(enum.IntEnum):
    """Per-key and per-call results; the numbers of cistern.h."""

    OK = 0
    NOT_FOUND = -1
    PENDING = -2
    PARENT_MISSING = -3
    PRESENT = -4
    KEY_BUSY = -5
    KEY_MISMATCH = -6
    BAD_VERSION = -21
    BAD_ARGUMENT = -25
    BAD_DESCRIPTOR = -26
    BAD_HANDLE = -27
    BAD_STATE = -28
    DENIED = -30
    UNSUPPORTED = -31
    TOO_LARGE = -32
    BUSY = -40
    QUOTA = -41
    NO_MEMORY = -42
    DRAINING = -60
    INTERNAL = -61
    DISCONNECTED = -80
    FORKED = -81
    TIMEOUT = -82
    UNTRUSTED_SERVER = -83
    CORRUPT = -84
    SYSTEM = -85
    ENGINE = -86
    UNKNOWN = -0x7FFFFFFF
    """A status that this version of the package has no name for."""

    @classmethod
    def _missing_(cls, value: object) -> Status:
        return cls.UNKNOWN

    @property
    def sentence(self) -> str:
        """The library's sentence for this status."""
        return text(lib().cistern_status_text(int(self)))


class CisternError(Exception):
    """A call failed. `status` says how, the text is libcistern's sentence."""

    def __init__(self, status: int, sentence: str = "") -> None:
        self.status = Status(status)
        super().__init__(sentence or self.status.sentence)


class Disconnected(CisternError):
    """No daemon answers (DISCONNECTED, TIMEOUT, DRAINING)."""


class Refused(CisternError):
    """The daemon is not ours or says no (UNTRUSTED_SERVER, DENIED, BAD_VERSION, UNSUPPORTED)."""


class Full(CisternError):
    """A limit or a quota (BUSY, QUOTA, NO_MEMORY, TOO_LARGE)."""


class Forked(CisternError):
    """The handle was opened by the parent process; open a client of your own."""


class Misuse(CisternError, ValueError):
    """An argument, a handle or the order of calls is wrong (the BAD_* statuses)."""


_CLASSES: dict[Status, type[CisternError]] = {
    Status.DISCONNECTED: Disconnected,
    Status.TIMEOUT: Disconnected,
    Status.DRAINING: Disconnected,
    Status.UNTRUSTED_SERVER: Refused,
    Status.DENIED: Refused,
    Status.BAD_VERSION: Refused,
    Status.UNSUPPORTED: Refused,
    Status.BUSY: Full,
    Status.QUOTA: Full,
    Status.NO_MEMORY: Full,
    Status.TOO_LARGE: Full,
    Status.FORKED: Forked,
    Status.BAD_ARGUMENT: Misuse,
    Status.BAD_DESCRIPTOR: Misuse,
    Status.BAD_HANDLE: Misuse,
    Status.BAD_STATE: Misuse,
}

# What must reach the caller even on the path of a request: its own mistakes.
_MISTAKES = frozenset(
    {
        Status.BAD_ARGUMENT,
        Status.BAD_DESCRIPTOR,
        Status.BAD_HANDLE,
        Status.BAD_STATE,
        Status.DENIED,
        Status.UNSUPPORTED,
        Status.TOO_LARGE,
        Status.FORKED,
        Status.UNKNOWN,
    }
)


def error(status: int) -> CisternError:
    """The exception for a failed call, with the calling thread's sentence."""
    kind = _CLASSES.get(Status(status), CisternError)
    return kind(status, text(lib().cistern_last_error()))


def check(status: int) -> None:
    """Raises unless the call succeeded."""
    if status < 0:
        raise error(status)


def check_request(status: int) -> Status:
    """Raises for mistakes of the caller; anything else is a miss and is returned."""
    result = Status(status)
    if result in _MISTAKES:
        raise error(status)
    return result
