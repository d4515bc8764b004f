"""The CPU implementations that are not plain references, against ATen's: attention and swiglu, forward and backward.
ATen's swiglu has gate and up in tensors of their own.

python -m bench.kernels.cpu            one thread, bf16 and fp32, interleaved; median
                                       and quartiles of the ratio of neighbouring runs
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from bench._parser import parser_of
from tpfuse.kernels.attn.op import attention_bwd, attention_fwd
from tpfuse.kernels.attn.options import Options
from tpfuse.kernels.gemm.op import activation_bwd, activation_fwd

aten = torch.ops.aten
S, B, H, E, FFN = 512, 4, 6, 64, 1536  # a rank's share of width 768, 12 heads, at R = 2


def attention_pair(dtype: torch.dtype) -> tuple[Callable, Callable]:
    qkv = torch.randn(S * B, H, 3, E).to(dtype)
    do = torch.randn(S * B, H * E).to(dtype)
    options = Options(batch=B, seq=S, causal=True, scale=E**-0.5)
    q, k, v = qkv.view(S, B, H, 3, E).permute(3, 1, 2, 0, 4)

    def ours():
        o, lse = attention_fwd(qkv, options)
        return o, attention_bwd(do, qkv, o, lse, options)

    def aten_call():
        o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        grad = do.view(S, B, H, E).permute(1, 2, 0, 3)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, o, lse, 0.0, True)
        return o.permute(2, 0, 1, 3).flatten(2).flatten(0, 1), torch.stack(grads).permute(3, 1, 2, 0, 4).flatten(0, 1)

    return ours, aten_call


def swiglu_pair(dtype: torch.dtype) -> tuple[Callable, Callable]:
    z, dy = torch.randn(S * B, 2 * FFN).to(dtype), torch.randn(S * B, FFN).to(dtype)
    gate, up = (x.contiguous() for x in z.view(-1, FFN, 2).unbind(2))

    def ours():
        dz, _, y = activation_bwd(dy, z, "swiglu", rebuild=True, bias=None)
        return activation_fwd(z, "swiglu"), *dz.view(-1, FFN, 2).unbind(2), y

    def aten_call():
        value, again = F.silu(gate) * up, F.silu(gate)
        return value, aten.silu_backward(dy * up, gate), dy * again, again * up

    return ours, aten_call


PAIRS = {
    "attention, causal": attention_pair,
    "swiglu, value computed again in backward": swiglu_pair,
}


def main() -> None:
    parser = parser_of("bench.kernels.cpu", __doc__)
    parser.add_argument("--rounds", type=int, default=30, help="runs of each (default 30)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"| op, forward + backward | dtype | tpfuse ms | ATen ms | ATen / tpfuse (quartiles) |\n{'|---' * 5}|")
    for name, pair in PAIRS.items():
        for dtype in (torch.bfloat16, torch.float32):
            calls = pair(dtype)
            for a, b in zip(calls[0](), calls[1](), strict=True):
                torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2)
            times: list[list[float]] = [[], []]
            for _ in range(args.rounds):
                for call, seconds in zip(calls, times, strict=True):
                    start = time.process_time()
                    call()
                    seconds.append(1e3 * (time.process_time() - start))
            low, mid, high = statistics.quantiles([b / a for a, b in zip(*times, strict=True)], n=4)
            our_ms, aten_ms = map(statistics.median, times)
            print(f"| {name} | {str(dtype)[6:]} | {our_ms:.1f} | {aten_ms:.1f} | {mid:.2f} ({low:.2f} to {high:.2f}) |")


if __name__ == "__main__":
    main()
