"""What a file holds counts, whatever its config.json says of it, as in transformers.

Heads that are not tied, one tensor under either name, tensors of other modules; and what stands beside the weights is
saved with them.

Spans: models/files/names.py, read.py, write.py: contents that a config does not foresee.
"""

import ast
import json
import pathlib
import re
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.common import error, make_tp
from tests.models.common import batch
from tests.models.exact import make_exact
from tests.models.theirs import NAMES, make
from tpfuse.models import GPT, Bert
from tpfuse.models.files.write import TOKENIZER_FILES

transformers.utils.logging.disable_progress_bar()
F64 = torch.float64
FP32 = 1e-5  # of a model that transformers reads from a file some is fp32: the scale of the embedding of Gemma
EVERYDAY = "llama", "gpt_neox", "bert-mlm"
HEADED = [name for name in NAMES if name != "bert"]
PLACE = {"bert-mlm": "AutoModelForMaskedLM"}


def stored(name, path):
    """A directory of a tied model; its tensors, and the names of its embedding and head."""
    model = make(name, tie_word_embeddings=True)
    model.save_pretrained(path)
    ends = [next(n for n, m in model.named_modules() if m is end) for end in (
        model.get_input_embeddings(), model.get_output_embeddings())]  # fmt: skip
    tensors = load_file(path / "model.safetensors")
    return tensors, *(f"{'embed_out' if name == 'gpt_neox' and end == 'lm_head' else end}.weight" for end in ends)


def rewrite(path, tensors):
    save_file({n: t.clone() for n, t in tensors.items()}, path / "model.safetensors", {"format": "pt"})


def theirs(name, path):
    """Logits of transformers, in fp64 throughout as ``make`` computes."""
    model = getattr(transformers, PLACE.get(name, "AutoModelForCausalLM")).from_pretrained(path, dtype=F64).eval()
    make_exact(model)
    return model(**call_of(path)).logits


def ours(name, path, tp=None):
    model = (Bert if "bert" in name else GPT).from_pretrained(path, dtype=F64, tp=tp)
    return model, model(**call_of(path)).logits


def call_of(path):
    call = batch(transformers.AutoConfig.from_pretrained(path))
    return {key: value for key, value in call.items() if key == "input_ids"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in EVERYDAY)) for n in HEADED])
def test_a_head_that_differs_is_not_tied(tmp_path, recwarn, name):
    tensors, embedding, head = stored(name, tmp_path)
    tied = theirs(name, tmp_path)
    rewrite(tmp_path, tensors | {head: tensors[embedding]})
    model, logits = ours(name, tmp_path)
    assert model.config.tie_embeddings and error(logits, tied) < FP32
    assert not [w for w in recwarn if "tpfuse" in w.filename]
    other = torch.randn(tensors[embedding].shape, dtype=F64, generator=torch.Generator().manual_seed(3))
    rewrite(tmp_path, tensors | {head: other})
    want = theirs(name, tmp_path)
    assert error(want, tied) > 0.1
    with pytest.warns(
        UserWarning, match="says that head and embedding are one tensor, and .* differ: they are not tied"
    ):
        model, logits = ours(name, tmp_path)
    assert error(logits, want) < FP32
    model.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text())["tie_word_embeddings"] is False
    assert error(theirs(name, tmp_path / "again"), want) < FP32


@pytest.mark.parametrize("name", EVERYDAY)
def test_one_tensor_by_the_heads_name_alone(tmp_path, name):
    tensors, embedding, head = stored(name, tmp_path)
    rewrite(tmp_path, {head if n == embedding else n: t for n, t in tensors.items()})
    assert error(ours(name, tmp_path)[1], theirs(name, tmp_path)) < FP32


def split_head(world, path):
    with pytest.warns(UserWarning, match="not tied"):
        model, logits = ours("llama", pathlib.Path(path), make_tp(world))
    return logits, model.head.first


def test_ranks_agree_where_one_has_the_rows_that_differ(ranks, tmp_path):
    tensors, embedding, head = stored("llama", tmp_path)
    other = tensors[embedding].clone()
    other[-1] += 1
    rewrite(tmp_path, tensors | {head: other})
    want = theirs("llama", tmp_path)
    for logits, first in ranks(2, split_head, str(tmp_path)):
        assert error(logits, want[..., first : first + logits.shape[-1]]) < FP32


EXTRA = {  # of files that transformers loads
    "a value head": lambda tensors: {"v_head.summary.weight": torch.ones(1, 48)},
    "a layer past the last": lambda tensors: {
        n.replace(".1.", ".2."): t for n, t in tensors.items() if n.startswith("model.layers.1.")
    },
    "frequencies": lambda tensors: {"model.rotary_emb.inv_freq": torch.ones(2)},
    "nothing": lambda tensors: {"empty": torch.ones(0)},
}


@pytest.mark.parametrize("case", EXTRA)
def test_tensors_of_other_modules_are_left_with_a_warning(tmp_path, case):
    tensors, *_ = stored("llama", tmp_path)
    extra = EXTRA[case](tensors)
    rewrite(tmp_path, tensors | extra)
    with pytest.warns(
        UserWarning, match=f"holds {re.escape(next(iter(sorted(extra))))}.*of no module of GPT: not read"
    ):
        logits = ours("llama", tmp_path)[1]
    assert error(logits, theirs("llama", tmp_path)) < FP32


def test_files_of_every_tokenizer_of_the_installed_release_are_copied():
    root = pathlib.Path(transformers.__file__).parent
    texts = [path.read_text() for path in (root / "models").rglob("tokenization*.py")]
    tables = [ast.literal_eval(t) for text in texts for t in re.findall(r"VOCAB_FILES_NAMES = (\{.*?\})", text, re.S)]
    base = (root / "tokenization_utils_base.py").read_text() + (root / "utils/__init__.py").read_text()
    names = {name for table in tables for name in table.values()}
    names |= set(re.findall(r'^[A-Z_]*(?:TOKEN|TEMPLATE)[A-Z_]*_FILE = "(.*)"', base, re.M))
    assert len(names) > 20 and names <= set(TOKENIZER_FILES)


def test_a_tokenizer_that_is_there_stays(tmp_path):
    """Tokens may have been added to it.  So does a generation config."""
    stored("llama", tmp_path)
    beside = {"tokenizer_config.json": "old", "vocab.json": "old", "generation_config.json": "old"}
    for name, text in beside.items():
        (tmp_path / name).write_text(text)
    model, out = GPT.from_pretrained(tmp_path), tmp_path / "out"
    contents = lambda folder: {path.name: path.read_text() for path in folder.glob("*.json") if path.name in names}
    names = {*beside, "added_tokens.json"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for folder in out, out, tmp_path:
            model.save_pretrained(folder)
            assert contents(folder) == beside
    there = {"tokenizer_config.json": "new", "added_tokens.json": "new"}
    for name in beside:
        (out / name).unlink()
    for name, text in there.items():
        (out / name).write_text(text)
    with pytest.warns(UserWarning, match=rf"{out} has files of a tokenizer, .* stay; those of {tmp_path} differ"):
        model.save_pretrained(out)
    assert contents(out) == there | {"generation_config.json": "old"}
    (out / "generation_config.json").write_text("new")
    (out / "vocab.json").symlink_to(tmp_path / "vocab.json")
    with pytest.warns(UserWarning, match="differ"):
        model.save_pretrained(out)
    assert contents(out)["generation_config.json"] == "new" and (out / "vocab.json").is_symlink()


def test_code_that_a_config_names_is_saved_with_it(tmp_path):
    stored("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "helper.py").write_text("X = 1\n")
    GPT.from_pretrained(tmp_path).save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain/helper.py").exists()
    (tmp_path / "config.json").write_text(json.dumps(config | dict(auto_map=dict(AutoConfig="mine.MyConfig"))))
    (tmp_path / "mine.py").write_text("from .helper import X\n")
    (tmp_path / "spiece.model").write_text("x")
    GPT.from_pretrained(tmp_path).save_pretrained(tmp_path / "named")
    assert {"mine.py", "helper.py", "spiece.model"} <= {path.name for path in (tmp_path / "named").iterdir()}
