"""How the classes of Transformers call their operators, and how a back end's function is put there.

A form turns a back end's function into one with the arguments of the code it replaces. Transformers' code
differs between its versions (5.6 to 5.24 here) in names only, which the forms take both ways.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from llamafactory_ascend.kernels import causal_conv1d, varlen
from llamafactory_ascend.kernels.backends import Backend
from llamafactory_ascend.kernels.samples import Arguments, Samples
from llamafactory_ascend.kernels.varlen import Sequences

Call = Callable[..., Any]
PROBED_TOKENS = 512  # the probe looks at so many at most: enough to see a wrong kernel, little memory


@dataclass(frozen=True)
class Form:
    """One way of calling an operator.

    Attributes:
        kind: `forward`, the forward of a module class; `function`, a function that the modeling module looks
            up in its globals; `callable`, an attribute of each module or, in newer versions, such a function.
        adapt: (back end's function, back end) -> replacement, called like `old`.
        old: (class or function) -> what is replaced, as the replacement is called.
        install: (replacement) -> forward of the module; kind `forward` only.
        fits: (module or function) -> "" or why the replacement would not compute the same.
        shorten: (args, kwargs) of a call -> those of a shorter call, for the probe.
        constants: places of arguments that no gradient flows to.
        against: (module that calls it) -> "" or why this module needs its own code; not of kind `forward`.
        samples: how a call on packed samples is taken apart; None where no token sees another.
    """

    kind: Literal["forward", "function", "callable"]
    adapt: Callable[[Call, Backend], Call]
    fits: Callable[[Any], str]
    shorten: Callable[[tuple[Any, ...], dict[str, Any]], Arguments]
    old: Callable[[Any], Call] = lambda found: getattr(found, "forward", found)
    install: Callable[[Call], Call] = lambda replacement: replacement
    constants: tuple[int, ...] = ()
    against: Callable[[nn.Module], str] = lambda module: ""
    samples: Samples | None = None


def cast(x: Tensor, backend: Backend) -> Tensor:
    """Return `x` in a dtype that the back end takes."""
    name = str(x.dtype).removeprefix("torch.")
    return x if name in backend.dtypes else x.to(getattr(torch, backend.dtypes[-1]))


def cast_back(output: Tensor, x: Tensor, backend: Backend) -> Tensor:
    """Return the output for `x` in its dtype if `x` had to be cast, else as it is."""
    return output if cast(x, backend) is x else output.to(x.dtype)


# ---- norms
def _eps(module: Any) -> float:
    return float(module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps)


def _norm(function: Call, backend: Backend) -> Call:
    def norm(module: Any, x: Tensor) -> Tensor:
        return cast_back(function(cast(x, backend), module.weight, _eps(module)), x, backend)

    return norm


def _norm_gated(function: Call, backend: Backend) -> Call:
    def norm(module: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
        output: Tensor = function(cast(hidden_states, backend), gate, module.weight, _eps(module))
        return output.to(hidden_states.dtype)

    return norm


def _is_norm(module: nn.Module) -> str:
    if [name for name, _ in module.named_parameters()] != ["weight"] or list(module.buffers()):
        return "it has more parameters than one weight"
    if not (hasattr(module, "variance_epsilon") or hasattr(module, "eps")):
        return "it has no epsilon"
    activation = getattr(module, "activation", "silu")
    return "" if activation in ("silu", "swish") else f"its gate goes through {activation}"


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    def cut(x: Any) -> Any:
        return x.reshape(-1, x.shape[-1])[:PROBED_TOKENS] if isinstance(x, Tensor) else x

    return tuple(cut(x) for x in args), {key: cut(x) for key, x in kwargs.items()}


# ---- SwiGLU: the switch stands between the projections, so that a LoRA dropout in them is drawn once
def _swiglu(function: Call, backend: Backend) -> Call:
    def product(module: Any, gate: Tensor, up: Tensor) -> Tensor:
        dtype = torch.promote_types(gate.dtype, up.dtype)
        output: Tensor = function(cast(gate.to(dtype), backend), cast(up.to(dtype), backend))
        return output.to(dtype)

    return product


def _product(_: Any) -> Call:
    def product(module: Any, gate: Tensor, up: Tensor) -> Tensor:
        output: Tensor = module.act_fn(gate) * up
        return output

    return product


def _mlp(replacement: Call) -> Call:
    def forward(module: Any, x: Tensor) -> Tensor:
        output: Tensor = module.down_proj(replacement(module, module.gate_proj(x), module.up_proj(x)))
        return output

    return forward


def _is_mlp(module: nn.Module) -> str:
    missing = {"gate_proj", "up_proj", "down_proj", "act_fn"} - {name for name, _ in module.named_children()}
    if missing:
        return f"it has no {', '.join(sorted(missing))}"
    activation = type(module.act_fn).__name__
    return "" if activation in ("SiLU", "SiLUActivation") else f"its activation is {activation}"


# ---- rotary embeddings
def _rope(function: Call, backend: Backend) -> Call:
    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return tuple(cast_back(function(cast(x, backend), cos, sin), x, backend) for x in (q, k))

    return apply_rotary_pos_emb


def _rope_sections(function: Call, backend: Backend) -> Call:
    plain = _rope(function, backend)

    def apply_multimodal_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: list[int], unsqueeze_dim: int = 1
    ) -> Any:
        def merge(table: Tensor) -> Tensor:  # channels of time, height and width in turn, twice
            parts = torch.split(table, [*mrope_section, *mrope_section], dim=-1)
            return torch.cat([part[place % 3] for place, part in enumerate(parts)], dim=-1)

        return plain(q, k, merge(cos), merge(sin), unsqueeze_dim)

    return apply_multimodal_rotary_pos_emb


def _rope_vision(function: Call, backend: Backend) -> Call:
    def apply_rotary_pos_emb_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        # [patches, heads, D] in float32, as in Transformers; the operator wants four dimensions
        tables = [x.float()[None, :, None] for x in (cos, sin)]
        q_turned, k_turned = (function(x.float()[None], *tables)[0] for x in (q, k))
        return q_turned.to(q.dtype), k_turned.to(k.dtype)

    return apply_rotary_pos_emb_vision


def _takes(*names: str) -> Callable[[Any], str]:
    def fits(function: Any) -> str:
        found = tuple(inspect.signature(function).parameters)
        return "" if found[: len(names)] == names else f"its parameters are {', '.join(found)}"

    return fits


def _positions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    q, k, cos, sin, *rest = args
    if q.dim() == 3:  # vision: [patches, heads, D]
        return (*(x[:PROBED_TOKENS] for x in (q, k, cos, sin)), *rest), kwargs
    if kwargs.get("unsqueeze_dim", 1) == 1 and not any(isinstance(x, int) for x in rest):  # [B, heads, T, D]
        q, k = q[:1, :, :PROBED_TOKENS], k[:1, :, :PROBED_TOKENS]
        cos, sin = (x[..., :1, :PROBED_TOKENS, :] for x in (cos, sin))
    return (q, k, cos, sin, *rest), kwargs


# ---- the gated delta rule and its convolution
def _delta_rule(function: Call, backend: Backend) -> Call:
    def chunk_gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        rows, tokens = value.shape[:2]
        dtype, group = query.dtype, value.shape[2] // key.shape[2]
        if group > 1 and not backend.grouped_heads:
            query, key = query.repeat_interleave(group, 2), key.repeat_interleave(group, 2)
        query = cast(query, backend)
        key, value = key.to(query.dtype), value.to(query.dtype)
        packed = varlen.current() if cu_seqlens is None else None
        if packed is not None:
            cu_seqlens = packed.cu_seqlens
            query, key, value, g, beta = (x.flatten(0, 1)[None] for x in (query, key, value, g, beta))
        output, state = function(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens,
        )
        if packed is not None and state is not None:
            state = state[packed.cu_seqlens[1:] % tokens == 0]  # of the last sample in each row
        return output.view(rows, tokens, *output.shape[2:]).to(dtype), state

    return chunk_gated_delta_rule


def _tokens_of_rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return int((kwargs["value"] if "value" in kwargs else args[2]).shape[1])


def _sequences_of_rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequences | None:
    cu_seqlens = kwargs.get("cu_seqlens")
    if cu_seqlens is None:
        return varlen.current()
    return varlen.of_cu_seqlens(cu_seqlens, _tokens_of_rule(args, kwargs))


def _stretch(args: tuple[Any, ...], kwargs: dict[str, Any], row: int, first: int, last: int) -> Arguments:
    def cut(x: Any) -> Any:
        return x[row : row + 1, first:last] if isinstance(x, Tensor) else x

    kept = {key: cut(x) for key, x in kwargs.items() if key not in ("cu_seqlens", "initial_state")}
    return tuple(cut(x) for x in args), kept


def _start(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    cut, kept = _stretch(args, kwargs, 0, 0, PROBED_TOKENS)
    state = kwargs.get("initial_state")
    return cut, kept if state is None else {**kept, "initial_state": state[:1]}


def _convolution(function: Call, backend: Backend) -> Call:
    def causal_conv1d_fn(*args: Any, **kwargs: Any) -> Tensor:
        x, weight, bias, activation = _conv_arguments(args, kwargs)
        rows, channels, tokens = x.shape
        sequences = _sequences_of_conv(args, kwargs)
        along = cast(x, backend).transpose(1, 2)
        if sequences is not None:
            along = along.reshape(1, rows * tokens, channels)
        output: Tensor = function(along, weight, bias, activation, sequences=sequences)
        return output.view(rows, tokens, channels).transpose(1, 2).to(x.dtype)

    return causal_conv1d_fn


def _sequences_of_conv(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequences | None:
    cu_seqlens, seq_idx = kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx")
    if varlen.current() is None and cu_seqlens is not None:
        return varlen.of_cu_seqlens(cu_seqlens, _tokens_of_conv(args, kwargs))
    if varlen.current() is None and seq_idx is not None:
        return varlen.of_seq_idx(seq_idx)
    return varlen.current()


def _conv_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Return x, weight, bias, activation of a call of `causal_conv1d_fn`, whose first name has changed."""
    names = ("x", "weight", "bias", "activation")
    given = {"x": kwargs.get("hidden_states"), **dict(zip(names, args, strict=False)), **kwargs}
    return given["x"], given["weight"], given.get("bias"), given.get("activation")


def _through_conv1d(_: Any) -> Call:
    def causal_conv1d_fn(*args: Any, **kwargs: Any) -> Tensor:
        return causal_conv1d.reference(*_conv_arguments(args, kwargs))

    return causal_conv1d_fn


def _tokens_of_conv(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return int(_conv_arguments(args, kwargs)[0].shape[2])


def _conv_stretch(
    args: tuple[Any, ...], kwargs: dict[str, Any], row: int, first: int, last: int
) -> Arguments:
    x, weight, bias, activation = _conv_arguments(args, kwargs)
    return (x[row : row + 1, :, first:last], weight, bias, activation), {}


def _conv_start(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return _conv_stretch(args, kwargs, 0, 0, PROBED_TOKENS)


def _computes_more(module: nn.Module) -> str:
    """Say why a module's `conv1d` is more than the weight and bias that the call is given, "" if it is not.

    PEFT's adapters answer for the weight beneath them, so that the call would pass them by. Its wrapper for
    `modules_to_save` answers for the copy in use, which is right.
    """
    conv1d = getattr(module, "conv1d", None)
    if isinstance(conv1d, nn.Conv1d) and type(conv1d).forward is nn.Conv1d.forward:
        return "the forward of its conv1d has been replaced" if "forward" in vars(conv1d) else ""
    if conv1d is None or (hasattr(conv1d, "modules_to_save") and hasattr(conv1d, "original_module")):
        return ""
    kind = f"{type(conv1d).__module__}.{type(conv1d).__name__}"
    return f"its conv1d is a {kind}, of which a kernel would see the frozen weight alone"


FORMS: dict[str, Form] = {
    "norm": Form("forward", _norm, _is_norm, _rows),
    "norm_gated": Form("forward", _norm_gated, _is_norm, _rows),
    "mlp": Form("forward", _swiglu, _is_mlp, _rows, old=_product, install=_mlp),
    "rope": Form("function", _rope, _takes("q", "k", "cos", "sin"), _positions, constants=(2, 3)),
    "rope_sections": Form(
        "function",
        _rope_sections,
        _takes("q", "k", "cos", "sin", "mrope_section"),
        _positions,
        constants=(2, 3),
    ),
    "rope_vision": Form(
        "function", _rope_vision, _takes("q", "k", "cos", "sin"), _positions, constants=(2, 3)
    ),
    "delta_rule": Form(
        "callable",
        _delta_rule,
        _takes("query", "key", "value", "g", "beta"),
        _start,
        samples=Samples(_sequences_of_rule, _tokens_of_rule, _stretch, 1),
    ),
    "convolution": Form(
        "callable",
        _convolution,
        lambda _: "",
        _conv_start,
        old=_through_conv1d,
        against=_computes_more,
        samples=Samples(_sequences_of_conv, _tokens_of_conv, _conv_stretch, 2),
    ),
}
