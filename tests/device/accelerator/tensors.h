// Tensors: how kernels see them, how they are made, copied, and read by the host.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/_local_scalar_dense_native.h>

#include "memory.h"
#include "pinned.h"

namespace accelerator {

using c10::IValue;

inline bool ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// A tensor of the host over the same bytes, which it does not own: what a kernel works on.
inline at::Tensor over(const at::Tensor& tensor, void* bytes) {
  const auto options = tensor.options().device(at::kCPU).requires_grad(false).pinned_memory(false);
  if (tensor.storage().nbytes() == 0)
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  const auto count = static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize());
  auto whole = at::from_blob(bytes, {count}, options);
  auto view = whole.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) view = at::_conj(view);
  return tensor.is_neg() ? at::_neg_view(view) : view;
}

inline at::Tensor seen(const at::Tensor& tensor) {
  return over(tensor, real_address(tensor.storage().data()));
}

inline at::Tensor on_device(const at::Tensor& like, DeviceIndex device) {
  const auto options = like.options().device(Device(kType, device));
  return at::empty_strided(like.sizes(), like.strides(), options);
}

// The same value with each of its tensors replaced.
template <class Function>
IValue with_tensors(const IValue& value, Function function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (at::Tensor one : value.toTensorList()) made.push_back(function(one));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (std::optional<at::Tensor> one : value.toOptionalTensorList())
      made.push_back(one ? std::optional(function(*one)) : one);
    return made;
  }
  return value;
}

inline c10::DeviceGuard guard(std::optional<Device> device) {
  return c10::DeviceGuard(Device(kType, device ? index_of(*device) : current_device));
}

inline at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                        std::optional<at::Layout>, std::optional<Device> device,
                        std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto here = guard(device);
  return at::detail::empty_generic(sizes, &Allocator::get(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                                std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                                std::optional<Device> device, std::optional<bool>) {
  const auto here = guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &Allocator::get(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// Between two devices: on the source's stream, which the target's current stream waits for, and
// which waits for that, as CUDA's copies do.
inline void copy_across(const at::Tensor& from, const at::Tensor& to) {
  const Guard streams;
  const auto away = streams.getStream(from.device()), there = streams.getStream(to.device());
  auto in_order = [&](const Stream& first, const Stream& second) {
    void* event = nullptr;
    streams.record(&event, first, first.device_index(), c10::EventFlag::PYTORCH_DEFAULT);
    streams.block(event, second);
    streams.destroyEvent(event, first.device_index());
  };
  in_order(there, away);
  queue_of(away).put([from = seen(from), to = seen(to)] { to.copy_(from); });
  in_order(away, there);
}

inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (ours(from) && ours(to)) {
    if (from.device() != to.device())
      copy_across(from, to);
    else
      queue_here(to.device().index()).put([from = seen(from), to = seen(to)] { to.copy_(from); });
    return to;
  }
  const auto& host = ours(from) ? to : from;
  auto& queue = queue_here((ours(from) ? from : to).device().index());
  auto view = [](const at::Tensor& t) {
    return ours(t) ? seen(t) : over(t, t.storage().mutable_data());
  };
  // The copy does not keep the host's memory alive: whoever frees it too early is found out.
  const auto number = queue.put([from = view(from), to = view(to)] { to.copy_(from); });
  if (non_blocking && PinnedAllocator::get().has(host.storage().data())) {
    PinnedAllocator::get().use(host.storage().data(), queue, number);
    return to;
  }
  counts.waits++;
  queue.wait();
  return to;
}

inline at::Scalar read_scalar(const at::Tensor& tensor) {
  counts.waits++;
  queue_here(tensor.device().index()).wait();
  return at::native::_local_scalar_dense_cpu(seen(tensor));
}

}  // namespace accelerator
