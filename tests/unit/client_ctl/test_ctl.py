#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""cisternctl against a scripted daemon: what it sends, prints and returns, whatever it is told.

usage: test_ctl.py CISTERNCTL

The scripted daemon speaks the protocol with the encoder of the golden packets, which was written
from docs/protocol.md, so requests are checked byte for byte against an independent source.
"""
import json
import os
import pty
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path

ROOT = Path(os.environ.get("CST_SOURCE_ROOT", Path(__file__).parents[3]))
sys.path.insert(0, str(ROOT / "tests/golden"))
from make_keys import chain, sha, u32  # noqa: E402
from make_packets import ERROR, REPLY, message, packet, record  # noqa: E402

CTL = sys.argv.pop(1) if len(sys.argv) > 1 and os.access(sys.argv[1], os.X_OK) else "cisternctl"
HELLO, PING, ERASE, EXPLAIN, STATS, SPACES, BLOCKS, STATUS, PURGE = 1, 2, 18, 19, 21, 22, 23, 40, 41
FP = [bytes([i]) * 32 for i in (0xaa, 0xaa, 0xab, 0xcd)]
ESC = b"\x1b[31mred"


def space(handle, fp, kind=0, klass=0, ns=b"uid-7", engine=b"llama.cpp", tokens=16):
    return record("IBBHIIQQQQQQ32s32s64s64s", handle, kind, klass, 0, tokens, 0b11, 3 << 20, 5, 1,
                  15 << 20, 1536, 700, fp, sha(b"model"), ns, engine)


SPACE_RECORDS = [space(1, FP[0]), space(2, FP[1], klass=1), space(3, FP[2], kind=1, ns=b"other"),
                 space(4, FP[3], engine=ESC)]


def block(key, tokens=16, depth=0, error=0.0):
    return record("32s32sQIIBBHf", key, bytes(32), 1000, tokens, depth, 2, 1, 3, error)


BLOCK_RECORDS = [block(bytes([0x11, i]) * 16, depth=i, error=i / 8) for i in range(3)]


def paged(records):
    """Answers a cursor request with one record a packet."""
    def answer(payload):
        fields = decode(payload)
        at = fields.get(1 if records is SPACE_RECORDS else 2, 0)
        more = at + 1 if at + 1 < len(records) else 0
        return message(records[at], more)
    return answer


def decode(payload):
    """The fields of a flat message: {number: int or bytes}."""
    out, at = {}, 0

    def varint():
        nonlocal at
        v = shift = 0
        while True:
            byte = payload[at]
            at += 1
            v |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return v

    while at < len(payload):
        tag = varint()
        value = varint()
        if tag & 7 == 2:
            at, value = at + value, payload[at:at + value]
        out[tag >> 3] = value
    return out


HELLO_REPLY = message(1, 0x1122334455667788, 131072, 65536, 64, 1 << 26, 0, "uid-7", "9.9.9")
STATUS_REPLY = message("9.9.9", (1 << 64) - 1, 90_061_000, 1 << 30, 1 << 20, 1 << 28, 4096, 2, 3, 2,
                       1 << 26, 0, 100, 1, 0, "arc", "host", 4242, 2, 1, 0)
ANSWERS = {
    HELLO: HELLO_REPLY,
    PING: b"",
    STATUS: STATUS_REPLY,
    STATS: message(*range(1001, 1030)),
    SPACES: paged(SPACE_RECORDS),
    BLOCKS: paged(BLOCK_RECORDS),
    ERASE: message(b"\0\0", 12),
    PURGE: message(34, "erased"),
    EXPLAIN: message(1, "the second block differs", "layers", FP[1], 2),
}


class Daemon:
    """Serves one connection after the other; keeps every request."""

    def __init__(self, path, answers):
        self.answers, self.requests = {**ANSWERS, **answers}, []
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(path)
        self.listener.listen(5)
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            with sock:
                while data := sock.recv(1 << 17):
                    _, _, number, _, request = struct.unpack("<4sHHII", data[:16])
                    self.requests.append((number, data[16:]))
                    answer = self.answers[number]
                    if callable(answer):
                        answer = answer(data[16:])
                    if answer is None:
                        break
                    flags = REPLY
                    if isinstance(answer, tuple):
                        flags, answer = REPLY | ERROR, struct.pack("<H", answer[0]) + answer[1]
                    sock.send(packet(number, answer, flags, request))

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.listener.close()

    def of(self, number):
        return [payload for n, payload in self.requests if n == number]


class Case(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.TemporaryDirectory(prefix="cistern-test-")
        self.path = os.path.join(self.dir.name, "sock")
        self.daemon = None

    def tearDown(self):
        if self.daemon:
            self.daemon.close()
        self.dir.cleanup()

    def serve(self, **answers):
        self.daemon = Daemon(self.path, {globals()[k]: v for k, v in answers.items()})

    def ctl(self, *args, status=0, stdin="", env=None, stdout=subprocess.PIPE):
        if not self.daemon:
            self.serve()
        done = subprocess.run([CTL, "--socket", self.path, *args], input=stdin.encode(),
                              stdout=stdout, stderr=subprocess.PIPE, timeout=60,
                              env={**os.environ, **(env or {})})
        self.assertEqual(done.returncode, status, done.stderr)
        self.out, self.err = (done.stdout or b"").decode(), done.stderr.decode()
        self.assertNotIn("\x1b", self.out + self.err)
        self.assertEqual(bool(self.err), status != 0, self.err)
        return self.out

    def json(self, *args, **kw):
        return json.loads(self.ctl("--json", *args, **kw))


class Watch(Case):
    def test_ping(self):
        self.assertRegex(self.ctl("ping"),
                         r"^cisternd 9\.9\.9 answers in \d+ us; we are in namespace uid-7\n$")
        got = self.json("ping")
        self.assertGreater(got.pop("round_trip_us"), 0)
        self.assertEqual(got, {"version": "9.9.9", "namespace": "uid-7",
                               "epoch": "1122334455667788"})

    def test_status(self):
        got = self.json("status")
        self.assertEqual(got["epoch"], "f" * 16)
        self.assertEqual(got["memory_limit"], 1 << 30)
        self.assertEqual(got["policy"], "arc")
        self.assertEqual(len(got), 38)
        out = self.ctl("status")
        for line in ("running for           1 d 1 h", "memory in use         1.0 MiB",
                     "of at most            1.0 GiB", "process               4242"):
            self.assertIn(line, out)

    def test_status_of_an_odd_daemon(self):
        for ms, text in ((5_500, "5.5 s"), (61_000, "1 min 1 s"), (7_260_000, "2 h 1 min")):
            odd = 'v"\\\n'
            self.serve(STATUS=message(odd, 1, ms))
            self.assertEqual(self.json("status")["version"], odd)
            self.assertIn(f"running for           {text}\n", self.ctl("status"))
            self.tearDown()
            self.setUp()

    def test_stats(self):
        got = self.json("stats")
        self.assertEqual((got["blocks"], got["packed_slab_bytes"], len(got)), (1001, 1029, 42))
        self.assertEqual(self.daemon.of(STATS), [b""])
        out = self.ctl("stats", "cdcd")
        self.assertIn("space " + "cd" * 8, out)
        self.assertIn("tail blocks           1002", out)
        self.assertEqual(self.daemon.of(STATS)[1], message(4))


class Spaces(Case):
    def test_list(self):
        got = self.json("spaces")["spaces"]
        self.assertEqual(len(self.daemon.of(SPACES)), 4)
        self.assertEqual([s["fingerprint"] for s in got], [fp.hex() for fp in FP])
        first = got[0]
        self.assertEqual((first["class"], first["kind"], first["namespace"], first["engine"]),
                         ("lossless", "tokens", "uid-7", "llama.cpp"))
        self.assertEqual((first["blocks"], first["hot_bytes"], first["presets"]),
                         (5, 15 << 20, ["raw", "lossless"]))
        self.assertEqual((got[1]["class"], got[2]["kind"]), ("near-lossless", "flat"))
        out = self.ctl("spaces").splitlines()
        self.assertEqual(len(out), 5)
        self.assertIn("aaaaaaaaaaaaaaaa  lossless", out[1])
        self.assertIn("15.0 MiB", out[1])
        self.assertIn("?[31mred", out[4])  # no escape reaches the terminal
        self.assertEqual({len(line) for line in out}, {len(out[0])})

    def test_none(self):
        self.serve(SPACES=b"")
        self.assertEqual(self.ctl("spaces"), "no spaces\n")
        self.assertEqual(self.json("spaces"), {"spaces": []})
        self.assertEqual(self.json("ls"), {"spaces": []})

    def test_namespace(self):
        got = self.json("spaces", "--namespace", "other")["spaces"]
        self.assertEqual([s["fingerprint"] for s in got], [FP[2].hex()])
        self.assertEqual(self.json("spaces", "--namespace", "othe")["spaces"], [])

    def test_endless_pages(self):
        self.serve(SPACES=message(SPACE_RECORDS[0], 1), BLOCKS=message(BLOCK_RECORDS[0], 1))
        self.assertEqual(len(self.json("spaces")["spaces"]), 2)  # 0, 1, and then no progress

    def test_naming(self):
        for spec, answer in (("aa", "is too short"), ("aaaa", "2 spaces fit"),
                             ("0000", "no space begins with"), ("aaaa/cold", "no space begins"),
                             ("aaaa/l/tokens", "no space"), ("aaaag", "no space"),
                             ("a" * 65, "no space"), ("", "is too short")):
            self.ctl("stats", spec, status=1)
            self.assertIn(answer, self.err)
        for spec, handle in (("aaaa/lossless", 1), ("aaaa/near-lossless/tokens", 2), ("abab", 3),
                             ("aa" * 32 + "/lossless/tokens", 1), ("cdcd/lossless", 4)):
            self.ctl("stats", spec)
            self.assertEqual(self.daemon.of(STATS)[-1], message(handle))


class Ls(Case):
    def test_blocks(self):
        got = self.json("ls", "cdcd")["spaces"]
        self.assertEqual(len(got), 1)
        self.assertEqual([b["key"] for b in got[0]["listing"]],
                         [(bytes([0x11, i]) * 16).hex() for i in range(3)])
        self.assertEqual(got[0]["listing"][1], {
            "key": "1101" * 16, "parent": "00" * 32, "tokens": 16, "depth": 1, "tier": "packed",
            "preset": "lossless", "packed_bytes": 1000, "leases": 3, "error": 0.125})
        out = self.ctl("ls", "cdcd").splitlines()
        self.assertEqual(len(out), 5)
        self.assertIn("cd" * 32 + "/lossless/tokens", out[0])
        self.assertEqual({len(line) for line in out[1:]}, {len(out[1])})

    def test_all(self):
        self.assertEqual([len(s["listing"]) for s in self.json("ls")["spaces"]], [3] * 4)

    def test_failure_in_the_middle(self):
        self.serve(BLOCKS=lambda payload: (40, b"full") if decode(payload).get(2) else
                   message(BLOCK_RECORDS[0], 1))
        got = self.json("ls", status=1)
        self.assertEqual(got["spaces"][0]["listing"][1], {"error": "full"})
        self.ctl("ls", status=1)
        self.assertIn("full", self.err)

    def test_odd_error_values(self):
        self.serve(BLOCKS=message(block(b"k" * 32, error=float("nan"))))
        self.assertIsNone(self.json("ls", "cdcd")["spaces"][0]["listing"][0]["error"])


class Care(Case):
    def test_erase(self):
        self.assertEqual(self.ctl("erase", "cdcd", "11011101", "1102" * 16), "erased 12 blocks\n")
        self.assertEqual(self.daemon.of(ERASE),
                         [message(4, b"\x11\x01" * 16 + b"\x11\x02" * 16)])
        self.assertEqual(self.json("erase", "cdcd", "11001100"), {"erased_blocks": 12})

    def test_erase_nothing_by_guess(self):
        same = block(b"\x11\x01" * 15 + b"zz")
        self.serve(BLOCKS=message(b"".join([*BLOCK_RECORDS, same])))
        for keys, answer in ((["11011101"], "2 blocks begin with"), (["99999999"], "0 blocks of"),
                             (["1100110"], "is no key"), (["11" * 33], "is no key"),
                             (["1100110x"], "is no key"), (["11001100", "22222222"], "0 blocks")):
            self.ctl("erase", "cdcd", *keys, status=1)
            self.assertIn(answer, self.err)
        self.ctl("erase", "cdcd", *["11001100"] * 1001, status=1)
        self.assertIn("at most 1000", self.err)
        self.assertEqual(self.daemon.of(ERASE), [])

    def test_erase_all(self):
        self.ctl("erase", "cdcd", "--all", status=1)
        self.assertIn("this would erase all 5 blocks of the space; say --yes", self.err)
        self.assertEqual(self.daemon.of(ERASE), [])
        self.ctl("erase", "cdcd", "--all", "--yes")
        self.assertEqual(self.daemon.of(ERASE), [message(4, None, 1)])

    def test_purge(self):
        self.ctl("purge", status=1)
        self.assertEqual(self.daemon.of(PURGE), [])
        self.assertEqual(self.ctl("purge", "--yes"), "erased 34 blocks\n")
        self.assertEqual(self.json("purge", "other", "--yes"),
                         {"erased_blocks": 34, "result": "erased"})
        self.assertEqual(self.daemon.of(PURGE), [b"", message("other")])

    def test_explain(self):
        ids = list(range(1, 16 * 2 + 4))
        root = sha(b"cistern.root.1", FP[3], u32(4), b"salt")
        self.ctl("explain", "cdcd", "--salt", "salt", stdin=str(ids))
        self.assertIn("1 of 2 full blocks", self.out)
        self.assertIn("the second block differs", self.out)
        self.assertIn("aaaaaaaaaaaaaaaa, has 2; differs in layers", self.out)
        self.assertEqual(self.daemon.of(EXPLAIN), [
            message(4, chain(root, ids[:32], 16), None, u32(*ids[32:]))])
        path = os.path.join(self.dir.name, "ids")
        Path(path).write_text("4294967295\n7", encoding="ascii")
        got = self.json("explain", "cdcd", path)
        self.assertEqual((got["blocks"], got["present_blocks"], got["nearest"]),
                         (0, 1, FP[1].hex()))
        self.assertEqual(self.daemon.of(EXPLAIN)[1], message(4, None, None, u32(4294967295, 7)))

    def test_explain_bad_tokens(self):
        for text, answer in (("", "there are no token ids"), ("1 2 4294967296", "token 3"),
                             ("1 -2", "'-' is no token id"), ("1 two", "'t' is no"),
                             ("1.5", "'.' is no"), ("9" * 100, "token 1")):
            self.ctl("explain", "cdcd", status=1, stdin=text)
            self.assertIn(answer, self.err)
        self.ctl("explain", "cdcd", "/nowhere", status=1)
        self.assertIn("/nowhere: No such file", self.err)
        self.ctl("explain", "abab", status=1, stdin="1")
        self.assertIn("flat", self.err)
        self.ctl("explain", "cdcd", "--salt", "s" * 65, status=1, stdin="1")
        self.assertEqual(self.daemon.of(EXPLAIN), [])


class Failures(Case):
    def test_error_reply(self):
        self.serve(STATUS=(30, b"only administrators\x1b may"))
        self.ctl("status", status=1)
        self.assertEqual(self.err, "cisternctl: only administrators  may\n")
        self.assertEqual(self.json("status", status=1), {"error": "only administrators  may"})

    def test_nonsense(self):
        for answer in (b"\x99" * 7, b"\xf8\x01\x01", message("v") + message("v")):
            with self.subTest(answer):
                self.serve(STATUS=answer)
                self.ctl("status", status=1)
                self.assertIn("cisternctl: ", self.err)
                self.tearDown()
                self.setUp()

    def test_lost_connection(self):
        self.serve(STATUS=lambda payload: None)
        self.ctl("status", status=1)
        self.assertIn("cisternctl: ", self.err)
        self.assertNotIn("Start one", self.err)

    def test_no_daemon(self):
        done = subprocess.run([CTL, "--socket", "/nowhere/sock", "ping"], capture_output=True,
                              text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("/nowhere/sock", done.stderr)
        self.assertIn("Start one", done.stderr)

    def test_usual_sockets_are_named(self):
        env = {k: v for k, v in os.environ.items() if k != "CISTERN_SOCKET"}
        env["XDG_RUNTIME_DIR"] = self.dir.name
        if os.path.exists("/run/cistern/cistern.sock"):
            self.skipTest("a daemon runs on this host")
        done = subprocess.run([CTL, "ping"], capture_output=True, text=True, env=env)
        if done.returncode == 0:
            self.skipTest("a daemon runs on this host")
        for path in ("/run/cistern/cistern.sock", self.dir.name + "/cistern/cistern.sock",
                     f"/tmp/cistern-{os.geteuid()}/cistern.sock"):
            self.assertIn("tried " + path, done.stderr)

    def test_usage(self):
        for args in ([], ["bogus"], ["status", "x"], ["ls", "a", "b"], ["erase"], ["explain"],
                     ["erase", "aaaa"], ["erase", "aaaa", "11111111", "--all"], ["ls", "--all"],
                     ["status", "--yes"], ["ping", "--salt", "x"], ["ping", "--namespace", "x"],
                     ["--frob", "ping"], ["ping", "--salt"]):
            self.ctl(*args, status=2)
            self.assertIn("cisternctl: ", self.err)
        self.assertEqual({n for n, _ in self.daemon.requests} - {HELLO, PING}, set())

    def test_help(self):
        out = self.ctl("--help")
        for command in ("ping", "status", "spaces", "ls", "stats", "erase", "purge", "explain"):
            self.assertIn(f"\n  {command} ", out)
        manual = (ROOT / "docs/man/cisternctl.1").read_text(encoding="utf-8")
        for word in set(out.split()):
            if word.startswith("--"):
                self.assertIn(f"Fl -{word.strip(',.;:')[2:]}", manual)
        self.assertRegex(self.ctl("--version"), r"^\d+\.\d+\.\d+\n$")

    def test_full_disk(self):
        with open("/dev/full", "wb") as full:
            self.ctl("status", status=1, stdout=full)
        self.assertIn("standard output", self.err)


class Terminal(Case):
    def on_terminal(self, *args, env=None, typed=b""):
        self.serve()
        master, slave = pty.openpty()
        process = subprocess.Popen([CTL, "--socket", self.path, *args], stdin=slave, stdout=slave,
                                   stderr=slave, env={**os.environ, **(env or {})})
        os.close(slave)
        out = b""
        try:
            if typed:
                os.write(master, typed)
            while data := os.read(master, 4096):
                out += data
        except OSError:
            pass  # the other end is closed: it ended
        os.close(master)
        return process.wait(), out

    def test_color(self):
        clean = {"NO_COLOR": ""}
        status, out = self.on_terminal("status", env={})
        self.assertEqual(status, 0)
        self.assertEqual(b"\x1b[1m" in out, "NO_COLOR" not in os.environ)
        self.tearDown()
        self.setUp()
        self.assertNotIn(b"\x1b", self.on_terminal("status", env=clean)[1])

    def test_asks(self):
        status, out = self.on_terminal("purge", typed=b"n\n")
        self.assertEqual(status, 1)
        self.assertIn(b"forget everything", out)
        self.assertEqual(self.daemon.of(PURGE), [])
        self.tearDown()
        self.setUp()
        status, out = self.on_terminal("purge", typed=b"y\n")
        self.assertEqual(status, 0, out)
        self.assertEqual(self.daemon.of(PURGE), [b""])


if __name__ == "__main__":
    unittest.main()
