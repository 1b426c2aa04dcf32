// Operators without a kernel of their own run on the CPU, on the device's own bytes.
//
// at::native::cpu_fallback copies arguments and results; here both are the same memory, so
// nothing is copied, views stay views, and no byte is charged twice.
#include "sim_npu.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>

namespace simnpu {
// -------------------------------------------------- device <-> CPU aliasing
static at::Tensor tensor_over(const c10::Storage& storage, DispatchKey key, const at::Tensor& like) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), DispatchKeySet(key), like.dtype());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) t._set_conj(true);
  if (like.is_neg()) t._set_neg(true);
  return t;
}

static c10::Storage alias_storage(const c10::Storage& device) {
  finish_to_device(current_stream(device.device())); // copies on this stream were before what needs the alias
  // the alias owns the device storage: an asynchronous send may outlive its tensor
  c10::DataPtr bytes(
      device.mutable_data(), new c10::Storage(device),
      [](void* owner) { delete static_cast<c10::Storage*>(owner); }, Device(c10::DeviceType::CPU));
  return c10::Storage(c10::Storage::use_byte_size_t(), device.nbytes(), std::move(bytes),
                      c10::GetAllocator(c10::DeviceType::CPU), /*resizable=*/true);
}

at::Tensor cpu_alias(const at::Tensor& t) { return tensor_over(alias_storage(t.storage()), DispatchKey::CPU, t); }

at::Tensor CpuCall::enter(const at::Tensor& t, bool write) {
  if (!t.defined()) return t;
  if (t.device().type() != kNPU) {
    // a CPU scalar may join device tensors, as on every accelerator
    if (t.device().is_cpu() && t.dim() > 0) saw_cpu_ = true;
    return t;
  }
  TORCH_CHECK(!device_ || !device_->has_index() || *device_ == t.device(),
              "Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and ",
              t.device(), "!");
  device_ = t.device();
  // two arguments that share a storage share one as seen from the CPU, too
  auto* device_storage = t.storage().unsafeGetStorageImpl();
  auto it = aliases_.find(device_storage);
  if (it == aliases_.end()) it = aliases_.emplace(device_storage, alias_storage(t.storage())).first;
  auto alias = tensor_over(it->second, DispatchKey::CPU, t);
  devices_.emplace(it->second.unsafeGetStorageImpl(), t.storage());
  if (write) written_.emplace_back(t, alias);
  return alias;
}

void CpuCall::use_device(Device device) {
  if (!device_) device_ = device;
}

void CpuCall::check_one_device(const std::string& name) const {
  TORCH_CHECK(!saw_cpu_ || !device_,
              "Expected all tensors to be on the same device, but found at least two devices, ",
              Device(kNPU, index()), " and cpu! (when calling ", name, ")");
}

DeviceIndex CpuCall::index() const {
  return device_ && device_->has_index() ? device_->index() : current_device();
}

at::Tensor CpuCall::leave(const at::Tensor& t) {
  if (!t.defined() || !t.device().is_cpu()) return t;
  TORCH_CHECK(t.layout() == c10::kStrided && !t.is_quantized(),
              "the simulated NPU knows strided tensors only, not ", t.layout(), " ", t.scalar_type());
  auto* cpu_storage = t.storage().unsafeGetStorageImpl();
  auto it = devices_.find(cpu_storage);
  if (it == devices_.end()) {
    c10::Storage adopted(c10::Storage::use_byte_size_t(), cpu_storage->nbytes(), adopt(t.storage(), index()),
                         device_allocator(), /*resizable=*/true);
    it = devices_.emplace(cpu_storage, std::move(adopted)).first;
  }
  return tensor_over(it->second, DispatchKey::PrivateUse1, t);
}

void CpuCall::follow_resized() {
  for (auto& [t, alias] : written_) {
    auto storage = t.storage();
    if (alias.storage().data() != storage.data() || alias.storage().nbytes() != storage.nbytes()) {
      storage.set_data_ptr_noswap(adopt(alias.storage(), index()));
      storage.set_nbytes(alias.storage().nbytes());
    }
    if (alias.sizes() != t.sizes() || alias.strides() != t.strides() ||
        alias.storage_offset() != t.storage_offset()) {
      t.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }
}

// ------------------------------------------------------ counting and denial
static std::mutex g_mutex;
static std::map<std::string, int64_t> g_counts;
static std::set<std::string> g_denied;

void count(const std::string& name) {
  static const bool trace = env_int("SIM_NPU_TRACE", 0);
  if (!trace) return;
  std::lock_guard<std::mutex> guard(g_mutex);
  ++g_counts[name];
}

std::string counts() {
  std::lock_guard<std::mutex> guard(g_mutex);
  std::string lines;
  for (auto& [name, n] : g_counts) lines += name + " " + std::to_string(n) + "\n";
  return lines;
}

void deny(const std::string& name) {
  std::lock_guard<std::mutex> guard(g_mutex);
  g_denied.insert(name);
}

void enter_operator(const std::string& name) {
  count(name);
  std::lock_guard<std::mutex> guard(g_mutex);
  TORCH_CHECK_NOT_IMPLEMENTED(!g_denied.count(name), "Operator ", name,
                              " is denied on the simulated NPU (SIM_NPU_DENY)");
}

// ------------------------------------------------------------- the fallback
// Operators that take CPU indices beside device tensors on accelerators, too.
static bool may_mix_devices(const std::string& name) {
  static const std::set<std::string> names = {"aten::index",     "aten::index_put_",    "aten::_index_put_impl_",
                                              "aten::index_put", "aten::_unsafe_index", "aten::set_"};
  return names.count(name) > 0;
}

static bool is_optional_generator(const c10::Argument& argument) {
  const auto* optional = argument.type()->castRaw<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

static void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  enter_operator(name);

  CpuCall call;
  std::unordered_map<c10::Symbol, at::Tensor> written; // alias set of the schema -> argument
  std::optional<size_t> generator_at;
  const size_t first = stack->size() - schema.arguments().size();
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    auto& value = (*stack)[first + i];
    const auto& argument = schema.arguments()[i];
    const bool write = argument.alias_info() && argument.alias_info()->isWrite();
    if (value.isTensor()) {
      if (write) written[argument.alias_info()->beforeSet()] = value.toTensor();
      value = call.enter(value.toTensor(), write);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> aliases;
      for (const at::Tensor& t : value.toTensorVector()) aliases.push_back(call.enter(t, write));
      value = std::move(aliases);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> aliases;
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector()) {
        aliases.push_back(t ? std::optional<at::Tensor>(call.enter(*t, write)) : std::nullopt);
      }
      value = std::move(aliases);
    } else if (value.isDevice() && value.toDevice().type() == kNPU) {
      call.use_device(value.toDevice());
      value = Device(c10::DeviceType::CPU);
    } else if (value.isGenerator() && value.toGenerator().device().type() == kNPU) {
      value = cpu_engine(value.toGenerator());
    } else if (value.isNone() && is_optional_generator(argument)) {
      generator_at = first + i;
    }
  }
  if (!may_mix_devices(name)) call.check_one_device(name);
  if (generator_at) (*stack)[*generator_at] = cpu_engine(default_generator(call.index()));

  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);

  call.follow_resized();
  const auto& returns = schema.returns();
  const size_t first_result = stack->size() - returns.size();
  for (size_t i = 0; i < returns.size(); ++i) {
    auto& value = (*stack)[first_result + i];
    const auto* alias = returns[i].alias_info();
    const auto argument = alias && alias->isWrite() ? written.find(alias->beforeSet()) : written.end();
    if (value.isTensor() && argument != written.end()) {
      value = argument->second; // in-place and out= operators return the very tensor they were given
    } else if (value.isTensor()) {
      value = call.leave(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> results;
      for (const at::Tensor& t : value.toTensorVector()) results.push_back(call.leave(t));
      value = std::move(results);
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }
} // namespace simnpu
