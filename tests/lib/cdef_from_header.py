# SPDX-License-Identifier: Apache-2.0
"""Writes cffi declarations from the public C headers.

    tests/lib/cdef_from_header.py > python/cistern/cdef.txt

The compiler's preprocessor does the work: declarations come from `-E -P`, integer macros from
`-dM -E`. A test compares the committed file with this output, so the two can't drift.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "client" / "include"
HEADERS = ("cistern/cistern.h", "cistern/llama.h")


def preprocess(text: str, *flags: str) -> str:
    command = ["cc", "-E", *flags, "-x", "c", "-"]
    return subprocess.run(command, input=text, check=True, capture_output=True, text=True).stdout


def source() -> str:
    """The headers in order, without their includes: cffi knows the standard types itself."""
    text = "".join((INCLUDE / header).read_text() for header in HEADERS)
    return re.sub(r"^#include .*$", "", text, flags=re.M)


def constants(text: str) -> list[tuple[str, int]]:
    """Integer macros in the order of the header."""
    values = {}
    for name, value in re.findall(r"^#define (CISTERN_\w+) (.+)$", preprocess(text, "-dM"), re.M):
        number = re.fullmatch(r"\(?(-?(?:0x[0-9a-fA-F]+|\d+))u?\)?", value)
        if number:
            values[name] = int(number[1], 0)
    order = re.findall(r"^#define (CISTERN_\w+)", text, re.M)
    return [(name, values[name]) for name in order if name in values]


def declarations(text: str) -> list[str]:
    lines = preprocess(text, "-P").splitlines()
    return [line.rstrip() for line in lines if line.strip()]


def cdef() -> str:
    text = source()
    out = ["/* Made from cistern.h and llama.h by tests/lib/cdef_from_header.py. Don't edit. */"]
    out += [f"#define {name} {value}" for name, value in constants(text)]
    out += declarations(text)
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    sys.stdout.write(cdef())
