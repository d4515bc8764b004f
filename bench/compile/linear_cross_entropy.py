"""linear_cross_entropy: three chunks of the vocabulary (the first, a middle and the last one differ), one chunk with a
bias, fp16, fp32; dW and dx by the kernel that stands beside torch's GEMMs."""

from unittest import mock

import torch

from bench.compile._compile import Call, meta
from tpfuse.kernels.losses import linear_triton
from tpfuse.kernels.losses.linear_triton import bwd_launch, stats_launch
from tpfuse.kernels.losses.options import Linear, Loss, Rows

HGMMA = dict.fromkeys(("_logits_stats_kernel", "_dlogits_kernel", "_contract_kernel"), ("HGMMA", "UTMALDG"))


def fused(*lookup, default: dict) -> dict:
    return default | dict(path="fused") if "path" in default else default


def both(M: int, V: int, D: int, bias: bool, dtype: torch.dtype = torch.bfloat16):
    def run():
        layer = Linear(meta(M, D, dtype=dtype), meta(V, D, dtype=dtype), meta(V, dtype=dtype) if bias else None)
        labels, lse = meta(M, dtype=torch.int64), meta(M, dtype=torch.float32)
        loss = Loss(V, label_smoothing=0.1, z_loss=1e-4)
        stats_launch(layer, labels, loss if bias else loss._replace(label_smoothing=0.0))
        with mock.patch.object(linear_triton, "tuned", fused):
            bwd_launch(layer, Rows(labels, lse, dloss=lse[:1].expand(M)), loss)

    return run


CALLS = {
    "V=49152 D=768": Call(both(4096, 49152, 768, bias=False), uses=HGMMA),
    "V=15522 D=768 bias": Call(both(4096, 15522, 768, bias=True), uses=HGMMA),
    "V=16000 D=4096 fp16": Call(both(4096, 16000, 4096, bias=False, dtype=torch.float16), uses=HGMMA),
    "V=1000 D=64 fp32": Call(both(512, 1000, 64, bias=True, dtype=torch.float32)),
}
