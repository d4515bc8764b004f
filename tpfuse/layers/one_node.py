"""A block on one rank as one autograd node: the ops of its wiring one after another, without a Function for each.

On one rank nothing is exchanged, and what a block costs the host beside its kernels is Python: seven Functions, each
with checks and records of its own, around a launcher for each op.  Forward and backward are functions of tensors here,
recorded and replayed whole.  Values and gradients are bitwise those of the ops called one by one, and so are the bytes
saved; they are freed together, when the block's backward has ended.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.attn.op import attention_bwd, attention_fwd
from ..kernels.attn.options import TENSORS, Options
from ..kernels.norm.alone import NORM
from ..kernels.norm.records import ALONE, POST, PRE, Add, NormVectors, Wanted
from ..kernels.norm.records import Saved as NormSaved
from ..kernels.norm.verbs import REDUCE_BIAS_DROPOUT_ADD_NORM as FUSED
from ..kernels.replay import Composed
from ..kernels.runtime.function import Function, once_differentiable
from ..kernels.runtime.main_grad import Main, mains
from ..kernels.runtime.op import acc_dtype, dtype_of, in_dtype
from ..kernels.runtime.philox import NO_MASK, Mask
from ..parallel import TensorParallel
from ..sequence_parallel.choice import choose
from ..sequence_parallel.records import MLP, LinearWeights, MLPSaved, SavedInput, WantedGrads, adding
from .module import local
from .wiring import Branch, Join, Norm, Normed, Steps, run, run_backward


class Constants(NamedTuple):
    """Numbers of a block and a call; ``norms`` are (name, eps, kind) in the order of their use."""

    steps: Steps
    norms: tuple[tuple[str, float, str], ...]
    activation: str
    attention: Mask  # of dropout after attention
    mlp: Mask
    bitwise: int | None  # as of TensorParallel
    batch_invariant: int | None

    @property
    def tp(self) -> TensorParallel:
        """The one rank: a tape compares numbers, and not objects."""
        return _one_rank(self.bitwise, self.batch_invariant)


@functools.cache
def _one_rank(bitwise: int | None, batch_invariant: int | None) -> TensorParallel:
    return TensorParallel(bitwise=bitwise, batch_invariant=batch_invariant)


class Parameters(NamedTuple):
    """Parameters of a block's projections."""

    qkv_weight: Tensor  # [G, Q + 2, E, D]
    qkv_bias: Tensor | None
    out_weight: Tensor
    out_bias: Tensor | None
    fc1_weight: Tensor  # [F, D], gated [F, 2, D]
    fc1_bias: Tensor | None
    fc2_weight: Tensor
    fc2_bias: Tensor | None


class Layer(NamedTuple):
    """A block and a call, but for the block's rows.  ``norms``: weight and bias of each of the constants' norms."""

    constants: Constants
    options: Options  # of attention
    parameters: Parameters
    norms: tuple[Tensor | None, ...]

    def norm(self, name: str | None) -> NormVectors:
        for i, (norm, eps, kind) in enumerate(self.constants.norms):
            if norm == name:
                return NormVectors(self._vector(self.norms[2 * i]), self._vector(self.norms[2 * i + 1]), eps, kind)
        return NormVectors()

    def bias(self, branch: str) -> Tensor | None:
        return self._vector(getattr(self.parameters, BIAS[branch]))

    def _vector(self, x: Tensor | None) -> Tensor | None:
        """Returns a vector of rows; by leaves in fp32, in which the nodes of its gradient are added."""
        return x if x is None or self.constants.bitwise is None else in_dtype(x, acc_dtype(x))


class Totals(NamedTuple):
    """Sums [N, K] that the weights' gradients are added to; None where gradients are returned."""

    qkv: Tensor | None = None
    out: Tensor | None = None
    fc1: Tensor | None = None
    fc2: Tensor | None = None


NO_TOTALS = Totals()
PARAMETERS = len(Parameters._fields)


class GradientRequest(NamedTuple):
    """Gradients that backward makes: of which projections' parameters, in which dtypes, and where they are added."""

    parameters: Any  # a Parameters of flags
    residual: torch.dtype  # of the gradient of h
    dtype: torch.dtype  # of the gradients of n and of parts
    totals: Totals = NO_TOTALS


# ---- forward ----


def _linear(w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """w [.., K], b [..] -> [N, K], [N]"""
    return w.reshape(-1, w.shape[-1]), None if b is None else b.reshape(-1)


class _Forward:
    """Runs the steps; ``saved`` gets the tensors that each leaves to backward."""

    def __init__(self, layer: Layer):
        self.layer = layer
        self.saved: list[Tensor | None] = []

    def norm(self, step: Norm, h: Tensor) -> tuple[Tensor, Tensor]:
        norm, leaves = self.layer.norm(step.norm), self.layer.constants.tp.leaves
        _, rows, mean, rstd = NORM.fwd(h[None], Add(), norm, NO_MASK, order=ALONE, leaves=leaves)
        self.saved += h, mean, rstd
        return h, rows[None]

    def branch(self, step: Branch, n: Tensor) -> Tensor:
        (constants, options, p, _) = self.layer
        parts: Tensor
        tp = constants.tp
        if step.name == "attention":
            linear = LinearWeights(*_linear(p.qkv_weight, p.qkv_bias), "none")
            qkv, _ = choose("gather_linear", n, linear.w, tp=tp).gather_linear_fwd(n, linear, tp)
            qkv = qkv.view(len(qkv), *p.qkv_weight.shape[:-1])
            o, lse = attention_fwd(qkv, options)
            parts = choose("linear_exchange", o, p.out_weight, tp=tp).linear_exchange_fwd(o, p.out_weight, tp)
            self.saved += n, qkv, o, lse
        else:
            mlp = MLP(*_linear(p.fc1_weight, p.fc1_bias), p.fc2_weight, constants.activation)
            form = choose("gather_mlp_exchange", n, mlp.w1, tp=tp)
            parts, z, a = form.gather_mlp_exchange_fwd(n, mlp, keep=True, tp=tp)
            self.saved += n, z, a
        return parts

    def join(self, step: Join, parts: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        bias = self.layer.bias(step.branch)
        leaves = self.layer.constants.tp.leaves
        if step.branch_norm is not None:
            norm = self.layer.norm(step.branch_norm)
            y, rows, mean, rstd = FUSED.fwd(parts, Add(bias), norm, NO_MASK, order=POST, leaves=leaves)
            self.saved += y, mean, rstd
            parts, bias = rows[None], None
        norm, mask = self.layer.norm(step.norm), getattr(self.layer.constants, step.branch)
        order = POST if step.stream else PRE
        h, rows, *stats = FUSED.fwd(parts, Add(bias, residual=h), norm, mask, order=order, leaves=leaves)
        if step.norm is None:
            return h, h[None]
        self.saved += h, *stats
        return rows if step.stream else h, rows[None]


BIAS = {"attention": "out_bias", "mlp": "fc2_bias"}


@Composed
def _forward(h: Tensor, n: Tensor | None, layer: Layer) -> tuple[Any, ...]:
    """h [m, D], n [1, m, D] (None: h is read in its place) -> h, n of the next, and the tensors saved for backward.

    Where n is h it comes back as None, since a node's outputs do not share memory.
    """
    runner, steps = _Forward(layer), layer.constants.steps
    h, n_out = run(steps, runner, h, h[None] if n is None else n)
    return h, None if _final_join(steps).norm is None else n_out, *runner.saved


def _final_join(steps: Steps) -> Join:
    end = steps[-1]
    assert isinstance(end, Join)
    return end


# ---- backward ----


class _Backward:
    """Runs the steps backwards, on the tensors that forward has saved; ``made`` gets gradients by names."""

    def __init__(self, layer: Layer, saved: tuple[Any, ...], request: GradientRequest):
        self.layer, self.saved, self.request = layer, list(saved), request
        self.tp, self.leaves = layer.constants.tp, layer.constants.tp.leaves
        self.gradients: dict[str, Any] = {}

    def take(self, count: int) -> list[Any]:
        """Returns the last ``count`` tensors saved, which are those of the step whose turn it is."""
        taken = self.saved[len(self.saved) - count :]
        del self.saved[len(self.saved) - count :]
        return taken

    def state(self, norm: NormVectors) -> NormSaved:
        """Returns what a norm saved: its input and statistics; without a norm none of them."""
        h, mean, rstd = (None,) * 3 if norm.gamma is None else self.take(3)
        return NormSaved(h, mean, rstd, norm.gamma, norm.kind)

    def norm_gradients(self, name: str, vectors: list[Tensor]) -> None:
        self.gradients[f"{name}.weight"], self.gradients[f"{name}.bias"] = vectors

    def norm(self, step: Norm, dh: Tensor, dn: Tensor) -> Tensor:
        norm, wanted = self.layer.norm(step.norm), self.request
        state = self.state(norm)
        making = Wanted(None, norm.beta is not None, None, wanted.dtype, leaves=self.leaves)
        dh, _, _, *vectors = NORM.bwd(dn, dh, state, NO_MASK, order=ALONE, wanted=making)
        self.norm_gradients(step.norm, vectors)
        return dh

    def branch(self, step: Branch, dparts: Tensor) -> Tensor:
        (constants, options, p, _), gradients, tp = self.layer, self.gradients, self.tp
        wanted, totals = self.request.parameters, self.request.totals
        dn: Tensor | None
        if step.name == "attention":
            n, qkv, o, lse = self.take(4)
            grads = WantedGrads(wanted.qkv_weight, dtype_of(p.qkv_bias) if wanted.qkv_bias else None, wanted.out_weight)
            grads = _adding(grads, totals.qkv, totals.out)
            form = choose("linear_exchange", dparts, p.out_weight, tp=tp)
            do, gradients["out_weight"] = form.linear_exchange_bwd(dparts, p.out_weight, x=o, grads=grads, tp=tp)
            dqkv = attention_bwd(do, qkv, o, lse, options=options).flatten(1)
            w = _linear(p.qkv_weight, None)[0]
            form = choose("gather_linear", dqkv, w, tp=tp)
            dn, gradients["qkv_weight"], gradients["qkv_bias"] = form.gather_linear_bwd(
                dqkv, w, n=SavedInput(n, tp), grads=grads, tp=tp
            )
        else:
            n, z, a = self.take(3)
            mlp = MLP(_linear(p.fc1_weight, None)[0], None, p.fc2_weight, constants.activation)
            grads = WantedGrads(wanted.fc1_weight, dtype_of(p.fc1_bias) if wanted.fc1_bias else None, wanted.fc2_weight)
            grads, saved = _adding(grads, totals.fc1, totals.fc2), MLPSaved(SavedInput(n, tp), z, a)
            form = choose("gather_mlp_exchange", dparts, mlp.w1, tp=tp)
            dn, gradients["fc1_weight"], gradients["fc1_bias"], gradients["fc2_weight"] = form.gather_mlp_exchange_bwd(
                dparts, mlp, saved=saved, grads=grads, tp=tp
            )
        assert dn is not None  # of h, which is another step's
        return dn

    def join(self, step: Join, dh: Tensor | None, dn: Tensor | None) -> tuple[Tensor, Tensor]:
        dparts: Tensor
        dresidual: Tensor
        name, request, norm = BIAS[step.branch], self.request, self.layer.norm(step.norm)
        bias = self.layer.bias(step.branch)
        state = self.state(norm)
        direct = dtype_of(bias) if step.branch_norm is None else None  # or the branch's norm stands between
        wanted = Wanted(direct, norm.beta is not None, request.residual, request.dtype, leaves=self.leaves)
        mask, order = getattr(self.layer.constants, step.branch), POST if step.stream else PRE
        dparts, dresidual, dbias, *vectors = FUSED.bwd(dn, dh, state, mask, order=order, wanted=wanted)
        if step.norm is not None:
            self.norm_gradients(step.norm, vectors)
        if step.branch_norm is not None:
            norm = self.layer.norm(step.branch_norm)
            state = self.state(norm)
            wanted = Wanted(dtype_of(bias), norm.beta is not None, None, request.dtype, leaves=self.leaves)
            dparts, _, dbias, *vectors = FUSED.bwd(dparts[None], None, state, NO_MASK, order=POST, wanted=wanted)
            self.norm_gradients(step.branch_norm, vectors)
        self.gradients[name] = dbias
        return dresidual, dparts[None]


@Composed
def _backward(
    gradients: tuple[Tensor | None, Tensor | None], layer: Layer, saved: tuple[Any, ...], request: GradientRequest
) -> tuple[Tensor | None, ...]:
    """Gradients of h and n as _forward returned them -> those of h, n, the projections' parameters and the norms'.

    The gradient of n is None where the block has read a norm of h."""
    dh, dn = gradients
    runner = _Backward(layer, saved, request)
    dh, dn = run_backward(layer.constants.steps, runner, None if dh is None else dh.contiguous(), dn)
    projections = [_shaped(runner.gradients.get(name), p) for name, p in zip(Parameters._fields, layer.parameters)]
    names = [f"{name}.{leaf}" for name, *_ in layer.constants.norms for leaf in ("weight", "bias")]
    return dh, dn, *projections, *[_shaped(runner.gradients.get(name), p) for name, p in zip(names, layer.norms)]


def _shaped(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    """Returns the gradient of a parameter in its shape and dtype; ops give empty ones for what is not there."""
    if gradient is None or parameter is None or gradient.numel() == 0:
        return None
    shaped = gradient if gradient.dim() == parameter.dim() else gradient.view(parameter.shape)
    return in_dtype(shaped, parameter.dtype)


def _adding(grads: WantedGrads, weight: Tensor | None, out_weight: Tensor | None) -> WantedGrads:
    """Returns the gradients, added to these totals if there are any."""
    if weight is None and out_weight is None:
        return grads
    adder = lambda total: None if total is None else lambda write: write(total)
    return grads._replace(run=adding(adder(weight), adder(out_weight)))


def _with_totals(request: GradientRequest, weights: tuple[Main | None, ...]) -> GradientRequest:
    """Returns the request in which gradients of weights that have a total are added to it."""
    flags, names = request.parameters, [f"{name}_weight" for name in Totals._fields]
    for name, main in zip(names, weights, strict=True):
        if main is not None and not main.wanted:
            flags = flags._replace(**{name: False})
    totals = [
        main.add(lambda total: total.flatten(0, -2)) if main is not None and getattr(flags, name) else None
        for name, main in zip(names, weights, strict=True)
    ]
    return request._replace(parameters=flags, totals=Totals(*totals))


# ---- autograd ----


class _BlockNode(Function):
    """h [m, D], n [1, m, D] (None: h is read in its place) -> h [m, D], n [1, m, D] (None: it is h)."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, n: Tensor | None, layer: Layer, *parameters: Any) -> Any:
        constants, options, p, _ = layer
        h_out, n_out, *saved = _forward(h, n, layer)
        ctx.save_for_backward(*parameters, *options[:TENSORS], *saved)
        ctx.args = constants, options[TENSORS:], (h.dtype, p.out_weight.dtype), n is not None
        ctx.mains = mains(p.qkv_weight, p.out_weight, p.fc1_weight, p.fc2_weight)
        ctx.set_materialize_grads(False)
        return h_out, n_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor | None, dn: Tensor | None) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad
        if dh is None and dn is None:
            return (None,) * len(needed)
        (constants, numbers, dtypes, has_n), saved = ctx.args, ctx.saved_tensors
        norms = PARAMETERS + 2 * len(constants.norms)
        options, state = Options(*saved[norms : norms + TENSORS], *numbers), saved[norms + TENSORS :]
        layer = Layer(constants, options, Parameters(*saved[:PARAMETERS]), saved[PARAMETERS:norms])
        request = GradientRequest(Parameters(*needed[3 : 3 + PARAMETERS]), *dtypes)
        if ctx.mains is not None:
            request = _with_totals(request, ctx.mains)
        dh, dn, *gradients = _backward((dh, dn), layer, tuple(state), request)
        if dn is not None and not has_n:
            dh, dn = dh + dn[0], None
        return dh, dn, None, *gradients


def one_node(h: Tensor, normed: Normed | None, layer: Layer) -> tuple[Tensor, Normed]:
    """Runs a block with gradients: h [m, D] and, in a stack, its n -> the same of the next."""
    n = None if normed is None else normed.n if normed.n.dim() == 3 else normed.n[None]
    h, n_out = _BlockNode.apply(h, n, layer, *layer.parameters, *layer.norms)
    return h, Normed(h[None] if n_out is None else n_out)


def parameters_of(block: nn.Module, norms: tuple[str, ...]) -> tuple[Parameters, tuple[Tensor | None, ...]]:
    """Returns the projections' parameters and the norms'.

    Modules and parameters are taken from their dictionaries: nn.Module's attribute access costs the host.
    """
    modules: dict[str, Any] = block._modules
    attention, mlp = modules["attention"]._modules, modules["mlp"]._modules
    projections = [attention["qkv"], attention["out"], mlp["fc1"], mlp["fc2"]]
    vectors = [_parameter(modules[name], leaf) for name in norms for leaf in ("weight", "bias")]
    weights: list[Any] = [_parameter(module, leaf) for module in projections for leaf in ("weight", "bias")]
    return Parameters(*weights), tuple(vectors)


def _parameter(module: nn.Module, name: str) -> Tensor | None:
    """Returns a parameter from the module's dictionary; where a parametrization has taken its place, the attribute."""
    parameters = module._parameters
    return local(parameters[name] if name in parameters else getattr(module, name))
