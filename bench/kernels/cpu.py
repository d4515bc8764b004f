"""The CPU implementations that are not plain references, against ATen's: attention of many lengths, forward and
backward; swiglu, the loss of stored logits, and the products of a GEMM, both together.  ATen's swiglu has gate and up
in tensors of their own, and its loss takes logits of 16 bits as fp32, as models of transformers do.

python -m bench.kernels.cpu                      one thread, bf16 and fp32, interleaved; median
                                                 and quartiles of the ratio of neighbouring runs
python -m bench.kernels.cpu --only 512 GEMM      the rows whose names have one of these words
"""

import functools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from bench import documents
from bench._parser import parser_of
from tpfuse.kernels import cross_entropy
from tpfuse.kernels.attn import torch_cpu
from tpfuse.kernels.attn.cpu import bwd_cpu, fwd_cpu
from tpfuse.kernels.attn.options import Options
from tpfuse.kernels.gemm.op import activation_bwd, activation_fwd
from tpfuse.kernels.gemm.prepared import Dense, Plain, form_for
from tpfuse.kernels.runtime import matmul
from tpfuse.kernels.runtime.processor import multiplies

aten = torch.ops.aten
S, B, D, H, E, FFN = 512, 4, 768, 6, 64, 1536  # a rank's share of width 768, 12 heads, at R = 2
ROWS, VOCAB = 512, 49152
Call = Callable[[], tuple[torch.Tensor, ...]]
Pair = tuple[Call, Call, bool]  # tpfuse's implementation, ATen's, and whether tpfuse takes its own


def attention_pair(dtype: torch.dtype, seq: int, causal: bool, backward: bool, masked: bool = False) -> Pair:
    """cpu.py's attention, and ATen's from and to the same layouts; the path that a call takes is marked.  ``masked``:
    each sample is padded behind half of its positions or more."""
    batch = max(1, S * B // seq)
    qkv, do = torch.randn(seq * batch, H, 3, E).to(dtype), torch.randn(seq * batch, H * E).to(dtype)
    lengths = torch.randint(seq // 2, seq + 1, (batch, 1))
    mask = torch.arange(seq) < lengths if masked else None
    options = Options(key_mask=mask, batch=batch, seq=seq, causal=causal, scale=E**-0.5)
    o, lse = fwd_cpu(qkv, options)

    def call_of(forward_: Callable, backward_: Callable) -> Call:
        return lambda: (backward_(do, qkv, o, lse, options),) if backward else forward_(qkv, options)

    taken = not torch_cpu.is_plain(qkv, options, backward=backward)
    return call_of(fwd_cpu, bwd_cpu), call_of(torch_cpu.flash_fwd, torch_cpu.flash_bwd), taken


def product_pair(dtype: torch.dtype) -> Pair:
    """A GEMM's three products, as they are made on this processor and by torch in the same dtype."""
    x, w, dy = (torch.randn(shape).to(dtype) for shape in ((S, D), (FFN, D), (S, FFN)))
    ours = lambda: (matmul.linear(x, w), matmul.mm(dy, w), matmul.mm(dy.t(), x))
    return ours, lambda: (F.linear(x, w), dy @ w, dy.t() @ x), True


def forms_pair(dtype: torch.dtype, rows: int) -> Pair | None:
    """A gated MLP of generation: torch's linear and oneDNN's with its epilogues, on the weights as they are; None where
    oneDNN does not multiply the dtype."""
    if dtype != torch.float32 and not multiplies(dtype):
        return None
    width, ffn = 512, 1408
    x, w1, w2 = (torch.randn(shape).to(dtype) for shape in ((rows, width), (ffn, 2, width), (width, ffn)))

    def call_of(form: Plain) -> Call:
        up, down = form.mlp(w1, None, "swiglu"), form.add(w2, None)
        return lambda: (down(up(x), x.clone()),)

    taken = type(form_for(dtype, rows=rows, times=1)) is Plain
    return call_of(Plain()), call_of(Dense()), taken


def swiglu_pair(dtype: torch.dtype) -> Pair:
    z, dy = torch.randn(S * B, 2, FFN).to(dtype), torch.randn(S * B, FFN).to(dtype)
    gate, up = (x.contiguous() for x in z.unbind(1))

    def ours():
        dz, _, y = activation_bwd(dy, z, "swiglu", rebuild=True, bias=None)
        return activation_fwd(z, "swiglu"), *dz.view(-1, FFN, 2).unbind(2), y

    def aten_call():
        value, again = F.silu(gate) * up, F.silu(gate)
        return value, aten.silu_backward(dy * up, gate), dy * again, again * up

    return ours, aten_call, True


def loss_pair(dtype: torch.dtype) -> Pair:
    logits, labels = torch.randn(ROWS, VOCAB).to(dtype).requires_grad_(), torch.randint(VOCAB, (ROWS,))

    def call_of(loss_of: Callable[[], torch.Tensor]) -> Call:
        def call() -> tuple[torch.Tensor, ...]:
            loss = loss_of()
            return loss, *torch.autograd.grad(loss, logits)

        return call

    ours = lambda: cross_entropy(logits, labels, reduction="sum")
    return call_of(ours), call_of(lambda: F.cross_entropy(logits.float(), labels, reduction="sum")), True


DIRECTIONS = "forward", "backward"
PAIRS: dict[str, Callable[[torch.dtype], Pair | None]] = {
    **{
        f"attention{', causal' * causal}, {seq} positions, {DIRECTIONS[backward]}": functools.partial(
            attention_pair, seq=seq, causal=causal, backward=backward
        )
        for causal in (True, False)
        for seq in (64, 128, 256, 512, 1024, 2048)
        for backward in (False, True)
    },
    "swiglu, value computed again in backward": swiglu_pair,
    f"loss of {ROWS} x {VOCAB} logits": loss_pair,
    **{
        f"attention, key mask, {seq} positions, {DIRECTIONS[backward]}": functools.partial(
            attention_pair, seq=seq, causal=False, backward=backward, masked=True
        )
        for seq in (128, 512)
        for backward in (False, True)
    },
    **{
        f"forms of an MLP, {rows} rows (ATen: oneDNN's epilogues)": functools.partial(forms_pair, rows=rows)
        for rows in (8, 256, 2048)
    },
    f"a GEMM of {S} x {D} x {FFN}": product_pair,
}


def main() -> None:
    parser = parser_of("bench.kernels.cpu", __doc__)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="rows with one of these in their name")
    parser.add_argument("--rounds", type=int, default=30, help="runs of each (default 30)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    header = "op", "dtype", "tpfuse ms", "ATen ms", "ATen / tpfuse (quartiles)", "taken"
    print(f"| {' | '.join(header)} |\n{'|---' * len(header)}|")
    for name, pair in PAIRS.items():
        for dtype in (torch.bfloat16, torch.float32):
            if not any(word in name for word in args.only):
                continue
            implementations = pair(dtype)
            if implementations is None:
                continue
            *calls, by_tpfuse = implementations
            for a, b in zip(calls[0](), calls[1](), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=3e-2 * b.abs().max().item())
            times: list[list[float]] = [[], []]
            for _ in range(args.rounds):
                for call, seconds in zip(calls, times, strict=True):
                    start = time.process_time()
                    call()
                    seconds.append(1e3 * (time.process_time() - start))
            ratios = statistics.quantiles([b / a for a, b in zip(*times, strict=True)], n=4)
            our_ms, aten_ms = map(statistics.median, times)
            times_over, path = documents.spread(ratios), "tpfuse" if by_tpfuse else "ATen"
            print(f"| {name} | {str(dtype)[6:]} | {our_ms:.1f} | {aten_ms:.1f} | {times_over} | {path} |", flush=True)


if __name__ == "__main__":
    main()
