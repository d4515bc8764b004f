"""The fused norm's Triton side, backward.

    d = sum_r dn_r
    "pre"    dx = norm_backward(d) + dh            dresidual = dx, dparts = dropout(dx), dbias = sum_rows dparts
    "post"   dx = norm_backward(d + dh)            the same
    "drop"   dx = norm_backward(dropout(d + dh))   dparts = dx

    x_hat = (h - mean) rstd,  g = d gamma;  norm_backward(d) = rstd (g - mean(g) - x_hat mean(g x_hat))
    dgamma = sum_rows d x_hat,  dbeta = sum_rows d

Rows of up to 8192 columns lie in registers.  The vector gradients stay in fp32 registers while a program strides over
the rows; it writes one partial, and a 2-D reduction adds those in a fixed order: the same bits in every run.  That is a
kernel of its own, because one program that adds all partials alone reads them at the rate of one multiprocessor: 264
rows of 1024 columns, twice, take it 20 us.  With EARLY it is started while the last rows are still at work, and waits
on the GPU (programmatic dependent launch).  With LAST there is no second kernel: the programs that arrive last add
(partials.py).  With STAGES = 2 a row's loads are copies into shared memory that begin while the row before is worked
on.  Wider rows: triton_backward_wide.py.  An absent tensor is None, for which Triton compiles no code.

With leaves of the rows (core.py) a program strides over the rows of one leaf, in launch parameters and as many programs
as a leaf's shape asks for; a leaf's partials are added in their order, then leaves as a binary tree.
"""

from typing import Any

import torch
from torch import Tensor

from ..runtime.counters import counters
from ..runtime.device import RankSum
from ..runtime.errors import check
from ..runtime.launch import launch, target
from ..runtime.leaves import placed
from ..runtime.op import Cost, dense, moved
from ..runtime.partials import Last, groups_of, reduce_leaves, reduce_vectors, releases, sum_by_the_last, sum_config
from ..runtime.philox import Mask, kernel_mask, mask_key_device
from ..runtime.triton import tl, triton
from ..runtime.tuning import LaunchConfig, tuned
from .config import BWD_COLUMNS, BWD_ROWS, ONCE_ROW, bwd_config, once_config
from .kinds import KINDS
from .records import DROP, POST, PRE, Saved, Wanted, incoming
from .triton_backward_tiles import (
    Gradients,
    Statistics,
    d_tile,
    gamma_rows,
    out_tile,
    statistics,
    store_partials,
    x_tile,
    zeros,
)
from .triton_backward_wide import bwd_columns_kernel, bwd_once_kernel, bwd_rows_kernel
from .triton_forward import live_rows, strided

# ---- kernels ----


@triton.jit
def _bwd_kernel(
    dn,  # [R, m, D] in: Parts
    dh_ptr,  # [m, D] in
    saved,  # in: Statistics
    mask,  # KernelMask
    out,  # Gradients, whose vectors are partial sums
    last,  # Last: the vectors, where programs of this kernel sum the partials
    M,
    D: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    KIND: tl.constexpr, ORDER: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
    GROUP: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    P = tl.num_programs(0)
    key = None
    if mask.rng_ptr is not None:
        key = mask_key_device(mask.rng_ptr)
    a = tl.arange(0, A)
    b = A + tl.arange(0, max(B, 1))
    dbias_a, dgamma_a, dbeta_a = zeros(ROWS, A)
    if B > 0:
        dbias_b, dgamma_b, dbeta_b = zeros(ROWS, B)
    for i in tl.range(0, tl.cdiv(tl.cdiv(M, ROWS) - tl.program_id(0), P), num_stages=STAGES):
        rows = (tl.program_id(0) + i * P).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        live = live_rows(rows, M, ROWS)
        if R.tree:  # the M of a leaf
            rows += tl.program_id(2) * M
        d_a = d_tile(dn, dh_ptr, key, mask, rows, a, live, D, R, ORDER)
        if B > 0:
            d_b = d_tile(dn, dh_ptr, key, mask, rows, b, live, D, R, ORDER)
        if saved.gamma is not None:
            mean, rstd = statistics(saved, rows, live, KIND)
            x_a = x_tile(saved.h, mean, rstd, rows, a, live, D)
            g_a = d_a * gamma_rows(saved.gamma, rows, a, D, KIND)
            dgamma_a += d_a * x_a
            dbeta_a += d_a
            mean_g, mean_gx = tl.sum(g_a, 1), tl.sum(g_a * x_a, 1)
            if B > 0:
                x_b = x_tile(saved.h, mean, rstd, rows, b, live, D)
                g_b = d_b * gamma_rows(saved.gamma, rows, b, D, KIND)
                dgamma_b += d_b * x_b
                dbeta_b += d_b
                mean_g += tl.sum(g_b, 1)
                mean_gx += tl.sum(g_b * x_b, 1)
            mean_g, mean_gx = mean_g[:, None] / D, mean_gx[:, None] / D
            if not KIND.centred:
                mean_g = mean_g * 0.0
            d_a = rstd * (g_a - mean_g - x_a * mean_gx)
            if B > 0:
                d_b = rstd * (g_b - mean_g - x_b * mean_gx)
        dbias_a += out_tile(d_a, dn, dh_ptr, out, key, mask, rows, a, live, D, ORDER)
        if B > 0:
            dbias_b += out_tile(d_b, dn, dh_ptr, out, key, mask, rows, b, live, D, ORDER)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    store_partials(out, a, dbias_a, dgamma_a, dbeta_a, D, R)
    if B > 0:
        store_partials(out, b, dbias_b, dgamma_b, dbeta_b, D, R)
    if last.counters is not None:
        sum_by_the_last(out, last, D, GROUP, SUM)


BWD_ROW = 8192  # columns up to which a row lies in registers
LEAF = 128  # programs of a leaf of the rows, at most


def _form(like: Tensor, R: int, alone: bool, leaves: int) -> tuple[Any, LaunchConfig, int]:
    """Returns the kernel that makes the gradients of rows [m, D], its launch parameters, and how many programs stride
    over the rows, or over those of a leaf; their partials add 2.4 P / m of the traffic.

    ``like``: dn or, without it, dh; ``alone``: there is a norm, and no bias gradient.
    """
    m, D = like.shape[-2:]
    arch, multiprocessors = target(like.device)
    step = m // max(leaves, 1)
    programs = lambda count, rows: max(1, min(LEAF if leaves else count * multiprocessors, -(-step // max(16, rows))))
    if D <= BWD_ROW:
        config = dict(_parameters("fused_norm_bwd", like, leaves, default=bwd_config(D, arch, R)))
        config["LAST"] = config["LAST"] and releases(arch)
        return _bwd_kernel, config, programs(2, config["ROWS"])
    config = dict(_parameters("fused_norm_bwd_columns", like, leaves, default=BWD_COLUMNS))
    if config.pop("ONCE") and alone and D <= ONCE_ROW:
        return bwd_once_kernel, once_config(D, arch) | dict(EARLY=config["EARLY"]), programs(1, 1)
    return bwd_columns_kernel, config, programs(2, config["ROWS"])


def _parameters(kernel: str, like: Tensor, leaves: int, default: LaunchConfig) -> LaunchConfig:
    """Returns a kernel's launch parameters; with leaves the default ones, since m, which others go by, is R's."""
    if leaves:
        return default
    return tuned(kernel, target(like.device).arch, like.dtype, tuple(like.shape[-2:]), default=default)


# ---- launchers ----


def _normed(dn: Tensor | None, saved: Saved, order: str) -> bool:
    """Whether anything comes through the norm."""
    return saved.gamma is not None and (dn is not None or order in (POST, DROP))


def backward(
    dn: Tensor | None,
    dh: Tensor | None,
    saved: Statistics,
    mask: Mask,
    *,
    kind: str,
    order: str,
    out: Gradients,
    leaves: int = 0,
) -> None:
    """Launches what fills ``out``."""
    if leaves:
        dn, dh, saved = placed((dn, dh, saved))
    m, D = out.dparts.shape
    device, incoming_rows, R = out.dparts.device, incoming(dn, dh), 1 if dn is None else dn.shape[0]
    kernel, config, P = _form(incoming_rows, R, alone=saved.gamma is not None and out.dbias is None, leaves=leaves)
    vectors = out.dbias, out.dgamma, out.dbeta
    there = [v is not None for v in vectors]
    groups = groups_of(P) if config.pop("LAST", False) and any(there) else 0  # whose sums are partials too
    rows = max(leaves, 1) * P + groups
    rooms = iter(out.dparts.new_empty(sum(there), rows, D, dtype=torch.float32))  # one allocation
    partials = [next(rooms) if is_there else None for is_there in there]
    pointers = Gradients(out.dparts, out.dparts.stride(0), out.dresidual, *partials)
    dh = None if dh is None else dh.contiguous()
    entering, drops = (strided(dn), dh, dense(saved)), kernel_mask(mask)
    flags = dict(D=D, R=RankSum(R, leaves > 0), KIND=KINDS[kind], ORDER=order if order in (POST, DROP) else PRE)
    step, over = (m // leaves, (leaves,)) if leaves else (m, ())  # rows that a program strides over, and of how many
    if kernel is bwd_columns_kernel:
        sums = out.dparts.new_empty(m, 2, dtype=torch.float32)
        if saved.gamma is not None:
            row_config = _parameters("fused_norm_bwd_rows", incoming_rows, leaves, default=BWD_ROWS)
            early = drops if order == DROP else drops._replace(rng_ptr=None)
            launch(bwd_rows_kernel, (m,), device, *entering, early, sums, m, **flags, **row_config)
        grid = (P, -(-D // config["A"]), *over)
        launch(kernel, grid, device, *entering, drops, sums, pointers, step, **flags, **config)
    elif kernel is bwd_once_kernel:
        launch(kernel, (P,), device, *entering, drops, pointers, m, **flags, **config)
    else:
        counted = Last(counters(device), *vectors) if groups else Last()
        config |= sum_config(D, config["num_warps"]) | dict(EARLY=config["EARLY"] and not groups)
        grid = (P, 1, leaves) if leaves else (P,)
        launch(kernel, grid, device, *entering, drops, pointers, counted, step, **flags, **config)
        if groups:
            return
    if leaves:
        reduce_leaves(partials, vectors, leaves)
    else:
        reduce_vectors(partials, vectors, early=config["EARLY"])


def bwd_launch(
    dn: Tensor | None,
    dh: Tensor | None,
    saved: Saved,
    mask: Mask,
    order: str,
    wanted: Wanted,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The launcher of fused_norm_bwd."""
    check(out is None or out.stride(1) == 1, "fused_norm_bwd: the columns of out must lie side by side")
    incoming_rows = incoming(dn, dh)
    new, (m, D) = incoming_rows.new_empty, incoming_rows.shape[-2:]
    gamma = saved.gamma if _normed(dn, saved, order) else None
    dparts = new(m, D, dtype=wanted.parts) if out is None else out
    dresidual = None if wanted.residual is None else new(m, D, dtype=wanted.residual)
    dbias = None if wanted.bias is None else new(D, dtype=wanted.bias)
    dgamma = None if gamma is None else gamma.new_empty(D)
    dbeta = gamma.new_empty(D) if gamma is not None and wanted.beta else None
    read = Statistics() if gamma is None else Statistics(saved.h, saved.mean, saved.rstd, gamma)
    filled = Gradients(dparts, 0, dresidual, dbias=dbias, dgamma=dgamma, dbeta=dbeta)
    backward(dn, dh, read, mask, kind=saved.kind, order=order, out=filled, leaves=wanted.leaves)
    dparts = dparts if out is None else new(0, dtype=wanted.parts)
    or_empty = lambda t: new(0, dtype=torch.float32) if t is None else t
    if dgamma is not None and dbeta is None:
        dbeta = dgamma.new_empty(0)
    return dparts, or_empty(dresidual), or_empty(dbias), or_empty(dgamma), or_empty(dbeta)


def bwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    dn, dh, saved, mask, order, wanted, *out = args
    incoming_rows, normed = dh if dn is None else dn, _normed(dn, saved, order)
    m, D = incoming_rows.shape[-2:]
    R, leaves = 1 if dn is None else dn.shape[0], wanted.leaves
    kernel, config, P = _form(incoming_rows, R, alone=normed and wanted.bias is None, leaves=leaves)
    vectors = (wanted.bias is not None) + (1 + wanted.beta if normed else 0)
    groups = groups_of(P) if config.get("LAST", False) else 0
    partials = 4 * vectors * (max(leaves, 1) * P + groups) * D
    through = (saved.h, saved.mean, saved.rstd, saved.gamma) if normed else ()
    read, written = moved(dn, dh, *through, mask.rng) + partials, moved(*outputs, *out) + partials
    if kernel is bwd_columns_kernel and normed:  # the first pass, and its sums
        reread = (dh,) if dn is None or order in (POST, DROP) else ()
        read += moved(dn, *reread, *through, mask.rng if order == DROP else None) + 8 * m
        written += 8 * m
    return Cost(read, written)
