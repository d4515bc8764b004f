"""What tests/no_sync.py takes for a wait, and what not."""

import pytest
import torch

from tests.no_sync import GPU, Waits, no_sync

X = torch.zeros(4, 3, device=GPU)
MASK, INDEX = torch.zeros(4, dtype=torch.bool, device=GPU), torch.zeros(2, dtype=torch.int64, device=GPU)


def assign(x, index, value):
    x[index] = value


WAITS = {
    "item": lambda: X[0, 0].item(),
    "tolist": lambda: X.tolist(),
    "if": lambda: bool(MASK.any()),
    "equal": lambda: torch.equal(X, X),
    "nonzero": lambda: X.nonzero(),
    "unique": lambda: INDEX.unique(),
    "masked_select": lambda: X.masked_select(MASK[:, None]),
    "repeat_interleave": lambda: INDEX.repeat_interleave(INDEX),
    "boolean index": lambda: X[MASK],
    "boolean index assigned": lambda: assign(X, MASK, X[0]),
    "isin": lambda: torch.isin(INDEX, INDEX),
    "to the GPU": lambda: torch.zeros(3).to(GPU),
    "from the GPU": lambda: X.cpu(),
    "copy_": lambda: X.copy_(torch.zeros(4, 3)),
    "a slice assigned": lambda: assign(X, 0, torch.zeros(3)),
    "tensor": lambda: torch.tensor([1, 2], device=GPU),
    "as_tensor": lambda: torch.as_tensor(1, device=GPU),
    "new_tensor": lambda: X.new_tensor([1.0]),
}
DOES_NOT = {
    "kernels": lambda: (X @ X.t()).softmax(-1).sort(),
    "indices": lambda: (X[INDEX], X[None, 1:], X.index_select(0, INDEX)),
    "assignment": lambda: (assign(X, INDEX, 1.0), assign(X, slice(1, 2), 2.0), X.masked_fill_(MASK[:, None], 3.0)),
    "new tensors": lambda: (torch.full((), 3, device=GPU), torch.arange(4, device=GPU), torch.as_tensor(X)),
    "another dtype": lambda: X.to(torch.bfloat16),
    "the host's own": lambda: torch.tensor([1, 2]).nonzero().tolist(),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_seen(name):
    with no_sync(), pytest.raises((Waits, RuntimeError), match="GPU|depend|count|meta tensors"):
        WAITS[name]()


@pytest.mark.parametrize("name", DOES_NOT)
def test_what_does_not_wait_is_let_through(name):
    with no_sync():
        DOES_NOT[name]()


def test_a_launcher_is_looked_into(monkeypatch):
    """Its kernels are counted, and a wait inside it is seen."""
    from tests import no_sync as module
    from tpfuse.kernels.gemm.op import activation_fwd

    with no_sync() as watch:
        activation_fwd(X, "relu")
    assert (
        watch.started["_activation_fwd_kernel"] == 1 and watch.started["empty_like"] + watch.started["new_empty"] == 1
    )
    waiting = type("Waiting", (), dict(launch=lambda *_: X.cpu(), pack=lambda flat: flat))
    monkeypatch.setitem(module._LAUNCHED, activation_fwd.overload, waiting)
    with no_sync(), pytest.raises(Waits):
        activation_fwd(X, "relu")
