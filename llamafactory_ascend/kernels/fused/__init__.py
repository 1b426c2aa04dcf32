"""Operators that torch_npu computes in one launch; torch_npu is imported by the call."""
