# SPDX-License-Identifier: Apache-2.0
"""What two papers claim about caches, asked of exact states: scripts/bench quality --claims.

  delta_bits        bits a value that coding the difference to the token before would save (minus:
                    cost) over coding the value, at high rate; keys turned back
  token_mean        share of the variance that the mean of a token's id over other texts removes, and
                    of layer 0 alone for ids that were seen
  late_over_early   bytes of frames of the last 512 tokens of a document over those of tokens 64..575
  opaque_kl_over    divergence with keys compressed as they are stored over that of keys turned back
  grouped_kl_over   divergence with 6 layers a decomposition over that with 1
"""
import json
import subprocess
import tempfile
from pathlib import Path

import numpy
from quality_measure import load, say

SINKS = 4


def turned_back(k, shape):
    """Keys without their rotary embedding: [layer][token][channel]."""
    layers, tokens, width = k.shape
    dims = shape["head_dim"]
    frequencies = shape["rope"]["base"] ** (-numpy.arange(0, dims, 2) / dims)
    angle = numpy.arange(tokens)[:, None] * frequencies
    turn = numpy.exp(-1j * angle)[None, :, None, :]
    pairs = k.reshape(layers, tokens, width // dims, dims // 2, 2)
    z = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
    return numpy.stack([z.real, z.imag], axis=-1).reshape(k.shape).astype(numpy.float32)


def values(folder, name):
    """(K turned back, V, ids) of a text."""
    shape = folder.shape(name)
    k, v = load(folder.path, shape)
    return turned_back(k, shape), v, numpy.array(shape["ids"][:shape["tokens"]])


def delta_bits(bench):
    """Mean over channels of log2(deviation / deviation of differences)."""
    out = {"K": [], "V": []}
    for name in bench.names:
        k, v, _ = values(bench.documents, name)
        for part, x in (("K", k[:, SINKS:]), ("V", v[:, SINKS:])):
            differences = numpy.diff(x, axis=1)
            ratio = x.var(axis=1) / (differences ** 2).mean(axis=1)
            out[part].append(float(0.5 * numpy.log2(ratio).mean()))
    return {part: float(numpy.mean(x)) for part, x in out.items()}


def _means_by_id(x, ids):
    """Sorted ids and the mean of x over each."""
    order = numpy.argsort(ids, kind="stable")
    unique, first, counts = numpy.unique(ids[order], return_index=True, return_counts=True)
    return unique, numpy.add.reduceat(x[order], first, axis=0) / counts[:, None]


def token_mean(bench):
    """Variance removed by means of ids: of each part over all layers, and of layer 0's seen ids."""
    texts = [values(bench.learned, name) for name in bench.learned.names()]
    ids = numpy.concatenate([t[2][SINKS:] for t in texts])
    measured = [values(bench.documents, name) for name in bench.names]
    found = numpy.concatenate([m[2][SINKS:] for m in measured])
    out = {}
    for part, letter in ((0, "K"), (1, "V")):
        left, total = 0.0, 0.0
        for layer in range(bench.model.layers):
            x = numpy.concatenate([t[part][layer, SINKS:] for t in texts])
            y = numpy.concatenate([m[part][layer, SINKS:] for m in measured]) - x.mean(axis=0)
            unique, means = _means_by_id(x - x.mean(axis=0), ids)
            at = numpy.minimum(numpy.searchsorted(unique, found), len(unique) - 1)
            seen = unique[at] == found
            error = y - numpy.where(seen[:, None], means[at], 0)
            if layer == 0:
                out[f"{letter} of layer 0"] = float(
                    1 - (error[seen] ** 2).sum() / (y[seen] ** 2).sum())
            left += float((error ** 2).sum() / (y ** 2).sum())
            total += 1
        out[letter] = 1 - left / total
    out["ids seen"] = float(seen.mean())
    return out


def late_over_early(bench, preset, side):
    """Whether frames shrink as the context grows."""
    early = late = 0
    for name in bench.names:
        domain = bench.documents.shape(name)["domain"]
        with tempfile.TemporaryDirectory(dir=bench.cache) as out:
            subprocess.run([bench.tool, "encode", *preset, "--side", side(domain),
                            bench.documents.path, out, name], check=True,
                           stdout=subprocess.DEVNULL)
            done = subprocess.run([bench.tool, "inspect", Path(out) / f"{name}.frames"],
                                  check=True, stdout=subprocess.PIPE, text=True).stdout
        sizes = [frame["bytes"] for frame in json.loads(done)]
        early, late = early + sum(sizes[1:9]), late + sum(sizes[-8:])
    return late / early


def jolt_kl(bench, layers, *more):
    arguments = ["--preset", "jolt", "--ratio", "3", "--layers", layers, "--block", "1024", *more]
    return bench.measure(arguments, tasks=False)["kl"]


def measure(bench, report):
    say("differences to the token before")
    for part, bits in delta_bits(bench).items():
        report.figure(f"quality.claims.delta_bits.{part}", bits, "bits")
    say("means of token ids")
    for part, share in token_mean(bench).items():
        report.figure(f"quality.claims.token_mean.{part}", share, "share")
    say("frames early and late in a text")
    report.figure("quality.claims.late_over_early",
                  late_over_early(bench, ["--preset", "klt", "--step", ".2"],
                                  lambda domain: bench.side_data(["--no-predictors"], domain)),
                  "ratio")
    say("jolt on keys as stored and turned back, 1 and 6 layers together")
    one, six = jolt_kl(bench, "1"), jolt_kl(bench, "6")
    opaque = jolt_kl(bench, "1", "--keys", "opaque")
    report.figure("quality.claims.opaque_kl_over", opaque / one, "ratio", kl=round(opaque, 6))
    report.figure("quality.claims.grouped_kl_over", six / one, "ratio", kl=round(six, 6),
                  kl_one_layer=round(one, 6))
