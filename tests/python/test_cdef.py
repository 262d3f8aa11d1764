# SPDX-License-Identifier: Apache-2.0
"""The package's declarations and enums are those of the C headers."""

import enum
import re
import subprocess

import cdef_from_header
import pytest
from cistern import _ffi, client, descriptor, errors


def header_constants() -> dict[str, int]:
    return dict(cdef_from_header.constants(cdef_from_header.source()))


def test_cdef_is_what_the_headers_declare() -> None:
    committed = (cdef_from_header.ROOT / "python" / "cistern" / "cdef.txt").read_text()
    assert committed == cdef_from_header.cdef(), (
        "run: tests/lib/cdef_from_header.py > python/cistern/cdef.txt"
    )


ENUMS = {
    "CISTERN_DTYPE_": descriptor.DType,
    "CISTERN_TENSOR_": descriptor.Tensor,
    "CISTERN_ROPE_": descriptor.Rope,
    "CISTERN_SCALING_": descriptor.Scaling,
    "CISTERN_KIND_": descriptor.Kind,
    "CISTERN_SCOPE_": descriptor.Scope,
    "CISTERN_CLASS_": descriptor.Quality,
    "CISTERN_TIER_": descriptor.Tier,
    "CISTERN_E_": errors.Status,
}


@pytest.mark.parametrize("prefix", ENUMS)
def test_enum_has_the_numbers_of_the_header(prefix: str) -> None:
    want = {k[len(prefix):]: v for k, v in header_constants().items() if k.startswith(prefix)}
    own: type[enum.IntEnum] = ENUMS[prefix]
    have = {member.name: member.value for member in own}
    if own is errors.Status:
        have = {k: v for k, v in have.items() if k not in ("OK", "UNKNOWN")}
    assert have == want
    assert want


def test_client_flags_are_those_of_the_header() -> None:
    constants = header_constants()
    assert client._ASYNC == constants["CISTERN_CLIENT_ASYNC"]
    assert client._LAZY == constants["CISTERN_CLIENT_LAZY"]


def test_struct_sizes_are_what_the_compiler_makes() -> None:
    """cffi lays structs out by itself; the compiler is the oracle."""
    names = re.findall(r"^\} (cistern_\w+);", cdef_from_header.cdef(), re.M)
    assert len(names) >= 8
    checks = "\n".join(
        f'_Static_assert(sizeof({n}) == {_ffi.ffi.sizeof(n)}, "{n}");' for n in names
    )
    text = "#include <cistern/cistern.h>\n#include <cistern/llama.h>\n" + checks + "\n"
    command = ["cc", "-fsyntax-only", "-I", str(cdef_from_header.INCLUDE), "-x", "c", "-"]
    done = subprocess.run(command, input=text, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
