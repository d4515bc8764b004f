"""``python -m tpfuse bits``: which layouts of a model's ranks have the same bits."""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...layers.block import SAVING
from ...models import GPT, Bert, BertConfig, Classifier, head_options, with_head
from ...models.classify import SINGLE, named_in
from ...models.config.model import ModelConfig
from ...models.families import TOKEN
from ...models.files.directory import read_json
from ...models.files.read import CONFIG, INDEX
from ...models.files.read import SINGLE as ONE_FILE
from ...models.model import Model
from ...parallel import BITWISE, TensorParallel
from .. import command as cli
from ..command import CommandParser
from ..ledger.commands import add_settled_seq, settled_config
from ..ledger.dryrun import fake_world
from ..ledger.layer import build
from ..ledger.presets import config_file
from ..ledger.processes import check_count, on_ranks
from ..options import DTYPES, MODEL_HELP, add_dtype
from .layouts import Batch, Bits, Layout, compare

OFF = "off"
SEQ = 13  # positions, where neither a call nor the model says less
SEQUENCE_PARALLEL = {"both": (False, True), "on": (True,), OFF: (False,)}


@dataclass(frozen=True)
class MakeModel:
    """Makes a model: with the weights of a directory that has some, or else with initial ones."""

    config: ModelConfig
    folder: Path | None
    dtype: torch.dtype
    saving: str
    classifier: Classifier | None = None  # the head that the directory holds

    def __call__(self, tp: TensorParallel) -> Model:
        if self.folder is None:
            return with_head(self.config, tp=tp, saving=self.saving).to(self.dtype).train()
        cls: Any = Bert if isinstance(self.config, BertConfig) else GPT
        options = head_options(self.config.hf) if self.classifier is None else {}
        model: Model = cls.from_pretrained(self.folder, tp=tp, dtype=self.dtype, saving=self.saving, **options)
        return model.train()


def register(p: CommandParser) -> None:
    p.runs(
        _run,
        "Trains a model for some steps at each layout of ranks, in processes of this machine with one thread each, and"
        " compares every tensor with one process, as integers. The exit code is 1 where bits differ.",
    )
    p.add_argument("model", metavar="MODEL", help=f"{MODEL_HELP}; weights beside config.json are read")
    cli.add_numbers(p, "--tp", cli.positive, "tensor-parallel sizes", default="1,2,4")
    p.add_argument(
        "--sequence-parallel",
        choices=SEQUENCE_PARALLEL,
        default="both",
        help="with sequence parallelism, without, both",
    )
    p.add_argument(
        "--bitwise", type=_leaves, default=8, metavar="V", help=f"leaves of what is split, or {OFF!r} for sums by rank"
    )
    cli.add_count(p, "--batch", "sequences of random tokens in a step", 3)
    add_settled_seq(p, SEQ)
    cli.add_count(p, "--steps", "steps of AdamW with clipping", 1)
    p.add_argument("--saving", choices=SAVING, default=SAVING[0], help="what blocks keep for backward")
    add_dtype(p, "fp32")
    cli.add_output(p, plot=False)


def _leaves(text: str) -> int | None:
    """An argparse type: V, or None for "off"."""
    if text != OFF and (not text.isdecimal() or int(text) not in BITWISE):
        raise ArgumentTypeError(f"must be one of {', '.join(map(str, BITWISE))} or {OFF}, got {text}")
    return None if text == OFF else int(text)


def _run(args: Namespace) -> int:
    """Returns 1 where bits differ, 0 otherwise."""
    config = settled_config(args, SEQ)
    folder = weights_of(args.model)
    classifier = None if folder is None else named_in(read_json(folder, CONFIG), config.hf)
    make = MakeModel(config, folder, DTYPES[args.dtype], args.saving, classifier=classifier)
    layouts = [Layout(size, sp) for size in args.tp for sp in SEQUENCE_PARALLEL[args.sequence_parallel]]
    check_splits(config, args.tp, args.bitwise)
    batches = random_batches(config, args.batch, args.seq, args.steps, classifier=classifier)
    result = on_ranks(max(args.tp), _compared, (make, batches, layouts, args.bitwise))
    if isinstance(result, ValueError | OSError):
        raise result
    options = dict(model=args.model, dtype=args.dtype, bitwise=args.bitwise)
    cli.print_result(args, str(result), dict(options, same=result.same, layouts=[row.json() for row in result]))
    return 0 if result.same else 1


def weights_of(name: str) -> Path | None:
    """Returns the directory of a model's name or of its config.json, where that has weights, and None otherwise."""
    config = config_file(name)
    if config is None or config.name != CONFIG:
        return None
    return config.parent if any((config.parent / file).is_file() for file in (ONE_FILE, INDEX)) else None


def check_splits(config: ModelConfig, sizes: Sequence[int], bitwise: int | None) -> None:
    """Raises ValueError, before a process starts, for tensor-parallel sizes that a model cannot be split over."""
    check_count("bits", max(sizes))
    for size in sizes:
        with fake_world(size) as mesh:
            tp = TensorParallel(mesh["tp"], bitwise=bitwise)
            build(config, tp=tp, saving=SAVING[0], dtype=torch.float32)


def random_batches(
    config: ModelConfig, batch: int, seq: int, steps: int, *, classifier: Classifier | None = None
) -> list[Batch]:
    """Returns the arguments of a call a step: tokens, labels made of them, and the place of dropout's masks."""
    generator = torch.Generator().manual_seed(0)
    batches: list[Batch] = []
    for step in range(steps):
        ids = torch.randint(config.vocab_size, (batch, seq), generator=generator)
        if classifier is None:
            head: dict[str, Tensor] = dict(labels=ids)
        else:  # one per sequence reads the last token that the mask shows
            head = dict(labels=labels_for(classifier, ids), attention_mask=torch.ones_like(ids))
        batches.append(dict(input_ids=ids, step=step, first_sample=0, **head))
    return batches


def labels_for(classifier: Classifier, ids: Tensor) -> Tensor:
    """Returns labels for a head's loss, made of tokens [B, S]."""
    count = classifier.num_labels
    if classifier.per == TOKEN:
        return ids % count
    if count == 1:
        return ids[:, 0] % 2.0
    if classifier.problem_type in (None, SINGLE):
        return ids[:, 0] % count
    return (ids[:, :1] + torch.arange(count)) % 2.0


def _compared(arguments: tuple[Any, ...]) -> Bits | ValueError | OSError:
    try:
        return compare(*arguments)
    except (ValueError, OSError) as error:
        return error
