"""Stand-ins for a GPU in a rehearsal's processes: CPU tensors whose launchers run under Triton's interpreter, and a
torch.cuda whose graphs are ops recorded and run again.  The environment has set TRITON_INTERPRET."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

GRAPHS = "bench.gpu_day.parts.graphs"  # whose stand-in records ops, which a launcher would go past
OWN = "bench.gpu_day.parts.suite", "bench.gpu_day.parts.setup"  # tests bring their own; the setup starts no kernel


def rehearses(argv: list[str], module: str) -> bool:
    """Returns whether a command of ``module`` has --rehearse, and installs the stand-ins where it has."""
    if "--rehearse" in argv:
        install(module)
    return "--rehearse" in argv


def install(module: str) -> None:
    """From here on, for this process, which runs a part of that module."""
    if module in OWN:
        return
    import torch

    from tests import interpreter_bf16, interpreter_speed
    from tpfuse.kernels import replay
    from tpfuse.tools.bench import measure

    interpreter_bf16.install()
    interpreter_speed.install()
    torch.set_num_threads(1)
    replay.REPLAY = False  # a plan starts compiled kernels, of which there are none
    replay.calls.LAUNCHED.add("cpu")
    torch.compile = lambda fn, **options: fn
    measure.interleaved.__kwdefaults__["least"] = 1
    measure.MOST_SETS = 8
    if module == GRAPHS:
        _graphs(torch)


def _graphs(torch: Any) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class CUDAGraph(TorchDispatchMode):
        """Ops run again into the tensors that they gave the first time, which is what a graph's memory is.  What they
        change while they are recorded is put back, since a GPU runs nothing then."""

        def __init__(self) -> None:
            super().__init__()
            self.calls: list[tuple] = []
            self.before: dict[int, tuple] = {}  # what was changed, and what it held

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            named = dict(zip((argument.name for argument in func._schema.arguments), args)) | (kwargs or {})
            for argument in func._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for t in tree_leaves(named.get(argument.name)):
                        if isinstance(t, torch.Tensor):
                            self.before.setdefault(id(t), (t, t.detach().clone()))
            result = func(*args, **(kwargs or {}))
            self.calls.append((func, args, kwargs or {}, result))
            return result

        def __exit__(self, *error: object) -> None:
            super().__exit__(*error)
            for t, old in self.before.values():
                t.data.copy_(old)

        @torch.no_grad()
        def replay(self) -> None:
            for func, args, kwargs, recorded in self.calls:
                results = func(*args, **kwargs)
                for old, new in zip(tree_leaves(recorded), tree_leaves(results)):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.data.copy_(new)

    class Stream:
        def wait_stream(self, stream: object) -> None: ...

    @contextlib.contextmanager
    def graph(recorded: CUDAGraph, **options: object) -> Iterator[None]:
        with recorded:
            yield

    stand_ins = dict(
        CUDAGraph=CUDAGraph, Stream=Stream, graph=graph, current_stream=Stream, synchronize=lambda *_: None
    )
    stand_ins |= dict(stream=lambda _: contextlib.nullcontext(), make_graphed_callables=lambda module, *_, **__: module)
    for name, value in stand_ins.items():
        setattr(torch.cuda, name, value)
    import torch.optim  # noqa: F401

    sys.modules["torch.optim.adam"]._get_capturable_supported_devices = lambda **_: ["cpu"]
