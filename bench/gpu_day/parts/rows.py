"""The report's rows: every op at its shapes, by tpfuse, torch and yardsticks, or by torch.compile."""

from bench.gpu_day import cases
from bench.gpu_day.part import Context
from tpfuse.tools.bench.roofline import Card
from tpfuse.tools.bench.run import PEERS, BenchCase, Setting, measure

LOSSES = "cross_entropy", "linear_cross_entropy"  # whose forward may do the backward's work: whole steps are compared
SECONDS = 0.3
COMPILED = "by torch.compile: "  # before a case


def jobs(context: Context, ops: tuple[str, ...] = (), but: tuple[str, ...] = (), compiled: bool = False) -> list[str]:
    names = [cases.name_of(*case) for case in cases.in_turn(ops or cases.remaining(but), context.tiny)]
    return [COMPILED * compiled + name for name in names]


def card_of(context: Context) -> Card:
    """Returns the card as the setup measured it."""
    return Card(**next(row["card"] for row in context.rows("setup") if "card" in row))


def run(job: str, context: Context) -> None:
    compiled, name = job.startswith(COMPILED), job.removeprefix(COMPILED)
    bench, shape = cases.case(name)
    mine = ["compile"] if compiled else [who for who in bench.names if who != "compile" and who not in PEERS]
    modes = ["fwd", "bwd", "step"] if bench.name in LOSSES else ["fwd", "bwd"]
    setting = Setting(card_of(context), context.device, 0.0 if context.tiny else SECONDS, keep=context.emit)
    measured_rows, notes, _ = measure(BenchCase(bench, shape, "bf16", modes, mine), setting)
    for note in notes:
        context.emit(dict(note=note))
    if not measured_rows:
        raise RuntimeError("; ".join(notes))


def headline(rows: list[dict]) -> str:
    ours = [row for row in rows if row.get("provider") == "tpfuse" and row["roofline"] is not None]
    ours = [row for row in ours if row.get("bound") != "cache"]
    if not ours:
        return f"{len([row for row in rows if 'op' in row])} rows"
    worst = min(ours, key=lambda row: row["roofline"])
    place = f"{worst['op']} {worst['shape']} {worst['mode']}"
    return f"{len(ours)} rows of tpfuse; farthest from its roofline: {place}, {100 * worst['roofline']:.0f} %"
