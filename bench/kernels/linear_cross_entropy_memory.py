"""Peak memory of linear_cross_entropy above its inputs and returned gradients, against torch's F.linear +
F.cross_entropy, on CPU.

python -m bench.kernels.linear_cross_entropy_memory        V = 128K, M = 4096, D = 768, bf16; at most 0.1x is the aim

Each runs forward and backward in a process of its own, of which the kernel's high-water mark of resident memory is
read.  Before that a small call has loaded the libraries; the gradients' bytes are taken off at the end.  Linux only.
"""

import multiprocessing
import pathlib
import time

import torch
import torch.nn.functional as F

from bench._parser import parser_of
from bench._resident import resident
from tpfuse.kernels import linear_cross_entropy


def torch_loss(x: torch.Tensor, w: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, w), labels)


CALLS = {"tpfuse": linear_cross_entropy, "torch": torch_loss}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def make(rows: int, vocab: int, width: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, w = torch.randn(rows, width), torch.randn(vocab, width).mul_(0.02)
    x, w = (t.to(DTYPES[dtype]).requires_grad_() for t in (x, w))
    return x, w, torch.randint(vocab, (rows,))


def measure(name: str, rows: int, vocab: int, width: int, dtype: str) -> tuple[int, float, float]:
    """-> bytes above inputs and gradients, seconds of one core, the loss"""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    call = CALLS[name]
    call(*make(64, 1024, width, dtype)).backward()
    x, w, labels = make(rows, vocab, width, dtype)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins again at what is resident
    baseline, start = resident("VmRSS"), time.process_time()
    loss = call(x, w, labels)
    loss.backward()
    seconds = time.process_time() - start
    return resident("VmHWM") - baseline - x.grad.nbytes - w.grad.nbytes, seconds, loss.item()


def main() -> None:
    parser = parser_of("bench.kernels.linear_cross_entropy_memory", __doc__)
    parser.add_argument("--rows", type=int, default=4096, help="M (default 4096)")
    parser.add_argument("--vocab", type=int, default=131072, help="V (default 131072)")
    parser.add_argument("--width", type=int, default=768, help="D (default 768)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    args = parser.parse_args()
    shape = args.rows, args.vocab, args.width, args.dtype
    print(
        f"M = {args.rows}, V = {args.vocab}, D = {args.width}, {args.dtype}\n"
        "| | MB above | core seconds | loss |\n|---|---|---|---|"
    )
    above = {}
    for name in CALLS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            above[name], seconds, loss = pool.apply(measure, (name, *shape))
        print(f"| {name} | {above[name] / 1e6:.0f} | {seconds:.1f} | {loss:.4f} |", flush=True)
    print(f"memory: {above['tpfuse'] / above['torch']:.3f}x torch's")


if __name__ == "__main__":
    main()
