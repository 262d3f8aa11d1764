# SPDX-License-Identifier: Apache-2.0
"""A private daemon for Python tests: `with PrivateDaemon("--memory", "64MiB") as d: d.socket`.

Ready when entered (it speaks sd_notify to us), stopped when left; a non-zero exit then raises with
the daemon's log. Restart with kill() or stop() and start().
"""
import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile

READY_LIMIT_S = 60


def program():
    """Path of the daemon: $CISTERND, else daemon/cisternd in $CST_BUILD_ROOT; None if there is none."""
    path = os.environ.get("CISTERND") or os.path.join(
        os.environ.get("CST_BUILD_ROOT", "build"), "daemon", "cisternd")
    return path if os.access(path, os.X_OK) else None


_libc = ctypes.CDLL(None)


class PrivateDaemon:
    """`user`: a uid to run it as, and anybody may connect then (needs root). `env` is added to its
    environment."""

    def __init__(self, *args, user=None):
        self.args = args if user is None else (*args, "--socket-mode", "0666")
        self.user = user
        self.dir = tempfile.mkdtemp(prefix="cistern-test-")
        if user is not None:
            os.chown(self.dir, user, user)
            os.chmod(self.dir, 0o755)
        self.socket = os.path.join(self.dir, "sock")
        self.log_path = os.path.join(self.dir, "log")
        self.program = program() if user is None else self.copy(program())
        self.process = None
        self.env = {}

    def copy(self, path):
        """Of a program, so that any user can start it although the checkout may be root's alone."""
        return shutil.copy(path, self.dir)

    def start(self):
        notify_path = os.path.join(self.dir, "notify")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            if os.path.exists(notify_path):
                os.unlink(notify_path)
            notify.bind(notify_path)
            os.chmod(notify_path, 0o666)
            with open(self.log_path, "ab") as log:
                self.process = subprocess.Popen(
                    [self.program, "--socket", self.socket, *self.args], stderr=log,
                    env={**os.environ, **self.env, "NOTIFY_SOCKET": notify_path},
                    preexec_fn=self._before_exec)
            ended = os.pidfd_open(self.process.pid)
            try:
                while True:
                    ready, _, _ = select.select([notify, ended], [], [], READY_LIMIT_S)
                    if notify in ready:
                        if b"READY=1" in notify.recv(4096).split(b"\n"):
                            return self
                    elif ended in ready:
                        raise RuntimeError(f"the daemon ended: {self.log()}")
                    else:
                        raise TimeoutError(f"the daemon is not ready: {self.log()}")
            finally:
                os.close(ended)

    def _before_exec(self):
        if self.user is not None:
            os.setgroups([])
            os.setgid(self.user)
            os.setuid(self.user)
        _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; a change of uid would clear it

    def log(self):
        with open(self.log_path, encoding="utf-8", errors="replace") as f:
            return f.read()

    def stop(self):
        """SIGTERM, then waits; returns the exit status."""
        process, self.process = self.process, None
        if not process:
            return 0
        process.terminate()
        return process.wait()

    def kill(self):
        process, self.process = self.process, None
        if process:
            process.kill()
            process.wait()

    def __enter__(self):
        try:
            return self.start()
        except BaseException:
            shutil.rmtree(self.dir, ignore_errors=True)
            raise

    def __exit__(self, kind, value, trace):
        status = self.stop()
        text = self.log()
        shutil.rmtree(self.dir, ignore_errors=True)
        if status and not kind:
            raise RuntimeError(f"the daemon ended with {status}: {text}")
