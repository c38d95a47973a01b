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


def trained(encoding, d=3, seed=0, **arguments):
    """A one-head model that copies the token d back, trained at 16 tokens."""
    from lenprobe import FixedOffset, build, fit

    model = build(encoding, seed=seed, **arguments)
    fit(model, FixedOffset(d), [16], seed=seed, progress=False)
    return model


@pytest.fixture(scope="session")
def trained_rope():
    return trained("rope")


@pytest.fixture(scope="session")
def trained_learned():
    return trained("learned")


@pytest.fixture(scope="session")
def shared_demo(tmp_path_factory):
    """The main job at its defaults, run once a worker."""
    from lenprobe.demo import demo

    return demo(out=tmp_path_factory.mktemp("demo"), progress=False)
