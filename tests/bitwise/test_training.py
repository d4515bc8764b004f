"""The same bits at every split: losses, gradients, norms and weights after steps of AdamW, against one process.

Spans: tpfuse/kernels/runtime/leaves.py and all that sums by leaves.
"""

import pytest
import torch

from tests.bitwise.training import KINDS, LAYOUTS, ONE, Layout, differences, train


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("saving", ["fastest", "smallest"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout(kind, saving, dtype, ranks):
    options = dict(dtype=dtype, saving=saving)
    one = train(None, kind, **options)
    for layout in LAYOUTS:
        results = ranks(layout.size, _train, kind, layout, options)
        assert {r: differences(one, result) for r, result in enumerate(results)} == {r: {} for r in range(layout.size)}


def _train(world, kind, layout, options):
    torch.set_num_threads(1)
    return train(world, kind, sequence_parallel=layout.sequence_parallel, **options)


def test_without_it_bits_differ(ranks):
    """The comparison can fail: sums in rank order are other sums."""
    one = train(None, "gpt2", dtype=torch.float32, bitwise=None)
    (result, _) = ranks(2, _train, "gpt2", Layout(2, True), dict(dtype=torch.float32, bitwise=None))
    assert len(differences(one, result)) > 20
    assert ONE.size == 1
