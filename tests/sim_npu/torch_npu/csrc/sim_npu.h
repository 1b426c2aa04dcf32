// Simulated Ascend NPU: PyTorch's PrivateUse1 device, whose memory is host memory.
//
//   memory.cpp    the ledger of each device, its allocator, pinned host memory
//   device.cpp    device guard, streams, events, hooks, random generators
//   fallback.cpp  every operator without a kernel of its own: run on the CPU
//   kernels.cpp   the few operators that need one, and the helpers that Python calls
//   autocast.cpp  which operators autocast("npu") lowers, raises or promotes
//   hccl.cpp      the "hccl" process group, over gloo; the Python module
//
// Only narrow headers here: ATen/ATen.h costs each file five seconds of compilation.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace simnpu {
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
constexpr auto kNPU = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kMaxDevices = 64;

// An integer environment variable; anything but a whole number is an error.
int64_t env_int(const char* name, int64_t default_value);

// ---- memory.cpp
struct MemoryStats {
  int64_t allocated = 0, allocated_peak = 0; // bytes of the rounded blocks
  int64_t reserved = 0, reserved_peak = 0;   // bytes of the segments that hold them
  int64_t requested = 0, requested_peak = 0; // bytes that were asked for
  int64_t allocations = 0, frees = 0, ooms = 0;
  int64_t capacity = 0;                      // bytes of the whole device
};
MemoryStats memory_stats(DeviceIndex device);
void set_capacity(DeviceIndex device, int64_t bytes);
void set_memory_fraction(DeviceIndex device, double fraction);
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* bytes);
// Makes CPU storage into device storage without a copy, charging it to the device.
c10::DataPtr adopt(const c10::Storage& cpu, DeviceIndex device);

// ---- device.cpp
DeviceIndex num_devices();
DeviceIndex current_device();
void check_index(DeviceIndex device);
const at::Generator& default_generator(DeviceIndex device);
// The CPU generator that draws a device generator's numbers.
at::Generator cpu_engine(const at::Generator& device_generator);
c10::Stream current_stream(Device device);
// SIM_NPU_ASYNC=1: a copy to pinned memory, which arrives when the host waits for anything.
void defer_to_host(at::Tensor destination, at::Tensor data);
void finish_to_host();
// The same of a copy from pinned memory, contiguous and of one dtype. It runs on the current stream, and
// arrives when the host or another stream waits for that, or when anything else runs on it.
void defer_to_device(const at::Tensor& destination, const at::Tensor& source);
void finish_to_device(const c10::Stream& stream, int64_t last = std::numeric_limits<int64_t>::max());

// ---- fallback.cpp
// A CPU tensor over the bytes of a device tensor.
at::Tensor cpu_alias(const at::Tensor& device_tensor);
void count(const std::string& name); // SIM_NPU_TRACE=1
std::string counts();                // one "name count" a line
void deny(const std::string& name);  // SIM_NPU_DENY
// Counts an operator, and refuses it when it is denied.
void enter_operator(const std::string& name);

// One operator call: device arguments become CPU aliases, CPU results device tensors.
class CpuCall {
 public:
  // A CPU alias of a device tensor (CPU tensors pass through, but are remembered).
  // `write`: the operator may write or resize this argument.
  at::Tensor enter(const at::Tensor& argument, bool write = false);
  void use_device(Device device);
  // Throws if CPU tensors came along with device tensors.
  void check_one_device(const std::string& name) const;
  // A result as a device tensor: a view if it aliases an argument, adopted otherwise.
  at::Tensor leave(const at::Tensor& result);
  // Lets device tensors follow their aliases, where the operator resized its output.
  void follow_resized();
  DeviceIndex index() const;

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> aliases_; // device storage -> CPU alias
  std::unordered_map<c10::StorageImpl*, c10::Storage> devices_; // CPU storage -> device storage
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;      // (device tensor, its alias)
  std::optional<Device> device_;
  bool saw_cpu_ = false;
};
} // namespace simnpu
