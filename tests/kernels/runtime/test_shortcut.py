"""The faster way of a computation is taken where it has the definition's bits, and nowhere else."""

import pytest
import torch

from tpfuse.kernels.runtime.shortcut import Shortcut, telling

CALLS: list[str] = []


def definition(x, w, factor):
    CALLS.append("definition")
    return x @ w.t() * factor, x.sum(0)


def quick(x, w, factor):
    CALLS.append("quick")
    return x @ w.t() * factor, x.sum(0)


def a_bit_off(x, w, factor):
    """Differs in one element of the second result."""
    CALLS.append("a_bit_off")
    total = x.sum(0)
    total[2] = torch.nextafter(total[2], total[2] + 1)
    return x @ w.t() * factor, total


def in_order(x, w, order):
    """x w' with sums in fp32, or fp64 of fp64, in a given order."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros(len(x), len(w), dtype=wide)
    for k in order:
        total = total + x[:, k : k + 1].to(wide) * w[:, k].to(wide)
    return total.to(x.dtype)


def forwards(x, w):
    return in_order(x, w, range(x.shape[1]))


def backwards(x, w):
    return in_order(x, w, reversed(range(x.shape[1])))


def last_call(call, *args):
    CALLS.clear()
    call(*args)
    return CALLS[-1], CALLS.count("definition")


X, W = torch.zeros(3, 4), torch.zeros(5, 4)


def test_tried_once_for_each_kind_of_tensor():
    call = Shortcut(definition, quick, quick)
    assert last_call(call, X, W, 2.0) == ("quick", 2)  # two draws
    assert last_call(call, X, W, 2.0) == ("quick", 0)
    assert last_call(call, X + 1, W, 2.0) == ("quick", 0)  # values are not looked at
    for other in torch.zeros(6, 4), torch.zeros(4, 3).t():
        assert last_call(call, other, W, 2.0) == ("quick", 2)
    assert last_call(call, X.double(), W.double(), 2.0) == ("quick", 2)
    assert last_call(call, X, W, 3.0) == ("quick", 2)


def test_a_way_with_other_bits_is_not_taken():
    call = Shortcut(definition, a_bit_off, quick)
    assert last_call(call, X, W, 2.0) == ("definition", 2)
    assert last_call(call, X, W, 2.0) == ("definition", 1)


def test_another_device_has_a_kernel():
    assert last_call(Shortcut(definition, a_bit_off, quick), X.to("meta"), W.to("meta"), 1.0) == ("quick", 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("K", [6, 16, 37, 200])
def test_another_order_is_seen(K, dtype):
    """Of few numbers too, and where rounding to 16 bits hides it of random ones."""
    x, w = torch.zeros(8, K, dtype=dtype), torch.zeros(8, K, dtype=dtype)
    ways = []
    call = Shortcut(forwards, lambda x, w: (ways.append(1), backwards(x, w))[1], backwards)
    call(x, w)
    assert len(ways) == 1  # tried, and not taken
    x, w = (torch.randn(8, K, generator=torch.Generator().manual_seed(K + i)).to(dtype) for i in range(2))
    assert dtype != torch.bfloat16 or torch.equal(forwards(x, w), backwards(x, w))


def test_another_order_is_seen_in_batches():
    """As of attention's products, each of a head."""
    each = lambda way: lambda a, b: torch.stack([way(x, w) for x, w in zip(a, b, strict=True)])
    ways = []
    call = Shortcut(each(forwards), lambda a, b: (ways.append(1), each(backwards)(a, b))[1], each(backwards))
    call(torch.zeros(3, 8, 16, dtype=torch.bfloat16), torch.zeros(3, 8, 16, dtype=torch.bfloat16))
    assert len(ways) == 1  # tried, and not taken


@pytest.mark.parametrize("shapes", [((5, 8), (6, 8)), ((8, 5), (8, 3)), ((1, 9), (1, 9))])
def test_sums_of_telling_numbers_vanish(shapes):
    a, b = (
        telling(shape, negated=i == 1, generator=torch.Generator().manual_seed(i), dtype=torch.float32)
        .bfloat16()
        .double()
        for i, shape in enumerate(shapes)
    )
    assert a.any() and b.any()
    product = a @ b.t() if shapes[0][1] == shapes[1][1] else a.t() @ b
    assert product.eq(0).all() and b.sum(-1).eq(0).all()


def test_telling_numbers_have_all_bits_of_their_dtype():
    """Products of shorter ones are exact in fp64, so that another order shows in few sums."""
    numbers = telling((64,), negated=False, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert not numbers.float().double().eq(numbers).any()


def test_the_generator_of_the_user_is_left_alone():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    Shortcut(definition, quick, quick)(X, W, 1.0)
    assert torch.equal(state, torch.get_rng_state())


def test_a_ledger_does_not_count_the_trial():
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        Shortcut(definition, quick, quick)(X, W, 1.0)
    assert counter.get_total_flops() == 2 * 3 * 4 * 5
