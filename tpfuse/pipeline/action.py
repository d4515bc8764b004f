"""One action of a rank of a pipeline, in the letters of torch.distributed.pipelining."""

from typing import NamedTuple

FORWARD, BACKWARD, INPUT, WEIGHT = KINDS = "F", "B", "I", "W"  # I and W: gradients of inputs, of weights; B: both


class Action(NamedTuple):
    """A pass of one micro-batch through one stage; ``chain`` tells copies of the model apart."""

    stage: int
    kind: str
    micro_batch: int
    chain: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{chr(39) * self.chain}{self.kind}{self.micro_batch}"
