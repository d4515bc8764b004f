"""The generating example: text as it comes, stop strings over token borders, every split alike, and errors in one
line."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
import transformers

from tests.examples.launch import EXAMPLES, environment, example, ok
from tests.models.tokenizers import byte_level

generate = example("generate")
SCRIPT = "generate.py"


def said(capsys, monkeypatch, *argv) -> str:
    """main() on one process."""
    monkeypatch.setattr("sys.argv", [SCRIPT, *map(str, argv)])
    generate.main()
    return capsys.readouterr().out


def texts(out: str) -> list[str]:
    return re.findall(r"^> (.*?)(?=\n\n(?:> |\d+ tokens in ))", out, re.S | re.M)


SAMPLED = ["--temperature", 0.7, "--top-k", 40, "--top-p", 0.95, "--repetition-penalty", 1.2, "--seed", 3]


@pytest.mark.parametrize("procs", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_split_gives_one_text_and_greedily_transformers(trained, capsys, monkeypatch, procs):
    prompts = ["the quick", "fox and the lazy"]
    one = said(capsys, monkeypatch, "--model", trained[1], "--max-new-tokens", 8, *SAMPLED, *prompts)
    split = ok(SCRIPT, "--model", trained[1], "--max-new-tokens", 8, *SAMPLED, *prompts, procs=procs)
    assert texts(split) == texts(one) and len(texts(one)) == 2
    assert f"llama, tp={procs} on cpu, torch.float32" in split and re.search(
        r"\d+ tokens in \d+\.\d+ s: \d+\.\d tokens/s", split
    )
    greedy = said(capsys, monkeypatch, "--model", trained[1], "--max-new-tokens", 8, prompts[0])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(trained[1])
    codec = generate.codec(trained[1], 300, {})
    ids = theirs.generate(torch.tensor([codec.encode(prompts[0])]), max_new_tokens=8, do_sample=False, pad_token_id=0)[
        0
    ].tolist()
    assert texts(greedy) == [codec.decode([i for i in ids if i not in codec.ends])] != [prompts[0]]


def test_compare(trained, capsys, monkeypatch):
    out = said(
        capsys, monkeypatch, "--model", trained[0], "--max-new-tokens", 6, "--compare", "--runs", 2, "def ", "class X"
    )
    for name in ("tpfuse", "transformers"):
        assert re.search(rf"{name} +\d+\.\d \(\d+\.\d to \d+\.\d\) tokens/s, 1 process(es)? x \d+ threads", out)
    assert re.search(r"ratio +\d+\.\d\d \(.*\); the tokens are the same", out)
    assert re.search(r"^> def .*^> class X.*^12 tokens in .*^2 runs of 2 x 6 tokens each", out, re.S | re.M)
    one = said(capsys, monkeypatch, "--model", trained[0], "--max-new-tokens", 2, "--compare", "--runs", 1, "def ")
    assert "one run of 1 x 2 tokens" in one and "median" not in one  # no spread
    assert re.search(r"ratio +\d+\.\d\d; the tokens are the same", one)


# ---- text as it comes


def bytes_codec():
    return generate.Codec(lambda text: list(text.encode()), lambda ids: bytes(ids).decode(errors="replace"), [0])


def streamed(text: bytes, stops: list[str]) -> tuple[list[str], generate.Continuation]:
    """What is certain after every byte."""
    continuation = generate.Continuation(list(b"> "), bytes_codec(), stops)
    found = []
    for token in text:
        continuation.add(token)
        found.append(continuation.certain())
    assert all(b.startswith(a) for a, b in zip(found, found[1:]))  # what was written stays
    return found, continuation


def test_a_stop_string_spans_tokens_and_no_part_of_it_is_seen():
    found, c = streamed(b"abEN EN ENDmore", ["END", "zz"])
    assert c.text == found[-1] == "abEN EN " and c.ended and c.tokens == 11
    assert found[:5] == ["a", "ab", "ab", "ab", "abEN "]  # E and EN are held back until they are no stop


def test_the_earliest_stop_or_end_token_ends_and_half_a_character_is_not_written():
    assert streamed(b"one two three", ["three", "two", "o t"])[1].text == "one "
    assert streamed(b"one", ["four"])[1].text == "one"
    certain, c = streamed("é€x".encode(), [])
    assert certain == ["", "é", "é", "é", "é€", "é€x"] and not c.ended
    _, c = streamed(b"ab\0cd", [])
    assert c.text == "ab" and c.ended and c.tokens == 3


# ---- a conversation


@pytest.fixture(scope="session")
def talker(tmp_path_factory):
    """A Llama with a tokenizer that has a chat template."""
    torch.manual_seed(1)
    tokenizer, path = byte_level(), tmp_path_factory.mktemp("talker")
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    sizes |= dict(max_position_embeddings=64, initializer_range=0.5, intermediate_size=64, pad_token_id=None)
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


LINES = "the quick\n\nand the lazy dog\n"


def conversation(path, lines: list[str], **options) -> list[str]:
    """What transformers answers."""
    model, messages, answers = transformers.AutoModelForCausalLM.from_pretrained(path), [], []
    tokenizer = byte_level()
    for line in lines:
        messages.append(dict(role="user", content=line))
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        out = model.generate(ids, do_sample=False, pad_token_id=0, **options)[0, ids.shape[1] :]
        answers.append(tokenizer.decode(out, skip_special_tokens=True))
        messages.append(dict(role="assistant", content=answers[-1]))
    return answers


def answers(out: str) -> list[str]:
    return [answer.rstrip("\n") for answer in out.split("\n", 1)[1].split("> ")[1:-1]]


def test_a_conversation(talker, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(LINES))
    out = said(capsys, monkeypatch, "--model", talker, "--max-new-tokens", 6, "--chat")
    want = conversation(talker, LINES.split("\n")[::2], max_new_tokens=6)
    assert [a for a in answers(out) if a] == [a.strip("\n") for a in want] and len(set(want)) == 2


def test_prompts_by_the_chat_template(talker, capsys, monkeypatch):
    """Each is the first line of a conversation of its own."""
    lines = LINES.split("\n")[::2]
    out = said(capsys, monkeypatch, "--model", talker, "--max-new-tokens", 6, "--chat", *lines)
    wanted = [conversation(talker, [line], max_new_tokens=6)[0] for line in lines]
    assert texts(out) == [f"{line}\n{answer}" for line, answer in zip(lines, wanted)] and len(set(wanted)) == 2
    plain = said(capsys, monkeypatch, "--model", talker, "--max-new-tokens", 6, *lines)
    assert [text[len(line) :] for text, line in zip(texts(plain), lines)] != wanted  # the template is seen


def test_the_tokenizer_says_what_ends_where_no_config_does(talker, tmp_path):
    assert generate.ends_of(talker, {}) == [byte_level().eos_token_id]
    assert generate.ends_of(tmp_path, {}) == [] and generate.ends_of(tmp_path, {}, byte_level()) == [
        byte_level().eos_token_id
    ]


def test_a_conversation_that_grows_too_long(talker, capsys, monkeypatch):
    """Old turns are forgotten; a line that is too long by itself is said to be."""
    lines = ["the end", "the fox", "x" * 80, "the dog", "the end"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    out = said(capsys, monkeypatch, "--model", talker, "--max-new-tokens", 40, "--chat")
    assert out.count("more than the model's 64 positions") == 1 and len(out.split("> ")) == 7


def test_a_stop_string_ends_an_answer(talker, capsys, monkeypatch):
    (whole,) = conversation(talker, ["the quick"], max_new_tokens=12)
    stop = whole[4:6]
    monkeypatch.setattr("sys.stdin", io.StringIO("the quick\n"))
    out = said(capsys, monkeypatch, "--model", talker, "--max-new-tokens", 12, "--chat", "--stop", stop)
    (answer,) = answers(out)
    assert stop in answer and len(answer) < len(whole) and whole.startswith(answer[: answer.index(stop)])


def test_ctrl_c_ends_an_answer_and_not_the_conversation(talker, capsys, monkeypatch):
    chat = sys.modules["_chat"]
    heard, plain = [], chat.interrupts

    @contextlib.contextmanager
    def interrupts():
        with plain() as interrupted:

            def interrupted_at_third():
                heard.append(0)
                if len(heard) == 3:
                    os.kill(os.getpid(), signal.SIGINT)
                return interrupted()

            yield interrupted_at_third

    monkeypatch.setattr(chat, "interrupts", interrupts)
    monkeypatch.setattr("sys.stdin", io.StringIO(LINES))
    said(capsys, monkeypatch, "--model", talker, "--max-new-tokens", 6, "--chat")
    assert len(heard) > 3 + 6  # three tokens, then all of the next answer
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_a_conversation_of_two_processes(talker, capsys, monkeypatch):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(EXAMPLES / SCRIPT), "--model", str(talker), "--max-new-tokens", "6", "--chat"]
    done = subprocess.run(command, input=LINES, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    want = conversation(talker, LINES.split("\n")[::2], max_new_tokens=6)
    assert [a for a in answers(done.stdout) if a] == [a.strip("\n") for a in want]


def test_a_long_prompt_shows_a_bar(trained, capsys, monkeypatch):
    monkeypatch.setattr("tpfuse.models.generation.passes.PIECE", 8)
    monkeypatch.setattr("sys.argv", [SCRIPT, "--model", str(trained[0]), "--max-new-tokens", "2", "x" * 30])
    generate.main()
    err = capsys.readouterr().err
    assert "reading the prompt" in err and "0/30" in err
