"""The large entries of a bucket of gradients: tpfuse's selection against torch's nonzero and topk.

python -m bench.kernels.select_large        25 MiB of fp32, one entry in a hundred; on a GPU where there is one

Normal numbers, a threshold that one in a hundred is above, and room for a quarter more.  All three take turns.  nonzero
gives the same entries, and the host waits for it; topk gives them by size, without a threshold.  Bytes are those that
tpfuse's kernels declare.
"""

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from bench._parser import parser_of
from tpfuse.kernels import select_large
from tpfuse.kernels.runtime.op import OPS
from tpfuse.tools.bench.measure import interleaved, sets_needed


def by_nonzero(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    (index,) = torch.nonzero(x.abs() >= threshold, as_tuple=True)
    return index, x[index]


def main() -> None:
    parser = parser_of("bench.kernels.select_large", __doc__)
    parser.add_argument("--entries", type=int, default=6_553_600, help="n (default 6553600)")
    parser.add_argument("--density", type=float, default=0.01, help="of entries that are chosen (default 0.01)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of measurement (default 5)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device, n, k = torch.device(args.device), args.entries, max(1, round(args.density * args.entries))
    threshold, most = statistics.NormalDist().inv_cdf(1 - args.density / 2), k * 5 // 4
    torch.manual_seed(0)
    sets = [torch.randn(n, device=device) for _ in range(sets_needed(4 * n, device))]
    index, value, count = select_large(sets[0], threshold, most)
    for ours, expected in zip((index, value), by_nonzero(sets[0], threshold), strict=True):
        assert torch.equal(ours[:count], expected), "tpfuse and torch chose other entries"
    cost = OPS["select_large"].cost((sets[0], threshold, most), (index, value, count))
    calls: dict[str, Callable[[int], object]] = {
        "tpfuse": lambda i: select_large(sets[i], threshold, most),
        "torch, nonzero": lambda i: by_nonzero(sets[i], threshold),
        "torch, topk": lambda i: torch.topk(sets[i].abs(), k, sorted=False),
    }
    print(f"{device}, n = {n}, {int(count)} chosen, {(cost.read + cost.written) / n:.2f} bytes an entry declared")
    print("| | us (20 to 80 %) | over tpfuse |\n|---|---|---|")
    times = interleaved(calls, len(sets), device, args.seconds)
    for name, t in times.items():
        middle, low, high = (f"{1e6 * seconds:.0f}" for seconds in (t.p50, t.p20, t.p80))
        print(f"| {name} | {middle} ({low} to {high}) | {t.p50 / times['tpfuse'].p50:.2f} |")


if __name__ == "__main__":
    main()
