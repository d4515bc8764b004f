"""A tape does to other tensors what the function that it was recorded of does to them, with the same memory."""

import ctypes
import weakref

import pytest
import torch
from torch import Tensor

from tpfuse.kernels.replay.recorder import active_recorder, recording
from tpfuse.kernels.replay.tape import ALLOCATE, tape
from tpfuse.kernels.runtime.counters import COUNTERS, address, counters
from tpfuse.kernels.runtime.triton import started_by


class Doubled:
    """A compiled kernel of Triton's: out[i] = 2 x[i] + by for n fp32 elements; it takes addresses."""

    function, packed_metadata = 5, (7,)

    def run(self, *args):
        *start, out, x, n, by = args
        assert start == [1, 1, 1, 3, self.function, self.packed_metadata, None, None, None]  # grid, stream, .., hooks
        addresses = [t.data_ptr() if isinstance(t, Tensor) else t for t in (out, x)]
        out, x = (ctypes.cast(a, ctypes.POINTER(ctypes.c_float)) for a in addresses)
        for i in range(n):
            out[i] = 2 * x[i] + by


def doubled(out, x, by=0.0):
    """Starts it as kernels.runtime.launch does."""
    args, kernel = (out, x, x.numel(), by), Doubled()
    kernel.run(1, 1, 1, 3, kernel.function, kernel.packed_metadata, None, None, None, *args)
    if active_recorder() is not None:
        active_recorder().start(kernel, (1, 1, 1), args)
    return out


def taped(function, *tensors):
    with recording(tensors) as recorded:
        result = function(*tensors)
    return tape(recorded, result)


def replay(made, *tensors):
    return made.replay(list(tensors), [t.data_ptr() for t in tensors], 3)


def random(*shape):
    return torch.randn(shape)


def kernels_and_products(x, w):
    a = doubled(x.new_empty(x.shape), x, 1.0)
    b = a @ w.t()
    return b, doubled(torch.empty_like(b), b), None


def parts_of_what_was_made(x, w):
    a = x.new_empty(3, *x.shape)
    doubled(a[1], x)
    a[0] = a[1] + 1
    a[2].zero_()
    doubled(a[2][1:], x[1:], 3.0)
    return a, a[1], a.sum(0)


def parts_of_arguments(x, w):
    return doubled(w.new_empty(2), w[2, :2]), x[1:] @ w.reshape(-1, 4).t()[:, 1:3], x[None]


def an_argument(x, w):
    return x, w.t(), x + 1


def several_outputs(x, w):
    values, indices = torch.max(x @ w.t(), 1)
    return doubled(torch.empty_like(values), values), indices


def lists_of_tensors(x, w):
    a = x * 2
    return torch.cat([a, w[1:3]]), torch.stack([a, x]).to(torch.promote_types(x.dtype, torch.float64))


def one_tensor(x, w):
    return x.add_(1).mm(w.t())


FUNCTIONS = (
    kernels_and_products,
    parts_of_what_was_made,
    parts_of_arguments,
    an_argument,
    several_outputs,
    lists_of_tensors,
    one_tensor,
)


def same(a, b):
    return (a is None) is (b is None) and (a is None or (torch.equal(a, b) and a.stride() == b.stride()))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_are_the_functions(function):
    made = taped(function, random(3, 4), random(5, 4))
    for _ in range(2):
        inputs = random(3, 4), random(5, 4)
        copies = [t.clone() for t in inputs]
        result, wanted = replay(made, *inputs), function(*copies)
        if isinstance(wanted, Tensor):
            assert isinstance(result, Tensor)
            result, wanted = (result,), (wanted,)
        assert all(same(a, b) for a, b in zip(result, wanted, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(inputs, copies))  # what was changed in place too


def copies_where_others_were(x, w):
    a = doubled(torch.empty_like(x), x)
    total = a.sum(0)
    del a  # whose storage's identity the copy may have
    b = x.t().contiguous()
    return doubled(torch.empty_like(b), b), total


def copies_that_may_be_views(x, w):
    return w.t().reshape(-1) + 1, x.to(torch.float64), x.reshape(-1), x.to(x.dtype)


@pytest.mark.parametrize("function", (*FUNCTIONS, copies_where_others_were, copies_that_may_be_views))
def test_a_function_is_recorded_in_inference_mode(function):
    """There reshape(), to() and their like are one op, whose schema says that it gives a view."""
    with torch.inference_mode():
        made = taped(function, random(3, 4), random(5, 4))
    assert made is not None
    inputs = random(3, 4), random(5, 4)
    wanted, result = function(*(t.clone() for t in inputs)), replay(made, *inputs)
    result, wanted = ((t,) if isinstance(t, Tensor) else t for t in (result, wanted))
    assert all(same(a, b) for a, b in zip(result, wanted, strict=True))


def test_an_empty_result_of_a_replay_in_inference_mode_can_be_saved_later():
    """Every replay returns the same one."""
    made = taped(lambda x: (x + 1, x.new_empty(0)), random(3))
    with torch.inference_mode():
        replay(made, random(3))
    _, empty = replay(made, random(3))
    assert not empty.is_inference()


def test_arguments_may_lie_anywhere_in_their_storage():
    made = taped(parts_of_arguments, random(3, 4), random(5, 4))
    wide = random(9, 4)
    inputs = wide[4:7], random(7, 4)[2:]
    assert all(same(a, b) for a, b in zip(replay(made, *inputs), parts_of_arguments(*inputs), strict=True))


def test_results_of_two_replays_are_apart():
    made, inputs = taped(kernels_and_products, random(3, 4), random(5, 4)), (random(3, 4), random(5, 4))
    first = replay(made, *inputs)
    kept = [t.clone() for t in first if t is not None]
    replay(made, random(3, 4), random(5, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, kept))


def test_a_replay_leaves_nothing_in_the_tape():
    """Two threads may replay it at once, and what it made is nobody's but the caller's."""
    made = taped(kernels_and_products, random(3, 4), random(5, 4))
    bound = dict(made.replay.__globals__)
    made_once = [weakref.ref(t) for t in replay(made, random(3, 4), random(5, 4)) if t is not None]
    assert made.replay.__globals__ == bound and not any(ref() is not None for ref in made_once)


def test_one_view_of_the_whole_is_made_as_it_is():
    """It then costs no call; beside another use of what was made it is a view of that."""
    alone = taped(lambda x, w: doubled(torch.empty_like(x), x).t()[None], random(3, 4), random(5, 4))
    beside = taped(lambda x, w: (a := doubled(torch.empty_like(x), x), a[None]), random(3, 4), random(5, 4))
    x = random(3, 4)
    made = replay(alone, x, x)
    assert "as_strided" not in alone.source and torch.equal(made, 2 * x.t()[None]) and made.stride() == (4, 1, 4)
    a, view = replay(beside, x, x)
    assert "as_strided" in beside.source and view._base is a and a.data_ptr() == view.data_ptr()


def test_constants_are_returned_as_they_were():
    made = taped(lambda x: (x + 1, torch.bfloat16, None, ("a", 2)), random(4))
    assert replay(made, random(4))[1:] == (torch.bfloat16, None, ("a", 2))


def test_what_was_made_is_freed_after_its_last_use(monkeypatch):
    def chain(x):
        for _ in range(4):
            x = doubled(torch.empty_like(x), x)
        return x @ x

    alive, most, empty = [], [], ALLOCATE["cpu"]

    def counted(*args):
        t = empty(*args)
        alive.append(weakref.ref(t))
        most.append(sum(ref() is not None for ref in alive))
        return t

    monkeypatch.setitem(ALLOCATE, "cpu", counted)
    made = taped(chain, random(4, 4))
    x = random(4, 4)
    assert torch.equal(replay(made, x), chain(x.clone()))
    assert max(most[:4]) == 2


def test_what_nobody_uses_is_not_made():
    """As an op's empty results."""
    with recording([x := torch.ones(3)]) as recorded:
        unused, y = torch.empty(0), x + 1
    made = tape(recorded, y)
    assert unused is not None and made is not None and "empty" not in made.source
    assert torch.equal(replay(made, x), y)


def test_storages_that_take_the_place_of_freed_ones():
    """The allocator hands out freed memory again: an identity or address may stand for several tensors."""

    def function(x):
        for by in range(5):
            a = doubled(x.new_empty(4), x, float(by))
            x = a * a
            del a
        return x

    made, x = taped(function, random(4)), random(4)
    assert torch.equal(replay(made, x), function(x))


OLDER = torch.ones(4)
UNREPEATABLE = dict(
    nothing=lambda x: (),
    an_older_tensor=lambda x: x + OLDER,
    an_older_one_in_a_kernel=lambda x: doubled(x.new_empty(4), OLDER),
    an_older_result=lambda x: (doubled(x.new_empty(4), x), OLDER),
    a_value_that_is_read=lambda x: x * x.sum().item(),
    a_comparison=lambda x: x if torch.equal(x, x) else -x,
    a_list_with_nothing=lambda x: torch.ops.aten.index.Tensor(x[None], [None, torch.tensor([0, 1])]),
    a_place_by_name=lambda x: torch.add(x, x, out=x.new_empty(4)),
    another_dtypes_bits=lambda x: x.view(torch.int32) + 1,
    made_unseen=lambda x: doubled(torch.from_numpy(OLDER.numpy()), x),
)


@pytest.mark.parametrize("name", UNREPEATABLE)
def test_what_cannot_be_repeated_has_no_tape(name):
    assert taped(UNREPEATABLE[name], random(4)) is None


def test_a_descriptor_holds_an_address():
    class Descriptor:
        block_shape = [1]

    def function(x):
        active_recorder().start(Doubled(), (1, 1, 1), (Descriptor(), x))
        return x + 1

    assert taped(function, random(4)) is None


def test_views_of_arguments_in_one_storage_have_no_tape():
    both = random(2, 4)
    function = lambda a, b: a[1:] + b[:-1]
    assert taped(function, both[0], both[1]) is None and taped(function, random(4), random(4)) is not None


def test_recordings_end_with_an_error_too():
    with pytest.raises(ZeroDivisionError), recording([]):
        assert active_recorder() is not None
        raise ZeroDivisionError
    assert active_recorder() is None


def test_counters_are_those_of_the_stream():
    """They are older than the call, and yet it is replayed."""
    cpu = torch.device("cpu")
    made = taped(lambda x: doubled(x.new_empty(COUNTERS), counters(cpu), 3.0), random(4))
    assert torch.equal(replay(made, random(4)), torch.full((COUNTERS,), 3.0))
    assert address(cpu, 3) == address(cpu, 3) != counters(cpu).data_ptr()


class Launcher:
    """As Triton's: it adds to what it was called with, and hands that to a compiled function."""

    profile_scratch_size = 0

    def __init__(self, memory):
        self.global_scratch_size, self.seen = memory, []

    def launch(self, *args):
        self.seen.append(args)

    def __call__(self, stream, *args):
        scratch = torch.empty(self.global_scratch_size) if self.global_scratch_size else None
        self.launch(stream, scratch, args)


def test_a_kernel_is_started_without_triton_s_python():
    launcher, stream = Launcher(0), object()
    function, args = started_by(launcher, (stream, 1, (2, 3)))
    assert function == launcher.launch and args == (stream, None, (1, (2, 3))) and not launcher.seen


def test_a_kernel_that_needs_memory_is_started_by_triton():
    """Which allocates it at each start."""
    launcher = Launcher(8)
    assert started_by(launcher, (0, 1)) == (launcher, (0, 1)) and not launcher.seen
    assert started_by(print, (0, 1)) == (print, (0, 1))  # of a backend that does not say so
