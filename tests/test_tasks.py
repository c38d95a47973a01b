"""Tasks: source maps against plain rules, targets, bad rules."""

import numpy as np
import pytest
import torch

from lenprobe import AbsoluteSlot, FixedOffset, HalfCopy, Reversal, SourceMap, Strided

RULES = {
    "offset 3": (FixedOffset(3), lambda i, n: i - 3),
    "offset 0": (FixedOffset(0), lambda i, n: i),
    "slot 2": (AbsoluteSlot(2), lambda i, n: 2 if i > 2 else -1),
    "half copy": (HalfCopy(), lambda i, n: i - n // 2 if n % 2 == 0 and i >= n // 2 else None),
    "reversal": (Reversal(), lambda i, n: n - 1 - i if n - 1 - i < i else -1),
    "strided": (Strided(), lambda i, n: i - 2 if i % 2 == 0 else -1),
}


@pytest.mark.bridge
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("length", [2, 6, 16, 24])
def test_sources_against_the_plain_rule(name, length):
    task, rule = RULES[name]
    expected = [max(-1 if (s := rule(i, length)) is None else s, -1) for i in range(length)]
    assert task.sources(length).tolist() == expected
    assert task.name == name


@pytest.mark.bridge
@pytest.mark.parametrize("name", RULES)
def test_min_length_is_the_first_with_a_query(name):
    task, _ = RULES[name]
    assert (task.sources(task.min_length) >= 0).any()
    assert not (task.sources(task.min_length - 1) >= 0).any()


@pytest.mark.bridge
@pytest.mark.parametrize("name", RULES)
def test_targets_are_the_tokens_at_the_sources(name):
    task, _ = RULES[name]
    tokens = task.sample(5, 18, generator=torch.Generator().manual_seed(1))
    again = task.sample(5, 18, generator=torch.Generator().manual_seed(1))
    assert torch.equal(tokens, again) and tokens.max() < 16 and tokens.dtype == torch.int64
    targets, sources = task.targets(tokens), task.sources(18)
    for b, i in np.ndindex(5, 18):
        assert targets[b, i] == (tokens[b, sources[i]] if sources[i] >= 0 else -100)


@pytest.mark.bridge
def test_a_rule_of_ones_own():
    task = SourceMap("every third", lambda i, n: np.where(i % 3 == 0, i // 3, -1), shortest=1)
    assert task.sources(7).tolist() == [0, -1, -1, 1, -1, -1, 2]


@pytest.mark.bridge
def test_bad_rules_are_named():
    with pytest.raises(ValueError, match=r"sends query 0 to key 1 at length 3; .* keys 0\.\.0"):
        SourceMap("ahead", lambda i, n: i + 1).sources(3)
    with pytest.raises(ValueError, match=r"gives float64 of shape \[3\] at length 3; return 3"):
        SourceMap("halves", lambda i, n: i / 2).sources(3)
    with pytest.raises(ValueError, match=r"shape \[1\] at length 3"):
        SourceMap("short", lambda i, n: i[:1]).sources(3)


@pytest.mark.bridge
def test_bad_numbers_are_named(unchecked):
    with pytest.raises(ValueError, match=r"d=-1 is out of range; take 0 or more"):
        FixedOffset(-1)
    with pytest.raises(TypeError, match=r"p=1\.5 is a float; pass a whole number"):
        AbsoluteSlot(1.5)
    with pytest.raises(ValueError, match=r"d_vocab=1 is out of range; take 2 or more"):
        FixedOffset(1, d_vocab=1)
