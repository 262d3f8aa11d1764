# SPDX-License-Identifier: Apache-2.0
"""Calibration on the real model, and what it stands on: reading and writing the engine's states."""
from engine_setup import need_engine
from engine_setup import engine, licence_tokens, model_path  # noqa: F401 (fixtures)

need_engine()

import time

import llama_cpp.llama_cpp as llama
import numpy
import private_daemon
import pytest
from cistern import Client, Quality
from cistern._llama_engine import Predictor, empty_state
from cistern.calibrate import calibrate
from cistern.llama import Session

THREADS = {"n_threads": 1, "n_threads_batch": 1}
BF16 = 30  # in ggml; the binding has no name for it
CONTEXTS = {
    "f16": {},
    "bf16": {"type_k": BF16, "type_v": BF16},
    "columns": {"type_k": llama.GGML_TYPE_F32, "type_v": llama.GGML_TYPE_F32,
                "flash_attn_type": llama.LLAMA_FLASH_ATTN_TYPE_DISABLED},
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_states_are_read_and_written(name, model_path, licence_tokens):
    predictor = Predictor(model_path, 256, **THREADS, **CONTEXTS[name])
    state = predictor.prefill(licence_tokens[:50])
    exact = predictor.score(licence_tokens[50:60], 50)
    before, values = state.blob.copy(), [state.get(2, value) for value in (False, True)]
    assert state.layers == 30 and values[0].shape == (50, 192)
    for value in (False, True):
        state.set(2, value, numpy.zeros_like(values[value]))
    predictor.load(state)
    assert abs(predictor.score(licence_tokens[50:60], 50) - exact).max() > 1e-3
    for value in (False, True):
        state.set(2, value, values[value])
    assert (state.blob == before).all()
    predictor.load(state)
    assert (predictor.score(licence_tokens[50:60], 50) == exact).all()
    if name == "columns":
        other = empty_state(50, state.layers, 192)
        for layer in range(state.layers):
            for value in (False, True):
                other.set(layer, value, state.get(layer, value))
        assert (other.blob == before).all()


def test_sensitivities_tell_layers_apart_and_reach_the_daemon(model_path, licence_tokens):
    predictor = Predictor(model_path, 1280, **THREADS)
    table = calibrate(predictor, [licence_tokens[:112]], prefix=96)
    steps = table.steps()
    assert [len(table.sensitivity[part]) for part in "KV"] == [30, 30]
    # this model's values of layers 3 to 8 are its most sensitive ones, those of its last its least
    v = numpy.array(table.sensitivity["V"])
    assert v[3:9].mean() > 3 * v[25:].mean()
    logs = numpy.log(steps["K"] + steps["V"])
    assert abs(logs.mean()) < 1e-3

    with private_daemon.PrivateDaemon("--class", "cold", "--learn-wait", "1s") as daemon, \
            Client(daemon.socket) as client, \
            Session(client, predictor.ctx, model_path, library=predictor.library,
                    quality=Quality.COLD) as session:
        predictor.prefill(licence_tokens[:1152])
        assert session.store(licence_tokens[:1152]) == 1152
        limit = time.monotonic() + 60
        while client.stats()["sides_learned"] == 0 and time.monotonic() < limit:
            time.sleep(0.1)
        learned = client.stats()["sides_learned"]
        assert session.put_step_weights(steps["K"], steps["V"]) == learned + 1
