"""TRL's trainers on a model split over (dp, tp), against the same trainer on the plain module in one process.

Spans: trainer.py, body.py, vocabulary.py and parallelized.py of tpfuse/interop: together, as TRL calls them.
"""

import contextlib
import itertools

import pytest
import torch
import transformers

from tests.interop.launched import launched
from tests.models.tokenizers import byte_level
from tpfuse import TensorParallel, TrainerMixin, parallelize

trl = pytest.importorskip("trl")
WORDS = "the cat sat on a mat and saw one more dog run by".split()


def sentence(start, count):
    return " " + " ".join(itertools.islice(itertools.cycle(WORDS), start, start + count))


def rows(kind, count=16):
    """Texts of unequal lengths."""
    prompts = [sentence(i, 2 + i % 3) for i in range(count)]
    answers = [[sentence(i + 5 * k, 2 + (i + k) % 4) for k in (1, 2)] for i in range(count)]
    if kind == "sft":
        return [dict(prompt=p, completion=a) for p, (a, _) in zip(prompts, answers, strict=True)]
    if kind == "grpo":
        return [dict(prompt=p) for p in prompts]
    return [dict(prompt=p, chosen=a, rejected=b) for p, (a, b) in zip(prompts, answers, strict=True)]


def config(kind, folder, dp):
    cls = dict(sft=trl.SFTConfig, dpo=trl.DPOConfig, reward=trl.RewardConfig, grpo=trl.GRPOConfig)[kind]
    options = dict(max_steps=3, per_device_train_batch_size=4 // dp, learning_rate=1e-3, logging_steps=1, report_to=[])
    options |= dict(use_cpu=True, save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, bf16=False)
    options |= dict(gradient_checkpointing=False, adam_epsilon=1e-4)
    if kind == "grpo":
        options |= dict(num_generations=2, max_completion_length=5, temperature=1.0, top_k=1, beta=0.0)
    return cls(str(folder), **options)


def model_of(kind, tokenizer):
    torch.manual_seed(0)
    sizes = dict(vocab_size=len(tokenizer) + 1, hidden_size=32, intermediate_size=56, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False)
    sizes |= dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    config = transformers.LlamaConfig(**sizes, initializer_range=0.2, num_labels=1)
    if kind == "reward":
        return transformers.LlamaForSequenceClassification(config)
    return transformers.LlamaForCausalLM(config)


def job(world, kind, layout, folder):
    """The logged losses; ``layout`` None: of the plain module and trainer."""
    import datasets

    counter = itertools.count()
    datasets.fingerprint.Hasher.hash = classmethod(
        lambda cls, value: f"{next(counter):016x}"
    )  # of what it cannot pickle
    datasets.disable_caching()
    datasets.disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()
    with launched(world), contextlib.redirect_stdout(None):
        dp, tp = layout or (1, 1)
        tokenizer = byte_level()
        model, extra = model_of(kind, tokenizer), {}
        plain = dict(sft=trl.SFTTrainer, dpo=trl.DPOTrainer, reward=trl.RewardTrainer, grpo=trl.GRPOTrainer)[kind]
        put = lambda module: module
        if layout is not None:
            mesh = world.mesh(dp, tp)
            put = lambda module: parallelize(module, TensorParallel(mesh["tp"]), dp=mesh["dp"])
        if kind == "dpo":
            extra = dict(ref_model=put(model_of(kind, tokenizer)))
        if kind == "grpo":
            extra = dict(reward_funcs=[lambda completions, **kwargs: [float(len(set(c))) for c in completions]])
        cls = plain if layout is None else type(plain.__name__, (TrainerMixin, plain), {})
        arguments = config(kind, folder, dp)
        trainer = cls(
            put(model), args=arguments, train_dataset=datasets.Dataset.from_list(rows(kind)),
            processing_class=tokenizer, **extra,
        )  # fmt: skip
        trainer.train()
        return [e["loss"] for e in trainer.state.log_history if "loss" in e]


KINDS = "sft", "dpo", "reward", "grpo"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param((1, 1), marks=pytest.mark.rare), (1, 2), (2, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_of_trl(ranks, tmp_path, kind, layout):
    (want,) = ranks(1, job, kind, None, str(tmp_path))
    for got in ranks(layout[0] * layout[1], job, kind, layout, str(tmp_path)):
        assert got == pytest.approx(want, rel=1e-4, abs=1e-6)
