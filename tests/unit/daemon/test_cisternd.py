#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The program cisternd: options, readiness, signals, socket activation, watchdog, defaults.

usage: test_cisternd.py CISTERND. Plain unittest, no packages.
"""
import ctypes
import os
import re
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

CISTERND = sys.argv.pop(1) if len(sys.argv) > 1 else "build/daemon/cisternd"
LIMIT_S = 60
OTHER_UID = 54321


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def packet(kind, payload=b""):
    return struct.pack("<IBBHII", 0x4E545343, 1, 0, kind, len(payload), 1) + payload


def ping(path):
    """The reply's type and flags, or the error of connecting."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.settimeout(LIMIT_S)
        s.connect(str(path))
        s.send(packet(2))
        reply = s.recv(4096)
    return struct.unpack("<IBBHII", reply[:16])[2:4]


class Daemon:
    """One running cisternd and what it tells systemd."""

    def __init__(self, folder, *args, env=None, wait=True, **kwargs):
        self.notify_path = os.path.join(folder, "notify")
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        if os.path.exists(self.notify_path):
            os.unlink(self.notify_path)
        self.notify.bind(self.notify_path)
        os.chmod(self.notify_path, 0o777)
        self.notify.settimeout(LIMIT_S)
        self.log_path = os.path.join(folder, "log")
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [CISTERND, *args], stderr=log,
                env={"PATH": os.environ["PATH"], "NOTIFY_SOCKET": self.notify_path, **(env or {})},
                **{"preexec_fn": die_with_parent, **kwargs})
        if wait:
            self.wait_for("READY=1")

    def wait_for(self, line):
        ended = os.pidfd_open(self.process.pid)
        try:
            while True:
                ready, _, _ = select.select([self.notify, ended], [], [], LIMIT_S)
                if self.notify in ready:
                    if line in self.notify.recv(4096).decode().split("\n"):
                        return
                else:
                    raise AssertionError(f"no {line}: {self.log()}")
        finally:
            os.close(ended)

    def log(self):
        return Path(self.log_path).read_text(encoding="utf-8")

    def stop(self, signal_number=signal.SIGTERM):
        self.process.send_signal(signal_number)
        return self.process.wait(LIMIT_S)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.notify.close()


class CisterndTest(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="cisternd-")
        self.addCleanup(shutil.rmtree, self.dir, ignore_errors=True)
        self.sock = os.path.join(self.dir, "sock")

    def start(self, *args, **kwargs):
        daemon = Daemon(self.dir, *args, **kwargs)
        self.addCleanup(daemon.close)
        return daemon

    def fails(self, *args, code=1, env=None):
        run = subprocess.run([CISTERND, *args], capture_output=True, text=True, timeout=LIMIT_S,
                             env={"PATH": os.environ["PATH"], **(env or {})})
        self.assertEqual(run.returncode, code, run.stderr)
        self.assertEqual(len(run.stderr.strip().splitlines()), 1, run.stderr)  # one sentence
        return run.stderr

    # ---- options ----

    def test_help_names_every_setting_of_the_sample(self):
        text = subprocess.run([CISTERND, "--help"], capture_output=True, text=True).stdout
        sample = subprocess.run([CISTERND, "--print-config"], capture_output=True, text=True).stdout
        keys = [k for k in re.findall(r"^#(\w+) =", sample, re.M) if k not in ("cgroup", "uid", "gid")]
        self.assertGreater(len(keys), 20)
        for key in keys:
            self.assertIn(f"  --{key.replace('_', '-')} ", text)
        self.assertLess(max(map(len, text.splitlines())), 100)

    def test_manual_page_says_what_the_table_says(self):
        page = (Path(__file__).parents[3] / "docs/man/cistern.conf.5").read_text(encoding="utf-8")
        text = " ".join(page.split())
        sample = subprocess.run([CISTERND, "--print-config"], capture_output=True, text=True).stdout
        rows = re.findall(r"((?:^# .*\n)+)^#(\w+) =(.*)\n", sample.split("[daemon]\n")[1], re.M)
        rows = [(h, k, v) for h, k, v in rows if k not in ("cgroup", "uid", "gid")]
        self.assertEqual([k for _, k, _ in rows], re.findall(r"^\.It Va (\w+) =", page, re.M))
        for words, key, value in rows:
            live = value.endswith("; (live)")
            value = value.removesuffix("; (live)").strip() or "(empty)"
            self.assertIn(f"\n.It Va {key} = {value}{' , live' if live else ''}\n", page)
            self.assertIn(" ".join(words.replace("\n# ", " ").removeprefix("# ").split()), text)

    def test_version(self):
        text = subprocess.run([CISTERND, "--version"], capture_output=True, text=True).stdout
        self.assertRegex(text, r"^cisternd \d+\.\d+\.\d+\n$")

    def test_wrong_usage(self):
        self.assertIn("memori", self.fails("--memori", "1GiB", code=2))
        self.assertIn("wants a size", self.fails("--memory", "plenty", code=2))
        self.assertIn("wants a value", self.fails("--memory", code=2))
        self.assertIn("no option --memry", self.fails("--memry", code=2))
        self.assertIn("16MiB to 1024TiB", self.fails("--memory", "1", code=2))
        self.assertIn("1ms to 1d", self.fails("--hello-timeout", "0", code=2))
        self.assertIn("0 to 0777", self.fails("--socket-mode", "1777", code=2))
        self.assertIn("no option", self.fails("sock", code=2))
        self.assertIn("No such file", self.fails("--config", self.dir + "/none", code=2))
        self.assertIn("at most 107", self.fails("--socket", "/" + "x" * 120, code=2))

    def test_config_file_and_command_line(self):
        conf = os.path.join(self.dir, "conf")
        Path(conf).write_text(f"[daemon]\nsocket = {self.dir}/elsewhere\nmemory = 32MiB\n")
        daemon = self.start("--config", conf, "--socket=" + self.sock)
        self.assertIn("32 MiB", daemon.log())
        self.assertEqual(ping(self.sock), (1, 2))
        self.assertEqual(daemon.stop(), 0)
        Path(conf).write_text("[daemon]\nmemory = a lot\n")
        self.assertIn("line 2", self.fails("--config", conf, code=2))

    # ---- output ----

    def test_closed_standard_descriptors_stay_free_of_data(self):
        def close_all():
            die_with_parent()
            for fd in range(3):
                os.close(fd)

        process = subprocess.Popen([CISTERND, "--socket", self.sock, "--memory", "32MiB"],
                                   preexec_fn=close_all, close_fds=False)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        ended = os.pidfd_open(process.pid)
        self.addCleanup(os.close, ended)
        while not self.is_up():
            self.assertEqual(select.select([ended], [], [], 0.01)[0], [])
        for fd in range(3):
            self.assertEqual(os.readlink(f"/proc/{process.pid}/fd/{fd}"), "/dev/null")

    def is_up(self):
        try:
            return ping(self.sock) == (1, 2)
        except OSError:
            return False

    def test_log_that_nobody_reads(self):
        read, write = os.pipe()
        daemon = self.start("--socket", self.sock, "--memory", "32MiB", "--log-level", "debug",
                            pass_fds=[write], preexec_fn=lambda: (die_with_parent(),
                                                                  os.dup2(write, 2)))
        os.close(write)
        os.close(read)
        self.assertEqual(ping(self.sock), (1, 2))  # each connection is a line of the log
        self.assertEqual(ping(self.sock), (1, 2))
        self.assertEqual(daemon.stop(), 0)

    def test_no_descriptors_left(self):
        daemon = self.start("--socket", self.sock, "--memory", "32MiB",
                            preexec_fn=lambda: (die_with_parent(), resource.setrlimit(
                                resource.RLIMIT_NOFILE, (20, 20))))
        clients = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(20)]
        for client in clients:
            client.connect(self.sock)
        while "Too many open files" not in daemon.log():
            self.assertIsNone(daemon.process.poll())
            time.sleep(0.01)
        for client in clients:
            client.close()
        while not self.is_up():
            self.assertIsNone(daemon.process.poll())
        self.assertEqual(daemon.stop(), 0)

    # ---- sockets ----

    def test_socket_in_use(self):
        daemon = self.start("--socket", self.sock, "--memory", "32MiB")
        self.assertIn("another cisternd serves", self.fails("--socket", self.sock))
        self.assertEqual(ping(self.sock), (1, 2))
        self.assertEqual(daemon.stop(), 0)
        self.assertEqual([f for f in os.listdir(self.dir) if f.startswith("sock")], [])

    def test_killed_daemon_is_replaced(self):
        self.start("--socket", self.sock, "--memory", "32MiB").stop(signal.SIGKILL)
        self.assertTrue(os.path.exists(self.sock))
        self.start("--socket", self.sock, "--memory", "32MiB")
        self.assertEqual(ping(self.sock), (1, 2))

    def test_admin_socket(self):
        admin = os.path.join(self.dir, "admin")
        self.start("--socket", self.sock, "--admin-socket", admin, "--memory", "32MiB")
        self.assertEqual(os.stat(admin).st_mode & 0o777, 0o600)
        self.assertEqual(os.stat(self.sock).st_mode & 0o777, 0o660)
        self.assertEqual(ping(admin), (1, 2))

    def test_runs_without_root_config_or_options(self):
        if os.geteuid():
            self.skipTest("starts the daemon as another user")
        os.chmod(self.dir, 0o777)
        runtime = os.path.join(self.dir, "runtime")
        os.mkdir(runtime, 0o700)
        os.chown(runtime, OTHER_UID, OTHER_UID)
        other = {"user": OTHER_UID, "group": OTHER_UID, "extra_groups": [],
                 "executable": shutil.copy(CISTERND, self.dir)}  # the checkout may be root's alone
        daemon = self.start(env={"XDG_RUNTIME_DIR": runtime}, **other)
        folder = os.path.join(runtime, "cistern")
        self.assertEqual(os.stat(folder).st_mode & 0o777, 0o700)
        self.assertEqual(ping(os.path.join(folder, "cistern.sock")), (1, 2))
        self.assertEqual(ping(os.path.join(folder, "admin.sock")), (1, 2))
        self.assertEqual(daemon.stop(), 0)
        daemon = self.start(**other)
        folder = f"/tmp/cistern-{OTHER_UID}"
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        self.assertEqual(ping(os.path.join(folder, "cistern.sock")), (1, 2))
        self.assertEqual(daemon.stop(), 0)

    # ---- systemd ----

    def activate(self, sockets, env=None):
        """Starts cisternd as systemd does: listening sockets from descriptor 3 on."""
        names = []
        fds = []
        for name, kind in sockets:
            s = socket.socket(socket.AF_UNIX, kind)
            path = os.path.join(self.dir, name)
            s.bind(path)
            s.listen(4)
            self.addCleanup(s.close)
            names.append(name)
            fds.append(s.fileno())

        def prepare():
            die_with_parent()
            high = [os.dup2(fd, 100 + i) for i, fd in enumerate(fds)]
            for i, fd in enumerate(high):
                os.dup2(fd, 3 + i)
                os.close(fd)
            os.environ["LISTEN_PID"] = str(os.getpid())
            os.execve(CISTERND, [CISTERND, "--memory", "32MiB"],
                      {**os.environ, "LISTEN_FDS": str(len(fds)), "LISTEN_FDNAMES": ":".join(names),
                       **(env or {})})
        pid = os.fork()
        if not pid:
            try:
                prepare()
            finally:
                os._exit(127)
        return pid

    def test_socket_activation(self):
        pid = self.activate([("main", socket.SOCK_SEQPACKET), ("admin", socket.SOCK_SEQPACKET)])
        try:
            self.assertEqual(ping(os.path.join(self.dir, "main")), (1, 2))  # waits in the backlog
            self.assertEqual(ping(os.path.join(self.dir, "admin")), (1, 2))
        finally:
            os.kill(pid, signal.SIGTERM)
            self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0)
        self.assertTrue(os.path.exists(os.path.join(self.dir, "main")))  # systemd's, not ours

    def test_socket_of_the_wrong_kind(self):
        pid = self.activate([("main", socket.SOCK_STREAM)])
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 1)

    def test_watchdog_is_fed_and_a_stuck_loop_is_not(self):
        daemon = self.start("--socket", self.sock, "--memory", "32MiB",
                            env={"WATCHDOG_USEC": "200000"})
        for _ in range(3):
            daemon.wait_for("WATCHDOG=1")
        daemon.process.send_signal(signal.SIGSTOP)  # as stuck as a loop can be
        os.waitid(os.P_PID, daemon.process.pid, os.WSTOPPED)
        while select.select([daemon.notify], [], [], 0)[0]:
            daemon.notify.recv(4096)
        self.assertEqual(select.select([daemon.notify], [], [], 0.6)[0], [])
        daemon.process.send_signal(signal.SIGCONT)
        daemon.wait_for("WATCHDOG=1")

    # ---- signals ----

    def test_clean_stop_says_goodbye(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            daemon = self.start("--socket", self.sock, "--memory", "32MiB")
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
                s.settimeout(LIMIT_S)
                s.connect(self.sock)
                s.send(packet(2))
                s.recv(4096)
                daemon.process.send_signal(number)
                goodbye = s.recv(4096)
                self.assertEqual(struct.unpack("<IBBHII", goodbye[:16])[2:4], (4, 103))
                self.assertEqual(s.recv(4096), b"")
            daemon.wait_for("STOPPING=1")
            self.assertEqual(daemon.process.wait(LIMIT_S), 0)

    def test_reload(self):
        conf = os.path.join(self.dir, "conf")
        Path(conf).write_text("[daemon]\nmemory = 32MiB\nlog_level = warning\n")
        daemon = self.start("--config", conf, "--socket", self.sock)
        self.assertEqual(daemon.log(), "")
        Path(conf).write_text("[daemon]\nmemory = 48MiB\nlog_level = info\n")
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for("RELOADING=1")
        daemon.wait_for("READY=1")
        self.assertIn("configuration reloaded", daemon.log())
        self.assertIn("memory changes with a restart", daemon.log())
        Path(conf).write_text("[daemon]\nmemory = much\n")
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for("READY=1")
        self.assertIn("keeping the configuration", daemon.log())
        self.assertEqual(ping(self.sock), (1, 2))

    # ---- process ----

    def test_no_dumps(self):
        daemon = self.start("--socket", self.sock, "--memory", "32MiB")
        limits = Path(f"/proc/{daemon.process.pid}/limits").read_text()
        self.assertRegex(limits, r"Max core file size +0 +0 ")
        soft, hard = re.search(r"Max open files +(\d+) +(\d+)", limits).groups()
        self.assertEqual(soft, hard)

    def test_idle_daemon_sleeps(self):
        """After a while without requests the loop wakes a few times in ten seconds, not a hundred."""
        daemon = self.start("--socket", self.sock, "--memory", "32MiB")
        status = Path(f"/proc/{daemon.process.pid}/status")

        def switches():
            return int(re.search(r"\nvoluntary_ctxt_switches:\s+(\d+)", status.read_text())[1])
        time.sleep(4)
        before = switches()
        time.sleep(2)
        self.assertLessEqual(switches() - before, 4)


if __name__ == "__main__":
    unittest.main(verbosity=1)
