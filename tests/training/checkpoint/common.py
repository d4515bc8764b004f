"""What the tests of checkpoints share: a model with its optimizer, and all of their state."""

from pathlib import Path

import torch

from tests.models.common import STEP_CONFIG, batch
from tpfuse import param_groups
from tpfuse.models import GPT


def made(config=STEP_CONFIG, steps=0, seed=0, lr=1e-3):
    model = GPT(config, seed=seed)
    optimizer = torch.optim.AdamW(param_groups(model, 0.1), lr=lr)
    for _ in range(steps):
        model(**batch(config)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state(model, optimizer):
    """All there is, as one flat dictionary."""
    flat = {"step": model.step.clone(), "seed": torch.tensor(model.seed)} | {
        n: p.detach().clone() for n, p in model.named_parameters()
    }
    for name, p in model.named_parameters():
        flat |= {f"{name} {k}": v.clone() for k, v in optimizer.state.get(p, {}).items()}
    for i, group in enumerate(optimizer.param_groups):
        flat |= {f"{i} {k}": torch.as_tensor(v).clone() for k, v in group.items() if k != "params" and v is not None}
    return flat


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {"job.json"}
