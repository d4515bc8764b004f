import pytest
import torch


@pytest.fixture
def poisoned(monkeypatch):
    """Every output, and every partial sum, is NaN before a kernel writes it."""
    new_empty = torch.Tensor.new_empty

    def poison(x, *size, **options):
        out = new_empty(x, *size, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch.Tensor, "new_empty", poison)
