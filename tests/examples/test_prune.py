"""The pruned MLP of the example: near the trained one at density 1, the same losses split, errors in a line."""

import re

import pytest
import torch

from tests.examples.launch import example, ok, run
from tpfuse.layers import ParallelMLP
from tpfuse.models import GPT, GPTConfig

prune = example("prune")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small random Llama over bytes, and a text."""
    path = tmp_path_factory.mktemp("prune")
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = GPTConfig.from_hf(dict(model_type="llama", vocab_size=256, max_position_embeddings=32, **sizes))
    GPT(config, seed=1).save_pretrained(path / "model")
    (path / "text").write_bytes(bytes(range(1, 128)) * 20)
    return path


def test_a_dense_mlp_of_integers_is_near_the_trained_one():
    torch.manual_seed(0)
    mlp, x = ParallelMLP(32, 48, activation="silu", gated=True, bias=False, init_std=0.3), torch.randn(20, 32)
    with torch.no_grad():
        exact = mlp(x)
        error = lambda density: float((prune.SparseMLP(mlp, density, 8, 8)(x) - exact).norm() / exact.norm())
        assert error(1.0) < 0.03 < error(0.5) < 1 and error(0.0) == 1


@pytest.mark.slow
@pytest.mark.parametrize("procs", [0, 2])
def test_the_losses_follow_the_density(folder, procs):
    said = ok("prune.py", "--model", folder / "model", "--data", folder / "text", procs=procs)
    dense = float(re.search(r"torch.float32: (\S+)", said)[1])
    rows = [tuple(map(float, line.split())) for line in said.splitlines() if re.match(r" +\d\.\d\d ", line)]
    assert [density for density, *_ in rows] == list(prune.DENSITIES)
    assert all(abs(bits - dense - over) < 2e-4 for _, bits, over in rows)
    assert abs(rows[0][2]) < abs(rows[-1][2]) + 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, match", [(["--layer", "2"], "--layer one of its 2 blocks"), (["--block", "9"], "block must")]
)
def test_errors_are_lines(folder, flags, match):
    done = run("prune.py", "--model", folder / "model", "--data", folder / "text", *flags)
    assert match in str(done)
