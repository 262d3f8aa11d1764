# SPDX-License-Identifier: Apache-2.0
"""A model in llama.cpp for programs that look at predictions: one context, one sequence, the keys and
values in it as arrays. Needs llama-cpp-python and numpy.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy
from numpy.typing import NDArray

Floats = NDArray[numpy.float32]
_MAGIC, _HEADER, _CELL, _TENSOR_HEAD = 0xAF143CD8, 12, 12, 12
_F32, _F16, _BF16 = 0, 1, 30  # of ggml


def to_bf16(x: Floats) -> NDArray[numpy.uint16]:
    """The bits of bf16, rounded to nearest even."""
    bits = numpy.ascontiguousarray(x).view(numpy.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(numpy.uint16)


def from_bf16(bits: NDArray[numpy.uint16]) -> Floats:
    return (bits.astype(numpy.uint32) << 16).view(numpy.float32)


class SequenceState:
    """The saved state of one sequence (version 3), whose tensors can be read and overwritten.

    Layout: client/llama/state.h. Raises ValueError for states that hold more than one plain cache.
    """

    def __init__(self, blob: NDArray[numpy.uint8]) -> None:
        self.blob = blob
        self.tokens = 0
        self._parts: list[tuple[int, int, bool, int]] = []  # offset, type, transposed, width
        try:
            self._parse()
        except IndexError as error:
            raise ValueError("the engine's state ends early") from error

    def _word(self, at: int) -> int:
        if at + 4 > len(self.blob):
            raise IndexError(at)
        return int(self.blob[at : at + 4].view(numpy.uint32)[0])

    def _parse(self) -> None:
        if self._word(0) != _MAGIC or self._word(8) != 1:
            raise ValueError("the engine's state is of a kind that can't be read here")
        n = self.tokens = self._word(_HEADER)
        at = _HEADER + 4 + _CELL * n
        cells = self.blob[_HEADER + 4 : at].view(numpy.uint32).reshape(n, 3)
        if (cells[:, 0] != numpy.arange(n)).any() or (cells[:, 1] != 1).any():
            raise ValueError("the engine's state isn't one sequence from its start")
        transposed, layers = self._word(at) != 0, self._word(at + 4)
        at += 8
        for i in range(2 * layers):
            kind, column = self._word(at), transposed and i >= layers
            size = {_F32: 4, _F16: 2, _BF16: 2}.get(kind)
            if size is None:
                raise ValueError("the cache is quantised; take f16, bf16 or f32")
            width = self._word(at + 8) if column else self._word(at + 4) // size
            at += _TENSOR_HEAD
            self._parts.append((at, kind, column, width))
            at += n * width * size
        if at != len(self.blob):
            raise ValueError("the engine's state holds more than a plain cache")

    @property
    def layers(self) -> int:
        return len(self._parts) // 2

    def _view(self, index: int) -> tuple[NDArray[Any], bool]:
        at, kind, column, width = self._parts[index]
        dtype = {_F32: numpy.float32, _F16: numpy.float16, _BF16: numpy.uint16}[kind]
        size = self.tokens * width * numpy.dtype(dtype).itemsize
        rows = self.blob[at : at + size].view(dtype)
        shaped = rows.reshape(width, -1).T if column else rows.reshape(-1, width)
        return shaped, kind == _BF16

    def get(self, layer: int, value: bool) -> Floats:
        """K (or V) of a layer: [token][head * dimension]."""
        view, bf16 = self._view(layer + value * self.layers)
        return from_bf16(view) if bf16 else view.astype(numpy.float32)

    def set(self, layer: int, value: bool, x: Floats) -> None:
        view, bf16 = self._view(layer + value * self.layers)
        view[...] = to_bf16(x) if bf16 else x


def empty_state(tokens: int, layers: int, width: int) -> SequenceState:
    """The state of a sequence in an fp32 context without flash attention (values lie in columns),
    all values zero."""
    head = numpy.zeros(_HEADER + 4 + _CELL * tokens + 8, numpy.uint8)
    words = head.view(numpy.uint32)
    words[:4] = _MAGIC, 0, 1, tokens
    cells = words[4 : 4 + 3 * tokens].reshape(tokens, 3)
    cells[:, 0], cells[:, 1] = numpy.arange(tokens), 1
    words[-2:] = 1, layers
    k, v = numpy.zeros((2, _TENSOR_HEAD + 4 * width * tokens), numpy.uint8)
    k[:_TENSOR_HEAD].view(numpy.uint32)[1] = 4 * width
    v[:_TENSOR_HEAD].view(numpy.uint32)[1:] = 4, width
    return SequenceState(numpy.concatenate([head, *[k] * layers, *[v] * layers]))


class Predictor:
    """A model and one context. Not thread-safe. Raises RuntimeError when the engine fails."""

    library = llama._lib
    """The loaded libllama."""

    def __init__(self, model_path: str | os.PathLike[str], n_ctx: int, **params: Any) -> None:
        self._quiet = llama.llama_log_callback(lambda level, text, data: None)
        llama.llama_log_set(self._quiet, ctypes.c_void_p())
        llama.llama_backend_init()
        self.model = llama.llama_model_load_from_file(
            os.fsencode(model_path), llama.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"the engine can't load {os.fspath(model_path)}")
        settings = llama.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = n_ctx, 512, 512
        settings.n_threads = settings.n_threads_batch = min(2, os.cpu_count() or 1)
        for name, value in params.items():
            setattr(settings, name, value)
        self.ctx = llama.llama_init_from_model(self.model, settings)
        if not self.ctx:
            raise RuntimeError("the engine can't make a context")
        self._vocab = llama.llama_model_get_vocab(self.model)
        self.n_vocab = int(llama.llama_vocab_n_tokens(self._vocab))

    def metadata(self, key: str) -> str:
        out = ctypes.create_string_buffer(256)
        if llama.llama_model_meta_val_str(self.model, key.encode(), out, len(out)) < 0:
            raise RuntimeError(f"the model doesn't say {key}")
        return out.value.decode()

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        out = (ctypes.c_int32 * (len(data) + 8))()
        n = llama.llama_tokenize(self._vocab, data, len(data), out, len(out), False, True)
        return list(out[:n])

    def _batches(self, tokens: Sequence[int], at: int, n_batch: int, logits: bool) -> Iterator[int]:
        """Decodes tokens from position `at`; after each batch, yields its size."""
        for i in range(0, len(tokens), n_batch):
            part = tokens[i : i + n_batch]
            batch = llama.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for k, token in enumerate(part):
                batch.token[k], batch.pos[k] = token, at + i + k
                batch.n_seq_id[k], batch.seq_id[k][0] = 1, 0
                batch.logits[k] = logits
            status = llama.llama_decode(self.ctx, batch)
            llama.llama_batch_free(batch)
            if status:
                raise RuntimeError(f"llama_decode failed with {status}")
            yield len(part)

    def cut(self, n: int) -> None:
        """Keeps the first n positions."""
        llama.llama_memory_seq_rm(llama.llama_get_memory(self.ctx), 0, n, -1)

    def prefill(self, tokens: Sequence[int]) -> SequenceState:
        """Computes tokens from position 0; the state then."""
        self.cut(0)
        for _ in self._batches(tokens, 0, 512, False):
            pass
        size = llama.llama_state_seq_get_size(self.ctx, 0)
        blob = numpy.empty(size, numpy.uint8)
        into = blob.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if llama.llama_state_seq_get_data(self.ctx, into, size, 0) != size:
            raise RuntimeError("the engine gave no state")
        return SequenceState(blob)

    def load(self, state: SequenceState) -> None:
        """The sequence is this state afterwards."""
        blob = state.blob
        data = blob.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if llama.llama_state_seq_set_data(self.ctx, data, len(blob), 0) != len(blob):
            raise RuntimeError("the engine refused a state")

    def score(self, tokens: Sequence[int], at: int, n_batch: int = 512) -> Floats:
        """Logits after each of tokens, which follow position `at`; forgets them afterwards."""
        out = numpy.empty((len(tokens), self.n_vocab), numpy.float32)
        done = 0
        for n in self._batches(tokens, at, n_batch, True):
            logits = llama.llama_get_logits(self.ctx)
            out[done : done + n] = numpy.ctypeslib.as_array(logits, shape=(n, self.n_vocab))
            done += n
        self.cut(at)
        return out


def log_probabilities(logits: Floats) -> NDArray[numpy.float64]:
    x = logits.astype(numpy.float64)
    x -= x.max(axis=1, keepdims=True)
    return numpy.asarray(x - numpy.log(numpy.exp(x).sum(axis=1, keepdims=True)))


def divergences(exact: Floats, other: Floats) -> NDArray[numpy.float64]:
    """Kullback-Leibler divergence of the predictions at each position, in nats."""
    out = numpy.empty(len(exact))
    for i in range(0, len(exact), 16):  # small arrays stay in the processor's cache
        p, q = log_probabilities(exact[i : i + 16]), log_probabilities(other[i : i + 16])
        out[i : i + 16] = (numpy.exp(p) * (p - q)).sum(axis=1)
    return out
