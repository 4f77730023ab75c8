// Random numbers: a seed and an offset, as CUDA's Philox generator has them. A kernel gets both
// when it is queued, so that restoring the generator's state is in order with the host's calls,
// however late the kernel runs.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>

#include <random>

#include "streams.h"

namespace accelerator {

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(DeviceIndex device)
      : GeneratorImpl(Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  // The seed of one kernel's numbers; the next kernel gets another.
  uint64_t next() {
    std::lock_guard lock(mutex_);
    const auto mixed = seed_ * 0x9E3779B97F4A7C15ull + offset_;
    offset_ += 4;
    return mixed;
  }

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(std::random_device()());
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({2 * sizeof(uint64_t)}, at::kByte);
    auto* words = static_cast<uint64_t*>(state.data_ptr());
    words[0] = seed_;
    words[1] = offset_;
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 2 * sizeof(uint64_t) && state.device().is_cpu(),
                "not a state of this generator");
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0];
    offset_ = words[1];
  }

  Generator* clone_impl() const override {
    auto* made = new Generator(device().index());
    made->seed_ = seed_;
    made->offset_ = offset_;
    return made;
  }
  static c10::DeviceType device_type() { return kType; }

 private:
  std::mutex mutex_;
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

inline const at::Generator& default_generator(DeviceIndex device) {
  static const auto* all = new std::array<at::Generator, kDevices>{
      at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return (*all)[device < 0 ? current_device : device];
}

}  // namespace accelerator
