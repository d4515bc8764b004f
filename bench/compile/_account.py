"""The clocks that the pipes of an H100 are busy with one turn of a kernel's main loop, counted in its SASS.

The clock is that of one of an SM's four schedulers, which has a quarter of the block's warps.  Rates are those of the
table of throughputs in CUDA's guide, for compute capability 9.0; a wide IMAD is taken for two.  Nothing is measured:
the account is a prediction that the first run on a card confirms or refutes.
"""

import math
import re
from typing import NamedTuple

from bench.compile._disassembly import Instruction

FLOPS = dict(H=1024, I=2048)  # of a scheduler's tensor core in a clock: 16 bits, int8
MMA_SYNC = 2  # how much longer HMMA takes than HGMMA
BYTES = 3.35e12 / (132 * 4 * 1.755e9)  # of HBM for a scheduler in a clock
FP32 = "FFMA", "FMUL", "FADD", "HFMA2", "HMUL2", "HADD2"
GLOBAL = "LDG", "STG", "LDGSTS"
MEMORY = *GLOBAL, "LDS", "STS", "LDSM", "STSM", "LDL", "STL", "SHFL", "ATOMG", "RED"
CONTROL = (
    "BRA", "BAR", "EXIT", "BSSY", "BSYNC", "WARPSYNC", "WARPGROUP", "DEPBAR", "LDGDEPBAR", "SYNCS", "FENCE", "MEMBAR",
    "ELECT", "R2UR", "S2R", "S2UR", "CS2R", "VOTE", "YIELD", "CALL", "RET", "LDC", "ERRBAR", "CCTL", "NANOSLEEP",
)  # fmt: skip


class Account(NamedTuple):
    """Clocks of each pipe, and the share of its roofline that the loop can reach: of the tensor cores where it
    multiplies tiles, otherwise of HBM (where its loads and stores miss every cache)."""

    tensor: int
    issue: int
    alu: int
    fma: int
    mufu: int
    memory: int
    hbm: int
    in_turn: float  # the roofline's pipe waits while the others work
    overlapped: float  # it never waits


def loops(code: list[Instruction]) -> list[tuple[int, int]]:
    """(start, end) address of every loop; what waits behind the last EXIT jumps back into one, and counts as another,
    longer one."""
    ranges = []
    for address, opcode, operands in code:
        target = re.findall(r"0x([0-9a-f]+)", operands)
        if opcode == "BRA" and target and int(target[-1], 16) < address:
            ranges.append((int(target[-1], 16), address))
    return ranges


def account(code: list[Instruction], threads: int) -> Account:
    """Returns the account of the main loop: the shortest of those that multiply tiles and hold no other such loop,
    which masks none of them; without one the largest loop, or the whole kernel."""
    body = _main_loop(code)
    warps = threads / 128  # a scheduler's
    busy = dict.fromkeys(Account._fields, 0.0)
    for _, opcode, _ in body:
        for pipe, clocks in _clocks(opcode).items():
            busy[pipe] += clocks * warps
    pipes = {name: round(clocks) for name, clocks in busy.items()}
    roofline = busy["tensor"] or busy["hbm"]
    other_pipes = max(busy[name] for name in ("issue", "alu", "fma", "mufu", "memory"))
    share = lambda clocks: round(roofline / clocks, 2) if clocks else 0.0
    return Account(**pipes | dict(in_turn=share(roofline + other_pipes), overlapped=share(max(roofline, other_pipes))))


def _main_loop(code: list[Instruction]) -> list[Instruction]:
    end = max((i.address for i in code if i.opcode == "EXIT"), default=math.inf)
    bodies = [[i for i in code if start <= i.address <= stop] for start, stop in sorted(loops(code)) if stop < end]
    products = [body for body in bodies if any(_clocks(i.opcode).get("tensor") for i in body)]
    inner = [
        body
        for body in products
        if not any(
            o is not body and body[0].address <= o[0].address and o[-1].address <= body[-1].address for o in products
        )
    ]
    return min(inner, key=len) if inner else max(bodies, key=len, default=code)


def _clocks(opcode: str) -> dict[str, float]:
    """{pipe: clocks} of one warp's instruction."""
    base = opcode.split(".")[0]
    busy = dict(issue=1.0)
    if shape := re.match(r"([HI])GMMA\.(\d+)x(\d+)x(\d+)", opcode):  # of a warpgroup, a quarter on each scheduler
        m, n, k = map(int, shape.groups()[1:])
        return busy | dict(tensor=2 * m * n * k / 4 / FLOPS[shape[1]])
    if shape := re.match(r"([HI])MMA\.(16)(8)(\d+)", opcode):
        m, n, k = map(int, shape.groups()[1:])
        return busy | dict(tensor=MMA_SYNC * 2 * m * n * k / FLOPS[shape[1]])
    if base in GLOBAL:
        width = re.search(r"\.(?:U|S)?(8|16|64|128)\b", opcode)
        return busy | dict(memory=4.0, hbm=32 * int(width[1] if width else 32) / 8 / BYTES)
    if base in MEMORY:
        return busy | dict(memory=4.0)
    if base == "MUFU":
        return busy | dict(mufu=8.0)
    if base in FP32:
        return busy | dict(fma=1.0)
    if base == "IMAD":
        return busy | dict(fma=4.0 if ".WIDE" in opcode or ".HI" in opcode else 2.0)
    if base.startswith("U") or base in CONTROL:
        return busy
    return busy | dict(alu=2.0)
