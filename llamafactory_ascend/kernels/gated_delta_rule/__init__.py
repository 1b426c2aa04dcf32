"""The gated delta rule in matrix products only: one launch per chunk in the scan, everything else batched.

Derivation, costs and numerics: docs/gated_delta_rule.md. Source of the rule: Gated Delta Networks,
arXiv 2412.06464.
"""

from llamafactory_ascend.kernels.gated_delta_rule.function import chunk_gated_delta_rule

__all__ = ["chunk_gated_delta_rule"]
