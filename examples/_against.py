"""A model of one's own against the same model of transformers: its weights in, the differences out."""

import copy
import functools
import re
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# A module or parameter of ours, with * for the number of a block -> theirs.  Several of theirs are one of ours, side by
# side: q, k and v of a head in [heads, 3, head width, D], gate and up of an MLP in [F, 2, D].
Names = Mapping[str, str | tuple[str, ...]]

VIT_NAMES = {
    "class_token": "vit.embeddings.cls_token",
    "positions": "vit.embeddings.position_embeddings",
    "patches": "vit.embeddings.patch_embeddings.projection",
    "blocks.*.input_norm": "vit.layers.*.layernorm_before",
    "blocks.*.attention.qkv": tuple(f"vit.layers.*.attention.{x}_proj" for x in "qkv"),
    "blocks.*.attention.out": "vit.layers.*.attention.o_proj",
    "blocks.*.attention_norm": "vit.layers.*.layernorm_after",
    "blocks.*.mlp.fc1": "vit.layers.*.mlp.fc1",
    "blocks.*.mlp.fc2": "vit.layers.*.mlp.fc2",
    "norm": "vit.layernorm",
    "classifier": "classifier",
}


def _t5_names() -> Names:
    names = {"embedding": "shared", "head": "lm_head"}
    for stack, mlp in ("encoder", 1), ("decoder", 2):
        block, layer = f"{stack}.blocks.*", f"{stack}.block.*.layer"
        names[f"{stack}.bias"] = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
        names[f"{stack}.norm"] = f"{stack}.final_layer_norm"
        names |= {f"{block}.norms.{i}": f"{layer}.{i}.layer_norm" for i in range(mlp + 1)}
        names[f"{block}.attention.qkv"] = tuple(f"{layer}.0.SelfAttention.{x}" for x in "qkv")
        names[f"{block}.attention.out"] = f"{layer}.0.SelfAttention.o"
        names[f"{block}.cross.q"] = f"{layer}.1.EncDecAttention.q"
        names[f"{block}.cross.kv"] = tuple(f"{layer}.1.EncDecAttention.{x}" for x in "kv")
        names[f"{block}.cross.out"] = f"{layer}.1.EncDecAttention.o"
        names[f"{block}.mlp.fc1"] = tuple(f"{layer}.{mlp}.DenseReluDense.wi_{x}" for x in (0, 1))
        names[f"{block}.mlp.fc2"] = f"{layer}.{mlp}.DenseReluDense.wo"
    return names


T5_NAMES = _t5_names()


def moved(reference: nn.Module, device: torch.device) -> nn.Module:
    """In fp64 throughout, every parameter moved away from the zeros or ones that it starts as, and a head of its own.

    T5 v1.1 does not tie its head to the embedding; some versions of transformers do.
    """
    reference = reference.to(device, torch.float64).eval()
    if hasattr(reference, "lm_head"):
        reference.lm_head.weight = nn.Parameter(reference.lm_head.weight.detach().clone())
    with torch.no_grad():
        for p in reference.parameters():
            p += 0.1 * torch.randn_like(p)
    for norm in (m for m in reference.modules() if hasattr(m, "variance_epsilon")):  # which computes in fp32
        norm.forward = functools.partial(F.rms_norm, normalized_shape=norm.weight.shape, weight=norm.weight, eps=1e-6)
    return reference


def translated(model: nn.Module, reference: Mapping[str, Tensor], names: Names) -> dict[str, Tensor]:
    """Returns their tensors, whole, by the names and in the shapes of ours."""
    state = {}
    for name, value in model.state_dict().items():
        block = re.search(r"(?<=\.)\d+(?=\.)|$", name)[0]
        pattern = name.replace(f".{block}.", ".*.", 1) if block else name
        owner, _, leaf = pattern.rpartition(".")
        parts, leaf = (names[pattern], "") if pattern in names else (names[owner], f".{leaf}")
        parts = [reference[part.replace("*", block) + leaf] for part in ((parts,) if isinstance(parts, str) else parts)]
        shape = value.shape  # of the whole, on every rank
        one = len(parts) == 1
        state[name] = (
            parts[0].reshape(shape) if one else torch.stack([p.reshape(shape[0], *shape[2:]) for p in parts], 1)
        )
    return state


def worst(ours: Tensor, reference: Tensor) -> float:
    """Returns the largest difference as a share of the largest value."""
    return float((ours - reference).detach().abs().max() / reference.detach().abs().max())


def differences(
    ours: nn.Module,
    reference: nn.Module,
    names: Names,
    *,
    logits: Callable[[], Tensor],
    expected: Callable[[], Tensor],
    labels: Tensor,
) -> str:
    """Gives our model their weights, runs both forward and backward and says how far they are apart.

    What load_state_dict does with weights it does with gradients too: a rank takes its slices of whole tensors.
    """
    ours.load_state_dict(translated(ours, {n: p.detach() for n, p in reference.named_parameters()}, names))
    both = logits(), expected()
    for scores in both:
        F.cross_entropy(scores, labels).backward()
    gradients = copy.deepcopy(ours)
    gradients.load_state_dict(translated(ours, {n: p.grad for n, p in reference.named_parameters()}, names))
    pairs = zip(ours.parameters(), gradients.parameters(), strict=True)
    errors = torch.tensor([worst(*both), max(worst(p.grad, g) for p, g in pairs)], device=labels.device)
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    return "largest differences from transformers: logits {:.1e}, gradients {:.1e}".format(*errors.tolist())
