"""torch's own pipelines of plain torch modules: the stages of a GPT with the weights of tpfuse's."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional as F

from bench.models.peers import Block
from tpfuse.models import GPT
from tpfuse.pipeline import SCHEDULES
from tpfuse.pipeline.schedules import placement

THEIRS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
PLACES = {"out": "attention.out", "fc1": "mlp.fc1", "fc2": "mlp.fc2", "norm2": "attention_norm"}


class Stage(nn.Module):
    """Some layers of a GPT-2, its embedding in front of the first, its last norm and head behind the last."""

    def __init__(self, model: GPT, layers: Sequence[int]):
        super().__init__()
        c, final = model.config, model.config.num_layers - 1
        tensors = {name: p.detach() for name, p in model.named_parameters()}
        norm = lambda layer: "input_norm" if layer == 0 else f"blocks.{layer - 1}.mlp_norm"
        self.first, self.last = layers[0] == 0, layers[-1] == final
        if self.first:
            self.embedding = nn.Embedding.from_pretrained(tensors["embedding.weight"].clone(), False)
            self.positions = nn.Parameter(tensors["positions.weight"].clone())
        self.blocks = nn.ModuleList()
        for layer in layers:
            ours, full = f"blocks.{layer}", {}
            for leaf in ("weight", "bias"):
                qkv = tensors[f"{ours}.attention.qkv.{leaf}"]  # [H, 3, E, ...]
                full[f"qkv.{leaf}"] = qkv.transpose(0, 1).flatten(0, 2)
                for name, place in PLACES.items():
                    full[f"{name}.{leaf}"] = tensors[f"{ours}.{place}.{leaf}"]
                full[f"norm1.{leaf}"] = tensors[f"{norm(layer)}.{leaf}"]
            block = Block(c.hidden_size, c.num_heads, 0.0, 0.0)
            block.load(full)
            self.blocks.append(block)
        if self.last:
            self.norm = nn.LayerNorm(c.hidden_size)
            self.norm.load_state_dict({leaf: tensors[f"{norm(final + 1)}.{leaf}"] for leaf in ("weight", "bias")})
            self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
            self.head.weight.data.copy_(tensors["head.weight"])

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.embedding(x) + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


class Pipeline:
    """One of torch's schedules, called as tpfuse's pipelines are."""

    def __init__(self, model: GPT, name: str, micro_batches: int):
        rank, size = dist.get_rank(), dist.get_world_size()
        chunks = SCHEDULES[name].chunks[0]
        (places,) = placement(name, size, chunks)
        count, layers = len(places), model.config.num_layers // len(places)
        self.model = nn.ModuleList()
        stages = []
        for i in (i for i, place in enumerate(places) if place == rank):
            self.model.append(Stage(model, range(i * layers, (i + 1) * layers)))
            stages.append(PipelineStage(self.model[-1], i, count, torch.device("cpu")))
        loss = lambda logits, labels: F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        make = getattr(schedules, THEIRS[name])
        self.schedule = make(stages if chunks > 1 else stages[0], n_microbatches=micro_batches, loss_fn=loss)
        self.first, self.last = (any(getattr(s, end) for s in self.model) for end in ("first", "last"))

    def step(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        losses: list[Tensor] = []
        target = dict(target=labels, losses=losses) if self.last else {}
        self.schedule.step(*([input_ids] if self.first else []), **target, return_outputs=False)
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())
