# SPDX-License-Identifier: Apache-2.0
"""The table of step weights that calibration makes of sensitivities."""

import json
import math
import os
from pathlib import Path

import pytest
from cistern.calibrate import Table


def test_steps_are_the_fourth_root_with_a_geometric_mean_of_one() -> None:
    steps = Table("", {"K": [1.0, 16.0], "V": [16.0, 16.0]}).steps()
    assert steps["K"] == pytest.approx([2**0.75, 2**-0.25], rel=1e-4)
    assert steps["V"] == pytest.approx([2**-0.25, 2**-0.25], rel=1e-4)


def test_what_was_not_measurable_gets_the_floors_step() -> None:
    steps = Table("", {"K": [0.0, 1.0], "V": [0.0, 3.0]}).steps()
    assert steps["K"][0] == steps["V"][0] == max(steps["K"] + steps["V"])
    # floor: 2 % of the mean 1
    assert steps["K"][0] / steps["K"][1] == pytest.approx(0.02**-0.25, rel=1e-3)


@pytest.mark.parametrize("bad", [[0.0, 0.0], [-1.0, 1.0], [math.nan, 1.0]])
def test_no_table_of_nothing(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="measurable"):
        Table("", {"K": bad, "V": bad}).steps()


def test_steps_agree_with_a_table_made_elsewhere() -> None:
    folder = os.environ.get("CISTERN_DATA")
    if not folder:
        pytest.skip("CISTERN_DATA is not set")
    known = json.loads((Path(folder) / "kv" / "step-table.json").read_text())
    steps = Table("", known["sensitivity"]).steps()
    for part in ("K", "V"):
        assert steps[part] == pytest.approx(known["step_weight"][part], rel=2e-3)
