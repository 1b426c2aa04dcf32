"""The operators that can be replaced: what each computes and how a back end's function is called.

A back end knows one operator and nothing of any model; how a model's class calls it is a matter of
``forms``, and which classes there are one of ``families``.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Operator:
    """One operator.

    Attributes:
        name: as in `ascend.kernels` and in the report.
        what: one line for the docs.
        call: the call that a back end's function must answer, with shapes.
        sequential: True where tokens influence later ones, so that packed samples must be kept apart.
    """

    name: str
    what: str
    call: str
    sequential: bool = False


OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        Operator(
            "gated_delta_rule",
            "linear attention of the hybrids (arXiv 2412.06464)",
            "f(query, key, value, g, beta, *, initial_state, output_final_state, use_qk_l2norm_in_kernel, "
            "cu_seqlens) -> (output, state); query, key [B, T, key heads, K], value [B, T, value heads, V], "
            "g, beta [B, T, value heads]; with cu_seqlens B is 1",
            sequential=True,
        ),
        Operator(
            "causal_conv1d",
            "depthwise causal convolution with activation, before the gated delta rule",
            "f(x, weight, bias, activation, *, sequences) -> [B, T, C]; x [B, T, C], weight [C, width], "
            "activation 'silu' or None, sequences a `varlen.Sequences` (then B is 1) or None",
            sequential=True,
        ),
        Operator("rms_norm", "y = x / rms(x) * w", "f(x, weight, eps) -> like x"),
        Operator(
            "rms_norm_1p",
            "y = x / rms(x) * (1 + w), the sum made in float32",
            "f(x, weight, eps) -> like x",
        ),
        Operator(
            "rms_norm_gated",
            "y = x / rms(x) * w * silu(gate), the gate applied in float32",
            "f(x, gate, weight, eps) -> like x",
        ),
        Operator(
            "rope",
            "rotary position embedding of the first cos.shape[-1] channels",
            "f(x, cos, sin) -> like x; x [B, heads, T, D] or [B, T, heads, D], cos and sin 4-D that fit x",
        ),
        Operator("swiglu", "silu(gate) * up", "f(gate, up) -> like gate; both [..., width]"),
    )
}
