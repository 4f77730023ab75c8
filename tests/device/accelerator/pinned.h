// Pinned host memory. As torch's allocator for CUDA does it: sizes are rounded up to powers of two,
// and a block that is freed is given away again once the copies that used it are done.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include <bit>
#include <cstring>

#include "streams.h"

namespace accelerator {

class PinnedAllocator final : public at::HostAllocator {
 public:
  static PinnedAllocator& get() {
    static auto* one = new PinnedAllocator;
    return *one;
  }

  c10::DataPtr allocate(size_t asked) override {
    if (asked == 0) return {nullptr, nullptr, &give_back, c10::DeviceType::CPU};
    const auto size = std::bit_ceil(asked);
    std::lock_guard lock(mutex_);
    auto fits = [&](auto& one) {
      return !one.second.used && one.second.size == size && idle(one.second);
    };
    auto at = std::find_if(blocks_.begin(), blocks_.end(), fits);
    if (at == blocks_.end()) {
      auto* made = static_cast<char*>(std::aligned_alloc(kPage, std::max(kPage, size)));
      at = blocks_.emplace(made, Host{size}).first;
    }
    at->second = Host{size, true};
    now_ += size;
    peak_ = std::max(peak_, now_);
    return {at->first, at->first, &give_back, c10::DeviceType::CPU};
  }

  // A copy on a queue uses the block around an address.
  void use(const void* address, Queue& queue, uint64_t number) {
    std::lock_guard lock(mutex_);
    if (auto* block = around(address)) block->until.emplace_back(&queue, number);
  }

  bool has(const void* address) {
    std::lock_guard lock(mutex_);
    return around(address) != nullptr;
  }

  // Memory of others that is pinned where it lies, as cudaHostRegister does.
  void enlist(uintptr_t address, size_t size) {
    std::lock_guard lock(mutex_);
    auto* begin = reinterpret_cast<char*>(address);
    TORCH_CHECK(around(begin) == nullptr, "this memory is pinned already");
    blocks_.emplace(begin, Host{size, true, true});
    now_ += size;
    peak_ = std::max(peak_, now_);
  }

  void strike_off(uintptr_t address) {
    std::lock_guard lock(mutex_);
    auto at = blocks_.find(reinterpret_cast<char*>(address));
    TORCH_CHECK(at != blocks_.end() && at->second.foreign, "this memory was not registered");
    TORCH_CHECK(idle(at->second), "this memory is unpinned under a copy");
    now_ -= at->second.size;
    blocks_.erase(at);
  }

  std::pair<size_t, size_t> bytes() {
    std::lock_guard lock(mutex_);
    return {now_, peak_};
  }
  void reset_peak_stats() override {
    std::lock_guard lock(mutex_);
    peak_ = now_;
  }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  static void give_back(void* address) {
    if (address == nullptr) return;
    auto& all = get();
    std::lock_guard lock(all.mutex_);
    auto& block = all.blocks_.at(static_cast<char*>(address));
    block.used = false;
    all.now_ -= block.size;
  }

 private:
  struct Host {
    size_t size = 0;
    bool used = false, foreign = false;
    std::vector<std::pair<Queue*, uint64_t>> until;
  };
  static constexpr size_t kPage = 4096;

  static bool idle(const Host& block) {
    auto over = [](auto& one) { return one.first->reached(one.second); };
    return std::all_of(block.until.begin(), block.until.end(), over);
  }

  Host* around(const void* address) {
    auto* at = const_cast<char*>(static_cast<const char*>(address));
    auto found = blocks_.upper_bound(at);
    if (found == blocks_.begin()) return nullptr;
    --found;
    const bool inside = at < found->first + found->second.size && found->second.used;
    return inside ? &found->second : nullptr;
  }

  std::mutex mutex_;
  std::map<char*, Host> blocks_;
  size_t now_ = 0, peak_ = 0;
};

}  // namespace accelerator
