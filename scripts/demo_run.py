# SPDX-License-Identifier: Apache-2.0
"""Runs the demo: a private daemon, two workers, three prompts, a restart. See scripts/demo.

usage: demo_run.py [--json] ENGINE BUILD

Everything that is started here ends here, also on Ctrl-C, and dies with this process.
"""
import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import demo_presets

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))
INTRODUCTION = "You answer questions about a licence. Here is its text.\n\n"
PROMPT = ("<|im_start|>system\n{text}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
          "<|im_start|>assistant\n")
QUESTION = "What does the licence say about patents?"
OTHER_QUESTION = "May I sell a product that contains a modified copy of the work?"
QUIET_S, SETTLE_LIMIT_S = 0.3, 30


def say(text):
    print(f"==> {text}", file=sys.stderr, flush=True)


def in_background():
    """In a child: not hit by the terminal's Ctrl-C, dead with its parent at the latest."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@contextlib.contextmanager
def ending(process):
    """Ends a child process when the block is left."""
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Worker:
    """A demo_worker.py process: ask() sends one request and waits for its answer."""

    def __init__(self, engine, socket_path, daemon):
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT / 'python'}:{engine / 'python'}",
            "LLAMA_CPP_LIB_PATH": str(engine / "lib"),
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, ROOT / "scripts" / "demo_worker.py", engine, socket_path,
             str(daemon.pid)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            preexec_fn=in_background)

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("demo: a worker ended; its last words are above")
        return json.loads(line)

    def ask(self, do, **arguments):
        print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)
        return self.read()


def wait_for_daemon(daemon, socket_path):
    from cistern import Client, CisternError
    while daemon.poll() is None:
        try:
            with Client(socket_path, name="demo") as client:
                client.ping()
                return
        except CisternError:
            time.sleep(0.05)
    raise SystemExit("demo: the daemon ended; its log is above")


def stats(socket_path):
    from cistern import Client
    with Client(socket_path, name="demo") as client:
        return client.stats()


def settle(worker):
    """Lets the daemon finish what a store left to do in the background; returns its CPU time."""
    start = before = worker.ask("daemon_cpu")["s"]
    limit = time.monotonic() + SETTLE_LIMIT_S
    while time.monotonic() < limit:
        time.sleep(QUIET_S)
        now = worker.ask("daemon_cpu")["s"]
        if now - before < QUIET_S / 100:
            break
        before = now
    return before - start


def common_prefix(a, b):
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def start_daemon(build, socket_path, disk):
    return ending(subprocess.Popen(
        [build / "daemon" / "cisternd", "--socket", socket_path, "--directory", disk,
         "--disk", "1GiB", "--key-file", f"{disk}.key"],
        preexec_fn=in_background))


def run(engine, build, folder, disk):
    socket_path = os.path.join(folder, "cistern.sock")
    say("starting a private daemon and two workers")
    os.mkdir(disk, 0o700)
    with open(f"{disk}.key", "xb", opener=lambda p, f: os.open(p, f, 0o600)) as key:
        key.write(os.urandom(32))
    with contextlib.ExitStack() as stack:
        first_life = stack.enter_context(contextlib.ExitStack())
        daemon = first_life.enter_context(start_daemon(build, socket_path, disk))
        wait_for_daemon(daemon, socket_path)
        first, second = (Worker(engine, socket_path, daemon) for _ in range(2))
        for worker in (first, second):
            stack.enter_context(ending(worker.process))
        for worker in (first, second):
            worker.read()
        result, texts, prompt = measure(first, second, socket_path)
        say("restart: the daemon stops, writes its blocks to disk, and a new one finds them")
        started = time.monotonic()
        first_life.close()
        result["stop_s"] = time.monotonic() - started
        started = time.monotonic()
        daemon = stack.enter_context(start_daemon(build, socket_path, disk))
        wait_for_daemon(daemon, socket_path)
        result["start_s"] = time.monotonic() - started
        measure_disk(result, second, daemon, socket_path, prompt)
        say("presets: decoding the same tokens beside computing them")
        first.ask("write", folder=folder)
        seconds = demo_presets.measure(build / "tools" / "cistern-codec", Path(folder))
        result["decode_share"] = {preset: s / result["prefill_s"] for preset, s in seconds.items()}
        return result, texts


def measure_disk(result, worker, daemon, socket_path, prompt):
    """The third act: the same prompt once more; its blocks come from disk."""
    result["blocks_found"] = stats(socket_path)["recovered_blocks"]
    worker.ask("reconnect", daemon_pid=daemon.pid)
    disk = worker.ask("restored", tokens=prompt)
    result |= {
        "ttft_disk_s": disk["ttft_s"],
        "wall_disk_s": disk["ttft_wall_s"],
        "disk_reused": disk["reused"],
        "evaluated_disk": disk["evaluated"],
        "disk_ids": disk["ids"],
        "blocks_read": stats(socket_path)["cold_reads"],
    }
    result["answers_agree"] &= disk["ids"] == result["reference_ids"]
    if disk["error"]:
        result["errors"].append(disk["error"])


def measure(first, second, socket_path):
    text = INTRODUCTION + (ROOT / "LICENSE").read_text()
    prompt, other = (first.ask("tokenize", text=PROMPT.format(text=text, question=q))["tokens"]
                     for q in (QUESTION, OTHER_QUESTION))
    shared = common_prefix(prompt, other)

    say(f"cold: the first worker computes {len(prompt)} tokens (one thread, 10 to 20 s)")
    cold = first.ask("cold", tokens=prompt)
    say("storing what it computed")
    store = first.ask("store", tokens=prompt + cold["ids"][:-1])
    store["store_s"] += settle(first)
    before = stats(socket_path)

    say("repeat: the second worker gets the same prompt")
    repeat = second.ask("restored", tokens=prompt)
    say("question: the second worker gets the same text and another question")
    question = second.ask("restored", tokens=other)
    after = stats(socket_path)

    say("reference: the engine's own saved state, continued in the same way")
    warm_reference = first.ask("reference", tokens=prompt, reused=repeat["reused"])
    question_reference = first.ask("reference", tokens=other, reused=question["reused"])

    return {
        "prompt_tokens": len(prompt),
        "shared_tokens": shared,
        "tokens_reused": repeat["reused"],
        "question_tokens": len(other) - shared,
        "question_reused": question["reused"],
        "ttft_cold_s": cold["ttft_s"],
        "ttft_warm_s": repeat["ttft_s"],
        "ttft_question_s": question["ttft_s"],
        "prefill_s": cold["prefill_s"],
        "wall_cold_s": cold["ttft_wall_s"],
        "wall_warm_s": repeat["ttft_wall_s"],
        "wall_question_s": question["ttft_wall_s"],
        "setup_s": max(store["setup_s"], repeat["setup_s"]),
        "store_s": store["store_s"],
        "tokens_stored": store["stored"],
        "evaluated_cold": cold["evaluated"],
        "evaluated_warm": repeat["evaluated"],
        "evaluated_question": question["evaluated"],
        "answers_agree": repeat["ids"] == warm_reference["ids"]
        and question["ids"] == question_reference["ids"],
        "cold_ids": cold["ids"],
        "warm_ids": repeat["ids"],
        "reference_ids": warm_reference["ids"],
        "question_ids": question["ids"],
        "question_reference_ids": question_reference["ids"],
        "errors": [e for e in (store["error"], repeat["error"], question["error"]) if e],
        "blocks_served_before": before["served_blocks"],
        "blocks_served_after": after["served_blocks"],
        "bytes": {tier: after[f"{tier}_bytes"] for tier in ("hot", "packed", "packed_decoded")},
    }, {"cold": cold["text"], "question": question["text"]}, prompt


def table(result, texts):
    cold = result["ttft_cold_s"]
    rows = [
        ("cold", "first", cold, result["wall_cold_s"], 0, result["evaluated_cold"]),
        ("repeat", "second", result["ttft_warm_s"], result["wall_warm_s"],
         result["tokens_reused"], result["evaluated_warm"]),
        ("question", "second", result["ttft_question_s"], result["wall_question_s"],
         result["question_reused"], result["evaluated_question"]),
        ("from disk", "second", result["ttft_disk_s"], result["wall_disk_s"],
         result["disk_reused"], result["evaluated_disk"]),
    ]
    print(f"\n{result['prompt_tokens']} tokens of prompt; the question differs in its last "
          f"{result['question_tokens']} tokens\n")
    print(f"{'':10}{'worker':10}{'first token':>13}{'of cold':>10}{'(wall)':>11}"
          f"{'reused':>9}{'computed':>10}")
    for name, worker, s, wall, reused, evaluated in rows:
        share = "" if s == cold else f"1/{cold / s:.0f}"
        print(f"{name:10}{worker:10}{s:>11.3f} s{share:>10}{wall:>9.3f} s{reused:>9}"
              f"{evaluated:>10}")
    print(f"\nfirst token = CPU time of worker and daemon; setting up {result['setup_s']:.2f} s, "
          f"storing {result['store_s']:.2f} s")
    tiers = result["bytes"]
    print(f"the daemon holds {tiers['hot'] / 2**20:.1f} MiB ready to read and "
          f"{tiers['packed'] / 2**20:.1f} MiB packed (from {tiers['packed_decoded'] / 2**20:.1f} MiB); "
          f"it served {result['blocks_served_after'] - result['blocks_served_before']} blocks")
    print(f"restart: stopped in {result['stop_s']:.2f} s, ready in {result['start_s']:.2f} s, "
          f"{result['blocks_found']} blocks found on disk, {result['blocks_read']} read")
    shares = sorted(result["decode_share"].items(), key=lambda item: item[1])
    print(f"decoding {demo_presets.TOKENS} tokens, in shares of computing them: "
          + ", ".join(f"{name} {share:.2%}" for name, share in shares))
    print("answers agree with the engine's own saved state: "
          + ("yes" if result["answers_agree"] else "NO"))
    print(f"\ncold says:      {texts['cold'].strip()!r}\nquestion says:  {texts['question'].strip()!r}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("engine", type=Path)
    parser.add_argument("build", type=Path)
    arguments = parser.parse_args()
    os.environ["CISTERN_LIBRARY"] = str(arguments.build / "client" / "libcistern.so.0")
    os.environ["CISTERN_LLAMA_LIBRARY"] = str(
        arguments.build / "client" / "llama" / "libcistern-llama.so.0")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="cistern-demo-") as folder:
        result, texts = run(arguments.engine, arguments.build, folder,
                            os.path.join(folder, "disk"))
    table(result, texts)
    if arguments.json:
        print(json.dumps(result))
    return 0 if result["answers_agree"] and not result["errors"] else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
