# SPDX-License-Identifier: Apache-2.0
"""Leases and slots: shared memory in Python's hands.

Memory safety first. A memoryview of a lease may be sliced, wrapped by numpy, kept. The C lease is
given back when the *last* such view is gone; until then the memory stays mapped, even if the client
has been closed. So release() ends the use of the Lease object at once and the lease itself as soon
as nobody can touch its bytes any more: no dangling pointer, no exception in a `with`.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from ._convert import Keys, Numbers, surprisals_to_c
from ._ffi import ffi, lib
from .descriptor import Tier
from .errors import Misuse, Status, check, check_request

if TYPE_CHECKING:
    import numpy

    from .client import Space, Submission


_handles: weakref.WeakSet[Handle] = weakref.WeakSet()


def _after_fork() -> None:
    """In the child: a thread that is not there any more may have held these locks."""
    for handle in list(_handles):
        handle._lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


class Handle:
    """Owns one cistern_client *. Lives until the client is closed and no exported memory is left."""

    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer
        self.lib = lib()
        self.leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self.submissions: dict[int, Submission] = {}  # the library's thread uses their buffers
        self._lock = threading.RLock()  # re-entered by finalizers
        self._given_back: list[Any] = []
        self._holds = 0
        _handles.add(self)

    def export(self, address: Any, size: int, back: Callable[[], None] | None) -> Any:
        """A buffer object over shared memory. `back` is called when it and all its views are gone."""
        exporter = ffi.buffer(ffi.cast("char *", address), size)
        finalizer = weakref.finalize(exporter, _forget, self, back)
        finalizer.atexit = False  # the end of the process ends every lease
        return exporter

    def give_back(self, lease: Any) -> None:
        """Releases a lease, at once or with the batch that is open."""
        with self._lock:
            self._given_back.append(lease)
            if not self._holds:
                self._flush()

    def __enter__(self) -> None:
        """Opens a batch: what is given back inside goes to the daemon in one packet."""
        with self._lock:
            self._holds += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._holds -= 1
            if not self._holds:
                self._flush()

    def take_back(self) -> list[Any]:
        """What the open batch has given back so far, for the caller to release."""
        leases: list[Any] = []
        with self._lock:
            # nothing is allocated in between: a finalizer that ran here would take them, too
            leases, self._given_back = self._given_back, leases
            return leases

    def _flush(self) -> None:
        leases = self.take_back()
        if leases and self.pointer is not None:
            self.lib.cistern_release(self.pointer, leases, len(leases))

    def __del__(self) -> None:
        pointer, self.pointer = getattr(self, "pointer", None), None
        if pointer is not None and not sys.is_finalizing():
            self.lib.cistern_client_close(pointer)


def _forget(handle: Handle, back: Callable[[], None] | None) -> None:
    if back:
        back()


class _Memory:
    """A view that can be taken away."""

    __slots__ = ("_exporter", "_view")

    def __init__(self, exporter: Any, *, readonly: bool) -> None:
        self._exporter = exporter
        view = memoryview(exporter)
        self._view: memoryview | None = view.toreadonly() if readonly else view

    def view(self, what: str) -> memoryview:
        if self._view is None:
            raise Misuse(Status.BAD_HANDLE, f"the {what} has been released")
        return self._view

    def drop(self) -> None:
        view, self._view, self._exporter = self._view, None, None
        if view is not None:
            try:
                view.release()
            except BufferError:
                pass  # something was made from it; the last such thing gives the memory back


class Lease:
    """The right to read one block until released.

    ``lease.data`` is its read-only memory, zero copy: block_bytes bytes (a frame, if `packed`).
    A context manager; leaving it releases.
    """

    __slots__ = ("key", "tokens", "tier", "packed", "slab", "offset", "crc32c",
                 "_handle", "_memory", "_pointer", "_block_bytes", "__weakref__")  # fmt: skip

    def __init__(self, handle: Handle, key: bytes, pointer: Any, block_bytes: int) -> None:
        data, size = ffi.new("void **"), ffi.new("size_t *")
        info = ffi.new("cistern_lease_info *", {"size": ffi.sizeof("cistern_lease_info")})
        status = handle.lib.cistern_lease_data(pointer, ffi.cast("void **", data), size, info)
        if status < 0:
            handle.give_back(pointer)
            check(status)
        self.key = key
        """The block's key."""
        self.tokens: int = info.tokens
        """Tokens the block holds; fewer than block_tokens in a tail block."""
        self.tier = Tier(info.tier)
        """Where the bytes were found."""
        self.packed = bool(info.packed)
        """The bytes are an encoded frame: see decode()."""
        self.slab: int = info.slab
        self.offset: int = info.offset
        """Bytes from the start of the slab."""
        self.crc32c: int = info.crc32c
        self._handle: Handle | None = handle
        self._pointer = pointer
        self._block_bytes = block_bytes
        exporter = handle.export(data[0], size[0], lambda: handle.give_back(pointer))
        self._memory = _Memory(exporter, readonly=True)
        handle.leases.add(self)

    @property
    def data(self) -> memoryview:
        """The leased bytes, read-only. Raises after release()."""
        return self._memory.view("lease")

    @property
    def address(self) -> int:
        """Where the bytes are mapped in this process."""
        return int(ffi.cast("uintptr_t", ffi.from_buffer(self.data)))

    def __len__(self) -> int:
        return len(self.data)

    def __buffer__(self, flags: int) -> memoryview:  # Python 3.12: memoryview(lease)
        return self.data

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> numpy.ndarray[Any, Any]:
        """numpy.asarray(lease): the bytes, or `dtype` elements."""
        import numpy

        out = numpy.frombuffer(self.data, numpy.uint8 if dtype is None else dtype)
        return out.copy() if copy else out

    def decode(self, into: Any = None) -> memoryview:
        """The decoded block: `data` itself, or for a packed lease decoded by this process into
        `into` (a writable buffer of block_bytes; a new bytearray by default)."""
        if not self.packed:
            return self.data
        target = bytearray(self._block_bytes) if into is None else into
        out = ffi.from_buffer("char[]", target, require_writable=True)
        with memoryview(self.data):  # whoever releases the lease now, it ends after the call
            check(lib().cistern_lease_decode(self._pointer, out, len(out)))
        return memoryview(target).cast("B")

    @property
    def released(self) -> bool:
        return self._handle is None

    def release(self) -> None:
        """Gives the lease back. Safe twice; the object's data is unusable afterwards."""
        self._handle = None
        self._memory.drop()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self.released else f"{self.tokens} tokens, {self.tier.name.lower()}"
        return f"<Lease {state}>"


class Leases(Sequence["Lease | None"]):
    """What acquire() got: one entry per key, None where `statuses` says why not.

    A context manager; leaving it releases all, in one packet.
    """

    def __init__(
        self,
        handle: Handle,
        leases: list[Lease | None],
        statuses: list[Status],
        tokens: int = 0,
        blocks: int = 0,
    ) -> None:
        self._handle = handle
        self._leases = leases
        self.statuses = statuses
        """One status per key."""
        self.tokens = tokens
        """fetch(): leading tokens of the prompt that these blocks cover; else 0."""
        self.blocks = blocks
        """fetch(): leading blocks of the prompt that are stored as they are: put() the rest with
        ``start=hit.blocks``. A last block that matches in part is not one of them."""

    @overload
    def __getitem__(self, index: int) -> Lease | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[Lease | None]: ...
    def __getitem__(self, index: int | slice) -> Lease | None | list[Lease | None]:
        return self._leases[index]

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease | None]:
        return iter(self._leases)

    def leading(self) -> list[Lease]:
        """The leases before the first key that failed."""
        out: list[Lease] = []
        for lease in self._leases:
            if lease is None:
                break
            out.append(lease)
        return out

    def release(self) -> None:
        """Releases every lease. Safe twice."""
        with self._handle:
            for lease in self._leases:
                if lease is not None:
                    lease.release()

    def __enter__(self) -> Leases:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class _Reservation:
    """C slots that nobody has committed or aborted yet. Views of their memory keep it, so that no
    other slot gets memory that somebody may still write to; the last one gives the slots up."""

    __slots__ = ("end", "__weakref__")

    def __init__(self, handle: Handle, space: Any, slots: Sequence[Any]) -> None:
        self.end = weakref.finalize(self, _abort, handle, space, slots)
        self.end.atexit = False

    def stays(self) -> None:
        """Called when one of its memories is gone."""


def _abort(handle: Handle, space: Any, slots: Sequence[Any]) -> None:
    if slots:
        handle.lib.cistern_abort(space, slots, len(slots))


class Slot:
    """Room for one block: `data` is block_bytes bytes of writable memory, contents unspecified.

    Don't touch what was made of it after commit: the memory may belong to another slot of this
    process then, or, when the daemon was lost, be gone.
    """

    __slots__ = ("key", "_memory")

    def __init__(
        self, handle: Handle, key: bytes, pointer: Any, reservation: _Reservation
    ) -> None:
        data, size = ffi.new("void **"), ffi.new("size_t *")
        check(handle.lib.cistern_slot_data(pointer, data, size))
        self.key = key
        exporter = handle.export(data[0], size[0], reservation.stays)
        self._memory = _Memory(exporter, readonly=False)

    @property
    def data(self) -> memoryview:
        """Writable memory of the block. Raises after commit() or abort()."""
        return self._memory.view("slot")

    def __buffer__(self, flags: int) -> memoryview:
        return self.data


class Slots(Sequence["Slot | None"]):
    """What reserve() got: one entry per key, None where `statuses` says why not (PRESENT: stored
    already). A context manager: leaving it without commit() aborts, and so does losing it with all
    views of its memory."""

    def __init__(
        self, space: Space, handle: Handle, keys: Keys, pointers: Any, statuses: list[Status]
    ) -> None:
        self._space: Space | None = space
        self._pointers = [pointer for pointer in pointers if pointer != ffi.NULL]
        self._where = [i for i, pointer in enumerate(pointers) if pointer != ffi.NULL]
        self._reservation = _Reservation(handle, space.pointer(), self._pointers)
        self.statuses = statuses
        """One status per key: of reserve(), then of commit()."""
        self._slots: list[Slot | None] = []
        try:
            for i, key in enumerate(keys):
                pointer = pointers[i]
                self._slots.append(
                    Slot(handle, key, pointer, self._reservation) if pointer != ffi.NULL else None
                )
        except BaseException:
            self.abort()
            raise
        space.open_slots.add(self)

    @overload
    def __getitem__(self, index: int) -> Slot | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[Slot | None]: ...
    def __getitem__(self, index: int | slice) -> Slot | None | list[Slot | None]:
        return self._slots[index]

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot | None]:
        return iter(self._slots)

    def commit(self, surprisals: Numbers | None = None, prediction: int = 0) -> list[Status]:
        """Publishes the slots, parents first; returns `statuses`, updated.

        OK: stored and visible. PENDING: stored, visible when its parent is. PRESENT: another writer
        was first. PARENT_MISSING: an ancestor was given up. `surprisals` are bits per token, for
        all tokens of the given slots in order, by the predictor `prediction` (0: the engine).
        """
        options = ffi.NULL
        keep: Any = None
        if surprisals is not None:  # before the slots are taken: what is wrong here raises
            keep, n = surprisals_to_c(surprisals)
            options = ffi.new(
                "cistern_commit_options *",
                {
                    "size": ffi.sizeof("cistern_commit_options"),
                    "prediction": prediction,
                    "surprisals": keep,
                    "n_surprisals": n,
                },
            )
        space = self._take()
        if not self._where:
            return self.statuses
        results = ffi.new("int32_t[]", len(self._where))
        whole = check_request(
            lib().cistern_commit(
                space.pointer(), self._pointers, len(self._where), options, results
            )
        )
        for i, result in zip(self._where, results, strict=True):
            self.statuses[i] = Status(result) if whole == Status.OK else whole
        return self.statuses

    def abort(self) -> None:
        """Gives the slots up. Safe twice and after commit()."""
        if self._space is None:
            return
        space = self._take()
        if self._where:
            lib().cistern_abort(space.pointer(), self._pointers, len(self._where))

    def _take(self) -> Space:
        """Ends the use of the slots."""
        space, self._space = self._space, None
        if space is None:
            raise Misuse(Status.BAD_HANDLE, "the slots have been committed or aborted")
        self._reservation.end.detach()
        for slot in self._slots:
            if slot is not None:
                slot._memory.drop()
        return space

    def __enter__(self) -> Slots:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()
