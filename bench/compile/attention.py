"""attention: every head width that has launch parameters of its own, with and without dropout, rotary positions and
packing; chunks of queries; decode."""

from collections.abc import Callable
from unittest import mock

import torch

from bench.compile._compile import Call, meta
from tpfuse.kernels.attn.decode import decode_launch
from tpfuse.kernels.attn.options import DecodeOptions, Options, QueryChunk
from tpfuse.kernels.attn.triton_backward import bwd_launch, of_queries_bwd_launch
from tpfuse.kernels.attn.triton_forward import fwd_launch, of_queries_fwd_launch
from tpfuse.kernels.runtime import tuning

TILE = lambda c: c["BLOCK_M"] * c["BLOCK_N"]
ELEMENTS = dict(_fwd_kernel=TILE, _dkdv_kernel=TILE, _dq_kernel=TILE)
GEMMS = dict.fromkeys(ELEMENTS, ("HGMMA",))
WIDE = dict(_fwd_kernel=("HGMMA",))  # backward tiles that have room for 256 columns are too small for wgmma
OTHER_FORM, TILE_N = dict(dkdv="TRANSPOSED", fwd="AHEAD"), dict(dkdv=64, fwd=128)
FP32, INT32, INT64 = torch.float32, torch.int32, torch.int64


def both(
    E: int,
    *features: str,
    B: int = 4,
    S: int = 2048,
    G: int = 8,
    Q: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    documents: int = 8,
    chunk: range | None = None,
):
    """``chunk``: the positions that have queries, where they are not all."""
    has = lambda name, *tensor: meta(*tensor[:-1], dtype=tensor[-1]) if name in features else None

    def run():
        batch = 1 if "packed" in features else B
        rows, H = S * batch, G * Q
        options = Options(
            key_mask=has("key_mask", batch, S, torch.bool),
            cu_seqlens=has("packed", documents + 1, INT32),
            bias=has("bias", H, S, S, dtype),
            cos=has("rope", S, E // 2, FP32),
            sin=has("rope", S, E // 2, FP32),
            positions=has("packed", rows, INT64) if "rope" in features else None,
            rng=has("dropout", 3, INT64),
            batch=batch,
            seq=S,
            causal="causal" in features,
            window=512 if "window" in features else None,
            scale=E**-0.5,
            softcap=50.0 if "softcap" in features else None,
            p=0.1 if "dropout" in features else 0.0,
            site=4,
        )
        if chunk is not None:
            queries = QueryChunk(meta(rows, G, 2, E, dtype=dtype), chunk.start, len(chunk))
            q, o = (meta(len(chunk) * batch, *heads, dtype=dtype) for heads in ((G, Q, E), (H * E,)))
            of_queries_fwd_launch(q, queries, options)
            of_queries_bwd_launch(o, q, queries, o, meta(batch, H, len(chunk), dtype=FP32), options)
            return
        qkv, o = meta(rows, G, Q + 2, E, dtype=dtype), meta(rows, H * E, dtype=dtype)
        fwd_launch(qkv, options)
        bwd_launch(o, qkv, o, meta(batch, H, S, dtype=FP32), options)

    return run


def measured(kernel: str, E: int, *features: str, S: int = 2048, **sizes: int) -> Callable[[], None]:
    """The call under a measured table that asks for the other form of ``kernel``."""
    named_features = dict(padded=E in (80, 96)) | {name: name in features for name in ("rope", "softcap", "dropout")}
    name = " ".join([f"attention_{kernel}", *(name for name, there in named_features.items() if there)])
    entry = {
        tuning.bucket(torch.bfloat16, (S, E)): {OTHER_FORM[kernel]: True, "BLOCK_N": TILE_N[kernel], "num_stages": 2}
    }

    def run():
        with mock.patch.object(tuning, "_table", lambda: {"sm_90": {name: entry}}):
            both(E, *features, S=S, **sizes)()

    return run


def transposed(E: int, *features: str, **sizes: int) -> Call:
    return Call(
        measured("dkdv", E, *features, **sizes),
        ELEMENTS,
        uses=dict(_dkdv_kernel=("HGMMA", "UTMALDG")),
        spills=dict(_dkdv_kernel=8),
        why="Triton 3.6 keeps two numbers of the loop in memory; 3.8 keeps them in registers",
        archs=("sm_90",),
        only="_dkdv_kernel",
    )


def ahead(E: int, *features: str, **sizes: int) -> Call:
    uses = dict(_fwd_kernel=("HGMMA", "UTMALDG"))
    return Call(measured("fwd", E, *features, **sizes), ELEMENTS, uses, archs=("sm_90",), only="_fwd_kernel")


def packed(E: int, documents: int):
    return both(E, "packed", "causal", "dropout", "rope", documents=documents)


def chunk(E: int, *features: str, **sizes: int):
    return both(E, *features, chunk=range(1024, 1536), **sizes)


def decode(E: int, Q: int, B: int = 4, L: int = 8192, G: int = 8, most: int = 8192):
    """The first L positions of a cache that holds ``most``."""

    def run():
        cache = meta(B, most, G, 2, E)[:, :L]
        mask = meta(B, most, dtype=torch.bool)[:, :L]
        options = DecodeOptions(mask, lengths=None, window=None, scale=E**-0.5, softcap=None)
        decode_launch(meta(B, G, Q, E), cache[..., 0, :], cache[..., 1, :], options)

    return run


CALLS = {"E=128 causal dropout rope": Call(both(128, "causal", "dropout", "rope"), ELEMENTS, GEMMS)}
for E in (32, 64, 96, 128, 256):
    CALLS[f"E={E} causal"] = Call(both(E, "causal"), ELEMENTS, WIDE if E == 256 else GEMMS)
    CALLS[f"E={E} causal dropout"] = Call(both(E, "causal", "dropout"), ELEMENTS, WIDE if E == 256 else GEMMS)
CALLS |= {
    "E=64 causal dropout rope": Call(both(64, "causal", "dropout", "rope"), ELEMENTS, GEMMS),
    "E=256 causal rope softcap window": Call(both(256, "causal", "rope", "softcap", "window", Q=2), ELEMENTS, WIDE),
    "E=128 packed causal dropout rope Q=4": Call(
        both(128, "packed", "causal", "dropout", "rope", Q=4), ELEMENTS, GEMMS
    ),
    "E=128 packed 100 documents": Call(packed(128, 100), ELEMENTS, GEMMS),
    "E=64 key_mask bias dropout": Call(both(64, "key_mask", "bias", "dropout"), ELEMENTS, GEMMS),
    "E=64 packed one position": Call(
        both(64, "packed", "causal", "dropout", "rope", "window", B=1, S=1, G=1), ELEMENTS, GEMMS
    ),
    "E=128 causal dropout transposed": transposed(128, "causal", "dropout"),
    "E=64 causal window key_mask softcap dropout Q=4 transposed": transposed(
        64, "causal", "window", "key_mask", "softcap", "dropout", Q=4
    ),
    "E=128 causal ahead": ahead(128, "causal"),
    "E=64 packed causal window Q=4 ahead": ahead(64, "packed", "causal", "window", B=1, Q=4),
    "E=80 causal ahead": ahead(80, "causal"),
    "E=96 packed causal window ahead": ahead(96, "packed", "causal", "window", B=1),
    "E=64 rope window on either side": Call(both(64, "rope", "window"), ELEMENTS, GEMMS),
    "E=128 packed rope window on either side": Call(both(128, "packed", "rope", "window"), ELEMENTS, GEMMS),
    "E=64 window on either side ahead": ahead(64, "window"),
    "E=64 window on either side transposed": transposed(64, "window", "dropout"),
    "E=128 causal fp32": Call(both(128, "causal", dtype=FP32), ELEMENTS),
    "E=128 causal dropout rope chunk": Call(chunk(128, "causal", "dropout", "rope"), ELEMENTS, GEMMS),
    "E=64 causal chunk": Call(chunk(64, "causal"), ELEMENTS, GEMMS),
    "E=128 causal chunk": Call(chunk(128, "causal"), ELEMENTS, GEMMS),
    "E=96 causal dropout chunk": Call(chunk(96, "causal", "dropout"), ELEMENTS, GEMMS),
    "E=256 causal rope softcap window chunk": Call(
        chunk(256, "causal", "rope", "softcap", "window", Q=2), ELEMENTS, WIDE
    ),
    "E=128 packed causal rope Q=4 chunk": Call(chunk(128, "packed", "causal", "rope", Q=4), ELEMENTS, GEMMS),
    "E=64 key_mask bias dropout chunk": Call(chunk(64, "key_mask", "bias", "dropout"), ELEMENTS, GEMMS),
    "E=64 rope window on either side chunk": Call(chunk(64, "rope", "window"), ELEMENTS, GEMMS),
    "E=64 causal one position of three": Call(both(64, "causal", B=1, S=3, G=1, chunk=range(1, 2)), ELEMENTS, GEMMS),
    "E=128 causal fp32 chunk": Call(chunk(128, "causal", dtype=FP32), ELEMENTS),
    "E=128 decode": Call(decode(128, 1)),
    "E=256 decode Q=8": Call(decode(256, 8)),
}
