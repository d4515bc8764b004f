"""position_ids that begin again, by which transformers' collators say where the documents of a row begin.

transformers reads them so where a call has neither an attention mask nor a cache.  Rows [B, S] then are one row of
documents here, whose bounds are cu_seqlens: no document sees another, and every label counts, as there.
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from ..kernels.losses.options import IGNORE
from ..models.inputs import Inputs
from ..models.model import Output
from ..models.rows import positions_of


class Documents(NamedTuple):
    """The documents of a call on [B, S] tokens, as one row of B S tokens.

    ``bounds`` int32 [N + 1]; ``shifts``: whether labels are those of a language model, which follow their tokens;
    ``places``: the positions whose logits come, [B, K] or [N]; None for all.
    """

    inputs: Inputs
    bounds: Tensor
    shifts: bool
    places: Tensor | None

    @classmethod
    def of(cls, inputs: Inputs, shifts: bool) -> "Documents | None":
        """Returns the documents of a call; None where each row is one, or the arguments are wrong."""
        tokens = inputs.input_ids if inputs.inputs_embeds is None else inputs.inputs_embeds
        positions, keep = inputs.position_ids, inputs.logits_to_keep
        if not isinstance(tokens, Tensor) or not isinstance(positions, Tensor) or positions.shape != tokens.shape[:2]:
            return None
        begins = F.pad(positions.diff() != 1, (1, 0))
        if not begins.any():
            return None
        begins[:, 0] = True
        bounds = F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=begins.numel()).int()
        return cls(inputs, bounds, shifts, None if keep is None else positions_of(keep, begins.shape, tokens.device))

    def packed(self) -> Inputs:
        """Returns the arguments of the call on one row."""
        inputs = self.inputs
        if inputs.labels is not None and self.shifts:  # over a document's bound too, as transformers has it
            inputs = inputs._replace(labels=None, shift_labels=F.pad(inputs.labels[:, 1:], (0, 1), value=IGNORE))
        return inputs._replace(
            input_ids=_one_row(inputs.input_ids),
            inputs_embeds=_one_row(inputs.inputs_embeds),
            labels=_one_row(inputs.labels),
            shift_labels=_one_row(inputs.shift_labels),
            position_ids=_one_row(inputs.position_ids),
            logits_to_keep=None if self.places is None else self.places.flatten(),
            cu_seqlens=self.bounds,
            max_seqlen=int(self.bounds.diff().max()),
        )

    def unpacked(self, outputs: Output) -> Output:
        """Returns the results on rows [B, S]; the loss of each label stands where the call's own label does."""
        loss, logits, last, states = outputs.loss, outputs.logits, outputs.last_hidden_state, outputs.hidden_states
        if loss is not None and loss.dim():
            loss = self._batch(loss)
            loss = F.pad(loss[:, :-1], (1, 0)) if self.inputs.labels is not None and self.shifts else loss
        if logits is not None:
            logits = self._batch(logits) if self.places is None else logits.view(*self.places.shape, -1)
        last = None if last is None else self._batch(last)
        states = None if states is None else tuple(map(self._batch, states))
        return outputs._replace(loss=loss, logits=logits, last_hidden_state=last, hidden_states=states)

    def _batch(self, row: Tensor) -> Tensor:
        return row.view(*self.inputs.shape, *row.shape[2:])


def _one_row(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.flatten(0, 1)[None]
