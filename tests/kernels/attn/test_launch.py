"""The Triton side of attention: launcher == reference under the interpreter, feature by feature and together."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.interpreter_bytes import assert_declared
from tpfuse.kernels.attn import torch_forward
from tpfuse.kernels.attn.config import config, tuning_name
from tpfuse.kernels.attn.decode import splits_of
from tpfuse.kernels.attn.op import attention_bwd as bwd
from tpfuse.kernels.attn.op import attention_decode as decode
from tpfuse.kernels.attn.op import attention_fwd as fwd
from tpfuse.kernels.attn.options import DecodeOptions, Options
from tpfuse.kernels.attn.triton_records import Steps, Strides
from tpfuse.kernels.runtime import launch as _launch
from tpfuse.kernels.runtime import tuning
from tpfuse.kernels.runtime.launch import next_power_of_2, pretending
from tpfuse.kernels.runtime.philox import keep, make_rng, mask_key, scale

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, BF16 = torch.float32, torch.bfloat16
SITE, FIRST = 7, 5


pytestmark = pytest.mark.usefixtures("poisoned")


def random(*shape, dtype=FP32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def tables(S, half):
    angle = torch.rand(S + 3, half, device=DEVICE) * 6
    return dict(cos=angle.cos() * 1.1, sin=angle.sin() * 1.1)


def features(names: str, batch: int, S: int, H: int, E: int, dtype=FP32) -> Options:
    """ "causal+rope" -> what attention_fwd takes after qkv"""
    has, options = names.split("+"), dict(batch=batch, seq=S, scale=0.3)
    if "causal" in has:
        options |= dict(causal=True)
    if "window" in has:
        options |= dict(causal=True, window=max(S // 3, 1))
    if "either" in has:  # a window on either side
        options |= dict(window=max(S // 5, 1))
    if "key_mask" in has:  # one sample sees nothing, another neither its first nor its last key
        mask = torch.ones(batch, S, dtype=torch.bool, device=DEVICE)
        mask[0], mask[-1, :1], mask[-1, -1:] = batch == 1, False, S == 1
        options |= dict(key_mask=mask)
    if (
        "packed" in has
    ):  # an empty document, one of one position, one that begins inside a tile, rows before and after all
        ends = torch.tensor([1, 1, S // 2 + 3, S // 2 + 4, S - 2], dtype=torch.int32, device=DEVICE)
        options |= dict(cu_seqlens=ends)
    if "bias" in has:
        bias = random(H, S, S, dtype=dtype)
        bias[0, S // 2] = -torch.inf  # one row of one head sees nothing
        options |= dict(bias=bias)
    if "bias1" in has:
        options |= dict(bias=random(1, S, S))
    if "softcap" in has:
        options |= dict(softcap=1.5)
    if "rope" in has:
        options |= tables(S, E // 2)
    if "interleaved" in has:
        options |= dict(**tables(S, E // 2), interleaved=True)
    if "partial" in has:
        options |= tables(S, E // 4)
    if "positions" in has:
        options |= dict(positions=torch.randint(0, S + 3, (S * batch,), device=DEVICE))
    if "dropout" in has:
        options |= dict(rng=make_rng(3, 2, 5, DEVICE), p=0.3, site=SITE, first_head=FIRST)
    return Options(**options)


def arguments(names, batch=2, S=40, G=1, Q=2, E=16, padding=0, dtype=FP32):
    rows = S * batch + padding
    qkv, do = random(rows, G, Q + 2, E, dtype=dtype), random(rows, G * Q * E, dtype=dtype)
    return qkv, do, features(names, batch, S, G * Q, E, dtype)


def both(arguments):
    """[(launcher's, reference's)] of o, lse and dqkv, both backwards given the reference's o and lse"""
    qkv, do, options = arguments
    o, lse = fwd.reference(qkv, options)
    pairs = [*zip(fwd.launch(qkv, options), (o, lse), strict=True)]
    return [*pairs, (bwd.launch(do, qkv, o, lse, options), bwd.reference(do, qkv, o, lse, options))]


def assert_same(arguments):
    for got, want in both(arguments):
        assert got.dtype == want.dtype and got.is_contiguous()
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


ALONE = [
    "",
    "causal",
    "window",
    "either",
    "key_mask",
    "bias",
    "bias1",
    "softcap",
    "rope",
    "interleaved",
    "partial",
    "dropout",
]
slow = lambda *case: pytest.param(*case, marks=pytest.mark.slow)
TOGETHER = [
    "key_mask+bias1",
    "either+rope+dropout",
    "causal+bias+dropout+interleaved",
    "window+softcap+partial+positions",
]


@pytest.mark.parametrize("names", [*map(slow, ALONE), *TOGETHER])
def test_features(names):
    """A whole tile and a ragged one; two samples, grouped heads."""
    assert_same(arguments(names))


@pytest.mark.parametrize(
    "names",
    [*map(slow, ("packed", "packed+causal", "packed+key_mask+causal+bias")), "packed+window+dropout+rope+positions"]
    + [*map(slow, ("packed+either+softcap",))],
)
def test_packed(names):
    qkv, do, options = arguments(names, batch=1, S=43, padding=2)
    qkv[-2:], do[-2:] = torch.nan, torch.nan
    o, _ = fwd.launch(qkv, options)
    outside = [0, 41, 42, 43, 44]
    assert not o[outside].any() and ("dropout" in names or o[1:41].any(1).all())
    pairs = both((qkv[:43], do[:43], options))
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    assert not pairs[2][0][[0, 41, 42]].any() and (pairs[1][0][..., [0, 41, 42]] == torch.inf).all()


def test_a_window_wider_than_all_numbers_of_32_bits():
    for causal in (True, False):
        qkv, do, options = arguments("", batch=1, S=40)
        wide, none = options._replace(causal=causal, window=(1 << 31) - 1), options._replace(causal=causal)
        o, lse = fwd.launch(qkv, wide)
        assert torch.equal(o, fwd.launch(qkv, none)[0])
        assert torch.equal(bwd.launch(do, qkv, o, lse, wide), bwd.launch(do, qkv, o, lse, none))


def test_documents_alone_and_packed():
    """Each document of a packed row gives what it gives on its own; with a window too."""
    lengths = [33, 1, 10]
    ends = torch.tensor([0, 33, 34, 44], dtype=torch.int32, device=DEVICE)
    qkv = random(44, 1, 3, 16)
    for more in (dict(), dict(causal=True), dict(causal=True, window=9), dict(window=5)):
        packed, _ = fwd.launch(qkv, Options(cu_seqlens=ends, seq=44, scale=0.3, **more))
        alone = [fwd.launch(part, Options(seq=len(part), scale=0.3, **more))[0] for part in qkv.split(lengths)]
        torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_documents_end_where_the_positions_do():
    """Boundaries beyond them, which nobody checks on a GPU, read nothing there."""
    qkv, do, options = arguments("causal+dropout", batch=1, S=43, padding=90)
    qkv[43:], do[43:] = torch.nan, torch.nan
    results = []
    for ends in ([0, 7, 43], [-50, 7, 130]):
        own = options._replace(causal=False, cu_seqlens=torch.tensor(ends, dtype=torch.int32, device=DEVICE))
        o, lse = fwd.launch(qkv, own)
        results.append((o, lse, bwd.launch(do, qkv, o, lse, own)))
    for right, beyond in zip(*results, strict=True):
        assert right.isfinite().all() and torch.equal(beyond, right)


def test_a_head_too_wide_for_a_gpu_is_refused():
    """256 columns are taken, 257 are not, whoever asks; the interpreter takes any."""
    started = []

    def calls(E):
        with torch.device("meta"):
            qkv, o, lse, q, cache = map(torch.empty, [(8, 1, 3, E), (8, E), (1, 1, 8), (1, 1, 1, E), (1, 8, 1, E)])
        options, seen = Options(seq=8, scale=0.3), DecodeOptions(None, None, None, 0.3, None)
        yield lambda: fwd.launch(qkv, options)
        yield lambda: bwd.launch(o, qkv, o, lse, options)
        yield lambda: decode.launch(q, cache, cache, seen)

    with pytest.MonkeyPatch.context() as patch, pretending("sm_90"):
        patch.setattr(_launch, "_start", lambda *_, **__: started.append(_))
        for call in calls(256):
            call()
        assert len(started) == 6
        for call in calls(257):
            with pytest.raises(ValueError, match="a head has at most 256 columns.* got 257"):
                call()
        assert len(started) == 6
    assert fwd.launch(*arguments("", batch=1, S=3, Q=1, E=257)[::2])[0].shape == (3, 257)


@pytest.mark.parametrize("kernel", ["fwd", "dkdv", "dq"])
def test_measured_parameters_hold_for_the_same_features_only(monkeypatch, kernel):
    """Registers decide: what wins for plain heads of 128 may spill with a feature, or where 96 are padded to 128."""
    measured = {f"attention_{kernel}": dict(num_stages=5), f"attention_{kernel} rope dropout": dict(num_stages=4)}
    table = {"sm_90": {name: {"bf16 64x128": entry} for name, entry in measured.items()}}
    monkeypatch.setattr(tuning, "_table", lambda: table)
    stages = lambda names, E=128: config(kernel, "sm_90", random(1, 1, 3, E, dtype=BF16), features(names, 1, 64, 1, E))[
        "num_stages"
    ]
    assert [stages(names) for names in ("", "causal+window+key_mask", "rope+dropout")] == [5, 5, 4]
    others = [stages(names) for names in ("rope", "dropout", "bias", "softcap", "rope+dropout+softcap")]
    assert not {4, 5} & {*others, stages("", E=96)}


# widths that fill no tile, a table of odd width, one column
@pytest.mark.parametrize("E, half", [(80, 20), slow(96, 12), slow(13, 3), slow(1, 0), slow(7, 0)])
@pytest.mark.parametrize("interleaved", [False, slow(True)])
def test_head_widths(E, half, interleaved):
    qkv, do, options = arguments("causal+dropout", batch=1, S=34, G=2, Q=1, E=E)
    options = options._replace(scale=E**-0.5)  # 0.3 would make a wide head's scores large, and their rounding with them
    if half:
        options = options._replace(**tables(34, half), interleaved=interleaved)
    assert_same((qkv, do, options))


@pytest.mark.parametrize("S", [0, 1, *map(slow, (31, 32, 33, 97))])
def test_lengths(S):
    assert_same(arguments("causal", batch=1, S=S, G=2, Q=1))
    assert_same(arguments("dropout+key_mask", batch=2, S=S, Q=1))


@pytest.mark.parametrize("G, Q", [slow(3, 1), slow(1, 5), (2, 3)])
def test_groups(G, Q):
    assert_same(arguments("causal+dropout+rope", batch=1, S=9, G=G, Q=Q))


def test_padding_rows():
    """Zero, whatever lies in them."""
    qkv, do, options = arguments("causal", S=9, padding=3)
    qkv[-3:], do[-3:] = torch.nan, torch.nan
    o, lse = fwd.launch(qkv, options)
    dqkv = bwd.launch(do, qkv, o, lse, options)
    assert not o[-3:].any() and not dqkv[-3:].any() and o.isfinite().all() and dqkv.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("names", [slow("causal+dropout"), "rope+key_mask+softcap+dropout"])
def test_low_precision(names, dtype):
    """error(kernel, fp64) <= 2 error(reference in the same dtype, fp64) + 1e-6"""
    qkv, do, options = arguments(names, S=34, Q=1, E=32, dtype=dtype)
    exact = both_exact(qkv, do, options)
    for (got, theirs), truth in zip(both((qkv, do, options)), exact, strict=True):
        finite = truth.isfinite()
        assert (got.isfinite() == finite).all()
        error, allowed = ((x.double() - truth)[finite].abs().max() for x in (got, theirs))
        # the reference keeps fp32 where a kernel feeds 16-bit operands to its products, as torch's own attention does
        rounding = torch.finfo(dtype).eps * truth[finite].abs().max()
        assert error <= 2 * allowed + rounding + 1e-6, (error, allowed)


def both_exact(qkv, do, options):
    qkv, do = qkv.double(), do.double()
    o, lse = fwd.reference(qkv, options)
    return o, lse, bwd.reference(do, qkv, o, lse, options)


# ---- the transposed form of dk and dv ----


def measured(patch, qkv, options, arch="cpu", **entry):
    """A table in which ``entry`` was measured for the kernel that has this form; returns what that is started with."""
    form, kernel = ("AHEAD", "fwd") if "AHEAD" in entry else ("TRANSPOSED", "dkdv")
    name = tuning_name(f"attention_{kernel}", qkv, options)
    bucket = tuning.bucket(qkv.dtype, (options.seq, qkv.shape[-1]))
    patch.setattr(tuning, "_table", lambda: {arch: {name: {bucket: entry}}})
    started, start = [], _launch._start

    def watch(kernel, grid, device, args, config):
        if form in config:
            started.append(config)
        return start(kernel, grid, device, args=args, config=config)

    patch.setattr(_launch, "_start", watch)
    return started


FORMS = ["either+dropout+rope", "dropout+rope", "key_mask+bias+dropout", "window+softcap"]


@pytest.mark.parametrize("names", [FORMS[0], *map(slow, FORMS[1:])])
def test_transposed_dk_and_dv(monkeypatch, names):
    """Two whole tiles and a ragged one, two heads of a group, two samples."""
    qkv, do, options = arguments(names, S=70, padding=3)
    qkv[-3:], do[-3:] = torch.nan, torch.nan
    started = measured(monkeypatch, qkv, options, TRANSPOSED=True, num_stages=2)
    o, lse = fwd.reference(qkv[:-3], options)
    o, do[-3:] = torch.cat([o, do[-3:]]), 0
    want = bwd.reference(do[:-3], qkv[:-3], o[:-3], lse, options)
    got = bwd.launch(do, qkv, o, lse, options)
    torch.testing.assert_close(got[:-3], want, rtol=2e-5, atol=2e-5)
    assert not got[-3:].any() and [config["TRANSPOSED"] for config in started] == [True]


def test_transposed_low_precision(monkeypatch):
    """The rule of test_low_precision."""
    qkv, do, options = arguments("causal+dropout", S=34, Q=1, E=32, dtype=BF16)
    started = measured(monkeypatch, qkv, options, TRANSPOSED=True)
    o, lse = fwd.reference(qkv, options)
    got, theirs = bwd.launch(do, qkv, o, lse, options), bwd.reference(do, qkv, o, lse, options)
    truth = both_exact(qkv, do, options)[-1]
    error, allowed = ((x.double() - truth).abs().max() for x in (got, theirs))
    assert error <= 2 * allowed + torch.finfo(BF16).eps * truth.abs().max() and started[0]["TRANSPOSED"]


# what has no registers for the other form, heads that fill no tile, rows that the copy engine cannot step over
@pytest.mark.parametrize(
    "names, E, step", [slow("packed", 16, 64), slow("causal", 8, 32), ("causal", 16, 65), slow("dropout", 80, 320)]
)
def test_the_plain_form_where_the_other_cannot_be(monkeypatch, names, E, step):
    """The entry is passed over as a whole: its tiles are the other form's."""
    _, do, options = arguments(names, batch=1, E=E)
    qkv = random(40, step)[:, : 4 * E].unflatten(1, (1, 4, E))
    started = measured(monkeypatch, qkv, options, TRANSPOSED=True, BLOCK_N=16)
    assert_same((qkv, do, options))
    assert [(config["TRANSPOSED"], config["BLOCK_N"]) for config in started] == [(False, 32)]


@pytest.mark.parametrize(
    "names, E, arch, form",
    [
        ("causal+rope+dropout", 128, "sm_90", True),
        ("window+softcap+key_mask", 64, "sm_90", True),
        ("window", 128, "sm_90", False),
        ("softcap", 128, "sm_90", False),
        ("key_mask", 128, "sm_90", False),
        ("bias", 128, "sm_90", False),
        ("packed", 64, "sm_90", False),
        ("causal", 256, "sm_90", False),
        ("causal", 96, "sm_90", False),
        ("causal", 64, "sm_80", False),
        ("causal", 64, "gfx942", False),
    ],
)
def test_which_calls_take_the_transposed_form(monkeypatch, names, E, arch, form):
    """As a launcher would start them on a GPU: by features, width and arch."""
    with torch.device("meta"):
        qkv, o, lse = (torch.empty(shape, dtype=BF16) for shape in ((40, 1, 3, E), (40, E), (1, 1, 40)))
    options = features(names, 1, 40, 1, E, BF16)
    monkeypatch.setattr(_launch, "_start", lambda *_, **__: None)
    started = measured(monkeypatch, qkv, options, arch, TRANSPOSED=True, num_stages=2)
    with pretending(arch):
        bwd.launch(o, qkv, o, lse, options)
    assert [config["TRANSPOSED"] for config in started] == [form]


@pytest.mark.parametrize("batch, form", [((1 << 31) // 48, True), ((1 << 31) // 48 + 1, False)])
def test_columns_of_the_transposed_form_have_32_bits(monkeypatch, batch, form):
    with torch.device("meta"):
        qkv, o, lse = (
            torch.empty(shape, dtype=BF16) for shape in ((2 * batch, 1, 3, 16), (2 * batch, 16), (batch, 1, 2))
        )
    options = Options(batch=batch, seq=2, scale=0.3)
    monkeypatch.setattr(_launch, "_start", lambda *_, **__: None)
    started = measured(monkeypatch, qkv, options, "sm_90", TRANSPOSED=True)
    with pretending("sm_90"):
        bwd.launch(o, qkv, o, lse, options)
    assert [config["TRANSPOSED"] for config in started] == [form]


# ---- the form of forward that asks for scores ahead ----


@pytest.mark.parametrize(
    "names, S, E",
    [("causal", 170, 16), slow("", 160, 16), slow("window", 170, 16), slow("causal", 31, 16), slow("either", 170, 16)]
    + [("causal", 100, 80), slow("window", 100, 96)],
)
def test_scores_ahead(monkeypatch, names, S, E):
    """Several whole tiles and ragged ones, two heads of a group, two samples; heads of 64 + 16 and 64 + 32 columns."""
    qkv, _, options = arguments(names, S=S, E=E, padding=3)
    options = options._replace(scale=E**-0.5)
    qkv[-3:] = torch.nan
    started = measured(monkeypatch, qkv, options, AHEAD=True)
    got, want = fwd.launch(qkv, options), fwd.reference(qkv[:-3], options)
    assert [config["AHEAD"] for config in started] == [True] and not got[0][-3:].any()
    torch.testing.assert_close((got[0][:-3], got[1]), want, rtol=2e-5, atol=2e-5)


def test_scores_ahead_of_documents(monkeypatch):
    qkv, _, options = arguments("packed+causal", batch=1, S=110, Q=1)
    ends = torch.tensor([0, 3, 40, 104], dtype=torch.int32, device=DEVICE)
    options = options._replace(cu_seqlens=ends)
    started = measured(monkeypatch, qkv, options, AHEAD=True)
    torch.testing.assert_close(fwd.launch(qkv, options), fwd.reference(qkv, options), rtol=2e-5, atol=2e-5)
    assert [config["AHEAD"] for config in started] == [True]


def test_scores_ahead_low_precision(monkeypatch):
    """The rule of test_low_precision."""
    qkv, do, options = arguments("window", S=100, Q=1, E=32, dtype=BF16)
    started = measured(monkeypatch, qkv, options, AHEAD=True)
    truth = both_exact(qkv, do, options)
    for got, theirs, exact in zip(fwd.launch(qkv, options), fwd.reference(qkv, options), truth[:2], strict=True):
        error, allowed = ((x.double() - exact).abs().max() for x in (got, theirs))
        assert error <= 2 * allowed + torch.finfo(BF16).eps * exact.abs().max() + 1e-6, (error, allowed)
    assert started[0]["AHEAD"]


# what has no registers for the form, rotation, heads that fill no tile, rows that the copy engine cannot step over
@pytest.mark.parametrize(
    "names, E, step",
    [("dropout", 16, 64), ("rope", 16, 64), *(slow(n, 16, 64) for n in ("key_mask", "bias", "softcap"))]
    + [slow("causal", 24, 96), slow("causal", 16, 65), slow("causal+rope", 144, 576)],
)
def test_the_plain_forward_where_the_other_cannot_be(monkeypatch, names, E, step):
    """The entry is passed over as a whole."""
    qkv = random(40, step)[:, : 4 * E].unflatten(1, (1, 4, E))
    options = features(names, 1, 40, 2, E)._replace(scale=E**-0.5)
    started = measured(monkeypatch, qkv, options._replace(cos=None) if E > 128 else options, AHEAD=True, BLOCK_N=16)
    torch.testing.assert_close(fwd.launch(qkv, options), fwd.reference(qkv, options), rtol=2e-5, atol=2e-5)
    assert [(config["AHEAD"], config["BLOCK_N"]) for config in started] == [(False, 32)]


@pytest.mark.parametrize(
    "names, E, arch, form",
    [
        ("causal", 128, "sm_90", True),
        ("window", 64, "sm_90", True),
        ("packed", 128, "sm_90", True),
        ("dropout", 64, "sm_90", False),
        ("rope", 64, "sm_90", False),
        ("causal", 96, "sm_90", True),
        ("window", 80, "sm_90", True),
        ("causal", 112, "sm_90", False),
        ("window", 256, "sm_90", False),
        ("causal", 64, "sm_80", False),
        ("causal", 64, "gfx942", False),
    ],
)
def test_which_calls_ask_for_scores_ahead(monkeypatch, names, E, arch, form):
    """As a launcher would start them on a GPU: by features, width and arch."""
    qkv, options = torch.empty(40, 1, 3, E, dtype=BF16, device="meta"), features(names, 1, 40, 1, E, BF16)
    monkeypatch.setattr(_launch, "_start", lambda *_, **__: None)
    started = measured(monkeypatch, qkv, options, arch, AHEAD=True, path="tpfuse")
    with pretending(arch):
        fwd.launch(qkv, options)
    assert [config["AHEAD"] for config in started] == [form]
    static = started[0]["STATIC"]
    assert (static.BLOCK_E, static.REST) == ((64, E - 64) if form and 64 < E < 128 else (next_power_of_2(E), 0))


# ---- masks ----


def mask_of(options, S, H):
    """What the kernel dropped, read off its output: uniform probabilities, and v the unit matrix."""
    qkv = torch.zeros(S, H, 3, S, device=DEVICE)
    qkv[:, :, 2] = torch.eye(S, device=DEVICE)[:, None]
    return fwd.launch(qkv, options)[0].view(S, H, S).transpose(0, 1) > 0


def test_masks_are_the_format():
    """Bitwise the torch twin's, over tiles and heads; and of a shard of heads, and of a packed row."""
    S, H, rng = 40, 2, make_rng(3, 2, 5, DEVICE)
    options = Options(rng=rng, seq=S, p=0.4, site=SITE, first_head=FIRST, scale=1.0)
    *key, sample = mask_key(rng)
    rows, word = torch.arange(S, device=DEVICE)[:, None], lambda n: torch.tensor(n, device=DEVICE)
    twin = torch.stack(
        [keep(key, rows, word(SITE << 16 | FIRST + h), S, word(sample), 0.4, torch.bool) for h in range(H)]
    )
    mask = mask_of(options, S, H)
    assert torch.equal(mask, twin) and 0.5 < twin.float().mean() < 0.7
    assert torch.equal(mask_of(options._replace(first_head=FIRST + 1), S, 1)[0], twin[1])
    assert not torch.equal(mask_of(options._replace(site=SITE + 1), S, 1)[0], twin[0])
    packed = mask_of(options._replace(cu_seqlens=torch.tensor([0, 37, S], dtype=torch.int32, device=DEVICE)), S, 1)[0]
    for a, b in ((0, 37), (37, S)):
        assert torch.equal(packed[a:b, a:b], twin[0, a:b, a:b]) and not packed[a:b, b:].any()


def test_backward_draws_forwards_mask():
    """dv of uniform probabilities and do = 1 counts exactly what was kept of every key: a dropped one gives nothing."""
    S, H = 40, 2
    options = Options(rng=make_rng(3, 2, 5, DEVICE), seq=S, p=0.4, site=SITE, first_head=FIRST, scale=1.0)
    qkv, do = torch.zeros(S, H, 3, 16, device=DEVICE), torch.ones(S, H * 16, device=DEVICE)
    o, lse = fwd.launch(qkv, options)
    dv = bwd.launch(do, qkv, o, lse, options)[:, :, 2, 0].T * S / scale(0.4)
    torch.testing.assert_close(dv, mask_of(options, S, H).sum(1).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_shards_of_heads_and_samples():
    """Groups by first_head, a batch by first_sample: bitwise the whole's, forward and backward."""
    qkv, do, options = arguments("causal+dropout+rope", batch=2, S=10, G=2, Q=2)
    o, lse = fwd.launch(qkv, options)
    dqkv = bwd.launch(do, qkv, o, lse, options)
    half = do.shape[1] // 2
    for g in range(2):
        own, mine = slice(g * half, (g + 1) * half), options._replace(first_head=FIRST + 2 * g)
        part = qkv[:, g : g + 1].contiguous()
        o_g, lse_g = fwd.launch(part, mine)
        assert torch.equal(o_g, o[:, own]) and torch.equal(lse_g, lse[:, 2 * g : 2 * g + 2])
        assert torch.equal(bwd.launch(do[:, own].contiguous(), part, o_g, lse_g, mine), dqkv[:, g : g + 1])
    alone = options._replace(batch=1, rng=options.rng + torch.tensor([0, 0, 1], device=DEVICE))
    assert torch.equal(fwd.launch(qkv[1::2].contiguous(), alone)[0], o[1::2])


# ---- strides, bytes ----


@pytest.mark.parametrize(
    "S, E, names, dtype",
    [
        (9, 12, "causal+rope", FP32),
        pytest.param(9, 6, "softcap", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(33, 16, "causal+dropout", FP32, marks=[pytest.mark.slow, pytest.mark.rare]),
    ],
)
def test_leaves_of_heads(monkeypatch, S, E, names, dtype):
    """Heads have the bits that they have alone, whatever was measured, at strides that are multiples of 16."""
    qkv, do, options = arguments(names, batch=1, S=S, G=8, Q=1, E=E, dtype=dtype)
    o_all, _ = fwd.launch(qkv, options)
    monkeypatch.setattr(config.__module__ + ".tuned", lambda *lookup, default: pytest.fail("a table was read"))
    seen, start = [], _launch._start

    def spy(kernel, grid, device, args, config):
        seen.append((args, config))
        return start(kernel, grid, device, args, config)

    monkeypatch.setattr(_launch, "_start", spy)

    def leaf(i, groups):
        part, heads = slice(i * groups, (i + 1) * groups), slice(i * groups * E, (i + 1) * groups * E)
        alone = options._replace(leaves=groups, first_head=options.first_head + i * groups)
        o, lse = fwd.launch(qkv[:, part].contiguous(), alone)
        return o, lse, bwd.launch(do[:, heads].contiguous(), qkv[:, part].contiguous(), o, lse, alone)

    one = leaf(0, 8)
    close = dict(rtol=2e-5, atol=2e-5) if dtype == FP32 else dict(rtol=1.6e-2, atol=1e-2)
    torch.testing.assert_close(one[0], o_all, **close)
    for ranks in (2, 8):
        parts = [leaf(i, 8 // ranks) for i in range(ranks)]
        assert all(torch.equal(torch.cat(whole, 1), t) for whole, t in zip(zip(*parts, strict=True), one, strict=True))
    for args, named in seen:
        strides = [record for record in (*args, *named.values()) if isinstance(record, Strides | Steps)]
        assert all(n % 16 == 0 for record in strides for n in record)
    assert {named["STATIC"].E % 16 for _, named in seen if "STATIC" in named} == {0}


@pytest.mark.slow
def test_strides():
    """A slice of wider heads, a transposed qkv, offsets beyond 2^31 elements."""
    _, do, options = arguments("causal", batch=2, S=5, G=2, Q=1, E=8)
    wide, rotated = random(10, 4, 3, 8)[:, 1:3], random(2, 10, 3, 8).transpose(0, 1)
    for qkv in (wide, rotated, random(10, 2, 3, 16)[..., :8]):
        assert not qkv.is_contiguous()
        assert_same((qkv, do, options))
    far = torch.empty((1 << 31) + 512, dtype=torch.float16, device=DEVICE).as_strided(
        (10, 2, 3, 8), ((1 << 31) // 9, 24, 8, 1)
    )
    far.copy_(random(10, 2, 3, 8))
    near, half = far.contiguous(), do.half()
    o, lse = fwd.launch(far, options)
    assert torch.equal(o, fwd.launch(near, options)[0])
    assert torch.equal(bwd.launch(half, far, o, lse, options), bwd.launch(half, near, o, lse, options))


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter counts")
@pytest.mark.parametrize("names", [slow(""), "causal+dropout+rope", "key_mask+bias+softcap", slow("packed+causal")])
def test_declared_bytes(names):
    S = 64
    qkv, do, options = arguments(names, batch=1 if "packed" in names else 2, S=S, E=16)
    if options.cos is not None:
        options = options._replace(cos=options.cos[:S], sin=options.sin[:S])
    if options.cu_seqlens is not None:
        options = options._replace(cu_seqlens=torch.tensor([0, 20, 64], dtype=torch.int32))
    assert_declared(fwd, (qkv, options))
    o, lse = fwd.reference(qkv, options)
    assert_declared(bwd, (do, qkv, o, lse, options))


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter counts")
def test_wide_heads_rotate_ahead():
    """Wider than 128 columns, forward reads rotated copies of q and k; so does every backward."""
    qkv, do, options = arguments("causal+rope", batch=1, S=32, Q=1, E=144)
    options = options._replace(cos=options.cos[:32], sin=options.sin[:32])
    assert_same((qkv, do, options))
    moved = assert_declared(fwd, (qkv, options))
    assert moved.written == 32 * 4 * (144 + 1 + 2 * 256)


def test_flops():
    qkv = torch.empty(64, 2, 3, 16, device="meta")
    whole = 4 * 2 * 64 * 64 * 16
    for more, share in (
        (dict(), 1),
        (dict(causal=True), 1 / 2),
        (dict(causal=True, window=16), (16 * 112 / 2) / 64**2),
        (dict(window=16), (31 * 64 - 16 * 15) / 64**2),
    ):
        options = Options(seq=64, **more)
        assert fwd.cost((qkv, options), ()).flops == whole * share
        assert bwd.cost((qkv, qkv, qkv, qkv, options), (qkv,)).flops == 2.5 * whole * share


# ---- decode ----


def decode_arguments(B=2, L=70, G=2, Q=3, E=16, dtype=FP32, lengths=False, masked=False, window=None, softcap=None):
    cache = random(B, L, G, 2, E, dtype=dtype)
    mask = torch.rand(B, L, device=DEVICE) < 0.7 if masked else None
    if masked:
        mask[0] = False
    length = torch.tensor([L, 37, 1, 0][:B], dtype=torch.int32, device=DEVICE) if lengths else None
    options = DecodeOptions(mask, length, window, scale=0.3, softcap=softcap)
    return random(B, G, Q, E, dtype=dtype), cache[..., 0, :], cache[..., 1, :], options


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(lengths=True, B=4),
        dict(masked=True),
        dict(window=9, lengths=True, B=4),
        dict(softcap=1.5, masked=True),
        dict(L=1, Q=1),
    ],
    ids=str,
)
def test_decode(options):
    given = decode_arguments(**options)
    torch.testing.assert_close(decode.launch(*given), decode.reference(*given), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("E", [80, 5])
def test_decode_widths(E):
    given = decode_arguments(E=E)
    torch.testing.assert_close(decode.launch(*given), decode.reference(*given), rtol=2e-5, atol=2e-5)


def test_decode_low_precision():
    given = decode_arguments(dtype=BF16)
    exact = decode.reference(*(t.double() for t in given[:3]), given[3])
    error, allowed = ((x.double() - exact).abs().max() for x in (decode.launch(*given), decode.reference(*given)))
    assert error <= 2 * allowed + torch.finfo(BF16).eps * exact.abs().max()


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter counts")
def test_decode_declared_bytes():
    assert_declared(decode, decode_arguments(L=64))
    assert_declared(decode, decode_arguments(L=64, window=32))
    q, k, v, options = decode_arguments(L=64)
    assert_declared(decode, (q, k, v, options._replace(key_mask=torch.ones(2, 64, dtype=torch.bool))))


def test_splits():
    assert (
        splits_of(8, 100, 132) == 33
        and splits_of(8, 4, 132) == 4
        and splits_of(1000, 100, 132) == 1
        and splits_of(0, 0, 132) == 1
    )


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize(
    "names",
    [
        "",
        "causal",
        "causal+dropout",
        "causal+dropout+rope",
        "window+rope+softcap",
        "key_mask+bias+dropout",
        "either+rope",
    ],
)
@pytest.mark.parametrize("E", [32, 64, 96, 128, 256])
def test_on_a_gpu(monkeypatch, E, names):
    """Compiled, bf16, several tiles; twice the same bits.  Always tpfuse's own forward."""
    monkeypatch.setattr(torch_forward, "has_flash", lambda device: False)
    fwd.launch.forget()
    qkv, do, options = arguments(names, S=300, G=2, Q=2, E=E, dtype=BF16)
    options = options._replace(scale=E**-0.5)
    for got, want in both((qkv, do, options)):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    o, lse = fwd.launch(qkv, options)
    assert torch.equal(bwd.launch(do, qkv, o, lse, options), bwd.launch(do, qkv, o, lse, options))


@pytest.mark.gpu
@pytest.mark.parametrize("names", ["", "causal", "window", "either", "packed+causal"])
@pytest.mark.parametrize("E", [64, 80, 96, 128])
def test_scores_ahead_on_a_gpu(monkeypatch, E, names):
    """Where the GPU has the copy engine; elsewhere the plain form."""
    qkv, _, options = arguments(names, batch=1 if "packed" in names else 2, S=700, G=2, Q=2, E=E, dtype=BF16)
    options, arch = options._replace(scale=E**-0.5), _launch.target(qkv.device).arch
    fwd.launch.forget()
    started = measured(monkeypatch, qkv, options, arch, AHEAD=True, path="tpfuse")
    for got, want in zip(fwd.launch(qkv, options), fwd.reference(qkv, options), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert [config["AHEAD"] for config in started] == [_launch.has_tma(arch)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_packed_and_decode_on_a_gpu(dtype):
    close = dict(rtol=2e-2, atol=2e-2) if dtype == BF16 else dict(rtol=1e-4, atol=1e-4)
    for got, want in both(arguments("packed+causal+dropout+rope+positions", batch=1, S=400, E=64, dtype=dtype)):
        torch.testing.assert_close(got, want, **close)
    given = decode_arguments(L=1000, E=128, dtype=dtype, lengths=True)
    torch.testing.assert_close(decode.launch(*given), decode.reference(*given), **close)


@pytest.mark.gpu
@pytest.mark.parametrize("E, names", [(128, "causal"), (64, "causal+dropout"), (40, "causal+rope")])
def test_leaves_of_heads_on_a_gpu(E, names):
    """Compiled, where torch's flash attention would be the default."""
    qkv, do, options = arguments(names, batch=2, S=300, G=8, Q=2, E=E, dtype=torch.bfloat16)
    results = []
    for groups in (8, 4, 2, 1):
        pieces = []
        for g in range(0, 8, groups):
            part, heads = qkv[:, g : g + groups].contiguous(), do.unflatten(1, (8, -1))[:, g : g + groups].flatten(1)
            alone = options._replace(leaves=groups, first_head=options.first_head + 2 * g)
            o, lse = fwd.launch(part, alone)
            pieces.append((o, lse, bwd.launch(heads.contiguous(), part, o, lse, alone)))
        results.append([torch.cat(whole, 1) for whole in zip(*pieces, strict=True)])
    assert all(torch.equal(a, b) for split in results for a, b in zip(split, results[0], strict=True))
