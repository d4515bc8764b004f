"""Classification heads against transformers' classes: values, gradients, padding and files, at every split."""

import functools
import json
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers

from tests.common import assert_equal, error, make_tp
from tests.models import test_gpt, theirs
from tests.models.common import BERT_CONFIG, GPT_CONFIG, default_dtype, gradients, whole
from tests.models.families.test_llama_like import their_config
from tpfuse.kernels.runtime.op import GEMM
from tpfuse.models import GPT, Bert, Classifier
from tpfuse.tools.ledger import Ledger, state_bytes

F64, L = torch.float64, 3
NAMES = "gpt2", "llama", "bert"
PERS = "sequence", "token"
PROBLEMS = {"regression": L, "one": 1, "single_label_classification": L, "multi_label_classification": L}


def make(name, per, **options):
    """transformers' class in fp64, in which nothing is trivial; 0 is padding."""
    pad = None if name == "bert" else 0  # whose embedding's gradient torch drops, which BERT's pooler reads on the left
    options = dict(num_labels=L, pad_token_id=pad) | options
    if name in theirs.CLASSES:
        _, config, sizes = theirs.CLASSES[name]
        config = config(**theirs.SIZES | sizes | options)
    else:
        config = their_config(name, 2, **options)
    auto = dict(
        sequence=transformers.AutoModelForSequenceClassification, token=transformers.AutoModelForTokenClassification
    )
    torch.manual_seed(1)
    return theirs.exact(auto[per].from_config(config), F64)


def batch(per, pad=None, problem="single_label_classification", size=3, seq=7):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 97, (size, seq), generator=g)
    shape = (size, seq) if per == "token" else (size,)
    labels = torch.randint(L, shape, generator=g)
    if problem != "single_label_classification":
        numbers = torch.rand(size, L, generator=g, dtype=F64)
        labels = {"regression": numbers, "one": numbers[:, 0], "multi_label_classification": numbers.round()}[problem]
    if pad is None:
        return dict(input_ids=ids, labels=labels)
    length = seq - torch.arange(size)[:, None] * 2
    mask = torch.arange(seq) < length if pad == "right" else torch.arange(seq) >= seq - length
    labels = labels.masked_fill(~mask, -100) if per == "token" else labels
    return dict(input_ids=ids.masked_fill(~mask, 0), labels=labels, attention_mask=mask.long())


def step(model, call):
    """Of a model of tpfuse: loss, logits, and whole gradients by the names of a file."""
    out = model(**call)
    out.loss.backward()
    return dict(loss=out.loss.detach(), logits=out.logits.detach()) | gradients(model)


def _split(world, folder, sp, call, **options):
    cls = Bert if "bert" in str(folder) else GPT
    tp = None if world is None else make_tp(world, sp)
    return step(cls.from_pretrained(folder, tp=tp, dtype=F64, **options), call)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    @functools.cache
    def of(name, per, **options):
        model = make(name, per, **options)
        model.save_pretrained(folder := tmp_path_factory.mktemp(f"{name}-{per}"))
        return model, folder

    return of


def want(model, call):
    """Of a model of transformers; the loss of tokens in fp64, since theirs is taken in fp32."""
    model.zero_grad()
    out = model(**call)
    tokens = out.logits.dim() == 3
    loss = F.cross_entropy(out.logits.flatten(0, 1), call["labels"].flatten()) if tokens else out.loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return dict(loss=loss.detach(), logits=out.logits.detach()) | gradients


def close(got, exact):
    assert set(got) == set(exact)
    blind = lambda key: key.endswith("key.bias")  # softmax does not see it: its gradient is rounding
    worst = {k: (got[k] - exact[k]).abs().max() if blind(k) else error(got[k], exact[k]) for k in exact}
    assert max(worst.values()) < 1e-10, worst


def without_padding(found, call):
    """transformers' attention with soft caps gives rows of padding, which see nothing, the mean of all values."""
    return found | dict(logits=found["logits"][call["attention_mask"].bool()])


NO_TOKENS = "gemma3", "olmo2"  # of which transformers has no class that classifies tokens
KINDS = [
    pytest.param(name, per, marks=[] if name in NAMES else [pytest.mark.slow])
    for name in (*NAMES, *test_gpt.MORE)
    for per in (PERS[:1] if name in NO_TOKENS else PERS)
]


@pytest.mark.parametrize("name, per", KINDS)
def test_as_transformers(files, ranks, name, per):
    model, folder = files(name, per)
    seen = without_padding if (name, per) == ("gemma2", "token") else lambda found, call: found
    pads = dict(right=[(2, False), (4, True)], left=[(2, True)]) if name in NAMES else dict(left=[(2, True)])
    for pad, splits in pads.items():
        call = batch(per, pad)
        exact = seen(want(model, call), call)
        close(seen(_split(None, folder, False, call), call), exact)
        for R, sp in splits:
            for got in ranks(R, _split, folder, sp, call):
                close(seen(got, call), exact)


@pytest.mark.parametrize("given", [True, False], ids=["given", "inferred"])
@pytest.mark.parametrize("name, problem", [("gpt2", p) for p in PROBLEMS] + [("bert", "multi_label_classification")])
def test_problems(ranks, tmp_path, name, problem, given):
    kind = "regression" if problem == "one" else problem
    model = make(name, "sequence", num_labels=PROBLEMS[problem], problem_type=kind if given else None)
    if not given and problem == "regression":
        return  # several numbers are multi-label unless it is said
    model.save_pretrained(folder := tmp_path / name)
    call = batch("sequence", "right", problem)
    exact = want(model, call)
    close(_split(None, folder, False, call), exact)
    close(ranks(2, _split, folder, True, call)[1], exact)


# ---- dropout ----

CONFIGS = {
    "gpt": (GPT, GPT_CONFIG, Classifier(L, per="token", dropout=0.3)),
    "bert": (Bert, BERT_CONFIG, Classifier(L)),
    "bert tokens": (Bert, BERT_CONFIG, Classifier(L, per="token", dropout=0.3)),
}


def _dropped(world, name, sp, call):
    cls, config, classifier = CONFIGS[name]
    with default_dtype(F64):
        model = cls(config, tp=None if world is None else make_tp(world, sp), classifier=classifier, seed=3)
    return step(model, call | dict(step=5))


@pytest.mark.parametrize("name", CONFIGS)
def test_masks_are_the_same_at_every_split(ranks, name):
    cls, config, classifier = CONFIGS[name]
    call = batch(classifier.per, "right")
    exact = _dropped(None, name, False, call)
    for R, sp in ((2, True), (4, False)):
        close(ranks(R, _dropped, name, sp, call)[R - 1], exact)
    model = cls(config, classifier=classifier).train()
    logits = [model(**call, step=step).logits for step in (0, 0, 1)]
    assert torch.equal(*logits[:2]) and not torch.equal(*logits[1:])


def test_the_heads_dropout_is_its_own():
    """Nothing else drops: the mask is the head's, on rows scaled as dropout scales them."""
    config = replace(GPT_CONFIG, dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0)
    model, call = GPT(config, classifier=Classifier(L, per="token", dropout=0.5)), batch("token")
    dropped, whole = model(**call).logits, model.eval()(**call).logits
    assert int(model.step) == 1 and not torch.equal(dropped, whole)


# ---- files ----


def _saved(world, folder, saved):
    cls = Bert if "bert" in str(folder) else GPT
    model = cls.from_pretrained(folder, tp=None if world is None else make_tp(world), dtype=F64)
    model.save_pretrained(saved)
    return model.classifier.classifier


SAVED = [pytest.param(*kind, marks=pytest.mark.slow) for kind in (("gemma2", "token"), ("olmo2", "sequence"))]


@pytest.mark.parametrize("name, per", [*((name, per) for name in NAMES for per in PERS), *SAVED])
def test_what_is_saved_is_what_transformers_loads(files, ranks, tmp_path, name, per):
    model, folder = files(name, per)
    assert ranks(2, _saved, folder, tmp_path)[0].per == per
    again, info = type(model).from_pretrained(tmp_path, dtype=F64, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_equal(again.state_dict(), model.state_dict())
    config, read = model.config, again.config
    assert read.id2label == config.id2label and read.pad_token_id == config.pad_token_id


def test_a_model_made_here_is_what_transformers_loads(tmp_path):
    names = []
    for cls, config, classifier in (
        (GPT, GPT_CONFIG, Classifier(4, problem_type="regression", pad_token_id=0)),
        (GPT, GPT_CONFIG, Classifier(L, per="token", dropout=0.2)),
        (Bert, BERT_CONFIG, Classifier(1, dropout=0.2)),
    ):
        with default_dtype(F64):
            model = cls(config, classifier=classifier).eval()
        model.save_pretrained(tmp_path)
        auto = dict(
            sequence=transformers.AutoModelForSequenceClassification, token=transformers.AutoModelForTokenClassification
        )
        again = auto[classifier.per].from_pretrained(tmp_path, dtype=F64)
        call = batch(classifier.per, "right")
        del call["labels"]
        assert error(model(**call).logits, again.eval()(**call).logits) < 1e-10
        assert again.config.num_labels == classifier.num_labels
        assert cls.from_pretrained(tmp_path).classifier.classifier == classifier
        names.append(type(again).__name__)
    assert names == ["GPT2ForSequenceClassification", "GPT2ForTokenClassification", "BertForSequenceClassification"]


@pytest.mark.parametrize("name", CONFIGS)
def test_on_the_meta_device(name):
    """Its bytes, ops and initial weights are a model's like any other."""
    cls, config, classifier = CONFIGS[name]
    with torch.device("meta"):
        model, bare = cls(config, classifier=classifier), cls(config, **({} if cls is Bert else dict(lm_head=False)))
        call = {key: torch.empty_like(x) for key, x in batch(classifier.per).items()}
    with Ledger() as ledger:
        model(**call).loss.backward()
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    head = {f"classifier.{n}": p.numel() for n, p in model.classifier.named_parameters()}
    assert sum(head.values()) == 48 * L + L and head.items() <= sizes.items() and ledger.total(kind=GEMM).flops > 0
    beside = 0 if cls is GPT or classifier.per == "sequence" else 48 * 48 + 48  # the pooler
    assert sum(sizes.values()) == sum(p.numel() for p in bare.parameters()) + sum(head.values()) - beside
    assert state_bytes(model).parameters == 4 * sum(sizes.values())
    direct = cls(config, classifier=classifier)
    model.to_empty(device="cpu").init_weights()
    assert_equal(model.state_dict(), direct.state_dict())
    assert "num_labels=3" in repr(direct)


DEFAULTED = ("gemma2", "sequence", "pad_token_id"), ("olmo2", "sequence", "pad_token_id")
DEFAULTED += (("gpt_neox", "token", "classifier_dropout"),)


@pytest.mark.parametrize("name, per, key", DEFAULTED)
def test_a_key_that_is_missing_is_transformers_default(tmp_path, name, per, key):
    make(name, per, hidden_dropout=0.3).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = type(make(name, per)).from_pretrained(tmp_path)
    head = GPT.from_pretrained(tmp_path).classifier
    if per == "token":
        assert head.p == theirs.dropout.p == 0.1
    else:
        assert head.classifier.pad_token_id == theirs.config.pad_token_id is not None


# ---- a head that no file holds ----


def test_a_new_head_keeps_nothing_of_another(tmp_path):
    theirs.make("gpt2", problem_type="regression").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(num_labels=2)))
    model = GPT.from_pretrained(tmp_path, classifier=Classifier(L, pad_token_id=0))
    model.save_pretrained(tmp_path / "new")
    assert GPT.from_pretrained(tmp_path / "new").classifier.classifier == model.classifier.classifier
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "new")
    assert (again.config.num_labels, again.config.problem_type) == (L, None)


@pytest.mark.parametrize(
    "name, per, change",
    [
        ("bert-mlm", "sequence", dict(classifier_dropout=0.3)),
        ("gpt_neox", "token", dict(classifier_dropout=0.35)),
        ("gpt2", "token", dict(classifier_dropout=0.3)),
        ("llama", "token", dict(hidden_dropout=0.3)),
    ],
)
def test_a_new_head_keeps_its_own_dropout(tmp_path, name, per, change):
    """Where the directory's config.json says another, which transformers would take."""
    theirs.make(name, **change).save_pretrained(tmp_path)
    cls, auto = Bert if "bert" in name else GPT, getattr(transformers, f"AutoModelFor{per.capitalize()}Classification")
    p = {}
    for given in None, 0.25:
        model = cls.from_pretrained(tmp_path, classifier=Classifier(L, per=per, dropout=given))
        model.save_pretrained(tmp_path / "new")
        p[given] = model.classifier.p
        assert cls.from_pretrained(tmp_path / "new").classifier.p == p[given]
        again = auto.from_pretrained(tmp_path / "new")
        assert getattr(again, "dropout", None) is None or again.dropout.p == p[given]
    assert p[None] not in change.values() and p[0.25] == 0.25


def test_lm_head_says_that_no_head_classifies(files):
    """The embedding is the head."""
    folder = files("gpt2", "sequence")[1]
    for lm_head in True, False:
        with pytest.warns(UserWarning, match="holds score.weight, of no module of GPT: not read"):
            model = GPT.from_pretrained(folder, lm_head=lm_head)
        assert model.classifier is None and (model.head is not None) == lm_head


def test_masked_lm_says_that_no_head_classifies(files):
    """And the files lack what it asks for."""
    folder = files("bert", "sequence")[1]
    with pytest.warns(UserWarning, match="holds classifier.bias, classifier.weight, of no module of Bert: not read"):
        model = Bert.from_pretrained(folder, masked_lm=False)
    assert model.classifier is None and model.pooler is not None
    with pytest.raises(ValueError, match="from_pretrained: .* lacks cls.predictions.transform.dense.weight"):
        Bert.from_pretrained(folder, masked_lm=True)


def _begun(world, folder, cls, sp, classifier, call):
    tp = None if world is None else make_tp(world, sp)
    model = cls.from_pretrained(folder, tp=tp, dtype=F64, classifier=classifier, seed=7)
    own = {name: x for name, x in whole(model).items() if name.startswith(("classifier.", "pooler."))}
    return step(model, call) | {f"begun {name}": x for name, x in own.items()}


@pytest.mark.parametrize("name", ["gpt2", "bert-mlm"])
def test_a_new_head_on_a_pretrained_model(ranks, tmp_path, name):
    theirs.make(name).save_pretrained(folder := tmp_path / name)
    cls, pad = (Bert, {}) if "bert" in name else (GPT, dict(pad_token_id=0))
    for classifier in Classifier(L, **pad), Classifier(L, per="token"):
        case = folder, cls
        call = batch(classifier.per, "right")
        exact = _begun(None, *case, False, classifier, call)
        new = [key for key in exact if key.startswith("begun")]
        assert len(new) == (4 if cls is Bert and classifier.per == "sequence" else len(new))
        assert 0.01 < exact["begun classifier.weight"].std() < 0.4  # 0.2 times N(0, 1)
        got = ranks(2, _begun, *case, True, classifier, call)[1]
        close(got, exact)
        assert all(torch.equal(got[key], exact[key]) for key in new)


# ---- what is refused ----

REFUSED = {
    "no place": (GPT, {}, Classifier(L), dict(labels=torch.zeros(3, dtype=torch.int64)), "where sequences end is not"),
    "packed": (
        GPT,
        {},
        Classifier(L),
        dict(input_ids=torch.ones(1, 7, dtype=torch.int64), cu_seqlens=torch.tensor([0, 3, 7], dtype=torch.int32)),
        "cu_seqlens packs several sequences into a row, and Classifier",
    ),
    "shape": (
        GPT,
        {},
        Classifier(L, pad_token_id=0),
        dict(labels=torch.zeros(3, 7, dtype=torch.int64)),
        r"labels of "
        r"single_label_classification must be int64 \(3,\) or \(3, 1\), got",
    ),
    "value": (Bert, {}, Classifier(L), dict(labels=torch.full((3,), L)), r"labels must lie in 0 to 2, got \[3\]"),
    "numbers": (
        Bert,
        {},
        Classifier(L),
        dict(labels=torch.zeros(3)),
        r"labels of multi_label_classification must be "
        r"numbers \(3, 3\)",
    ),
    "smoothing": (Bert, {}, Classifier(1), dict(labels=torch.zeros(3), label_smoothing=0.1), "label_smoothing is of"),
    "dropout": (GPT, {}, Classifier(L, dropout=0.1), {}, r"a decoder's Classifier\(per='sequence'\) has no dropout"),
    "pad": (Bert, {}, Classifier(L, pad_token_id=0), {}, r"Classifier\(pad_token_id=0\) is for decoders"),
    "pooler": (Bert, dict(pooler=False), Classifier(L), {}, "reads the pooler"),
    "heads": (Bert, dict(masked_lm=True), Classifier(L), {}, "give masked_lm or classifier"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what):
    cls, options, classifier, call, message = REFUSED[what]
    with pytest.raises(ValueError, match=f"{cls.__name__}: .*{message}"):
        model = cls(GPT_CONFIG if cls is GPT else BERT_CONFIG, classifier=classifier, **options)
        model(**dict(input_ids=torch.ones(3, 7, dtype=torch.int64)) | call)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(num_labels=0), "num_labels must be a positive integer, got 0"),
        (dict(num_labels=2, per="word"), "per must be one of"),
        (dict(num_labels=2, problem_type="ranking"), "problem_type must be one of"),
        (dict(num_labels=2, per="token", problem_type="regression"), "per='token' is single_label_classification"),
        (dict(num_labels=1, problem_type="single_label_classification"), "has at least 2 labels"),
    ],
)
def test_a_record_that_is_none(options, message):
    with pytest.raises(ValueError, match=f"Classifier: .*{message}"):
        Classifier(**options)


def test_a_config_json_that_is_none(files, tmp_path):
    _, folder = files("gpt2", "token")
    shutil.copytree(folder, tmp_path / "gpt2")
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        (dict(num_labels=5), "Classifier: num_labels=5, and id2label has 3"),
        (dict(id2label=[1]), "Classifier: id2label must be an object"),
        (dict(classifier_dropout=2), "Classifier: classifier_dropout must"),
        (dict(token_classification_bias=False), "token_classification_bias=False is not built"),
    ):
        (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=message):
            GPT.from_pretrained(tmp_path / "gpt2")
    config["architectures"] = ["GPT2ForQuestionAnswering"]  # a head that is none of ours, as transformers leaves it
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="holds classifier.bias, classifier.weight, of no module of GPT: not read"):
        assert GPT.from_pretrained(tmp_path / "gpt2").classifier is None
