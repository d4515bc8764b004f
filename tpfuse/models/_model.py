"""What every model shares: rows out of a batch, the rng of a call, agreement of the ranks, and files in and out."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..kernels._op import check
from ..kernels._philox import make_rng
from ..layers._module import initialize
from ..parallel import TensorParallel
from . import huggingface
from .config import ModelConfig


class Output(NamedTuple):
    """What a model returns; what was not asked for is None.

    ``loss`` scalar fp32; ``logits`` [B, S, V/R], this rank's slice of the vocabulary; ``last_hidden_state`` [B, S, D] and
    ``pooler_output`` [B, D], the same on every rank.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    pooler_output: Tensor | None = None


class Rows:
    """[B, S] as sequence-major rows s * B + b, padded to a multiple of the row shards, and this rank's share of them."""

    def __init__(self, batch: int, seq: int, tp: TensorParallel):
        self.batch, self.seq, self.tp = batch, seq, tp
        self.count = -(-batch * seq // tp.row_shards) * tp.row_shards
        self.here = self.count // tp.row_shards
        self.first = tp.row_rank * self.here

    def all(self, x: Tensor, fill: int) -> Tensor:
        """[B, S] -> [M], ``fill`` in the padding"""
        rows = x.t().reshape(-1)
        return nn.functional.pad(rows, (0, self.count - len(rows)), value=fill)

    def local(self, x: Tensor, fill: int) -> Tensor:
        """[B, S] -> this rank's [m]"""
        return self.all(x, fill)[self.first : self.first + self.here]

    def back(self, rows: Tensor) -> Tensor:
        """[M, ...] -> [B, S, ...]"""
        return rows[: self.batch * self.seq].unflatten(0, (self.seq, self.batch)).transpose(0, 1)


class Model(nn.Module):
    """``step`` counts training forwards (a 0-d int64 tensor, no buffer) unless a call brings its own."""

    config_class: type[ModelConfig]

    def __init__(
        self,
        config: ModelConfig,
        *,
        tp: TensorParallel | None = None,
        dp: "dist.ProcessGroup | dist.DeviceMesh | None" = None,
        seed: int = 0,
        saving: str = "fastest",
        **options: Any,
    ):
        super().__init__()
        self.config, self.seed, self.saving = config, seed, saving
        self.tp = TensorParallel() if tp is None else tp
        dp = dp.get_group() if dp is not None and not isinstance(dp, dist.ProcessGroup) else dp
        self.dp_rank, self.dp_group_name = (None, None) if dp is None else (dp.rank(), dp.group_name)
        self.step = torch.zeros((), dtype=torch.int64, device="cpu")
        self.source: Path | None = None  # the directory that the weights came from, and the contents of its config.json
        self.hf_source: dict[str, Any] | None = None
        self._compared = False
        shared = dict(config=config, seed=seed, saving=saving, dtype=torch.get_default_dtype())
        shared |= dict(sequence_parallel=self.tp.sequence_parallel, overlap=self.tp.overlap)
        for key, value in (shared | options).items():
            self.tp.agree(f"{type(self).__name__}: {key}", value)

    def _materialize(self) -> None:
        """Modules are made on the meta device; here they get storage and their initial weights (unless the caller wants meta)."""
        device = torch.get_default_device()
        if device.type != "meta":
            self.to_empty(device=device)
            initialize(self, self.seed)

    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups this model knows of: tensor-parallel, then data-parallel."""
        names = self.tp.group_name, self.dp_group_name
        return [dist.distributed_c10d._resolve_process_group(name) for name in names if name is not None]

    # ---- a call ----

    def _check_inputs(self, ids: Tensor, longest: int | None = None, **aligned: Tensor | None) -> None:
        """``longest``: of the documents packed in ids, where there are such."""
        name = type(self).__name__
        check(ids.dim() == 2 and ids.dtype == torch.int64, f"{name}: input_ids must be int64 [B, S], got {ids.dtype} {tuple(ids.shape)}")
        most, length = self.config.max_positions, ids.shape[1] if longest is None else longest
        check(length <= most, f"{name}: {length} positions are more than the model's max_positions={most}")
        for key, x in aligned.items():
            if x is not None:
                fits = x.shape == ids.shape and (key == "attention_mask" or x.dtype == torch.int64)
                check(fits, f"{name}: {key} must be int64 {tuple(ids.shape)} as input_ids, got {x.dtype} {tuple(x.shape)}")
        if not self._compared and not torch.compiler.is_compiling():
            cause = "the usual cause is a sampler over the whole world instead of over the data-parallel ranks"
            self.tp.agree_tensor(f"{name}: input_ids", ids, cause)
            self._compared = True

    def _rng(self, ids: Tensor, step: int | Tensor | None, first_sample: int | Tensor | None) -> Tensor | None:
        """(seed, step, first_sample) of this call, or None where nothing is dropped."""
        c = self.config
        if not self.training or max(c.dropout, c.attention_dropout, c.embedding_dropout) == 0:
            return None
        if first_sample is None:
            alone = not dist.is_initialized() or dist.get_world_size() == self.tp.size
            check(
                alone or self.dp_rank is not None,
                f"{type(self).__name__}: dropout is on and the world is larger than the tensor-parallel group, so replicas would share"
                " masks; give the model dp=, or the call first_sample=",
            )
            first_sample = (self.dp_rank or 0) * len(ids)
        if step is None:
            if self.step.device != ids.device:
                self.step = self.step.to(ids.device)
            step = self.step.clone()
            self.step += 1
        return make_rng(self.seed, step, first_sample, ids.device)

    def _key_mask(self, attention_mask: Tensor | None) -> Tensor | None:
        return None if attention_mask is None else attention_mask.bool()

    # ---- files ----

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        tp: TensorParallel | None = None,
        dp: "dist.ProcessGroup | dist.DeviceMesh | None" = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        saving: str = "fastest",
        **options: Any,
    ) -> "Model":
        """A model from a Hugging Face directory (config.json, safetensors); each rank reads its own slices only.

        ``dtype`` (default: torch's default dtype) is that of the parameters, whatever the files hold.  ValueError on every rank, before
        anything is read, for an unknown model_type, an option that is not built, or a missing, extra, mis-shaped or truncated tensor.
        """
        dtype = torch.get_default_dtype() if dtype is None else dtype

        def look() -> tuple[huggingface.Files, ModelConfig, dict[str, Any]]:
            files = huggingface.Files(path)
            return files, cls.config_class.from_hf(files.config), cls._options_from(files) | options

        files, config, options = huggingface.together(look, () if tp is None else (tp.group,))
        with torch.device("meta"):
            model = cls(config, tp=tp, dp=dp, seed=seed, saving=saving, **options)
        model.tp.agree(f"{cls.__name__}: dtype", dtype)
        huggingface.load(model, files, dtype, device)
        model.source, model.hf_source = Path(path), files.config
        return model.eval()

    @classmethod
    def _options_from(cls, files: "huggingface.Files") -> dict[str, Any]:
        """Constructor arguments that the tensors in a directory decide."""
        return {}

    def hf_name(self, name: str) -> str:
        """A tensor's name in the base model -> its name in a file that this model writes."""
        return name if name.startswith(self.head_prefixes) else self.base_prefix + name

    def save_pretrained(self, path: str | Path) -> None:
        """Writes a directory that transformers loads: full tensors, config.json, and the tokenizer files the model came with."""
        huggingface.save(self, Path(path))
