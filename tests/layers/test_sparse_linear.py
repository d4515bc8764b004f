"""SparseLinear: what it computes, the same bits at every split, made from trained layers, saved and loaded."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from tests.common import fake_tp, make_tp
from tests.layers.sharded import mine
from tests.planted import Mistaken
from tpfuse import TensorParallel, add_lora
from tpfuse.kernels import SparseInt
from tpfuse.layers import ColumnParallelLinear, LayerNorm, RowParallelLinear, SparseLinear

N, K, M = 24, 36, 12  # 4 ranks' rows of W are no whole strips
SETTINGS = [(R, sp) for R in (1, 2, 4) for sp in (True, False)]
DAILY = {(1, False), (4, True), (4, False)}
EVERY = [pytest.param(*s, marks=[] if s in DAILY else pytest.mark.slow) for s in SETTINGS]


def weight_and_rows(bits: int = 8) -> tuple[SparseInt, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    random = lambda *shape: torch.randn(shape, generator=generator)
    return SparseInt.from_dense(random(N, K), 0.4, 8, bits), random(N), random(M, K)


def by_hand(w: SparseInt, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Python's integers, and fp32 in the order of the equation."""
    t = x.abs().amax(1) / 127
    numbers = (x / t[:, None]).round().to(torch.int64)
    y = (numbers @ w.dense().long().t()).float() * w.scale * t[:, None]
    return y if bias is None else y + bias


@pytest.mark.parametrize("split", ["column", "row"])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_it_is_the_equation(split, bits):
    w, bias, x = weight_and_rows(bits)
    for b in (bias, None):
        layer = SparseLinear(w, b, split=split)
        assert torch.equal(layer(x), by_hand(w, b, x))
        assert torch.equal(layer(x.view(3, 4, K)), layer(x)) and layer(x[:0]).shape == (0, N)
        assert torch.equal(layer(x.bfloat16()), by_hand(w, b, x.bfloat16().float()).bfloat16())


def test_it_is_near_the_layer_that_it_was_made_from():
    """At density 1 two roundings to 8 bits are between them, which 16 bits of weight make one."""
    linear, x = nn.Linear(256, 64), torch.randn(50, 256)
    with torch.no_grad():
        exact = linear(x)
        errors = [
            ((SparseLinear.from_layer(linear, 1.0, bits=bits)(x) - exact).norm() / exact.norm()).item()
            for bits in (4, 8, 16)
        ]
    assert errors[0] > 5 * errors[1] > 5 * errors[2] and errors[1] < 0.02


def test_rows_of_zeros_and_of_no_numbers():
    w, bias, x = weight_and_rows()
    x[0], x[1, 3], x[2, 5] = 0, float("nan"), float("inf")
    y = SparseLinear(w, bias)(x)
    assert torch.equal(y[0], bias) and y[1:3].isnan().all() and torch.equal(y[3:], by_hand(w, bias, x[3:]))


# ---- over ranks ----


def split_call(world, sp: bool, split: str, bits: int):
    tp = make_tp(world, sp)
    w, bias, x = weight_and_rows(bits)
    rows = mine(x, "rows" if split == "column" else "columns", tp)
    return tp, SparseLinear(w, bias, split=split, tp=tp)(rows)


def assert_same_bits(results, split: str, bits: int) -> None:
    y = by_hand(*weight_and_rows(bits))
    for tp, part in results:
        assert torch.equal(part, mine(y, "columns" if split == "column" else "rows", tp))


@pytest.mark.parametrize("R, sp", EVERY)
@pytest.mark.parametrize("split, bits", [("column", 8), ("row", 8), ("row", 4)])
def test_every_split_has_the_same_bits(ranks, R, sp, split, bits):
    assert_same_bits(ranks(R, split_call, sp, split, bits), split, bits)


def unmoved(right, x, tp, dim):
    return x


def test_a_scale_of_one_ranks_columns_is_seen(ranks):
    """The largest magnitude of a row is that of all ranks."""
    alone = Mistaken(split_call, "tpfuse.layers.sparse_linear._all_gather", unmoved)
    with pytest.raises(AssertionError):
        assert_same_bits(ranks(2, alone, False, "row", 8), "row", 8)


# ---- from trained layers, and files ----

TRAINED = {"column": (ColumnParallelLinear, (K, N)), "row": (RowParallelLinear, (K, N))}


def trained(split: str, tp: TensorParallel | None = None) -> ColumnParallelLinear | RowParallelLinear:
    """The same weights at every split, and a bias that is not 0."""
    torch.manual_seed(3)
    kind, sizes = TRAINED[split]
    layer = kind(*sizes, tp=tp, init_std=0.5)
    with torch.no_grad():
        first = layer.tp.rank * len(layer.bias) if split == "column" else 0
        layer.bias += first + torch.arange(len(layer.bias))
    return layer


def written(world, split: str, path: str) -> torch.Tensor:
    """Makes a layer of a trained one, saves it, and returns its slice as a dense matrix."""
    layer = SparseLinear.from_layer(trained(split, make_tp(world)), 0.5, bits=4)
    layer.save(path)
    return SparseInt(layer.vectors, layer.width).dense()


def loaded_call(world, path: str, x: torch.Tensor) -> tuple[TensorParallel, torch.Tensor, str]:
    tp = make_tp(world)
    layer = SparseLinear.load(path, tp=tp)
    return tp, layer(mine(x, "rows" if layer.split == "column" else "columns", tp)), repr(layer)


@pytest.mark.parametrize("split", TRAINED)
def test_saved_at_one_size_and_loaded_at_another(ranks, tmp_path, split):
    """Files have the same bytes, and calls the same bits, as those of one process."""
    x, whole = torch.randn(M, K), SparseLinear.from_layer(trained(split), 0.5, bits=4)
    whole.save(tmp_path / "one")
    pieces = ranks(2, written, split, str(tmp_path / "two"))
    assert torch.equal(torch.cat(pieces, int(split == "row")), SparseInt(whole.vectors, K).dense())
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    for R in (1, 4):
        for tp, y, text in ranks(R, loaded_call, str(tmp_path / "two"), x):
            assert torch.equal(y, mine(whole(x), "columns" if split == "column" else "rows", tp))
            assert f"split='{split}', bits=4, density=0.5" in text and "bias=True" not in text


def test_a_file_of_a_plain_linear_and_without_a_bias(tmp_path):
    linear, x = nn.Linear(K, N, bias=False), torch.randn(M, K)
    layer = SparseLinear.from_layer(linear, 0.3, block=16, split="row")
    layer.save(tmp_path / "file")
    assert torch.equal(SparseLinear.load(tmp_path / "file")(x), layer(x))
    assert layer.bias is None and not list(layer.parameters()) and not layer.state_dict()


def test_a_cast_to_16_bits_keeps_the_scales():
    w, bias, x = weight_and_rows()
    layer = SparseLinear(w, bias)
    scale = layer.scale.clone()
    assert torch.equal(layer.half().scale, scale) and layer.bias.dtype == torch.float16
    assert layer(x.half()).dtype == torch.float16


# ---- errors ----


def with_adapter() -> ColumnParallelLinear:
    module = nn.ModuleDict({"fc1": ColumnParallelLinear(K, N)})
    add_lora(module, rank=2, alpha=2, targets=["fc1"])
    return module["fc1"]


LINEAR = nn.Linear(K, N)
ERRORS = [
    (lambda: SparseLinear.from_layer(LayerNorm(8), 0.5), "layer must be a ColumnParallelLinear or .* got a LayerNorm"),
    (lambda: SparseLinear.from_layer(ColumnParallelLinear(K, N, activation="gelu"), 0.5), "no activation, got 'gelu'"),
    (lambda: SparseLinear.from_layer(with_adapter(), 0.5), "layer has an adapter; merge it"),
    (lambda: SparseLinear.from_layer(LINEAR, 1.5), r"density must lie in \[0, 1\], got 1.5"),
    (lambda: SparseLinear.from_layer(LINEAR, 0.5, split="rows"), "split must be one of column, row, got 'rows'"),
    (lambda: SparseLinear(weight_and_rows()[0], torch.ones(3)), r"bias must be floating \[24\] or None, got .* \(3,\)"),
    (lambda: SparseLinear(weight_and_rows()[0])(torch.ones(2, N)), r"x must be \[..., 36\], got \(2, 24\)"),
    (
        lambda: SparseLinear(weight_and_rows()[0])(torch.ones(2, K).int()),
        r"x must be floating, got torch.int32 \(2, 36\)",
    ),
    (
        lambda: SparseLinear(weight_and_rows()[0])(torch.ones(2, K, requires_grad=True)),
        "x must need no gradient, for there is none: it is for inference, under torch.no_grad()",
    ),
]


@pytest.mark.parametrize("call, match", ERRORS)
def test_errors(call, match):
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.parametrize("split, what, size", [("column", "out_features", N), ("row", "in_features", K)])
def test_a_width_that_cannot_be_split(split, what, size):
    with pytest.raises(ValueError, match=f"{what}={size} is not divisible by tensor-parallel size 5"):
        SparseLinear(weight_and_rows()[0], split=split, tp=fake_tp(5))


def raised(world, path: str, save: bool) -> str:
    tp = make_tp(world)
    with pytest.raises((OSError, ValueError)) as info:
        if save:
            SparseLinear(weight_and_rows()[0], tp=tp).save(path)
        else:
            SparseLinear.load(path, tp=tp)
    return str(info.value)


def test_files_that_cannot_be_are_an_error_on_every_rank(ranks, tmp_path):
    (tmp_path / "file").write_bytes(b"no tensors")
    for text in ranks(2, raised, str(tmp_path / "file"), False):
        assert "is no file of SparseLinear.save" in text
    for text in ranks(2, raised, str(tmp_path / "none"), False):
        assert "none" in text
    for text in ranks(2, raised, str(tmp_path / "no folder" / "file"), True):
        assert "cannot be written" in text


SPOILT = [
    (dict(column_index=torch.full((60,), K)), {}, ""),
    (dict(values=torch.tensor(1)), {}, ""),
    (dict(offsets=None), {}, "offsets"),
    (dict(bias=torch.ones(3)), {}, "bias must be floating"),
    ({}, dict(bits=[8]), ""),
    ({}, dict(rows="24"), ""),
    ({}, dict(columns=None), ""),
]


@pytest.mark.parametrize("tensors, fields, match", SPOILT)
def test_a_spoilt_file(tmp_path, tensors, fields, match):
    """What would be read beyond the rows of x, and what is no file of it."""
    path = tmp_path / "file"
    SparseLinear(weight_and_rows()[0]).save(path)
    with safe_open(path, "pt") as file:
        ((name, text),) = file.metadata().items()
    whole = {key: t for key, t in (load_file(path) | tensors).items() if t is not None}
    save_file(whole, path, {name: json.dumps(json.loads(text) | fields)})
    with pytest.raises(ValueError, match=f"SparseLinear: .*{match}"):
        SparseLinear.load(path)
