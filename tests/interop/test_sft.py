"""The idioms of a trainer for supervised fine-tuning: completions alone have labels, rows are padded, an adapter is
trained, and compute_loss counts tokens and hits from the whole logits.

Spans: parallelize.py, parallelized.py and trainer.py of tpfuse/interop: together, as a trainer calls them.
"""

import pytest
import torch
import transformers

from tests.interop.launched import VOCAB, launched, split
from tests.interop.test_trainer import arguments
from tpfuse import TrainerMixin

pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")


class SFTTrainer(transformers.Trainer):
    """Somebody's class derived from the Trainer, which knows nothing of tpfuse."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        with torch.no_grad():
            labels = inputs["labels"][:, 1:]
            hits = (outputs.logits[:, :-1].argmax(-1) == labels).sum()
            counts = torch.stack([inputs["attention_mask"].sum(), (labels != -100).sum(), hits])
            self.counts = getattr(self, "counts", 0) + self.accelerator.gather_for_metrics(counts[None]).sum(0)
        return (loss, outputs) if return_outputs else loss


class Trainer(TrainerMixin, SFTTrainer):
    pass


def examples():
    """Prompts and completions of unequal lengths."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=generator))
    words = lambda n: torch.randint(1, VOCAB, (n,), generator=generator).tolist()
    return [dict(prompt=words(draw(2, 5)), completion=words(draw(1, 6))) for _ in range(24)]


def collate(batch):
    rows = [(e["prompt"], e["completion"]) for e in batch]
    width = max(len(p) + len(c) for p, c in rows)
    pad = lambda values, fill: values + [fill] * (width - len(values))
    return dict(
        input_ids=torch.tensor([pad(p + c, 0) for p, c in rows]),
        attention_mask=torch.tensor([pad([1] * len(p + c), 0) for p, c in rows]),
        labels=torch.tensor([pad([-100] * len(p) + c, -100) for p, c in rows]),
    )


def tuned(world, layout, folder):
    with launched(world):
        model = split(world, *layout, attn_pdrop=0.1)
        model.add_adapter(peft.LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn", "c_fc"]))
        options = arguments(folder, layout[0], remove_unused_columns=False)
        trainer = Trainer(model, options, train_dataset=examples(), data_collator=collate)
        trainer.train()
        trainer.save_model(f"{folder}/adapter")
        logged = [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "grad_norm" in e]
        return logged, trainer.counts.tolist()


@pytest.mark.slow
def test_sft(ranks, tmp_path):
    ((want, counts),) = ranks(1, tuned, (1, 1), str(tmp_path / "one"))
    for got, counted in ranks(4, tuned, (2, 2), str(tmp_path / "split")):
        assert counted == counts and counts[0] > counts[1] > 0
        for pair, wanted in zip(got, want, strict=True):
            assert pair == pytest.approx(wanted, rel=1e-5)
    files = [peft.utils.load_peft_weights(str(tmp_path / name / "adapter")) for name in ("one", "split")]
    assert files[0].keys() == files[1].keys()
    assert all((files[0][name] - files[1][name]).abs().max() < 1e-6 for name in files[0])
