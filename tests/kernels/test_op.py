"""The machinery of an op, and the completeness of the other files: every op in the library went through opcheck."""

import importlib
import pathlib
import pkgutil

import pytest
import torch

import tpfuse.kernels
from tpfuse.kernels import _op
from tpfuse.kernels._op import NAMESPACE, Op, acc_dtype, autocast, check, op, sum_parts

BF16 = torch.bfloat16


def test_every_op_is_checked():
    modules = [importlib.import_module(f"tpfuse.kernels.{m.name}") for m in pkgutil.iter_modules(tpfuse.kernels.__path__)]
    ops = {value.name for module in modules for value in vars(module).values() if isinstance(value, Op)}
    files = pathlib.Path(__file__).parent.glob("test_*.py")
    tests = [importlib.import_module(f"tests.kernels.{f.stem}") for f in files]
    checked = {sample[0].name for test in tests if hasattr(test, "test_opcheck") for sample in test.SAMPLES}
    assert len(ops) > 10 and ops == checked


def twice_scaled_ref(x: torch.Tensor, factor: float) -> torch.Tensor:
    """A product that autocast would lower, were it to reach here."""
    return (x.float() @ torch.eye(x.shape[1]) * factor).to(x.dtype)


@pytest.fixture(scope="module")
def twice():
    return op(twice_scaled_ref, cpu=lambda x, factor: twice_scaled_ref(x, factor) + 0)


def test_registration(twice):
    assert twice.name == "twice_scaled" and twice.overload._schema.name == f"{NAMESPACE}::twice_scaled"
    assert twice.cpu is not twice.reference and torch.equal(twice(torch.ones(2, 3), 2.0), torch.full((2, 3), 2.0))


def test_the_namespace_names_the_version():
    """A compiled graph in a disk cache never outlives the fakes that it was traced with."""
    assert _op.__version__.replace(".", "_") in NAMESPACE and NAMESPACE.isidentifier()


def test_autocast_stops_at_an_op(twice):
    x = torch.full((1, 1), 1 + 2**-12)
    with torch.autocast("cpu", BF16):
        assert torch.equal(twice(x, 1.0), x)
        assert (x @ torch.eye(1)).dtype == BF16  # it would have been lowered


def test_fp64_on_a_gpu_runs_the_reference():
    launched = Op("launched", twice_scaled_ref, launch=lambda x, factor: "launched")
    assert launched._cuda(torch.ones(1, 1), 1.0) == "launched"
    assert torch.equal(launched._cuda(torch.ones(1, 1).double(), 1.0), torch.ones(1, 1).double())
    assert torch.equal(Op("unlaunched", twice_scaled_ref)._cuda(torch.ones(1, 1), 1.0), torch.ones(1, 1))


def test_autocast_of_tensors():
    fp32, fp64, ids = torch.ones(1), torch.ones(1).double(), torch.ones(1).long()
    assert autocast(fp32, None)[0] is fp32
    with torch.autocast("cpu", BF16):
        assert [t if t is None else t.dtype for t in autocast(fp32, fp32.half(), fp64, ids, None)] == [
            BF16,
            BF16,
            torch.float64,
            torch.int64,
            None,
        ]
        with torch.autocast("cpu", enabled=False):
            assert autocast(fp32)[0] is fp32
        assert autocast(fp32.to("meta"))[0].dtype == torch.float32


def test_sum_parts():
    """In fp32, in rank order, into a new tensor: the last bits depend on the order, so it is held."""
    parts = torch.tensor([256.0, 1, 1, 1])[:, None].to(BF16)
    assert sum_parts(parts).item() == 259 and sum_parts(parts).dtype == torch.float32
    ordered = torch.tensor([1e8, 3.0, -1e8, 1.0])[:, None]
    assert sum_parts(ordered).item() == (((ordered[0] + ordered[1]) + ordered[2]) + ordered[3]).item()
    assert sum_parts(ordered).item() != sum_parts(ordered.flip(0)).item()
    one = torch.ones(1, 3)
    assert sum_parts(one).add_(1).sum() == 6 and one.sum() == 3
    assert acc_dtype(parts) == torch.float32 and acc_dtype(parts.double()) == torch.float64


def test_check():
    check(True, "fine")
    with pytest.raises(ValueError, match="^f: x must be 3, got 4$"):
        check(False, "f: x must be 3, got 4")
