"""What the models' tests share: small configurations, one forward and backward whose results are whole tensors, and
curves."""

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from tests.common import make_tp
from tpfuse import TensorParallel, as_dtensor, clip_grad_norm_, param_groups
from tpfuse.layers.shards import named_specs
from tpfuse.models import GPT, Bert, BertConfig, GPTConfig
from tpfuse.models.files.source import written
from tpfuse.models.files.write import full_tensor
from tpfuse.tools.ledger.layer import default_dtype as default_dtype

# Vocabulary, batch, sequence and tied embeddings: 997 = 250 + 250 + 250 + 247 words on four ranks, and GPT-2's 50257,
# no multiple of anything; 1 to 254 rows, which leave ranks with padding only, or some of it.
SHAPES = [(997, 1, 1, True), (997, 3, 7, False)]
MORE_SHAPES = [
    (997, 2, 127, True),
    (997, 5, 7, True),
    (997, 5, 1, False),
    (997, 1, 127, False),
    (50257, 3, 7, True),
    (50257, 1, 127, True),
    (50257, 2, 1, False),
    (50257, 5, 7, False),
]


def narrow(config, **changes):
    """A config of one narrow layer, for long sequences and large vocabularies."""
    changes = dict(max_positions=128, hidden_size=16, num_heads=4, num_layers=1, ffn_size=20) | changes
    return replace(config, **changes)


# 12 heads and 84 = 3 * 28 columns split over 1, 2, 3 and 4 ranks; 97 words and 3 x 7 rows over none evenly; dropout
# in all three places
GPT_CONFIG = GPTConfig(vocab_size=97, max_positions=32, hidden_size=48, num_layers=2, num_heads=12, ffn_size=84)
BERT_CONFIG = BertConfig(vocab_size=97, max_positions=32, hidden_size=48, num_layers=2, num_heads=12, ffn_size=84)


def batch(config, size: int = 3, seq: int = 7, pad: str | None = None, seed: int = 0) -> dict[str, Tensor]:
    """input_ids and labels; padded on one side to unequal lengths, which the attention mask and the labels know."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, config.vocab_size, (size, seq), generator=g)
    labels = ids.masked_fill(torch.rand(size, seq, generator=g) < 0.2, -100)
    if pad is None:
        return dict(input_ids=ids, labels=labels)
    length = seq - torch.arange(size)[:, None] * 2
    mask = (torch.arange(seq) < length) if pad == "right" else (torch.arange(seq) >= seq - length)
    first = mask & (mask.cumsum(1) == 1)  # predicted from padding where that is on the left
    return dict(
        input_ids=ids.masked_fill(~mask, 0), labels=labels.masked_fill(~mask | first, -100), attention_mask=mask.long()
    )


def whole(model: torch.nn.Module, grad: bool = False) -> dict[str, Tensor]:
    """Every parameter (or its gradient) as a full tensor."""
    return {n: full_tensor(p.grad if grad else p, spec, tp).clone() for n, p, spec, tp in named_specs(model)}


def whole_logits(logits: Tensor, vocab_size: int, tp: TensorParallel) -> Tensor:
    """[B, S, V/R] -> [B, S, V]"""
    if tp.size == 1:
        return logits.detach()
    every: list[Any] = [None] * tp.size
    torch.distributed.all_gather_object(every, logits.detach(), group=tp.group)
    out = torch.cat(every, -1)
    assert out.shape[-1] == vocab_size
    return out


def body_loss(hidden: Tensor, pooled: Tensor, mask: Tensor | None = None) -> Tensor:
    """Any function of what a body gives, the same on every rank; of padding, as in any real loss, it is none."""
    hidden, pooled = (hidden, pooled) if mask is None else (hidden * mask[..., None], pooled * mask[:, :1])
    weight = torch.linspace(-1, 1, hidden[0].numel(), dtype=hidden.dtype).view(hidden[0].shape)
    return (hidden * weight).mean() + pooled.square().mean()


def results(model, call: dict[str, Any]) -> dict[str, Tensor]:
    """One forward and backward -> all outputs, and ("d " + name) all gradients, as full tensors."""
    head = isinstance(model, GPT) or model.head is not None
    out = model(**call, return_logits=True) if head else model(**{k: v for k, v in call.items() if k != "labels"})
    found = {k: v.detach() for k, v in out._asdict().items() if v is not None}
    if head:
        found["logits"] = whole_logits(out.logits, model.config.vocab_size, model.tp)
        loss = out.loss
    else:
        loss = body_loss(out.last_hidden_state, out.pooler_output, call.get("attention_mask"))
    loss.backward()
    return found | {f"d {name}": g for name, g in whole(model, grad=True).items()}


def gradients(model) -> dict[str, Tensor]:
    """Every gradient as a full tensor, by its name in a Hugging Face file."""
    sources, grads = model.files.sources(), whole(model, grad=True)
    return {model.files.hf_name(name): g for name, g in written((sources[key], g) for key, g in grads.items())}


def of_files(world, path, cls, call: dict[str, Any], sp: bool = True) -> dict[str, Tensor]:
    """``results`` of a directory's model in fp64, with gradients by its names."""
    model = cls.from_pretrained(path, tp=None if world is None else make_tp(world, sp), dtype=torch.float64)
    assert not model.training
    found = {key: x for key, x in results(model, call).items() if not key.startswith("d ")}
    return found | {f"d {name}": g for name, g in gradients(model).items()}


def change_of_loss(path, call: dict[str, Any], **change: Any) -> float:
    """How far the loss of a directory's GPT moves, in fp64, where its weights are run by another config."""
    right = GPT.from_pretrained(path, dtype=torch.float64)
    with torch.device("meta"):
        wrong = GPT(replace(right.config, **change))
    wrong.load_state_dict(right.state_dict(), assign=True)
    return abs((right(**call).loss - wrong.eval()(**call).loss).item())


def of_transformers(model, call: dict[str, Any], shift: bool = True) -> dict[str, Tensor]:
    """What ``of_files`` gives, by transformers; the loss in fp64, since theirs is taken in fp32."""
    model.zero_grad()
    out = model(**{key: x for key, x in call.items() if key != "labels"})
    if "logits" in out:
        labels = torch.nn.functional.pad(call["labels"][:, 1:], (0, 1), value=-100) if shift else call["labels"]
        loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
        found = dict(loss=loss, logits=out.logits)
    else:
        found = dict(last_hidden_state=out.last_hidden_state, pooler_output=out.pooler_output)
        loss = body_loss(*found.values(), call.get("attention_mask"))
    loss.backward()
    grads = {f"d {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {key: x.detach() for key, x in found.items()} | grads


def run(
    world,
    cls,
    config,
    call: dict[str, Any],
    sp: bool = True,
    dtype: torch.dtype = torch.float64,
    options: dict[str, Any] | None = None,
) -> dict[str, Tensor]:
    """``results`` of a model made for this world, in training; ``options`` autocast, eval and perturb are for here,
    others the model's."""
    options = dict(options or {})
    autocast, evaluate, perturb = (options.pop(key, False) for key in ("autocast", "eval", "perturb"))
    with default_dtype(dtype):
        model = cls(config, tp=None if world is None else make_tp(world, sp), **options)
    if perturb:
        scramble(model)
    model.train(not evaluate)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return results(model, call)


@torch.no_grad()
def scramble(model) -> None:
    """Norms and biases away from one and zero, where a wrong gradient or a swapped pair could hide; the same at every
    split."""
    for _, p, spec, tp in named_specs(model):
        if isinstance(spec.init, str):
            g = torch.Generator().manual_seed(len(spec.shape) + spec.shape[0])
            p += 0.2 * torch.randn(spec.shape, generator=g, dtype=torch.float64)[spec.local(tp)].to(p.dtype)


# ---- training on a (dp, tp) mesh ----

STEP_CONFIG = replace(GPT_CONFIG, num_layers=1)
SAMPLES, POSITIONS, MAX_NORM = (
    6,
    8,
    0.5,
)  # 6 samples split over 1, 2 and 3 replicas or micro-batches; gradients are larger than 0.5


class Training:
    """A GPT, its optimizer, and the wrapping that ``kind`` says: "ddp" (where dp > 1), "dtensor", "fsdp" (over
    DTensors), or "pieces" (as "ddp", of two context-parallel ranks)."""

    def __init__(
        self, world, dp: int = 1, sp: bool = True, kind: str = "ddp", dtype: torch.dtype = torch.float64, **options: Any
    ):
        cp = 2 if kind == "pieces" else 1
        self.mesh = world.pieces(dp, cp, world.size // dp // cp)
        tp, self.dp = TensorParallel(self.mesh["tp"], sequence_parallel=sp, cp=self.mesh["cp"]), dp
        with default_dtype(dtype):
            self.model = GPT(STEP_CONFIG, tp=tp, dp=self.mesh["dp"], **options)
        self.replica: torch.nn.Module = self.model
        if kind in ("dtensor", "fsdp"):
            as_dtensor(self.model, self.mesh["tp"])
        if kind == "fsdp":
            for module in (*self.model.blocks, self.model):
                fully_shard(module, mesh=self.mesh["dp"])
        if kind in ("ddp", "pieces") and dp > 1:
            self.replica = torch.nn.parallel.DistributedDataParallel(
                self.model, process_group=self.mesh["dp"].get_group()
            )
        self.optimizer = torch.optim.AdamW(param_groups(self.model, weight_decay=0.1), lr=3e-4)

    def backward(self, step: int, micro: int = 1) -> Tensor:
        """Gradients of the global batch of this step, in micro-batches; returns its loss."""
        g = torch.Generator().manual_seed(step)
        ids = torch.randint(STEP_CONFIG.vocab_size, (SAMPLES, POSITIONS), generator=g)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.2, -100)  # unequal counts of valid labels
        size = SAMPLES // self.dp // micro
        normalizer = (labels[:, 1:] != -100).sum().item() / self.dp  # a Python float: a third is not exact in fp32
        total = 0
        for i in range(micro):
            first = (self.mesh["dp"].get_local_rank() * micro + i) * size
            last = i == micro - 1
            with contextlib.nullcontext() if last or self.replica is self.model else self.replica.no_sync():
                mine = slice(first, first + size)
                loss = self.replica(
                    ids[mine], labels=labels[mine], step=step, first_sample=first, loss_normalizer=normalizer
                ).loss
                loss.backward()
            total = total + loss.detach()
        every = [torch.empty_like(total) for _ in range(self.dp)]
        torch.distributed.all_gather(every, total, group=self.mesh["dp"].get_group())
        return torch.stack(every).mean()

    def steps(self, first: int, last: int, micro: int = 1) -> list[tuple[float, float]]:
        """-> (loss, norm of the gradient) of each step"""
        found = []
        for step in range(first, last):
            loss = self.backward(step, micro)
            norm = clip_grad_norm_(self.model, MAX_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
            found.append((loss.item(), norm.item()))
        return found


MODELS = {
    "gpt": (GPT, GPT_CONFIG, {}),
    "bert": (Bert, BERT_CONFIG, {}),
    "bert-mlm": (Bert, BERT_CONFIG, dict(masked_lm=True)),
}
