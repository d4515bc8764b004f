"""transformers' Trainer on a model split over tensor-parallel ranks, with or without an adapter of PEFT.

    python examples/finetune_trainer.py                                             # one process
    torchrun --nproc-per-node 2 examples/finetune_trainer.py --tp 2                 # split over both
    torchrun --nproc-per-node 4 examples/finetune_trainer.py --tp 2 --lora 8        # two replicas, an adapter of rank 8
    torchrun --nproc-per-node 2 examples/finetune_trainer.py --tp 2 --resume        # goes on from the last checkpoint

--model is a local Hugging Face directory of a causal model that tpfuse.parallelize knows, whose vocabulary holds bytes;
without one a small GPT-2 with new weights learns to read this file.  Nothing is downloaded.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

import tpfuse

LENGTH = 64


class Trainer(tpfuse.TrainerMixin, transformers.Trainer):
    """The only other line beside parallelize."""


def parse():
    parser = argparse.ArgumentParser(description="Fine-tune a split model with transformers' Trainer.")
    parser.add_argument("--model", type=Path, metavar="DIR", help="Hugging Face directory (default: a new small GPT-2)")
    parser.add_argument("--text", type=Path, default=Path(__file__), metavar="FILE", help="what is learnt, as bytes")
    parser.add_argument("--out", type=Path, default=Path("out/finetune"), metavar="DIR", help="checkpoints and result")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel size; the rest are replicas")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train an adapter of this rank, nothing else")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="optimizer steps")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="rows of a step, over all replicas")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    return parser.parse_args()


def load(path):
    torch.manual_seed(0)  # every rank makes, or reads, the same weights
    if path is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(path)
    sizes = dict(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def rows(path):
    text = torch.tensor(list(path.read_bytes()))
    return [dict(input_ids=row, labels=row) for row in text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)]


def main():
    args = parse()
    transformers.utils.logging.disable_progress_bar()
    world, device = int(os.environ.get("WORLD_SIZE", 1)), "cuda" if torch.cuda.is_available() else "cpu"
    if world % args.tp:
        raise SystemExit(f"--tp {args.tp} does not divide the {world} processes")
    tp = dp = None
    if world > 1:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        mesh = dist.init_device_mesh(device, (world // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
        tp, dp = tpfuse.TensorParallel(mesh["tp"]), mesh["dp"]
    model = tpfuse.parallelize(load(args.model), tp, dp=dp)
    if args.lora:
        from peft import LoraConfig

        model.add_adapter(LoraConfig(r=args.lora, lora_alpha=2 * args.lora))
    arguments = transformers.TrainingArguments(
        str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch * args.tp // world,
        learning_rate=3e-3,
        logging_steps=5,
        save_steps=10,
        bf16=device == "cuda",
        use_cpu=device == "cpu",
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=device == "cuda",
    )
    trainer = Trainer(model, arguments, train_dataset=rows(args.text))
    trainer.train(resume_from_checkpoint=args.resume or None)
    trainer.save_model(str(args.out / "final"))  # a directory that transformers loads; of an adapter, that PEFT loads
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
