# SPDX-License-Identifier: Apache-2.0
"""Slots that nobody commits: lost objects and wrong arguments leave nothing reserved."""

from __future__ import annotations

import gc
import struct
from collections.abc import Iterator
from typing import Any

import cistern
import pytest
from private_daemon import PrivateDaemon, program

if not program():
    pytest.skip("daemon/cisternd is not built", allow_module_level=True)

LAYOUT = cistern.Descriptor.rows(2, 1, 128, content_id=b"\x44" * 32, block_tokens=16)


@pytest.fixture
def space() -> Iterator[cistern.Space]:
    with PrivateDaemon("--memory", "64MiB") as daemon, cistern.Client(daemon.socket) as client:
        yield client.space(LAYOUT)


def reserved(space: cistern.Space) -> int:
    return int(space.client.stats()["reserved"])


def test_lost_slots_are_aborted(space: cistern.Space) -> None:
    slots = space.reserve(range(40))
    assert slots.statuses == [cistern.Status.OK] * 3
    assert reserved(space) == 3
    assert slots[0]
    view = slots[0].data
    del slots
    gc.collect()
    assert reserved(space) == 3  # the memory is no other slot's while somebody may write to it
    view[:] = bytes(len(view))
    del view
    assert reserved(space) == 0
    assert space.reserve(range(40)).statuses == [cistern.Status.OK] * 3  # the keys are free again


@pytest.mark.parametrize("surprisals", [[1e9] * 40, ["x"] * 40, 7])
def test_surprisals_that_are_no_half_floats_leave_the_slots(
    space: cistern.Space, surprisals: object
) -> None:
    slots = space.reserve(range(40))
    with pytest.raises((OverflowError, TypeError, struct.error)):
        slots.commit(surprisals)
    assert reserved(space) == 3
    assert slots.commit([1.0] * 40) == [cistern.Status.OK] * 3


def test_slots_outlive_their_client(space: cistern.Space) -> None:
    slots = space.reserve(range(40))
    space.client.close()
    del slots
    gc.collect()


class Calls:
    """A library that writes down what is called."""

    def __init__(self, library: Any) -> None:
        self.library, self.names = library, list[str]()

    def __getattr__(self, name: str) -> Any:
        self.names.append(name)
        return getattr(self.library, name)


def test_slots_end_before_the_client_that_is_lost_with_them() -> None:
    """The collector finalizes what hangs on a cycle in the order of its birth: the client first."""
    with PrivateDaemon("--memory", "64MiB") as daemon:
        client = cistern.Client(daemon.socket)
        calls = client.handle().lib = Calls(client.handle().lib)
        cycle: list[Any] = [client.space(LAYOUT).reserve(range(40))]
        cycle.append(cycle)
        del client, cycle
        gc.collect()
    ends = [name for name in calls.names if name in ("cistern_abort", "cistern_client_close")]
    assert ends == ["cistern_abort", "cistern_client_close"]
