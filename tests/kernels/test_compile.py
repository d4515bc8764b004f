"""Every kernel as its launcher would launch it compiles for GPUs that are not here: no spills, and shared memory that
they have.

Every day: the first call of each op for sm_90.  Slow: the first for sm_80 or gfx942; rare: all calls for sm_90.  The
table of what came out is checked in, with a digest of what was compiled: of every other call it says that the table's
row, which bench.compile wrote, is of the kernel as it is now.
"""

import ast
import importlib
import json
import pathlib
import pkgutil
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest

pytest.importorskip("triton")
import triton

import tpfuse.kernels
from bench.compile.__main__ import line
from bench.compile._compile import SHARED_BYTES, build, capture, serialised
from bench.compile._pool import ARCHS, HERE, OPS, compile_calls, digests, wanted
from tests.forking import forking

TABLE = HERE / "table.md"
OLD = triton.__version__.startswith("3.6.")


def jitted():
    """Every function of the library that Triton compiles: (where, its tree)."""
    root = pathlib.Path(tpfuse.kernels.__path__[0])
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                yield f"{path.relative_to(root)}: {node.name}", node


def lacking(function: ast.AST) -> list[str]:
    """Calls that Triton 3.6 does not compile: hasattr of a record, and static_range to a record's field."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    hasattrs = [ast.unparse(c) for c in calls if ast.unparse(c.func) == "hasattr"]
    ranges = [c for c in calls if ast.unparse(c.func) == "tl.static_range"]
    return hasattrs + [ast.unparse(c) for c in ranges if any(isinstance(arg, ast.Attribute) for arg in c.args)]


def test_kernels_use_nothing_that_the_oldest_triton_lacks():
    functions = dict(jitted())
    assert len(functions) > 100
    assert {name: calls for name, function in functions.items() if (calls := lacking(function))} == {}


@pytest.mark.parametrize("line", ["if hasattr(mask, 'split'): pass", "for r in tl.static_range(1, R.size): pass"])
def test_what_it_lacks_is_seen(line):
    assert lacking(ast.parse(line))


@pytest.fixture(scope="module")
def compiler():
    """One process beside this one, where kernels are not interpreted: each test has its own calls compiled there."""
    with ProcessPoolExecutor(1, mp_context=forking()) as pool:
        yield pool


def compiled(compiler, op: str, arch: str, default: bool) -> list[dict]:
    rows = compiler.submit(compile_calls, op, wanted(op, arch, default), arch).result()
    return [row | dict(line=line(row)) for row in rows]


def table(op: str, arch: str) -> list[str]:
    """The table's lines of one op for one arch."""
    text = TABLE.read_text()
    if f"Triton {triton.__version__}:" not in text:
        pytest.skip(f"the table was made by another Triton than {triton.__version__}")
    return [row for row in text.splitlines() if row.startswith(f"| {op} |") and row.split(" | ")[2] == arch]


def assert_sound(rows: list[dict]) -> None:
    assert rows
    for row in rows:
        assert row["spill_bytes"] <= row["spills_allowed"], row
        assert row["why"] or not row["spills_allowed"], "an exception carries its reason"
        assert row["shared_bytes"] <= row["shared_limit"], row
        assert all(row["opcodes"][name] for name in row["uses"]), row
        # Triton 3.6 waits for each product of the experts' dW.
        assert not row["opcodes"].get("serialised") or (OLD and row["kernel"] == "_wgrad_kernel"), row


def assert_in_table(rows: list[dict], lines: list[str]) -> None:
    missing = [row["line"] for row in rows if row["line"] not in lines]
    assert not missing, (
        "no longer what the table says; look at the change, then python -m bench.compile --write:\n"
        + "\n".join(missing)
    )


@pytest.mark.parametrize("op", OPS)
def test_default_calls(compiler, op):
    rows = compiled(compiler, op, "sm_90", default=True)
    assert_sound(rows)
    assert_in_table(rows, table(op, "sm_90"))


@pytest.mark.slow
@pytest.mark.parametrize("arch", [pytest.param(arch, marks=[pytest.mark.rare] * (arch == "sm_90")) for arch in ARCHS])
@pytest.mark.parametrize("op", OPS)
def test_calls_on_all_archs(compiler, op, arch):
    rows = compiled(compiler, op, arch, default=arch != "sm_90")
    assert {row["arch"] for row in rows} == {arch}
    assert_sound(rows)
    assert_in_table(rows, table(op, arch))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", OPS)
def test_the_table_is_of_these_kernels(compiler, op, arch):
    """A kernel that has changed has changed for each arch, and ``--write`` writes the rows of all."""
    cells = [row.strip("| ").split(" | ") for row in table(op, arch)]
    now = compiler.submit(digests, op, arch).result()
    assert [(call, kernel, digest) for _, call, _, kernel, *_, digest in cells] == now, (
        f"the table holds other kernels, or not all: python -m bench.compile {op} --write"
    )


@pytest.mark.parametrize("op", OPS)
def test_the_table_is_sound(op):
    calls = importlib.import_module(f"bench.compile.{op}").CALLS
    for arch in ARCHS:
        for row in table(op, arch):
            _, call, _, kernel, registers, spilled, shared, *_ = row.strip("| ").split(" | ")
            assert int(spilled) <= calls[call].spills.get(kernel, 0) and "serialised" not in row, row
            assert int(shared) <= SHARED_BYTES[arch] and int(registers) <= (512 if arch == "gfx942" else 255), row


PRODUCTS = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out, .param .u64 a, .param .u64 b)
{
.reg .f32 %f<4>;
.reg .b64 %rd<3>;
.reg .pred %p<1>;
ld.param.u64 %rd0, [out];
ld.param.u64 %rd1, [a];
ld.param.u64 %rd2, [b];
setp.eq.u64 %p0, %rd1, %rd2;
mov.f32 %f0, 0f00000000;
mov.f32 %f1, 0f00000000;
mov.f32 %f2, 0f00000000;
mov.f32 %f3, 0f00000000;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd1, %rd2, 1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
st.global.v4.f32 [%rd0], {%f0, %f1, %f2, %f3};
ret;
}
"""


def test_serialised_products_are_seen():
    """A branch goes round the wait for the product, to where its accumulators are read."""
    skips = PRODUCTS.replace("wgmma.wait_group", "@%p0 bra X;\nwgmma.wait_group").replace("st.global", "X: st.global")
    assert serialised(PRODUCTS) == [] and len(serialised(skips)) == 1


def test_the_table_holds_nothing_else():
    assert TABLE.read_text().count("\n| ") == 1 + sum(len(table(op, arch)) for op in OPS for arch in ARCHS)


@pytest.mark.slow
def test_the_command_prints_the_same(compiler):
    command = [sys.executable, "-m", "bench.compile", "dropout", "--default", "--arch", "sm_90", "--json"]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(json.dumps(compiled(compiler, "dropout", "sm_90", default=True)))  # as JSON has them: no tuples
    assert [json.loads(row) for row in done.stdout.splitlines()] == rows


# ---- how many variants of a kernel a run compiles ----


def variants(op: str, makes: str, sizes: list[dict]) -> dict[str, int]:
    """{kernel: different keys of Triton's cache} over the calls ``makes(**size)`` of bench.compile.<op>."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend, keys = make_backend(GPUTarget("cuda", 90, 32)), {}
    for size in sizes:
        run = getattr(importlib.import_module(f"bench.compile.{op}"), makes)(**size)
        for launch in capture(run, "sm_90"):
            kernel = launch.kernel
            bind = create_function_from_signature(kernel.signature, kernel.params, backend)
            _, specialization, options = bind(*launch.args, **launch.config)
            keys.setdefault(kernel.fn.__name__, set()).add(str((specialization, sorted(options.items()))))
    return {name: len(found) for name, found in keys.items()}


def test_variants_are_told_apart(compiler):
    """Of the width of a head, and of an integer that is 1, divisible by 16 or neither."""
    widths = compiler.submit(variants, "attention", "decode", [dict(E=E, Q=1, L=70) for E in (32, 64, 64)]).result()
    assert set(widths.values()) == {2}
    groups = compiler.submit(variants, "attention", "decode", [dict(E=64, Q=1, G=G) for G in (1, 3, 5, 16)]).result()
    assert groups["_split_kernel"] > 2


@pytest.mark.parametrize("B", [1, 4])
def test_decoding_compiles_once(compiler, B):
    """The cache's length grows with every token, and so does the number of splits."""
    grown = [dict(E=64, Q=1, B=B, G=2, L=L, most=4096) for L in (*range(1, 71), 100, 128, 512, 1024, 4095, 4096)]
    assert compiler.submit(variants, "attention", "decode", grown).result() == dict(_split_kernel=1, _combine_kernel=1)


@pytest.mark.parametrize("most, count", [(14, 1), (254, 2), (65534, 3)])
def test_packing_compiles_few(compiler, most, count):
    """How many documents a row has changes with every batch."""
    documents = [n for n in (1, 2, 3, 8, 14, 15, 16, 17, 64, 100, 254, 255, 256, 5000, 65534) if n <= most]
    batches = [dict(E=64, documents=n) for n in documents]
    found = compiler.submit(variants, "attention", "packed", batches).result()
    assert found == dict(_fwd_kernel=count, _prepare_kernel=1, _dkdv_kernel=count, _dq_kernel=count)


def amd_code_of_wide_rows() -> str:
    call = importlib.import_module("bench.compile.reduce_bias_dropout_add_norm").CALLS["D=20480 R=1"]
    (launch,) = (
        launch for launch in capture(call.run, "gfx942") if _name(launch.kernel).endswith("_fwd_chunks_kernel")
    )
    return build(launch, "gfx942").asm["amdgcn"]


@pytest.mark.slow
def test_wide_rows_are_read_after_they_were_written_on_amd(compiler):
    """In a wide row's first loop other threads write h, its second loop reads it.  Between them stands a barrier, and
    no wait for the stores: LLVM's memory model of gfx942 needs none while the wavefronts of a work-group share a
    compute unit and its L1, which is so unless the kernel splits its thread groups (tg_split)."""
    code = compiler.submit(amd_code_of_wide_rows).result()
    assert re.findall(r"\.amdhsa_tg_split (\d)", code) == ["0"]
    accesses = re.findall(r"^\t(s_barrier|(?:global|buffer)_(?:store|load)_dword\w*)", code, re.MULTILINE)
    *_, previous, last = (i for i, access in enumerate(accesses) if "store" in access)  # of the statistics, of n
    barrier, *reads = accesses[previous + 1 : last]
    assert barrier == "s_barrier" and reads and all("load" in read for read in reads)


def _name(kernel) -> str:
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}"


def test_every_kernel_is_compiled():
    modules = [
        importlib.import_module(m.name) for m in pkgutil.walk_packages(tpfuse.kernels.__path__, "tpfuse.kernels.")
    ]
    found = (
        value
        for module in modules
        for name, value in vars(module).items()
        if name.endswith("_kernel") and hasattr(value, "fn")
    )
    kernels = {_name(kernel) for kernel in found}
    calls = [call for op in OPS for call in importlib.import_module(f"bench.compile.{op}").CALLS.values()]
    launched = {_name(launch.kernel) for call in calls for launch in capture(call.run, "sm_90")}
    assert kernels and kernels <= launched, f"no call compiles {sorted(kernels - launched)}"
