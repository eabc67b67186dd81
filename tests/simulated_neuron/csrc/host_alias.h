// A CPU tensor over the same memory: the stand-in's device memory is the host's, so copies and collectives need none of their own.
#pragma once

#include <ATen/ATen.h>

inline at::Tensor host_alias(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) {
    return tensor;
  }
  // The deleter holds the storage: the alias may outlive the tensor, for example in a collective that runs on.
  c10::Storage storage = tensor.storage();
  return at::for_blob(tensor.data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .deleter([storage](void*) {})
      .options(tensor.options().device(at::kCPU))
      .make_tensor();
}
