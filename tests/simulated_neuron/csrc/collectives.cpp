// The collective backend `neuron`: gloo on the same memory. It takes device tensors only, as the real one does.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

#include "host_alias.h"

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

at::Tensor on_host(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_privateuseone(), "No backend type associated with device type ", tensor.device().type());
  return host_alias(tensor);
}

template <typename T>
std::vector<T> on_host(const std::vector<T>& items) {
  std::vector<T> result;
  for (const auto& item : items) {
    result.push_back(on_host(item));
  }
  return result;
}

class Collectives final : public c10d::Backend {
 public:
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override {
    return "neuron";
  }
  // The last that is called when a group is made, and the first call that can see a device bound to it: groups would then be
  // split off each other, which this backend cannot do.
  void setGroupUid(const std::string& uid) override {
    TORCH_CHECK(!getBoundDeviceId(), "neuron: init_process_group(device_id=...) is not supported; leave device_id out");
    Backend::setGroupUid(uid);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return pass_on(&Backend::broadcast, tensors, options);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return pass_on(&Backend::allreduce, tensors, options);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return pass_on(&Backend::allreduce_coalesced, tensors, options);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return pass_on(&Backend::reduce, tensors, options);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return pass_on_both(&Backend::allgather, outputs, inputs, options);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return pass_on_both(&Backend::_allgather_base, output, input, options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return pass_on_both(&Backend::allgather_into_tensor_coalesced, outputs, inputs, options);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return pass_on_both(&Backend::gather, outputs, inputs, options);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return pass_on_both(&Backend::scatter, outputs, inputs, options);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    return pass_on_both(&Backend::reduce_scatter, outputs, inputs, options);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return pass_on_both(&Backend::_reduce_scatter_base, output, input, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return pass_on_both(&Backend::reduce_scatter_tensor_coalesced, outputs, inputs, options);
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    return pass_on_both(&Backend::alltoall_base, output, input, output_sizes, input_sizes, options);
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return pass_on(&Backend::send, tensors, to, tag);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return pass_on(&Backend::recv, tensors, from, tag);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return gloo_->barrier(options);
  }

 private:
  // Gloo's methods take references: the aliases need a name each.
  template <typename Method, typename T, typename... Rest>
  WorkPtr pass_on(Method method, T& tensors, Rest&&... rest) {
    auto host = on_host(tensors);
    return (gloo_.get()->*method)(host, std::forward<Rest>(rest)...);
  }
  template <typename Method, typename Out, typename In, typename... Rest>
  WorkPtr pass_on_both(Method method, Out& outputs, In& inputs, Rest&&... rest) {
    auto host_outputs = on_host(outputs);
    auto host_inputs = on_host(inputs);
    return (gloo_.get()->*method)(host_outputs, host_inputs, std::forward<Rest>(rest)...);
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<Collectives, c10d::Backend, c10::intrusive_ptr<Collectives>>(m, "Collectives")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>());
}
