# SPDX-License-Identifier: Apache-2.0
"""The demo: what it must show, and that it leaves nothing behind."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from engine_setup import ENGINE, ROOT, need_engine

need_engine()

COMMAND = [sys.executable, ROOT / "scripts" / "demo_run.py", "--json", ENGINE,
           os.environ["CST_BUILD_ROOT"]]


def environment(folder):
    return os.environ | {"TMPDIR": str(folder)}


def processes_with(text):
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and text in (entry / "cmdline").read_text():
                found.append(entry.name)
        except OSError:
            pass
    return found


def test_what_the_demo_shows(tmp_path):
    done = subprocess.run(COMMAND, env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout.splitlines()[-1])
    prompt, shared, tail = (shown[k] for k in ("prompt_tokens", "shared_tokens", "question_tokens"))
    assert shared >= 1500 and tail >= 16
    assert shown["errors"] == []
    # Time to the first token, in CPU time of worker and daemon.
    assert shown["ttft_warm_s"] <= shown["ttft_cold_s"] / 50
    assert shown["ttft_question_s"] <= shown["ttft_cold_s"] / 15
    # By the engine's own count.
    assert shown["tokens_reused"] == prompt - 1
    assert shown["question_reused"] >= shared - 1
    assert shown["evaluated_cold"] == prompt
    assert shown["evaluated_warm"] == 1
    assert shown["evaluated_question"] == shared + tail - shown["question_reused"]
    # The same 32 tokens as the engine's own saved state leads to.
    assert shown["answers_agree"]
    assert shown["warm_ids"] == shown["reference_ids"]
    assert shown["question_ids"] == shown["question_reference_ids"] != shown["warm_ids"]
    assert len(shown["warm_ids"]) == len(shown["question_ids"]) == 32
    # After a restart it is warm from disk.
    assert shown["disk_reused"] == prompt - 1 and shown["evaluated_disk"] == 1
    assert shown["ttft_disk_s"] <= shown["ttft_cold_s"] / 15
    assert shown["disk_ids"] == shown["reference_ids"]
    assert shown["blocks_found"] >= shown["blocks_read"] == -(-shown["disk_reused"] // 64)
    # By the daemon's count: the blocks of both prompts.
    served = shown["blocks_served_after"] - shown["blocks_served_before"]
    assert served == -(-shown["tokens_reused"] // 64) + -(-shown["question_reused"] // 64)
    assert shown["bytes"]["hot"] + shown["bytes"]["packed"] > 0
    # deep takes 3 to 5 % on an idle machine, and more on a busy one; the others stay far below.
    shares = shown["decode_share"]
    assert len(shares) == 12
    assert 0 < shares.pop("deep") < 0.25
    assert max(shares.values()) <= 0.05, shares
    assert list(tmp_path.iterdir()) == []
    assert processes_with(str(tmp_path)) == []


def test_interrupting_it_leaves_nothing_behind(tmp_path):
    demo = subprocess.Popen(COMMAND, env=environment(tmp_path), stdout=subprocess.DEVNULL,
                            stderr=subprocess.PIPE, text=True)
    for line in demo.stderr:
        if "cold:" in line:
            break
    assert processes_with(str(tmp_path))
    time.sleep(1)  # somewhere in the computation
    demo.send_signal(signal.SIGINT)
    rest = demo.stderr.read()
    assert demo.wait() == 130
    assert "Traceback" not in rest
    assert list(tmp_path.iterdir()) == []
    assert processes_with(str(tmp_path)) == []
