from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from tests.forking import forking


def _install() -> None:
    from bench import idle

    idle.install()


@pytest.fixture(scope="module")
def idle():
    """(function, its arguments) -> what it returns in a process whose CUDA driver starts nothing."""
    with ProcessPoolExecutor(1, mp_context=forking(), initializer=_install) as pool:
        yield lambda fn, *args: pool.submit(fn, *args).result()


@pytest.fixture
def poisoned(monkeypatch):
    """Every output, and every partial sum, is NaN before a kernel writes it."""
    new_empty = torch.Tensor.new_empty

    def poison(x, *size, **options):
        out = new_empty(x, *size, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch.Tensor, "new_empty", poison)
