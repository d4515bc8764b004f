import math

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as interleaved_rotary
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding, apply_rotary_pos_emb

from tests.kernels import common
from tests.kernels.common import gradcheck, leaf
from tpfuse.kernels import rope, rope_table
from tpfuse.kernels.rotary.op import Rotation, rope_fwd

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, BF16 = torch.float32, torch.bfloat16
COS, SIN = rope_table(8, 6, theta=100.0)
POSITIONS = torch.tensor([5, 0, 5, 2])
X = torch.randn(4, 3, 10)
SAMPLES = [
    (rope_fwd, (X, *Rotation(COS, SIN, POSITIONS, False), False)),
    (rope_fwd, (X.bfloat16(), *Rotation(COS, SIN, None, True), True)),
    (rope_fwd, (X.transpose(0, 1), *Rotation(COS, SIN, None, False), True)),
]
test_opcheck = common.opcheck(SAMPLES)


def by_complex_numbers(x, cos, sin, positions=None, interleaved=False):
    """Another way to say it, that autograd differentiates: a pair times cos + i sin."""
    cos, sin = (t[: len(x)] if positions is None else t[positions] for t in (cos, sin))
    F = cos.shape[-1]
    angles = torch.complex(cos, sin)[..., None, :].to(torch.promote_types(x.dtype, torch.complex64))
    pairs = x[..., : 2 * F].unflatten(-1, (F, 2) if interleaved else (2, F))
    a, b = pairs.unbind(-1 if interleaved else -2)
    z = torch.complex(a.to(angles.real.dtype), b.to(angles.real.dtype)) * angles
    rotated = torch.stack([z.real, z.imag], -1 if interleaved else -2).flatten(-2)
    return torch.cat([rotated.to(x.dtype), x[..., 2 * F :]], -1)


# ---- the op ----


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("positions", [None, POSITIONS], ids=["rows", "positions"])
@pytest.mark.parametrize("E", [8, 9, 14], ids=["whole", "odd", "partial"])
def test_against_complex_numbers(E, positions, interleaved):
    cos, sin = COS.double(), SIN.double()
    ours, oracle = (
        lambda x, f=f: f(x, cos, sin, positions=positions, interleaved=interleaved) for f in (rope, by_complex_numbers)
    )
    common.assert_same(ours, oracle, leaf(4, 3, E))
    common.assert_same(ours, oracle, leaf(3, 4, E).transpose(0, 1).detach().requires_grad_(), non_contiguous=True)
    gradcheck(ours, leaf(4, 2, E))
    assert torch.equal(ours(X)[..., 8:], X[..., 8:])


def test_leading_dimensions():
    x, positions = leaf(2, 3, 4, 8), torch.randint(6, (2, 3))
    common.assert_same(
        lambda x: rope(x, COS, SIN, positions=positions),
        lambda x: by_complex_numbers(x, COS, SIN, positions),
        x,
        rtol=1e-6,
    )
    assert torch.equal(
        rope(x, COS, SIN).flatten(0, 1), rope(x.flatten(0, 1), COS, SIN)
    )  # row i of the flattened takes table row i
    assert rope(torch.randn(0, 2, 8), COS, SIN).shape == (0, 2, 8)


def test_the_way_back():
    """A rotation keeps lengths, and its adjoint undoes it; scores depend on the distance of positions alone."""
    x = torch.randn(4, 3, 8).double()
    rotation = Rotation(COS, SIN, POSITIONS, interleaved=False)
    y = rope_fwd(x, rotation, False)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(rope_fwd(y, rotation, True), x, rtol=1e-6, atol=1e-6)
    q, k = torch.randn(2, 1, 1, 8).double()
    scores = [(rope(q, COS[i:], SIN[i:]) * rope(k, COS[j:], SIN[j:])).sum().item() for i, j in ((2, 0), (5, 3), (4, 0))]
    assert math.isclose(scores[0], scores[1], rel_tol=1e-5) and not math.isclose(scores[0], scores[2], rel_tol=1e-2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_low_precision(dtype, interleaved):
    cos, sin = rope_table(32, 33, theta=1e4)
    ours, oracle = (lambda x, f=f: f(x, cos, sin, interleaved=interleaved) for f in (rope, by_complex_numbers))
    common.assert_accurate(ours, oracle, leaf(33, 3, 40), dtype=dtype)


def test_autocast():
    x = leaf(4, 3, 8, dtype=FP32)
    with torch.autocast("cpu", BF16):
        y = rope(x, COS, SIN)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert y.dtype == BF16 and dx.dtype == FP32 and torch.equal(y, rope(x.bfloat16(), COS, SIN))


def test_x_is_not_saved():
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rope(leaf(4, 3, 8), COS, SIN, positions=POSITIONS)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in (COS, SIN, POSITIONS)]


@pytest.mark.parametrize("positions", [None, POSITIONS], ids=["rows", "positions"])
def test_compile(positions):
    common.assert_compiles(lambda x: rope(x, COS, SIN, positions=positions), leaf(4, 3, 10, dtype=FP32))


def test_once_differentiable():
    common.assert_once_differentiable(lambda x: rope(x, COS, SIN), leaf(4, 3, 8))


@pytest.mark.parametrize(
    "x, options, match",
    [
        (X[0], {}, r"rope: x must be \[..., H, E\], got \(3, 10\)"),
        (X[..., :7], {}, r"cos and sin must be \[P, F\] with 2 <= 2F <= 7, got \(6, 4\) and \(6, 4\)"),
        (X, dict(sin=SIN[:5]), r"got \(6, 4\) and \(5, 4\)"),
        (X, dict(sin=SIN.double()), "both float32 or both float64, got torch.float32 and torch.float64"),
        (X.expand(2, 4, 3, 10), {}, "a table of 6 rows serves as many rows of x, got 8"),
        (X, dict(positions=POSITIONS[:3]), r"positions must be \[4\] int64, got \[3\] torch.int64"),
        (X, dict(positions=POSITIONS.int()), "int64, got .* torch.int32"),
        (X, dict(positions=POSITIONS - 6), r"rope: positions must lie in 0 to 5, got \[-"),
    ],
)
def test_errors(x, options, match):
    with pytest.raises(ValueError, match=match):
        rope(x, **dict(cos=COS, sin=SIN) | options)


# ---- the tables, against transformers ----

LENGTHS = dict(original_max_position_embeddings=16)
FACTORS = dict(short_factor=[1.0, 1.5, 2.0, 2.5], long_factor=[1.0, 3.0, 5.0, 9.0])
SCALINGS = [
    dict(rope_type="default"),
    dict(rope_type="linear", factor=3.0),
    dict(rope_type="dynamic", factor=2.0),
    dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **LENGTHS),
    dict(rope_type="llama3", factor=2.0, low_freq_factor=1.0, high_freq_factor=8.0),  # of max_position_embeddings
    dict(rope_type="yarn", factor=4.0, **LENGTHS),
    dict(rope_type="yarn", factor=4.0, beta_fast=4.0, beta_slow=0.5, truncate=False, **LENGTHS),
    dict(rope_type="yarn", factor=4.0, mscale=0.7, mscale_all_dim=1.3, **LENGTHS),
    dict(rope_type="yarn", factor=None, attention_factor=1.25, **LENGTHS),
    dict(rope_type="longrope", factor=4.0, **FACTORS, **LENGTHS),
    dict(rope_type="longrope", attention_factor=1.5, **FACTORS, **LENGTHS),
]
SCALING = pytest.mark.parametrize(
    "scaling", SCALINGS, ids=lambda s: ",".join(f"{v}" for v in s.values() if not isinstance(v, list))
)
HEAD, THETA, MAX = 8, 150.0, 64


def config_of(scaling, new, **more):
    """A Llama configuration of one generation or the other; it changes the dict it is given."""
    rope = (
        dict(rope_parameters=dict(scaling, rope_theta=THETA))
        if new
        else dict(rope_theta=THETA, rope_scaling=dict(scaling))
    )
    return LlamaConfig(
        hidden_size=2 * HEAD, num_attention_heads=2, head_dim=HEAD, max_position_embeddings=MAX, **rope, **more
    )


def table_of(scaling, new, length, **more):
    args = dict(scaling=dict(scaling, rope_theta=THETA)) if new else dict(theta=THETA, scaling=scaling)
    return rope_table(HEAD, length, **args, max_position_embeddings=MAX, **more)


@SCALING
@pytest.mark.parametrize("new", [True, False], ids=["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("length", [12, MAX, 3 * MAX])
@pytest.mark.parametrize("dtype", [FP32, torch.float64])
def test_tables_are_those_of_transformers(scaling, new, length, dtype):
    """Bitwise, but for a stretched dynamic base: transformers takes its power in fp32 there, from a length that is a
    tensor."""
    theirs = LlamaRotaryEmbedding(config_of(scaling, new)).to(dtype)(
        torch.ones((), dtype=dtype), torch.arange(length)[None]
    )
    stretched = scaling["rope_type"] == "dynamic" and length > MAX
    for ours, their in zip(table_of(scaling, new, length), theirs, strict=True):
        assert ours.dtype == FP32 and their.dtype == dtype
        torch.testing.assert_close(
            ours.to(dtype), their[0, :, : HEAD // 2], rtol=0, atol=length * 2e-7 if stretched else 0
        )


@SCALING
@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("seq_len", [10, 100])
def test_frequencies_are_those_of_transformers(scaling, partial, seq_len):
    """The functions behind every model, with part of a head: frequencies are the angles of position 1."""
    if scaling["rope_type"] == "default":
        pytest.skip("has no function there")
    scaling = {k: v[: int(4 * partial)] if isinstance(v, list) else v for k, v in scaling.items()}
    config = config_of(scaling | dict(partial_rotary_factor=partial), new=True)
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, seq_len=seq_len)
    args = (
        dict(scaling, rope_theta=THETA),
        dict(partial_rotary_factor=partial, seq_len=seq_len, max_position_embeddings=MAX),
    )
    cos, sin = rope_table(HEAD, 2, scaling=args[0], **args[1])
    assert torch.equal(cos[1], frequencies.cos() * factor) and torch.equal(sin[1], frequencies.sin() * factor)
    again = rope_table(
        HEAD, 2, scaling=args[0] | dict(partial_rotary_factor=partial), **args[1] | dict(partial_rotary_factor=0.3)
    )
    assert torch.equal(again[0], cos)  # what scaling says goes first


def test_scalings_differ():
    """No two of them are the same table, and past the trained length dynamic and longrope change."""
    tables = [table_of(s, True, 3 * MAX)[0] for s in SCALINGS]
    assert not any(torch.equal(a, b) for i, a in enumerate(tables) for b in tables[:i])
    for scaling in SCALINGS:
        short, long = (table_of(scaling, True, 8, seq_len=n)[0] for n in (8, 100))
        assert torch.equal(short, long) == (scaling["rope_type"] not in ("dynamic", "longrope"))


@SCALING
@pytest.mark.parametrize("dtype", [FP32, torch.float64])
def test_rotation_is_that_of_transformers(scaling, dtype):
    """Llama's own function, on q and k of [B, heads, S, E], values and gradients."""
    S, B, H = 40, 2, 3
    rotary = LlamaRotaryEmbedding(config_of(scaling, True)).to(dtype)
    cos, sin = table_of(scaling, True, S)
    positions = torch.arange(S)[:, None].expand(S, B)

    def theirs(x):
        t = x.permute(1, 2, 0, 3)
        return apply_rotary_pos_emb(t, t, *rotary(t, positions.T))[0].permute(2, 0, 1, 3)

    rtol = 1e-6 if dtype == FP32 else 1e-12
    common.assert_same(
        lambda x: rope(x, cos, sin, positions=positions), theirs, leaf(S, B, H, HEAD, dtype=dtype), rtol=rtol
    )


def test_interleaved_is_that_of_gptj():
    cos, sin = (t.double() for t in rope_table(HEAD, 5, theta=THETA))
    theirs = lambda x: interleaved_rotary(x[None], sin[None], cos[None])[0]
    common.assert_same(lambda x: rope(x, cos, sin, interleaved=True), theirs, leaf(5, 3, HEAD))


def test_an_odd_part_is_rounded_up():
    cos, _ = rope_table(10, 3, theta=THETA, partial_rotary_factor=0.5)
    assert cos.shape == (3, 3)


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(theta=None), "rope type 'default' needs rope_theta, which has no safe default"),
        (
            dict(scaling=dict(type="su")),
            "rope type 'su' is not supported; use default, linear, dynamic, yarn, longrope, llama3",
        ),
        (dict(scaling=dict(type="linear")), "rope type 'linear' needs factor"),
        (dict(scaling=dict(rope_type="dynamic", factor=2.0)), "rope type 'dynamic' needs max_position_embeddings"),
        (
            dict(scaling=dict(rope_type="dynamic", factor=2.0), partial_rotary_factor=0.25),
            "more than 2 rotary columns, got 2",
        ),
        (dict(scaling=dict(rope_type="yarn", factor=2.0)), "rope type 'yarn' needs original_max_position_embeddings"),
        (dict(scaling=dict(rope_type="yarn", **LENGTHS)), "rope type 'yarn' needs factor"),
        (dict(scaling=dict(rope_type="yarn"), max_position_embeddings=9), "rope type 'yarn' needs factor"),
        (
            dict(scaling=dict(rope_type="llama3", factor=2.0, high_freq_factor=4.0, **LENGTHS)),
            "rope type 'llama3' needs low_freq_factor",
        ),
        (dict(scaling=dict(rope_type="longrope", factor=2.0, **LENGTHS)), "rope type 'longrope' needs short_factor"),
        (
            dict(scaling=dict(rope_type="longrope", factor=2.0, short_factor=[1.0], **LENGTHS)),
            "short_factor must have 4 numbers, one a pair, got 1",
        ),
        (dict(partial_rotary_factor=1.5), "12 rotary columns, in pairs, do not fit head_width=8"),
    ],
)
def test_table_errors(options, match):
    with pytest.raises(ValueError, match=f"^rope_table: .*{match}"):
        rope_table(HEAD, 4, **dict(theta=THETA) | options)


# ---- the kernel; under the interpreter where there is no GPU ----


def arguments(M, H, E, F, positions=False, interleaved=False, back=False, dtype=FP32):
    cos, sin = (t.to(DEVICE) for t in rope_table(2 * F, M + 3, theta=THETA))
    rows = torch.randint(M + 3, (M,), device=DEVICE) if positions else None
    return torch.randn(M, H, E, device=DEVICE).to(dtype), Rotation(cos, sin, rows, interleaved), back


def assert_equal(arguments):
    """To a rounding of fp32: a GPU contracts products and sums."""
    torch.testing.assert_close(
        rope_fwd.launch(*arguments), rope_fwd.reference(*arguments), rtol=1e-6, atol=1e-6, check_stride=True
    )


# no rows, one element a pair, ragged rows and heads, part of a head, more than one program of rows, of heads
@pytest.mark.parametrize(
    "M, H, E, F", [(0, 2, 8, 4), (1, 1, 2, 1), (5, 3, 12, 6), (3, 3, 13, 4), (70, 1, 64, 32), (2, 40, 128, 64)]
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_kernel(poisoned, M, H, E, F, interleaved):
    for positions in (False, True):
        for back in (False, True):
            assert_equal(arguments(M, H, E, F, positions, interleaved, back))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_kernel_in_low_precision(poisoned, dtype, interleaved):
    x, *rest = arguments(5, 3, 24, 8, interleaved=interleaved, dtype=dtype)
    exact = rope_fwd.reference(x.double(), *rest)
    error, allowed = ((f(x, *rest).double() - exact).abs().max() for f in (rope_fwd.launch, rope_fwd.reference))
    assert error <= 2 * allowed + 1e-6


@pytest.mark.parametrize("interleaved", [False, True])
def test_kernel_strides(poisoned, interleaved):
    """The q heads of a fused qkv, heads and rows swapped, columns apart, a gradient that is one row; rows beyond 2^31
    elements."""
    _, *rest = arguments(4, 2, 8, 4, interleaved=interleaved)
    for x in (
        torch.randn(4, 5, 8, device=DEVICE)[:, 1:3],
        torch.randn(2, 4, 8, device=DEVICE).transpose(0, 1),
        torch.randn(4, 8, 2, device=DEVICE).mT,
        torch.randn(1, 2, 8, device=DEVICE).expand(4, 2, 8),
    ):
        assert_equal((x, *rest))
    far = torch.empty((3 << 30) + 16, dtype=torch.float16, device=DEVICE).as_strided((4, 2, 8), (1 << 30, 8, 1))
    far.copy_(torch.randn(4, 2, 8))
    assert torch.equal(rope_fwd.launch(far, *rest), rope_fwd.launch(far.contiguous(), *rest))


@pytest.mark.skipif(DEVICE == "cuda", reason="counted by the interpreter")
@pytest.mark.parametrize("positions", [False, True])
def test_declared_bytes(positions):
    """Each angle is read once though several programs share it; positions that repeat read less than declared."""
    from tests.kernels.interpreter_bytes import assert_declared

    x, rotation, back = arguments(4, 40, 128, 32, dtype=BF16)
    rows = torch.tensor([6, 1, 0, 3]) if positions else None
    assert_declared(rope_fwd, (x, rotation._replace(positions=rows), back))
    with pytest.raises(AssertionError, match="declared"):
        assert_declared(rope_fwd, (x, rotation._replace(positions=torch.zeros(4).long()), back))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("H, E, F", [(1, 64, 32), (32, 128, 64), (8, 256, 64), (12, 80, 16)])
def test_on_a_gpu(poisoned, H, E, F, interleaved, dtype):
    rounding = dict(rtol=2e-2, atol=2e-2) if dtype == BF16 else dict(rtol=1e-5, atol=1e-5)
    for back in (False, True):
        given = arguments(1000, H, E, F, True, interleaved, back, dtype)
        torch.testing.assert_close(rope_fwd.launch(*given), rope_fwd.reference(*given), **rounding)
