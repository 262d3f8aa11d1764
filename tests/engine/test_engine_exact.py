# SPDX-License-Identifier: Apache-2.0
"""What is restored is what was saved, bit for bit, and leads to the same logits.

The engine's sums depend on how tokens were split into batches, so equality with a cold run is only
asserted where the recomputed part is one large batch; a short tail is compared with the engine's own
save and restore of the same split.
"""
from engine_setup import need_engine
from engine_setup import daemon, engine, licence_tokens, model_path  # noqa: F401 (fixtures)

need_engine()

import llama_cpp.llama_cpp as llama
import numpy
import pytest
from cistern import Client, CisternError
from cistern.llama import Session

F16, Q8_0, Q4_0 = 1, 8, 2
FLASH_OFF, FLASH_ON = 0, 1
FORMS = {
    "f16": {"flash_attn_type": FLASH_ON},
    "f16-transposed-v": {"flash_attn_type": FLASH_OFF},
    "q8_0": {"flash_attn_type": FLASH_ON, "type_k": Q8_0, "type_v": Q8_0},
    "q4_0": {"flash_attn_type": FLASH_ON, "type_k": Q4_0, "type_v": Q4_0},
    "q8_0-transposed-v": {"flash_attn_type": FLASH_OFF, "type_k": Q8_0},
    "f32": {"flash_attn_type": FLASH_OFF, "type_k": 0, "type_v": 0},
    "unified": {"n_seq_max": 4, "kv_unified": True},
    "four-streams": {"n_seq_max": 4, "kv_unified": False},
}


class Rig:
    """Contexts with their sessions over one daemon."""

    def __init__(self, engine, daemon, model_path):
        self.engine, self.model_path = engine, model_path
        self.client = Client(daemon.socket)
        self.contexts = []

    def context(self, **changes):
        ctx = self.engine.context(**changes)
        self.contexts.append(ctx)
        return ctx

    def session(self, ctx, **options):
        return Session(self.client, ctx, self.model_path, **options)

    def close(self):
        self.client.close()
        for ctx in self.contexts:
            llama.llama_free(ctx)


@pytest.fixture
def rig(engine, daemon, model_path):
    rig = Rig(engine, daemon, model_path)
    yield rig
    rig.close()


def length(ctx, seq=0):
    return llama.llama_memory_seq_pos_max(llama.llama_get_memory(ctx), seq) + 1


@pytest.mark.parametrize("form", FORMS)
def test_restored_is_saved(rig, engine, licence_tokens, form):
    """Also across sequences of a context, and with a tail block of any length."""
    tokens = licence_tokens[:150]
    seq = 2 if "n_seq_max" in FORMS[form] else 0
    first, second = rig.context(**FORMS[form]), rig.context(**FORMS[form])
    session = rig.session(first)
    engine.logits(first, tokens, 0)
    assert session.store(tokens) == 150
    saved = engine.save(first)

    assert rig.session(second).restore(tokens, seq) == 149
    assert length(second, seq) == 149
    logits = engine.logits(second, tokens[149:], 149, seq)

    reference = rig.context(**FORMS[form])
    engine.load(reference, saved, seq)
    engine.cut(reference, 149, seq)
    assert numpy.array_equal(logits, engine.logits(reference, tokens[149:], 149, seq))
    assert bytes(engine.save(second, seq)) == bytes(engine.save(reference, seq))


@pytest.mark.parametrize("form", ["f16", "f16-transposed-v", "q8_0"])
def test_restored_with_a_long_tail_is_a_cold_run(rig, engine, licence_tokens, form):
    tokens = licence_tokens[:512]
    cold = rig.context(**FORMS[form])
    expected = engine.logits(cold, tokens, 0)
    writer, reader = rig.context(**FORMS[form]), rig.context(**FORMS[form])
    session = rig.session(writer)
    engine.logits(writer, tokens[:400], 0)
    assert session.store(tokens[:400]) == 400, session.last_error
    assert rig.session(reader).restore(tokens) == 400
    assert numpy.array_equal(engine.logits(reader, tokens[400:], 400), expected)
    assert bytes(engine.save(reader)) == bytes(engine.save(cold))


@pytest.mark.parametrize("tail", [1, 16, 28])
def test_short_tails_are_as_the_engine_restores_them(rig, engine, licence_tokens, tail):
    tokens = licence_tokens[:300]
    writer, reader, reference = rig.context(), rig.context(), rig.context()
    session = rig.session(writer)
    cold = engine.logits(writer, tokens, 0)
    assert session.store(tokens) == 300
    asked = tokens[:300 - tail] + [t + 1 for t in tokens[300 - tail:]] if tail > 1 else tokens
    assert rig.session(reader).restore(asked) == 300 - tail
    logits = engine.logits(reader, asked[300 - tail:], 300 - tail)
    engine.load(reference, engine.save(writer))
    engine.cut(reference, 300 - tail)
    assert numpy.array_equal(logits, engine.logits(reference, asked[300 - tail:], 300 - tail))
    if asked == tokens:
        assert logits.argmax() == cold.argmax()


def test_many_small_blocks_come_in_order(rig, engine, licence_tokens):
    """More blocks than one packet asks for, joined into one state."""
    tokens = licence_tokens[:1100]
    writer, reader, reference = rig.context(), rig.context(), rig.context()
    session = rig.session(writer, block_tokens=16)
    engine.logits(writer, tokens, 0)
    assert session.store(tokens) == 1100
    assert rig.session(reader, block_tokens=16).restore(tokens) == 1099
    engine.load(reference, engine.save(writer))
    engine.cut(reference, 1099)
    assert bytes(engine.save(reader)) == bytes(engine.save(reference))


def kv_by_position(state, n_layers=30, row=384):
    """K and V rows of an f16 state with flash attention, sorted by position."""
    data = numpy.frombuffer(state, numpy.uint8)
    n = int(data[12:16].view(numpy.uint32)[0])
    order = numpy.argsort(data[16:16 + 12 * n].view(numpy.int32)[::3])
    at, out = 16 + 12 * n + 8, []
    for _ in range(2 * n_layers):
        at += 12
        out.append(data[at:at + n * row].reshape(n, row)[order])
        at += n * row
    assert at == len(data)
    return numpy.stack(out)


def test_cells_in_any_order_are_stored_by_position(rig, engine, licence_tokens):
    """A sequence whose later tokens went into cells that another one had left."""
    tokens = licence_tokens[:120]
    ctx = rig.context(**FORMS["unified"])
    session = rig.session(ctx)
    engine.logits(ctx, licence_tokens[200:290], 0, seq=1)
    engine.logits(ctx, tokens[:50], 0, seq=0)
    engine.cut(ctx, 0, seq=1)
    engine.logits(ctx, tokens[50:], 50, seq=0)
    positions = numpy.frombuffer(engine.save(ctx), numpy.int32)[4:4 + 360:3]
    assert positions[0] == 50  # else this test shows nothing
    assert session.store(tokens) == 120
    reader = rig.context()
    assert rig.session(reader).restore(tokens) == 119
    assert numpy.array_equal(kv_by_position(engine.save(reader)),
                             kv_by_position(engine.save(ctx))[:, :119])


def test_contexts_exchange_only_what_fits(rig, engine, licence_tokens):
    """One sequence and several unified ones do; streams, types and transposition do not."""
    tokens = licence_tokens[:100]
    sessions = {name: rig.session(rig.context(**form)) for name, form in FORMS.items()}
    sessions["one sequence"] = rig.session(rig.context())
    writer = rig.context()
    session = rig.session(writer)
    engine.logits(writer, tokens, 0)
    assert session.store(tokens) == 100
    found = {name for name, session in sessions.items() if session.restore(tokens)}
    assert found == {"f16", "unified", "one sequence"}


def test_another_model_parameters_adapters_and_salt_share_nothing(rig, engine, licence_tokens,
                                                                  model_path, tmp_path):
    tokens = licence_tokens[:40]
    writer = rig.context()
    session = rig.session(writer)
    engine.logits(writer, tokens, 0)
    assert session.store(tokens) == 40
    same, other = tmp_path / "same.gguf", tmp_path / "other.gguf"
    data = bytearray(open(model_path, "rb").read())
    same.write_bytes(data)
    data[-1] ^= 1
    other.write_bytes(data)
    adapter = [(same, 1.0)]
    ctx = rig.context()
    assert Session(rig.client, ctx, same).restore(tokens) == 39
    assert Session(rig.client, ctx, other).restore(tokens) == 0
    assert rig.session(ctx, context_params="rope_freq_base=7").restore(tokens) == 0
    assert rig.session(ctx, adapters=adapter).restore(tokens) == 0
    assert rig.session(ctx, salt=b"tenant").restore(tokens) == 0
    assert rig.session(ctx, block_tokens=32).restore(tokens) == 0
    assert rig.session(ctx).restore(tokens) == 39


def test_a_hole_is_refused(rig, engine, licence_tokens):
    """The engine itself would accept positions 0..19, 30..99 without a word."""
    tokens = licence_tokens[:100]
    ctx = rig.context()
    session = rig.session(ctx)
    engine.logits(ctx, tokens, 0)
    llama.llama_memory_seq_rm(llama.llama_get_memory(ctx), 0, 20, 30)
    assert session.store(tokens[:20] + tokens[30:]) == 0
    assert "hole" in session.last_error
    assert session.lookup(tokens) == 0


def test_more_tokens_than_decoded_are_refused(rig, engine, licence_tokens):
    ctx = rig.context()
    session = rig.session(ctx)
    engine.logits(ctx, licence_tokens[:10], 0)
    with pytest.raises(CisternError, match="holds 10 of 11"):
        session.store(licence_tokens[:11])
    assert session.lookup(licence_tokens) == 0


def test_a_context_that_is_too_small_is_a_miss(rig, engine, licence_tokens):
    tokens = licence_tokens[:400]
    writer, small = rig.context(), rig.context(n_ctx=256)
    session = rig.session(writer)
    engine.logits(writer, tokens, 0)
    assert session.store(tokens) == 400
    reader = rig.session(small)
    assert reader.restore(tokens) == 0
    assert "refused" in reader.last_error
    assert length(small) == 0


def test_a_missing_model_file_is_named(rig):
    with pytest.raises(CisternError, match="can't read the model file /nowhere/model.gguf: No such"):
        Session(rig.client, rig.context(), "/nowhere/model.gguf")
