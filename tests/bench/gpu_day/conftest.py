import pytest

from bench.gpu_day import cache


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    """No test sees the kernels that this machine has compiled."""
    monkeypatch.setattr(cache, "ROOT", tmp_path_factory.mktemp("kernels"))
