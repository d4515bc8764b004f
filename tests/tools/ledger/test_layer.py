"""One BERT-large layer: the operator table's totals, plain torch against them, and what tpfuse's block may move at
most."""

import pytest
import torch

from tpfuse.kernels.gemm import triton_gemm as _gemm
from tpfuse.kernels.runtime.launch import pretending
from tpfuse.models import GPTConfig
from tpfuse.parallel import TensorParallel
from tpfuse.tools.ledger.aten import COMMUNICATION, GEMM
from tpfuse.tools.ledger.dryrun import fake_world
from tpfuse.tools.ledger.layer import PLAIN, TABLE, TABLE_FLASH, TABLE_FUSED, compare, take_block, trace
from tpfuse.tools.ledger.operators import FUSED, UNFUSED, LayerSizes, flash
from tpfuse.tools.ledger.plots import edges, layer_map
from tpfuse.tools.ledger.presets import load_config

BERT_LARGE = LayerSizes(B=8, S=512, D=1024, H=16, F=4096)
AT_MOST = {"fastest": 835e6, "smallest": 905e6}  # bytes in and out of the ops, forward + backward at 16 bit
# As launched, more: attention's backward reads its operands in three kernels and the norms' partial sums are added in
# a second (60 MB); an activation in a pass of its own, which is the path until a GPU has measured otherwise, costs
# 102 MB on top.
LAUNCHED = {"fused": {"fastest": 885e6, "smallest": 955e6}, "torch": {"fastest": 985e6, "smallest": 1055e6}}


@pytest.fixture(scope="module")
def bert():
    with pretending("sm_90"):  # as the command line has it
        return compare(load_config("bert-large"), batch=8, seq=512)


def column(comparison, title):
    return next(c for c in comparison.columns if c.title == title)


@pytest.mark.parametrize(
    "operators, words, outside, flops",
    [(UNFUSED, 1216.3, 725.6, 335.007), (FUSED, 1061.2, 570.4, 335.007), (flash(FUSED), 591.4, 302.0, 335.007)],
    ids=["unfused", "fused", "flash"],
)
def test_the_operator_table_adds_up(operators, words, outside, flops):
    rows = [(o, BERT_LARGE.row(o, 1)) for o in operators]
    assert round(sum(r.moved for _, r in rows) / 1e6, 1) == words
    assert round(sum(r.moved for o, r in rows if o.kind != GEMM) / 1e6, 1) == outside
    assert round(sum(r.flops for _, r in rows) / 1e9, 3) == flops


def test_flash_saves_fourteen_times_the_scores():
    total = lambda operators: sum(BERT_LARGE.row(o, 1).moved for o in operators)
    assert total(FUSED) - total(flash(FUSED)) == 14 * BERT_LARGE.symbols()["P"]


def test_columns_have_the_tables_totals(bert):
    words = {c.title: round(c.total().moved / 2e6, 1) for c in bert.columns}
    assert [words[title] for title in (TABLE, TABLE_FUSED, TABLE_FLASH)] == [1216.3, 1061.2, 591.4]


def test_plain_torch_computes_what_the_table_says(bert):
    assert column(bert, PLAIN).total().flops == column(bert, TABLE).total().flops


def test_the_difference_is_explained_to_the_word(bert):
    """Part by part: T = 4.194 M words, and so on; only vectors (biases, statistics) are left, under 0.1 %."""
    n = BERT_LARGE.symbols()
    T, Q, P, U = n["T"], n["Q"], n["P"], n["U"]
    expected = {
        "matrix products": 0,
        "biases": -2 * (Q + 2 * T + U),
        "scale and softmax": 6 * P,  # scale 2 + softmax 2 + dropout 2.5 for 4 forward, 7.5 for 4 backward
        "dropout": -4 * T / 2 - 2 * U / 2,
        "norms": -2 * 2 * T,
        "activation, residual": 0,
        "copies": 22 * T,
    }
    found = {part: torch_words - table_words for part, torch_words, table_words, _ in bert.difference()}
    assert found == pytest.approx(expected, abs=1e-3 * column(bert, TABLE).total().moved / 2)
    total = column(bert, PLAIN).total().moved - column(bert, TABLE).total().moved
    assert sum(found.values()) == total / 2


@pytest.mark.parametrize("path", LAUNCHED)
@pytest.mark.parametrize("saving", AT_MOST)
@pytest.mark.parametrize("model", ["post-norm", "pre-norm"])
def test_a_block_in_a_stack_moves_at_most(monkeypatch, model, saving, path):
    parameters = _gemm.parameters
    monkeypatch.setattr(_gemm, "parameters", lambda *args, **named: parameters(*args, **named) | dict(path=path))
    gpt = GPTConfig(vocab_size=1024, max_positions=512, hidden_size=1024, num_layers=2, num_heads=16)
    with pretending("sm_90"):
        config = load_config("bert-large") if model == "post-norm" else gpt
        ledger = trace(take_block(config, batch=8, seq=512, saving=saving, dtype=torch.bfloat16))
    assert 700e6 < ledger.total().least <= AT_MOST[saving]
    assert ledger.total().least < ledger.total().moved <= LAUNCHED[path][saving]
    assert ledger.total(kind=GEMM).flops == 24 * 4096 * 1024**2 * 3


def test_a_rank_sends_row_tiles():
    """R = 4: each of ten crossings (and two more of nothing but 6 x D numbers) sends this rank's rows to three
    peers."""
    config = GPTConfig(vocab_size=1024, max_positions=512, hidden_size=256, num_layers=2, num_heads=8)
    with fake_world(4) as mesh:
        tp = TensorParallel(mesh["tp"], sequence_parallel=True)
        ledger = trace(take_block(config, batch=2, seq=512, saving="fastest", dtype=torch.bfloat16, tp=tp))
    tile, vectors = 3 * 256 * 256 * 2, 3 * 6 * 256 * 4
    assert ledger.total(kind=COMMUNICATION).wire == 10 * tile + vectors


def test_one_rank_of_several_has_tpfuses_columns_alone():
    bert = load_config("bert-large")
    with fake_world(2) as mesh:
        text = str(compare(bert, batch=2, seq=64, tp=TensorParallel(mesh["tp"])))
    assert TABLE not in text and "tpfuse smallest" in text


def test_printed(bert):
    text = str(bert)
    assert all(word in text for word in ("335.007 G", "1216.3 M", "1061.2 M", "B=8, S=512, D=1024, H=16, F=4096"))
    assert max(map(len, text.splitlines())) <= 140


def test_edges_carry_the_bytes_that_are_read(bert):
    """Every byte an entry takes in is an edge's; a saved tensor's edge goes from forward to backward."""
    entries = bert.traces["tpfuse fastest"].entries
    found = edges(entries)
    for i, e in enumerate(entries):
        assert sum(size for _, end, size in found if end == i) == sum(size for _, size in e.inputs)
    across = [(a, b) for a, b, _ in found if a is not None and b is not None and entries[a].phase != entries[b].phase]
    assert len(across) > 10


@pytest.mark.slow
def test_the_map_is_drawn(bert, tmp_path):
    pytest.importorskip("matplotlib")
    layer_map(bert, tmp_path / "deep" / "map.png")
    assert (tmp_path / "deep" / "map.png").read_bytes()[:4] == b"\x89PNG"
