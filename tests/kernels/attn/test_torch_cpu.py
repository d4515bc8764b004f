"""torch's flash attention on a CPU: which calls take it, and that they have the definition's values."""

import pytest
import torch

from tests.common import error
from tests.kernels.common import RNG
from tpfuse.kernels.attn import torch_cpu
from tpfuse.kernels.attn.cpu import bwd_cpu, fwd_cpu
from tpfuse.kernels.attn.op import attention_bwd, attention_fwd
from tpfuse.kernels.attn.options import Options

COS, SIN = torch.rand(2, 64, 3)
ROTATED = dict(cos=COS, sin=SIN)
MASK = torch.stack([torch.arange(40) < 29, torch.arange(40) % 3 > 0, torch.zeros(40, dtype=torch.bool)])
ASKED = dict(
    key_mask=torch.ones(2, 20, dtype=torch.bool), cu_seqlens=torch.tensor([0, 20]).int(), bias=torch.rand(1, 20, 20),
    rng=RNG, window=20, softcap=9.0, leaves=2, tile=8,
)  # fmt: skip


def problem(batch, seq, G, Q, E, padding=0, dtype=torch.float32, **options):
    M = batch * seq + padding
    qkv, do = torch.randn(M, G, Q + 2, E).to(dtype), torch.randn(M, G * Q * E).to(dtype)
    return qkv, do, Options(batch=batch, seq=seq, scale=0.3, **options)


@pytest.mark.parametrize("name", ASKED)
def test_nothing_else_may_be_asked_for(name):
    qkv, _, options = problem(2, 20, 2, 2, 8, causal=True, **ROTATED)
    assert torch_cpu.is_plain(qkv, options)
    assert torch_cpu.is_plain(qkv, options._replace(causal=False, key_mask=ASKED["key_mask"]))
    assert not torch_cpu.is_plain(qkv, options._replace(**{name: ASKED[name]}))


@pytest.mark.parametrize(
    "seq, causal, dtype, taken",
    [
        (256, True, torch.float32, True),
        (257, True, torch.float32, False),
        (767, True, torch.float32, False),
        (768, True, torch.float32, True),
        (512, False, torch.float32, True),
        (0, False, torch.float32, False),
        (64, True, torch.float64, False),
    ],
)
def test_lengths_and_dtypes(monkeypatch, seq, causal, dtype, taken):
    monkeypatch.setattr(torch_cpu, "instructions", lambda: ("AVX2",))
    qkv, _, options = problem(1, seq, 1, 1, 4, causal=causal, dtype=dtype)
    assert torch_cpu.is_plain(qkv, options) is taken


@pytest.mark.parametrize(
    "instructions, taken",
    [(("AVX512", "avx512_bf16"), False), (("AVX512",), True), (("AVX512", "avx512_bf16", "amx_bf16"), True)],
)
def test_small_blocks_by_instructions(monkeypatch, instructions, taken):
    monkeypatch.setattr(torch_cpu, "instructions", lambda: instructions)
    qkv, _, options = problem(1, 512, 1, 1, 4, causal=True)
    assert torch_cpu.is_plain(qkv, options) is taken


PROCESSORS = {"avx2": ("AVX2",), "avx512": ("AVX512",), "amx": ("AVX512", "avx512_bf16", "avx512_fp16", "amx_bf16")}


@pytest.mark.parametrize(
    "processor, dtype, seq, forward, backward",
    [
        ("avx2", torch.bfloat16, 512, False, False),
        ("avx512", torch.bfloat16, 64, True, False),
        ("avx512", torch.bfloat16, 512, True, False),
        ("avx512", torch.float16, 512, False, False),
        ("amx", torch.bfloat16, 191, True, False),
        ("amx", torch.bfloat16, 192, True, True),
        ("amx", torch.float16, 512, True, False),
    ],
)
def test_forward_and_backward_of_16_bits(monkeypatch, processor, dtype, seq, forward, backward):
    """Forward wherever oneDNN multiplies the dtype, backward of long sequences with AMX."""
    names = {torch.bfloat16: "AVX512", torch.float16: "avx512_fp16"}
    monkeypatch.setattr(torch_cpu, "multiplies_tiles", lambda: processor == "amx")
    monkeypatch.setattr(torch_cpu, "multiplies", lambda dtype: names[dtype] in PROCESSORS[processor])
    qkv, _, options = problem(1, seq, 1, 1, 4, causal=True, dtype=dtype)
    taken = torch_cpu.is_plain(qkv, options), torch_cpu.is_plain(qkv, options, backward=True)
    assert taken == (forward, backward)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backward", [False, True], ids=["forward alone", "both"])
@pytest.mark.parametrize(
    "shape, options",
    [
        ((3, 33, 2, 3, 10), dict(causal=True, cos=COS, sin=SIN)),
        ((2, 200, 2, 1, 64), dict(causal=True)),
        ((1, 800, 1, 2, 16), dict(causal=False)),
        ((3, 40, 2, 2, 8), dict(causal=False, key_mask=MASK)),
    ],
    ids=["rotary", "long", "longer", "key mask"],
)
def test_values_of_16_bits(monkeypatch, shape, options, backward, dtype):
    """As near to fp64 as cpu.py's, on any processor, also where backward is cpu.py's."""
    qkv, do, options = problem(*shape, padding=3, dtype=dtype, **options)
    qkv[-3:], do[-3:] = 0, 0
    exact = options._replace(**{name: t.double() for name, t in zip(("cos", "sin"), options[3:5]) if t is not None})
    o64, lse64 = attention_fwd.reference(qkv.double(), exact)
    dqkv64 = attention_bwd.reference(do.double(), qkv.double(), o64, lse64, exact)
    errors = []
    for forward, is_flash in ((False, False), (True, backward)):
        choice = forward, is_flash
        monkeypatch.setattr(torch_cpu, "_is_faster", lambda dtype, options, of_bwd: choice[of_bwd])  # noqa: B023
        o, lse = attention_fwd(qkv, options)
        errors.append((error(o, o64), error(attention_bwd(do, qkv, o, lse, options), dqkv64)))
        torch.testing.assert_close(lse.double(), lse64, rtol=1e-3, atol=1e-2)
    (own_o, own_dqkv), (o, dqkv) = errors
    assert o <= 1.5 * own_o and dqkv <= 2 * own_dqkv, errors


@pytest.mark.parametrize(
    "shape, options",
    [
        ((2, 7, 2, 1, 8), dict(causal=True)),
        ((3, 33, 2, 3, 5), dict(causal=True, **ROTATED)),  # of five columns four are turned
        ((1, 64, 1, 4, 16), dict(causal=False, **ROTATED, interleaved=True)),
        ((2, 20, 2, 2, 8), dict(causal=True, **ROTATED, positions=torch.randint(0, 64, (40,)))),
        ((1, 1, 1, 1, 3), dict(causal=True)),
        ((1, 300, 2, 1, 8), dict(causal=False)),
        ((2, 800, 1, 2, 16), dict(causal=True)),  # torch's blocks of 256 rows
        ((3, 40, 2, 2, 8), dict(causal=False, **ROTATED, key_mask=MASK)),  # of which one sample sees nothing
    ],
)
@pytest.mark.parametrize("padding", [0, 3])
def test_values(shape, options, padding):
    """Against the definition in fp64, as near as cpu.py's; rows of padding are 0 and are not read."""
    if shape[-1] == 5:
        options = options | dict(cos=COS[:, :2], sin=SIN[:, :2])
    qkv, do, options = problem(*shape, padding=padding, **options)
    rows = len(qkv) - padding
    exact = options._replace(**{name: t.double() for name, t in zip(("cos", "sin"), options[3:5]) if t is not None})
    o64, lse64 = attention_fwd.reference(qkv.double(), exact)
    dqkv64 = attention_bwd.reference(do.double(), qkv.double(), o64, lse64, exact)
    qkv[rows:], do[rows:] = torch.nan, torch.nan
    o, lse = attention_fwd(qkv, options)
    dqkv = attention_bwd(do, qkv, o, lse, options)
    assert torch.equal(o, torch_cpu.flash_fwd(qkv, options)[0])  # the path that was meant
    assert not o[rows:].any() and not dqkv[rows:].any()
    torch.testing.assert_close(lse.double(), lse64, rtol=1e-5, atol=1e-5)
    assert error(o[:rows], o64[:rows]) <= 1e-5 and error(dqkv[:rows], dqkv64[:rows]) <= 1e-5
    qkv[rows:], do[rows:] = 0, 0
    assert error(fwd_cpu(qkv, options)[0], o) <= 1e-5 and error(bwd_cpu(do, qkv, o, lse, options), dqkv) <= 1e-5


def test_a_planted_mistake_is_seen(planted):
    """Query heads in another order."""
    qkv, do, options = problem(2, 12, 2, 2, 8, causal=True)
    right = attention_fwd.reference(qkv, options)[0]

    def mixed(operands, *args):
        q, k, v = operands(*args)
        return q.flip(1), k, v

    planted("tpfuse.kernels.attn.torch_cpu._operands", mixed)
    assert error(attention_fwd(qkv, options)[0], right) > 0.1


@pytest.mark.parametrize("options", [dict(causal=True), dict(key_mask=MASK[:2])], ids=["causal", "key mask"])
@pytest.mark.parametrize("G, Q", [(1, 1), (1, 3), (2, 3)])
def test_results_lie_as_a_compiler_is_told(G, Q, options):
    """torch's log-sum-exp has the strides of [batch, positions, heads]."""
    qkv, do, options = problem(2, 40, G, Q, 8, padding=3, **options)
    o, lse = attention_fwd(qkv, options)
    assert torch_cpu.is_plain(qkv, options) and o.is_contiguous() and lse.is_contiguous()
    assert attention_bwd(do, qkv, o, lse, options=options).is_contiguous()
