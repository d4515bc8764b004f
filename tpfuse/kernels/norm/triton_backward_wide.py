"""The backward of rows too wide for registers, in two forms.

    two passes    a kernel of row sums, then one of columns, which reads everything again
    once          a program has the vector gradients of whole rows in registers, and goes over each row twice, chunk by
                  chunk: what it reads again lies in the multiprocessor's cache

The second form moves a third less.  It is for rows of up to 16384 columns and no bias gradient, since 65536 registers
are too few for three vectors.
"""

from ..runtime.philox import mask_key_device
from ..runtime.triton import tl, triton
from .triton_backward_tiles import d_tile, gamma_rows, out_tile, statistics, store_partials, x_tile, zeros
from .triton_forward import gamma_tile, live_rows

# ---- device functions ----


@triton.jit
def _means(
    dn, dh_ptr, saved, key, mask, rows, live, mean, rstd,
    D: tl.constexpr, R: tl.constexpr, A: tl.constexpr, KIND: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """Returns mean(g) (0 where the norm is not centred) and mean(g x_hat) of one row, [1]."""
    sum_g, sum_gx = tl.zeros([1, A], tl.float32), tl.zeros([1, A], tl.float32)
    for start in tl.range(0, D, A):
        columns = start + tl.arange(0, A)
        d = d_tile(dn, dh_ptr, key, mask, rows, columns, live, D, R, ORDER)
        g = d * gamma_rows(saved.gamma, rows, columns, D, KIND)
        if KIND.centred:
            sum_g += g
        sum_gx += g * x_tile(saved.h, mean, rstd, rows, columns, live, D)
    return tl.sum(sum_g, 1) / D, tl.sum(sum_gx, 1) / D


@triton.jit
def _finish(
    dn, dh_ptr, saved, mask, out, key, rows, columns, live, mean, rstd, mean_g, mean_gx, dgamma, dbeta,
    D: tl.constexpr, R: tl.constexpr, KIND: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """Stores a tile's gradients; returns dgamma and dbeta with the tile's added.

    The barrier keeps the tiles one after the other: side by side they take more registers than there are.
    """
    tl.debug_barrier()
    d = d_tile(dn, dh_ptr, key, mask, rows, columns, live, D, R, ORDER)
    g = d * gamma_rows(saved.gamma, rows, columns, D, KIND)
    x = x_tile(saved.h, mean, rstd, rows, columns, live, D)
    dx = rstd * (g - mean_g[:, None] - x * mean_gx[:, None])
    out_tile(dx, dn, dh_ptr, out, key, mask, rows, columns, live, D, ORDER)
    return dgamma + d * x, dbeta + d


# ---- kernels ----


@triton.jit
def bwd_rows_kernel(
    dn, dh_ptr, saved, mask,  # as in triton_backward.py
    sums_ptr,  # [m, 2] out, fp32: mean(g), mean(g x_hat)
    M, D: tl.constexpr, R: tl.constexpr, A: tl.constexpr, KIND: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    key = None
    if mask.rng_ptr is not None:
        key = mask_key_device(mask.rng_ptr)
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    live = live_rows(rows, M, 1)
    mean, rstd = statistics(saved, rows, live, KIND)
    mean_g, mean_gx = _means(dn, dh_ptr, saved, key, mask, rows, live, mean, rstd, D, R, A, KIND, ORDER)
    tl.store(sums_ptr + 2 * rows, mean_g)
    tl.store(sums_ptr + 2 * rows + 1, mean_gx)


@triton.jit
def bwd_columns_kernel(
    dn, dh_ptr, saved, mask, sums_ptr, out,  # as above
    M, D: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, A: tl.constexpr, KIND: tl.constexpr, ORDER: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    P = tl.num_programs(0)
    key = None
    if mask.rng_ptr is not None:
        key = mask_key_device(mask.rng_ptr)
    columns = tl.program_id(1) * A + tl.arange(0, A)
    dbias, dgamma, dbeta = zeros(ROWS, A)
    if saved.gamma is not None:
        gamma = gamma_tile(saved.gamma, columns[None, :], (columns < D)[None, :], KIND)
    for i in range(tl.cdiv(tl.cdiv(M, ROWS) - tl.program_id(0), P)):
        rows = (tl.program_id(0) + i * P).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        live = live_rows(rows, M, ROWS)
        if R.tree:  # the M of a leaf
            rows += tl.program_id(2) * M
        d = d_tile(dn, dh_ptr, key, mask, rows, columns, live, D, R, ORDER)
        if saved.gamma is not None:
            mean, rstd = statistics(saved, rows, live, KIND)
            x = x_tile(saved.h, mean, rstd, rows, columns, live, D)
            dgamma += d * x
            dbeta += d
            mean_g = tl.load(sums_ptr + 2 * rows, mask=live, other=0.0)[:, None]
            mean_gx = tl.load(sums_ptr + 2 * rows + 1, mask=live, other=0.0)[:, None]
            d = rstd * (d * gamma - mean_g - x * mean_gx)
        dbias += out_tile(d, dn, dh_ptr, out, key, mask, rows, columns, live, D, ORDER)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    store_partials(out, columns, dbias, dgamma, dbeta, D, R)


@triton.jit
def bwd_once_kernel(
    dn, dh_ptr, saved, mask, out,  # as in triton_backward.py; out without dbias
    M, D: tl.constexpr, R: tl.constexpr, A: tl.constexpr, KIND: tl.constexpr, ORDER: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Four tiles of A columns are a row."""
    P = tl.num_programs(0)
    key = None
    if mask.rng_ptr is not None:
        key = mask_key_device(mask.rng_ptr)
    a = tl.arange(0, A)
    b, c, e = A + a, 2 * A + a, 3 * A + a
    zero, dgamma_a, dbeta_a = zeros(1, A)
    _, dgamma_b, dbeta_b = zeros(1, A)
    _, dgamma_c, dbeta_c = zeros(1, A)
    _, dgamma_e, dbeta_e = zeros(1, A)
    for i in range(tl.cdiv(M - tl.program_id(0), P)):
        rows = (tl.program_id(0) + i * P).to(tl.int64) + tl.arange(0, 1)
        live = live_rows(rows, M, 1)
        mean, rstd = statistics(saved, rows, live, KIND)
        mean_g, mean_gx = _means(dn, dh_ptr, saved, key, mask, rows, live, mean, rstd, D, R, A, KIND, ORDER)
        dgamma_a, dbeta_a = _finish(
            dn, dh_ptr, saved, mask, out, key, rows, a, live, mean, rstd, mean_g, mean_gx, dgamma_a, dbeta_a,
            D, R, KIND, ORDER,
        )  # fmt: skip
        dgamma_b, dbeta_b = _finish(
            dn, dh_ptr, saved, mask, out, key, rows, b, live, mean, rstd, mean_g, mean_gx, dgamma_b, dbeta_b,
            D, R, KIND, ORDER,
        )  # fmt: skip
        dgamma_c, dbeta_c = _finish(
            dn, dh_ptr, saved, mask, out, key, rows, c, live, mean, rstd, mean_g, mean_gx, dgamma_c, dbeta_c,
            D, R, KIND, ORDER,
        )  # fmt: skip
        dgamma_e, dbeta_e = _finish(
            dn, dh_ptr, saved, mask, out, key, rows, e, live, mean, rstd, mean_g, mean_gx, dgamma_e, dbeta_e,
            D, R, KIND, ORDER,
        )  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    store_partials(out, a, zero, dgamma_a, dbeta_a, D, R)
    store_partials(out, b, zero, dgamma_b, dbeta_b, D, R)
    store_partials(out, c, zero, dgamma_c, dbeta_c, D, R)
    store_partials(out, e, zero, dgamma_e, dbeta_e, D, R)
