"""Which device a kernel is launched for, and how that can be pretended."""

import pytest
import torch

from tpfuse.kernels.runtime.launch import MULTIPROCESSORS, Target, pretending, target

CPU, META = torch.device("cpu"), torch.device("meta")


def test_pretending_ends():
    with pretending("sm_80"):
        assert target(META) == target(CPU) == Target("sm_80", MULTIPROCESSORS["sm_80"])
        with pretending("gfx942"):
            assert target(META).arch == "gfx942"
        assert target(META).arch == "sm_80"
    assert target(META).arch == "cpu"


def test_an_arch_that_nobody_knows():
    with pytest.raises(ValueError, match="arch must be one of sm_80, sm_90, gfx942, got 'sm_1'"), pretending("sm_1"):
        pass
