"""Every form of a weight against torch's linear, and which form is taken."""

import pytest
import torch
import torch.nn.functional as F

from tpfuse.kernels.gemm import prepared
from tpfuse.kernels.gemm.activation import ACTIVATIONS, GATED
from tpfuse.kernels.gemm.prepared import FEW, Dense, Packed, Plain, Transposed, form_for

FORMS = {"plain": Plain(), "transposed": Transposed(), "packed": Packed(8), "dense": Dense()}
DTYPES = [torch.float32, torch.bfloat16]
EVERY = [(name, dtype) for name in FORMS for dtype in DTYPES] + [("plain", torch.float64), ("plain", torch.float16)]


@pytest.fixture(params=EVERY, ids=lambda p: f"{p[0]}-{p[1]}")
def form(request):
    name, dtype = request.param
    if name in ("packed", "dense") and not prepared._has_onednn(dtype):
        pytest.skip("this machine's oneDNN does not multiply this dtype")
    return FORMS[name], dtype


def close(got, want, dtype):
    """want in fp64; a sum and an activation more, each rounded."""
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=8 * eps, atol=8 * eps * float(want.abs().max()))


@pytest.mark.parametrize("rows", [1, 3, 130])
@pytest.mark.parametrize("biased", [True, False])
def test_every_map_is_what_it_says(form, rows, biased):
    """Of weights that are slices too: oneDNN's reference for those takes hundreds of times as long, and is right."""
    form, dtype = form
    with torch.no_grad():
        for weight in (torch.randn(37, 24).to(dtype), torch.randn(37, 2, 24).to(dtype)[:, 1]):
            x, y = torch.randn(rows, 24).to(dtype), torch.randn(rows, 37).to(dtype)
            bias = torch.randn(37, 2).to(dtype)[:, 0] if biased else None
            z = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
            close(form.map(weight, bias)(x), z, dtype)
            close(form.add(weight, bias)(x, y.clone()), y.double() + z, dtype)
            close(form.times(weight, bias)(x, y.clone()), y.double() * z, dtype)
            for name, activation in ACTIVATIONS.items():
                close(form.activated(weight, bias, name)(x), activation.forward(z), dtype)


@pytest.mark.parametrize("rows", [1, FEW, 70])
@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATED])
def test_the_first_map_of_an_mlp(form, activation, rows):
    form, dtype = form
    shape = (37, 2) if activation in GATED else (37,)
    with torch.no_grad():
        x, weight, bias = (torch.randn(*s).to(dtype) for s in ((rows, 24), (*shape, 24), shape))
        z = F.linear(x.double(), weight.flatten(0, -2).double(), bias.flatten().double()).unflatten(1, shape)
        if activation in GATED:
            want = ACTIVATIONS[GATED[activation]].forward(z[..., 0]) * z[..., 1]
        else:
            want = ACTIVATIONS[activation].forward(z)
        close(form.mlp(weight, bias, activation)(x), want, dtype)


@pytest.mark.parametrize(
    "instructions, few, half_row, half_rows",
    [
        (("AVX512",), (Plain, Plain), Transposed, Plain),
        (("AVX512", "avx512_bf16"), (Transposed, Packed), Packed, Packed),
        (("AVX512", "avx512_bf16", "amx_bf16"), (Plain, Plain), Plain, Packed),
    ],
    ids=["without 16 bits", "with", "with AMX"],
)
def test_a_copy_is_made_where_it_pays(monkeypatch, instructions, few, half_row, half_rows):
    monkeypatch.setattr(prepared, "instructions", lambda: instructions)
    monkeypatch.setattr(prepared, "multiplies_tiles", lambda: "amx_bf16" in instructions)
    kind = lambda *args: type(form_for(args[0], rows=args[1], times=args[2]))
    if prepared._has_onednn(torch.float32):
        assert (kind(torch.float32, 1, 1000), kind(torch.float32, 3, 1000)) == few
        assert kind(torch.float32, 5, 1000) is Packed
        assert kind(torch.float32, 1, 1) is Plain and kind(torch.float32, 1000, 1) is Dense
    if prepared._has_onednn(torch.bfloat16):
        assert kind(torch.bfloat16, 1, 1000) is half_row and kind(torch.bfloat16, 5, 1000) is half_rows
        assert kind(torch.bfloat16, 1000, 1) is Plain
    assert kind(torch.float64, 1, 1000) is kind(torch.float16, 1, 1000) is Plain


def test_on_avx2_many_rows_are_torchs_in_fp32(monkeypatch):
    monkeypatch.setattr(prepared, "instructions", lambda: ("AVX2",))
    assert type(form_for(torch.float32, rows=64, times=1)) is type(form_for(torch.float32, rows=64, times=99)) is Plain
    if prepared._has_onednn(torch.float32):
        few = form_for(torch.float32, rows=5, times=99)
        assert type(few) is Packed and not few.any_rows
    if prepared._has_onednn(torch.bfloat16):
        assert form_for(torch.bfloat16, rows=64, times=99).any_rows


def test_without_onednn_torch_multiplies(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert type(form_for(torch.float32, rows=8, times=1000)) is Plain
