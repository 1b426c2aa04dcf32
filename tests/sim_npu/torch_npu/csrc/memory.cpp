// The memory of the simulated devices: host memory, charged byte by byte to a ledger.
#include "sim_npu.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

namespace simnpu {
int64_t env_int(const char* name, int64_t default_value) {
  const char* text = std::getenv(name);
  if (!text || !*text) return default_value;
  char* end = nullptr;
  const int64_t value = std::strtoll(text, &end, 10);
  TORCH_CHECK(*end == 0, name, "=", text, " is not a whole number");
  return value;
}

// ------------------------------------------------------------------- ledger
struct Ledger {
  std::mutex mutex;
  MemoryStats stats;
  double fraction = 1; // of the capacity, that this process may use
  Ledger() {
    stats.capacity = env_int("SIM_NPU_MEMORY_MB", 65536) << 20;
  }
};

static Ledger& ledger(DeviceIndex device) {
  static Ledger all[kMaxDevices];
  return all[device];
}

// torch_npu's caching allocator adds 32 bytes to each block, then rounds it up to 512.
static int64_t block_size(size_t bytes) {
  return bytes == 0 ? 0 : int64_t((bytes + 32 + 511) / 512 * 512);
}

// Blocks live in segments of 2 MiB; fragmentation between them is not modelled.
static int64_t segments_size(int64_t bytes) {
  constexpr int64_t segment = 2 << 20;
  return (bytes + segment - 1) / segment * segment;
}

static std::string format_size(int64_t bytes) {
  char text[32];
  if (bytes < 1 << 20) {
    std::snprintf(text, sizeof text, "%.2f KiB", double(bytes) / (1 << 10));
  } else if (bytes < 1 << 30) {
    std::snprintf(text, sizeof text, "%.2f MiB", double(bytes) / (1 << 20));
  } else {
    std::snprintf(text, sizeof text, "%.2f GiB", double(bytes) / (1 << 30));
  }
  return text;
}

// A charge on a device's ledger, which lasts as long as this object.
struct Block {
  DeviceIndex device;
  int64_t requested;
  void* bytes = nullptr; // owned; null when `owner` keeps the bytes alive
  c10::Storage owner;

  Block(DeviceIndex device, size_t size) : device(device), requested(int64_t(size)) {
    auto& l = ledger(device);
    std::lock_guard<std::mutex> guard(l.mutex);
    auto& s = l.stats;
    const int64_t charged = block_size(size);
    if (s.allocated + charged > int64_t(double(s.capacity) * l.fraction)) {
      ++s.ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "NPU out of memory. Tried to allocate ", format_size(charged),
          " (NPU ", int(device), "; ", format_size(s.capacity), " total capacity; ",
          format_size(s.allocated), " already allocated; ", format_size(s.allocated), " current active; ",
          format_size(std::max<int64_t>(s.capacity - s.allocated, 0)), " free; ",
          format_size(s.reserved), " reserved in total by PyTorch",
          l.fraction < 1 ? "; this process may use " + std::to_string(l.fraction) + " of the capacity" : "",
          ") [simulated NPU]");
    }
    s.allocated += charged;
    s.requested += requested;
    s.allocated_peak = std::max(s.allocated_peak, s.allocated);
    s.requested_peak = std::max(s.requested_peak, s.requested);
    s.reserved = std::max(s.reserved, segments_size(s.allocated));
    s.reserved_peak = std::max(s.reserved_peak, s.reserved);
    ++s.allocations;
  }
  Block(const Block&) = delete;
  ~Block() {
    auto& l = ledger(device);
    {
      std::lock_guard<std::mutex> guard(l.mutex);
      l.stats.allocated -= block_size(requested);
      l.stats.requested -= requested;
      ++l.stats.frees;
    }
    std::free(bytes);
  }
};

static void release(void* block) { delete static_cast<Block*>(block); }
static void release_nothing(void*) {}

MemoryStats memory_stats(DeviceIndex device) {
  check_index(device);
  auto& l = ledger(device);
  std::lock_guard<std::mutex> guard(l.mutex);
  return l.stats;
}

void set_capacity(DeviceIndex device, int64_t bytes) {
  check_index(device);
  auto& l = ledger(device);
  std::lock_guard<std::mutex> guard(l.mutex);
  l.stats.capacity = bytes;
}

void set_memory_fraction(DeviceIndex device, double fraction) {
  check_index(device);
  TORCH_CHECK(fraction >= 0 && fraction <= 1, "memory fraction ", fraction, " is not between 0 and 1");
  auto& l = ledger(device);
  std::lock_guard<std::mutex> guard(l.mutex);
  l.fraction = fraction;
}

static void* host_memory(size_t bytes) {
  void* p = nullptr;
  TORCH_CHECK(posix_memalign(&p, 64, bytes) == 0, "simulated NPU: the host has no ", bytes, " bytes left");
  return p;
}

// -------------------------------------------------------- device allocator
struct DeviceAlloc final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const DeviceIndex device = current_device();
    if (bytes == 0) return {nullptr, nullptr, &release_nothing, Device(kNPU, device)};
    auto block = std::make_unique<Block>(device, bytes);
    block->bytes = host_memory(bytes);
    static const bool poison = env_int("SIM_NPU_POISON", 0);
    if (poison) std::memset(block->bytes, 0xff, bytes); // NaN in every floating type
    void* p = block->bytes;
    return {p, block.release(), &release, Device(kNPU, device)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (DeviceIndex i = 0; i < num_devices(); ++i) {
      auto& l = ledger(i);
      std::lock_guard<std::mutex> guard(l.mutex);
      l.stats.reserved = segments_size(l.stats.allocated);
    }
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    const auto s = memory_stats(device);
    c10::CachingDeviceAllocator::DeviceStats out;
    out.allocated_bytes[0].current = s.allocated;
    out.allocated_bytes[0].peak = s.allocated_peak;
    out.active_bytes[0] = out.allocated_bytes[0];
    out.reserved_bytes[0].current = s.reserved;
    out.reserved_bytes[0].peak = s.reserved_peak;
    out.requested_bytes[0].current = s.requested;
    out.requested_bytes[0].peak = s.requested_peak;
    out.num_device_alloc = s.allocations;
    out.num_device_free = s.frees;
    out.num_ooms = s.ooms;
    return out;
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    check_index(device);
    auto& l = ledger(device);
    std::lock_guard<std::mutex> guard(l.mutex);
    l.stats.allocations = l.stats.frees = l.stats.ooms = 0;
  }
  void resetPeakStats(DeviceIndex device) override {
    check_index(device);
    auto& l = ledger(device);
    std::lock_guard<std::mutex> guard(l.mutex);
    l.stats.allocated_peak = l.stats.allocated;
    l.stats.requested_peak = l.stats.requested;
    l.stats.reserved_peak = l.stats.reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    const auto s = memory_stats(device);
    // the last segment may reach beyond a capacity that is no multiple of 2 MiB
    return {size_t(std::max<int64_t>(s.capacity - s.reserved, 0)), size_t(s.capacity)};
  }
};
static DeviceAlloc g_device_alloc;
REGISTER_ALLOCATOR(kNPU, &g_device_alloc)
c10::Allocator* device_allocator() { return &g_device_alloc; }

c10::DataPtr adopt(const c10::Storage& cpu, DeviceIndex device) {
  if (cpu.nbytes() == 0) return {nullptr, nullptr, &release_nothing, Device(kNPU, device)};
  auto block = std::make_unique<Block>(device, cpu.nbytes());
  block->owner = cpu;
  return {cpu.mutable_data(), block.release(), &release, Device(kNPU, device)};
}

// ------------------------------------------------------ page-locked memory
// Plain host memory whose range is remembered, for is_pinned() to find.
struct PinnedAlloc final : at::HostAllocator {
  // never freed: pinned tensors may outlive the interpreter's shutdown
  static inline std::mutex& mutex = *new std::mutex;
  static inline auto& ranges = *new std::map<const char*, size_t>;

  static void unpin(void* p) {
    std::lock_guard<std::mutex> guard(mutex);
    ranges.erase(static_cast<char*>(p));
    std::free(p);
  }
  c10::DataPtr allocate(size_t bytes) override {
    const size_t at_least_one = std::max<size_t>(bytes, 1);
    void* p = host_memory(at_least_one);
    std::lock_guard<std::mutex> guard(mutex);
    ranges[static_cast<char*>(p)] = at_least_one;
    return {p, p, &unpin, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
static PinnedAlloc g_pinned_alloc;
c10::Allocator* pinned_allocator() { return &g_pinned_alloc; }
REGISTER_HOST_ALLOCATOR(kNPU, &g_pinned_alloc)

bool is_pinned(const void* bytes) {
  const auto* p = static_cast<const char*>(bytes);
  std::lock_guard<std::mutex> guard(PinnedAlloc::mutex);
  auto it = PinnedAlloc::ranges.upper_bound(p);
  if (it == PinnedAlloc::ranges.begin()) return false;
  --it;
  return p < it->first + it->second;
}
} // namespace simnpu
