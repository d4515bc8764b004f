"""Policy gradients whose samples are on the policy, bit for bit: a small GPT learns to sort digits.

    torchrun --nproc-per-node 2 examples/grpo.py                              # samples at TP = 2, trains at TP = 1
    torchrun --nproc-per-node 2 examples/grpo.py --sample-tp 1 --tp 2         # the other way round: the same weights
    torchrun --nproc-per-node 4 examples/grpo.py --sample-tp 4 --tp 2         # two replicas of two: the same weights
    torchrun --nproc-per-node 2 examples/grpo.py --no-batch-invariant         # how many ratios are not 1 without
    python examples/grpo.py                                                   # one process: the same weights

A step asks questions such as "3 1 2 =", samples a group of answers to each, and rewards an answer by the share of its
digits that stand where they stand in "1 2 3".  An answer's advantage is its reward less the group's mean, over the
group's standard deviation (GRPO; Shao et al. 2024, arXiv:2402.03300), and the loss that of clipped importance ratios
(PPO; Schulman et al. 2017, arXiv:1707.06347): exp(log-probability in training - log-probability in sampling).  A step
makes several passes over its samples, in the first of which the weights are those that sampled.  With
TensorParallel(bitwise=V, batch_invariant=T) all ratios of that pass are 1, in every bit, whatever the two splits are;
the exit code is 1 where one is not.
"""

import sys
from typing import NamedTuple

import _common as common
import torch
import torch.distributed as dist
from _run import weights_digest
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from tqdm import tqdm

import tpfuse
from tpfuse import TensorParallel
from tpfuse.models import GPT, GPTConfig

DIGITS, EQUALS, VOCAB = 10, 10, 32  # ids without a meaning fill up the leaves


class Samples(NamedTuple):
    """Answers to a micro-batch's questions: sequences [B, S], log-probabilities [B, N] of their N sampled tokens."""

    sequences: Tensor
    log_probs: Tensor


# ---- the rule


def seed_of(args, step: int, micro_batch: int) -> int:
    return 1_000_003 * args.seed + args.micro_batches * step + micro_batch


def questions(args, step: int, micro_batch: int) -> Tensor:
    """Returns int64 [questions of a micro-batch, digits + 1]: a function of the seed, the step and the micro-batch."""
    g = torch.Generator().manual_seed(seed_of(args, step, micro_batch))
    digits = torch.randint(DIGITS, (args.questions // args.micro_batches, args.digits), generator=g)
    return torch.nn.functional.pad(digits, (0, 1), value=EQUALS)


def rewards(sequences: Tensor, digits: int) -> Tensor:
    """Returns the share of right digits of each answer, fp32 [B]."""
    return (sequences[:, -digits:] == sequences[:, :digits].sort(1).values).float().mean(1)


def advantages(reward: Tensor, group: int) -> Tensor:
    """Returns how much better each answer is than its group, in the group's standard deviations [B]."""
    reward = reward.view(-1, group)
    spread = reward.std(1, correction=0, keepdim=True)
    return ((reward - reward.mean(1, keepdim=True)) / (spread + 1e-4)).flatten()


# ---- sampling


def give_weights(trained: GPT, sampler: GPT) -> None:
    """Copies the weights to the model that samples, from one split to the other."""
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in trained.state_dict().items()}
    sampler.load_state_dict(whole)


def sample(args, sampler: GPT, replicas: dist.ProcessGroup, step: int) -> list[Samples]:
    """Samples answers of all micro-batches, each replica a share of them; returns all, the same on every process."""
    count = args.micro_batches // replicas.size()
    samples: list[Samples] = []
    for i in range(replicas.rank() * count, (replicas.rank() + 1) * count):
        generated = sampler.generate(
            questions(args, step, i),
            max_new_tokens=args.digits,
            num_return_sequences=args.group,
            do_sample=True,
            seed=seed_of(args, step, i),
            return_log_probs=True,
        )
        samples.append(Samples(*generated))
    parts: list[list[Samples]] = [samples] * replicas.size()
    dist.all_gather_object(parts, samples, group=replicas)
    return [x for part in parts for x in part]


# ---- training


class Ratios(NamedTuple):
    """How many importance ratios of a pass are not 1, of how many, and how far the farthest is from it."""

    differing: int
    count: int
    farthest: float


def one_pass(args, replica, optimizer, samples: list[Samples]) -> Ratios:
    """Makes a step of AdamW by all samples."""
    replica.zero_grad()
    differing, count, farthest = 0, 0, 0.0
    for _ in range(replica.local_micro_batches):
        sequences, log_probs = samples[replica.micro_batch]
        advantage = advantages(rewards(sequences, args.digits), args.group)[:, None]
        now = -replica(sequences, labels=sequences, reduction="none").loss[:, -args.digits :]
        ratio = (now - log_probs).exp()
        clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
        loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
        loss.backward()
        off = (ratio.detach() - 1).abs()
        differing, count = differing + int(off.ne(0).sum()), count + off.numel()
        farthest = max(farthest, off.max().item())
    tpfuse.clip_grad_norm_(replica.module, 1.0)
    optimizer.step()
    ranks = [Ratios(differing, count, farthest)] * common.WORLD
    dist.all_gather_object(ranks, ranks[0])
    differing, count, farthest = zip(*ranks, strict=True)
    return Ratios(sum(differing) // args.tp, sum(count) // args.tp, max(farthest))  # every rank of a replica has them


# ---- the run


def parse():
    parser = common.Parser("Teach a small language model to sort digits, by policy gradients.")
    add = parser.add_argument_group("what is trained").add_argument
    add("--digits", type=common.positive, default=3, metavar="N", help="of a question, to be sorted")
    add("--width", type=common.positive, default=64, metavar="N", help="of the model")
    add("--layers", type=common.positive, default=2, metavar="N", help="blocks")
    add("--heads", type=common.positive, default=4, metavar="N", help="attention heads of a block")
    add("--bf16", action="store_true", help="weights and activations in bf16 (default: fp32)")
    add("--seed", type=int, default=0, metavar="N", help="of weights, questions and answers")
    add = parser.add_argument_group("how").add_argument
    add("--steps", type=common.positive, default=100, metavar="N", help="batches of questions")
    add("--questions", type=common.positive, default=16, metavar="N", help="of a step")
    add("--group", type=common.positive, default=16, metavar="N", help="answers to a question")
    add("--passes", type=common.positive, default=2, metavar="N", help="optimizer steps over a step's answers")
    add("--micro-batches", type=common.positive, default=4, metavar="N", help="of a step, a power of two")
    add("--lr", type=float, default=2e-3, metavar="X", help="learning rate of AdamW")
    add("--clip", type=float, default=0.2, metavar="X", help="how far from 1 a ratio earns a gradient")
    add = parser.add_argument_group("where: tensor-parallel sizes").add_argument
    add("--sample-tp", type=common.positive, metavar="N", help="of sampling (default: all processes)")
    add("--tp", type=common.positive, default=1, metavar="N", help="of training")
    add("--bitwise", type=common.positive, default=4, metavar="V", help="leaves of what is split")
    add("--no-batch-invariant", action="store_true", help="in shapes of each call: ratios are 1 to rounding only")
    args = parser.parse_args()
    args.sample_tp = args.sample_tp or common.WORLD
    for flag, size in ("--sample-tp", args.sample_tp), ("--tp", args.tp):
        if common.WORLD % size:
            parser.error(f"{flag} {size} does not divide the {common.WORLD} processes")
        if args.micro_batches % (common.WORLD // size):
            parser.error(f"--micro-batches {args.micro_batches} do not divide over {common.WORLD // size} replicas")
    if args.questions % args.micro_batches:
        parser.error(f"--questions {args.questions} are not divisible by {args.micro_batches} micro-batches")
    return args


def make(args, size: int) -> tuple[GPT, dist.DeviceMesh]:
    """Returns the model over ``size`` ranks, and the mesh of its replicas."""
    mesh = init_device_mesh("cpu", (common.WORLD // size, size), mesh_dim_names=("dp", "tp"))
    tile = None if args.no_batch_invariant else 48
    tp = TensorParallel(mesh["tp"], sequence_parallel=True, bitwise=args.bitwise, batch_invariant=tile)
    shape = dict(hidden_size=args.width, num_layers=args.layers, num_heads=args.heads, init_std=args.width**-0.5)
    no_dropout = dict.fromkeys(("dropout", "attention_dropout", "embedding_dropout"), 0.0)
    config = GPTConfig(vocab_size=VOCAB, max_positions=2 * args.digits + 1, **shape, **no_dropout)
    model = GPT(config, tp=tp, dp=mesh["dp"], seed=args.seed).to(torch.bfloat16 if args.bf16 else torch.float32)
    return model, mesh["dp"]


def train(args) -> int:
    """Returns how many ratios of first passes were not 1."""
    (model, dp), (sampler, replicas) = make(args, args.tp), make(args, args.sample_tp)
    replica = tpfuse.data_parallel(model, dp, bitwise_micro_batches=args.micro_batches)
    optimizer = torch.optim.AdamW(tpfuse.param_groups(model, weight_decay=0.0), lr=args.lr)
    wrong = 0
    quiet = dict(mininterval=0.5 if sys.stderr.isatty() else 10, disable=common.RANK != 0)
    bar = tqdm(range(args.steps), unit="step", dynamic_ncols=True, **quiet)
    for step in bar:
        give_weights(model, sampler)
        samples = sample(args, sampler, replicas.get_group(), step)
        reward = torch.cat([rewards(x.sequences, args.digits) for x in samples]).mean().item()
        first, *others = (one_pass(args, replica, optimizer, samples) for _ in range(args.passes))
        wrong += first.differing
        if common.RANK == 0:
            ratios = f"{first.differing} of {first.count} ratios are not 1, by at most {first.farthest:.1e}"
            later = f"; {others[-1].farthest:.1e} in the last pass" if others else ""
            bar.write(f"step {step + 1:4d}: reward {reward:.3f}, {ratios}{later}", file=sys.stdout)
    common.say(f"weights sha256 {weights_digest(model)}")
    return wrong


def main() -> int:
    args = parse()
    common.start()
    with common.one_line_errors():
        wrong = train(args)
    common.stop()
    if wrong and not args.no_batch_invariant:
        common.say(f"{wrong} ratios of first passes are not 1")
    return int(wrong > 0 and not args.no_batch_invariant)


if __name__ == "__main__":
    sys.exit(main())
