"""The largest entries of a long vector, found by a sample, are those of sorting all of it."""

import numpy as np
import pytest
import torch

from tpfuse.training.ok_topk import entries

N = 1 << 19  # of which a sample is less than a fourth


def drawn(kind):
    rng = np.random.default_rng(0)
    x = rng.normal(size=N).astype(np.float32)
    if kind.endswith("ties"):
        return np.round(x) if kind == "many ties" else np.round(x * 4) / 4
    if kind == "zeros":
        return x * (rng.random(N) < 0.004)
    if kind == "a tenth far larger":
        return x * (1 + 99 * (np.arange(N) < N // 10)).astype(np.float32)
    return x


KINDS = {  # whether a sample tells, for k = N / 100
    "normal": True,
    "a tenth far larger": True,
    "ties": True,
    "many ties": False,  # more than 2 k are as large as the smallest that the sample would take
    "zeros": False,  # fewer than k are not zero
}


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_of_sorting(kind):
    x, k = drawn(kind), N // 100
    order = np.argsort(-np.abs(x), kind="stable")[:k]  # of equal ones the first
    exact = np.sort(order[x[order] != 0])
    found, threshold = entries.largest(torch.from_numpy(x), k)
    assert np.array_equal(found.index.numpy(), exact) and np.array_equal(found.value.numpy(), x[exact])
    assert threshold == np.sort(np.abs(x))[-k]
    assert (entries._candidates(torch.from_numpy(x), k) is not None) == KINDS[kind]


def test_a_sample_that_misleads_is_not_believed():
    """Every entry of the sample is small, or every one large."""
    x, k = torch.from_numpy(drawn("normal")), N // 100
    for factor in (1e-3, 1e3):
        step, scaled = N // entries._SAMPLE, x.clone()
        scaled[::step] *= factor
        found, _ = entries.largest(scaled, k)
        assert torch.equal(found.index, scaled.abs().topk(k).indices.sort().values)
        assert entries._candidates(scaled, k) is None


def test_a_short_vector_is_not_sampled():
    assert entries._candidates(torch.ones(4 * entries._SAMPLE - 1), 10) is None
