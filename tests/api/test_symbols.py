#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""libcistern's face: exported symbols = functions of cistern.h = what test_api links to; status
numbers of cistern.h = proto/status.def; the header compiles alone as C99 and as C++.

usage: test_symbols.py SOURCE_ROOT LIBRARY TEST_API
"""
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT, LIBRARY, TEST_API = (Path(p) for p in sys.argv[1:4])
INCLUDE = ROOT / "client/include"
HEADER = (INCLUDE / "cistern/cistern.h").read_text()
CODE = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.S)
DECLARED = set(re.findall(r"^[\w *]*?\b\*?(cistern_\w+)\(", CODE, flags=re.M))
LIBRARY_ONLY_NODE = "CISTERN_PRIVATE"  # what libcistern-llama needs, see client/private.h


def exported():
    """name -> version node, from the dynamic symbol table."""
    out = subprocess.run(["readelf", "--dyn-syms", "-W", LIBRARY], check=True, capture_output=True,
                         text=True).stdout
    symbols = {}
    for line in out.splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[4] in ("GLOBAL", "WEAK") and fields[6] not in ("UND", "ABS"):
            name, _, node = fields[7].partition("@@")
            symbols[name] = node
    return symbols


class Face(unittest.TestCase):
    def test_exports_are_the_header(self):
        public = {n for n, node in exported().items() if node != LIBRARY_ONLY_NODE}
        self.assertEqual(public, DECLARED)
        self.assertTrue(all(node == "CISTERN_0" for n, node in exported().items() if n in public))

    def test_private_node_is_the_private_header(self):
        text = re.sub(r"/\*.*?\*/", "", (ROOT / "client/private.h").read_text(), flags=re.S)
        private = {n for n, node in exported().items() if node == LIBRARY_ONLY_NODE}
        self.assertEqual(private, set(re.findall(r"\b(cistern_\w+)\(", text)))

    def test_api_test_names_every_function(self):
        out = subprocess.run([TEST_API, "--names"], check=True, capture_output=True, text=True)
        self.assertEqual(set(out.stdout.split()), DECLARED)

    def test_statuses_are_those_of_the_protocol(self):
        wire = {name: int(number) for name, number in
                re.findall(r"^X\((\w+), (\d+),", (ROOT / "proto/status.def").read_text(), re.M)}
        public = {name: int(number) for name, number in
                  re.findall(r"^#define CISTERN_E_(\w+) \((-\d+)\)", HEADER, re.M)}
        self.assertIn("#define CISTERN_OK 0\n", HEADER)
        self.assertGreater(len(public), 20)
        self.assertEqual(public, {name: -wire[name] for name in public})
        # what cistern.h leaves out are mistakes in a packet, which a caller can't make
        self.assertEqual(set(wire) - set(public),
                         {"OK", "BAD_MAGIC", "BAD_LENGTH", "BAD_TYPE", "BAD_MESSAGE", "BAD_FDS"})

    def test_soname(self):
        out = subprocess.run(["readelf", "-d", LIBRARY], check=True, capture_output=True, text=True)
        self.assertIn("[libcistern.so.0]", out.stdout)

    def compile(self, *command):
        with tempfile.TemporaryDirectory() as folder:
            suffix = "cc" if "c++" in command[0] or "g++" in command[0] else "c"
            source = Path(folder) / f"header.{suffix}"
            source.write_text("#include <cistern/cistern.h>\n"
                              "int main(void) { return cistern_client_ping(0) == 0; }\n")
            r = subprocess.run([*command, "-Wall", "-Wextra", "-Werror", "-pedantic", "-I", INCLUDE,
                                "-fsyntax-only", source], capture_output=True, text=True)
            self.assertEqual(r.returncode, 0, r.stderr)

    def test_header_is_c99(self):
        self.compile("cc", "-std=c99")

    @unittest.skipUnless(shutil.which("c++"), "no C++ compiler")
    def test_header_is_cxx(self):
        self.compile("c++", "-std=c++11")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
