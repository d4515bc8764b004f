"""The options of train_gpt.py."""

import argparse
import importlib
import json
import math
import sys
from pathlib import Path

import _common as common

from tpfuse.models import GPTConfig
from tpfuse.pipeline import SCHEDULES, Stage

SIZES = {  # parameters, about 12 layers * width^2
    "0.6m": dict(hidden_size=128, num_layers=3, num_heads=4),
    "3m": dict(hidden_size=256, num_layers=4, num_heads=8),
    "10m": dict(hidden_size=384, num_layers=6, num_heads=12),
    "50m": dict(hidden_size=768, num_layers=7, num_heads=12),
}


FAMILIES = "llama", "gpt2", "mistral", "qwen2", "qwen3"
VOCAB = 256  # bytes
PROMPT = "class Queue:\n    def __init__(self, maxsize=0):\n        "


def config_of(args: argparse.Namespace) -> GPTConfig:
    """Returns what the model is made of, by the words of a Hugging Face config.json, which a family's defaults fill."""
    shape = dict(hidden_size=args.width, num_hidden_layers=args.layers, num_attention_heads=args.heads)
    # At these widths and lengths, 1/sqrt(width) learns faster than 0.02.
    shape |= dict(vocab_size=VOCAB, max_position_embeddings=args.seq, initializer_range=args.width**-0.5)
    if args.family == "gpt2":
        dropout = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), args.dropout)
        sizes = dict(hidden_act="gelu_new", layer_norm_eps=1e-5, **dropout)
    else:
        gated = -(-8 * args.width // 96) * 32  # three matrices of 8/3 width have the size of two of 4 width
        sizes = dict(hidden_act="silu", intermediate_size=gated, rms_norm_eps=1e-5, rope_theta=1e4)
        sizes |= dict(head_dim=args.width // args.heads, num_key_value_heads=args.heads, attention_dropout=args.dropout)
    return GPTConfig.from_hf(dict(model_type=args.family, tie_word_embeddings=not args.untied, **shape, **sizes))


def stage_of(args: argparse.Namespace, rank: int) -> Stage | None:
    """Returns which stages of the model a rank of the pipeline holds; None without --pp."""
    return Stage(rank, args.pp, args.schedule, args.chunks, layers=args.stage_layers) if args.pp > 1 else None


def follow(plan: Path, args: argparse.Namespace) -> None:
    """Sets the options of the split to those of a plan; ValueError that names the field that cannot be done."""
    try:
        values = json.loads(plan.read_text())
        job, split = values["job"], values["plans"][0]
        dp, cp, tp, pp, count = (split[name] for name in ("dp", "cp", "tp", "pp", "micro_batches"))
        staged = dict(schedule=split["schedule"], chunks=split["chunks"], stage_layers=split["layers"])
        memory = dict(saving=split["saving"], recompute="full" if split["full"] else None)
        kind, sharded, over_replicas = split["cp_kind"], split["sharded"], split["over_replicas"]
        layers, batch = job["num_layers"], job["batch"]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"--plan {plan} is not what python -m tpfuse plan --json writes ({error!r})") from None
    if sharded:
        raise ValueError("--plan: sharded is true, and this script has no FSDP: plan with --fix sharded=no")
    if over_replicas:
        raise ValueError("--plan: over_replicas is true, and this script has no experts")
    shape = args.layers or SIZES[args.size]["num_layers"]
    for name, planned, actual in (
        ("--layers", layers, shape),
        ("--batch", batch, args.batch),
        ("--seq", job["seq"], args.seq),
    ):
        if planned != actual:
            raise ValueError(f"--plan: it is of {name} {planned}, and this run has {actual}")
    open_ = pp > 1 and len(SCHEDULES[staged["schedule"]].chunks) > 1
    chosen = dict(staged, chunks=staged["chunks"] if open_ else None) if pp > 1 else {}
    vars(args).update(dp=dp, cp=cp, cp_kind=kind, tp=tp, pp=pp, micro_batches=count, **memory, **chosen)


def parse() -> argparse.Namespace:
    """Returns the options; an error in one line where they do not go together."""
    parser = common.Parser(
        "Train a byte-level GPT on real text, under tensor, sequence, data and pipeline parallelism."
    )
    add = parser.add_argument_group("model and text").add_argument
    add("--family", choices=FAMILIES, default="llama", help="what kind of GPT")
    add("--size", choices=SIZES, default="0.6m", help="parameters; decides what the next three leave open")
    add("--width", type=common.positive, metavar="N", help="of the residual stream")
    add("--layers", type=common.positive, metavar="N", help="blocks")
    add("--heads", type=common.positive, metavar="N", help="attention heads of a block")
    add("--untied", action="store_true", help="a head of its own, which does not share the embedding's weight")
    add(
        "--data",
        type=Path,
        metavar="PATH",
        help="a file, or a folder of files (default: the Python standard library's sources)",
    )
    add("--max-mb", type=float, default=8, metavar="MB", help="read this much of it at most")
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=common.positive, default=1100, metavar="N", help="optimizer steps")
    add("--batch", type=common.positive, default=4, metavar="N", help="sequences a step, over all processes")
    add("--seq", type=common.positive, default=256, metavar="N", help="bytes a sequence")
    add(
        "--pack",
        action="store_true",
        help="train on paragraphs, packed into rows; none sees another (a step has about as many bytes)",
    )
    add(
        "--lr",
        type=float,
        default=4e-3,
        metavar="X",
        help="highest learning rate; warms up over a tenth of the steps, then a cosine",
    )
    add(
        "--dropout",
        type=float,
        default=0.0,
        metavar="P",
        help="of all that the family drops: GPT-2 embedding, attention and residual, the others attention",
    )
    add("--seed", type=int, default=0, metavar="N", help="decides weights, samples and dropout masks")
    add(
        "--ok-topk",
        type=float,
        metavar="DENSITY",
        help="of the gradients' sum over the replicas, send this share alone (tpfuse.OkTopk; 0.01 is one in a hundred)",
    )
    add("--ok-topk-warmup", type=common.positive, metavar="N", help="steps over which the share falls from 1 to that")
    add(
        "--delayed",
        action="store_true",
        default=None,
        help="apply each step's gradients one step late, as --schedule 2bw does, which sets this",
    )
    add = parser.add_argument_group(
        "how it is split and run (none of it changes what is learnt, but for rounding)"
    ).add_argument
    add("--tp", type=common.positive, metavar="N", help="tensor-parallel processes (default: all that are left)")
    add("--dp", type=common.positive, default=1, metavar="N", help="replicas; pp x dp x cp x tp processes in all")
    add("--cp", type=common.positive, default=1, metavar="N", help="context-parallel processes: pieces of a sequence")
    add("--pp", type=common.positive, default=1, metavar="N", help="pipeline ranks, which share the layers")
    add("--schedule", choices=[*SCHEDULES, "2bw"], help="of the pipeline, with --pp (default: 1f1b)")
    add(
        "--plan",
        type=Path,
        metavar="FILE",
        help="the best split that python -m tpfuse plan --json FILE found, in place of the options below",
    )
    add(
        "--stage-layers",
        type=common.positive,
        nargs="+",
        metavar="N",
        help="blocks of each stage, from the first to the last (default: stages that cost about the same)",
    )
    add(
        "--micro-batches",
        type=common.positive,
        default=1,
        metavar="N",
        help="parts that a replica's batch is computed in, to save memory",
    )
    add("--no-sequence-parallel", action="store_true", help="every tensor-parallel rank holds all rows between GEMMs")
    add(
        "--bitwise",
        type=common.positive,
        metavar="V",
        help="the same bits at every --tp that divides V, a power of two, and at every --pp, and --dp with the same"
        " --dp x --micro-batches; the log gets a digest of the weights",
    )
    add(
        "--saving",
        choices=("fastest", "smallest"),
        default="fastest",
        help="for backward, keep what is fastest or what is smallest",
    )
    add(
        "--main-grad",
        action="store_true",
        help="add gradients in fp32 inside the GEMMs and average them in rank order (tpfuse.MainGrad, in DDP's place)",
    )
    add("--recompute", choices=("full",), help="make each block again in backward, and keep its input alone")
    add("--compile", action="store_true", help="torch.compile of the blocks (which takes a C++ compiler on a CPU)")
    add("--bf16", action="store_true", help="autocast to bfloat16 (on a GPU it is the default)")
    add(
        "--timeout",
        type=common.positive,
        default=300,
        metavar="S",
        help="seconds after which a process that the others wait for ends the run",
    )
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, default=Path("out/train_gpt"), metavar="DIR", help="everything is written here")
    add("--checkpoint-every", type=common.positive, default=200, metavar="N", help="steps between checkpoints")
    add(
        "--validate-every",
        type=common.positive,
        default=200,
        metavar="N",
        help="steps between validations; best/ is the model of the best one",
    )
    add("--tensorboard", action="store_true", help="also write the log for TensorBoard, into tensorboard/")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out, where there is one")
    add("--restart", action="store_true", help="start anew although --out holds a run, and replace it")
    add = parser.add_argument_group("what the trained model writes at the end").add_argument
    add("--prompt", metavar="TEXT", help="what it continues (default: a class of Python, as far as half of --seq)")
    add("--temperature", type=float, default=0.5, metavar="T", help="lower is closer to the likeliest")
    add("--top-p", type=float, default=0.9, metavar="P", help="of the fewest bytes that have probability P together")
    add("--chunks", type=common.positive, metavar="N", help="stages a rank, of schedules that leave it open")
    parser.set_defaults(cp_kind="auto")  # --plan sets it
    args = parser.parse_args()
    if args.plan is not None:
        try:
            follow(args.plan, args)
        except ValueError as error:
            parser.error(str(error))
    if args.ok_topk_warmup is not None and args.ok_topk is None:
        parser.error("--ok-topk-warmup is of --ok-topk, which is not given")
    if args.ok_topk is not None:
        if not 0 < args.ok_topk <= 1:
            parser.error(f"--ok-topk must be in (0, 1], got {args.ok_topk}")
        if args.dp == 1:
            parser.error("--ok-topk is of gradients that replicas share: give --dp 2 or more")
        if args.pp > 1 or args.main_grad:
            parser.error(f"--ok-topk stands in DDP, which {'--pp' if args.pp > 1 else '--main-grad'} does without")

    if args.bitwise is not None and args.main_grad:
        parser.error("--bitwise: --main-grad adds micro-batches one after another; leave it off")
    args.tree_of = None if args.bitwise is None else args.dp * args.micro_batches
    if args.tree_of and args.tree_of & (args.tree_of - 1):
        parser.error(f"--bitwise: --dp x --micro-batches must be a power of two, got {args.tree_of}")
    if args.bitwise is not None and args.pack and args.tree_of > 1:
        parser.error("--bitwise: --pack lays documents in other rows for each --dp and --micro-batches; leave it off")

    shape = SIZES[args.size]
    args.width = args.width or shape["hidden_size"]
    args.layers = args.layers or shape["num_layers"]
    args.heads = args.heads or shape["num_heads"]
    args.tp = args.tp or max(1, common.WORLD // (args.dp * args.cp * args.pp))
    needed = args.tp * args.cp * args.dp * args.pp
    if needed != common.WORLD:
        layout = f"--tp {args.tp}" + f" x --cp {args.cp}" * (args.cp > 1) + f" x --dp {args.dp}"
        layout += f" x --pp {args.pp}" * (args.pp > 1)
        parser.error(
            f"{layout} needs {needed} processes, and there are {common.WORLD}:"
            f" torchrun --nproc-per-node {needed} {sys.argv[0]} ..."
        )
    if args.cp > 1 and args.bitwise is not None:
        parser.error(f"--bitwise {args.bitwise} is not built with --cp {args.cp}")
    if args.pp == 1 and (args.schedule or args.stage_layers):
        parser.error(f"{'--schedule' if args.schedule else '--stage-layers'} is of a pipeline: give --pp 2 or more")
    args.schedule = args.schedule or "1f1b"
    args.delayed = args.delayed or (True if args.schedule == "2bw" else None)
    if args.delayed and args.main_grad:
        parser.error("--delayed: --main-grad adds to gradients that wait; leave it off")
    if args.pp > 1 and args.compile and (args.schedule == "2bw" or SCHEDULES[args.schedule].split):
        does = "keeps two versions of the weights" if args.schedule == "2bw" else "splits the backward pass"
        parser.error(f"--schedule {args.schedule} {does}, which --compile does not")
    for name, value in (("--max-mb", args.max_mb), ("--lr", args.lr), ("--temperature", args.temperature)):
        if not 0 < value < math.inf:
            parser.error(f"{name} must be a positive number, got {value}")
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout must be in [0, 1), got {args.dropout}")
    if not 0 < args.top_p <= 1:
        parser.error(f"--top-p must be in (0, 1], got {args.top_p}")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed must be in [0, 2^63), got {args.seed}")
    if args.width % args.heads:
        parser.error(f"--width {args.width} is not divisible by --heads {args.heads}")
    if args.seq < 2:
        parser.error("--seq must be at least 2: a byte to read and one to guess")
    if args.batch % (args.dp * args.micro_batches):
        parser.error(f"--batch {args.batch} is not divisible by --dp {args.dp} x --micro-batches {args.micro_batches}")
    if args.resume and args.restart:
        parser.error("--resume and --restart exclude each other")
    if args.tensorboard and not installed("torch.utils.tensorboard"):
        parser.error("--tensorboard needs the package tensorboard: pip install tensorboard")
    args.prompt = PROMPT[: args.seq // 2] if args.prompt is None else args.prompt
    if not 0 < len(args.prompt.encode()) < args.seq:
        parser.error(f"--prompt must have 1 to {args.seq - 1} bytes (--seq {args.seq})")
    return args


def installed(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
