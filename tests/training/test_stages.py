"""State dictionaries of pipeline stages in torch.distributed.checkpoint: saved by stages, loaded in one process.

Spans: state dictionaries of tpfuse/layers/, tpfuse/pipeline/ and tpfuse/training/, in torch's own checkpoints.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from tests.training.checkpoint.test_stages import ONE, Staged
from tpfuse import as_dtensor

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def state_of(training):
    optim = get_optimizer_state_dict(training.model, training.optimizer, options=BY_NAME)
    return {"model": training.model.state_dict(), "optim": optim}


def saved(world, where, directory):
    training = Staged(world, *where)
    training.steps(0, 1)
    dcp.save(state_of(training), checkpoint_id=directory)
    return training.state()


def loaded(world, directory):
    training = Staged(world, *ONE)
    training.optimizer.param_groups[0]["lr"] = 0.5
    state = state_of(training)
    dcp.load(state, checkpoint_id=directory)
    training.model.load_state_dict(state["model"])
    set_optimizer_state_dict(training.model, training.optimizer, state["optim"], options=BY_NAME)
    return training.state(), [group["lr"] for group in training.optimizer.param_groups]


def saved_as_dtensors(world, where, directory):
    training = Staged(world, *where)
    state = training.state()
    as_dtensor(training.model, training.mesh["tp"])
    dcp.save({"model": training.model.state_dict()}, checkpoint_id=directory)
    return state


def loaded_weights(world, directory):
    training = Staged(world, *ONE)
    state = {"model": {name: torch.zeros_like(p) for name, p in training.model.state_dict().items()}}
    dcp.load(state, checkpoint_id=directory)
    training.model.load_state_dict(state["model"])
    return training.state(), [1e-3, 1e-3]


@pytest.mark.parametrize(
    "where", [((2, 1, 2), "zbv"), pytest.param(((4, 1, 1), "chimera"), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(
    "save, load",
    [
        pytest.param(saved, loaded, id="plain", marks=pytest.mark.slow),
        pytest.param(saved_as_dtensors, loaded_weights, id="dtensor"),
    ],
)
def test_saved_by_stages_and_loaded_in_one_process(ranks, tmp_path, where, save, load):
    (pp, dp, tp), _ = where
    every = ranks(pp * dp * tp, save, where, str(tmp_path))
    whole, rates = ranks(1, load, str(tmp_path))[0]
    assert rates == [1e-3, 1e-3]
    seen = set()
    for state in every:
        for name, (place, x) in state.items():
            if name != "step":
                assert torch.equal(whole[name][1][place], x), name
                seen.add(name)
    assert seen == whole.keys() - {"step"}
