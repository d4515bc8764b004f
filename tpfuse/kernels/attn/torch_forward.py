"""torch's own flash attention as attention's forward: the default where it computes what is asked for, until a GPU has
found tpfuse's kernel faster.

Backward is tpfuse's either way, from the o and lse that come from here: torch's own adds dq by atomics unless
torch.use_deterministic_algorithms is on.
"""

import torch
from torch import Tensor

from ..runtime.launch import target
from ..runtime.tuning import LaunchConfig
from .options import GPU_WIDTH, TENSORS, Options

HALF = torch.float16, torch.bfloat16
SAMPLES = 65535  # at most: one is a grid's second dimension


def able(qkv: Tensor, options: Options) -> bool:
    """Returns whether torch's computes what is asked for: 16-bit heads whose rows are whole times 16 bytes, and of all
    options none but causal and scale."""
    (_, G, _, E) = qkv.shape
    samples = options.batch * G
    plain = all(option is None for option in (*options[:TENSORS], options.window, options.softcap))
    fits = E % 8 == 0 and E <= GPU_WIDTH and 0 < samples <= SAMPLES and options.seq > 0
    return plain and fits and qkv.dtype in HALF and qkv.is_contiguous() and qkv.data_ptr() % 16 == 0


def has_flash(device: torch.device) -> bool:
    """Returns whether torch has its flash attention there: on NVIDIA's GPUs from sm_80 on, where it was built with
    it."""
    arch = target(device).arch
    there = device.type == "cuda" and arch.startswith("sm_") and int(arch[3:]) >= 80
    return there and torch.backends.cuda.is_flash_attention_available()


def default_path(qkv: Tensor, options: Options) -> LaunchConfig:
    """Returns the path that forward takes where none was measured, as a launch parameter; none where there is no
    choice."""
    if not able(qkv, options):
        return {}
    return dict(path="sdpa" if has_flash(qkv.device) else "tpfuse")


def launch(qkv: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Returns what attention_fwd does, by torch's flash attention.

    A kv head of a sample, with its Q query heads, is one of torch's samples.  So q, k and v are views of qkv even where
    heads are grouped, and o, which torch lays out in memory as q lies, is [M, G Q E] as it comes.
    """
    B, S, (M, G, slots, E) = options.batch, options.seq, qkv.shape
    Q, rows = slots - 2, S * B
    q, k, v = qkv[:rows].view(S, B * G, slots, E).transpose(0, 1).split((Q, 1, 1), 2)
    o, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cum_seq_q=None, cum_seq_k=None, max_q=S, max_k=S,
        dropout_p=0.0, is_causal=options.causal, return_debug_mask=False, scale=options.scale,
    )  # fmt: skip
    o = o.transpose(0, 1).reshape(rows, G * Q * E)
    if M > rows:
        o = torch.cat([o, o.new_zeros(M - rows, G * Q * E)])
    return o, lse.reshape(B, G * Q, S)
