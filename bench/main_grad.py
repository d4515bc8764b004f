"""Errors of a gradient that is accumulated over micro-batches: what bf16 loses, and what main_grad keeps.

    python -m bench.main_grad

A GPT of one layer with bf16 weights, the parameters of all of it as one vector.  The exact sum is that, in fp64, of
each micro-batch's own gradient in fp32; the error is the norm of the difference over the norm of the sum.
"""

import torch
from torch import Tensor

from tpfuse import MainGrad
from tpfuse.models import GPT, GPTConfig
from tpfuse.tools.accuracy import rms_error
from tpfuse.tools.ledger.layer import default_dtype

CONFIG = GPTConfig(vocab_size=97, max_positions=32, hidden_size=48, num_layers=1, num_heads=4, ffn_size=84)
COUNTS = 1, 4, 16, 64


def model() -> GPT:
    with default_dtype(torch.bfloat16):
        return GPT(CONFIG)


def backward(model: GPT, i: int) -> None:
    ids = torch.randint(CONFIG.vocab_size, (2, 16), generator=torch.Generator().manual_seed(i))
    model(ids, labels=ids, step=0, first_sample=2 * i).loss.backward()


def flat(gradients: list[Tensor]) -> Tensor:
    return torch.cat([g.double().flatten() for g in gradients])


def errors(micro_batches: int) -> tuple[float, float]:
    """Returns the relative errors of .grad in bf16 and of main_grad."""
    plain, added = model(), model()
    main = MainGrad(added)
    exact = torch.zeros(())
    for i in range(micro_batches):
        backward(added, i)
        exact = exact + flat([p.main_grad for p in added.parameters()])
        main.zero()
    for i in range(micro_batches):
        backward(plain, i)
        backward(added, i)
    of = lambda gradients: rms_error(flat(gradients), exact)
    return of([p.grad for p in plain.parameters()]), of([p.main_grad for p in added.parameters()])


if __name__ == "__main__":
    print("| micro-batches | .grad in bf16 | main_grad |\n|---|---|---|")
    for count in COUNTS:
        print("| {} | {:.1e} | {:.1e} |".format(count, *errors(count)))
