"""Training checkpoints: model, optimizer, rng and the caller's own state.

They are resumable at any tensor-parallel size and never half-written:

    directory/step-00000100/   shards of full tensors (safetensors), then meta.json with the checksums of all
                               files
    directory/latest           the name of the newest whole checkpoint, replaced by one atomic rename after everything
                               is on disk
    directory/job.json         the job that saves here

A save that is killed leaves ``latest`` as it was.  The last two checkpoints are kept.  Nothing in them is a pickle.
"""

from .load import load_checkpoint
from .meta import VERSION
from .save import save_checkpoint

__all__ = ["VERSION", "load_checkpoint", "save_checkpoint"]
