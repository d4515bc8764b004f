"""The ops between row shards and GEMMs, against the same lines of torch in one process.

Spans: tpfuse/sequence_parallel: every op by its plain form, which forms/plain.py defines.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.common import TOLERANCE, Recorder, assert_close, assert_equal, error, fake_tp, make_tp, my_rows
from tpfuse.kernels.norm import norm_in
from tpfuse.kernels.norm.core import reduce_parts
from tpfuse.sequence_parallel import exchange, gather_linear, gather_mlp_exchange, leave_parts, linear_exchange

M, D, N = 24, 10, 36  # rows and columns divide by 1, 2, 3 and 4; no two sizes are equal, nor any slice of one another's
OPS = "gather_linear", "gather_linear_act", "linear_exchange", "gather_mlp_exchange", "gather_mlp_exchange_gated"
FORMS = (
    "plain",
    "expanded",
    "normed",
    "recomputed",
)  # x [m, D]; x [R, m, D] with stride 0; from a norm; from a norm, and made again


def _data(op, dtype):
    """x and dy of all rows, the whole weights by name, the norm's vectors."""
    r = lambda *shape: torch.randn(*shape, dtype=torch.float64).to(dtype)
    x, dy = (r(M, N), r(M, D)) if op == "linear_exchange" else (r(M, D), r(M, D if "mlp" in op else N))
    rows = 2 * N if op.endswith("gated") else N
    w2, w = (
        dict(w2=r(D, N)) if "exchange" in op else {},
        {} if op == "linear_exchange" else dict(w=r(rows, D), b=r(rows)),
    )
    return x, dy, w | w2, (r(D), r(D))


def _columns(t, name, rank, size):
    """A rank's slice of a weight: rows of w and b, columns of w2."""
    return t.chunk(size, 1 if name == "w2" else 0)[rank]


def _dense(op, form, x, dy, weights, norm):
    """Values and gradients in one process, by torch alone."""
    x, *norm = (t.clone().requires_grad_() for t in (x, *norm))
    w = {name: t.clone().requires_grad_() for name, t in weights.items()}
    n = F.layer_norm(x, (D,), *norm) if form in ("normed", "recomputed") else x
    if op == "linear_exchange":
        y = n @ w["w2"].t()
    else:
        y = F.linear(n, w["w"], w["b"])
        if op.endswith("gated"):
            y = F.silu(y[:, ::2]) * y[:, 1::2]
        elif op != "gather_linear":
            y = F.gelu(y, approximate="tanh")
        y = y @ w["w2"].t() if "mlp" in op else y
    y.backward(dy)
    return dict(y=y.detach(), dx=x.grad, **{"d" + name: t.grad for name, t in w.items()})


def _call(op, n, w, tp, recompute=None):
    if op == "linear_exchange":
        return linear_exchange(n, w["w2"], tp=tp)
    if "mlp" in op:
        activation = "swiglu" if op.endswith("gated") else "gelu_tanh"
        return gather_mlp_exchange(n, w["w"], w["b"], w["w2"], activation=activation, tp=tp, recompute=recompute)
    return gather_linear(
        n, w["w"], w["b"], tp=tp, activation="gelu_tanh" if op.endswith("act") else "none", recompute=recompute
    )


def _loss(op, y, dy, tp):
    """<y, dy> for a dy of all rows; parts all meet the dy of their rows."""
    return (y * (dy.chunk(tp.size, 1)[tp.rank] if y.dim() == 2 else my_rows(dy, tp))).sum()


def _sharded(world, sp, op, form, x, dy, weights, norm):
    tp = make_tp(world, sp)
    w = {name: _columns(t, name, tp.rank, tp.size).clone().requires_grad_() for name, t in weights.items()}
    x = x.chunk(tp.size, 1)[tp.rank] if op == "linear_exchange" else my_rows(x, tp)
    x, recompute = x.clone().requires_grad_(), None
    n = x
    if form == "expanded":
        n = x = x.detach().expand(tp.row_shards, -1, -1).requires_grad_()
    elif form in ("normed", "recomputed"):
        _, n, recompute = norm_in(x, *norm, eps=1e-5, ranks=tp.row_shards, recompute=True)
    y = _call(op, n, w, tp, recompute if form == "recomputed" else None)
    _loss(op, y, dy, tp).backward()
    return dict(y=y.detach(), dx=x.grad, **{"d" + name: t.grad for name, t in w.items()})


def _expected(op, form, dense, x, dy, weights, rank, R, sp):
    """What a rank is to hold of the dense result; parts and their gradients are one rank's share each."""
    tp = fake_tp(R, rank, sp)
    mine = {name: t if name in ("y", "dx") else _columns(t, name[1:], rank, R) for name, t in dense.items()}
    if op == "linear_exchange":
        mine["dx"] = dense["dx"].chunk(R, 1)[rank]
    else:
        mine["dx"] = my_rows(dense["dx"], tp)
    mine["y"] = dense["y"].chunk(R, 1)[rank] if op.startswith("gather_linear") else my_rows(dense["y"], tp)
    return mine


def _check(ranks, R, sp, op, form, dtype):
    x, dy, weights, norm = _data(op, dtype)
    exact = _dense(op, form, x, dy, weights, norm)
    every = ranks(R, _sharded, sp, op, form, x, dy, weights, norm)
    for rank, got in enumerate(every):
        want = _expected(op, form, exact, x, dy, weights, rank, R, sp)
        if got["y"].dim() == 3:
            assert len(got["y"]) == (R if sp else 1)
            got["y"] = got["y"].sum(0)
        if form == "expanded":
            assert len(got["dx"]) == (R if sp else 1)
            got["dx"] = got["dx"].sum(0)
        assert_close(got, want, dtype)
    return every


@pytest.mark.parametrize(
    "op, form", [(op, form) for op in OPS for form in FORMS if op != "linear_exchange" or form == "plain"]
)
@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no sp"])
@pytest.mark.parametrize("R", [1, 2, 3, 4])
def test_equal_to_one_process(ranks, R, sp, op, form):
    _check(ranks, R, sp, op, form, torch.float64)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("R", [2, 4])
def test_equal_to_one_process_in_fp32(ranks, R, op):
    _check(ranks, R, True, op, "plain", torch.float32)


@pytest.mark.parametrize("op", ["gather_linear", "gather_mlp_exchange", "gather_mlp_exchange_gated"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("R", [2, 4])
def test_a_recomputed_input_changes_no_bit(ranks, R, dtype, op):
    data = _data(op, dtype)
    for kept, recomputed in zip(*(ranks(R, _sharded, True, op, form, *data) for form in ("normed", "recomputed"))):
        assert_equal(recomputed, kept)


@pytest.mark.parametrize("R", [2, 4])
def test_gradients_of_an_expanded_input_come_unsummed(ranks, R):
    """Part r is what rank r's columns give, dy_r W_r: not the sum, nor its share of it."""
    x, dy, weights, norm = _data("gather_linear", torch.float64)
    for rank, got in enumerate(ranks(R, _sharded, True, "gather_linear", "expanded", x, dy, weights, norm)):
        rows = slice(rank * M // R, (rank + 1) * M // R)
        parts = torch.stack([d[rows] @ w for d, w in zip(dy.chunk(R, 1), weights["w"].chunk(R, 0))])
        assert error(got["dx"], parts) <= TOLERANCE[torch.float64] < error(got["dx"], parts.mean(0).expand_as(parts))


def _parts_of_plain(world, x):
    """The R gradients of a plain [m, D] input, by a loss whose gradient is 256 on rank 0 and 1 elsewhere."""
    tp = make_tp(world)
    x = my_rows(x, tp).clone().requires_grad_()
    weight = torch.eye(x.shape[1], dtype=x.dtype)
    y = gather_linear(x, weight, tp=tp)
    y.backward(torch.full_like(y, 256.0 if world.rank == 0 else 1.0))
    return x.grad


def test_gradients_of_a_plain_input_are_added_in_fp32(ranks):
    """256 + 1 + 1 + 1 in bf16 is 256; rounded once it is 260."""
    for dx in ranks(4, _parts_of_plain, torch.zeros(8, 4, dtype=torch.bfloat16)):
        assert dx.unique().tolist() == [260.0]


# ---- exchange ----


def _exchanged(world, x):
    tp, results = make_tp(world), []
    for mine in x[world.rank], x[world.rank, :1].expand(world.size, -1, -1):
        mine, back = mine.detach().requires_grad_(), x[world.rank].flip(1)
        with Recorder() as seen:
            y = exchange(mine, tp)
            y.backward(back)
        inner = torch.stack([(y * back).sum(), (mine * mine.grad).sum()]).detach()
        dist.all_reduce(inner, group=world.group)
        results.append((y.detach(), inner.tolist(), [kind for kind, _, _ in seen.messages()]))
    return results


@pytest.mark.parametrize("R", [1, 2, 4])
def test_exchange_is_its_own_adjoint(ranks, R):
    """On integers, so exactly. One shard expanded to all is gathered."""
    x = torch.randint(-4, 5, (R, R, 3, 5)).double()
    for rank, (whole, expanded) in enumerate(ranks(R, _exchanged, x)):
        for (y, (there, back), _), want in (whole, x[:, rank]), (expanded, x[:, 0]):
            assert torch.equal(y, want) and there == back != 0
        assert (whole[2], expanded[2]) == (([], []) if R == 1 else (["all_to_all"] * 2, ["all_gather", "all_to_all"]))


# ---- autocast, tracing, messages ----


def _autocast(world, op, x, dy, weights):
    """fp32 leaves, under autocast and cast by hand."""
    tp, out = make_tp(world), []
    for automatic in True, False:
        leaf = x.chunk(tp.size, 1)[tp.rank] if op == "linear_exchange" else my_rows(x, tp)
        leaf = leaf.clone().requires_grad_()
        w = {name: _columns(t, name, tp.rank, tp.size).clone().requires_grad_() for name, t in weights.items()}
        cast = (lambda t: t) if automatic else (lambda t: t.bfloat16())
        with torch.autocast("cpu", torch.bfloat16, enabled=automatic):
            y = _call(op, cast(leaf), {name: cast(t) for name, t in w.items()}, tp)
        assert y.dtype == torch.bfloat16
        _loss(op, y, dy.bfloat16(), tp).backward()
        out.append(dict(y=y.detach(), dx=leaf.grad, **{name: t.grad for name, t in w.items()}))
    return out


@pytest.mark.parametrize("op", OPS)
def test_autocast_is_the_cast_before_the_op(ranks, op):
    x, dy, weights, _ = _data(op, torch.float32)
    for automatic, by_hand in ranks(2, _autocast, op, x, dy, weights):
        assert_equal(automatic, by_hand)
        assert {t.dtype for name, t in automatic.items() if name != "y"} == {torch.float32}


def _compiled(world, op, sp, x, dy, weights, norm):
    tp, out = make_tp(world, sp), []

    def fn(x, w):
        if op == "linear_exchange":
            return _call(op, x, w, tp)
        if op == "exchange":
            return exchange(x.view(tp.size, -1, D), tp)
        _, n, recompute = norm_in(x, *norm, eps=1e-5, ranks=tp.row_shards, recompute=True)
        return _call(op, n, w, tp, recompute) + _call(op, x, w, tp)

    for call in fn, torch.compile(fn, fullgraph=True, backend="aot_eager"):
        leaf = (x.chunk(tp.size, 1)[tp.rank] if op == "linear_exchange" else my_rows(x, tp)).clone().requires_grad_()
        w = {name: _columns(t, name, tp.rank, tp.size).clone().requires_grad_() for name, t in weights.items()}
        y = call(leaf, w)
        (y.sin() * torch.arange(y.numel()).view_as(y)).sum().backward()
        out.append(
            dict(y=y.detach(), dx=leaf.grad, **({} if op == "exchange" else {name: t.grad for name, t in w.items()}))
        )
    return out


EVERY_DAY = {("gather_mlp_exchange", True), ("exchange", True)}


@pytest.mark.parametrize(
    "op, sp",
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in EVERY_DAY))
        for case in [*((op, True) for op in (*OPS, "exchange")), ("gather_mlp_exchange", False)]
    ],
)
def test_compiled_in_one_graph(ranks, op, sp):
    for eager, compiled in ranks(2, _compiled, op, sp, *_data(op, torch.float64)):
        assert_equal(compiled, eager)


def _messages(world, op, sp):
    """What forward and backward of one op send, for a gradient that arrives expanded where it is one of parts."""
    tp = make_tp(world, sp)
    _, _, weights, _ = _data(op, torch.float32)
    w = {name: _columns(t, name, tp.rank, tp.size).clone().requires_grad_() for name, t in weights.items()}
    m = M // tp.row_shards
    x = torch.ones(M, N // tp.size) if op == "linear_exchange" else torch.ones(m, D).expand(tp.row_shards, -1, -1)
    with Recorder() as forward:
        y = _call(op, x.requires_grad_(), w, tp)
    with Recorder() as backward:
        y.backward(torch.ones(y.shape) if y.dim() == 2 else torch.ones(m, D).expand(tp.row_shards, -1, -1))
    return forward.messages(), backward.messages()


@pytest.mark.parametrize("R", [2, 4])
def test_messages(ranks, R):
    """Kind and shape of each: a shard is gathered, parts are exchanged."""
    shard, parts = ("all_gather", (M // R, D), torch.float32), ("all_to_all", (R, M // R, D), torch.float32)
    sent = {"gather_linear": ([shard], [parts, shard]), "linear_exchange": ([parts], [shard])}
    sent["gather_mlp_exchange"] = [shard, parts], [shard, parts, shard]
    for op, expected in sent.items():
        assert ranks(R, _messages, op, True) == [expected] * R
    # without sequence parallelism: one sum forward or backward, and no gather of what every rank has
    total = ("all_gather", (M, D), torch.float32)
    assert ranks(R, _messages, "gather_linear", False) == [([], [total])] * R
    assert ranks(R, _messages, "linear_exchange", False) == [([total], [])] * R


def _opcheck(world):
    torch.library.opcheck(reduce_parts.overload, (torch.randn(3, 4, 5),))


def test_opcheck(ranks):
    ranks(1, _opcheck)


@pytest.mark.parametrize(
    "match, call",
    [
        (r"exchange: x must be \[4, m, D\], got \(2, 3, 5\)", lambda tp: exchange(torch.zeros(2, 3, 5), tp)),
        (
            r"leave_parts: M=7 rows are not divisible by tensor-parallel size 4",
            lambda tp: leave_parts(torch.zeros(7, 5), tp),
        ),
        (
            r"linear_exchange: .*M divisible by 4, got \(7, 5\)",
            lambda tp: linear_exchange(torch.zeros(7, 5), torch.zeros(6, 5), tp=tp),
        ),
        (
            r"gather_linear: weight must be \[N, 5\]",
            lambda tp: gather_linear(torch.zeros(7, 5), torch.zeros(5, 6), tp=tp),
        ),
        (
            r"gather_linear: x must be .* \[4, m, D\]",
            lambda tp: gather_linear(torch.zeros(2, 7, 5), torch.zeros(6, 5), tp=tp),
        ),
        (
            r"gather_linear: bias must be \[6\]",
            lambda tp: gather_linear(torch.zeros(8, 5), torch.zeros(6, 5), torch.zeros(5), tp=tp),
        ),
        (r"one dtype outside autocast", lambda tp: gather_linear(torch.zeros(8, 5), torch.zeros(6, 5).double(), tp=tp)),
    ],
)
def test_errors(match, call):
    with pytest.raises(ValueError, match=match):
        call(fake_tp(4, 0, True))


@pytest.mark.parametrize(
    "w2, activation, match",
    [
        (torch.zeros(6, 5), "gelu", r"fc2_weight must be \(5, 6\), got \(6, 5\)"),
        (torch.zeros(5, 6).double(), "gelu", "one dtype outside autocast"),
        (torch.zeros(5, 6), "none", "activation must not be none"),
        (torch.zeros(5, 6), "swish", "activation must be one of .*, swiglu, geglu, geglu_tanh, got 'swish'"),
        (torch.zeros(5, 6), "swiglu", r"fc2_weight must be \(5, 3\), got \(5, 6\)"),
    ],
)
def test_errors_of_the_mlp(w2, activation, match):
    with pytest.raises(ValueError, match=match):
        gather_mlp_exchange(torch.zeros(8, 5), torch.zeros(6, 5), None, w2, activation=activation, tp=fake_tp(1))
