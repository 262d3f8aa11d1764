# SPDX-License-Identifier: Apache-2.0
"""The daemon's own life: where it listens, how it says that it is ready and alive, how it stops."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest
import wire
from lab import HANG_GUARD_S, Layout, Peer, payload, prompt, until
from private_daemon import PrivateDaemon, program

LAYOUT = Layout(16 << 10)


def run_daemon(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    """A daemon that is expected to end by itself."""
    return subprocess.run(
        [program(), *args], capture_output=True, text=True, timeout=HANG_GUARD_S, **options
    )  # type: ignore[call-overload,no-any-return]


def complained(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """It refused with one line that says why."""
    assert done.returncode not in (0, None) and done.returncode > 0
    assert all(word in done.stderr for word in words), done.stderr


def test_a_socket_in_use_is_refused_and_left_alone() -> None:
    with PrivateDaemon() as d, Peer(d.socket, LAYOUT) as p:
        tokens = prompt("stays", 1)
        p.put(tokens)
        complained(run_daemon("--socket", d.socket), d.socket)
        assert p.get(LAYOUT.chain(tokens)) == [payload(k, LAYOUT.size) for k in LAYOUT.chain(tokens)]
        with Peer(d.socket, LAYOUT) as other:
            assert other.lookup(tokens) == 1


def test_the_socket_of_a_dead_daemon_is_taken_over() -> None:
    with PrivateDaemon() as d:
        d.kill()
        assert os.path.exists(d.socket)
        d.start()
        Peer(d.socket).close()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/tmp/" + "x" * 120, ("107", "socket")),
        ("/nonexistent/folder/sock", ("/nonexistent/folder",)),
        ("/dev/null", ("/dev/null",)),
    ],
    ids=["too long", "no folder", "no socket"],
)
def test_a_path_that_cannot_be_a_socket_is_refused(path: str, words: tuple[str, ...]) -> None:
    complained(run_daemon("--socket", path), *words)


@pytest.mark.parametrize(
    "args",
    [("--nonsense",), ("--memory", "lots"), ("--memory", "1"), ("--policy", "magic"), ("--config", "/nonexistent")],
    ids=lambda args: " ".join(args),
)
def test_bad_options_are_refused(args: tuple[str, ...], tmp_path: Path) -> None:
    complained(run_daemon("--socket", str(tmp_path / "sock"), *args), args[-1].lstrip("-"))


class Notify:
    """A fake service manager."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.path)
        self.seen: list[str] = []

    def wait(self, what: str) -> None:
        while not any(line.startswith(what) for line in self.seen):
            ready, _, _ = select.select([self.socket], [], [], HANG_GUARD_S)
            assert ready, f"no {what} but {self.seen}"
            self.seen += self.socket.recv(4096).decode().splitlines()


def test_ready_watchdog_and_stopping_are_told(tmp_path: Path) -> None:
    notify = Notify(tmp_path / "notify")
    env = {**os.environ, "NOTIFY_SOCKET": notify.path, "WATCHDOG_USEC": "200000"}
    env.pop("WATCHDOG_PID", None)
    path = str(tmp_path / "sock")
    with subprocess.Popen([program(), "--socket", path], env=env) as daemon:
        try:
            notify.wait("READY=1")
            Peer(path).close()
            for _ in range(3):
                notify.wait("WATCHDOG=1")
                notify.seen.clear()
            daemon.send_signal(signal.SIGTERM)
            notify.wait("STOPPING=1")
            assert daemon.wait(HANG_GUARD_S) == 0
        finally:
            daemon.kill()
    assert not os.path.exists(path), "the socket is removed at a clean stop"


def test_socket_activation(tmp_path: Path) -> None:
    """The service manager's socket is used and left alone: not unlinked at the end."""
    path = str(tmp_path / "activated")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()

    def adopt() -> None:
        os.dup2(listener.fileno(), 3)
        os.set_inheritable(3, True)
        os.environ["LISTEN_PID"] = str(os.getpid())

    env = {**os.environ, "LISTEN_FDS": "1", "LISTEN_FDNAMES": "cistern.socket"}
    waiting = wire.Wire(path)  # connects before there is a daemon, as clients do during a restart
    shell = f'LISTEN_PID=$$ exec "{program()}"'
    with subprocess.Popen(["sh", "-c", shell], env=env, preexec_fn=adopt, pass_fds=(3,)) as daemon:
        try:
            assert waiting.hello().status == "OK"
            waiting.close()
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(HANG_GUARD_S) == 0
        finally:
            daemon.kill()
    assert os.path.exists(path)
    wire.Wire(path).close()  # the listener lives on
    listener.close()


def test_a_clean_stop_under_load_says_goodbye() -> None:
    """SIGTERM while clients work: each is told, leased memory stays readable, the exit code is 0."""
    d = PrivateDaemon().start()
    holder = Peer(d.socket, LAYOUT, name="holder")
    tokens = prompt("held", 3)
    holder.put(tokens)
    leases = holder.acquire(LAYOUT.chain(tokens))
    data = [holder.read(lease) for lease in leases]
    open_slots = holder.reserve(prompt("unfinished", 2))
    assert [s.status for s in open_slots] == ["OK", "OK"]

    worked = threading.Semaphore(0)
    ends: list[object] = []

    def load(number: int) -> None:
        try:
            with Peer(d.socket, LAYOUT, name=f"load {number}") as p:
                for i in range(1_000_000):
                    tokens = prompt(f"{number} {i % 50}", 2)
                    p.put(tokens)
                    assert p.get(LAYOUT.chain(tokens)) == [payload(k, LAYOUT.size) for k in LAYOUT.chain(tokens)]
                    worked.release()
        except (wire.Closed, BrokenPipeError, ConnectionError):
            ends.append("closed")
        except AssertionError as error:  # an answer of the stopping daemon
            ends.append("draining" if "DRAINING" in str(error) else error)

    threads = [threading.Thread(target=load, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(60):
        assert worked.acquire(timeout=HANG_GUARD_S)
    assert d.stop() == 0, d.log()
    for thread in threads:
        thread.join(HANG_GUARD_S)
    assert not [end for end in ends if end not in ("closed", "draining")] and len(ends) == 3
    assert holder.wait_push("Goodbye").fields["text"]
    assert holder.closed()
    assert data == [holder.read(lease) for lease in leases]
    assert not os.path.exists(d.socket)


def test_sigint_stops_as_well() -> None:
    d = PrivateDaemon().start()
    d.process.send_signal(signal.SIGINT)
    assert d.process.wait(HANG_GUARD_S) == 0


def test_a_second_signal_stops_at_once() -> None:
    """The first waits for what is under way, the second doesn't; which comes in time is open."""
    d = PrivateDaemon().start()
    p = Peer(d.socket, LAYOUT)
    p.reserve(prompt("open", 1))
    d.process.send_signal(signal.SIGTERM)
    d.process.send_signal(signal.SIGTERM)
    assert d.process.wait(HANG_GUARD_S) in (0, 1)
    p.close()
