import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def _one_thread():
    """Tensors here are tiny: a second thread does no work, and where cores are shared it is waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
