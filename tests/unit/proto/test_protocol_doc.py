#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""docs/protocol.md names every message, field and status with its number, and none that is gone."""
import os
import re
import unittest
from pathlib import Path

ROOT = Path(os.environ.get("CST_SOURCE_ROOT", Path(__file__).parents[3]))
DOC = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")
MESSAGES = dict(re.findall(r"^[RP]\((\w+), (\d+),", (ROOT / "proto/message.def").read_text(), re.M))
STATUSES = re.findall(r"^X\((\w+), (\d+),", (ROOT / "proto/status.def").read_text(), re.M)
PROTO = re.sub(r"//.*", "", (ROOT / "proto/cistern.proto").read_text())


class Document(unittest.TestCase):
    def test_messages(self):
        self.assertGreater(len(MESSAGES), 20)
        named = dict(re.findall(r"\*\*([A-Z_]+) (\d+)\*\*", DOC))
        self.assertEqual(named, MESSAGES)

    def test_statuses(self):
        self.assertGreater(len(STATUSES), 30)
        rows = re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", DOC, re.M)
        self.assertEqual(rows, [(number, name) for name, number in STATUSES])

    def test_message_types(self):
        for name in re.findall(r"^message (\w+)", PROTO, re.M):
            if name not in ("AcquireReply", "HelloReply", "ListRef"):
                self.assertRegex(DOC, rf"\b{name}\b", name)

    def test_fields(self):
        for name, body in re.findall(r"message (\w+) \{(.*?)\}", PROTO, re.S):
            for field, number in re.findall(r"\w+ (\w+) = (\d+);", body):
                self.assertRegex(DOC, rf"\b{field}\b", f"{name}.{field}")


if __name__ == "__main__":
    unittest.main()
