"""Environment defaults for the processes the launcher starts. A user's value always wins."""

import importlib.util

from llamafactory_ascend.hookspecs import hookimpl


@hookimpl
def ascend_environment(command: str) -> dict[str, str]:
    """Give torch_npu's allocator growing segments, as the host gives CUDA's, where torch_npu is installed."""
    if importlib.util.find_spec("torch_npu") is None:
        return {}
    return {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
