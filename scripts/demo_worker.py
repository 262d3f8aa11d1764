# SPDX-License-Identifier: Apache-2.0
"""One worker of scripts/demo: llama.cpp with the model, one thread, and the cistern adapter.

usage: demo_worker.py ENGINE SOCKET DAEMON_PID   (LLAMA_CPP_LIB_PATH and PYTHONPATH set)

Reads one JSON request a line from stdin, answers with one JSON object a line on stdout: {"do":
METHOD, ...} with the public methods of Worker.
"""
import ctypes
import json
import sys
import time
from pathlib import Path

import demo_presets
import llama_cpp.llama_cpp as llama
import numpy

from cistern import CisternError, Client
from cistern.llama import Session

N_CTX, N_BATCH, ANSWER = 4096, 512, 32
RECONNECT_LIMIT_S = 20


def daemon_cpu_s(pid):
    """CPU time of all threads of the daemon so far."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except FileNotFoundError:
            pass  # a thread that just ended
    return total / 1e9


class Engine:
    """A model and greedy decoding in one sequence."""

    def __init__(self, model_path):
        self._quiet = llama.llama_log_callback(lambda level, text, data: None)
        llama.llama_log_set(self._quiet, ctypes.c_void_p())
        llama.llama_backend_init()
        self.model = llama.llama_model_load_from_file(
            model_path.encode(), llama.llama_model_default_params())
        self.vocab = llama.llama_model_get_vocab(self.model)
        self.n_vocab = llama.llama_vocab_n_tokens(self.vocab)
        self.marks = {}  # position -> CPU time when what lies before it was computed

    def context(self, **changes):
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = N_CTX, N_BATCH, N_BATCH
        params.n_threads = params.n_threads_batch = 1
        params.no_perf = False
        for name, value in changes.items():
            setattr(params, name, value)
        return llama.llama_init_from_model(self.model, params)

    def rope_base(self):
        out = ctypes.create_string_buffer(64)
        llama.llama_model_meta_val_str(self.model, b"llama.rope.freq_base", out, len(out))
        return float(out.value)

    def tokenize(self, text):
        data = text.encode()
        out = (ctypes.c_int32 * (len(data) + 8))()
        n = llama.llama_tokenize(self.vocab, data, len(data), out, len(out), False, True)
        return list(out[:n])

    def text(self, ids):
        out = ctypes.create_string_buffer(64 * len(ids) + 64)
        array = (ctypes.c_int32 * len(ids))(*ids)
        n = llama.llama_detokenize(self.vocab, array, len(ids), out, len(out), True, False)
        return out.raw[:n].decode("utf-8", "replace")

    def logits(self, ctx, tokens, at, seq=0):
        """Decodes tokens from position `at`; returns the logits of the next token."""
        for i in range(0, len(tokens), N_BATCH):
            part = tokens[i:i + N_BATCH]
            batch = llama.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for k, token in enumerate(part):
                batch.token[k], batch.pos[k] = token, at + i + k
                batch.n_seq_id[k], batch.seq_id[k][0] = 1, seq
                batch.logits[k] = i + k == len(tokens) - 1
            status = llama.llama_decode(ctx, batch)
            llama.llama_batch_free(batch)
            if status:
                raise RuntimeError(f"llama_decode failed with {status}")
            llama.llama_synchronize(ctx)
            self.marks[at + i + len(part)] = time.process_time()
        logits = llama.llama_get_logits_ith(ctx, -1)
        return numpy.ctypeslib.as_array(logits, shape=(self.n_vocab,)).copy()

    def decode(self, ctx, tokens, at):
        """The likeliest next token."""
        return int(self.logits(ctx, tokens, at).argmax())

    def answer(self, ctx, first, at):
        """ANSWER greedy tokens, the first of which is known."""
        ids = [first]
        while len(ids) < ANSWER:
            ids.append(self.decode(ctx, ids[-1:], at + len(ids) - 1))
        return ids

    def evaluated(self, ctx):
        """Tokens that the engine counted since the last reset, without the answer's own."""
        perf = llama.llama_perf_context(ctx)
        prompt = perf.n_p_eval if perf.n_p_eval > 1 else 0  # 1 stands for none: batches have >= 2
        return prompt + perf.n_eval - (ANSWER - 1)

    def save(self, ctx, seq=0):
        size = llama.llama_state_seq_get_size(ctx, seq)
        state = (ctypes.c_uint8 * size)()
        if llama.llama_state_seq_get_data(ctx, state, size, seq) != size:
            raise RuntimeError("the engine gave no state")
        return state

    def load(self, ctx, state, seq=0):
        if llama.llama_state_seq_set_data(ctx, state, len(state), seq) != len(state):
            raise RuntimeError("the engine refused its own state")

    def cut(self, ctx, n, seq=0):
        """Keeps the first n positions of a sequence."""
        llama.llama_memory_seq_rm(llama.llama_get_memory(ctx), seq, n, -1)


class Worker:
    def __init__(self, engine_dir, socket_path, daemon_pid):
        self.daemon_pid = daemon_pid
        started = time.process_time()
        self.model_path = f"{engine_dir}/model.gguf"
        self.engine = Engine(self.model_path)
        self.ctx = self.engine.context()
        self.client = Client(socket_path, name="demo")
        self.session = None
        self.state = None  # of the cold prompt, as the engine saves it
        self.setup_s = time.process_time() - started

    def open(self):
        """Hashes the model (or reads the remembered hash) and opens the space: part of setup."""
        if self.session is None:
            started = time.process_time()
            self.session = Session(self.client, self.ctx, self.model_path, library=llama._lib)
            self.setup_s += time.process_time() - started

    def tokenize(self, text):
        return {"tokens": self.engine.tokenize(text)}

    def reconnect(self, daemon_pid):
        """To the next daemon: the library connects again by itself."""
        self.daemon_pid = daemon_pid
        limit = time.monotonic() + RECONNECT_LIMIT_S
        while time.monotonic() < limit:
            try:
                self.client.ping()
                return {}
            except CisternError:
                time.sleep(0.02)
        raise RuntimeError("the new daemon does not answer")

    def daemon_cpu(self):
        return {"s": daemon_cpu_s(self.daemon_pid)}

    def _timed(self, tokens, reuse):
        """First token of a prompt: `reuse` loads what it can and says how much."""
        self.engine.cut(self.ctx, 0)
        llama.llama_perf_context_reset(self.ctx)
        daemon, wall, own = daemon_cpu_s(self.daemon_pid), time.monotonic(), time.process_time()
        n = reuse(tokens)
        first = self.engine.decode(self.ctx, tokens[n:], n)
        own = time.process_time() - own
        wall, daemon = time.monotonic() - wall, daemon_cpu_s(self.daemon_pid) - daemon
        return {"ttft_s": own + daemon, "ttft_wall_s": wall, "daemon_s": daemon, "reused": n}, first

    def _finish(self, result, tokens, first):
        ids = self.engine.answer(self.ctx, first, len(tokens))
        result["evaluated"] = self.engine.evaluated(self.ctx)
        return result | {"ids": ids, "text": self.engine.text(ids), "setup_s": self.setup_s}

    def cold(self, tokens):
        """The engine alone. Keeps its own saved state for reference()."""
        started = time.process_time()
        result, first = self._timed(tokens, lambda tokens: 0)
        result["prefill_s"] = self.engine.marks[demo_presets.TOKENS] - started
        self.state = self.engine.save(self.ctx)
        return self._finish(result, tokens, first)

    def write(self, folder):
        """What the cold prompt left in the cache, for cistern-codec."""
        demo_presets.write(Path(folder), self.state,
                           llama.llama_model_n_head_kv(self.engine.model), self.engine.rope_base())
        return {}

    def store(self, tokens):
        """Shares what the context holds: prompt and answer but for its last token."""
        self.open()
        started = time.process_time()
        stored = self.session.store(tokens)
        return {"stored": stored, "store_s": time.process_time() - started,
                "setup_s": self.setup_s, "error": self.session.last_error}

    def restored(self, tokens):
        """The same through cistern."""
        self.open()
        result, first = self._timed(tokens, self.session.restore)
        result["error"] = self.session.last_error
        return self._finish(result, tokens, first)

    def reference(self, tokens, reused):
        """The engine's own save and restore of the cold prompt, cut and continued as cistern did."""
        ctx = self.engine.context()
        self.engine.load(ctx, self.state)
        self.engine.cut(ctx, reused)
        first = self.engine.decode(ctx, tokens[reused:], reused)
        ids = self.engine.answer(ctx, first, len(tokens))
        llama.llama_free(ctx)
        return {"ids": ids}


def main():
    worker = Worker(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(getattr(worker, request.pop("do"))(**request)), flush=True)


if __name__ == "__main__":
    main()
