"""torch's own flash attention as attention's forward: when it is taken, what it is given, what is made of its results.

On a CPU torch's flash attention for CPUs stands in for the op, behind the checks that the op makes on a GPU.
"""

import contextlib

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.attn.test_launch import DEVICE, both, features, random
from tests.no_sync import GPU, no_sync
from tpfuse.kernels import replay
from tpfuse.kernels.attn import torch_forward
from tpfuse.kernels.attn.config import config, default_config
from tpfuse.kernels.attn.op import attention_bwd as bwd
from tpfuse.kernels.attn.op import attention_fwd as fwd
from tpfuse.kernels.attn.options import Options
from tpfuse.kernels.replay.recorder import recording
from tpfuse.kernels.replay.tape import tape
from tpfuse.kernels.runtime import launch as _launch
from tpfuse.kernels.runtime import tuning

BF16, FP16 = torch.bfloat16, torch.float16


@contextlib.contextmanager
def own_kernel():
    """Triton's kernel even where torch's would be taken; calls that were recorded are made anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_forward, "has_flash", lambda device: False)
        fwd.launch.forget()
        yield
    fwd.launch.forget()


@pytest.fixture
def flash(monkeypatch):
    """torch's op on a CPU, where it is taken for available; gives the shape of q in each call."""
    if DEVICE == "cuda":
        pytest.skip("there the op is torch's own")
    taken = []

    def forward(q, k, v, cum_q, cum_k, max_q, max_k, p, causal, debug, *, scale=None, **rest):
        assert cum_q is None and cum_k is None and p == 0.0 and not debug and set(rest.values()) <= {None}
        samples, S, Q, E = q.shape
        assert (max_q, max_k) == (S, S) and k.shape == v.shape == (samples, S, 1, E)
        for t in (q, k, v):
            assert t.dtype in (BF16, FP16) and t.stride(3) == 1
            assert t.data_ptr() % 16 == 0 and not any(stride % 8 for stride in t.stride()[:3])
        taken.append(q.shape)
        heads = (t.transpose(1, 2).expand(samples, Q, S, E) for t in (q, k, v))
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, causal, scale=scale)
        out = torch.empty_like(q).copy_(o.transpose(1, 2))
        return out, lse.contiguous(), q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64), q[:0]

    monkeypatch.setattr(torch_forward, "has_flash", lambda device: True)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        yield taken


def close(got, want):
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


# ---- the choice ----

PLAIN = Options(batch=2, seq=4, scale=0.3)
FEATURES = "window", "key_mask", "bias", "bias1", "softcap", "rope", "interleaved", "partial", "dropout"


def able(qkv, options=PLAIN):
    return torch_forward.able(qkv, options)


@pytest.mark.parametrize("names", [*FEATURES, "packed", "causal+dropout"])
def test_nothing_else_may_be_asked_for(names):
    batch = 1 if names == "packed" else 2
    qkv, options = random(8, 2, 4, 16, dtype=BF16), features(names, batch, 8 // batch, 4, 16)
    assert not able(qkv, options) and "path" not in default_config("fwd", "sm_90", qkv, options)
    assert able(qkv, PLAIN) and able(qkv, PLAIN._replace(causal=True, first_head=3, site=2, max_seqlen=None))


def test_what_it_can_load():
    assert all(able(random(8, 2, Q + 2, E, dtype=BF16)) for Q in (1, 3) for E in (8, 80, 256))
    assert able(random(8, 1, 3, 16, dtype=FP16)) and not able(random(8, 1, 3, 16))
    assert not any(able(random(8, 2, 3, E, dtype=BF16)) for E in (1, 12, 36, 264))
    assert not able(random(8, 2, 3, 16, dtype=BF16)[:, 1:]) and not able(random(9, 1, 3, 16, dtype=BF16)[1:, ..., :8])
    behind = random(8 * 3 * 16 + 4, dtype=BF16)
    assert able(behind[:-4].view(8, 1, 3, 16)) and not able(behind[4:].view(8, 1, 3, 16))
    assert not able(random(8, 2, 3, 16, dtype=BF16), PLAIN._replace(seq=0))
    many = torch.empty(2 * 32768, 2, 3, 8, dtype=BF16, device="meta")
    assert not able(many, Options(batch=32768, seq=2)) and able(many, Options(batch=32767, seq=2))


@pytest.mark.parametrize(
    "device, arch, built, there",
    [
        ("cuda:0", "sm_90", True, True),
        ("cuda:0", "sm_80", True, True),
        ("cuda:0", "sm_75", True, False),
        ("cuda:0", "gfx942", True, False),
        ("cuda:0", "sm_90", False, False),
        ("cpu", "sm_90", True, False),
        ("meta", "sm_90", True, False),
    ],
)
def test_where_torch_has_it(monkeypatch, device, arch, built, there):
    """A tensor that only stands for a GPU's has no such op."""
    monkeypatch.setattr(torch_forward, "target", lambda device: _launch.Target(arch, 1))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    assert torch_forward.has_flash(torch.device(device)) == there


def test_path(monkeypatch):
    """torch's where it is there, and tpfuse's own where it is not, unless the measured table says otherwise."""
    qkv, plain = random(8, 2, 3, 16, dtype=BF16), Options(seq=8, causal=True)
    path = lambda: config("fwd", "sm_90", qkv, plain)["path"]
    monkeypatch.setattr(torch_forward, "has_flash", lambda device: False)
    assert path() == "tpfuse"
    monkeypatch.setattr(torch_forward, "has_flash", lambda device: True)
    assert path() == "sdpa" and config("fwd", "sm_90", qkv, plain)["BLOCK_M"] == 128
    table = {"sm_90": {"attention_fwd": {"bf16 8x16": dict(path="tpfuse", BLOCK_M=64)}}}
    monkeypatch.setattr(tuning, "_table", lambda: table)
    assert path() == "tpfuse" and config("fwd", "sm_90", qkv, plain)["BLOCK_M"] == 64


@pytest.mark.parametrize("lacking", [dict(window=3), dict(softcap=2.0), dict(key_mask=torch.ones(1, 8) > 0)])
def test_a_table_cannot_ask_for_what_it_lacks(monkeypatch, flash, lacking):
    entry = {"bf16 8x16": dict(path="sdpa")}
    monkeypatch.setattr(torch_forward, "has_flash", lambda device: False)
    monkeypatch.setattr(
        tuning, "_table", lambda: {"cpu": dict.fromkeys(("attention_fwd", "attention_fwd softcap"), entry)}
    )
    qkv, options = random(8, 1, 3, 16, dtype=BF16), Options(seq=8, causal=True, scale=0.3)
    other = options._replace(**lacking)
    close(fwd.launch(qkv, other)[0], fwd.reference(qkv, other)[0])
    assert not flash
    fwd.launch(qkv, options)
    assert len(flash) == 1


# ---- the call ----


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("batch, S, G, Q, E", [(2, 40, 2, 3, 16), (3, 33, 2, 1, 24), (1, 1, 2, 2, 80), (2, 1, 1, 1, 8)])
def test_values_and_layouts(flash, batch, S, G, Q, E, causal):
    """Of o and lse, and of the gradients that tpfuse's backward makes of them."""
    qkv, do = random(S * batch, G, Q + 2, E, dtype=BF16), random(S * batch, G * Q * E, dtype=BF16)
    options = Options(batch=batch, seq=S, causal=causal, scale=0.3)
    (o, lse), (right, right_lse) = fwd.launch(qkv, options), fwd.reference(qkv, options)
    assert o.is_contiguous() and lse.is_contiguous() and flash == [(batch * G, S, Q, E)]
    close(o, right)
    torch.testing.assert_close(lse, right_lse, rtol=1e-3, atol=1e-3)
    close(bwd.launch(do, qkv, o, lse, options), bwd.reference(do, qkv, right, right_lse, options))


def test_padding_is_zero(flash):
    qkv, options = random(21, 2, 4, 16, dtype=BF16), Options(batch=2, seq=9, causal=True, scale=0.3)
    qkv[18:] = torch.nan
    o, lse = fwd.launch(qkv, options)
    right, right_lse = fwd.reference(qkv, options)
    assert flash and o.shape == right.shape and o.is_contiguous() and not o[18:].any()
    close(o, right)
    torch.testing.assert_close(lse, right_lse, rtol=1e-3, atol=1e-3)


def test_nothing_is_copied(flash):
    """q, k and v are views of qkv, and o is what torch gave, seen otherwise."""
    qkv, options = random(18, 2, 4, 16, dtype=BF16), Options(batch=2, seq=9, scale=0.3)
    with recording([qkv]) as recorded:
        fwd.launch.launcher(qkv, options)
    assert [str(event.function) for event in recorded.events] == ["aten._flash_attention_forward.default"]


@pytest.mark.parametrize("rows", [18, 21])
def test_a_call_is_repeated(flash, rows):
    """As a replay makes it, on other tensors."""
    options = Options(batch=2, seq=9, causal=True, scale=0.3)
    qkv, other = (random(rows, 2, 4, 16, dtype=BF16) for _ in range(2))
    with recording([qkv]) as recorded:
        result = fwd.launch.launcher(qkv, options)
    again = tape(recorded, result).replay([other], [other.data_ptr()], 0)
    for got, want in zip(again, fwd.launch(other, options), strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride()
    assert not torch.equal(again[0], result[0])


def test_nothing_waits(monkeypatch):
    """With torch's own notion of what the op returns."""
    monkeypatch.setattr(torch_forward, "has_flash", lambda device: device == GPU)
    monkeypatch.setattr(replay, "REPLAY", False)
    qkv = torch.empty(20, 2, 4, 16, dtype=BF16, device=GPU)
    with no_sync() as watch:
        o, lse = fwd(qkv, Options(batch=2, seq=9, causal=True, scale=0.3))
    assert watch.started["_flash_attention_forward"] == 1 and not watch.started["_fwd_kernel"]
    assert o.shape == (20, 64) and o.is_contiguous() and lse.shape == (2, 4, 9) and lse.dtype == torch.float32


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("S, Q, E, padding", [(300, 2, 64, 0), (257, 1, 80, 3), (64, 4, 128, 0), (1, 2, 256, 0)])
def test_on_a_gpu(S, Q, E, padding, causal):
    """torch's, which is taken, against the reference and tpfuse's own; and what tpfuse's backward makes of it."""
    qkv, do = random(2 * S + padding, 2, Q + 2, E, dtype=BF16), random(2 * S + padding, 2 * Q * E, dtype=BF16)
    options = Options(batch=2, seq=S, causal=causal, scale=E**-0.5)
    if not torch_forward.has_flash(qkv.device):
        pytest.skip("torch has no flash attention here")
    assert config("fwd", _launch.target(qkv.device).arch, qkv, options)["path"] == "sdpa"
    for got, want in both((qkv, do, options)):
        assert got.is_contiguous()
        close(got, want)
    taken = fwd.launch(qkv, options)
    with own_kernel():
        for got, want in zip(taken, fwd.launch(qkv, options), strict=True):
            close(got, want)
