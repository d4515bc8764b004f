"""Without a GPU, kernels run in Triton's interpreter; ``ranks`` runs a function on gloo processes."""

import collections
import contextlib
import gc
import os
import signal
from concurrent.futures import ProcessPoolExecutor

os.environ["OMP_NUM_THREADS"] = "1"  # here and in processes that tests start: tensors are tiny, cores are shared

import pytest
import torch

from tests.forking import forking, start_nothing
from tests.pool import Pool
from tests.spread import Case, phases

for number, handler in {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}.items():
    if signal.getsignal(number) is signal.SIG_IGN:  # as in a script's background: processes that tests stop inherit it
        signal.signal(number, handler)
torch.set_num_threads(1)
HAS_GPU = torch.cuda.is_available()
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches for the network
if not HAS_GPU:
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # read when a kernel is decorated, so before any test module is imported
if os.environ.get("TRITON_INTERPRET") == "1":
    try:
        from tests import interpreter_bf16, interpreter_speed
    except ModuleNotFoundError:  # no triton here: the launchers' tests skip themselves
        pass
    else:
        interpreter_bf16.install()
        interpreter_speed.install()


# Folders whose tests of several cases are spread over the phases: see spread.py.
SPREAD = "attack bitwise kernels layers models sequence_parallel training interop pipeline tools".split()


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(items):
    if not HAS_GPU:
        for item in items:
            if marked(item, "gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    tests = collections.defaultdict(list)
    for item in items:
        if item.nodeid.startswith(tuple(f"tests/{folder}/" for folder in SPREAD)):
            if not marked(item, "gpu", "rare"):
                tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        for item, phase in zip(cases, phases([case_of(item) for item in cases]), strict=True):
            for name in {"day": (), "slow": ("slow",), "rare": ("slow", "rare")}[phase]:
                item.add_marker(name)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # as tests/preload.py does in workers


def case_of(item):
    values = item.callspec.params if hasattr(item, "callspec") else {}
    return Case(item.nodeid, {name: key_of(value) for name, value in values.items()}, marked(item, "slow"))


def key_of(value):
    """Returns the value, or for one that is no key, as a dictionary, which object it is."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def marked(item, *names):
    return any(item.get_closest_marker(name) is not None for name in names)


@pytest.fixture(scope="session")
def ranks():
    """``ranks(R, fn, *args, timeout=120) -> [fn(World, *args) on rank 0, 1, .. R-1]``; see tests/pool.py."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def planted():
    """``planted(op, mistake)``: an op, or a function by its address, is wrong for the rest of the test; see
    tests/planted.py."""
    from tests.planted import planted

    with contextlib.ExitStack() as stack:
        yield lambda target, mistake: stack.enter_context(planted(target, mistake))


@pytest.fixture(scope="module")
def idle():
    """(function, its arguments) -> what it returns in a process whose CUDA driver starts nothing."""
    if HAS_GPU:
        pytest.skip("a process here may have loaded CUDA's own driver")
    with ProcessPoolExecutor(1, mp_context=forking(), initializer=start_nothing) as pool:
        yield lambda fn, *args: pool.submit(fn, *args).result()


@pytest.fixture(autouse=True)
def _seeded():
    """No test depends on which ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=HAS_GPU)
def _nothing_left(request):
    """A test on a GPU leaves no tapes to the next, and its memory to processes beside this one."""
    yield
    if request.node.get_closest_marker("gpu"):
        from tests.tapes import forget

        forget()
        torch.cuda.empty_cache()
