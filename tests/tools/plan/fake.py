"""A model whose pieces cost made-up numbers, and a machine that costs them."""

from tpfuse.models import GPTConfig
from tpfuse.tools.plan.split import ATTENTION, GEMM, MEMORY, TP, Job, Piece, Pieces
from tpfuse.tools.plan.step import Means


def config(layers):
    return GPTConfig(vocab_size=96, max_positions=64, hidden_size=32, num_layers=layers, num_heads=4)


def job(layers=4, batch=8):
    return Job(config(layers), batch, 64)


def piece(seconds, split, *, saved=1.0, parameters=1.0):
    """A piece of ``seconds`` at tp = 1 and one sequence: I and W together take a little longer than B."""
    work = seconds * split.micro_batch / split.tp
    cheap = 0.8 if split.saving == "fastest" and not split.full else 1.0
    part = lambda x: {GEMM: 0.6 * x, ATTENTION: 0.3 * x, MEMORY: 0.1 * x, TP: 0.1 * seconds * (split.tp > 1)}
    back = work * (1 + cheap) + (work if split.full else 0)
    size = split.micro_batch / split.tp * saved * (0.2 if split.full else 1.0 if cheap < 1 else 0.7)
    return Piece(
        {"F": part(work), "B": part(back), "I": part(0.55 * back), "W": part(0.5 * back)},
        saved=size,
        held=0.6 * size,
        transient=0.3 * split.micro_batch,
        parameters=parameters / split.tp,
    )


class Costs:
    """The same pieces for the same question, as w[i] seconds of block i, embedding and head times these."""

    def __init__(self, blocks=(1.0,) * 4, *, embedding=0.3, head=0.7):
        self.blocks, self.ends, self.made = blocks, (embedding, head), {}

    def __call__(self, job, split):
        if split.tp > 4:
            raise ValueError("four heads cannot be split")
        key = split.tp, split.micro_batch, split.saving, split.full
        if key not in self.made:
            embedding, head = (piece(x, split, saved=0.5, parameters=2.0) for x in self.ends)
            blocks = [piece(x, split) for x in self.blocks]
            self.made[key] = Pieces(embedding, blocks, head, rows=split.micro_batch, border=piece(0.01, split, saved=0))
        return self.made[key]


def means(costs=None, *, limit=float("inf"), hop=0.05, hides=True):
    return Means(
        costs or Costs(),
        hop=lambda split, rows: hop * rows * (split.pp > 1),
        sums=lambda split, size: 0.1 * size * (split.dp > 1) * (1.5 if split.sharded else 1.0),
        update=lambda job, split, elements: 0.02 * elements / (split.dp if split.sharded else 1),
        state=lambda job, split, elements: 4.0 * elements.own + 12.0 * elements.shard,
        limit=limit,
        hides=hides,
    )
