"""A language model continues prompts, split over tensor-parallel ranks: greedy or sampled, with stop strings; or chats.

    python examples/generate.py "def main(" "class Error("            # what make demo-train trained, greedily
    torchrun --nproc-per-node 2 examples/generate.py --model path/to/llama --temperature 0.8 --top-p 0.9 "Once upon"
    torchrun --nproc-per-node 2 examples/generate.py --compare        # tokens/s against transformers' generate
    torchrun --nproc-per-node 3 examples/generate.py --model out/smollm2 --chat "What is gravity?"    # or converses

--model is any local Hugging Face directory of a family that tpfuse.models.GPT knows, with a tokenizer.json; without
one, a vocabulary of 256 is taken for bytes.  A long prompt shows a bar while it is read.  --chat answers prompts by the
chat template of a tokenizer that transformers loads, and without a prompt line by line; Ctrl-C ends an answer, Ctrl-D
the conversation.  In fp32 the same seed gives the same text on any number of processes.  Runs on CPUs (gloo) and,
unchanged, on GPUs (nccl, bf16).
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import _chat
import _common as common
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tpfuse import TensorParallel
from tpfuse.models import GPT

DEMO = Path("out/demo/hf")
PROMPTS = ["def main(", "class Error(", "import "]
END = 0  # of a text of bytes, as train_gpt.py writes it
UNFINISHED = "\ufffd"  # what the first bytes of a character decode to


def parse():
    parser = common.Parser("Continue prompts with a language model split over tensor-parallel ranks.")
    parser.add_argument(
        "prompts",
        nargs="*",
        metavar="PROMPT",
        help="texts to go on from, all in one batch (default: three beginnings of Python)",
    )
    add = parser.add_argument_group("model").add_argument
    add(
        "--model",
        type=Path,
        default=DEMO,
        metavar="DIR",
        help="a Hugging Face directory: GPT-2, Llama, Mistral, Qwen, GPT-NeoX, Phi-3 or StarCoder2",
    )
    add("--dtype", choices=("float32", "bfloat16"), help="of the weights (default: float32, on a GPU bfloat16)")
    add("--no-sequence-parallel", action="store_true", help="every rank holds all rows between GEMMs")
    add = parser.add_argument_group(
        "what is chosen (the likeliest token, unless one of the first three is given)"
    ).add_argument
    add(
        "--temperature",
        type=float,
        metavar="T",
        help="sample; lower is closer to the likeliest (1 where --top-k or --top-p is given)",
    )
    add("--top-k", type=common.positive, metavar="K", help="sample from the K likeliest")
    add("--top-p", type=float, metavar="P", help="sample from the fewest that have probability P together")
    add(
        "--repetition-penalty", type=float, default=1.0, metavar="X", help="divides the logits of what was there before"
    )
    add("--seed", type=int, default=0, metavar="N", help="of the samples")
    add = parser.add_argument_group("where it ends").add_argument
    add("--max-new-tokens", type=common.positive, default=48, metavar="N", help="tokens at most")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")
    add = parser.add_argument_group("conversation").add_argument
    add(
        "--chat",
        action="store_true",
        help="answer PROMPTs by the tokenizer's chat template, or, without one, lines of the terminal or of a pipe;"
        " Ctrl-C ends an answer, Ctrl-D the conversation",
    )
    add = parser.add_argument_group("measuring").add_argument
    add(
        "--compare",
        action="store_true",
        help="afterwards, tokens/s against transformers' generate: greedy, the same prompts and length, in turn",
    )
    add(
        "--runs", type=common.positive, default=5, metavar="N", help="runs of each with --compare, after one to warm up"
    )
    args = parser.parse_args()
    args.stop = args.stop or []
    if "" in args.stop or "" in args.prompts:
        parser.error("a prompt or a --stop text is empty")
    if args.chat and args.compare and not args.prompts:
        parser.error("--chat --compare needs a PROMPT: a conversation is not measured")
    if not args.chat:
        args.prompts = args.prompts or PROMPTS
    return args


# ---- text and tokens


class Codec(NamedTuple):
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    ends: list[int]  # tokens that end a text
    separator: str = ""  # what stands between a prompt and its continuation where they are shown


def codec(directory: Path, vocab_size: int, config: dict) -> Codec:
    path = directory / "tokenizer.json"
    if path.is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path))
        return Codec(lambda text: tokenizer.encode(text).ids, tokenizer.decode, ends_of(directory, config))
    if vocab_size != 256:
        raise ValueError(
            f"{directory} has no tokenizer.json"
            " (transformers' AutoTokenizer.from_pretrained(...).save_pretrained writes it)"
        )
    return Codec(lambda text: list(text.encode()), lambda ids: bytes(ids).decode(errors="replace"), [END])


def ends_of(directory: Path, config: dict, tokenizer=None) -> list[int]:
    path = directory / "generation_config.json"
    ends = (json.loads(path.read_text()) if path.is_file() else {}).get("eos_token_id", config.get("eos_token_id"))
    if ends is None:
        ends = getattr(tokenizer, "eos_token_id", None)
    return [] if ends is None else [ends] if isinstance(ends, int) else ends


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """-> ids and mask, int64 [B, S], padded on the left."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])


class Continuation:
    """The text after one prompt, as tokens come: up to a stop string or an end token, never a part of either."""

    def __init__(self, prompt: list[int], codec: Codec, stops: list[str]):
        self.ids, self.codec, self.stops = list(prompt), codec, stops
        self.before = len(codec.decode(prompt))
        self.tokens, self.text, self.ended = 0, "", False

    def add(self, token: int) -> None:
        if self.ended:
            return
        self.tokens += 1
        if token in self.codec.ends:
            self.ended = True
            return
        self.ids.append(token)
        self.text = self.codec.decode(self.ids)[self.before :]  # the whole: how a token reads depends on those before
        positions = [position for position in (self.text.find(stop) for stop in self.stops) if position >= 0]
        if positions:
            self.text, self.ended = self.text[: min(positions)], True

    def certain(self) -> str:
        """Returns the text that no later token can change or cut off."""
        if self.ended:
            return self.text
        begun = (n for stop in self.stops for n in range(len(stop) - 1, 0, -1) if self.text.endswith(stop[:n]))
        return self.text[: len(self.text) - max(begun, default=0)].rstrip(UNFINISHED)


class Stream:
    """``generate``'s on_token: writes the first prompt's text as it comes, and stops when all have ended."""

    def __init__(self, prompts: list[str], rows: list[list[int]], codec: Codec, stops: list[str]):
        self.prompts = [prompt + codec.separator for prompt in prompts]
        self.all, self.written = [Continuation(row, codec, stops) for row in rows], 0

    def __call__(self, tokens: Tensor) -> bool:
        for continuation, token in zip(self.all, tokens.tolist(), strict=True):
            continuation.add(token)
        self.write(self.all[0].certain())
        return all(c.ended for c in self.all)

    def write(self, text: str) -> None:
        if common.RANK == 0:
            print(text[self.written :], end="", flush=True)
            self.written = len(text)

    def begin(self) -> None:
        common.say(f"\n> {self.prompts[0]}", end="")

    def finish(self) -> None:
        """Yields what was held back of the first, and the others."""
        self.write(self.all[0].text)
        for prompt, continuation in zip(self.prompts[1:], self.all[1:]):
            common.say(f"\n\n> {prompt}{continuation.text}", end="")
        common.say("\n")


# ---- against transformers


def compare(args, model: GPT, ids: Tensor, mask: Tensor, runs: int) -> None:
    """Times tpfuse on all processes and transformers on one, with the threads of all, on the same prompts."""
    threads = torch.get_num_threads()
    options = dict(attention_mask=mask, max_new_tokens=args.max_new_tokens)
    reference = None
    if common.RANK == 0:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        reference = (
            transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype_of(args, ids.device))
            .to(ids.device)
            .eval()
        )
        reference.generation_config = transformers.GenerationConfig(pad_token_id=0, do_sample=False)

    def timed(run: Callable[[], Tensor]) -> tuple[float, Tensor]:
        if ids.is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        generated = run()[:, ids.shape[1] :].cpu()  # waits for a GPU
        return generated.numel() / (time.perf_counter() - began), generated

    speeds, same = [], True
    for i in range(runs + 1):
        dist.barrier()
        ours, tokens = timed(lambda: model.generate(ids, **options))
        dist.barrier()
        if reference is not None:
            torch.set_num_threads(threads * common.WORLD)
            rate, expected = timed(lambda: reference.generate(ids, **options))
            torch.set_num_threads(threads)
            same = same and torch.equal(tokens, expected)
            if i:
                speeds.append((ours, rate, ours / rate))
    dist.barrier()
    if reference is not None:
        size, cores = f"{len(ids)} x {args.max_new_tokens}", os.cpu_count() or 1
        count, figures = ("one run", "") if runs == 1 else (f"{runs} runs", ": median (least to most)")
        print(f"{count} of {size} tokens each, in turn, on {ids.device.type}{figures}")
        forms = {
            "tpfuse": f"{common.WORLD} processes x {threads} threads",
            "transformers": f"1 process x {threads * common.WORLD} threads",
        }
        for (name, form), values in zip(forms.items(), zip(*speeds)):
            print(f"  {name:13} {spread(values, 1)} tokens/s, {form}")
        ratios = [ratio for *_, ratio in speeds]
        print(f"  {'ratio':13} {spread(ratios, 2)}; the tokens are {'the same' if same else 'not all the same'}")
        if ids.device.type == "cpu" and threads * common.WORLD > cores:
            print(
                f"  {threads * common.WORLD} threads share {cores} cores, and processes wait for each other's messages"
            )
        sys.stdout.flush()


def spread(values, digits: int) -> str:
    """Median, least and most."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def dtype_of(args, device: torch.device) -> torch.dtype:
    return getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))


def main() -> None:
    args = parse()
    with common.one_line_errors():
        if not args.model.is_dir():
            advice = (
                "make demo-train makes it; or give --model DIR"
                if args.model == DEMO
                else "give --model a Hugging Face directory"
            )
            raise ValueError(f"there is no {args.model}: {advice}")
    device = common.start()
    mesh = init_device_mesh(device.type, (common.WORLD,), mesh_dim_names=("tp",))
    tp = TensorParallel(mesh["tp"], sequence_parallel=not args.no_sequence_parallel)
    with common.one_line_errors():
        tokenizer = _chat.tokenizer_of(args.model) if args.chat else None
        model = GPT.from_pretrained(args.model, tp=tp, dtype=dtype_of(args, device), device=device)
        common.say(f"{args.model}: {model.config.family}, tp={common.WORLD} on {device.type}, {dtype_of(args, device)}")
        ends = ends_of(args.model, model.origin.config, tokenizer)
        if not args.prompts:
            _chat.chat(model, tokenizer, ends, chosen(args) | dict(stop_strings=args.stop or None))
            return common.stop()
        text = codec(args.model, model.config.vocab_size, model.origin.config)
        if tokenizer is not None:
            as_chat = lambda prompt: _chat.templated(tokenizer, [dict(role="user", content=prompt)])
            text = text._replace(encode=as_chat, ends=ends, separator="\n")
        rows = [text.encode(prompt) for prompt in args.prompts]
        if not all(rows):
            raise ValueError("a prompt has no tokens")
        ids, mask = (t.to(device) for t in padded(rows))
        converse(args, model, text, rows, ids, mask)
        if args.compare:
            compare(args, model, ids, mask, args.runs)
    common.stop()


def chosen(args) -> dict:
    """Returns the options of ``generate``: how tokens are chosen, and how many."""
    return dict(
        max_new_tokens=args.max_new_tokens,
        do_sample=any(x is not None for x in (args.temperature, args.top_k, args.top_p)),
        temperature=1.0 if args.temperature is None else args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
    )


def converse(args, model: GPT, text: Codec, rows: list[list[int]], ids: Tensor, mask: Tensor) -> None:
    stream = Stream(args.prompts, rows, text, args.stop)
    stream.begin()
    began = time.perf_counter()
    model.generate(
        ids,
        attention_mask=mask,
        eos_token_id=text.ends,
        on_token=stream,
        on_prompt=_chat.Progress() if common.RANK == 0 else None,
        **chosen(args),
    )
    seconds = time.perf_counter() - began
    stream.finish()
    tokens = sum(c.tokens for c in stream.all)
    common.say(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s, the prompts read within that")


if __name__ == "__main__":
    main()
