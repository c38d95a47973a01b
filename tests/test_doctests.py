"""Every example in a docstring runs."""

import doctest
import importlib
import pkgutil
import warnings

import pytest

import lenprobe


def modules():
    for found in pkgutil.walk_packages(lenprobe.__path__, "lenprobe."):
        if not found.name.endswith("__main__"):
            yield found.name


@pytest.mark.parametrize("name", sorted(modules()))
def test_examples(name, unchecked):
    module = importlib.import_module(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert failed == 0
