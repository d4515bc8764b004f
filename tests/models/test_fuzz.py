"""Configurations that nobody chose: exact against transformers at every split, or refused with the reason; never a
wrong number or a hang.

Every refusal is foretold by ``reason``, so that what could be built and is refused fails too.

Spans: models/: whole models, of every decoder family.
"""

import re
import tempfile
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.common import make_tp
from tests.models.common import of_files
from tests.models.exact import EXACT
from tests.models.families.test_llama_like import LLAMA3, ROPE, YARN, oracle
from tpfuse.models import GPT, GPTConfig
from tpfuse.models.families import CAUSAL
from tpfuse.models.families import FAMILIES as ENTRIES
from tpfuse.training.packing import packed_batch

F64 = torch.float64
MAX, NEW = 24, 5
DAILY = "gpt2", "llama", "mistral", "qwen2", "qwen3"
GEMMA = "gemma2", "gemma3_text"
LATER = tuple(
    name for name in CAUSAL if name not in DAILY and not ENTRIES[name].has_experts
)  # families/test_experts.py
FAMILIES = DAILY + LATER
ROWS = "left", "right", "packed"
SIZES = 1, 2, 4
ROPES = [ROPE, LLAMA3, YARN, dict(ROPE, rope_type="linear", factor=2.0), dict(ROPE, rope_type="dynamic", factor=2.0)]


class Case(NamedTuple):
    family: str
    heads: int
    kv_heads: int
    head_width: int | None  # None: hidden / heads
    hidden: int
    ffn: int
    vocab: int
    layers: int
    window: int | None
    share: float  # of a head that is rotated
    full_layers: int  # of qwen2 and qwen3, before those with a window
    rope: dict[str, Any]
    biased: bool
    tied: bool
    lengths: tuple[int, ...]  # of prompts or of documents
    rows: str  # how they stand together: "left", "right" (padded on that side), "packed"
    R: int
    sp: bool


@st.composite
def cases(draw, family: str, R: int) -> Case:
    """Mostly what can be built: numbers that do not divide come now and then."""
    pick = lambda *values: draw(st.sampled_from(values))
    heads = pick(4, 8, 12, 4, 8, 12, 6)
    kv_heads = (
        heads
        if family in ("gpt2", "gpt_neox")
        else pick(*(g for g in (1, 2, 4, 6, 8, 3) if heads % g == 0), pick(heads, heads, heads, 5))
    )
    own_width = family not in ("gpt2", "gpt_neox", "phi3", "qwen2")  # which have no key for it
    hidden = heads * pick(4, 6, 10)  # of 2, transformers' dynamic scaling divides by zero
    if family in ("mistral", "qwen3"):  # transformers' llama insists on a multiple
        hidden = pick(hidden, 20, 33)
    return Case(
        family=family,
        heads=heads,
        kv_heads=kv_heads,
        head_width=pick(4, 6, 10, 16) if own_width else None,
        hidden=hidden,
        ffn=pick(4, 12, 28, 28, 28, 27),
        vocab=pick(16, 33, 97),
        layers=pick(1, 2, 3),
        window=None if family in ("gpt2", "gpt_neox", "llama", "olmo2") else pick(None, 1, 3, 7, 30),
        share=pick(0.75, 1.0) if family in ("gpt_neox", "phi3") else 1.0,
        full_layers=pick(0, 1, 3),
        rope=pick(*ROPES[: 1 if family == "phi3" else None]),  # its longrope goes by the longest text of a batch
        biased=pick(False, True),
        tied=pick(False, True),
        lengths=tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))),
        rows=pick(*ROWS),
        R=R,
        sp=pick(False, True),
    )


def their_config(c: Case):
    """Of transformers; None where it has no such model itself."""
    if c.family == "gpt2":
        sizes = dict(n_positions=MAX, n_embd=c.hidden, n_layer=c.layers, n_head=c.heads, n_inner=c.ffn)
        rest = dict(activation_function="gelu_new", attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    else:
        sizes = dict(
            max_position_embeddings=MAX, hidden_size=c.hidden, num_hidden_layers=c.layers, intermediate_size=c.ffn
        )
        rest = dict(num_attention_heads=c.heads, rope_parameters=dict(c.rope))
        if c.family != "gpt_neox":
            rest |= dict(num_key_value_heads=c.kv_heads)
        if c.family in ("gpt_neox", "phi3"):
            rest["rope_parameters"]["partial_rotary_factor"] = c.share
        if c.head_width is not None:
            rest |= dict(head_dim=c.head_width)
        if c.family == "gpt_neox":
            rest |= dict(attention_bias=c.biased, use_parallel_residual=c.full_layers > 0)
        if c.family == "starcoder2":
            rest |= dict(use_bias=c.biased)
        if c.family in ("llama", "qwen3", "olmo2", *GEMMA):
            rest |= dict(attention_bias=c.biased)
        if c.family == "llama":
            rest |= dict(mlp_bias=c.biased)
        if c.family in ("mistral", "phi3", "starcoder2"):
            rest |= dict(sliding_window=c.window)
        if c.family in GEMMA:
            rest |= of_gemma(c)
        if c.family in ("qwen2", "qwen3") and c.window is not None:
            rest |= dict(
                use_sliding_window=True, sliding_window=c.window, max_window_layers=min(c.full_layers, c.layers)
            )
    shared = dict(vocab_size=c.vocab, tie_word_embeddings=c.tied, initializer_range=0.3)
    shared |= dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    shared |= dict(attn_implementation=EXACT if c.family == "gemma2" else "sdpa")
    return transformers.AutoConfig.for_model(c.family, **sizes, **rest, **shared)


def of_gemma(c: Case) -> dict[str, Any]:
    """What Gemma has of its own, drawn from the case's other numbers."""
    types = [
        "full_attention" if c.window is None or i < c.full_layers else "sliding_attention" for i in range(c.layers)
    ]
    own: dict[str, Any] = dict(layer_types=types, sliding_window=c.window or 4, query_pre_attn_scalar=c.ffn)
    own |= dict(final_logit_softcapping=2.0 if c.biased else None)
    if c.family == "gemma2":
        return own | dict(attn_logit_softcapping=1.0 if c.tied else None)
    rope = ROPE if c.rope["rope_type"] == "dynamic" else c.rope  # which is not built where there are two
    return own | dict(rope_parameters=dict(full_attention=dict(rope), sliding_attention=dict(ROPE, rope_theta=50.0)))


def reason(c: Case) -> str | None:
    """What a refusal must say, or None where the model can be built."""
    if c.heads % c.kv_heads:
        return f"num_heads={c.heads} is not divisible by num_kv_heads={c.kv_heads}"
    if c.heads % c.R:
        return f"num_heads={c.heads} is not divisible by tensor-parallel size {c.R}"
    if c.kv_heads % c.R and c.R % c.kv_heads:
        return f"num_kv_heads={c.kv_heads} and tensor-parallel size {c.R}"
    if c.ffn % c.R:
        return f"={c.ffn} is not divisible by tensor-parallel size {c.R}"
    return None


# ---- transformers' results


def inputs(c: Case) -> tuple[dict[str, Any], list[Tensor]]:
    """-> arguments of our forward, and the same documents or prompts one by one."""
    g = torch.Generator().manual_seed(0)
    texts = [torch.randint(c.vocab, (n,), generator=g) for n in c.lengths]
    if c.rows == "packed":
        batch = packed_batch(texts)  # longer than the model's positions at times
        return batch._asdict(), texts
    longest = max(c.lengths)
    ids, mask = torch.full((len(texts), longest), 3), torch.zeros(len(texts), longest, dtype=torch.int64)
    for i, text in enumerate(texts):
        where = slice(longest - len(text), longest) if c.rows == "left" else slice(0, len(text))
        ids[i, where], mask[i, where] = text, 1
    first = (mask.cumsum(1) == 1) & mask.bool()  # predicted from padding where that is on the left
    labels = ids.masked_fill(~mask.bool() | first, -100)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return dict(input_ids=ids, labels=labels, attention_mask=mask, position_ids=positions), texts


def of_transformers(model, texts: list[Tensor]) -> dict[str, Any]:
    """Each text alone, so that what it takes for padding and packing is out of question: logits, loss, gradients,
    greedy tokens."""
    count = sum(len(text) - 1 for text in texts)
    total, logits, tokens = torch.zeros((), dtype=F64), [], []
    for text in texts:
        out = model(text[None])
        logits.append(out.logits[0].detach())
        total = total + F.cross_entropy(out.logits[0, :-1], text[1:], reduction="sum") / max(count, 1)
        options = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0, use_cache=False)
        tokens.append(model.generate(text[None], attention_mask=torch.ones_like(text)[None], **options)[0, len(text) :])
    total.backward()
    grads = {f"d {name}": torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return dict(loss=total.detach(), logits=torch.cat(logits), tokens=torch.stack(tokens)) | grads


def ours_with_tokens(world, path, call, sp, prompts):
    found = of_files(world, path, GPT, call, sp)
    model = GPT.from_pretrained(path, tp=make_tp(world, sp), dtype=F64)
    found["tokens"] = model.generate(**prompts, max_new_tokens=NEW)[:, -NEW:]
    return found


def close(got: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """-> relative errors, at most 1e-10; a gradient that cancels to zero (of a query that sees one key only, say) is
    measured by others."""
    assert got.keys() == exact.keys()
    largest = max((g.abs().max().item() for k, g in exact.items() if k.startswith("d ")), default=0.0)
    errors = {}
    for name, want in exact.items():
        assert got[name].shape == want.shape, name
        scale = want.abs().max().item() + (1e-4 * largest if name.startswith("d ") else 0.0)
        errors[name] = (got[name] - want).abs().max().item() / (scale or 1.0)
    wrong = {name: e for name, e in errors.items() if not e <= 1e-10}
    assert not wrong, wrong
    return errors


def check(ranks, reached, c: Case) -> None:
    why = reason(c)
    if why is not None and c.heads % c.kv_heads:  # transformers has no such model
        with pytest.raises(ValueError, match=re.escape(why)):
            GPTConfig.from_hf(their_config(c).to_dict())
        return
    model = oracle(their_config(c))
    call, texts = inputs(c)
    longest = max(map(len, texts))
    padded = [F.pad(text, (longest - len(text), 0)) for text in texts]
    prompts = dict(input_ids=torch.stack(padded))
    prompts["attention_mask"] = torch.stack([F.pad(torch.ones_like(text), (longest - len(text), 0)) for text in texts])
    with tempfile.TemporaryDirectory() as path:
        model.save_pretrained(path)
        if why is not None:
            with pytest.raises(ValueError, match=re.escape(why)):
                ranks(c.R, ours_with_tokens, path, call, c.sp, prompts)
            return
        want = of_transformers(model, texts)
        for got in ranks(c.R, ours_with_tokens, path, call, c.sp, prompts):
            mask = call.get("attention_mask")
            got["logits"] = got["logits"][0] if mask is None else got["logits"][mask.bool()]
            assert torch.equal(got.pop("tokens"), want["tokens"]), c
            errors = close(got, {k: v for k, v in want.items() if k != "tokens"})
            reached(
                GPTConfig.from_hf(model.config.to_dict()),
                c.R,
                errors | {"generated tokens": 0.0},
                sp=c.sp,
                packed=c.rows == "packed",
            )


# A failing case is printed as it was drawn: making it smaller would take minutes.
HOW = dict(
    deadline=None, derandomize=True, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)


def every(count: int, family: str, R: int, look) -> None:
    """``look`` at so many cases of one family at one R: drawn all together, some pairs would hardly come."""
    settings(max_examples=count, **HOW)(given(c=cases(family, R))(lambda c: look(c)))()


COUNTS = [(family, count) for family in DAILY for count in (2, 12)] + [(family, 6) for family in LATER]


@pytest.mark.parametrize("R", SIZES)
@pytest.mark.parametrize("family, count", [pytest.param(*c, marks=[pytest.mark.slow] * (c[1] > 2)) for c in COUNTS])
def test_exact_or_refused(ranks, reached, family, R, count):
    every(count, family, R, lambda c: check(ranks, reached, c))


def test_most_cases_can_be_built_and_every_refusal_comes():
    drawn: list[Case] = []
    for family in FAMILIES:
        for R in SIZES:
            every(30, family, R, drawn.append)
    built = [c for c in drawn if reason(c) is None]
    assert 0.5 < len(built) / len(drawn) < 0.95
    assert {why.split("=")[0] for why in map(reason, drawn) if why} == {
        "num_heads",
        "num_kv_heads",
        "",
    }  # "": the ffn has no one name
    for pair in ("family", "R"), ("R", "rows"), ("family", "rows"):
        came, could = ({tuple(getattr(c, key) for key in pair) for c in cases} for cases in (built, drawn))
        assert came == could and len(came) in (3 * len(FAMILIES), 9)
