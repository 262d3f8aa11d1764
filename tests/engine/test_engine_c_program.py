# SPDX-License-Identifier: Apache-2.0
"""c_program.c against the engine's own headers and libraries."""
import os
import subprocess
from pathlib import Path

from engine_setup import ENGINE, ROOT, need_engine
from engine_setup import daemon, model_path  # noqa: F401 (fixtures)

need_engine()


def test_a_c_program_restores_what_it_stored(daemon, model_path, tmp_path):
    build = Path(os.environ["CST_BUILD_ROOT"]) / "client"
    program = tmp_path / "c_program"
    subprocess.run(
        ["cc", "-Wall", "-Werror", "-o", program, os.environ["CST_C_PROGRAM"],
         f"-I{ROOT}/client/include", f"-I{ENGINE}/include", f"-L{ENGINE}/lib", f"-L{build}",
         f"-L{build}/llama", "-lllama", "-lggml-base", "-lcistern-llama", "-lcistern",
         f"-Wl,-rpath,{ENGINE}/lib:{build}:{build}/llama", f"-Wl,-rpath-link,{ENGINE}/lib"],
        check=True)
    done = subprocess.run([program, model_path, daemon.socket, ROOT / "LICENSE"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "299 of 300 tokens restored\n"
