# SPDX-License-Identifier: Apache-2.0
"""llama.cpp: restore the KV of a prompt that any worker has computed, store what was computed here.

With llama-cpp-python's high-level API it is one line::

    llm = Llama("model.gguf")
    llm.set_cache(cistern.llama.LlamaCache(llm))

With any other binding of libllama, a Session does it by hand::

    session = Session(client, ctx, "model.gguf", library=binding._lib)
    n = session.restore(tokens)      # sequence 0 now holds tokens[:n]; decode tokens[n:]
    ...
    session.store(all_tokens)        # prompt and answer, as far as they were decoded

Without a daemon, and whatever goes wrong on the way to it, restore() finds nothing and store()
stores nothing; generation goes on. `last_error` says why. Make the objects before the first decode.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from ._convert import Tokens, tokens_to_c
from ._ffi import ffi, lib, library_path, text
from .client import Client
from .descriptor import Quality
from .errors import CisternError, Misuse, Refused, Status, check, check_request
from .memory import Handle

SONAME = "libcistern-llama.so.0"


@functools.cache
def _llama() -> Any:
    """The loaded adapter library. Raises OSError with the path that was tried."""
    lib()  # first: the adapter needs this very libcistern
    path = library_path(SONAME, "CISTERN_LLAMA_LIBRARY", "client/llama")
    try:
        return ffi.dlopen(path)
    except OSError as error:
        raise OSError(
            f"can't load the llama.cpp adapter from {path}: {error}; "
            "install it or set CISTERN_LLAMA_LIBRARY"
        ) from error


def _handle_of(library: Any) -> Any:
    """The dlopen handle of libllama: of a ctypes library, of llama-cpp-python's, or none."""
    if library is None and "llama_cpp" in sys.modules:
        library = sys.modules["llama_cpp"].llama_cpp._lib
    if library is None:
        return ffi.NULL
    return ffi.cast("void *", getattr(library, "_handle", library))


def _address(pointer: Any) -> Any:
    """struct llama_context * from an int or a ctypes pointer."""
    value = getattr(pointer, "value", pointer)
    if not isinstance(value, int) or not value:
        raise ValueError("a llama_context is an address or a ctypes.c_void_p, and not null")
    return ffi.cast("struct llama_context *", value)


def _close(handle: Handle, pointer: Any) -> None:
    """Ends a C session while its client, which `handle` owns, is still there."""
    _llama().cistern_llama_close(pointer)


class Session:
    """The adapter of one llama_context; a context manager. Not thread-safe, like the context.

    `library`: the ctypes library (or dlopen handle) of libllama; default: llama-cpp-python's if it
    is imported, else what the process has loaded globally. `context_params`: "key=value;..." of the
    context parameters that change K or V and that llama.h doesn't tell (rope_freq_base,
    rope_freq_scale, yarn_*, attention_type, overrides). `adapters`: (file, scale) of each LoRA or
    control vector. Raises Refused for models that can't be cached exactly.
    """

    def __init__(
        self,
        client: Client,
        ctx: Any,
        model_path: str | os.PathLike[str],
        *,
        library: Any = None,
        block_tokens: int = 64,
        context_params: str = "",
        adapters: Iterable[tuple[str | os.PathLike[str], float]] = (),
        quality: Quality = Quality.LOSSLESS,
        salt: bytes = b"",
    ) -> None:
        self._pointer: Any = None
        self._client = client
        self.block_tokens = block_tokens
        self.last_status = Status.OK
        """How the last restore() or store() ended."""
        self.last_error = ""
        """Its sentence, if it failed."""
        files = list(adapters)
        paths = [ffi.new("char[]", os.fsencode(path)) for path, _ in files]
        keep = [
            ffi.new("char[]", os.fsencode(model_path)),
            ffi.new("char[]", context_params.encode()),
            ffi.new("const char *[]", paths),
            ffi.new("float[]", [scale for _, scale in files]),
            ffi.from_buffer("uint8_t[]", salt),
        ]
        facts = ffi.new(
            "cistern_llama_facts *",
            {
                "size": ffi.sizeof("cistern_llama_facts"),
                "block_tokens": block_tokens,
                "model_path": keep[0],
                "library": _handle_of(library),
                "context_params": keep[1],
                "adapter_paths": keep[2],
                "adapter_scales": keep[3],
                "n_adapters": len(files),
                "quality_class": int(quality),
                "salt": keep[4],
                "salt_size": len(salt),
            },
        )
        out = ffi.new("cistern_llama **")
        check(_llama().cistern_llama_open(client.pointer(), _address(ctx), facts, out))
        self._pointer = out[0]
        self._end = weakref.finalize(self, _close, client.handle(), out[0])
        self._end.atexit = False
        client._spaces.add(self)  # type: ignore[arg-type]  # closed with the client

    def _open(self) -> Any:
        if self._pointer is None:
            raise Misuse(Status.BAD_HANDLE, "the session has been closed")
        return self._pointer

    def _ended(self, status: int) -> None:
        self.last_status = Status(status)
        self.last_error = text(lib().cistern_last_error()) if status < 0 else ""
        check_request(status)

    def lookup(self, tokens: Tokens) -> int:
        """Leading tokens of a prompt that are stored: a hint, free of side effects."""
        space = _llama().cistern_llama_space(self._open())
        c_tokens, n = tokens_to_c(tokens)
        match = ffi.new("cistern_match *", {"size": ffi.sizeof("cistern_match")})
        status = lib().cistern_lookup(space, c_tokens, n, ffi.NULL, match)
        self._ended(status)
        return 0 if status else int(match.tokens)

    def put_step_weights(self, k: Sequence[float], v: Sequence[float]) -> int:
        """Gives the space's learned tables other weights of the quantizer's steps, one a layer
        (cistern.calibrate measures them); the new version. Raises NotFound before the daemon has
        learned tables, Denied if this user may not."""
        space = _llama().cistern_llama_space(self._open())
        weights = ffi.new("float[]", [*k, *v])
        version = ffi.new("uint32_t *")
        check(
            lib().cistern_sidedata_put(
                space, lib().CISTERN_SIDEDATA_WEIGHTS, weights, ffi.sizeof(weights), version
            )
        )
        return int(version[0])

    def restore(self, tokens: Tokens, seq: int = 0) -> int:
        """Clears sequence `seq` and loads the longest stored prefix, at most all but one token.

        Returns its length: decode from there.
        """
        return self._call(_llama().cistern_llama_restore, tokens, seq)

    def store(self, tokens: Tokens, seq: int = 0) -> int:
        """Stores the KV of `tokens`, which sequence `seq` must hold from position 0.

        Returns how many of them are stored now.
        """
        return self._call(_llama().cistern_llama_store, tokens, seq)

    def _call(self, function: Any, tokens: Tokens, seq: int) -> int:
        pointer = self._open()
        c_tokens, n = tokens_to_c(tokens)
        out = ffi.new("size_t *")
        self._ended(function(pointer, seq, ffi.cast("int32_t *", c_tokens), n, out))
        return int(out[0])

    def close(self) -> None:
        """Leaves the context as it is. Safe twice."""
        if self._pointer is not None:
            self._pointer = None
            self._end()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


# Context parameters of llama.h that change the bytes of K or V beside their types.
_PARAMETERS = (
    "ctx_type", "rope_scaling_type", "attention_type", "rope_freq_base", "rope_freq_scale",
    "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx",
)  # fmt: skip


def _context_params(llm: Any, defaults: Any) -> str:
    """What of a Llama object's parameters differs from the engine's defaults."""
    given = llm.context_params
    items = [
        f"{name}={getattr(given, name)}"
        for name in _PARAMETERS
        if getattr(given, name) != getattr(defaults, name)
    ]
    if llm.kv_overrides:
        overrides = repr(sorted(llm.kv_overrides.items())).encode()
        items.append(f"kv_overrides={hashlib.sha256(overrides).hexdigest()[:32]}")
    return ";".join(items)


def _has_images(llm: Any) -> bool:
    """A multimodal chat handler puts images into the context under token ids that don't tell them
    apart."""
    return hasattr(llm.chat_handler, "clip_model_path")


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n


class LlamaCache:
    """A cache for llama-cpp-python's Llama: ``llm.set_cache(LlamaCache(llm))``.

    Restores into the context itself, in shared memory's time, so the library finds the prompt's
    start already there; stores prompt and answer after each completion. Every process of this user
    that runs the same model file with the same parameters shares what it finds.

    `client`: default is a lazy one at the default socket (or `socket_path`). Raises Refused for
    models that can't be cached exactly; later nothing raises, see `session.last_error`.

    With logits_all=True nothing is restored, since the library then wants logits of the whole prompt;
    with a multimodal chat handler nothing is cached at all.

    The library would save its whole state after each completion, only to hand it to the cache;
    while this cache is set, that call is skipped. Calls of save_state() by others work as ever.
    """

    def __init__(
        self,
        llm: Any,
        client: Client | None = None,
        *,
        socket_path: str | os.PathLike[str] | None = None,
        block_tokens: int = 64,
        quality: Quality = Quality.LOSSLESS,
        salt: bytes = b"",
    ) -> None:
        import llama_cpp

        if _has_images(llm):
            raise Refused(
                Status.UNSUPPORTED,
                "a multimodal chat handler adds images, which token ids don't determine",
            )
        llama_cpp.BaseLlamaCache.register(LlamaCache)
        self.capacity_bytes = 0  # the daemon decides
        self._llm = weakref.ref(llm)
        self._own = client is None
        self.client = client or Client(socket_path, name="llama-cpp-python", lazy=True)
        adapters = [(llm.lora_path, llm.lora_scale)] if llm.lora_path else []
        self.session = Session(
            self.client,
            llm._ctx.ctx,
            llm.model_path,
            library=llama_cpp.llama_cpp._lib,
            block_tokens=block_tokens,
            context_params=_context_params(llm, llama_cpp.llama_context_default_params()),
            adapters=adapters,
            quality=quality,
            salt=salt,
        )
        self.restored = 0
        """Tokens that the last completion found stored."""
        llm.save_state = _save_state(llm)

    @property
    def cache_size(self) -> int:
        """Bytes that the cached blocks of this user take, in all tiers; 0 without a daemon."""
        try:
            stats = self.client.stats()
        except CisternError:
            return 0
        return int(stats["hot_bytes"]) + int(stats["packed_bytes"])

    def __contains__(self, key: Sequence[int]) -> bool:
        try:
            return self.session.lookup(key) > 0
        except CisternError:
            return False

    def __getitem__(self, key: Sequence[int]) -> Any:
        """Puts the longest stored prefix into the context; then always raises KeyError, since there
        is no state left to load."""
        llm = self._llm()
        self.restored = 0
        if llm is not None and not llm._logits_all and not _has_images(llm):
            try:
                self._restore(llm, list(key))
            except CisternError:
                pass
        raise KeyError("what is stored is in the context already")

    def _restore(self, llm: Any, tokens: list[int]) -> None:
        present = _common_prefix(llm.input_ids[: llm.n_tokens].tolist(), tokens)
        if min(self.session.lookup(tokens), len(tokens) - 1) <= present:
            return  # the context itself is as warm
        llm.n_tokens = 0
        llm._requires_eval = True
        n = self.session.restore(tokens)
        llm.input_ids[:n] = tokens[:n]
        llm.n_tokens = n
        self.restored = n

    def __setitem__(self, key: Sequence[int], value: Any) -> None:
        """Stores what the context holds: the prompt and the answer, as far as it was decoded."""
        llm = self._llm()
        if llm is None or _has_images(llm):
            return
        try:
            self.session.store(llm.input_ids[: llm.n_tokens].tolist())
        except CisternError:
            pass

    def close(self) -> None:
        """Ends the session, and the client if it was made here. Safe twice."""
        self.session.close()
        if self._own:
            self.client.close()


def _save_state(llm: Any) -> Any:
    """save_state() of an object: nothing while a completion hands its state to a LlamaCache."""
    original = type(llm).save_state
    owner = weakref.ref(llm)

    def save_state() -> Any:
        llm = owner()
        caller = sys._getframe(1).f_code.co_name
        if caller == "_create_completion" and isinstance(getattr(llm, "cache", None), LlamaCache):
            return None
        return original(llm)

    return save_state
