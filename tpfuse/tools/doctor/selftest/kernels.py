"""Runs the cases on a device and, by the ops' definitions in fp64, on the CPU."""

import contextlib

import torch
from torch import Tensor

from ....kernels import dropout
from ....kernels.runtime.philox import Mask, keep_rows, make_rng
from ..report import FAULT, Finding
from .blame import blamed
from .cases import SelfTest, cases
from .compare import ADVICE, TensorError, findings, short, tensor_errors
from .references import OpCall, References

DTYPES = torch.float32, torch.bfloat16
RUNS = 3  # on a GPU a launcher's first call is recorded, the second replayed, the third found by its tensors


def results(device: torch.device) -> list[Finding]:
    """Returns a line for each case that is right, or one for each of its tensors that is wrong."""
    return [*(finding for case in cases() for finding in tried(case, device)), masks(device)]


def tried(case: SelfTest, device: torch.device) -> list[Finding]:
    """Returns the lines of one case; an exception is a fault of that case."""
    results: list[TensorError] = []
    calls: list[OpCall] = []
    try:
        for dtype in DTYPES:
            exact, calls = by_definition(case, dtype)
            for _ in range(RUNS):
                results += tensor_errors(run(case, dtype, device, rounded=dtype), exact, dtype)
        return findings(case.name, results, "" if all(r.ok for r in results) else blamed(calls, device))
    except Exception as error:
        message = f"{type(error).__name__} in {short(dtype)}: {error}{blamed(calls, device)}"
        return [Finding(case.name, message, FAULT, ADVICE)]


def by_definition(case: SelfTest, dtype: torch.dtype) -> tuple[dict[str, Tensor], list[OpCall]]:
    """Returns the outputs and gradients in fp64 of inputs rounded to ``dtype``, and the calls of ops."""
    with References() as references:
        exact = run(case, torch.float64, torch.device("cpu"), rounded=dtype)
    return exact, references.calls


def run(case: SelfTest, dtype: torch.dtype, device: torch.device, *, rounded: torch.dtype) -> dict[str, Tensor]:
    """Returns outputs and gradients in ``dtype`` on ``device``, of inputs that are ``rounded`` to a dtype."""
    inputs = {name: t.to(rounded).to(device, dtype).requires_grad_(case.backward) for name, t in case.tensors.items()}
    fixed = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in case.fixed.items()}
    with contextlib.nullcontext() if case.backward else torch.no_grad():
        result = case.function(**inputs, **fixed)
    outputs = list(result) if isinstance(result, tuple) else [result]
    named = {f"output {i}" if len(outputs) > 1 else "output": t.detach() for i, t in enumerate(outputs)}
    if case.backward:
        gradients = [incoming(t, rounded) for t in outputs]
        results = torch.autograd.grad(outputs, list(inputs.values()), gradients)
        named |= {f"gradient of {name}": t for name, t in zip(inputs, results)}
    return named


def incoming(output: Tensor, rounded: torch.dtype) -> Tensor:
    """Returns the gradient that comes in: the same numbers on every device and in every dtype, once rounded."""
    generator = torch.Generator().manual_seed(output.numel())
    exact = torch.randn(output.shape, generator=generator, dtype=torch.float64, device="cpu")
    return exact.to(rounded).to(output.device, output.dtype)


def masks(device: torch.device) -> Finding:
    """Compares the dropout mask bitwise with Philox on the CPU."""
    rng, p, rows, columns = make_rng(11, 2, 5, device="cpu"), 0.3, 33, 67
    drawn = dropout(torch.ones(rows, columns, device=device), p, rng=rng.to(device), site=9, batch=2) != 0
    same = torch.equal(drawn.cpu(), keep_rows(Mask(rng, p, 9, first_row=0, batch=2), rows, columns, torch.bool))
    if same:
        return Finding("dropout's mask", "bitwise that of Philox on the CPU")
    return Finding("dropout's mask", "differs from Philox on the CPU, op dropout_fwd", FAULT, ADVICE)
