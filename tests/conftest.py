"""Tiers: cpu (pure), multiprocess (gloo), compile (no GPU needed), gpu, multigpu (under torchrun).

FA_A2A_REQUIRE=compile,gpu,multigpu turns a tier's skips into failures.
"""

import pytest

from fa_a2a import config
from fa_a2a.errors import ConfigurationError


def pytest_configure():
    try:
        config.required_tiers()
    except ConfigurationError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.fixture(scope="session")
def need():
    """need(tier, condition, reason): skips the test without `condition`, or fails it if the tier is required."""

    def check(tier: str, condition: bool, reason: str) -> None:
        if condition:
            return
        if tier in config.required_tiers():
            pytest.fail(f"FA_A2A_REQUIRE asks for {tier}: {reason}")
        pytest.skip(reason)

    return check


def pytest_collection_modifyitems(config, items):
    if not config.option.markexpr:
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))
