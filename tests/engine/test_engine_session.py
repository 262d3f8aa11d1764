# SPDX-License-Identifier: Apache-2.0
"""Session: a chat of three turns, daemons that come and go, the life of the object."""
from engine_setup import need_engine
from engine_setup import daemon, engine, licence_tokens, model_path  # noqa: F401 (fixtures)

need_engine()

import gc
import weakref

import llama_cpp.llama_cpp as llama
import private_daemon
import pytest
from cistern import Client, CisternError, Status
from cistern.llama import Session

ANSWER = 20


@pytest.fixture
def make(engine, model_path):
    """make(socket) -> (ctx, session) of an own lazy client."""
    made = []

    def one(socket):
        client, ctx = Client(socket, lazy=True), engine.context()
        made.append((client, ctx))
        return ctx, Session(client, ctx, model_path, library=llama._lib)

    yield one
    for client, ctx in made:
        client.close()
        llama.llama_free(ctx)


def evaluated(ctx):
    perf = llama.llama_perf_context(ctx)
    return (perf.n_p_eval if perf.n_p_eval > 1 else 0) + perf.n_eval


def answer(engine, ctx, prompt, n):
    """Decodes prompt[n:], then ANSWER greedy tokens; the last one is not decoded."""
    ids = [engine.decode(ctx, prompt[n:], n)]
    while len(ids) < ANSWER:
        ids.append(engine.decode(ctx, ids[-1:], len(prompt) + len(ids) - 1))
    return ids


def test_each_turn_of_a_chat_computes_only_what_is_new(engine, daemon, make):
    """Every turn runs in another worker."""
    turns = ["<|im_start|>user\nWhat is a cistern?<|im_end|>\n<|im_start|>assistant\n",
             "<|im_end|>\n<|im_start|>user\nWhere are they built, and why?<|im_end|>\n"
             "<|im_start|>assistant\n",
             "<|im_end|>\n<|im_start|>user\nThank you!<|im_end|>\n<|im_start|>assistant\n"]
    history = []
    for i, turn in enumerate(turns):
        prompt = history + engine.tokenize(turn)
        ctx, session = make(daemon.socket)
        n = session.restore(prompt)
        # all of the turns before but the last token of each answer, which nobody decoded
        assert n == max(0, len(history) - 1)
        llama.llama_perf_context_reset(ctx)
        ids = answer(engine, ctx, prompt, n)
        assert evaluated(ctx) == len(prompt) - n + ANSWER - 1
        assert session.store(prompt + ids[:-1]) == len(prompt) + ANSWER - 1, f"turn {i}"
        history = prompt + ids


def test_without_a_daemon_everything_is_computed(engine, make, licence_tokens, tmp_path):
    tokens = licence_tokens[:50]
    ctx, session = make(tmp_path / "nobody")
    assert session.restore(tokens) == 0
    engine.decode(ctx, tokens, 0)
    assert session.store(tokens) == 0
    assert session.last_status == Status.DISCONNECTED
    assert session.last_error


def test_a_killed_daemon_is_a_miss_and_the_next_one_fills_again(engine, make, licence_tokens):
    tokens = licence_tokens[:200]
    with private_daemon.PrivateDaemon() as daemon:
        first, writer = make(daemon.socket)
        second, reader = make(daemon.socket)
        cold = engine.decode(first, tokens, 0)
        assert writer.store(tokens) == 200
        assert reader.restore(tokens) == 199
        daemon.kill()
        # What was restored stays; the next prompt is computed.
        assert engine.decode(second, tokens[199:], 199) == cold
        assert reader.restore(tokens) == 0
        assert engine.decode(second, tokens, 0) == cold
        assert reader.store(tokens) == 0
        daemon.start()
        while writer.store(tokens) != 200:  # the library reconnects with back-off
            assert writer.last_status == Status.DISCONNECTED
        assert reader.restore(tokens) == 199
        assert engine.decode(second, tokens[199:], 199) == cold


def test_life(engine, daemon, make, licence_tokens, model_path):
    tokens = licence_tokens[:30]
    ctx, session = make(daemon.socket)
    with session:
        assert session.lookup(tokens) == 0
        assert session.restore(tokens[:1]) == 0
        assert session.restore([]) == 0
        with pytest.raises(CisternError, match="no sequence 1"):
            session.restore(tokens, seq=1)
        with pytest.raises(ValueError):
            session.restore([-1, 2])
    session.close()
    for call in (session.restore, session.store, session.lookup):
        with pytest.raises(CisternError, match="closed"):
            call(tokens)
    with pytest.raises(ValueError):
        Session(Client(daemon.socket), None, model_path)
    # A client takes its sessions along.
    client = Client(daemon.socket)
    session = Session(client, ctx, model_path, library=llama._lib)
    client.close()
    with pytest.raises(CisternError, match="closed"):
        session.restore(tokens)
    # Forgotten objects clean up after themselves, also when the collector finds them in a cycle,
    # which finalizes in the order of birth.
    cycle = [Session(Client(daemon.socket), ctx, model_path, library=llama._lib)]
    cycle.append(cycle)
    ended = []
    weakref.finalize(cycle[0]._client.handle(), ended.append, "client")
    weakref.finalize(cycle[0], lambda: ended.append("session"))
    del cycle
    gc.collect()
    assert ended == ["session", "client"]


def test_opening_leaves_an_empty_context_empty_and_a_used_one_alone(engine, daemon, make,
                                                                   licence_tokens, model_path):
    memory = llama.llama_get_memory
    ctx, _ = make(daemon.socket)
    assert llama.llama_memory_seq_pos_max(memory(ctx), 0) == -1
    engine.decode(ctx, licence_tokens[:20], 0)
    before = bytes(engine.save(ctx))
    llama.llama_perf_context_reset(ctx)
    Session(Client(daemon.socket), ctx, model_path, library=llama._lib)
    assert bytes(engine.save(ctx)) == before
    assert evaluated(ctx) == 1  # 1 stands for none
