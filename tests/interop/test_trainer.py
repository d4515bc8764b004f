"""transformers' Trainer on a model split over (dp, tp), against the same Trainer in one process."""

import os
from pathlib import Path

import pytest
import torch
import transformers

from tests.interop.launched import launched, rows, said, small, split, weights
from tests.models import theirs
from tpfuse import AcceleratorMixin, TensorParallel, TrainerMixin, parallelize

accelerate = pytest.importorskip("accelerate")
DROPOUT = dict(attn_pdrop=0.2, resid_pdrop=0.2, embd_pdrop=0.2)
LAYOUTS = [(2, 1), (2, 2)]  # (1, 2) is resumed below, to the same numbers


class Trainer(TrainerMixin, transformers.Trainer):
    pass


class Accelerator(AcceleratorMixin, accelerate.Accelerator):
    pass


def arguments(folder, dp, **options):
    options = (
        dict(
            max_steps=5,
            per_device_train_batch_size=4 // dp,
            per_device_eval_batch_size=4 // dp,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            max_grad_norm=0.5,
            adam_epsilon=1e-4,  # the gradient of a key's bias is rounding alone
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        | options
    )
    return transformers.TrainingArguments(str(folder), **options)


def accuracy(prediction):
    hits = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
    return dict(count=len(prediction.label_ids), labels=int((prediction.label_ids != -100).sum()), hits=int(hits.sum()))


def made(world, layout, folder, model=None, **options):
    dp, tp = layout
    model = split(world, dp, tp) if model is None else model
    data = dict(train_dataset=rows(), eval_dataset=rows(8, seed=1, ragged=False))
    return Trainer(model, arguments(folder, dp, **options), compute_metrics=accuracy, **data)


def trained(world, layout, folder, model_options, options):
    with launched(world):
        trainer = made(world, layout, folder, split(world, *layout, **model_options), **options)
        trainer.train()
        return results(trainer)


def results(trainer):
    logged = [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "grad_norm" in e]
    metrics = trainer.predict(rows(7, seed=2)).metrics
    counted = [metrics[f"test_{key}"] for key in ("count", "labels", "hits")]
    return dict(logged=logged, loss=trainer.evaluate()["eval_loss"], counted=counted, weights=weights(trainer.model))


def same(got, want, tolerance=1e-6):
    for (loss, norm), (loss_1, norm_1) in zip(got["logged"], want["logged"], strict=True):
        assert loss == pytest.approx(loss_1, rel=10 * tolerance) and norm == pytest.approx(norm_1, rel=10 * tolerance)
    assert got["loss"] == pytest.approx(want["loss"], rel=10 * tolerance) and got["counted"] == want["counted"]
    for name, weight in want["weights"].items():
        assert (got["weights"][name] - weight).abs().max() < tolerance, name


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_split_model_trains_as_one_process_does(ranks, tmp_path, layout):
    """Losses, the norm of the gradients, weights, and metrics over the 7 rows once; dropout by position."""
    case = (str(tmp_path), dict(DROPOUT), {})
    (want,) = ranks(1, trained, (1, 1), *case)
    assert want["counted"][0] == 7 and want["logged"][0][1] > 0.5
    for got in ranks(layout[0] * layout[1], trained, layout, *case):
        same(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("dp, cp, tp", [(1, 2, 1), (2, 2, 1), (1, 2, 2)])
def test_pieces_of_sequences(ranks, tmp_path, dp, cp, tp):
    """Ranks with pieces of the same sequences have the same batches."""
    (want,) = ranks(1, trained, (1, 1), str(tmp_path), dict(DROPOUT), {})
    for got in ranks(dp * cp * tp, trained, (dp, tp), str(tmp_path), DROPOUT | dict(cp=cp), {}):
        same(got, want)


def by_leaves(world, layout, folder):
    torch.set_num_threads(1)
    got = trained(world, layout, folder, DROPOUT | dict(bitwise=4), {})
    return torch.tensor([*got["logged"], (got["loss"], 0)], dtype=torch.float64), got["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("one, others", [((1, 1), [(1, 2), (1, 4)]), ((2, 1), [(2, 2)])])
def test_by_leaves_bits_do_not_depend_on_the_tensor_parallel_size(ranks, tmp_path, one, others):
    """Norms before clipping and weights after five steps; losses of one replica, which transformers averages over all
    processes."""
    (numbers, weights), *same_layout = ranks(one[0] * one[1], by_leaves, one, str(tmp_path))
    results = [result for dp, tp in others for result in ranks(dp * tp, by_leaves, (dp, tp), str(tmp_path))]
    first = 0 if one[0] == 1 else 1
    assert numbers[0, 1] > 0.5
    for other_numbers, other_weights in (*same_layout, *results):
        assert torch.equal(numbers[:, first:], other_numbers[:, first:])
        assert [name for name, weight in weights.items() if not torch.equal(weight, other_weights[name])] == []


CHECKPOINTS = dict(save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1)
BEST = dict(load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False)


def steps(world, layout, folder, first, last):
    """Steps of a run of five, in new objects that resume from the checkpoint before; the best is loaded at the end."""
    with launched(world):
        model = split(world, *layout, seed=first, **DROPOUT)
        trainer = made(world, layout, folder, model, **CHECKPOINTS, **BEST)
        trainer.add_callback(Stop(last))
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{first}" if first else None)
        return results(trainer), trainer.state.best_global_step


class Stop(transformers.TrainerCallback):
    def __init__(self, last):
        self.last = last

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.last


@pytest.mark.slow
@pytest.mark.parametrize("before, after", [((1, 2), (1, 2)), ((2, 1), (1, 2)), ((2, 2), (1, 1))])
def test_it_resumes_and_loads_the_best(ranks, tmp_path, before, after):
    """Killed after three steps of five, and resumed at another split."""
    ((want, best),) = ranks(1, steps, (1, 1), str(tmp_path / "one"), 0, 5)
    folder = str(tmp_path / "two")
    ranks(before[0] * before[1], steps, before, folder, 0, 3)
    for got, its in ranks(after[0] * after[1], steps, after, folder, 3, 5):
        assert its == best < 5
        same(got, want)
    whole = transformers.GPT2LMHeadModel.from_pretrained(Path(folder) / f"checkpoint-{best}")
    for name, weight in want["weights"].items():
        assert (whole.get_parameter(name) - weight).abs().max() < 1e-6


@pytest.mark.slow
def test_in_bf16(ranks, tmp_path):
    """Autocast over fp32 weights: the same to the rounding of bf16, and the same on both ranks."""
    case = (str(tmp_path), dict(DROPOUT), dict(bf16=True))
    (want,) = ranks(1, trained, (1, 1), *case)
    first, second = ranks(2, trained, (1, 2), *case)
    for (loss, _), (loss_1, _) in zip(first["logged"], want["logged"], strict=True):
        assert loss == pytest.approx(loss_1, rel=2e-3)
    assert first["logged"] == second["logged"] and first["counted"][0] == 7
    assert all(torch.equal(second["weights"][name], weight) for name, weight in first["weights"].items())


# ---- without the mix-in ----


NO_DROPOUT = {"gpt2": dict(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)}
NO_DROPOUT["bert-mlm"] = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def of_a_family(world, folder, name, tp):
    """The weights after five steps, by the names of files; ``tp`` None: of the plain module under the plain Trainer.

    transformers' BertForMaskedLM takes the number of labels in all micro-batches and does not read it, so that those of
    its Trainer are added without weights: one micro-batch.
    """
    options = dict(weight_decay=0.1) | (dict(gradient_accumulation_steps=1) if name == "bert-mlm" else {})
    with launched(world):
        model = theirs.make(name, torch.float64, **NO_DROPOUT.get(name, {}))
        if tp is None:
            trainer = transformers.Trainer(model, arguments(folder, 1, **options), train_dataset=rows())
            trainer.train()
            return {key: p.detach().float() for key, p in model.named_parameters()}
        mesh = world.mesh(1, tp)
        model = parallelize(model, TensorParallel(mesh["tp"]), dp=mesh["dp"])
        made(world, (1, tp), folder, model, **options).train()
        return weights(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in theirs.NAMES if name != "bert"])
def test_every_family_has_the_plain_modules_weights(ranks, tmp_path, name):
    """After five steps of AdamW with weight decay and clipping; the plain module is trained by nothing of ours."""
    (want,), found = ranks(1, of_a_family, tmp_path, name, None), ranks(2, of_a_family, tmp_path, name, 2)
    start = dict(theirs.make(name, torch.float64, **NO_DROPOUT.get(name, {})).named_parameters())
    for got in found:
        assert set(want) <= set(got)
        for key, p in want.items():
            assert torch.allclose(got[key], p, atol=2e-5), key
    assert all((p - start[key]).abs().max() > 1e-3 for key, p in want.items() if "key.bias" not in key)


def bare(world, layout, folder):
    with launched(world):
        model = split(world, *layout)
        return said(lambda: transformers.Trainer(model, arguments(folder, layout[0]), train_dataset=rows()))


@pytest.mark.parametrize("layout", [(1, 2), (2, 1)])
def test_a_bare_trainer_is_refused(ranks, tmp_path, layout):
    for message in ranks(2, bare, layout, str(tmp_path)):
        assert "GPT2LMHeadModel is split by tpfuse.parallelize; train it with class Trainer(tpfuse.Tr" in message
    assert not list(tmp_path.iterdir())


def test_whole_tensors_are_loaded_by_their_names(tmp_path):
    """As a bare Trainer hands them over when it resumes, at one process."""
    model, other = parallelize(small()), small(seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = model.load_state_dict(other.state_dict(), False)
    assert not found.missing_keys and not found.unexpected_keys
    assert all(torch.equal(weight, other.get_parameter(name)) for name, weight in weights(model).items())
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    part = dict(list(other.state_dict().items())[:3])
    with pytest.raises(ValueError, match="load_state_dict: state_dict lacks"):
        model.load_state_dict(part, False)


def misplaced(world, folder):
    with launched(world):
        mesh = world.mesh(2, 2)
        model = parallelize(small(), TensorParallel(mesh["dp"]), dp=mesh["tp"])  # the tensor-parallel ranks apart
        return said(lambda: Trainer(model, arguments(folder, 2), train_dataset=rows()))


@pytest.mark.slow
def test_ranks_in_another_order_are_refused(ranks, tmp_path):
    messages = ranks(4, misplaced, str(tmp_path))
    assert "rank 1 is data-parallel rank 1 and tensor-parallel rank 0; accelerate needs init_device_mesh" in messages[1]
    assert all("accelerate needs init_device_mesh" in message for message in messages)


# ---- arguments that are used twice, and processes that are counted otherwise ----


def twice(world, layout, folder):
    """Losses of two Trainers of one TrainingArguments."""
    with launched(world):
        options, losses = arguments(folder, layout[0], max_steps=1), []
        for _ in range(2):
            trainer = Trainer(split(world, *layout), options, train_dataset=rows())
            trainer.train()
            losses.append([e["loss"] for e in trainer.state.log_history if "loss" in e])
        return losses


def test_two_trainers_of_the_same_arguments(ranks, tmp_path):
    (want,) = ranks(1, twice, (1, 1), str(tmp_path))
    assert want[0] == want[1]
    for losses in ranks(2, twice, (1, 2), str(tmp_path)):
        assert losses[0] == losses[1] == pytest.approx(want[0], rel=1e-5)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(rows(8, ragged=False))


def streamed(world, layout, folder):
    """-> the rows that this rank reads first, and what a Trainer says that is to dispatch them."""
    with launched(world):
        model = split(world, *layout)
        trainer = Trainer(model, arguments(folder, layout[0], max_steps=1), train_dataset=Stream())
        batch = next(iter(trainer.get_train_dataloader()))
        dispatching = arguments(folder, layout[0], max_steps=1, accelerator_config=dict(dispatch_batches=True))
        return batch["input_ids"], said(lambda: Trainer(model, dispatching, train_dataset=Stream()))


def test_replicas_read_their_own_rows_of_an_iterable_data_set(ranks, tmp_path):
    want = torch.stack([row["input_ids"] for row in rows(4, ragged=False)]).chunk(2)
    for rank, (batch, message) in enumerate(ranks(4, streamed, (2, 2), str(tmp_path))):
        assert torch.equal(batch, want[rank // 2])
        assert "give dispatch_batches=False" in message


def alone_by_the_environment(world, layout, folder):
    """A process group of a script's own making, of which no variable tells."""
    with launched(world):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        model = split(world, *layout)
        told = said(lambda: Trainer(model, arguments(folder, layout[0]), train_dataset=rows()))
        return told, said(lambda: Accelerator(cpu=True).prepare_model(model))


@pytest.mark.parametrize("layout", [(1, 2), (2, 1)])
def test_libraries_that_count_other_processes_are_named(ranks, tmp_path, layout):
    """Before, the loss was multiplied by 1 // 2: a run to its end with loss 0.0 in which no weight moved."""
    for trainer, accelerator in ranks(2, alone_by_the_environment, layout, str(tmp_path)):
        assert "torch.distributed has 2 processes, and accelerate counts 1, transformers counts 1; start" in trainer
        assert "torch.distributed has 2 processes, and accelerate counts 1; start the script by torchrun" in accelerator
