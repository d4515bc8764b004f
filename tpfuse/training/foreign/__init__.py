"""torch's own tools on parameters that are split over tensor-parallel ranks: right, or refused before anything changes.

They are given parameters, not layers, and know nothing of ranks that hold other slices.  What they are given is looked
up among the living parallel layers; a process without split parameters gets torch's own code and its bits.

accelerate  accelerate's Accelerator without the mix-in
behind      standing behind a function or method of torch's
clip        torch.nn.utils' clipping by norm
groups      which tools send parameters over which group: DDP, FSDP, replicate, distribute_tensor
known       what a tensor that a tool is given is a slice of
norm        the norm of a whole model's gradients
scaler      torch.amp.GradScaler
"""

from . import accelerate, clip, groups, scaler

__all__ = ["install"]


def install() -> None:
    """Stands behind torch's tools, once a process.

    The package does so at its import: a layer may come to life as a copy or from a pickle, in whatever order modules
    are imported.
    """
    accelerate.install()
    clip.install()
    groups.install()
    scaler.install()
