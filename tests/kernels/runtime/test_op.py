"""The machinery of an op, and the completeness of the other files: every op in the library went through opcheck."""

import contextlib
import functools
import importlib
import pathlib
import pkgutil
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tpfuse.kernels
from tpfuse.kernels.gemm.op import activation_bwd
from tpfuse.kernels.norm.core import NormOps
from tpfuse.kernels.replay import read
from tpfuse.kernels.runtime import op as _op
from tpfuse.kernels.runtime.errors import check
from tpfuse.kernels.runtime.op import ELEMENTWISE, NAMESPACE, Cost, Op, acc_dtype, autocast, least, op, sum_parts

BF16 = torch.bfloat16


@functools.cache
def samples() -> dict[tuple[str, int], tuple[Op, tuple]]:
    """(op, arguments) of everything that goes through opcheck, by module and index among its SAMPLES."""
    root = pathlib.Path(__file__).parents[3]
    files = sorted((root / "tests" / "kernels").rglob("test_*.py"))
    names = [".".join(file.relative_to(root).with_suffix("").parts) for file in files]
    tests = {name: module for name in names if hasattr(module := importlib.import_module(name), "test_opcheck")}
    return {(name, i): sample for name, module in tests.items() for i, sample in enumerate(module.SAMPLES)}


def test_every_op_is_checked():
    modules = [
        importlib.import_module(m.name) for m in pkgutil.walk_packages(tpfuse.kernels.__path__, "tpfuse.kernels.")
    ]
    values = [value for module in modules for value in vars(module).values()]
    values += [op for value in values if isinstance(value, NormOps) for op in value]
    ops = {value.name for value in values if isinstance(value, Op)}
    assert len(ops) > 10 and ops == {op.name for op, _ in samples().values()}


def twice_scaled_ref(x: torch.Tensor, factor: float) -> torch.Tensor:
    """A product that autocast would lower, were it to reach here."""
    return (x.float() @ torch.eye(x.shape[1]) * factor).to(x.dtype)


@pytest.fixture(scope="module")
def twice():
    return op(twice_scaled_ref, kind=ELEMENTWISE, cpu=lambda x, factor: twice_scaled_ref(x, factor) + 0)


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
    launched = Op("launched", twice_scaled_ref, kind=ELEMENTWISE, launch=lambda x, factor: "launched")
    assert launched._cuda(torch.ones(1, 1), 1.0) == "launched"
    assert torch.equal(launched._cuda(torch.ones(1, 1).double(), 1.0), torch.ones(1, 1).double())
    assert torch.equal(
        Op("unlaunched", twice_scaled_ref, kind=ELEMENTWISE)._cuda(torch.ones(1, 1), 1.0), torch.ones(1, 1)
    )


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


class Window(NamedTuple):
    first: int
    rows: torch.Tensor | None


def windowed_ref(x: torch.Tensor, window: Window, scale: float, out: torch.Tensor | None = None) -> torch.Tensor:
    return x * scale + window.first + (0 if window.rows is None else window.rows.sum())


@pytest.fixture(scope="module")
def windowed():
    return op(windowed_ref, kind=ELEMENTWISE, cost=lambda args, outputs: Cost(args[1].first, int(args[2])))


def test_a_record_is_spelled_out_and_packed_again(windowed):
    assert [a.name for a in windowed.overload._schema.arguments] == ["x", "window_first", "window_rows", "scale", "out"]
    x, rows = torch.ones(2), torch.ones(3)
    assert torch.equal(windowed(x, Window(5, rows), 2.0), torch.full((2,), 10.0))
    assert torch.equal(windowed(x, Window(5, None), 2.0), windowed_ref(x, Window(5, None), 2.0))
    assert windowed.pack((x, 5, rows, 2.0)) == (x, Window(5, rows), 2.0)
    assert windowed.pack((x, 5, rows, 2.0, x)) == (x, Window(5, rows), 2.0, x)
    assert windowed.cost((x, Window(5, rows), 2.0), x)[:2] == (5, 2)
    torch.library.opcheck(windowed.overload, (x, *Window(5, rows), 2.0))


def test_the_bound_counts_tensors_in_records():
    x, rows = torch.ones(2), torch.ones(3)
    assert least((x, Window(5, rows), 2.0), (x,))[:2] == (4 * 5, 4 * 2)


class Watched(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


# what must reach the dispatcher: contexts that watch or change calls of ops, and arguments that it resolves
WATCHERS = {
    "gradients": torch.enable_grad,
    "a dispatch mode": Watched,
    "autocast": lambda: torch.autocast("cpu", BF16),
    "a profiler": torch.profiler.profile,
}
PLAIN = torch.ones(2)
RESOLVED = {
    "a subclass": PLAIN.as_subclass(Subclass),
    "a lazily negated tensor": torch.ones(2, dtype=torch.complex64).conj().imag,
}


@pytest.fixture(scope="module")
def direct():
    """Whether a call reached the implementation with the very record it was given, not one packed again."""
    seen = []

    def cpu(x, window, scale, out=None):
        seen.append(window)
        return windowed_ref(x, window, scale)

    seeing = Op("seeing", windowed_ref, kind=ELEMENTWISE, cpu=cpu)

    def call(x, rows=None):
        window = Window(5, rows)
        seen.clear()
        y = seeing(x, window, scale=2.0)
        assert torch.equal(y, windowed_ref(x, window, 2.0))
        return any(given is window for given in seen)

    return call


@torch.no_grad()
def test_a_plain_call_passes_the_dispatcher_by(direct):
    assert direct(PLAIN) and direct(PLAIN, torch.ones(3)) and direct(torch.nn.Parameter(PLAIN))


@torch.no_grad()
def test_a_call_on_a_cpu_is_not_read_for_a_tape(direct, monkeypatch):
    monkeypatch.setattr(_op, "read", None)
    assert direct(PLAIN) and direct(PLAIN, torch.ones(3))


@pytest.mark.parametrize("watcher", WATCHERS)
@torch.no_grad()
def test_what_watches_ops_sees_them(direct, watcher):
    with WATCHERS[watcher]():
        assert not direct(PLAIN)
    assert direct(PLAIN)


@pytest.mark.parametrize("argument", RESOLVED)
@torch.no_grad()
def test_the_dispatcher_resolves(direct, argument):
    assert not direct(RESOLVED[argument])
    assert not direct(PLAIN, RESOLVED[argument])


@torch.no_grad()
def test_a_call_is_not_direct_in_a_trace_or_a_transform():
    def eager(x):
        seen.append(_op.eager())
        return x

    seen: list[bool] = []
    torch.func.vmap(eager)(PLAIN)
    torch.jit.trace(eager, PLAIN, check_trace=False)
    assert seen and not any(seen) and _op.eager()
    compiled = torch.compile(lambda x: x + _op.eager(), backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.zeros(1)), torch.zeros(1))


def test_what_the_dispatcher_resolves():
    meta, constants = torch.ones(2, device="meta"), (None, Window(5, None), 2.0, "a", BF16)
    assert read((*constants, PLAIN)).device == PLAIN.device and not read((PLAIN,)).double
    assert read((PLAIN, Window(5, meta))).device is None and read(constants).device is None
    assert read(([PLAIN],)) is None and read((PLAIN, Window(5, PLAIN.double()))).double


def test_a_check_comes_before_the_implementation():
    def refuse(x, factor):
        check(factor > 0, "factor")

    checked = Op("checked", twice_scaled_ref, kind=ELEMENTWISE, check=refuse)
    with torch.no_grad():
        assert torch.equal(checked(torch.ones(2, 3), 2.0), torch.full((2, 3), 2.0))
        for context in (contextlib.nullcontext(), torch.enable_grad()):  # called directly, and by the dispatcher
            with context, pytest.raises(ValueError, match="factor"):
                checked(torch.ones(2, 3), 0.0)


def test_a_name_that_is_no_arguments():
    """An argument that only an implementation has is not left out silently."""
    with pytest.raises(TypeError, match="activation_bwd: no argument is called dz"):
        activation_bwd(torch.ones(2, 2), torch.ones(2, 2), "gelu", rebuild=True, bias=None, dz=torch.ones(2, 2))
