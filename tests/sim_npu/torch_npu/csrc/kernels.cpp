// The operators that need a kernel of their own, and the operators that Python calls.
#include "sim_npu.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>

namespace simnpu {
using at::Tensor;
using Ints = c10::IntArrayRef;
using OptionalTensor = std::optional<Tensor>;

// ------------------------------------------------- allocation and the shape
static Device given_or_current(std::optional<Device> device) {
  return device && device->has_index() ? *device : Device(kNPU, current_device());
}

static Tensor empty(Ints size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                    std::optional<Device> device, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "the simulated NPU knows strided tensors only");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(given_or_current(device));
  return at::detail::empty_generic(size, device_allocator(), DispatchKeySet(DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

static Tensor empty_strided(Ints size, Ints stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                            std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(given_or_current(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(),
                                           DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

static Tensor as_strided(const Tensor& t, Ints size, Ints stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(t, size, stride, offset);
}
static Tensor view(const Tensor& t, Ints size) { return at::native::view(t, size); }
static Tensor reshape_alias(const Tensor& t, Ints size, Ints stride) {
  return at::native::_reshape_alias(t, size, stride);
}
static const Tensor& resize_(const Tensor& t, Ints size, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(t.device());
  return at::native::resize_(t, size, format);
}

static Tensor& set_storage(Tensor& t, at::Storage storage) {
  const int64_t n = int64_t(storage.nbytes() / t.dtype().itemsize());
  return at::native::set_storage_cpu_(t, std::move(storage), 0, {n}, {});
}
static Tensor& set_storage_offset(Tensor& t, at::Storage storage, int64_t offset, Ints size, Ints stride) {
  c10::DeviceGuard guard(t.device());
  return at::native::set_storage_cpu_(t, std::move(storage), offset, size, stride);
}
static Tensor& set_tensor(Tensor& t, const Tensor& from) {
  return at::native::set_storage_cpu_(t, from.storage(), from.storage_offset(), from.sizes(), from.strides());
}

// Lets `param.data = other` cross between CPU and device, so that Module.to keeps its
// Parameter objects (and tied weights), as torch_npu does.
static bool may_swap_data(const Tensor& a, const Tensor& b) {
  const auto dense = [](const Tensor& t) {
    return t.layout() == c10::kStrided && (t.device().is_cpu() || t.device().type() == kNPU);
  };
  return a.key_set() == b.key_set() || (dense(a) && dense(b));
}

// A device tensor's memory is never reused under a running operator.
static void record_stream(Tensor&, c10::Stream) {}

// ------------------------------------------------------------------- copies
static Tensor as_cpu(const Tensor& t) { return t.device().type() == kNPU ? cpu_alias(t) : t; }

static Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  static const bool async = env_int("SIM_NPU_ASYNC", 0);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  count(from.is_cpu() ? "copy:h2d" : to.is_cpu() ? "copy:d2h" : "copy:d2d");
  if (async && non_blocking && to.is_cpu() && to.is_contiguous() && is_pinned(to.const_data_ptr())) {
    defer_to_host(to, at::empty_like(to).copy_(as_cpu(from)));
    return to;
  }
  // a copy from the host reads what copies to the host wrote; a blocking one waits for the stream, too
  if (async && (to.is_cpu() || from.is_cpu())) finish_to_host();
  if (async && non_blocking && from.is_cpu() && from.is_contiguous() && to.is_contiguous() &&
      from.sizes() == to.sizes() && from.dtype() == to.dtype() && is_pinned(from.const_data_ptr())) {
    defer_to_device(to, from);
    return to;
  }
  as_cpu(to).copy_(as_cpu(from));
  return to;
}

static Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

static at::Scalar item(const Tensor& t) {
  count("sync:item");
  finish_to_host();
  return at::native::_local_scalar_dense_cpu(cpu_alias(t));
}

// ------------------------------------------------------------------ dropout
// A kernel of its own, because the CPU's would draw from the CPU's random stream.
static std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
  auto mask = at::empty(x.sizes(), x.options().dtype(at::kBool));
  if (!train.value_or(true) || p == 0) return {x.clone(), mask.fill_(true)};
  mask.bernoulli_(1 - p);
  auto y = at::mul(x, mask);
  if (p < 1) y.mul_(1 / (1 - p));
  return {y, mask};
}

// -------------------------------------------------------------- convolution
// PyTorch leaves convolution on a private device to the device: no fallback sees it.
static Tensor convolution(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, Ints stride,
                          Ints padding, Ints dilation, bool transposed, Ints output_padding, int64_t groups) {
  enter_operator("aten::convolution");
  CpuCall call;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto cx = call.enter(x), cw = call.enter(weight);
  const auto cb = bias ? OptionalTensor(call.enter(*bias)) : std::nullopt;
  call.check_one_device("aten::convolution");
  return call.leave(at::convolution(cx, cw, cb, stride, padding, dilation, transposed, output_padding, groups));
}

static std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& x,
                                                               const Tensor& weight, Ints stride, Ints padding,
                                                               Ints dilation, bool transposed, Ints output_padding,
                                                               int64_t groups, std::array<bool, 3> mask) {
  enter_operator("aten::convolution_backward");
  CpuCall call;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const std::vector<int64_t> bias_sizes{transposed ? weight.size(1) * groups : weight.size(0)};
  const auto cg = call.enter(grad), cx = call.enter(x), cw = call.enter(weight);
  call.check_one_device("aten::convolution_backward");
  auto [gx, gw, gb] = at::convolution_backward(cg, cx, cw, bias_sizes, stride, padding, dilation, transposed,
                                               output_padding, groups, mask);
  return {call.leave(gx), call.leave(gw), call.leave(gb)};
}

// -------------------------------------------------------------------- histc
// The CPU's histc refuses integers, which accelerators count: mixture-of-experts models
// use it for tokens per expert. Integers below 2^53 fall into the same bins as doubles.
static Tensor cpu_histc(const Tensor& x, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  if (!at::isIntegralType(x.scalar_type(), /*includeBool=*/false)) return at::histc(x, bins, min, max);
  return at::histc(x.to(at::kDouble), bins, min, max).to(x.scalar_type());
}

static Tensor histc(const Tensor& x, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  enter_operator("aten::histc");
  CpuCall call;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call.leave(cpu_histc(call.enter(x), bins, min, max));
}

static Tensor& histc_out(const Tensor& x, int64_t bins, const at::Scalar& min, const at::Scalar& max, Tensor& out) {
  enter_operator("aten::histc");
  CpuCall call;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto cx = call.enter(x);
  auto cout = call.enter(out, /*write=*/true);
  call.check_one_device("aten::histc");
  TORCH_CHECK(out.scalar_type() == x.scalar_type(), "histc: expected out to be ", x.scalar_type(), ", not ",
              out.scalar_type());
  const auto histogram = cpu_histc(cx, bins, min, max);
  at::native::resize_output(cout, histogram.sizes());
  cout.copy_(histogram);
  call.follow_resized();
  return out;
}

// ---------------------------------------------------------------- attention
// The device fuses scaled_dot_product_attention. So does the CPU's flash kernel, whose
// choice is asked: no S x S buffer is charged.
static int64_t fused_sdp_choice(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
                                double dropout, bool causal, std::optional<double> scale, bool gqa) {
  const auto cpu_mask = mask && mask->defined() ? OptionalTensor(as_cpu(*mask)) : std::nullopt;
  return at::native::_fused_sdp_choice_cpp(as_cpu(q), as_cpu(k), as_cpu(v), cpu_mask, dropout, causal, scale, gqa);
}

// ------------------------------------------------------------- registration
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_has_compatible_shallow_copy_type", may_swap_data);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("native_dropout", native_dropout);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("histc", histc);
  m.impl("histc.out", histc_out);
}

// What Python needs, as operators, which need no binding code.
TORCH_LIBRARY(simnpu, m) {
  m.def("mem_stats", [](int64_t device) -> std::vector<int64_t> {
    const auto s = memory_stats(device);
    return {s.allocated, s.allocated_peak, s.reserved, s.reserved_peak, s.requested,
            s.requested_peak, s.allocations, s.frees, s.ooms, s.capacity};
  });
  m.def("set_limit", [](int64_t device, int64_t bytes) { set_capacity(device, bytes); });
  m.def("set_memory_fraction", [](int64_t device, double fraction) { set_memory_fraction(device, fraction); });
  m.def("count", [](std::string name) { count(name); });
  m.def("op_counts", [] { return counts(); });
  m.def("deny", [](std::string name) { deny(name); });
}
} // namespace simnpu

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &simnpu::fused_sdp_choice)
}
