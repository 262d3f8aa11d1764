#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The example stores two blocks; run again, as another process, it finds and reads them.

usage: test_example.py EXAMPLE
"""
import os
import subprocess
import sys

sys.path.insert(0, os.path.join(os.environ["CST_SOURCE_ROOT"], "tests", "lib"))
from private_daemon import PrivateDaemon, program  # noqa: E402

BLOCKS = 2


def run(example, socket):
    return subprocess.run([example], env={**os.environ, "CISTERN_SOCKET": socket}, check=False,
                          capture_output=True, text=True)


def expected(before, put):
    return ([f"stored before: {before} of {BLOCKS} blocks"]
            + [f"put block {i}: {put}" for i in range(BLOCKS)]
            + [f"got block {i}: ok, the same bytes" for i in range(BLOCKS)])


def main():
    example = sys.argv[1]
    if not program():
        print("skipped: no cisternd in the build tree")
        return 77
    with PrivateDaemon() as daemon:
        for before, put in ((0, "ok"), (BLOCKS, "the block is stored already")):
            r = run(example, daemon.socket)
            assert r.returncode == 0, r.stderr
            assert r.stdout.splitlines() == expected(before, put), r.stdout
        socket = daemon.socket
    r = run(example, socket)  # without a daemon: one sentence
    assert r.returncode == 1 and r.stderr.startswith("client_open: no daemon at "), r.stderr
    with open(os.path.join(os.environ["CST_SOURCE_ROOT"], "client/examples/example.c"),
              encoding="utf-8") as source:
        assert len(source.readlines()) <= 80, "the example has grown"
    return 0


if __name__ == "__main__":
    sys.exit(main())
