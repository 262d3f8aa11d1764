# SPDX-License-Identifier: Apache-2.0
"""What decoding costs beside computing, for every preset, on the keys and values of the demo."""
import json
import subprocess

NAME = "prompt"
TOKENS = 1536  # three of the engine's batches, 24 blocks
PRESETS = ("lossless", "int8", "int4", "kivi4", "kivi2", "turboquant", "polar", "jolt", "flashjolt",
           "jolt+", "klt", "deep")
LEARNED = ("klt", "deep")
REPEATS = 5  # of the text, until there is enough of it to learn predictors from two layers


def write(folder, state, heads, rope_base):
    """The first TOKENS of a saved state, as cistern-codec reads them. The engine turns pairs."""
    import numpy
    from cistern._llama_engine import SequenceState
    state, name = SequenceState(numpy.frombuffer(state, numpy.uint8)), NAME
    files = {}
    for part, value in (("kpost", False), ("v", True)):
        files[part] = {"file": f"{name}.{part}.f16"}
        x = numpy.stack([state.get(layer, value)[:TOKENS] for layer in range(state.layers)])
        x.astype(numpy.float16).tofile(folder / files[part]["file"])
    dims = x.shape[2] // heads
    shape = {"layers": state.layers, "tokens": TOKENS, "kv_heads": heads, "head_dim": dims,
             "dtype": "f16", "files": files,
             "rope": {"kind": "interleaved", "base": rope_base, "dims": dims,
                      "first_position": 0}}
    (folder / f"{name}.json").write_text(json.dumps(shape))


def measure(tool, folder):
    """Preset -> CPU seconds that decoding TOKENS tokens takes, the lesser of two runs."""
    side = folder / "side"
    # Learned from the text itself: good enough for times, not for sizes or errors.
    subprocess.run([tool, "learn", "--out", side, folder, *[NAME] * REPEATS],
                   stdout=subprocess.DEVNULL, check=True)
    seconds = {}
    for preset in PRESETS:
        command = [tool, "compare", "--preset", preset, folder, NAME]
        if preset in LEARNED:
            command[2:2] = ["--side", side]
        runs = [json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
                for _ in range(2)]
        seconds[preset] = min(run["texts"][0]["decode_s"] for run in runs)
    return seconds
