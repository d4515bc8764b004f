"""Second copies of weights for decoding, against torch's linear on the weights as they are: what a copy gives for each
number of rows, and from how many tokens on it is worth its making.

    python -m bench.kernels.copies                   rows of 1 to 32, fp32 and bf16, one thread
    python -m bench.kernels.copies --rows 1 --rows 3 --rounds 11

The weights, [3072, 576] and [576, 1536], are more than a cache holds, as a model's are.  "pays from" is the time to
make the copies over the median of what a product gains by them; "taken from" is what :func:`form_for` goes by.
"""

import statistics
import time

import torch
from torch import Tensor

from bench import documents, machine
from bench._parser import check_rounds, parser_of
from tpfuse.kernels.gemm.prepared import Map, Packed, Plain, Transposed, form_for
from tpfuse.kernels.runtime.processor import multiplies

SHAPES = (3072, 576), (576, 1536)  # [N, K]
BYTES = 100_000_000  # of the weights of a shape
HEADS = "dtype", "rows", "copy", "plain us", "copy us", "plain / copy (quartiles)", "pays from", "taken from"


def rounds_of(x: Tensor, forms: list[list[Map]], rounds: int) -> list[list[float]]:
    """Returns the microseconds of a product for each form and round; the forms take turns."""
    times: list[list[float]] = [[] for _ in forms]
    for _ in range(rounds):
        for maps, microseconds in zip(forms, times, strict=True):
            start = time.perf_counter()
            for multiply in maps:
                multiply(x)
            microseconds.append(1e6 * (time.perf_counter() - start) / len(maps))
    return times


def row_of(dtype: torch.dtype, rows: int, copy: Plain, rounds: int) -> list[str]:
    plain_us, copy_us, making_us, ratios = 0.0, 0.0, 0.0, []
    for n, k in SHAPES:
        weights = [torch.randn(n, k).to(dtype) for _ in range(BYTES // (n * k * dtype.itemsize))]
        start = time.perf_counter()
        copies = [copy.map(weight, None) for weight in weights]
        making_us += 1e6 * (time.perf_counter() - start) / len(weights)
        forms = [[Plain().map(weight, None) for weight in weights], copies]
        plain, copied = rounds_of(torch.randn(rows, k).to(dtype), forms, rounds)
        plain_us, copy_us = plain_us + statistics.median(plain), copy_us + statistics.median(copied)
        ratios.append([a / b for a, b in zip(plain, copied, strict=True)])
    quartiles = statistics.quantiles([statistics.mean(pair) for pair in zip(*ratios, strict=True)], n=4)
    pays = f"{making_us / (plain_us - copy_us):.0f}" if plain_us > copy_us else "never"
    return [f"{plain_us:.0f}", f"{copy_us:.0f}", documents.spread(quartiles), pays]


def main() -> None:
    parser = parser_of("bench.kernels.copies", __doc__)
    parser.add_argument("--rows", type=int, action="append", help="of a product (default: 1, 2, 3, 4, 8 and 32)")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each (default 7)")
    args = parser.parse_args()
    check_rounds(parser, args.rounds)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(machine.caption([dict(machine=machine.this_machine())]))
    print(f"\n| {' | '.join(HEADS)} |\n{'|---' * len(HEADS)}|")
    for dtype in (torch.float32, torch.bfloat16):
        if dtype != torch.float32 and not multiplies(dtype):
            continue
        for rows in args.rows or (1, 2, 3, 4, 8, 32):
            form = form_for(dtype, rows=rows, times=1_000_000)
            for copy in (Transposed(), Packed(max(rows, 8))):
                taken = str(form.pays) if type(form) is type(copy) else "not"
                cells = str(dtype)[6:], str(rows), type(copy).__name__, *row_of(dtype, rows, copy, args.rounds), taken
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
