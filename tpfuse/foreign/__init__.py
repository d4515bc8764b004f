"""torch's own tools on parameters that are split over tensor-parallel ranks: right, or refused before anything changes.

They are given parameters, not layers, and know nothing of ranks that hold other slices.  What they are given is looked
up among the living parallel layers; a process without split parameters gets torch's own code and its bits.
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
