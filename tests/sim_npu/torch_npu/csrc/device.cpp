// What PyTorch asks of a device: indices, streams, events, random numbers.
#include "sim_npu.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

namespace simnpu {
// ------------------------------------------------------------------ indices
DeviceIndex num_devices() {
  static const DeviceIndex n = [] {
    const int64_t wanted = env_int("SIM_NPU_DEVICES", 1);
    TORCH_CHECK(wanted >= 0 && wanted <= kMaxDevices, "SIM_NPU_DEVICES=", wanted, " is not between 0 and ",
                int(kMaxDevices));
    return DeviceIndex(wanted);
  }();
  return n;
}

static thread_local DeviceIndex tls_device = 0;
DeviceIndex current_device() { return tls_device; }

void check_index(DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < num_devices(), "Invalid NPU device index ", int(device),
              ": simulated devices are counted from 0, and SIM_NPU_DEVICES is ", int(num_devices()));
}

static DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : tls_device; }

// --------------------------------------------------------------- generators
// Each device has a random stream of its own, drawn by a CPU engine.
struct Generator final : c10::GeneratorImpl {
  at::Generator engine;

  explicit Generator(DeviceIndex device, at::Generator engine = at::detail::createCPUGenerator())
      : GeneratorImpl(Device(kNPU, device), DispatchKeySet(DispatchKey::PrivateUse1)), engine(std::move(engine)) {}
  void set_current_seed(uint64_t seed) override { engine.set_current_seed(seed); }
  uint64_t current_seed() const override { return engine.current_seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t seed() override {
    const auto seed = c10::detail::getNonDeterministicRandom();
    set_current_seed(seed);
    return seed;
  }
  void set_state(const c10::TensorImpl& state) override { engine.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return engine.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(device_.index(), engine.clone()); }
};

const at::Generator& default_generator(DeviceIndex device) {
  // never freed: tensors may outlive the interpreter's shutdown
  static const auto* all = [] {
    auto* v = new std::vector<at::Generator>();
    const bool shared = env_int("SIM_NPU_SHARED_RNG", 0);
    for (DeviceIndex i = 0; i < num_devices(); ++i) {
      v->push_back(shared ? at::make_generator<Generator>(i, at::detail::getDefaultCPUGenerator())
                          : at::make_generator<Generator>(i));
    }
    return v;
  }();
  if (device < 0) device = tls_device;
  check_index(device);
  return (*all)[device];
}

at::Generator cpu_engine(const at::Generator& device_generator) {
  return static_cast<Generator*>(device_generator.unsafeGetGeneratorImpl())->engine;
}

// ------------------------------------------------------------------ streams
static thread_local std::map<DeviceIndex, c10::StreamId> tls_stream;
static std::atomic<c10::StreamId> g_next_stream{1};

static c10::Stream stream_of(Device device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, Device(kNPU, index_of(device)), id);
}
c10::Stream current_stream(Device device) { return stream_of(device, tls_stream[index_of(device)]); }

// -------------------------------------------------------------- late copies
// Until a copy arrives, its destination holds NaN, which no reader can overlook.
struct ToDevice {
  int64_t number; // counts the copies, so that an event knows which were before it
  c10::Stream stream;
  c10::weak_intrusive_ptr<c10::StorageImpl> destination; // memory may be freed meanwhile
  size_t offset;                                         // bytes
  at::Tensor source;                                     // read no sooner than the copy runs
};
static std::mutex g_late_mutex;
static std::vector<std::pair<at::Tensor, at::Tensor>> g_to_host; // (destination, data)
static std::vector<ToDevice> g_to_device;
static int64_t g_last_number = 0;

static int64_t last_number() {
  std::lock_guard<std::mutex> guard(g_late_mutex);
  return g_last_number;
}

void defer_to_host(at::Tensor destination, at::Tensor data) {
  std::memset(destination.mutable_data_ptr(), 0xff, destination.nbytes());
  std::lock_guard<std::mutex> guard(g_late_mutex);
  g_to_host.emplace_back(std::move(destination), std::move(data));
}

void finish_to_host() {
  std::vector<std::pair<at::Tensor, at::Tensor>> arriving;
  {
    std::lock_guard<std::mutex> guard(g_late_mutex);
    arriving.swap(g_to_host);
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (auto& [destination, data] : arriving) destination.copy_(data);
}

void defer_to_device(const at::Tensor& destination, const at::Tensor& source) {
  const auto stream = current_stream(destination.device());
  finish_to_device(stream);
  std::memset(destination.mutable_data_ptr(), 0xff, destination.nbytes());
  std::lock_guard<std::mutex> guard(g_late_mutex);
  g_to_device.push_back({++g_last_number, stream, destination.storage().getWeakStorageImpl(),
                         size_t(destination.storage_offset()) * destination.itemsize(), source});
}

template <class Arrives>
static void finish_to_device_if(const Arrives& arrives) {
  std::vector<ToDevice> arriving; // outlives the guard: the last reference to a source may be in it
  std::lock_guard<std::mutex> guard(g_late_mutex);
  if (g_to_device.empty()) return;
  const auto first = std::stable_partition(g_to_device.begin(), g_to_device.end(), [&](const ToDevice& copy) {
    return !copy.destination.expired() && !arrives(copy);
  });
  std::move(first, g_to_device.end(), std::back_inserter(arriving));
  g_to_device.erase(first, g_to_device.end());
  for (const auto& copy : arriving) {
    const auto destination = copy.destination.lock();
    if (!destination || copy.offset + copy.source.nbytes() > destination->nbytes()) continue;
    std::memcpy(static_cast<char*>(destination->mutable_data()) + copy.offset, copy.source.const_data_ptr(),
                copy.source.nbytes());
  }
}

void finish_to_device(const c10::Stream& stream, int64_t last) {
  finish_to_device_if([&](const ToDevice& copy) { return copy.stream == stream && copy.number <= last; });
}

// ---------------------------------------------------------- guard and events
static double now_ms() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

struct Event {
  double time;
  c10::Stream stream;
  int64_t last; // copy to the device that was begun before it
};

// Operators finish before they return, so only late copies have something to wait for.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kNPU; }
  Device getDevice() const override { return {kNPU, tls_device}; }
  void setDevice(Device d) const override {
    check_index(d.index());
    tls_device = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.has_index()) tls_device = d.index();
  }
  Device exchangeDevice(Device d) const override {
    const auto old = getDevice();
    if (d.has_index()) setDevice(d);
    return old;
  }
  DeviceIndex deviceCount() const noexcept override { return num_devices(); }

  c10::Stream getStream(Device d) const override { return current_stream(d); }
  c10::Stream getDefaultStream(Device d) const override { return stream_of(d, 0); }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return stream_of(d, g_next_stream++); }
  c10::Stream getNewStream(Device d, int) const override { return stream_of(d, g_next_stream++); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    const auto old = getStream(s.device());
    tls_stream[s.device_index()] = s.id();
    return old;
  }

  void record(void** event, const c10::Stream& stream, DeviceIndex, c10::EventFlag) const override {
    destroyEvent(*event, stream.device_index());
    *event = new Event{now_ms(), stream, last_number()};
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void* event, const c10::Stream&) const override {
    const auto& e = *static_cast<Event*>(event);
    finish_to_device(e.stream, e.last);
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  bool queryStream(const c10::Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    const auto& e = *static_cast<Event*>(event);
    finish_to_host();
    finish_to_device(e.stream, e.last);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    finish_to_host();
    finish_to_device(stream);
  }
  void synchronizeDevice(DeviceIndex device) const override {
    finish_to_host();
    finish_to_device_if([&](const ToDevice& copy) { return copy.stream.device_index() == device; });
  }
  double elapsedTime(void* from, void* to, DeviceIndex) const override {
    return static_cast<Event*>(to)->time - static_cast<Event*>(from)->time;
  }
};
static const c10::impl::DeviceGuardImplRegistrar g_guard(kNPU, new Guard);

// -------------------------------------------------------------------- hooks
struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return num_devices(); }
  DeviceIndex getCurrentDevice() const override { return tls_device; }
  void setCurrentDevice(DeviceIndex device) const override {
    check_index(device);
    tls_device = device;
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const auto old = tls_device;
    setCurrentDevice(device);
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? tls_device : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  Device getDeviceFromPtr(void*) const override { return {kNPU, tls_device}; }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? tls_device : device);
  }
  // resize_bytes_cpu would do, but at zero bytes it leaves a storage that says it is on
  // the CPU, and FSDP empties and refills storages all the time.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto fresh = device_allocator()->allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept) std::memcpy(fresh.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
};
static const bool g_registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);
} // namespace simnpu
