#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Each lint rule finds the tree that breaks it, and accepts the same tree without the fault."""
import shutil
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import lint  # noqa: E402

HEAD = "/* SPDX-License-Identifier: Apache-2.0 */\n/* What it owns. */\n"
GOOD = {
    ".clang-format": (Path(__file__).parents[2] / ".clang-format").read_text(),
    "base/meson.build": "static_library('base', 'good.c', 'mem.c')\n",
    "base/good.h": HEAD + "#pragma once\n",
    "base/good.c": HEAD + '#include "base/good.h"\n\n/* free() and strcpy() in a comment */\n'
                   'const char *s = "sprintf(x)";\n',
    "base/mem.c": HEAD + "void *f(void) {\n    return malloc(1);\n}\n",
    "proto/x.proto": "message A { uint32 a = 1; }\nmessage B { A a = 1; } // repeated\n",
    "README.md": "[the table](base/good.h)\n",
}
LONG_BODY = "".join("    f();\n" for _ in range(61))
# rule -> trees, each a fault added to GOOD
BAD = {
    "includes": [
        {"base/bad.c": HEAD + '#include "good.h"\n'},
        {"base/bad.c": HEAD + '#include "base/none.h"\n'},
        {"base/bad.c": HEAD + '#include "proto/x.pb-c.h"\n'},
        {"codec/bad.c": HEAD + '#include "proto/x.pb-c.h"\n'},
        {"store/bad.c": HEAD + '#include "client/conn.h"\n', "client/conn.h": HEAD},
        {"store/bad.c": HEAD + "#include <cistern/cistern.h>\n"},
        {"bench/bad.c": HEAD + '#include "daemon/loop.h"\n', "daemon/loop.h": HEAD},
        {"bench/bad.c": HEAD + '#include "tests/unit/x.h"\n', "tests/unit/x.h": HEAD},
        {"client/examples/bad.c": HEAD + '#include "base/good.h"\n'},
        {"gpu/bad.c": HEAD + "#include <cuda_runtime.h>\n"},
        {"daemon/bad.c": HEAD + "#include <liburing.h>\n"},
        {"codec/quant.c": HEAD + "#include <cblas.h>\n"},
    ],
    "unique-names": [{"store/good.c": HEAD}],
    "opening": [{"base/bad.c": "/* no licence */\n"},
                {"base/bad.c": "/* SPDX-License-Identifier: Apache-2.0 */\n#include <x.h>\n"}],
    "length": [{"base/bad.c": HEAD + "int x;\n" * 1000}],
    "functions": [{"base/bad.c": HEAD + "\nint f(void) {\n" + LONG_BODY + "}\n"},
                  {"base/bad.c": HEAD + "\nint f(int a,\n      int b) {\n" + LONG_BODY + "}\n"}],
    "heap": [{"store/bad.c": HEAD + "char *f(void) {\n    return strdup(x);\n}\n"},
             {"tools/bad.c": HEAD + "void f(void) {\n    free (x);\n}\n"}],
    "pure-codec": [{"codec/bad.c": HEAD + "void f(void) {\n    cst_malloc(1);\n}\n"}],
    "quiet-libraries": [{"store/bad.c": HEAD + "void f(void) {\n    cst_log(1, s);\n}\n"},
                        {"client/bad.c": HEAD + "void f(void) {\n    exit(1);\n}\n"}],
    "banned": [{"tests/bad.c": HEAD + "void f(void) {\n    strcpy(a, b);\n}\n"},
               {"daemon/bad.c": HEAD + "void f(void) {\n    system(a);\n}\n"}],
    "cloexec": [{"daemon/bad.c": HEAD + "void f(void) {\n    fd = open(p, O_RDONLY);\n}\n"},
                {"daemon/bad.c": HEAD + "void f(void) {\n    accept(fd, a, b);\n}\n"}],
    "schema": [{"proto/y.proto": "message A { repeated uint32 a = 1; }\n"},
               {"proto/y.proto": "message A { B b = 1; }\nmessage B { uint32 x = 1; A a = 2; }\n"},
               {"proto/y.proto": "message A { A a = 1; }\n"}],
    "blanks": [{"base/bad.c": HEAD + "\tint x;\n"}, {"docs/bad.md": "word \n"},
               {"docs/bad.md": "no newline"}, {"docs/bad.md": "two\n\n"},
               {"docs/bad.md": "dos\r\n"}],
    "machine-paths": [{"docs/bad.md": "see /wor" + "k/main\n"},
                      {"scripts/bad": "cd /home/" + "me\n"}],
    "listed": [{"base/forgotten.c": HEAD}],
    "links": [{"docs/bad.md": "[lost](nowhere.md)\n"}],
    "names": [{"docs/bad.md": "see `cst_nothing()`\n"}, {"docs/bad.md": "see `base/nothing.c`\n"}],
    "format": [{"base/bad.c": HEAD + "int  x ;\n"}],
}
# near the fault, but fine
FINE = {
    "includes": [
        {"client/fine.c": HEAD + "#include <cistern/cistern.h>\n"},
        {"codec/fine.c": HEAD + '#include "base/good.h"\n#include <sys/mman.h>\n'},
        {"gpu/cuda/fine.c": HEAD + "#include <cuda.h>\n"},
        {"base/ring.c": HEAD + "#include <liburing.h>\n"},
        {"bench/fine.c": HEAD + '#include "tests/lib/x.h"\n', "tests/lib/x.h": HEAD},
    ],
    "unique-names": [{"store/meson.build": "x\n", "codec/README.md": "x\n"}],
    "functions": [{"base/fine.c": HEAD + "\n/* A parser; long: one case a field */\nint f(void) {\n"
                   + LONG_BODY + "}\n"},
                  {"base/fine.c": HEAD + "\nint f(void) {\n" + LONG_BODY[9:] + "}\n"}],
    "names": [{"docs/fine.md": "`f()` in `base/mem.c`, `word`\n"}],
    "heap": [{"tests/fine.c": HEAD + "void f(void) {\n    free(x);\n}\n"},
             {"store/fine.c": HEAD + "void f(void) {\n    cst_free(x);\n    ops->free(x);\n}\n"}],
    "cloexec": [{"daemon/fine.c": HEAD + "void f(void) {\n    fd = open(p,\n"
                 "              O_CLOEXEC);\n}\n"}],
}


def run_rule(rule, extra):
    with tempfile.TemporaryDirectory() as folder:
        for path, text in {**GOOD, **extra}.items():
            file = Path(folder) / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text.encode())
        return list(lint.RULES[rule](lint.Tree(folder)))


class Rules(unittest.TestCase):
    def test_each_rule_has_a_bad_tree(self):
        self.assertEqual(set(BAD), set(lint.RULES))

    def check(self, rule):
        self.assertEqual(run_rule(rule, {}), [], "the good tree is clean")
        for extra in FINE.get(rule, []):
            self.assertEqual(run_rule(rule, extra), [], extra)
        for extra in BAD[rule]:
            found = run_rule(rule, extra)
            self.assertTrue(found, extra)
            self.assertTrue(all(path in extra for path, _, _ in found), found)


def add_tests():
    for rule in lint.RULES:
        def test(self, rule=rule):
            if rule == "format" and not shutil.which("clang-format-14"):
                self.skipTest("clang-format-14 is not installed")
            self.check(rule)
        setattr(Rules, "test_" + rule.replace("-", "_"), test)


add_tests()
if __name__ == "__main__":
    unittest.main()
