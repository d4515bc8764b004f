"""Training checkpoints: model, optimizer, rng and the caller's own state.

They are resumable at any tensor-parallel size and never half-written:

    directory/step-00000100/   shards of full tensors (safetensors), then meta.json with the checksums of all
                               files
    directory/latest           the name of the newest whole checkpoint, replaced by one atomic rename after everything
                               is on disk
    directory/job.json         the job that saves here

A save that is killed leaves ``latest`` as it was.  The last two checkpoints are kept.  Nothing in them is a pickle.

background  a save that goes on while training does
conditions  the model's config, and what decides the last bits
errors      errors name the function and the file
folder      latest, and which checkpoints are kept
hooks       residuals of a sparse all-reduce, and their mean at another number of replicas
job         one folder, one job
load        load_checkpoint: nothing changes before every rank has read everything
meta        meta.json, under a checksum of its own
pending     a gradient that waits for the next step
pieces      what each rank holds of a tensor, who writes it, and another split
ranks       all ranks, and their messages about a checkpoint
replicas    check_replicas and watch_replicas: what several ranks hold has the same bits
save        save_checkpoint: state -> shards, meta.json, latest
shards      safetensors files and their checksums
stages      what the stages of a pipeline hold together
state       what a model and its optimizer hold, by name, and back
version1    checkpoints of the first format
"""

from .load import load_checkpoint
from .meta import VERSION
from .replicas import check_replicas, watch_replicas
from .save import save_checkpoint

__all__ = ["VERSION", "check_replicas", "load_checkpoint", "save_checkpoint", "watch_replicas"]
