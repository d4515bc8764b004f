"""Whose matrices are handed over: those of a parameter, its views and casts, as long as the receiver lives."""

import io

import torch
from torch import nn

from tpfuse.kernels.runtime.captures import capture, captured_by, captures, capturing
from tpfuse.kernels.runtime.main_grad import cast


class Receiver:
    def __init__(self):
        self.pairs = []

    def receive(self, dy, x):
        self.pairs.append((dy, x))


def test_a_parameter_its_views_and_casts():
    p, q, receiver = nn.Parameter(torch.ones(2, 3, 4)), nn.Parameter(torch.ones(3)), Receiver()
    capture(p, receiver.receive)
    assert capturing() and captures(q, None) is None
    half = cast(p.view(6, 4), torch.bfloat16)
    for weight in (p, p.view(6, 4), half, half.view(24)):
        (receive, nothing) = captures(weight, q)
        receive(1, 2)
        assert nothing is None
    assert receiver.pairs == [(1, 2)] * 4
    assert captures(p[0]) is None and captures(p.detach() * 1) is None  # a part, and another tensor


def test_no_longer_than_the_receiver():
    p, receiver = nn.Parameter(torch.ones(3)), Receiver()
    capture(p, receiver.receive)
    del receiver
    assert captured_by(p) is None and captures(p) is None


def test_a_file_leaves_the_capture_behind():
    p, receiver, file = nn.Parameter(torch.ones(3)), Receiver(), io.BytesIO()
    capture(p, receiver.receive)
    torch.save(p, file)
    file.seek(0)
    assert captured_by(torch.load(file, weights_only=True)) is None and captured_by(p) is not None
