"""Every attribute of transformers' GenerationConfig is read, refused by name, or known to change no token."""

import pytest

from bench import defaults
from tpfuse.models.generation.options import BUILT, DEFAULTS, GUESSED, OFF, REPORTED, SILENT, settled

OTHER = dict(num_beam_groups=2)  # a value of an option that True would equal


def test_defaults_are_those_of_the_installed_release():
    """A release that adds an attribute fails here: ``python -m bench.defaults`` writes the table."""
    assert defaults.of_generation() | OFF == DEFAULTS


@pytest.mark.parametrize("key", DEFAULTS)
def test_what_is_not_built_is_refused_by_name(key):
    for value in (DEFAULTS[key], None, False):
        settled({}, {key: value})
    if key in GUESSED:
        with pytest.warns(UserWarning, match=f"generate: {key} changes no token"):
            assert settled({key: 3}) == {}
    elif key not in BUILT | SILENT:
        record = dict(return_dict_in_generate=key in REPORTED)
        for call in (({key: OTHER.get(key, True)} | record,), (record, {key: OTHER.get(key, True)})):
            with pytest.raises(NotImplementedError, match=f"generate: {key} is not built"):
                settled(*call)


def test_a_call_goes_before_configs_of_which_the_last_counts_most():
    configs = dict(num_beams=2, max_new_tokens=3, eos_token_id=5, chat_format="x"), dict(num_beams=4, top_p=0.5)
    assert settled(dict(eos_token_id=None), *configs) == dict(num_beams=4, max_new_tokens=3)
    assert settled(dict(top_k=0, do_sample=True)) == dict(do_sample=True)
    assert settled(dict(do_sample=True, eos_token_id=7), *configs)["top_p"] == 0.5
    with pytest.raises(NotImplementedError, match="chat_format is not built"):
        settled(dict(chat_format="x"))
