"""All-reduce from sends and receives: its messages sum, and count what the table says."""

import pytest
import torch
import torch.distributed as dist

from tpfuse.__main__ import main
from tpfuse.plan import ALL_REDUCE, Link, cheapest, seconds
from tpfuse.tools.plan import collectives as plan

BYTES = 97.5 * 2**20  # of ResNet-50's gradients
ELEMENTS = 420  # of a buffer, which 2, 3 and 4 parts cut evenly


def most(messages, size):
    """The sum over rounds of the most that any node sends or receives, where a message counts as ``size`` of it."""
    total = 0
    for exchange in messages.rounds:
        sent, received = [0] * messages.nodes, [0] * messages.nodes
        for x in exchange:
            sent[x.source] += size(x)
            received[x.to] += size(x)
        total += max(*sent, *received)
    return total


@pytest.mark.parametrize("name", ALL_REDUCE)
def test_the_table_is_what_the_messages_count(name):
    algorithm = ALL_REDUCE[name]
    for n in range(2, 70):
        messages = algorithm.messages(n)
        assert len(messages.rounds) == algorithm.rounds(n), n
        if name != "in-network":
            assert most(messages, lambda x: 1) == algorithm.busiest(n), n
            assert most(messages, lambda x: x.end - x.begin) / messages.parts == pytest.approx(algorithm.volume(n)), n


def test_switches_forward_one_buffer_a_port():
    """Why in-network sums take one buffer's time: a link carries no more, either way, and all are at work at once."""
    messages = ALL_REDUCE["in-network"].messages(70)
    carried = [(x.source, x.to) for exchange in messages.rounds for x in exchange]
    assert len(set(carried)) == len(carried) and messages.nodes == 70 + 3 + 1


def all_reduced(world, name, n):
    """This rank's buffer after the messages of ``name``, and what it has sent: [messages, bytes]."""
    messages = (plan.servers(2) if name == "two servers" else ALL_REDUCE[name]).messages(n)
    values = torch.randn(ELEMENTS, dtype=torch.float64, generator=torch.Generator().manual_seed(world.rank))
    buffer = values if world.rank < n else torch.zeros(ELEMENTS, dtype=torch.float64)
    expected = buffer.clone()
    dist.all_reduce(expected)
    part, sent = ELEMENTS // messages.parts, [0, 0]
    for exchange in messages.rounds:
        waiting, arriving = [], []
        for tag, x in enumerate(exchange):
            span = slice(x.begin * part, x.end * part)
            if x.source == world.rank:
                data = buffer[span].clone()
                sent[0], sent[1] = sent[0] + 1, sent[1] + data.nbytes
                waiting.append(dist.isend(data, x.to, tag=tag))
            if x.to == world.rank:
                room = torch.empty(part * (x.end - x.begin), dtype=torch.float64)
                waiting.append(dist.irecv(room, x.source, tag=tag))
                arriving.append((x, span, room))
        for message in waiting:
            message.wait()
        for x, span, room in arriving:
            buffer[span] = buffer[span] + room if x.adds else room
    error = float((buffer - expected).abs().max()) if world.rank < n else 0.0
    return error, buffer if world.rank < n else None, sent


CASES = [(name, n) for name in ("ring", "halving-doubling", "tree", "direct", "all-to-all") for n in (2, 3, 4)]
CASES += [("parameter server", 2), ("parameter server", 3), ("two servers", 2), ("in-network", 2), ("in-network", 3)]


@pytest.mark.parametrize("name, n", CASES)
def test_run_they_are_an_all_reduce(ranks, name, n):
    algorithm = plan.servers(2) if name == "two servers" else ALL_REDUCE[name]
    messages = algorithm.messages(n)
    results = ranks(messages.nodes, all_reduced, name, n)
    assert max(error for error, _, _ in results) < 1e-14
    if name != "all-to-all":  # where every rank adds in another order
        assert all(torch.equal(buffer, results[0][1]) for _, buffer, _ in results[:n])  # the same bits on every rank
    for node, (_, _, sent) in enumerate(results):
        listed = [x for exchange in messages.rounds for x in exchange if x.source == node]
        assert sent == [len(listed), 8 * ELEMENTS * sum(x.end - x.begin for x in listed) // messages.parts]
    if name in ("ring", "direct"):
        assert {sent[1] for _, _, sent in results} == {8 * ELEMENTS * 2 * (n - 1) // n}


def test_resnet_50_through_a_parameter_server():
    """256 workers, 97.5 MB of gradients, a third of a second: 73.1 GB/s each way (binary units; half the volume goes
    in, half out)."""
    each_way = ALL_REDUCE["parameter server"].volume(256) / 2 * BYTES / (1 / 3)
    assert each_way / 2**30 == pytest.approx(73.1, abs=0.05)
    assert seconds(ALL_REDUCE["parameter server"], 256, BYTES, Link(0.0, each_way)) == pytest.approx(2 / 3)


def test_which_is_cheapest():
    link = Link(5e-6, 25e9, overhead=1e-6)
    assert [cheapest(n, 64, link)[0] for n in (4, 64, 1024)] == ["direct", *["halving-doubling"] * 2]
    assert cheapest(48, 1e9, link)[0] == "direct" and cheapest(48, 64, link)[0] == "halving-doubling"
    assert seconds(ALL_REDUCE["halving-doubling"], 64, 64, link) < seconds(ALL_REDUCE["ring"], 64, 64, link)
    ring, tree = (seconds(ALL_REDUCE[name], 64, 1e9, link) for name in ("ring", "tree"))
    assert ring < tree / 5 and seconds(ALL_REDUCE["in-network"], 64, 1e9, link) < ring * 0.6
    assert seconds(ALL_REDUCE["ring"], 1, 1e9, link) == 0


def test_sparse_sums():
    """Volumes by drawing what ranks send; Ok-Topk's words are counted in tests/training/ok_topk."""
    n, density, elements = 8, 0.05, 100_000
    sent = torch.rand(n, elements, generator=torch.Generator().manual_seed(0)) < density
    drawn = float(sent.any(0).double().mean())
    algorithms = plan.sparse(density)
    assert algorithms["in-network, sparse"].volume(n) == pytest.approx(2 * drawn, rel=0.02)
    received = float(sent[1:].double().sum()) / elements
    assert algorithms["gathered"].volume(n) == pytest.approx(2 * received, rel=0.02)
    assert algorithms["Ok-Topk"].volume(n) == pytest.approx(2 * density * ALL_REDUCE["direct"].volume(n))
    assert plan.sparse(1.0)["in-network, sparse"].volume(n) == ALL_REDUCE["in-network"].volume(n)
    assert all(algorithm.volume(n) == 0 for algorithm in plan.sparse(0.0).values())


def test_a_density_prints_sparse_sums(capsys):
    assert main(["collectives", "--ranks", "4,64", "--sizes", "1048576", "--density", "0.01"]) == 0
    text = capsys.readouterr().out
    rows = {line[14:33].strip(): line.split()[-4:] for line in text.splitlines() if line.startswith("1.05 MB  ")}
    assert list(rows)[1:] == ["ring", "in-network", "gathered", "Ok-Topk", "in-network, sparse"]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: plan.sparse(1.5), "density must be from 0 to 1, got 1.5"),
        (lambda: seconds(ALL_REDUCE["ring"], 0, 1, Link(0, 1)), "ranks must be a positive integer, got 0"),
        (lambda: seconds(ALL_REDUCE["ring"], 2, -1, Link(0, 1)), "must not be negative, got -1"),
        (lambda: seconds(ALL_REDUCE["ring"], 2, 1, Link(0, 0)), r"overhead >= 0 and bandwidth > 0, got Link\("),
        (lambda: plan.servers(0), "at least one machine, got 0"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
