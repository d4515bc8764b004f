"""Passes that guessed tokens save: prompt lookup and an assistant, on a text that repeats itself.

    python -m bench.models.guessing                 a few seconds of training on a CPU, then generation
    python -m bench.models.guessing --tokens 400 --steps 300

A model of 4 layers, and an assistant of 1, learn the first bytes of the project's licence by heart.  Each line says in
how many passes of the model a text became so much longer, greedily and sampled, and how many of the assistant it took;
the tokens are the same in all of them, or the command ends with an error.
"""

import collections
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench._parser import parser_of
from tpfuse.models import GPT, GPTConfig
from tpfuse.models.generation.passes import Pass

TEXT = torch.tensor(list((Path(__file__).parents[2] / "LICENSE").read_bytes()[:3000]))
PROMPT, SEQ, BATCH = 128, 128, 8
LAYERS = dict(model=4, assistant=1)


def trained(layers: int, steps: int) -> GPT:
    config = GPTConfig(
        vocab_size=256, hidden_size=64, num_layers=layers, num_heads=4, ffn_size=256, max_positions=1024, dropout=0.0
    )
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(TEXT) - SEQ, (BATCH, 1), generator=generator)
        ids = TEXT[starts + torch.arange(SEQ)]
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def counted(model: GPT, options: dict[str, Any]) -> tuple[Tensor, collections.Counter[int]]:
    """Returns the tokens, and the passes behind the prompt by the layers of the model that ran them."""
    passes: collections.Counter[int] = collections.Counter()
    originals = Pass.__call__, Pass.verify

    def counting(run: Any) -> Any:
        def call(self: Pass, ids: Tensor, positions: Tensor) -> Tensor:
            passes[len(self.caches)] += 1
            return run(self, ids, positions)

        return call

    Pass.__call__, Pass.verify = map(counting, originals)  # type: ignore[method-assign]
    try:
        tokens = model.generate(TEXT[None, :PROMPT], **options)
    finally:
        Pass.__call__, Pass.verify = originals  # type: ignore[method-assign]
    return tokens, passes


def main() -> None:
    parser = parser_of("bench.models.guessing", __doc__)
    parser.add_argument("--tokens", type=int, default=200, help="new tokens (default 200)")
    parser.add_argument("--steps", type=int, default=200, help="of training (default 200)")
    args = parser.parse_args()
    model, assistant = (trained(layers, args.steps) for layers in LAYERS.values())
    guesses = {
        "no guesses": {},
        "prompt_lookup_num_tokens=10": dict(prompt_lookup_num_tokens=10),
        "assistant_model": dict(assistant_model=assistant),
    }
    for choice in (dict(do_sample=False), dict(do_sample=True, temperature=0.7)):
        expected, _ = counted(model, choice | dict(max_new_tokens=args.tokens))
        for name, more in guesses.items():
            tokens, passes = counted(model, choice | dict(max_new_tokens=args.tokens) | more)
            assert torch.equal(tokens, expected), name
            how = "sampled" if choice["do_sample"] else "greedy"
            drafts = f", {passes[LAYERS['assistant']]} of the assistant" * ("assistant_model" in more)
            print(f"{how}, {name}: {args.tokens} tokens in {passes[LAYERS['model']]} passes{drafts}")


if __name__ == "__main__":
    main()
