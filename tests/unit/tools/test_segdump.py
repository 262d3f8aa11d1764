# SPDX-License-Identifier: Apache-2.0
"""cistern-segdump on directories that make_segments.py writes from the format's description."""
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(os.environ["CST_SOURCE_ROOT"])
TOOL = Path(os.environ["CST_BUILD_ROOT"]) / "tools" / "cistern-segdump"
sys.path.insert(0, str(SOURCE / "tests" / "golden" / "segments"))
import make_segments  # noqa: E402


def run(*args):
    return subprocess.run([TOOL, *args], capture_output=True, text=True, check=False)


def rows(*args):
    out = run("--json", *args)
    assert out.stderr == ""
    return out.returncode, [json.loads(line) for line in out.stdout.splitlines()]


@pytest.fixture(name="good")
def fixture_good(tmp_path):
    make_segments.write(tmp_path / "good", make_segments.good())
    return tmp_path / "good"


def test_a_good_directory_is_whole(good):
    status, lines = rows("--records", good)
    assert status == 0
    assert all(line["ok"] for line in lines)
    of_one = [line for line in lines if line["file"] == "seg-00000001"]
    assert [line["what"] for line in of_one] == [
        "segment", "space", "block", "block", "void", "side data", "index", "footer", "total"]
    assert [line["position"] for line in of_one if line["what"] == "block"] == [0, 1]
    assert of_one[-1]["records"] == 5
    assert of_one[-1]["encrypted_and_not_checked"] == 0
    assert [line["what"] for line in lines if line["file"] == "seg-00000002"] == [
        "segment", "space", "block", "total"]
    (check,) = [line for line in lines if line["what"] == "checkpoint"]
    assert (check["clean"], check["dropped"], check["pins"]) == (1, 1, 1)
    assert [line["namespace"] for line in lines if line["what"] == "key"] == ["public"]


def test_text_says_the_same_without_records(good):
    out = run(good)
    assert out.returncode == 0
    assert "seg-00000001 segment fill=4" in out.stdout
    assert " block " not in out.stdout
    assert "BAD" not in out.stdout


@pytest.mark.parametrize("name", sorted(make_segments.bad()))
def test_a_bad_directory_is_named(tmp_path, name):
    files, problem = make_segments.bad()[name]
    make_segments.write(tmp_path / name, files)
    status, lines = rows(tmp_path / name)
    assert status == 1
    assert problem in [line.get("problem") for line in lines]


def test_no_flipped_bit_of_what_counts_passes(tmp_path):
    """Any bit of the small files, of the closed segment's headers, metas and payloads."""
    files = make_segments.good()
    chunk = make_segments.CHUNK
    end = make_segments.SEGMENT
    counts = {name: [range(len(files[name]))] for name in ("cistern-store", "keys", "checkpoint")}
    counts["seg-00000001"] = [range(512), range(chunk, chunk + 236), range(2 * chunk, 2 * chunk + 360),
                              range(2 * chunk + 384, 2 * chunk + 6384),
                              range(end - 2 * chunk, end - 2 * chunk + 900)]
    spots = [(name, at) for name, parts in counts.items() for part in parts for at in part]
    folder = tmp_path / "flips"
    make_segments.write(folder, files)
    rng = random.Random(1)
    for name, at in rng.sample(spots, 300):
        data = bytearray(files[name])
        data[at] ^= 1 << rng.randrange(8)
        (folder / name).write_bytes(data)
        assert run(folder).returncode == 1, (name, at)
        (folder / name).write_bytes(files[name])


def test_keys_are_never_shown(good):
    out = run("--records", good).stdout
    assert "00" * 32 not in out


def test_what_cannot_be_read_is_said(tmp_path):
    out = run(tmp_path / "nowhere")
    assert out.returncode == 2
    assert "No such file" in out.stderr
    (tmp_path / "other").write_text("x")
    assert run(tmp_path).returncode == 2
    assert run("--what").returncode == 2
    assert run().returncode == 2
    assert run("--help").returncode == 0
