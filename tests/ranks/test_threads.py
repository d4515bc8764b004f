"""Threads of a rank that use one group: in turn they may, and where their calls overlap both are named."""

import threading

import pytest
import torch

from tests.common import make_tp
from tests.models.common import STEP_CONFIG, batch
from tpfuse import collectives
from tpfuse.collectives import all_gather, reduce
from tpfuse.models import GPT

CALL = batch(STEP_CONFIG)


class Thread:
    """A thread that does what it is given, one after the other, and keeps its error."""

    def __init__(self, *actions):
        self.error = None
        self.thread = threading.Thread(target=self.run, args=actions, name="another")

    def run(self, *actions):
        try:
            for action in actions:
                action()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def __call__(self):
        self.thread.start()
        return self

    def end(self):
        self.thread.join(60)
        return self.error


def in_turn(world):
    """A model that one thread has made trains in another, and in the first again while that waits."""
    model, wait, done = GPT(STEP_CONFIG, tp=make_tp(world)), threading.Event(), threading.Event()
    train = lambda: model(**CALL).loss.backward()
    other = Thread(
        train, lambda: model.generate(CALL["input_ids"], max_new_tokens=2), done.set, lambda: wait.wait(100)
    )()
    assert done.wait(100), other.error
    train()
    wait.set()
    return other.end()


def test_calls_of_two_threads_in_turn(ranks):
    assert ranks(2, in_turn) == [None, None]


class Held:
    """A hook of a part of a model, which waits in its forward, or in its backward pass."""

    def __init__(self, in_backward):
        self.in_backward, self.reached, self.wait = in_backward, threading.Event(), threading.Event()

    def __call__(self, module, args, output):
        if self.in_backward:
            output.register_hook(lambda gradient: self.hold())
        else:
            self.hold()

    def hold(self):
        self.reached.set()
        self.wait.wait(60)


def overlapping(world, in_backward, backward):
    """-> the error of a call, or a backward pass, while another thread is in one; then both threads' results"""
    model, other = (GPT(STEP_CONFIG, tp=make_tp(world, False)) for _ in range(2))
    loss = other(**CALL).loss
    model.embedding.register_forward_hook(held := Held(in_backward))
    first = Thread(lambda: model(**CALL, step=0).loss.backward())()
    assert held.reached.wait(60), first.error
    with pytest.raises(RuntimeError) as caught:
        loss.backward() if backward else other(**CALL)
    held.wait.set()
    assert first.end() is None
    other(**CALL).loss.backward()  # it goes on
    return str(caught.value)


@pytest.mark.parametrize("backward", [False, True], ids=["a call", "a backward pass"])
@pytest.mark.parametrize("in_backward", [False, True], ids=["in a call", "in a backward pass"])
def test_overlapping_calls_are_named(ranks, in_backward, backward):
    said = ranks(2, overlapping, in_backward, backward)
    mine, others = ("backward" if backward else "GPT.forward"), ("backward" if in_backward else "GPT.forward")
    assert (
        said
        == [
            f"thread 'MainThread' is in {mine} while thread 'another' is in {others}, over the same ranks: these know"
            " messages by their order alone, so one thread at a time calls them"
        ]
        * 2
    )


def in_a_collective(world):
    """-> the error of a collective of a kind that has been compared while another thread is in one"""
    tp, reached, wait = make_tp(world, False), threading.Event(), threading.Event()
    x = torch.ones(3)
    reduce(x, tp)

    def held(y, *args):
        reached.set()
        wait.wait(60)
        return all_gather(y, *args)

    collectives.all_gather = held
    try:
        other = Thread(lambda: reduce(x, tp))()
        assert reached.wait(60), other.error
        with pytest.raises(RuntimeError) as caught:
            reduce(x, tp)
    finally:
        wait.set()
        collectives.all_gather = all_gather
    assert other.end() is None
    return reduce(x, tp).tolist(), str(caught.value)


def test_overlapping_collectives_are_named(ranks):
    said = (
        "thread 'MainThread' is in reduce while thread 'another' is in reduce, over the same ranks: these know messages"
        " by their order alone, so one thread at a time calls them"
    )
    assert ranks(2, in_a_collective) == [([2.0] * 3, said)] * 2
