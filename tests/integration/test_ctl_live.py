# SPDX-License-Identifier: Apache-2.0
"""cisternctl against a real daemon: what it shows is what was stored, what it erases is gone, and it
shows and erases nothing of other namespaces unless its user is an administrator."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from lab import BLOCK_TOKENS, Layout, Peer, as_user, prompt
from private_daemon import PrivateDaemon

CTL = os.path.join(os.environ["CST_BUILD_ROOT"], "client", "ctl", "cisternctl")
LAYOUT = Layout(16 << 10)
FP = LAYOUT.fingerprint.hex()
TOKENS = prompt("ctl", 3, 5)
KEYS = LAYOUT.chain(TOKENS)
STRANGER = 61003
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="skipped: needs root")


@pytest.fixture
def daemon() -> Iterator[PrivateDaemon]:
    with PrivateDaemon(user=os.geteuid() if os.geteuid() == 0 else None) as d:
        yield d


@pytest.fixture
def peer(daemon: PrivateDaemon) -> Iterator[Peer]:
    p = Peer(daemon.socket, LAYOUT)
    p.put(TOKENS)
    yield p
    p.close()


def run(
    d: PrivateDaemon, *args: str, stdin: str = "", uid: int | None = None
) -> subprocess.CompletedProcess[str]:
    program = CTL if uid is None else d.copy(CTL)
    return subprocess.run(
        [program, "--socket", d.socket, *args], input=stdin, capture_output=True, text=True, user=uid,
        group=uid, extra_groups=None if uid is None else [], timeout=60,
        env={**os.environ, "CISTERN_SERVER_UID": str(os.geteuid())},
    )  # fmt: skip


def ask(d: PrivateDaemon, *args: str, stdin: str = "", uid: int | None = None) -> Any:
    done = run(d, "--json", *args, stdin=stdin, uid=uid)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_status_and_ping(daemon: PrivateDaemon, peer: Peer) -> None:
    assert daemon.process
    status = ask(daemon, "status")
    assert status["pid"] == daemon.process.pid
    assert (status["clients"], status["spaces"], status["backend"]) == (2, 1, "host")
    assert 0 < status["memory_used"] <= status["memory_limit"]
    ping = ask(daemon, "ping")
    assert (ping["epoch"], ping["namespace"]) == (status["epoch"], f"uid-{os.geteuid()}")


def test_listing(daemon: PrivateDaemon, peer: Peer) -> None:
    (space,) = ask(daemon, "ls", FP[:8])["spaces"]
    assert (space["fingerprint"], space["class"], space["kind"]) == (FP, "lossless", "tokens")
    assert (space["block_tokens"], space["block_bytes"]) == (BLOCK_TOKENS, LAYOUT.size)
    assert (space["blocks"], space["tail_blocks"]) == (4, 1)
    assert [b["key"] for b in space["listing"]] == [k.hex() for k in KEYS]
    assert [b["parent"] for b in space["listing"]] == [k.hex() for k in [LAYOUT.root(), *KEYS[:-1]]]
    assert [b["tokens"] for b in space["listing"]] == [16, 16, 16, 5]
    assert [b["depth"] for b in space["listing"]] == [0, 1, 2, 3]
    assert all(b["error"] == 0 for b in space["listing"])


def test_leases_show(daemon: PrivateDaemon, peer: Peer) -> None:
    leases = peer.acquire(KEYS[:1])
    assert ask(daemon, "ls", FP)["spaces"][0]["listing"][0]["leases"] == 1
    assert ask(daemon, "stats")["leases"] == 1
    peer.release(leases)
    assert ask(daemon, "stats")["leases"] == 0
    assert ask(daemon, "stats", FP[:4])["served_blocks"] == 1


def test_erase(daemon: PrivateDaemon, peer: Peer) -> None:
    assert ask(daemon, "erase", FP[:8], KEYS[1].hex()[:12]) == {"erased_blocks": 3}
    assert peer.lookup(TOKENS) == 1
    assert peer.get(KEYS[1:2]) == [None]
    assert ask(daemon, "erase", FP[:8], "--all", "--yes") == {"erased_blocks": 1}
    assert peer.lookup(TOKENS) == 0


def test_purge(daemon: PrivateDaemon, peer: Peer) -> None:
    assert ask(daemon, "purge", "--yes") == {"erased_blocks": 4, "result": "erased"}
    assert peer.lookup(TOKENS) == 0
    assert [s["blocks"] for s in ask(daemon, "spaces")["spaces"]] == [0]


def test_explain(daemon: PrivateDaemon, peer: Peer) -> None:
    other = TOKENS[: BLOCK_TOKENS + 3] + [TOKENS[BLOCK_TOKENS + 3] ^ 1] + TOKENS[BLOCK_TOKENS + 4 :]
    why = ask(daemon, "explain", FP[:8], stdin=" ".join(map(str, other)))
    assert (why["blocks"], why["present_blocks"]) == (3, 1)
    assert why["reason"]
    near = Layout(16 << 10, content=b"\x22" * 32)
    with Peer(daemon.socket, near):
        why = ask(daemon, "explain", near.fingerprint.hex(), stdin=str(TOKENS))
    assert (why["present_blocks"], why["field"], why["nearest"]) == (0, "content_id", FP)


@needs_root
def test_strangers(daemon: PrivateDaemon, peer: Peer) -> None:
    """Another user sees an empty daemon; an administrator sees, erases, purges all."""
    assert ask(daemon, "spaces", uid=STRANGER) == {"spaces": []}
    assert ask(daemon, "stats", uid=STRANGER)["blocks"] == 0
    for args in (["status"], ["purge", "uid-0", "--yes"]):
        done = run(daemon, *args, uid=STRANGER)
        assert done.returncode == 1
        assert "administrators" in done.stderr
    assert ask(daemon, "purge", "--yes", uid=STRANGER)["erased_blocks"] == 0
    assert peer.lookup(TOKENS) == 3
    with as_user(STRANGER):
        theirs = Peer(daemon.socket, LAYOUT)
    theirs.put(TOKENS[:BLOCK_TOKENS])
    names = {s["namespace"]: s["blocks"] for s in ask(daemon, "spaces")["spaces"]}
    assert names == {f"uid-{os.geteuid()}": 4, f"uid-{STRANGER}": 1}
    done = run(daemon, "erase", FP, "--all", "--yes")
    assert done.returncode == 1
    assert "2 spaces fit" in done.stderr
    theirs.put(TOKENS)
    erased = ask(daemon, "erase", FP, KEYS[2].hex(), "--namespace", f"uid-{STRANGER}")
    assert erased["erased_blocks"] == 2
    assert theirs.lookup(TOKENS) == 2
    assert ask(daemon, "purge", f"uid-{STRANGER}", "--yes")["erased_blocks"] == 2
    assert theirs.lookup(TOKENS) == 0
    assert peer.lookup(TOKENS) == 3
    theirs.close()


@needs_root
def test_socket_of_others(daemon: PrivateDaemon) -> None:
    os.chmod(daemon.socket, 0o660)
    done = run(daemon, "ping", uid=STRANGER)
    assert done.returncode == 1
    assert f"may not connect to {daemon.socket}" in done.stderr


def test_daemon_gone(daemon: PrivateDaemon, peer: Peer) -> None:
    daemon.kill()
    done = run(daemon, "status")
    assert done.returncode == 1
    assert "no daemon at " + daemon.socket in done.stderr
    daemon.start()
    assert ask(daemon, "spaces") == {"spaces": []}
