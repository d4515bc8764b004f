"""Small tokenizers of transformers, made here."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = ["the quick brown fox and the lazy dog; the end, the fox stops — überall ändern, größer, 日本語"] * 3
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a: ' }}{% endif %}"
)


def byte_level(vocab: int = 300) -> PreTrainedTokenizerFast:
    """GPT-2's kind: every byte has a character, so a token may be a part of one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=vocab, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TEMPLATE)


def byte_fallback() -> PreTrainedTokenizerFast:
    """Llama's kind: words begin with a mark, and bytes stand in angle brackets."""
    words = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁the", "▁", "st", "op", "▁st", "opper"]
    words += [*"stop", *"abcdef", "▁fox", "pper"]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def word_pieces() -> PreTrainedTokenizerFast:
    """BERT's kind: a word goes on behind ##."""
    words = ["[UNK]", "st", "##op", "##s", "stop", "the", "##pper", "a", "##b", "##c", "##d", "##e", "##f", "fox", "s"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


MADE = {"byte level": byte_level, "byte fallback": byte_fallback, "word pieces": word_pieces}
