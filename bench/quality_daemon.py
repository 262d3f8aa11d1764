# SPDX-License-Identifier: Apache-2.0
"""The same measurement through the daemon: documents are stored in a space of a lossy class, crowded out
of hot memory, fetched again, and their continuations scored.

The daemon learns its tables from other texts that are stored first, and has less memory than the
documents take as they are, so that each one comes back from its frames.
"""
import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import numpy
from cistern import CisternError, Client, Quality
from cistern.llama import Session
from quality_measure import PREFIX, SCORED, Difference, load, say

CLASSES = ("near-lossless", "small-loss", "cold")
MEMORY, SLAB, LIMIT_S = "896MiB", "24MiB", 300
TEACHERS = ("legal", "tables", "markup")  # kinds of text that come first, to learn from


def _dies_with_us():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@contextlib.contextmanager
def private_daemon(program):
    """A client of a daemon of our own."""
    with tempfile.TemporaryDirectory(prefix="cistern-quality-") as folder:
        socket = os.path.join(folder, "cistern.sock")
        daemon = subprocess.Popen([program, "--socket", socket, "--memory", MEMORY, "--slab", SLAB,
                                   "--class", "cold", "--learn-wait", "1s"], preexec_fn=_dies_with_us)
        try:
            for _ in range(200):
                with contextlib.suppress(CisternError):
                    client = Client(socket, name="quality")
                    break
                time.sleep(0.05)
            else:
                raise SystemExit("quality: the daemon doesn't answer")
            with client:
                yield client
        finally:
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def settle(client):
    """Waits until the daemon has learned, and encoded each block that it still has."""
    limit = time.monotonic() + LIMIT_S
    while time.monotonic() < limit:
        stats = client.stats()
        if stats["encodes"] + stats["evicted_blocks"] >= stats["stored_blocks"]:
            return
        time.sleep(0.2)
    say("the daemon hasn't encoded everything in time")


def store(bench, session, folder, names):
    for name in names:
        shape = folder.shape(name)
        bench.model.put(*load(folder.path, shape))
        tokens = shape["ids"][:shape["tokens"]]
        if session.store(tokens) != len(tokens):
            raise SystemExit(f"quality: the daemon didn't store {name}: {session.last_error}")


def measure_class(bench, program, quality):
    """Figures of one class, with the stages that the daemon chose by itself."""
    texts = {n: bench.learned.shape(n)["domain"] in TEACHERS for n in bench.learned.names()}
    with private_daemon(program) as client:
        with Session(client, bench.model.ctx, bench.model_path, library=bench.model.library,
                     quality=Quality[quality.upper().replace("-", "_")]) as session:
            store(bench, session, bench.learned, [n for n in texts if texts[n]])
            settle(client)
            for name in bench.names:
                store(bench, session, bench.documents, [name])
                settle(client)
            # Others, until the documents' decoded copies have left memory: what comes back is coded.
            for name in [n for n in texts if not texts[n]]:
                store(bench, session, bench.learned, [name])
                settle(client)
            before, difference = client.stats(), Difference()
            for name in bench.names:
                shape = bench.documents.shape(name)
                found = session.restore(shape["ids"] + shape["following"][:1])
                if found != PREFIX:
                    raise SystemExit(f"quality: {found} tokens of {name} came back")
                difference.add(numpy.load(bench.cache / f"{name}.npy"),
                               bench.model.score(shape["following"][:SCORED], PREFIX),
                               shape["following"][1:])
            after = client.stats()
            # The context is fp32: half of the bytes of its blocks are those of 16-bit values.
            return difference.figures() | {
                "ratio": after["packed_decoded_bytes"] / after["packed_bytes"] / 2,
                "decodes": after["decodes"] - before["decodes"],
                "fallbacks": after["fallbacks"], "side_bytes": after["side_bytes"]}


def measure(bench, report, build):
    program = Path(build) / "daemon" / "cisternd"
    for quality in CLASSES:
        say(f"measuring class {quality} through the daemon")
        figures = measure_class(bench, program, quality)
        for name, unit in (("ratio", "ratio"), ("kl", "nats"), ("kl_p99", "nats"),
                           ("top1", "share"), ("ppl", "share")):
            detail = {k: figures[k] for k in ("decodes", "fallbacks", "side_bytes")}
            report.figure(f"quality.daemon.{quality}.{name}", figures[name], unit,
                          **(detail if name == "ratio" else {}))
