// autocast("npu"): PyTorch's own lists of the operators to lower, raise or promote.
#include <ATen/autocast_mode.h>

namespace at::autocast {
#define SIM_LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIM_F32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIM_F32_SET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIM_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOW)
  AT_FORALL_FP32(SIM_F32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_F32_SET)
  AT_FORALL_PROMOTE(SIM_PROMOTE)
  // norm takes its dtype in a second overload, which the lists leave to each back end
  KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE(
      at::norm, "norm.Scalar", Tensor(const Tensor&, const Scalar&),
      Tensor(const Tensor&, const std::optional<Scalar>&, ScalarType), fp32_append_dtype)
  KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE(
      at::norm, "norm.ScalarOpt_dim", Tensor(const Tensor&, const std::optional<Scalar>&, IntArrayRef, bool),
      Tensor(const Tensor&, const std::optional<Scalar>&, IntArrayRef, bool, ScalarType), fp32_append_dtype)
}
} // namespace at::autocast
