"""One thread: nothing here is large, and threads that wait for each other on a busy machine are slow."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
