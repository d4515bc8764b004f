"""rope: q of a fused qkv, head widths from 64 to 256, part of a head, pairs side by side."""

import torch

from bench.compile._compile import Call, meta
from tpfuse.kernels.rotary.op import Rotation, fwd_launch

ELEMENTS = dict(_rope_kernel=lambda c: c["ROWS"] * c["HEADS"] * (2 * c["PAIRS"] + c["REST"]))


def rotate(
    H: int, E: int, F: int, interleaved: bool = False, back: bool = False, positions: bool = True, dtype=torch.bfloat16
):
    def run():
        cos = meta(4096, F, dtype=torch.float32)
        x = meta(8192, H + 2, E, dtype=dtype)[:, :H]
        rows = meta(8192, dtype=torch.int64) if positions else None
        fwd_launch(x, Rotation(cos, cos, rows, interleaved), back)

    return run


CALLS = {
    "H=32 E=128": rotate(32, 128, 64),
    "H=32 E=128 back": rotate(32, 128, 64, back=True),
    "H=12 E=64": rotate(12, 64, 32),
    "H=8 E=256 interleaved": rotate(8, 256, 128, True),
    "H=32 E=80 F=16": rotate(32, 80, 16),
    "H=16 E=256 F=32 interleaved": rotate(16, 256, 32, True, positions=False),
    "H=1 E=128 fp32": rotate(1, 128, 64, dtype=torch.float32),
}
CALLS = {label: Call(run, ELEMENTS) for label, run in CALLS.items()}
