"""Presets against the parameters that their makers publish, tied weights counted once."""

import json

import pytest

from tpfuse.tools.ledger import parameter_count
from tpfuse.tools.ledger.presets import PRESETS, load_config

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.3-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "olmoe-1b-7b": 6_919_161_856,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "phi3-mini-4k": 3_821_079_552,
    "phi4": 14_659_507_200,
}
OF_PAPERS = {"bert-base", "bert-large", "gpt3-175b", "gpt-22b", "gpt-530b", "gpt-1t"}  # which round them
OWN = {"gpt-3m", "gpt-10m"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_parameters(name):
    assert parameter_count(load_config(name)) == PUBLISHED[name]


def test_every_preset_is_compared():
    assert PRESETS.keys() == PUBLISHED.keys() | OF_PAPERS | OWN


def test_a_directory_goes_before_a_preset_of_its_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert load_config("gpt2").num_layers == 12
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(PRESETS["gpt-3m"]))
    assert load_config("gpt2") == load_config("gpt2/config.json") == load_config("gpt-3m")
