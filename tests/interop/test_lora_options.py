"""Every option of PEFT's LoraConfig is read, refused by name, or known to change nothing."""

import json
import typing
import warnings

import pytest

from bench import defaults
from tests.common import error
from tests.interop.test_adapter import their_adapter
from tests.models.common import batch
from tests.models.theirs import make
from tpfuse import load_adapter, parallelize
from tpfuse.interop.lora_options import DEFAULTS, PAST, READ, SILENT, check_options

peft = pytest.importorskip("peft")
LITERALS = typing.get_args(typing.get_type_hints(peft.LoraConfig)["init_lora_weights"])
INITS = {i.replace("[number of iters]", "4") if isinstance(i, str) else i for t in LITERALS for i in typing.get_args(t)}
# A value of an option that no default is.
OTHER = dict(bias="all", peft_type="LOHA", init_lora_weights="olora", megatron_core="m")


def test_defaults_are_those_of_the_installed_release():
    """A release that adds an option fails here: ``python -m bench.defaults`` writes the table."""
    assert defaults.of_lora() == DEFAULTS


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("key", [*DEFAULTS, "an_option_of_a_later_release"])
def test_what_is_not_built_is_refused_by_name(key, stored):
    check_options("here", {key: DEFAULTS.get(key)}, stored=stored)
    check_options("here", {key: None}, stored=stored)
    if key in READ | SILENT | (PAST if stored else set()):
        return
    with pytest.raises(ValueError, match=f"here: {key}=.* is not built"):
        check_options("here", {key: OTHER.get(key, [True])}, stored=stored)


@pytest.mark.parametrize("init", sorted(INITS | {True, False}, key=str))
def test_a_files_initialisation_means_what_it_means_to_peft(tmp_path, init):
    """PEFT draws A and B, some inits change the base weights, and the file's A and B replace what was drawn."""
    their_adapter("llama", tmp_path, rank=4, init_lora_weights=init)
    call = batch(make("llama").config)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            want = peft.PeftModel.from_pretrained(make("llama"), tmp_path).double()(**call).logits
    except Exception:  # of inits that need more than the file
        want = None
    read = lambda: load_adapter(parallelize(make("llama")), tmp_path)(**call).logits
    if init in (True, False, "gaussian", "orthogonal", "eva", "lora_ga"):
        assert want is not None and error(read(), want) < 1e-10
        return
    with pytest.raises(ValueError, match="init_lora_weights=.* is not built, for PEFT changes the base weights"):
        read()
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | dict(init_lora_weights=True)))
    assert want is None or error(read(), want) > 1e-3
