"""Compiles flash-linear-attention's Ascend kernels for Ascend910B3, without CANN or an NPU; runs none."""
