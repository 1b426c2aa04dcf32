// "hccl" for the simulated NPU: a process group that hands gloo CPU tensors over the
// device's own bytes, so that gloo reads and writes device memory.
#include "sim_npu.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <any>

namespace simnpu {
using at::Tensor;
using Tensors = std::vector<Tensor>;
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;

static Tensor on_host(const Tensor& t) {
  // the words of c10d, which knows no other back end than hccl in this group
  TORCH_CHECK(t.device().type() == kNPU, "No backend type associated with device type ", t.device().type());
  TORCH_CHECK(t.is_non_overlapping_and_dense(), "hccl: tensors must be contiguous");
  return cpu_alias(t);
}
static Tensors on_host(const Tensors& tensors) {
  Tensors aliases;
  for (auto& t : tensors) aliases.push_back(on_host(t));
  return aliases;
}
static std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> aliases;
  for (auto& tensors : lists) aliases.push_back(on_host(tensors));
  return aliases;
}
// gloo wants outputs shaped like the inputs, HCCL only counts elements: gloo sees the memory as one row.
static Tensor flat_on_host(const Tensor& t) {
  auto a = on_host(t);
  return a.as_strided({a.numel()}, {1});
}
static Tensors flat_on_host(const Tensors& tensors) {
  Tensors rows;
  for (auto& t : tensors) rows.push_back(flat_on_host(t));
  return rows;
}
static Tensors flatten(const std::vector<Tensors>& lists) {
  Tensors all;
  for (auto& tensors : lists) all.insert(all.end(), tensors.begin(), tensors.end());
  return all;
}

// gloo's work, whose results are device tensors.
struct DeviceWork final : Work {
  WorkPtr gloo;
  Tensors outputs;
  std::any aliases;            // which gloo uses until it is done
  std::function<void()> after; // runs once, when gloo is done
  std::mutex mutex;

  DeviceWork(WorkPtr gloo, Tensors outputs, std::any aliases, std::function<void()> after)
      : gloo(std::move(gloo)), outputs(std::move(outputs)), aliases(std::move(aliases)), after(std::move(after)) {}
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    std::lock_guard<std::mutex> guard(mutex);
    const bool ok = gloo->wait(timeout);
    if (after) std::exchange(after, {})();
    return ok;
  }
  bool isCompleted() override { return gloo->isCompleted(); }
  bool isSuccess() const override { return gloo->isSuccess(); }
  std::exception_ptr exception() const override { return gloo->exception(); }
  int sourceRank() const override { return gloo->sourceRank(); }
  Tensors result() override { return outputs; }
  void synchronize() override { wait(); }
  void abort() override { gloo->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait();
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(outputs));
    return future;
  }
};

struct HcclBackend final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  explicit HcclBackend(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo(std::move(gloo)) {}
  const std::string getBackendName() const override { return "hccl"; }
  bool supportsCoalescing() const override { return false; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }

  template <class Aliases>
  static WorkPtr wrap(WorkPtr work, Tensors outputs, Aliases aliases, std::function<void()> after = {}) {
    return c10::make_intrusive<DeviceWork>(std::move(work), std::move(outputs), std::any(std::move(aliases)),
                                           std::move(after));
  }

  // gloo has no AVG, which FSDP2 asks for: sum, then divide by the number of ranks.
  template <class Options>
  std::function<void()> average(Options& options, Tensors results) {
    if (options.reduceOp != c10d::ReduceOp::AVG) return {};
    options.reduceOp = c10d::ReduceOp::SUM;
    return [results = std::move(results), ranks = getSize()] {
      at::NoGradGuard no_grad;
      for (const auto& t : results) t.div_(ranks);
    };
  }

  // ---- reductions
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& given) override {
    auto options = given;
    auto a = on_host(tensors);
    auto after = average(options, a);
    return wrap(gloo->allreduce(a, options), tensors, a, after);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& given) override {
    auto options = given;
    auto a = on_host(tensors);
    auto after = average(options, a);
    return wrap(gloo->allreduce_coalesced(a, options), tensors, a, after);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& given) override {
    auto options = given;
    auto a = on_host(tensors);
    // only the root holds a sum: the other ranks' tensors are inputs, not to be divided
    auto after = average(options, getRank() == options.rootRank ? a : Tensors{});
    return wrap(gloo->reduce(a, options), tensors, a, after);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& given) override {
    auto options = given;
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    auto after = average(options, out);
    return wrap(gloo->reduce_scatter(out, in, options), outputs, std::make_pair(out, in), after);
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& given) override {
    auto options = given;
    auto out = flat_on_host(output), in = flat_on_host(input);
    auto after = average(options, {out});
    return wrap(gloo->_reduce_scatter_base(out, in, options), {output}, Tensors{out, in}, after);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& given) override {
    auto options = given;
    auto out = flat_on_host(outputs), in = flat_on_host(inputs);
    auto after = average(options, out);
    return wrap(gloo->reduce_scatter_tensor_coalesced(out, in, options), outputs, std::make_pair(out, in), after);
  }

  // ---- moves
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto a = on_host(tensors);
    return wrap(gloo->broadcast(a, options), tensors, a);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    return wrap(gloo->allgather(out, in, options), flatten(outputs), std::make_pair(out, in));
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto out = flat_on_host(output), in = flat_on_host(input);
    return wrap(gloo->_allgather_base(out, in, options), {output}, Tensors{out, in});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    auto out = flat_on_host(outputs), in = flat_on_host(inputs);
    return wrap(gloo->allgather_into_tensor_coalesced(out, in, options), outputs, std::make_pair(out, in));
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    return wrap(gloo->gather(out, in, options), flatten(outputs), std::make_pair(out, in));
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    return wrap(gloo->scatter(out, in, options), outputs, std::make_pair(out, in));
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    auto out = on_host(output), in = on_host(input);
    return wrap(gloo->alltoall_base(out, in, output_splits, input_splits, options), {output}, Tensors{out, in});
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    auto a = on_host(tensors);
    return wrap(gloo->send(a, to, tag), {}, a);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    auto a = on_host(tensors);
    return wrap(gloo->recv(a, from, tag), tensors, a);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override { return gloo->barrier(options); }
};
} // namespace simnpu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("hccl_over", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<simnpu::HcclBackend>(std::move(gloo));
  });
  pybind11::class_<simnpu::CpuCall>(m, "CpuCall") // for the fused operators, which are written in Python
      .def(pybind11::init<>())
      .def("enter", [](simnpu::CpuCall& call, const at::Tensor& t) { return call.enter(t); })
      .def("leave", &simnpu::CpuCall::leave)
      .def("check_one_device", &simnpu::CpuCall::check_one_device);
  m.def("device_count", [] { return int(simnpu::num_devices()); });
  m.def("default_generator", [](int device) -> at::Generator { return simnpu::default_generator(device); });
}
