"""A stand-in for torch_npu: the ``npu`` device is host memory, its kernels are the CPU's.

``import torch`` imports this package through its ``torch.backends`` entry point when its folder is on
``PYTHONPATH``. Importing it registers the device; see the README beside it for what it can show.
"""

import os
import types

# torch must not autoload back ends while this package, one of them, is half imported
_autoload_setting = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch  # noqa: E402
import torch.distributed  # noqa: E402
import torch.utils.checkpoint  # noqa: E402

if _autoload_setting is None:
    del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
else:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = _autoload_setting

from . import _build  # noqa: E402

__version__ = "2.10.0"
IS_SIMULATED = True

_sim = _build.load()
torch.utils.rename_privateuse1_backend("npu")

from . import npu  # noqa: E402

torch._register_device_module("npu", npu)
torch.utils.generate_methods_for_privateuse1_backend(
    for_tensor=True,
    for_module=True,
    for_storage=True,
    unsupported_dtype=[torch.quint8, torch.quint4x2, torch.quint2x4, torch.qint32, torch.qint8],
)

from . import attention as _attention  # noqa: E402,F401
from . import ops as _ops  # noqa: E402,F401
from .attention import npu_fusion_attention  # noqa: E402,F401
from .ops import get_npu_format, npu_format_cast, npu_rms_norm, npu_rotary_mul, npu_swiglu  # noqa: E402,F401

# trl's activation offloading counts the references to a device storage through this name
_C = types.SimpleNamespace(_storage_Use_Count=torch._C._storage_Use_Count)


def _create_hccl(store_options, backend_options):
    gloo = torch.distributed.ProcessGroupGloo(
        store_options.store,
        store_options.group_rank,
        store_options.group_size,
        timeout=store_options.timeout,
    )
    return _sim.hccl_over(gloo)


torch.version.cann = os.environ.get("SIM_NPU_CANN", "8.5.0")
torch.distributed.Backend.register_backend("hccl", _create_hccl, extended_api=True, devices=["npu"])
torch.distributed.is_hccl_available = lambda: True
torch.utils.checkpoint.DefaultDeviceType.set_device_type("npu")

from . import _report  # noqa: E402

_report.apply_environment()


def _autoload() -> None:
    """The entry point that ``import torch`` calls; importing this package has done the work."""
