# SPDX-License-Identifier: Apache-2.0
"""LlamaCache with llama-cpp-python's high-level Llama: one line of its user."""
from engine_setup import need_engine
from engine_setup import daemon, engine, licence_tokens, model_path  # noqa: F401 (fixtures)

need_engine()

import gc
import sys
import weakref

import cistern.llama
import llama_cpp
import private_daemon
import pytest
from cistern import Client


@pytest.fixture
def make(model_path):
    """make(socket) -> Llama with its cache set."""
    made = []

    def one(socket, **options):
        llm = llama_cpp.Llama(model_path, n_ctx=2048, n_threads=1, n_threads_batch=1,
                              verbose=False, **options)
        llm.set_cache(cistern.llama.LlamaCache(llm, socket_path=socket))
        made.append(llm)
        return llm

    yield one
    for llm in made:
        llm.cache.close()
        llm.close()


@pytest.fixture(scope="module")
def text(engine, licence_tokens) -> str:
    return engine.text(licence_tokens[:400])


def complete(llm, prompt, n=16):
    llama_cpp.llama_perf_context_reset(llm.ctx)
    out = llm.create_completion(prompt, max_tokens=n, temperature=0)["choices"][0]["text"]
    perf = llama_cpp.llama_perf_context(llm.ctx)
    return out, (perf.n_p_eval if perf.n_p_eval > 1 else 0) + perf.n_eval


def test_a_second_object_is_warm(daemon, make, text):
    first, second = make(daemon.socket), make(daemon.socket)
    n = len(first.tokenize(text.encode()))
    cold, evaluated = complete(first, text)
    assert first.cache.restored == 0
    assert evaluated == n + 15
    warm, evaluated = complete(second, text)
    assert second.cache.restored == n - 1
    assert evaluated == 1 + 15
    assert warm == cold
    assert second.cache.session.last_error == ""
    assert second.cache.cache_size > 0
    assert first.tokenize(text.encode()) in second.cache
    assert [1, 2, 3] not in second.cache


def test_a_chat_goes_on_in_another_process_object(daemon, make):
    messages = []
    for question in ("What is a cistern? Answer in one sentence.", "Who built the first ones?",
                     "Thank you."):
        messages.append({"role": "user", "content": question})
        llm = make(daemon.socket)
        reply = llm.create_chat_completion(messages, max_tokens=24, temperature=0)
        usage = reply["usage"]
        if len(messages) > 1:
            assert llm.cache.restored >= before - 1
        before = usage["total_tokens"] - 1
        messages.append(reply["choices"][0]["message"])


def test_the_object_itself_may_be_warmer(daemon, make, text):
    """Its own context holds the prompt: nothing is fetched."""
    llm = make(daemon.socket)
    cold, _ = complete(llm, text)
    again, evaluated = complete(llm, text)
    assert again == cold
    assert llm.cache.restored == 0
    assert evaluated == 1 + 15


def test_streams_and_flash_attention_too(daemon, make, text):
    """One recomputed token differs from a cold run in the last bits, so warm is compared with warm."""
    first, second, third = (make(daemon.socket, flash_attn=True) for _ in range(3))
    complete(first, text)
    warm, _ = complete(second, text)
    chunks = list(third.create_completion(text, max_tokens=16, temperature=0, stream=True))
    assert "".join(c["choices"][0]["text"] for c in chunks) == warm
    assert third.cache.restored == second.cache.restored > 300


def test_parameters_that_change_k_are_told_apart(daemon, make, text):
    first, second = make(daemon.socket), make(daemon.socket, rope_freq_base=50000.0)
    complete(first, text, 2)
    complete(second, text, 2)
    assert second.cache.restored == 0
    third = make(daemon.socket, rope_freq_base=50000.0)
    complete(third, text, 2)
    assert third.cache.restored > 300


def test_saving_the_state_still_works_for_others(daemon, make, text):
    llm = make(daemon.socket)
    complete(llm, text, 4)
    state = llm.save_state()
    assert state.n_tokens == llm.n_tokens > 300
    llm.reset()
    llm.load_state(state)
    assert llm.n_tokens == state.n_tokens
    llm.set_cache(llama_cpp.LlamaRAMCache())
    complete(llm, text, 4)
    assert llm.cache.cache_size > 0
    llm.set_cache(cistern.llama.LlamaCache(llm, socket_path=daemon.socket))


def test_logits_of_the_prompt_are_still_computed(daemon, make, text):
    """What the library reads beside the KV can't come from a cache."""
    def logprobs(llm):
        out = llm.create_completion(text[:300], max_tokens=2, temperature=0, logprobs=1, echo=True)
        return out["choices"][0]["logprobs"]["token_logprobs"][1:]

    first, second = (make(daemon.socket, logits_all=True) for _ in range(2))
    assert logprobs(first) == logprobs(second)
    assert second.cache.restored == 0


def test_images_are_never_cached(daemon, make, text):
    class Handler:
        clip_model_path = "vision.gguf"

    llm = make(daemon.socket)
    llm.chat_handler = Handler()
    complete(llm, text, 2)
    other = make(daemon.socket)
    complete(other, text, 2)
    assert other.cache.restored == 0
    llm.reset()
    complete(llm, text, 2)
    assert llm.cache.restored == 0
    with pytest.raises(cistern.Refused, match="images"):
        cistern.llama.LlamaCache(llm)


def test_the_daemon_may_die_at_any_time(make, text):
    with private_daemon.PrivateDaemon() as daemon:
        first, second = make(daemon.socket), make(daemon.socket)
        cold, _ = complete(first, text)
        stream = second.create_completion(text, max_tokens=16, temperature=0, stream=True)
        warm = next(stream)["choices"][0]["text"]
        assert second.cache.restored > 300
        daemon.kill()
        warm += "".join(c["choices"][0]["text"] for c in stream)
        assert warm == cold
        assert second.cache.session.last_error
        other, evaluated = complete(second, "Another prompt. " + text)
        assert evaluated > 300
        assert second.cache.restored == 0
        assert second.cache.cache_size == 0


def test_no_daemon_at_all(make, text, tmp_path):
    llm = make(tmp_path / "nobody")
    _, evaluated = complete(llm, text, 4)
    assert evaluated > 300
    assert llm.cache.session.last_error


def test_it_is_a_llama_cache_and_may_be_forgotten(daemon, model_path):
    llm = llama_cpp.Llama(model_path, n_ctx=512, n_threads=1, verbose=False)
    cache = cistern.llama.LlamaCache(llm, Client(daemon.socket))
    assert isinstance(cache, llama_cpp.BaseLlamaCache)
    llm.set_cache(cache)
    assert sys.getrefcount(llm) == 2
    gone = weakref.ref(llm)
    llm.close()
    del llm
    assert gone() is None
    with pytest.raises(KeyError):
        cache[[1, 2, 3]]
    cache[[1, 2, 3]] = None
    del cache
    gc.collect()
