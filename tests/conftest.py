# SPDX-License-Identifier: Apache-2.0
"""Rules of every Python test: a run in which everything skipped exits with 77."""

import pytest


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    nothing_failed = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if nothing_failed and reporter.stats.get("skipped") and not reporter.stats.get("passed"):
        session.exitstatus = 77
