# SPDX-License-Identifier: Apache-2.0
"""scripts/engine: only a complete folder appears, and a failure says what to do."""
import os
import subprocess
from pathlib import Path

from engine_setup import ROOT

SCRIPT = ROOT / "scripts" / "engine"


def run(cache: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)} | changes
    return subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True)


def test_printing_the_place_builds_nothing(tmp_path):
    done = run(tmp_path, "--print")
    assert done.returncode == 0
    assert Path(done.stdout.strip()).parent == tmp_path / "cistern"
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_is_there_is_taken(tmp_path):
    engine = Path(run(tmp_path, "--print").stdout.strip())
    engine.mkdir(parents=True)
    (engine / "model.gguf").touch()
    done = run(tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{engine}\n")


def test_without_a_package_index_it_says_so_and_leaves_nothing(tmp_path):
    done = run(tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path), PIP_CONFIG_FILE=os.devnull)
    assert done.returncode == 1
    assert "pip could not fetch llama_cpp_python-0.3.36.tar.gz" in done.stderr
    assert done.stdout == ""
    assert [p.name for p in (tmp_path / "cistern").iterdir()] == ["engine.lock"]


def test_a_file_that_is_not_the_pinned_one_is_not_built(tmp_path):
    downloads = tmp_path / "cistern" / "downloads"
    downloads.mkdir(parents=True)
    (downloads / "llama_cpp_python-0.3.36.tar.gz").write_bytes(b"something else")
    done = run(tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path), PIP_CONFIG_FILE=os.devnull)
    assert done.returncode == 1
    assert "could not fetch" in done.stderr


def test_unknown_arguments_are_refused(tmp_path):
    done = run(tmp_path, "--nonsense")
    assert done.returncode == 1
    assert "usage" in done.stderr
