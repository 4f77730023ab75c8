// The device's memory, which the host cannot touch.
//
// A tensor's address lies in a range without any permission (PROT_NONE), so that host code that
// reads or writes through it ends the process. Kernels see the same offset of another mapping.
// The allocator gives blocks in the order of streams, as torch's caching allocator for CUDA does: a
// block that is freed goes back to the stream it was allocated on, at once, since what that stream
// runs next runs later. What is freed is overwritten, in the order of that stream: whoever still
// reads it then reads NaN.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>

#include <cstring>
#include <set>

#include "streams.h"

namespace accelerator {

constexpr size_t kCapacity = size_t{1} << 30;
constexpr size_t kRound = 512;  // of CUDA's caching allocator
constexpr StreamId kNobody = -1;

inline std::atomic<bool> poison{true};

// The two mappings of a device's memory.
struct Mapping {
  char* shown;  // what tensors point to
  char* real;   // what kernels use
};

inline const Mapping& mapping(DeviceIndex device) {
  static const auto* all = [] {
    auto* made = new std::array<Mapping, kDevices>;
    auto map = [](int access) {
      constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
      auto* at = mmap(nullptr, kCapacity, access, kFlags, -1, 0);
      TORCH_CHECK(at != MAP_FAILED, "no address space for the fake accelerator's memory");
      return static_cast<char*>(at);
    };
    for (auto& one : *made) one = {map(PROT_NONE), map(PROT_READ | PROT_WRITE)};
    return made;
  }();
  return (*all)[device];
}

// The device whose memory an address is in; -1: none.
inline DeviceIndex owner_of(const void* address) {
  for (DeviceIndex device = 0; device < kDevices; device++) {
    const auto offset = static_cast<const char*>(address) - mapping(device).shown;
    if (offset >= 0 && offset < static_cast<ptrdiff_t>(kCapacity)) return device;
  }
  return -1;
}

// Where kernels find what tensors point to.
inline void* real_address(const void* shown) {
  if (shown == nullptr) return nullptr;
  const auto& at = mapping(owner_of(shown));
  return at.real + (static_cast<const char*>(shown) - at.shown);
}

struct Block {
  enum State { kFree, kUsed, kWaiting };  // waiting: freed, and another stream may still use it
  size_t size = 0;
  StreamId stream = kNobody;
  State state = kFree;
  std::set<StreamId> users;                        // other streams that use it (record_stream)
  std::vector<std::pair<Queue*, uint64_t>> until;  // what a waiting block waits for
};

// One device's blocks, by their offsets. Python's lock is never given up while `mutex` is held.
struct Pool {
  std::mutex mutex;
  std::map<size_t, Block> blocks{{0, Block{kCapacity}}};
  c10::CachingDeviceAllocator::DeviceStats stats;
  size_t limit = kCapacity, active = 0;  // bytes that blocks in use and waiting take
  int64_t fail_in = 0;                   // the allocation, from now on, that fails; 0: none
};

class Allocator final : public c10::DeviceAllocator {
 public:
  static Allocator& get() {
    static auto* one = new Allocator;
    return *one;
  }

  c10::DataPtr allocate(size_t asked) override {
    const auto device = current_device;
    if (asked == 0) return {nullptr, nullptr, &give_back, Device(kType, device)};
    auto& pool = pools[device];
    const size_t size = (asked + kRound - 1) / kRound * kRound;
    auto offset = take(pool, device, size);
    if (!offset) {
      emptyCache({0, 0});  // waits for the device, as CUDA's does before it gives up
      offset = take(pool, device, size);
    }
    if (!offset) {
      std::lock_guard lock(pool.mutex);
      pool.stats.num_ooms++;
      TORCH_CHECK_WITH(OutOfMemoryError, false,
                       "fake accelerator out of memory: tried to allocate ", size, " bytes; ",
                       pool.active, " of ", pool.limit, " are in use");
    }
    auto* shown = mapping(device).shown + *offset;
    return {shown, shown, &give_back, Device(kType, device)};
  }

  void release(void* shown) {
    const auto device = owner_of(shown);
    auto& pool = pools[device];
    std::lock_guard lock(pool.mutex);
    auto at = pool.blocks.find(static_cast<char*>(shown) - mapping(device).shown);
    TORCH_INTERNAL_ASSERT(at != pool.blocks.end() && at->second.state == Block::kUsed);
    auto& block = at->second;
    pool.stats.allocated_bytes[0].decrease(block.size);
    pool.stats.allocation[0].decrease(1);
    for (auto user : block.users) {
      auto& queue = queue_of(device, user);
      block.until.emplace_back(&queue, queue.last());
    }
    block.state = Block::kWaiting;
    reclaim(pool, device);
  }

  // Another stream uses a block, which may not be given away before that has happened.
  void recordStream(const c10::DataPtr& data, Stream stream) override {
    if (!data) return;
    const auto device = owner_of(data.get());
    auto& pool = pools[device];
    std::lock_guard lock(pool.mutex);
    auto at = pool.blocks.find(static_cast<char*>(data.get()) - mapping(device).shown);
    if (at == pool.blocks.end() || at->second.stream == stream.id()) return;
    at->second.users.insert(stream.id());
    recorded++;
  }

  // Return what is free to no stream in particular.
  void emptyCache(c10::MempoolId_t) override {
    const auto device = current_device;
    wait_for_device(device);
    auto& pool = pools[device];
    std::lock_guard lock(pool.mutex);
    reclaim(pool, device);
    for (auto& [offset, block] : pool.blocks) {
      if (block.state != Block::kFree || block.stream == kNobody) continue;
      pool.stats.reserved_bytes[0].decrease(block.size);
      block.stream = kNobody;
    }
    for (auto at = pool.blocks.begin(); at != pool.blocks.end(); ++at)
      while (join_next(pool, at)) continue;
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard lock(pools[device].mutex);
    return pools[device].stats;
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    std::lock_guard lock(pools[device].mutex);
    pools[device].stats.allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(DeviceIndex device) override {
    std::lock_guard lock(pools[device].mutex);
    auto& stats = pools[device].stats;
    for (auto* one : {&stats.allocated_bytes[0], &stats.reserved_bytes[0]}) one->reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    std::lock_guard lock(pools[device].mutex);
    const auto& pool = pools[device];
    const auto reserved = static_cast<size_t>(pool.stats.reserved_bytes[0].current);
    return {pool.limit - std::min(pool.limit, reserved), pool.limit};
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    queue_here(owner_of(to)).put([to = real_address(to), from = real_address(from), size] {
      memcpy(to, from, size);
    });
  }
  bool initialized() override { return true; }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  static void give_back(void* shown) {
    if (shown != nullptr) get().release(shown);
  }

  Pool pools[kDevices];
  std::atomic<int> recorded{0};

 private:
  using At = std::map<size_t, Block>::iterator;

  // Take a block for the current stream; nothing: there is none, or the limit is reached.
  std::optional<size_t> take(Pool& pool, DeviceIndex device, size_t size) {
    const auto stream = current_streams[device];
    std::lock_guard lock(pool.mutex);
    if (pool.fail_in > 0 && --pool.fail_in == 0) {
      pool.stats.num_ooms++;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "fake accelerator out of memory, as asked for");
    }
    reclaim(pool, device);
    if (pool.active + size > pool.limit) return {};
    // The smallest that is large enough, the stream's own before nobody's.
    auto best = pool.blocks.end();
    auto rank = [&](At at) { return std::pair(at->second.stream != stream, at->second.size); };
    for (auto at = pool.blocks.begin(); at != pool.blocks.end(); ++at) {
      const auto& block = at->second;
      if (block.state != Block::kFree || block.size < size) continue;
      if (block.stream != stream && block.stream != kNobody) continue;
      if (best == pool.blocks.end() || rank(at) < rank(best)) best = at;
    }
    if (best == pool.blocks.end()) return {};
    auto& block = best->second;
    const bool fresh = block.stream == kNobody;
    if (block.size > size) pool.blocks[best->first + size] = Block{block.size - size, block.stream};
    block = Block{size, stream, Block::kUsed};
    pool.active += size;
    pool.stats.allocated_bytes[0].increase(size);
    pool.stats.allocation[0].increase(1);
    if (fresh) {
      pool.stats.reserved_bytes[0].increase(size);
      overwrite(device, best->first, block);  // fresh memory is no zeros either
    }
    return best->first;
  }

  // Free the blocks that no other stream can still be using.
  void reclaim(Pool& pool, DeviceIndex device) {
    for (auto at = pool.blocks.begin(); at != pool.blocks.end(); ++at) {
      auto& block = at->second;
      if (block.state != Block::kWaiting) continue;
      auto over = [](auto& one) { return one.first->reached(one.second); };
      if (!std::all_of(block.until.begin(), block.until.end(), over)) continue;
      overwrite(device, at->first, block);
      pool.active -= block.size;
      block = Block{block.size, block.stream};
      join_next(pool, at);
      if (at == pool.blocks.begin()) continue;
      auto before = std::prev(at);
      if (join_next(pool, before)) at = before;
    }
  }

  // Make one block of a free block and the next, if that is free for the same stream.
  static bool join_next(Pool& pool, At at) {
    auto next = std::next(at);
    if (next == pool.blocks.end() || at->second.stream != next->second.stream) return false;
    if (at->second.state != Block::kFree || next->second.state != Block::kFree) return false;
    at->second.size += next->second.size;
    pool.blocks.erase(next);
    return true;
  }

  static void overwrite(DeviceIndex device, size_t offset, const Block& block) {
    if (!poison) return;
    queue_of(device, block.stream).put([at = mapping(device).real + offset, size = block.size] {
      memset(at, 0xFF, size);
    });
  }
};

inline void record_block(const c10::DataPtr& block, const Stream& stream) {
  Allocator::get().recordStream(block, stream);
}

}  // namespace accelerator
