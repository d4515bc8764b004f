"""BERT's relatives against transformers' own classes: values, gradients, padding and files, at every split.

Spans: models/families/ of BERT's relatives, and models/bert.py: one table of models for all of them.
"""

import functools
from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from tests.common import assert_equal, make_tp
from tests.models.common import gradients
from tests.models.families.encoders import F64, FAMILIES, KINDS, PAD, SIZES, batch, close, make, run, step, want
from tpfuse import add_lora, as_dtensor, load_checkpoint, parallelize, save_checkpoint
from tpfuse.models import Bert, BertConfig, Classifier, with_head
from tpfuse.models.files.write import full_tensor
from tpfuse.packing import packed_batch
from tpfuse.tools.ledger import parameter_count

EVERY_DAY = "roberta", "distilbert", "modernbert"
ALL = [name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
NAMES = [name if name == "modernbert" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    @functools.cache
    def of(name, kind, **options):
        model = make(name, kind, **options)
        model.save_pretrained(folder := tmp_path_factory.mktemp(f"{name}-{kind}"))
        return model, folder

    return of


MLM = [kind if kind == "mlm" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
ALIKE = "xlm-roberta", "camembert"  # RoBERTa by other names: its table, and so fewer cases
SPLITS = {  # padding -> ranks, sequence parallelism, and the heads that are tried with it
    "right": (2, True, tuple(KINDS)),
    "left": (4, False, ("mlm", "sequence")),
    None: (4, True, ("base", "token")),
}


def of_every_kind(names, kinds=KINDS, alike=("mlm",)):
    """(name, kind), every kind of a name but of those that are ALIKE; slow but for EVERY_DAY's mlm."""
    for name in names:
        for kind in alike if name in ALIKE else kinds:
            daily = name in EVERY_DAY and kind == "mlm"
            yield pytest.param(name, kind, marks=[] if daily else [pytest.mark.slow])


@pytest.mark.parametrize(
    "name, kind, pad",
    [
        pytest.param(name, kind, pad, marks=[] if name in EVERY_DAY and pad == "right" else [pytest.mark.slow])
        for name in FAMILIES
        for pad, (*_, kinds) in SPLITS.items()
        for kind in kinds
        if pad == "right" or name not in ALIKE
    ],
)
def test_as_transformers(files, ranks, reached, name, kind, pad):
    model, folder = files(name, kind)
    call, (R, sp, _) = batch(kind, pad), SPLITS[pad]
    exact = want(model, kind, call)
    errors = close(run(None, folder, kind, False, call), exact)
    config = BertConfig.from_hf(model.config.to_dict())
    for got in ranks(R, run, folder, kind, sp, call):
        errors = close(got, exact)
    if kind == "mlm":
        reached(config, R, errors, sp=sp)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_untied_head(files, ranks, reached, name):
    model, folder = files(name, "mlm", tie_word_embeddings=False)
    call = batch("mlm")
    exact = want(model, "mlm", call)
    for got in ranks(2, run, folder, "mlm", True, call):
        reached(BertConfig.from_hf(model.config.to_dict()), 2, close(got, exact), sp=True)


# ---- positions that count tokens ----


def test_positions_come_from_the_tokens_and_not_from_the_mask(files):
    model, folder = files("roberta", "base")
    ours = Bert.from_pretrained(folder, dtype=F64)
    call = batch("base")
    embeds = model.get_input_embeddings()(call["input_ids"])
    for given in (
        dict(input_ids=call["input_ids"]),
        dict(inputs_embeds=embeds),  # whose padding nobody knows
        dict(input_ids=call["input_ids"], position_ids=torch.arange(7).expand(3, -1)),
    ):
        got, exact = (m(**given).last_hidden_state for m in (ours, model))
        torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-10)
    one = ours(call["input_ids"]).last_hidden_state
    assert not torch.allclose(one, ours(inputs_embeds=embeds).last_hidden_state)
    assert not torch.allclose(one, ours(call["input_ids"].masked_fill(call["input_ids"] == PAD, 5)).last_hidden_state)


def test_the_longest_sequence(files):
    """Positions begin behind padding's, so that two are not there."""
    model, folder = files("roberta", "base")
    ours, ids = Bert.from_pretrained(folder, dtype=F64), torch.full((1, 30), 5)
    torch.testing.assert_close(ours(ids).last_hidden_state, model(ids).last_hidden_state, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="Bert: 31 positions from 2 on are more than the model's max_positions=32"):
        ours(torch.full((1, 31), 5))
    with pytest.raises(ValueError, match="BertConfig: positions_skip_padding needs a pad_token_id, got None"):
        BertConfig(vocab_size=9, max_positions=9, hidden_size=8, num_layers=1, num_heads=2, pad_token_id=None,
                   positions_skip_padding=True)  # fmt: skip


# ---- rotary positions, windows and documents ----


TEXTS = [torch.arange(2, 2 + n) * 7 % 97 for n in (9, 1, 30, 4)]  # together more than the model's 32 positions


def documents(world, folder, sp):
    """Hidden states and gradients of documents packed into a row."""
    model = Bert.from_pretrained(folder, tp=None if world is None else make_tp(world, sp), dtype=F64)
    hidden = model(**dict(packed_batch(TEXTS)._asdict(), labels=None)).last_hidden_state[0]
    hidden.sin().sum().backward()
    return dict(hidden=hidden.detach()) | gradients(model)


def test_packed_documents(files, ranks, reached):
    """Each gives what it gives alone, in transformers."""
    model, folder = files("modernbert", "base")
    model.zero_grad()
    hidden = torch.cat([model(text[None]).last_hidden_state[0] for text in TEXTS])
    hidden.sin().sum().backward()
    exact = dict(hidden=hidden.detach()) | {name: p.grad for name, p in model.named_parameters()}
    close(documents(None, folder, False), exact)
    for got in ranks(2, documents, folder, True):
        worst = max(close(got, exact).values())
    reached(BertConfig.from_hf(model.config.to_dict()), 2, {"packed documents": worst})
    with pytest.raises(ValueError, match="Bert: packed sequences .* are not built where positions are learned"):
        Bert.from_pretrained(files("roberta", "mlm")[1])(torch.ones(1, 3, dtype=torch.int64), max_seqlen=3)


def test_windows_and_both_tables_of_positions_show(files):
    """In one model each, so that the comparisons above are of all of them."""
    _, folder = files("modernbert", "base")
    right, ids = Bert.from_pretrained(folder, dtype=F64), batch("base", None)["input_ids"]
    exact = right(ids).last_hidden_state
    assert right.config.windows == (None, 3, None)
    for change in dict(window=4), dict(local_rope=None), dict(rope=right.config.local_rope), dict(pooling="mean"):
        with torch.device("meta"):
            wrong = Bert(replace(right.config, **change))
        wrong.load_state_dict(right.state_dict(), assign=True)
        alike = torch.allclose(wrong.eval()(ids).last_hidden_state, exact, rtol=1e-6, atol=1e-6)
        assert alike == ("pooling" in change), change


def test_hidden_states_and_positions_that_are_given(files):
    model, folder = files("modernbert", "mlm")
    ours, call = Bert.from_pretrained(folder, dtype=F64), batch("base")
    call["position_ids"] = torch.arange(7).flip(0).expand(3, -1).contiguous()
    got, exact = ours(**call, output_hidden_states=True), model(**call, output_hidden_states=True)
    mask = call["attention_mask"].bool()
    for a, b in zip(got.hidden_states, exact.hidden_states, strict=True):
        torch.testing.assert_close(a[mask], b[mask], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got.logits[mask], exact.logits[mask], rtol=1e-10, atol=1e-10)


OLDER = dict(global_rope_theta=500.0, local_rope_theta=50.0, global_attn_every_n_layers=2)


def test_older_keys_of_rotary_positions_and_layers():
    cls, sizes = FAMILIES["modernbert"]
    new = BertConfig.from_hf(cls(**SIZES | sizes | OLDER).to_dict())
    written = {k: x for k, x in cls(**SIZES | sizes).to_dict().items() if k not in ("rope_parameters", "layer_types")}
    assert BertConfig.from_hf(written | OLDER) == new
    assert [rope["rope_theta"] for rope in new.ropes] == [500.0, 50.0] and new.windows == (None, 3, None)
    bare = {k: x for k, x in written.items() if k not in OLDER}
    assert [rope["rope_theta"] for rope in BertConfig.from_hf(bare).ropes] == [160_000.0, 10_000.0]
    windowed = written | dict(sliding_window=5)
    assert BertConfig.from_hf(windowed) == replace(BertConfig.from_hf(written), window=6)
    assert BertConfig.from_hf(windowed) == BertConfig.from_hf(cls.from_dict(windowed).to_dict())
    yarn = dict(rope_type="yarn", rope_theta=5.0, factor=2.0)
    for change, message in (
        (dict(sliding_window=None), "sliding_window must be an integer of at least 0, got None"),
        (dict(local_rope_theta=None), "local_rope_theta must be a number, got null"),
        (dict(rope_scaling=yarn), "rope_type='yarn' is not built; one of default is"),
        (dict(rope_parameters=dict(full_attention=yarn)), "rope_type='yarn' is not built; one of default is"),
        (dict(rope_parameters=3), "rope_parameters must be an object"),
        (dict(layer_types=["full"]), "layer_types must be 3 of full_attention and sliding_attention"),
        (dict(attention_dropout=0.1), "attention_dropout=0.1 is not built; only 0.0 is"),
        (dict(mlp_dropout=0.1), "mlp_dropout=0.1 is not built; only 0.0 is"),
        (dict(decoder_bias=False), "decoder_bias=False is not built; only True is"),
    ):
        with pytest.raises(ValueError, match=f"BertConfig: {message}"):
            BertConfig.from_hf(written | change)


# ---- files ----


def saved(world, folder, out):
    Bert.from_pretrained(folder, tp=None if world is None else make_tp(world), dtype=F64).save_pretrained(out)


@pytest.mark.parametrize("name, kind", list(of_every_kind(FAMILIES)))
def test_a_saved_directory_is_transformers_own(files, ranks, reached, tmp_path, name, kind):
    for tied in (True, False) if kind == "mlm" else (True,):
        model, folder = files(name, kind) if tied else files(name, kind, tie_word_embeddings=False)
        ranks(2, saved, folder, out := tmp_path / str(tied))
        again, info = type(model).from_pretrained(out, dtype=F64, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        state, got = dict(model.state_dict()), dict(again.state_dict())
        if not tied and "lm_head.bias" in state:
            state["lm_head.bias"] = state["lm_head.decoder.bias"]  # the idle copy
        assert_equal(got, state)
        ignore = {"_name_or_path", "transformers_version"}
        theirs, ours = ({k: v for k, v in m.config.to_dict().items() if k not in ignore} for m in (model, again))
        assert theirs == ours
        if kind == "mlm":
            reached(BertConfig.from_hf(model.config.to_dict()), 2, {"saved and loaded": 0.0})


@pytest.mark.parametrize("name", ALL)
def test_a_config_is_written_and_read_again(name):
    cls, sizes = FAMILIES[name]
    config = BertConfig.from_hf(cls(**SIZES | sizes).to_dict())
    assert BertConfig.from_hf(config.to_hf()) == config
    assert BertConfig.from_hf(cls(**config.to_hf()).to_dict()) == config


@pytest.mark.parametrize("name", NAMES)
def test_a_model_made_here_loads_in_transformers(tmp_path, name):
    cls, sizes = FAMILIES[name]
    config = BertConfig.from_hf(cls(**SIZES | sizes).to_dict())
    for kind, options in (("mlm", dict(masked_lm=True)), ("sequence", dict(classifier=Classifier(4)))):
        model = Bert(config, **options).eval()
        model.save_pretrained(tmp_path / kind)
        again, info = KINDS[kind].from_pretrained(tmp_path / kind, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        call = {key: x for key, x in batch(kind).items() if key != "labels"}
        torch.testing.assert_close(model(**call).logits, again.eval()(**call).logits, rtol=1e-4, atol=1e-5)


def begun(world, folder, call, per):
    tp = None if world is None else make_tp(world)
    model = Bert.from_pretrained(folder, tp=tp, dtype=F64, classifier=Classifier(4, per=per), seed=3)
    logits = model(**call).logits.detach()
    return logits, {name: full_tensor(p, *spec) for name, p, *spec in model.files.stored_parameters()}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ALIKE])
def test_a_new_head_on_a_pretrained_model(files, ranks, name, kind="mlm"):
    """Every weight that the files hold is theirs, the others are drawn, the same at every split."""
    model, folder = files(name, kind)
    call = {key: x for key, x in batch("base").items() if key != "labels"}
    for per in "sequence", "token":
        logits, weights = begun(None, folder, call, per)
        assert logits.shape == ((3, 4) if per == "sequence" else (3, 7, 4))
        got = ranks(2, begun, folder, call, per)[1]
        assert_equal(got[1], weights)
        torch.testing.assert_close(got[0], logits, rtol=1e-10, atol=1e-10)
        assert torch.equal(weights["embedding.weight"], model.get_input_embeddings().weight)


# ---- dropout ----


def dropped(world, name, classifier, call):
    cls, sizes = FAMILIES[name]
    config = BertConfig.from_hf(cls(**SIZES | sizes).to_dict())
    torch.set_default_dtype(F64)
    try:
        model = Bert(config, tp=None if world is None else make_tp(world), classifier=classifier, seed=3)
    finally:
        torch.set_default_dtype(torch.float32)
    return model(**call, step=5).logits.detach(), model.classifier.p


@pytest.mark.parametrize("per", ["sequence", "token"])
@pytest.mark.parametrize("name", NAMES)
def test_masks_are_the_same_at_every_split(ranks, name, per):
    call, default = batch(per), Classifier(3, per=per)
    _, p = dropped(None, name, default, call)
    assert p == (0.0 if "modern" in name else 0.2 if (name, per) == ("distilbert", "sequence") else 0.1)
    exact, _ = dropped(None, name, replace(default, dropout=0.3), call)
    got, _ = ranks(2, dropped, name, replace(default, dropout=0.3), call)[1]
    torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(dropped(None, name, replace(default, dropout=0.0), call)[0], exact)


# ---- with the library's other features ----


def composed(world, folder, way, call, path):
    sp = world is not None
    options = {"smallest": dict(saving="smallest"), "full": dict(recompute="full")}.get(way, {})
    model = Bert.from_pretrained(folder, tp=make_tp(world) if sp else None, dtype=F64, **options)
    if way == "hooked":
        for module in model.modules():
            module.register_forward_hook(lambda *_: None)
    if way == "compiled":
        model.compile(backend="aot_eager")
    if way == "sharded":
        as_dtensor(model, world.mesh(1, world.size)["tp"])
        for module in (*model.blocks, model):
            fully_shard(module, mesh=world.mesh(1, world.size)["dp"])
    if way == "adapted":
        add_lora(model, rank=2, alpha=4)
        out = model(**call)
        out.loss.backward()
        grads = [p.grad is not None for name, p in model.named_parameters() if ".lora." in name]
        assert grads and all(grads) and model.embedding.weight.grad is None
        return dict(loss=out.loss.detach())
    if way == "checkpoint":
        save_checkpoint(path, model, torch.optim.SGD(model.parameters(), lr=0.1), step=1)
        model.init_weights()
        load_checkpoint(path, model)
    if way in ("compiled", "sharded"):
        out = model(**call, return_logits=True)
        out.loss.backward()
        return dict(loss=out.loss.detach())
    return step(model, "mlm", call)


WAYS = "smallest", "full", "hooked", "compiled", "sharded", "adapted", "checkpoint"


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_composed(files, ranks, tmp_path, way):
    _, folder = files("modernbert", "mlm")
    call = batch("mlm")
    exact = run(None, folder, "mlm", False, call)
    for got in ranks(2, composed, folder, way, call, tmp_path / "checkpoint"):
        close(got, {key: exact[key] for key in got})


@pytest.mark.parametrize("name", ALL)
def test_parameters_are_counted(name):
    cls, sizes = FAMILIES[name]
    config = BertConfig.from_hf(cls(**SIZES | sizes).to_dict())
    with torch.device("meta"):
        model = with_head(config)
    assert sum(p.numel() for p in model.parameters()) == parameter_count(config)


# ---- parallelize ----


def parallel(world, name, kind, sp, call):
    module = parallelize(make(name, kind), make_tp(world, sp))
    out = module(**call)
    loss = out[0] if "labels" in call else out[0].sin().sum()
    loss.backward()
    value = out[0] if kind == "base" else out.logits
    return type(out).__name__, value.detach(), all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("name, kind", list(of_every_kind(FAMILIES)))
def test_a_module_of_transformers_parallelized(ranks, name, kind):
    model, call = make(name, kind), batch(kind)
    out = model(**call)
    exact = (out[0] if kind == "base" else out.logits).detach()
    for got, value, trained in ranks(2, parallel, name, kind, True, call):
        assert got == type(out).__name__ and (trained or kind == "base")
        torch.testing.assert_close(value, exact, rtol=1e-10, atol=1e-10)


# ---- what is refused ----


def distilbert(**options):
    return Bert(BertConfig.from_hf(FAMILIES["distilbert"][0](**SIZES | FAMILIES["distilbert"][1]).to_dict()), **options)


REFUSED = {
    "types": (
        lambda _: distilbert()(torch.ones(1, 3, dtype=torch.int64), token_type_ids=torch.ones(1, 3, dtype=torch.int64)),
        "Bert: there are no token types, so token_type_ids must be None",
    ),
    "pooler": (lambda _: distilbert(pooler=True), "Bert: a distilbert model has no pooler, got pooler=True"),
    "dropout": (
        lambda path: distilbert(classifier=Classifier(3, per="token", dropout=0.3)).save_pretrained(path),
        "Classifier: DistilBertForTokenClassification has no dropout of its own, got dropout=0.3",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(tmp_path, what):
    call, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        call(tmp_path)


def test_tables_made_in_inference_mode_serve_training_too(files):
    _, folder = files("modernbert", "mlm")
    model, call = Bert.from_pretrained(folder), batch("mlm")
    with torch.inference_mode():
        want = model(**call).loss.clone()
    (loss := model.train()(**call, step=0, first_sample=0).loss).backward()
    assert torch.equal(loss.detach(), want)
