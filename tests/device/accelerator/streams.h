// Streams and events. A stream is a thread with a queue; an event is a counter of its recordings.
//
// As on a GPU, the host only queues: a kernel runs later, in the order of its stream, and two
// streams are ordered by nothing but events. Random delays before each piece of work, and a pace
// that changes now and then, let every order that the events allow happen sooner or later.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <Python.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

namespace accelerator {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
constexpr StreamId kSideStreams = 16;  // torch's pool for CUDA has 32; then they are used again

// What the device was asked to do, for tests to compare.
struct Counts {
  std::atomic<uint64_t> queued{0};  // pieces of work
  std::atomic<uint64_t> waits{0};   // times that the host waited for the device
};
inline Counts counts;

// The most that work is held up, on the default streams and on the others; 0: not at all.
inline std::atomic<int> default_delay_us{0}, side_delay_us{0};

// Lets go of Python's lock while the host waits: what it waits for may need it.
class WithoutGil {
 public:
  WithoutGil() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_;
};

class Queue {
 public:
  Queue(DeviceIndex device, StreamId id) : side_(id != 0), random_(31 * device + id + 1) {
    std::thread([this] { run(); }).detach();  // as long as the process: streams are never freed
  }

  std::atomic<int> lag_us{0};  // before each piece of work, besides what is random

  // Queue work; return its number.
  uint64_t put(std::function<void()> work) {
    counts.queued++;
    std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_all();
    return ++queued_;
  }

  // The number of the last piece of work so far.
  uint64_t last() {
    std::lock_guard lock(mutex_);
    return queued_;
  }

  bool reached(uint64_t number) {
    std::lock_guard lock(mutex_);
    return done_ >= number;
  }

  // Wait for all work so far. What a kernel threw is thrown here, as a GPU reports it: late.
  void wait() {
    std::exception_ptr error;
    {
      WithoutGil free;
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this, number = queued_] { return done_ >= number; });
      std::swap(error, error_);
    }
    if (error) std::rethrow_exception(error);
  }

 private:
  void run() {
    c10::AutoGradMode no_gradients(false);
    at::set_num_threads(1);
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !work_.empty(); });
        work = std::move(work_.front());
        work_.pop_front();
      }
      hold_up();
      std::exception_ptr error;
      try {
        work();
      } catch (...) {
        error = std::current_exception();
      }
      work = nullptr;  // what it held is gone before it counts as done
      std::lock_guard lock(mutex_);
      if (error && !error_) error_ = error;
      done_++;
      changed_.notify_all();
    }
  }

  void hold_up() {
    const int most_us = side_ ? side_delay_us : default_delay_us;
    if (const int us = lag_us) std::this_thread::sleep_for(std::chrono::microseconds(us));
    if (most_us <= 0) return;
    // For some time a stream is fast, then slow: else the one with less to do is always ahead.
    if (until_next_pace_-- == 0) {
      constexpr int kPaces[] = {0, 1, 1, 4};
      pace_ = kPaces[random_() % std::size(kPaces)];
      until_next_pace_ = static_cast<int>(random_() % 32);
    }
    const auto us = pace_ * static_cast<int>(random_() % most_us) / 2;
    if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  uint64_t queued_ = 0, done_ = 0;
  std::exception_ptr error_;
  const bool side_;
  std::mt19937 random_;
  int until_next_pace_ = 0, pace_ = 1;
};

inline thread_local DeviceIndex current_device = 0;
inline thread_local StreamId current_streams[kDevices] = {0, 0};

inline DeviceIndex index_of(Device device) {
  return device.has_index() ? device.index() : current_device;
}

inline Stream stream_of(DeviceIndex device, StreamId id) {
  return Stream(Stream::UNSAFE, Device(kType, device), id);
}

// Every stream's queue that there is; they are never freed.
struct Queues {
  std::mutex mutex;
  std::map<std::pair<DeviceIndex, StreamId>, Queue*> all;
};
inline Queues& queues() {
  static auto* one = new Queues;
  return *one;
}

inline Queue& queue_of(DeviceIndex device, StreamId id) {
  std::lock_guard lock(queues().mutex);
  auto& queue = queues().all[{device, id}];
  if (queue == nullptr) queue = new Queue(device, id);
  return *queue;
}

inline Queue& queue_of(const Stream& stream) {
  return queue_of(stream.device_index(), stream.id());
}

// The queue of a device's current stream.
inline Queue& queue_here(DeviceIndex device) { return queue_of(device, current_streams[device]); }

// Wait for every stream of a device.
inline void wait_for_device(DeviceIndex device) {
  counts.waits++;
  std::vector<Queue*> all;
  {
    std::lock_guard lock(queues().mutex);
    for (auto& [key, queue] : queues().all)
      if (key.first == device) all.push_back(queue);
  }
  for (auto* queue : all) queue->wait();
}

class Event {
 public:
  explicit Event(bool timed) : timed_(timed) {}

  // A recording to come; work that marks it as reached is still to be queued.
  uint64_t next() {
    std::lock_guard lock(mutex_);
    return ++recorded_;
  }

  uint64_t last() {
    std::lock_guard lock(mutex_);
    return recorded_;
  }

  void reach(uint64_t number) {
    std::lock_guard lock(mutex_);
    reached_ = std::max(reached_, number);
    when_ = std::chrono::steady_clock::now();
    changed_.notify_all();
  }

  void wait(uint64_t number) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return reached_ >= number; });
  }

  bool done() {
    std::lock_guard lock(mutex_);
    return reached_ >= recorded_;
  }

  double ms_until(Event& later) {
    TORCH_CHECK(timed_ && later.timed_, "both events must be made with enable_timing=True");
    TORCH_CHECK(done() && later.done(), "both events must have been reached");
    return std::chrono::duration<double, std::milli>(later.when_ - when_).count();
  }

 private:
  const bool timed_;
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t recorded_ = 0, reached_ = 0;
  std::chrono::steady_clock::time_point when_;
};

using EventRef = std::shared_ptr<Event>;  // queued work may outlive torch's handle

inline void record_block(const c10::DataPtr& block, const Stream& stream);  // in memory.h

// What torch asks of a device about devices, streams and events.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kType; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Device getDevice() const override { return Device(kType, current_device); }
  void setDevice(Device device) const override { current_device = index_of(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = index_of(device);
  }
  Device exchangeDevice(Device device) const override {
    return Device(kType, std::exchange(current_device, index_of(device)));
  }

  Stream getStream(Device device) const override {
    return stream_of(index_of(device), current_streams[index_of(device)]);
  }
  Stream getDefaultStream(Device device) const override { return stream_of(index_of(device), 0); }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<StreamId> made[kDevices];
    return stream_of(index_of(device), 1 + made[index_of(device)]++ % kSideStreams);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream stream) const override {
    const auto device = stream.device_index();
    return stream_of(device, std::exchange(current_streams[device], stream.id()));
  }
  void* getStreamNativeHandle(const Stream stream) const override { return &queue_of(stream); }
  bool queryStream(const Stream& stream) const override {
    auto& queue = queue_of(stream);
    return queue.reached(queue.last());
  }
  void synchronizeStream(const Stream& stream) const override {
    counts.waits++;
    queue_of(stream).wait();
  }
  void synchronizeDevice(DeviceIndex device) const override {
    wait_for_device(device < 0 ? current_device : device);
  }

  void record(void** handle, const Stream& stream, DeviceIndex,
              c10::EventFlag flag) const override {
    if (*handle == nullptr)
      *handle = new EventRef(std::make_shared<Event>(flag == c10::EventFlag::BACKEND_DEFAULT));
    EventRef event = *static_cast<EventRef*>(*handle);
    queue_of(stream).put([event, number = event->next()] { event->reach(number); });
  }
  void block(void* handle, const Stream& stream) const override {
    if (handle == nullptr) return;  // never recorded: nothing to wait for
    EventRef event = *static_cast<EventRef*>(handle);
    queue_of(stream).put([event, number = event->last()] { event->wait(number); });
  }
  bool queryEvent(void* handle) const override {
    return handle == nullptr || (*static_cast<EventRef*>(handle))->done();
  }
  void synchronizeEvent(void* handle) const override {
    if (handle == nullptr) return;
    counts.waits++;
    EventRef event = *static_cast<EventRef*>(handle);
    WithoutGil free;
    event->wait(event->last());
  }
  double elapsedTime(void* earlier, void* later, DeviceIndex) const override {
    return (*static_cast<EventRef*>(earlier))->ms_until(**static_cast<EventRef*>(later));
  }
  void destroyEvent(void* handle, DeviceIndex) const noexcept override {
    delete static_cast<EventRef*>(handle);
  }

  void recordDataPtrOnStream(const c10::DataPtr& block, const Stream& stream) const override {
    record_block(block, stream);
  }
};

}  // namespace accelerator
