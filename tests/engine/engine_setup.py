# SPDX-License-Identifier: Apache-2.0
"""The engine that scripts/engine built, its model, and a private daemon for each test: the fixtures
of this folder (test modules import them from here)."""
import os
import subprocess
import sys
from pathlib import Path

import private_daemon
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
ENGINE = Path(subprocess.run([ROOT / "scripts" / "engine", "--print"], check=True,
                             capture_output=True, text=True).stdout.strip())


def missing() -> str | None:
    """What the tests of this folder lack here; None: nothing."""
    if not (ENGINE / "model.gguf").exists():
        return "the engine is not built: run scripts/engine"
    if not private_daemon.program():
        return "daemon/cisternd is not built"
    for module in ("numpy", "diskcache", "jinja2", "typing_extensions"):
        found = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True)
        if found.returncode:
            return f"no Python module {module}: run scripts/venv"
    return None


REASON = missing()
if not REASON:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["LLAMA_CPP_LIB_PATH"] = str(ENGINE / "lib")
    sys.path.insert(0, str(ENGINE / "python"))


def need_engine() -> None:
    """First line of a test module here: skips it, with the reason, where the engine is missing."""
    if REASON:
        pytest.skip(REASON, allow_module_level=True)


@pytest.fixture
def daemon():
    with private_daemon.PrivateDaemon() as running:
        yield running


@pytest.fixture(scope="session")
def model_path() -> str:
    return str(ENGINE / "model.gguf")


@pytest.fixture(scope="session")
def engine(model_path):
    import demo_worker
    return demo_worker.Engine(model_path)


@pytest.fixture(scope="session")
def licence_tokens(engine) -> list[int]:
    """Real text: more than 2,000 tokens."""
    return engine.tokenize((ROOT / "LICENSE").read_text())
