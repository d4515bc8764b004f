"""A replayed call starts what its launcher would start: the same kernels, grids and constants, at the same places.

Shown in a process of its own, by a driver that starts nothing (bench/idle): tensors on the CPU stand for a GPU's, and
what is compared is what Triton's launcher hands to CUDA, each kernel's parameters byte for byte.
"""

import functools
import importlib
import re

import pytest

pytest.importorskip("triton")
import torch
import triton
from torch import Tensor

from tests.kernels.runtime.test_op import samples
from tests.tapes import forget
from tpfuse.kernels import attention, layer_norm, linear, reduce_bias_dropout_add_norm, replay, rms_norm
from tpfuse.kernels.replay import Replayed, read
from tpfuse.kernels.runtime.op import OPS, flatten
from tpfuse.kernels.runtime.philox import make_rng

FUSED = next(where for where, (op, _) in samples().items() if op.name == "reduce_bias_dropout_add_norm_fwd")


# ---- in that process ----


def _place(address: int, tensors: list[Tensor], outputs: list[Tensor], seen: list[int]) -> tuple:
    """What an address is told from: an argument, an output, or a temporary, numbered as they come."""
    for name, group in (("in", tensors), ("out", outputs)):
        for i, t in enumerate(group):
            if t.numel() and 0 <= address - t.data_ptr() < t.untyped_storage().nbytes():
                return name, i, address - t.data_ptr()
    seen.append(address) if address not in seen else None
    return "temporary", seen.index(address)


def _is_address(parameter: int) -> bool:
    """No sample has a number as large."""
    return parameter > 1 << 32


def _call(op, args) -> tuple[list, list[Tensor]]:
    """-> the kernels that a call starts, addresses told from what it was given and made; and what it returns."""
    from bench import idle

    idle.STARTED = []
    with torch.no_grad():
        result = op(*args)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    tensors, seen, started = read(args).tensors, [], []
    for kernel in idle.STARTED:
        if kernel.name == "mm":
            told = [(_place(t.data_ptr(), tensors, outputs, seen), t.shape, t.stride()) for t in kernel.params]
        else:
            told = [_place(p, tensors, outputs, seen) if _is_address(p) else p for p in kernel.params]
        started.append((kernel.name, kernel.function, kernel.launch, told))
    idle.STARTED = None
    return started, outputs


def _sample(module: str, index: int):
    """(op, arguments), no tensor twice."""
    op, args = importlib.import_module(module).SAMPLES[index]
    flat, seen = list(flatten(args)), set()
    for i, arg in enumerate(flat):
        if isinstance(arg, Tensor):
            flat[i] = arg.clone() if id(arg) in seen else arg
            seen.add(id(arg))
    return op, op.pack(tuple(flat))


def _twice(module: str, index: int) -> tuple[bool, list, list, bool]:
    """Runs a sample of an op twice -> whether there is a tape, what each started, whether results are alike."""
    op, args = _sample(module, index)
    op.launch.forget()
    first, made = _call(op, args)
    (tape,) = op.launch.tapes.values()
    again, remade = _call(op, args)
    alike = [(o.shape, o.stride(), o.dtype) for o in made] == [(o.shape, o.stride(), o.dtype) for o in remade]
    apart = not {o.data_ptr() for o in made if o.numel()} & {o.data_ptr() for o in remade if o.numel()}
    return tape is not None, first, again, alike and apart


def _cases():
    """Every sample of every op that is replayed; the first of each op every day."""
    seen = set()
    for (module, index), (op, _) in samples().items():
        if isinstance(op.launch, Replayed):
            yield pytest.param(module, index, id=f"{op.name}-{index}", marks=[pytest.mark.slow] * (op.name in seen))
            seen.add(op.name)


@pytest.mark.parametrize("module, index", list(_cases()))
def test_a_replay_starts_what_the_launcher_does(idle, module, index):
    taped, first, again, alike = idle(_twice, module, index)
    assert taped and first and alike and again == first


def _kinds() -> dict[str, list[bool]]:
    """Which calls replay after a first one, by the number of kernels that Triton's own path looked at."""
    op, (parts, *rest) = _sample(*FUSED)
    looked, launcher = [], op.launch.launcher
    op.launch.launcher = lambda *args: (looked.append(1), launcher(*args))[1]
    wide = torch.zeros(parts.numel() + 8, dtype=parts.dtype)
    unaligned = wide[1 : 1 + parts.numel()].view(parts.shape)
    aligned = wide[: parts.numel()].view(parts.shape)

    def run(parts, **options):
        looked.clear()
        with torch.no_grad():
            op(parts, *rest)
        return not looked

    op.launch.forget()
    found = dict(unaligned_first=[run(unaligned), run(unaligned)], first=[run(parts)], again=[run(parts), run(aligned)])
    found["unaligned"] = [run(unaligned)]
    found["other strides"] = [run(parts.expand(2, *parts.shape[1:]) if len(parts) == 1 else parts[:1])]
    before, replay.REPLAY = replay.REPLAY, False
    found["off"] = [run(parts)]
    replay.REPLAY = before
    stream, replay.calls.stream_of = replay.calls.stream_of, lambda device: None
    found["another device is current"] = [run(parts)]
    replay.calls.stream_of = stream
    found["on again"] = [run(parts)]
    op.launch.launcher = launcher
    return found


def test_which_calls_are_replayed(idle):
    assert idle(_kinds) == {
        "unaligned_first": [False, False],
        "first": [False],
        "again": [True, True],
        "unaligned": [False],
        "other strides": [False],
        "off": [False],
        "another device is current": [False],
        "on again": [True],
    }


def _given_twice() -> list[list]:
    """What distinct tensors start: after a call that was given one of them twice, again, and without replay."""
    op, (parts, add, norm, *rest) = _sample(*FUSED)
    vectors = torch.rand_like(norm.gamma), torch.rand_like(norm.gamma)
    apart = parts, add, norm._replace(gamma=vectors[0], beta=vectors[1]), *rest
    op.launch.forget()
    _call(op, (parts, add, norm._replace(gamma=vectors[0], beta=vectors[0]), *rest))
    found = [_call(op, apart)[0], _call(op, apart)[0]]
    before, replay.REPLAY = replay.REPLAY, False
    found.append(_call(op, apart)[0])
    replay.REPLAY = before
    return found


def test_a_call_with_a_tensor_given_twice_is_of_another_kind(idle):
    after, again, launched = idle(_given_twice)
    assert after == again == launched


def _compared() -> tuple[list[bool], list[list], list[list]]:
    """Whether calls were found by comparison; what each started, and what it starts without replay."""
    op, args = _sample(*FUSED)
    parts, add, norm, *rest = args
    gamma, wide = norm.gamma, torch.zeros(*parts.shape[:2], 2 * parts.shape[2], dtype=parts.dtype)
    twice = add._replace(bias=gamma)
    calls = [
        args,
        (parts, add, norm._replace(gamma=torch.nn.Parameter(gamma)), *rest),
        (wide[..., ::2], add, norm, *rest),
        (parts, add, norm._replace(gamma=gamma.bfloat16()), *rest),
        (parts, twice, norm, *rest),
        (parts, twice._replace(bias=gamma.clone()), norm, *rest),
    ]
    op.launch.forget()
    for _ in range(2):
        for given in calls:
            _call(op, given)
    looked, run = [], Replayed.run
    Replayed.run = lambda self, args, call: (looked.append(args), run(self, args, call))[1]
    found, started = [], []
    for given in calls:
        looked.clear()
        started.append(_call(op, given)[0])
        found.append(not looked)
    Replayed.run = run
    before, replay.REPLAY = replay.REPLAY, False
    launched = [_call(op, given)[0] for given in calls]
    replay.REPLAY = before
    return found, started, launched


def test_a_known_kind_is_found_by_comparison(idle):
    """Calls that differ in tensors' metadata alone, or in which of them are one, are not mixed up."""
    found, started, launched = idle(_compared)
    assert all(found) and started == launched and started[0] != started[2] != started[3] != started[4]


def _public(name: str) -> tuple[list, list, int, str]:
    """What a public function and its backward start, replayed and launched; how often Python ran in the replay; and
    what it then says of a call that breaks a rule."""
    from bench import idle

    call, inputs, bad = PUBLIC[name]()

    def started() -> list:
        idle.STARTED = []
        out = call(*inputs)
        made = [y for y in (out if isinstance(out, tuple) else (out,)) if isinstance(y, Tensor)]
        torch.autograd.grad(made, inputs, [torch.ones_like(y) for y in made])
        kernels, idle.STARTED = idle.STARTED, None
        return [
            (k.name, k.function, k.launch, ["address" if _is_address(p) else p for p in k.params])
            for k in kernels
            if k.name != "mm"
        ]

    for _ in range(3):
        started()
    looked, run = [], Replayed.run
    Replayed.run = lambda self, args, call: (looked.append(args), run(self, args, call))[1]
    replayed = started()
    Replayed.run = run
    before, replay.REPLAY = replay.REPLAY, False
    launched = started()
    replay.REPLAY = before
    with pytest.raises(ValueError) as said:
        bad(*inputs)
    return replayed, launched, len(looked), str(said.value)


def _vectors(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(*shape).bfloat16().requires_grad_() for shape in shapes]


PUBLIC = {
    "layer_norm": lambda: (layer_norm, _vectors((4, 64), (64,), (64,)), lambda x, w, b: layer_norm(x, w, b[:3])),
    "rms_norm": lambda: (rms_norm, _vectors((4, 64), (64,)), lambda x, w: rms_norm(x, w, kind="other")),
    "linear": lambda: (
        lambda x, w, b: linear(x, w, b, "gelu"),
        _vectors((4, 64), (32, 64), (32,)),
        lambda x, w, b: linear(x, w.t(), b, "gelu"),
    ),
    "attention": lambda: (
        lambda qkv: attention(qkv, batch=2, causal=True),
        _vectors((16, 2, 3, 32)),
        lambda qkv: attention(qkv, batch=2, causal=False, window=0),
    ),
    "reduce_bias_dropout_add_norm": lambda: (
        lambda *tensors: reduce_bias_dropout_add_norm(*tensors, p=0.1, rng=make_rng(0, 1)),
        _vectors((1, 4, 64), (64,), (4, 64), (64,), (64,)),
        lambda parts, bias, h, *norm: reduce_bias_dropout_add_norm(parts, bias, h[:3], *norm),
    ),
}
SAID = {
    "layer_norm": r"layer_norm: bias must have shape \(64,\), got \(3,\)",
    "rms_norm": "rms_norm: norm must be one of .* got 'other'",
    "linear": r"linear: weight must be \[N, 64\], got \(64, 32\)",
    "attention": "attention: window must be at least 1, got 0",
    "reduce_bias_dropout_add_norm": r"reduce_bias_dropout_add_norm: residual must have shape \(4, 64\)",
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_function_is_replayed_whole_and_checked(idle, name):
    replayed, launched, looked, said = idle(_public, name)
    assert replayed == launched and launched and looked == 0
    assert re.match(SAID[name], said), said


def _bias_with_a_gradient() -> str:
    qkv, bias = torch.randn(16, 2, 3, 32).bfloat16(), torch.zeros(1, 8, 8).bfloat16()
    for _ in range(3):
        attention(qkv, batch=2, causal=True, bias=bias)
    with pytest.raises(ValueError) as said:
        attention(qkv, batch=2, causal=True, bias=bias.requires_grad_())
    return str(said.value)


def test_a_check_of_what_needs_a_gradient_is_made_after_replays(idle):
    assert "bias is not differentiated" in idle(_bias_with_a_gradient)


def _limited() -> int:
    from tpfuse.kernels.norm.triton_forward import reduce_launch

    replayed = Replayed(reduce_launch)
    replay.calls.LIMIT, before = 3, replay.calls.LIMIT
    for m in range(1, 6):
        replayed(torch.ones(2, m, 4))
    replay.calls.LIMIT = before
    return len(replayed.tapes)


def test_tapes_are_bounded(idle):
    assert idle(_limited) == 2


# ---- in this one ----


def key(*args):
    return read(args).key()


def test_a_key_holds_all_that_a_launcher_may_read():
    x = torch.ones(4, 6)
    others = [x.double(), torch.ones(4, 5), torch.ones(6, 4).t(), torch.ones(8, 6)[::2], x.to("meta")]
    assert key(x) == key(torch.zeros(4, 6)) and all(key(x) != key(other) for other in others)
    assert len({key(x, other) for other in (x, torch.ones(4, 6), 0, 1, None)}) == 5
    assert key(x, 1) != key(x, 2) and key(x, None) != key(x, 0) != key(x, False) and key(x, "a") != key(x, "b")


def test_what_is_left_to_the_launcher(monkeypatch):
    """Another device, a stream that is captured, and hooks of Triton's: a chain of them, as here, or one."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: captured, raising=False)
    captured = False
    gpu, other, runtime = torch.device("cuda", 0), torch.device("cuda", 1), triton.knobs.runtime
    assert replay.calls.stream_of(gpu) == 7 and replay.calls.stream_of(other) is None
    runtime.launch_exit_hook.add(print)
    try:
        assert replay.calls.stream_of(gpu) is None
    finally:
        runtime.launch_exit_hook.remove(print)
    assert replay.calls.stream_of(gpu) == 7
    captured = True
    assert replay.calls.stream_of(gpu) is None
    captured = False
    monkeypatch.setattr(runtime, "launch_enter_hook", print)
    assert replay.calls.stream_of(gpu) is None


def test_on_a_cpu_nothing_is_recorded():
    calls = []
    launcher = Replayed(functools.partial(lambda x: calls.append(x) or x))
    x = torch.ones(1)
    assert launcher(x) is x and launcher(x) is x and len(calls) == 2 and not launcher.tapes


def test_a_test_on_a_gpu_leaves_no_tape():
    """One that replaces what launchers ask or allocate with would leave it to the next."""
    launchers = [op.launch for op in OPS.values() if isinstance(op.launch, Replayed)]
    for launcher in launchers:
        launcher.tapes[("a key",)] = launcher.guarded[("constants",)] = None
    forget()
    assert launchers and not any(launcher.tapes or launcher.guarded for launcher in launchers)
