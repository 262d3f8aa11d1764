# SPDX-License-Identifier: Apache-2.0
"""The model of scripts/bench quality: llama.cpp with everything in fp32.

The weights of the engine's model are dequantised once: then the noise that the engine itself makes
is a thousand times smaller than the losses that are measured. The cache is fp32, too, so that each
16-bit value that a codec gives back is used as it is.
"""
import ctypes
import os
import sys
from pathlib import Path

import llama_cpp.llama_cpp as llama
import numpy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from demo_worker import Engine  # noqa: E402

HEADER, CELL, LAYERS_HEAD, TENSOR_HEAD = 12, 12, 8, 12  # bytes of a sequence state's parts


def dequantise(source, target):
    """A model file whose weights are all fp32. Appears complete or not at all."""
    params = llama.llama_model_quantize_default_params()
    params.ftype = llama.LLAMA_FTYPE_ALL_F32
    params.allow_requantize = True
    params.nthread = 2
    made = target.with_suffix(".part")
    quiet = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(quiet, ctypes.c_void_p())
    if llama.llama_model_quantize(str(source).encode(), str(made).encode(), params):
        raise SystemExit("quality: the engine can't dequantise its model")
    made.rename(target)


def to_bf16(x):
    """fp32 to the bits of bf16, to nearest even."""
    bits = x.view(numpy.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(numpy.uint16)


def from_bf16(bits):
    return (bits.astype(numpy.uint32) << 16).view(numpy.float32)


class Model(Engine):
    """One sequence of an fp32 context, whose keys and values can be taken out and put back."""

    def __init__(self, path, n_ctx):
        super().__init__(str(path))
        threads = min(2, os.cpu_count() or 1)
        self.ctx = self.context(n_ctx=n_ctx, n_batch=512, n_ubatch=512, n_threads=threads,
                                n_threads_batch=threads, type_k=llama.GGML_TYPE_F32,
                                type_v=llama.GGML_TYPE_F32)
        self.layers = llama.llama_model_n_layer(self.model)
        self.heads = llama.llama_model_n_head_kv(self.model)
        self.dims = (llama.llama_model_n_embd(self.model)
                     // llama.llama_model_n_head(self.model))
        self.row = 4 * self.heads * self.dims
        self.rope_base = float(self._metadata("llama.rope.freq_base"))

    def _metadata(self, key):
        out = ctypes.create_string_buffer(64)
        if llama.llama_model_meta_val_str(self.model, key.encode(), out, len(out)) < 0:
            raise SystemExit(f"quality: the model doesn't say {key}")
        return out.value.decode()

    def prefill(self, tokens):
        """(K, V) of tokens, each [layer][token][head * dimension] in fp32."""
        self.cut(self.ctx, 0)
        self.logits(self.ctx, tokens, 0)
        return self.take(len(tokens))

    def _parts(self, n):
        """Where the tensors lie in the state of n tokens: all K, then all V."""
        at = HEADER + 4 + CELL * n + LAYERS_HEAD
        for _ in range(2 * self.layers):
            yield at + TENSOR_HEAD, at + TENSOR_HEAD + self.row * n
            at += TENSOR_HEAD + self.row * n

    def take(self, n):
        state = numpy.frombuffer(self.save(self.ctx), numpy.uint8)
        parts = list(self._parts(n))
        if parts[-1][1] != len(state):
            raise SystemExit("quality: the engine's state doesn't have the layout expected")
        rows = [state[a:b].view(numpy.float32).reshape(n, -1) for a, b in parts]
        return numpy.stack(rows[:self.layers]), numpy.stack(rows[self.layers:])

    def put(self, k, v):
        """The sequence is these keys and values afterwards."""
        n = k.shape[1]
        head = numpy.zeros(HEADER + 4 + CELL * n + LAYERS_HEAD, numpy.uint8)
        words = head.view(numpy.uint32)
        words[:4] = 0xaf143cd8, 0, 1, n
        cells = words[4:4 + 3 * n].reshape(n, 3)
        cells[:, 0], cells[:, 1] = numpy.arange(n), 1
        words[-2:] = 0, self.layers
        tensor = numpy.zeros(TENSOR_HEAD, numpy.uint8)
        tensor.view(numpy.uint32)[1] = self.row
        pieces = [head]
        for x in [*k, *v]:
            pieces += [tensor, numpy.ascontiguousarray(x).view(numpy.uint8).reshape(-1)]
        state = numpy.concatenate(pieces)
        self.load(self.ctx, (ctypes.c_uint8 * len(state)).from_buffer(state))

    def score(self, tokens, at, n_batch=512):
        """Logits after each of tokens, which follow position `at`; forgets them afterwards."""
        out = numpy.empty((len(tokens), self.n_vocab), numpy.float32)
        for i in range(0, len(tokens), n_batch):
            part = tokens[i:i + n_batch]
            batch = llama.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for k, token in enumerate(part):
                batch.token[k], batch.pos[k] = token, at + i + k
                batch.n_seq_id[k], batch.seq_id[k][0] = 1, 0
                batch.logits[k] = 1
            status = llama.llama_decode(self.ctx, batch)
            llama.llama_batch_free(batch)
            if status:
                raise RuntimeError(f"llama_decode failed with {status}")
            logits = llama.llama_get_logits(self.ctx)
            out[i:i + len(part)] = numpy.ctypeslib.as_array(
                logits, shape=(len(part), self.n_vocab))
        self.cut(self.ctx, at)
        return out
