"""Prints which of torch's functions and methods are replaced, stage by stage; a script of test_table.py."""

import os
import pickle
import sys
import traceback
import types

import torch
import torch._dynamo  # which replaces torch.manual_seed
import torch.distributed as dist
import torch.distributed._composable.replicate_with_fsdp
import torch.distributed.fsdp.sharded_grad_scaler
import torch.distributed.tensor
import torch.nn.utils.parametrizations
import torch.nn.utils.prune
from torch.testing._internal.distributed.fake_pg import FakeStore


def functions():
    """{address: function} of all that torch has: in modules, on classes, and what a decorated function decorates."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "torch" or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType):
                found[f"{name}.{key}"] = value
                if "func" in value.__code__.co_freevars:
                    cell = value.__closure__[value.__code__.co_freevars.index("func")]
                    found[f"{name}.{key} decorates"] = cell.cell_contents
            elif isinstance(value, type) and value.__module__ == name:
                raw = {leaf: getattr(x, "__func__", x) for leaf, x in vars(value).items()}
                found |= {f"{name}.{key}.{leaf}": x for leaf, x in raw.items() if isinstance(x, types.FunctionType)}
    return found


BEFORE = functions()

import tpfuse  # noqa: E402
from tpfuse.layers import ColumnParallelLinear  # noqa: E402
from tpfuse.models import GPT, GPTConfig  # noqa: E402
from tpfuse.training.foreign.table import TABLE  # noqa: E402


def replaced():
    """The addresses of functions that are others than before the import; of one with several, the table's."""
    now, names = functions(), {str(record) for record in TABLE}
    changed = {}
    for key, value in BEFORE.items():
        if now.get(key) is not value:
            changed.setdefault(id(value), []).append(key.removesuffix(" decorates"))
    return sorted(next((key for key in keys if key in names), keys[0]) for keys in changed.values())


def stage(name, act):
    """In a process of its own, as the import has left it."""
    if os.fork():
        assert os.wait()[1] == 0, name
        return
    try:
        act()
        print(f"{name}: {replaced()}", flush=True)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def on_one_rank():
    model = GPT(GPTConfig(vocab_size=8, hidden_size=8, num_layers=1, num_heads=2, max_positions=4, dropout=0.0))
    optimizer = torch.optim.AdamW(tpfuse.param_groups(model, 0.1))
    ids = torch.zeros(1, 4, dtype=torch.int64)
    model(ids, labels=ids, first_sample=0).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return model


def split():
    return ColumnParallelLinear(4, 8, tp=tpfuse.TensorParallel(dist.group.WORLD))


def off():
    split()
    tpfuse.guard_torch(False)


torch.set_num_threads(1)
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
path = sys.argv[1]
stage("import", lambda: None)
stage("one rank", on_one_rank)
stage("a split parameter", lambda: open(path, "wb").write(pickle.dumps(split())))
stage("an unpickled layer", lambda: pickle.loads(open(path, "rb").read()))
stage("a MainGrad", lambda: tpfuse.MainGrad(on_one_rank()))
stage("off", off)
stage("off, another split parameter", lambda: (off(), split()))
stage("on again", lambda: (off(), tpfuse.guard_torch()))
