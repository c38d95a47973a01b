"""Fixtures that all tests share."""

import jaxtyping
import pytest


@pytest.fixture
def unchecked():
    """Switches off the run-time check of types and shapes, so that bad input reaches our checks."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
