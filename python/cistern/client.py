# SPDX-License-Identifier: Apache-2.0
"""Client and Space: the calls of libcistern with Python's types.

Threads: every object may be used from any thread; the interpreter lock is released during calls.
Fork: a client made before fork() raises Forked in the child; open one there.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ._convert import Buffers, Keys, KeysLike, Tokens, keys_to_c, tokens_to_c, tokens_view
from ._ffi import ffi, lib, text
from .descriptor import Descriptor, Kind, Quality, Scope, Tier
from .errors import Misuse, Status, check, check_request
from .memory import Handle, Lease, Leases, Slots

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_ASYNC, _LAZY = 1, 2
_JSON_CAP = 1 << 20
_TABLES, _WEIGHTS = 0, 1  # CISTERN_SIDEDATA_*


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt is stored (cistern_match)."""

    tokens: int
    """Leading tokens that are stored: blocks * block_tokens + partial_tokens."""
    blocks: int
    """Leading full blocks."""
    partial_tokens: int
    """Further tokens inside one more block, full or tail."""
    partial_stored: int
    """Tokens that block holds."""
    partial_key: bytes | None
    """That block's key; None if there is none."""
    partial_tier: Tier
    worst_tier: Tier
    """The slowest tier among the leading blocks."""
    cost_ns: int
    """Expected time to fetch the leading blocks."""


@dataclass(frozen=True, slots=True)
class SideData:
    """One version of the tables that frames of a space refer to (docs/codec-format.md)."""

    version: int
    sha256: bytes
    data: bytes


class Submission:
    """One submitted batch. Keeps its buffers alive; results are valid once drain() returned it."""

    __slots__ = ("ticket", "done", "status", "_keep", "_results")

    def __init__(self, buffers: Buffers | None, results: Any) -> None:
        self.ticket = 0
        self.done = False
        self.status = Status.PENDING
        """Of the whole submission."""
        self._keep: tuple[Any, ...] = (buffers,)
        self._results = results

    @property
    def statuses(self) -> list[Status]:
        """One status per key (get_into, put)."""
        if self.status != Status.OK:
            return [self.status] * len(self._results)
        return [Status(value) for value in self._results]

    @property
    def tiers(self) -> list[Tier]:
        """One tier per key (lookup_each)."""
        if self.status != Status.OK:
            return [Tier.NONE] * len(self._results)
        return [Tier(value) for value in self._results]


class Client:
    """A connection to cisternd; a context manager.

    `lazy`: opening succeeds without a daemon, which is tried again at later calls. `async_`: a
    library thread serves submissions; poll `fileno()` and call `drain()`. `timeout` is in seconds,
    for one answer. `server_uid`: accept a daemon of this uid too (uid 0, the own uid and user
    cistern always are). Raises Disconnected or Refused.
    """

    def __init__(
        self,
        socket_path: str | os.PathLike[str] | None = None,
        *,
        name: str | None = None,
        lazy: bool = False,
        async_: bool = False,
        timeout: float = 10.0,
        server_uid: int | None = None,
    ) -> None:
        path = ffi.NULL if socket_path is None else ffi.new("char[]", os.fsencode(socket_path))
        label = ffi.NULL if name is None else ffi.new("char[]", name.encode())
        options = ffi.new(
            "cistern_client_options *",
            {
                "size": ffi.sizeof("cistern_client_options"),
                "flags": (_ASYNC if async_ else 0) | (_LAZY if lazy else 0),
                "socket_path": path,
                "name": label,
                "server_uid": -1 if server_uid is None else server_uid,
                "timeout_ms": max(1, round(timeout * 1000)),
            },
        )
        out = ffi.new("cistern_client **")
        check(lib().cistern_client_open(out, options))
        self._handle: Handle | None = Handle(out[0])
        self._spaces: weakref.WeakSet[Space] = weakref.WeakSet()
        self._submitting = threading.Lock()  # a ticket is registered before drain() looks for it

    def handle(self) -> Handle:
        """The C client (for extensions of this package). Raises after close()."""
        if self._handle is None:
            raise Misuse(Status.BAD_HANDLE, "the client has been closed")
        return self._handle

    def pointer(self) -> Any:
        """cistern_client * (for extensions of this package)."""
        return self.handle().pointer

    @property
    def closed(self) -> bool:
        return self._handle is None

    def close(self) -> None:
        """Closes spaces, aborts slots, releases leases, ends the connection. Safe twice.

        Views of leases that are still alive stay readable; the connection then ends with the last.
        """
        handle = self._handle
        if handle is None:
            return
        for space in list(self._spaces):
            space.close()
        with handle:
            for lease in list(handle.leases):
                lease.release()
        self._handle = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def ping(self) -> None:
        """Returns if a daemon answers; connects if needed."""
        check(lib().cistern_client_ping(self.pointer()))

    @property
    def epoch(self) -> int:
        """Random number of the daemon's run."""
        return self._info()[0]

    @property
    def namespace(self) -> str:
        """The trust domain that the daemon put us in."""
        return self._info()[1]

    def _info(self) -> tuple[int, str]:
        epoch, name = ffi.new("uint64_t *"), ffi.new("const char **")
        check(lib().cistern_client_info(self.pointer(), epoch, name))
        return int(epoch[0]), text(name[0])

    def space(
        self,
        descriptor: Descriptor,
        *,
        kind: Kind = Kind.TOKENS,
        scope: Scope = Scope.OWN,
        quality: Quality = Quality.LOSSLESS,
        salt: bytes = b"",
    ) -> Space:
        """Opens the space of a descriptor: the same in every process of the namespace."""
        return Space(self, descriptor, kind, scope, quality, salt)

    def stats(self) -> dict[str, Any]:
        """Counters of the namespace."""
        return self._stats(ffi.NULL)

    def _stats(self, space: Any) -> dict[str, Any]:
        out = ffi.new("char[]", _JSON_CAP)
        check(lib().cistern_stats(self.pointer(), space, out, _JSON_CAP))
        stats: dict[str, Any] = json.loads(text(out))
        return stats

    def fileno(self) -> int:
        """A descriptor that polls readable while completions wait (async clients); the client's."""
        fd: int = lib().cistern_client_event_fd(self.pointer())
        check(fd)
        return fd

    def drain(self, limit: int = 256) -> list[Submission]:
        """Finished submissions, without blocking."""
        handle = self.handle()
        out = ffi.new("cistern_completion[]", limit)
        n = lib().cistern_client_drain(handle.pointer, out, limit)
        check(n)
        with self._submitting:
            done = [handle.submissions.pop(out[i].ticket) for i in range(n)]
        for i, submission in enumerate(done):
            submission.status = Status(out[i].status)
            submission.done = True
            submission._keep = ()
        return done

    def _submit(self, submission: Submission, call: Any, *arguments: Any) -> Submission:
        ticket = ffi.new("uint64_t *")
        submission._keep += arguments  # keys and tokens are read later, too
        with self._submitting:
            check(call(*arguments, submission._results, ticket))
            submission.ticket = ticket[0]
            self.handle().submissions[submission.ticket] = submission
        return submission

    def __repr__(self) -> str:
        return "<Client closed>" if self.closed else "<Client>"


class Space:
    """All blocks of one model layout, kind and quality class; a context manager.

    Token spaces address blocks by the prompt: `lookup`, `fetch`, `put`, `reserve` take all token
    ids of a prompt; `keys` gives its chain. Flat spaces take keys.
    """

    def __init__(
        self,
        client: Client,
        descriptor: Descriptor,
        kind: Kind,
        scope: Scope,
        quality: Quality,
        salt: bytes,
    ) -> None:
        self._client = client
        self.descriptor = descriptor
        self.kind = kind
        self.quality = quality
        self.open_slots: weakref.WeakSet[Slots] = weakref.WeakSet()
        c_descriptor, _keep = descriptor.to_c()
        c_salt = ffi.from_buffer("uint8_t[]", salt)
        options = ffi.new(
            "cistern_space_options *",
            {
                "size": ffi.sizeof("cistern_space_options"),
                "kind": int(kind),
                "scope": int(scope),
                "quality_class": int(quality),
                "salt": c_salt,
                "salt_size": len(salt),
            },
        )
        out = ffi.new("cistern_space **")
        check(lib().cistern_space_open(client.pointer(), c_descriptor, options, out))
        self._pointer: Any = out[0]
        client._spaces.add(self)

    def pointer(self) -> Any:
        """cistern_space * (for extensions of this package). Raises after close()."""
        if self._pointer is None:
            raise Misuse(Status.BAD_HANDLE, "the space has been closed")
        return self._pointer

    @property
    def client(self) -> Client:
        return self._client

    @property
    def block_bytes(self) -> int:
        return self.descriptor.block_bytes

    @property
    def block_tokens(self) -> int:
        return self.descriptor.block_tokens

    def close(self) -> None:
        """Aborts open slots. Leases stay valid. Safe twice."""
        if self._pointer is None:
            return
        for slots in list(self.open_slots):
            slots.abort()
        pointer, self._pointer = self._pointer, None
        lib().cistern_space_close(pointer)

    def __enter__(self) -> Space:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- keys ----

    @property
    def root(self) -> bytes:
        """The parent of every first block."""
        out = ffi.new("uint8_t[32]")
        check(lib().cistern_key_root(self.pointer(), out))
        return bytes(out)

    def keys(self, tokens: Tokens, parent: bytes | None = None) -> Keys:
        """The chain: one key per full block and one for the tail, if there is one."""
        c_tokens, n = tokens_to_c(tokens)
        cap = -(-n // self.block_tokens)
        out, count = ffi.new("uint8_t[]", 32 * cap), ffi.new("size_t *")
        c_parent = ffi.NULL if parent is None else ffi.from_buffer("uint8_t[32]", parent)
        check(lib().cistern_key_chain(self.pointer(), c_parent, c_tokens, n, out, cap, count))
        return Keys(bytes(ffi.buffer(out, 32 * count[0])))

    # ---- reading ----

    def lookup(self, tokens: Tokens, keys: Keys | None = None) -> Match:
        """How much of a prompt is stored: a hint, free of side effects. No daemon: nothing."""
        c_tokens, n = tokens_to_c(tokens)
        c_keys = ffi.NULL if keys is None else keys_to_c(keys)
        if keys is not None and len(keys) < n // self.block_tokens:
            raise ValueError(f"{len(keys)} keys are fewer than the full blocks of {n} tokens")
        out = ffi.new("cistern_match *", {"size": ffi.sizeof("cistern_match")})
        if check_request(lib().cistern_lookup(self.pointer(), c_tokens, n, c_keys, out)):
            return Match(0, 0, 0, 0, None, Tier.NONE, Tier.NONE, 0)
        return Match(
            out.tokens,
            out.blocks,
            out.partial_tokens,
            out.partial_stored,
            bytes(out.partial_key) if out.partial_tokens else None,
            Tier(out.partial_tier),
            Tier(out.worst_tier),
            out.cost_ns,
        )

    def lookup_each(self, keys: KeysLike) -> list[Tier]:
        """Where each key is (flat spaces); Tier.NONE for an absent one."""
        keys = Keys.of(keys)
        tiers = ffi.new("uint8_t[]", len(keys))
        if check_request(
            lib().cistern_lookup_each(self.pointer(), keys_to_c(keys), len(keys), tiers)
        ):
            return [Tier.NONE] * len(keys)
        return [Tier(value) for value in tiers]

    def acquire(
        self,
        keys: KeysLike,
        *,
        packed: bool = False,
        layers: range | None = None,
        release: Iterable[Lease] = (),
        timeout: float | None = None,
    ) -> Leases:
        """The right to read blocks: a Lease per key, None for a miss (see `.statuses`).

        `packed`: encoded frames that this process decodes. `layers`: only these are needed.
        `release`: leases to give back in the same packet. `timeout` in seconds, for decodes.
        """
        handle, space = self._client.handle(), self.pointer()
        keys = Keys.of(keys)
        n = len(keys)
        if layers and not 0 <= layers.start < layers.stop <= len(self.descriptor.layers):
            raise ValueError(f"{layers} are not layers of {len(self.descriptor.layers)}")
        options = ffi.new(
            "cistern_acquire_options *",
            {
                "size": ffi.sizeof("cistern_acquire_options"),
                "mode": int(packed),
                "layer_first": layers.start if layers else 0,
                "layer_count": len(layers) if layers else 0,
                "timeout_ms": 0 if timeout is None else max(1, round(timeout * 1000)),
            },
        )
        pointers, results = ffi.new("cistern_lease *[]", n), ffi.new("int32_t[]", n)
        with handle:
            for lease in release:
                lease.release()
            back = ffi.new("cistern_lease *[]", handle.take_back())
        options.release, options.n_release = back, len(back)  # from here on they are the call's
        whole = check_request(
            lib().cistern_acquire(space, keys_to_c(keys), n, options, pointers, results)
        )
        if whole != Status.OK:
            return Leases(handle, [None] * n, [whole] * n)
        leases = [
            Lease(handle, key, pointer, self.block_bytes) if pointer != ffi.NULL else None
            for key, pointer in zip(keys, pointers, strict=True)
        ]
        return Leases(handle, leases, [Status(result) for result in results])

    def fetch(self, tokens: Tokens, keys: Keys | None = None) -> Leases:
        """lookup + acquire: leases of the longest stored prefix of a prompt, in order.

        The last block may match only in part: `.tokens` of the result says how many leading tokens
        of the prompt all of them cover, `.blocks` how many blocks need not be stored again. Blocks
        that vanish in between are simply not in it.
        """
        ids = tokens_view(tokens)
        keys = self.keys(ids) if keys is None else keys
        match = self.lookup(ids, keys)
        wanted = keys[: match.blocks]
        if match.partial_key is not None:
            wanted = wanted + Keys(match.partial_key)
        if not len(wanted):
            return Leases(self._client.handle(), [], [])
        got = self.acquire(wanted)
        leading = got.leading()
        with self._client.handle():
            for lease in got[len(leading) :]:
                if lease is not None:
                    lease.release()
        n = len(leading)
        blocks = min(n, match.blocks)
        covered = blocks * self.block_tokens
        if n > match.blocks:
            covered += match.partial_tokens
            blocks += wanted[blocks] == keys[blocks]  # the prompt's own tail block
        return Leases(self._client.handle(), list(leading), got.statuses[:n], covered, blocks)

    def get_into(
        self, keys: KeysLike, blocks: Iterable[WriteableBuffer] | WriteableBuffer
    ) -> list[Status]:
        """Copies block i into blocks[i] (a shorter buffer takes its first bytes)."""
        keys = Keys.of(keys)
        n = len(keys)
        buffers = Buffers(blocks, n, writable=True)
        results = ffi.new("int32_t[]", n)
        whole = check_request(
            lib().cistern_get_into(
                self.pointer(), keys_to_c(keys), n, buffers.pointers, buffers.sizes, results
            )
        )
        return [Status(result) if whole == Status.OK else whole for result in results]

    # ---- writing ----

    def put(
        self,
        tokens: Tokens,
        blocks: Sequence[ReadableBuffer] | ReadableBuffer,
        *,
        start: int = 0,
    ) -> list[Status]:
        """Stores the blocks of a prompt from block `start` on.

        `tokens` are all ids of the prompt; `blocks` one buffer of block_bytes per block, the tail
        included (zeroes for its missing tokens), or one buffer with all of them. Returns a status
        per block: OK or PRESENT are good. No daemon: DISCONNECTED, no exception.
        """
        c_tokens, parent, keys, n_tokens = self._chain(tokens, start)
        buffers = Buffers(blocks, len(keys))
        buffers.require(self.block_bytes)
        results = ffi.new("int32_t[]", len(keys))
        return self._put(parent, keys, c_tokens, n_tokens, buffers, results)

    def put_flat(
        self, keys: KeysLike, blocks: Sequence[ReadableBuffer] | ReadableBuffer
    ) -> list[Status]:
        """put() for flat spaces: a block per key."""
        keys = Keys.of(keys)
        buffers = Buffers(blocks, len(keys))
        buffers.require(self.block_bytes)
        results = ffi.new("int32_t[]", len(keys))
        return self._put(ffi.NULL, keys, ffi.NULL, 0, buffers, results)

    def _put(
        self, parent: Any, keys: Keys, tokens: Any, n_tokens: int, buffers: Buffers, results: Any
    ) -> list[Status]:
        whole = check_request(
            lib().cistern_put_from(
                self.pointer(), parent, keys_to_c(keys), tokens, n_tokens, len(keys),
                buffers.pointers, results,
            )  # fmt: skip
        )
        return [Status(result) if whole == Status.OK else whole for result in results]

    def reserve(self, tokens: Tokens, *, start: int = 0) -> Slots:
        """Room for the blocks of a prompt from block `start` on: fill `slot.data`, then commit()."""
        c_tokens, parent, keys, n_tokens = self._chain(tokens, start)
        return self._reserve(parent, keys, c_tokens, n_tokens)

    def reserve_flat(self, keys: KeysLike) -> Slots:
        """reserve() for flat spaces."""
        return self._reserve(ffi.NULL, Keys.of(keys), ffi.NULL, 0)

    def _reserve(self, parent: Any, keys: Keys, tokens: Any, n_tokens: int) -> Slots:
        n = len(keys)
        pointers, results = ffi.new("cistern_slot *[]", n), ffi.new("int32_t[]", n)
        whole = check_request(
            lib().cistern_reserve(
                self.pointer(), parent, keys_to_c(keys), tokens, n_tokens, n, pointers, results
            )
        )
        if whole != Status.OK:
            pointers = ffi.new("cistern_slot *[]", n)
        statuses = [Status(result) if whole == Status.OK else whole for result in results]
        return Slots(self, self._client.handle(), keys, pointers, statuses)

    def _chain(self, tokens: Tokens, start: int) -> tuple[Any, Any, Keys, int]:
        """Tokens and keys from block `start` on, and the key before them (NULL: the root)."""
        ids = tokens_view(tokens)
        all_keys = self.keys(ids)
        if not 0 <= start <= len(all_keys):
            raise ValueError(f"block {start} is not one of the prompt's {len(all_keys)}")
        c_tokens, n = tokens_to_c(ids[start * self.block_tokens :])
        parent = ffi.from_buffer("uint8_t[32]", all_keys[start - 1]) if start else ffi.NULL
        return c_tokens, parent, all_keys[start:], n

    # ---- care ----

    def touch(self, keys: KeysLike) -> None:
        """Marks blocks as used."""
        keys = Keys.of(keys)
        check_request(lib().cistern_touch(self.pointer(), keys_to_c(keys), len(keys)))

    def pin(self, keys: KeysLike, ttl: float) -> None:
        """Keeps blocks from eviction for `ttl` seconds, within the namespace's budget."""
        keys = Keys.of(keys)
        check(
            lib().cistern_pin(self.pointer(), keys_to_c(keys), len(keys), max(1, round(ttl * 1000)))
        )

    def unpin(self, keys: KeysLike) -> None:
        keys = Keys.of(keys)
        check(lib().cistern_unpin(self.pointer(), keys_to_c(keys), len(keys)))

    def erase(self, keys: KeysLike) -> int:
        """Removes blocks with everything below them; returns how many blocks went."""
        keys = Keys.of(keys)
        return self._erase(keys) if len(keys) else 0

    def clear(self) -> int:
        """Removes every block of the space; returns how many."""
        return self._erase(Keys())

    def _erase(self, keys: Keys) -> int:
        count = ffi.new("uint64_t *")
        check(lib().cistern_erase(self.pointer(), keys_to_c(keys), len(keys), count))
        return int(count[0])

    def explain(self, tokens: Tokens) -> str:
        """Why a prompt missed, in one sentence."""
        c_tokens, n = tokens_to_c(tokens)
        out = ffi.new("char[]", 4096)
        check(lib().cistern_explain(self.pointer(), c_tokens, n, out, 4096))
        return text(out)

    def stats(self) -> dict[str, Any]:
        """Counters of this space."""
        return self._client._stats(self.pointer())

    # ---- side data ----

    def side_data(self, version: int = 0) -> SideData | None:
        """A version of the space's learned tables, 0: the newest; None if there is none."""
        info = ffi.new("cistern_sidedata_info *", {"size": ffi.sizeof("cistern_sidedata_info")})
        status = lib().cistern_sidedata_get(self.pointer(), version, ffi.NULL, 0, info)
        if status == Status.NOT_FOUND:
            return None
        check(status)
        data = ffi.new("uint8_t[]", info.bytes)
        check(lib().cistern_sidedata_get(self.pointer(), info.version, data, info.bytes, info))
        return SideData(info.version, bytes(ffi.buffer(info.sha256)), bytes(ffi.buffer(data)))

    def put_side_data(self, data: ReadableBuffer) -> int:
        """Makes tables of a version above the newest one the newest; returns their version."""
        return self._put_side_data(_TABLES, data)

    def put_step_weights(self, k: Sequence[float], v: Sequence[float]) -> int:
        """The newest tables with other weights of the quantizer's steps, one a layer; returns the
        new version."""
        weights = ffi.new("float[]", [*k, *v])
        return self._put_side_data(_WEIGHTS, ffi.buffer(weights))

    def _put_side_data(self, kind: int, data: Any) -> int:
        version = ffi.new("uint32_t *")
        c_data = ffi.from_buffer(data)
        check(lib().cistern_sidedata_put(self.pointer(), kind, c_data, len(c_data), version))
        return int(version[0])

    # ---- submit and drain (async clients) ----

    def submit_get_into(
        self, keys: KeysLike, blocks: Iterable[WriteableBuffer] | WriteableBuffer
    ) -> Submission:
        """get_into() in the background; the buffers are kept alive until drained."""
        keys = Keys.of(keys)
        buffers = Buffers(blocks, len(keys), writable=True)
        out = Submission(buffers, ffi.new("int32_t[]", len(keys)))
        return self._client._submit(
            out, lib().cistern_submit_get_into, self.pointer(), keys_to_c(keys), len(keys),
            buffers.pointers, buffers.sizes,
        )  # fmt: skip

    def submit_put(
        self, tokens: Tokens, blocks: Sequence[ReadableBuffer] | ReadableBuffer, *, start: int = 0
    ) -> Submission:
        """put() in the background; the buffers are kept alive and must not change until drained."""
        c_tokens, parent, keys, n_tokens = self._chain(tokens, start)
        buffers = Buffers(blocks, len(keys))
        buffers.require(self.block_bytes)
        out = Submission(buffers, ffi.new("int32_t[]", len(keys)))
        return self._client._submit(
            out, lib().cistern_submit_put_from, self.pointer(), parent, keys_to_c(keys), c_tokens,
            n_tokens, len(keys), buffers.pointers,
        )  # fmt: skip

    def submit_lookup_each(self, keys: KeysLike) -> Submission:
        """lookup_each() in the background."""
        keys = Keys.of(keys)
        out = Submission(None, ffi.new("uint8_t[]", len(keys)))
        return self._client._submit(
            out, lib().cistern_submit_lookup_each, self.pointer(), keys_to_c(keys), len(keys)
        )

    def __repr__(self) -> str:
        state = "closed" if self._pointer is None else f"{self.block_bytes} bytes a block"
        return f"<Space {state}>"
