"""The faster way of a computation is taken where it has the definition's bits, and nowhere else."""

from typing import Any, NamedTuple

import pytest
import torch

from tpfuse.kernels.runtime.shortcut import Shortcut, vectors


class Numbers(NamedTuple):
    """A record of arguments."""

    index: torch.Tensor | None
    factor: float


CALLS: list[str] = []


def definition(x, numbers):
    CALLS.append("definition")
    return x * numbers.factor, x.sum()


def quick(x, numbers):
    CALLS.append("quick")
    return x * numbers.factor, x.sum()


def a_bit_off(x, numbers):
    """Differs in one element of the second result."""
    CALLS.append("a_bit_off")
    total = x.sum()
    return x * numbers.factor, torch.nextafter(total, total + 1)


def last_call(call, *args, **options):
    CALLS.clear()
    call(*args, **options)
    return CALLS[-1], len(CALLS)


def test_tried_once_for_each_kind_of_tensor():
    call = Shortcut(definition, quick, quick)
    args: Any = torch.zeros(3, 4), Numbers(torch.zeros(2, dtype=torch.int64), 2.0)
    assert last_call(call, *args) == ("quick", 3)
    assert last_call(call, *args) == ("quick", 1)
    assert last_call(call, torch.ones(3, 4), args[1]) == ("quick", 1)  # values are not looked at
    for other in torch.zeros(4, 3), torch.zeros(4, 3).t(), torch.zeros(3, 4, dtype=torch.float64):
        assert last_call(call, other, args[1]) == ("quick", 3)
    assert last_call(call, args[0], Numbers(args[1].index, 3.0)) == ("quick", 3)
    assert last_call(call, args[0], Numbers(None, 3.0), stand_in=args) == ("quick", 1)


def test_zeros_do_not_hide_a_difference():
    call, args = Shortcut(definition, a_bit_off, quick), (torch.zeros(3, 4), Numbers(None, 2.0))
    assert last_call(call, *args) == ("definition", 3)
    assert last_call(call, *args) == ("definition", 1)


def test_the_generator_of_the_user_is_left_alone():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    Shortcut(definition, quick, quick)(torch.zeros(5, 7), Numbers(None, 1.0))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("kind", ["gelu", "tanh gelu", "sigmoid", "exp2", "addcmul"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_vectors_are_rounded_alike(kind, dtype):
    """A row of whole vectors has the same bits alone and among others."""
    run = {
        "gelu": torch.nn.functional.gelu,
        "tanh gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "sigmoid": torch.sigmoid,
        "exp2": torch.exp2,
        "addcmul": lambda x: torch.addcmul(x, x, x, value=0.3),
    }[kind]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert vectors(128) and not vectors(96)
        x = torch.randn(33, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
        assert torch.equal(run(x), torch.cat([run(row) for row in x.split(1)]))
        torch.set_num_threads(2)
        assert not vectors(128)
    finally:
        torch.set_num_threads(threads)
