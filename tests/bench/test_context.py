"""The bench of context parallelism: the ring that it compares with, its tables and a tiny run."""

import json

import pytest
import torch
import torch.nn.functional as F

from bench import documents
from bench.context import GROUPS, RANKS, page
from bench.context.__main__ import main
from bench.context.ring import RingAttention
from tests.common import error

H, G, E = 4, 2, 8


def tensors(seq):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, seq, E, generator=g, dtype=torch.float64) for n in (H, G, G, H)]


def ring(world):
    """-> o and the gradients of q, k and v on this rank's two chunks."""
    seq = 16 * world.size
    q, k, v, do = (t.chunk(2 * world.size, 2) for t in tensors(seq))
    mine = lambda chunks: torch.cat([chunks[world.rank], chunks[-1 - world.rank]], 2)
    q, k, v = (mine(t).requires_grad_() for t in (q, k, v))
    o = RingAttention.apply(q, k, v)
    o.backward(mine(do))
    return o.detach(), q.grad, k.grad, v.grad


@pytest.mark.parametrize("R", [2, 3])
def test_ring(ranks, R):
    *qkv, do = tensors(16 * R)
    q, k, v = (t.requires_grad_() for t in qkv)
    o = F.scaled_dot_product_attention(q, *(t.repeat_interleave(H // G, 1) for t in (k, v)), is_causal=True)
    o.backward(do)
    exact = [t.chunk(2 * R, 2) for t in (o.detach(), q.grad, k.grad, v.grad)]
    for rank, found in enumerate(ranks(R, ring)):
        for got, chunks in zip(found, exact, strict=True):
            assert error(got, torch.cat([chunks[rank], chunks[-1 - rank]], 2)) <= 1e-6  # dk and dv travel in fp32


def result():
    figures = lambda names: dict.fromkeys(("seconds", "over"), {name: [0.1, 0.2, 0.3] for name in names})
    row = {group: figures(kinds) for group, kinds in GROUPS.items()}
    memory = [dict(seq=seq) | {str(ranks): seq / ranks for ranks in RANKS} for seq in (1024, 2048)]
    return dict(rows=[row | dict(gbit=1.0), row | dict(gbit=0.0)], memory=memory)


def test_tables():
    assert page.memory(result()).splitlines()[2] == "| 1,024 | 1024 | 512 | 256 |"
    lines = page.speed([result()]).splitlines()
    assert lines[0] == "|  | kind | 1 Gbit/s: ms, over the first | one machine: ms, over the first |"
    assert len([line for line in lines if line.startswith("|")]) == 2 + sum(map(len, GROUPS.values()))
    assert lines[2].startswith("| attention, 8 kv heads | heads | 200, 0.20 (0.10 to 0.30) |")
    one_link = result() | {"rows": result()["rows"][:1]}
    cells = page.speed([result(), one_link]).splitlines()[2].split(" | ")  # a column a link and processor
    assert len(cells) == 6 and cells[2] == cells[3] == cells[4] and "not measured yet" in cells[5]


def test_picture(tmp_path):
    page.draw(result(), tmp_path / "context.png")
    assert (tmp_path / "context.png").stat().st_size > 0


@pytest.mark.parametrize("part", page.parts([]))
def test_the_document_is_what_the_results_say(part):
    """After a new result: python -m bench.context.page"""
    text, made = page.PAGE.read_text(), page.parts(page.of_kinds("context"))
    assert documents.replaced(text, page.COMMAND, part, made[part]) == text
    assert "not measured yet" in page.parts([])[part]


@pytest.mark.slow
def test_a_tiny_run(tmp_path, capsys):
    main(["--rate", "0", "--rounds", "2", "--seq", "64", "--lengths", "64", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert {*found["rows"][0]} == {"gbit", *GROUPS} and {*found["memory"][0]} == {"seq", "1", "2", "4"}
    assert page.speed([found]) in capsys.readouterr().out
