#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The sum that decides whether a test run passed: nothing failed is not the same as nothing ran."""
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SUMMARY = Path(os.environ["CST_SOURCE_ROOT"]) / "tests" / "lib" / "summary.py"


def summarise(folders, *args):
    """folders: a list of (name, result, stdout) lists; None makes a folder without a log."""
    with tempfile.TemporaryDirectory() as root:
        paths = []
        for i, tests in enumerate(folders):
            logs = Path(root) / f"build{i}" / "meson-logs"
            logs.mkdir(parents=True)
            paths.append(str(logs.parent))
            if tests is not None:
                (logs / "testlog.json").write_text("".join(
                    json.dumps({"name": n, "result": r, "stdout": out}) + "\n" for n, r, out in tests))
        run = subprocess.run([sys.executable, SUMMARY, *args, *paths], capture_output=True, text=True)
        lines = run.stdout.strip().split("\n")
        return run.returncode, lines[-1], lines[:-1]


class Summary(unittest.TestCase):
    def test_sums_over_folders(self):
        code, last, _ = summarise([[("a", "OK", ""), ("b", "EXPECTEDFAIL", "")], [("a", "OK", "")]])
        self.assertEqual((code, last), (0, "3 passed, 0 failed, 0 skipped"))

    def test_every_other_result_is_a_failure(self):
        for result in ("FAIL", "ERROR", "TIMEOUT", "INTERRUPT", "UNEXPECTEDPASS", "new word"):
            code, last, said = summarise([[("a", "OK", ""), ("b", result, "")]])
            self.assertEqual((code, last), (1, "1 passed, 1 failed, 0 skipped"))
            self.assertIn(result, said[0])

    def test_a_skip_says_what_is_missing(self):
        code, last, said = summarise([[("a", "OK", ""), ("b", "SKIP", "x\nskipped: no data\ny\n")]])
        self.assertEqual((code, last), (0, "1 passed, 0 failed, 1 skipped"))
        self.assertTrue(said[0].endswith("b: no data"), said)

    def test_a_folder_where_nothing_ran_fails(self):
        for nothing in ([], None):
            code, last, _ = summarise([[("a", "OK", "")], nothing])
            self.assertEqual((code, last), (1, "1 passed, 1 failed, 0 skipped"))

    def test_failures_outside_of_tests_count(self):
        code, last, _ = summarise([[("a", "OK", "")]], "--failed", "2")
        self.assertEqual((code, last), (1, "1 passed, 2 failed, 0 skipped"))

    def test_only_skips_is_no_pass(self):
        self.assertEqual(summarise([[("b", "SKIP", "")]])[0], 1)


if __name__ == "__main__":
    unittest.main()
