"""Models that several examples' tests read."""

import pytest
import torch
import transformers


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A model of bytes, as train_gpt.py leaves it, and a Llama whose tokenizer has words of several characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64
    )
    sizes |= dict(max_position_embeddings=64, initializer_range=0.5, bos_token_id=None, pad_token_id=None)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox and the lazy dog; the end, the fox"] * 3, trainer)
    plain, words = tmp_path_factory.mktemp("bytes"), tmp_path_factory.mktemp("words")
    small = transformers.GPT2Config(
        vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.5
    )
    transformers.GPT2LMHeadModel(small).save_pretrained(plain)
    vocab = tokenizer.get_vocab_size()
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=vocab, eos_token_id=7, **sizes)).save_pretrained(
        words
    )
    tokenizer.save(str(words / "tokenizer.json"))
    return plain, words
