"""accelerate in a worker of the pool as under torchrun, and a small task for it."""

import contextlib
import os

import pytest
import torch
import transformers

from tpfuse import TensorParallel, parallelize
from tpfuse.models.files.write import whole_tensors

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
VOCAB, LENGTH = 61, 9


@contextlib.contextmanager
def launched(world):
    """torchrun's variables, and none of accelerate's singletons before or after."""
    from accelerate.state import AcceleratorState, GradientState

    def forget():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    names = dict(RANK=world.rank, LOCAL_RANK=world.rank, WORLD_SIZE=world.size, LOCAL_WORLD_SIZE=world.size)
    names |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=29500)
    kept = dict(os.environ)
    os.environ.update({name: str(value) for name, value in names.items()})
    forget()
    try:
        yield
    finally:
        forget()
        os.environ.clear()
        os.environ.update(kept)


def small(seed=0, dtype=torch.float32, **options):
    torch.manual_seed(seed)
    sizes = dict(vocab_size=VOCAB, n_positions=16, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | options)).to(dtype)


def split(world, dp, tp, bitwise=None, cp=1, **options):
    mesh = world.pieces(dp, cp, tp)
    ranks = TensorParallel(mesh["tp"], bitwise=bitwise, cp=mesh["cp"])
    return parallelize(small(**options), ranks, dp=mesh["dp"], seed=3)


def rows(count=24, seed=0, ragged=True):
    """Rows of which, where they are ragged, each has another number of labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (count, LENGTH), generator=generator)
    labels = ids.clone()
    for i, row in enumerate(labels if ragged else []):
        row[: i % 6] = -100
    return [dict(input_ids=i, labels=j) for i, j in zip(ids, labels, strict=True)]


def said(attempt):
    with pytest.raises(ValueError) as caught:
        attempt()
    return str(caught.value)


def weights(model):
    return {name: tensor.float().clone() for name, tensor in whole_tensors(model.parallel.files)}
