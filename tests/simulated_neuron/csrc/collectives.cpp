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

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = on_host(tensors);
    return gloo_->broadcast(host, options);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto host = on_host(tensors);
    return gloo_->allreduce(host, options);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto host = on_host(tensors);
    return gloo_->allreduce_coalesced(host, options);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto host = on_host(tensors);
    return gloo_->reduce(host, options);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto host_outputs = on_host(outputs);
    auto host_inputs = on_host(inputs);
    return gloo_->allgather(host_outputs, host_inputs, options);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto host_output = on_host(output), host_input = on_host(input);
    return gloo_->_allgather_base(host_output, host_input, options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto host_outputs = on_host(outputs), host_inputs = on_host(inputs);
    return gloo_->allgather_into_tensor_coalesced(host_outputs, host_inputs, options);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto host_outputs = on_host(outputs);
    auto host_inputs = on_host(inputs);
    return gloo_->gather(host_outputs, host_inputs, options);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto host_outputs = on_host(outputs);
    auto host_inputs = on_host(inputs);
    return gloo_->scatter(host_outputs, host_inputs, options);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto host_outputs = on_host(outputs);
    auto host_inputs = on_host(inputs);
    return gloo_->reduce_scatter(host_outputs, host_inputs, options);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto host_output = on_host(output), host_input = on_host(input);
    return gloo_->_reduce_scatter_base(host_output, host_input, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    auto host_outputs = on_host(outputs), host_inputs = on_host(inputs);
    return gloo_->reduce_scatter_tensor_coalesced(host_outputs, host_inputs, options);
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    auto host_output = on_host(output), host_input = on_host(input);
    return gloo_->alltoall_base(host_output, host_input, output_sizes, input_sizes, options);
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    auto host = on_host(tensors);
    return gloo_->send(host, to, tag);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    auto host = on_host(tensors);
    return gloo_->recv(host, from, tag);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return gloo_->barrier(options);
  }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
};

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<Collectives, c10d::Backend, c10::intrusive_ptr<Collectives>>(m, "Collectives")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>());
}
