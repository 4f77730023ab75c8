// Operators. Every one that has no kernel below goes through `run`: meta kernels say the shapes of
// its results, whose memory is allocated at once; the CPU's kernel, run later by the stream's
// thread, computes the values. Where shapes depend on values the host waits, as it does for CUDA.
#pragma once

#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "generator.h"
#include "tensors.h"

namespace accelerator {

using torch::jit::Stack;

// Which operators made the host wait, and how often: they read what the device has computed.
struct Waiting {
  std::mutex mutex;
  std::map<std::string, int> by_name;
};
inline Waiting& waiting() {
  static auto* one = new Waiting;
  return *one;
}

// What the CPU's native_dropout does, with the generator given.
inline void dropout(Stack& stack, const at::Generator& generator) {
  const auto train = stack.back().toOptional<bool>();
  const auto keep = 1.0 - stack[stack.size() - 2].toDouble();
  const auto input = stack[stack.size() - 3].toTensor();
  stack.resize(stack.size() - 3);
  const bool drops = train.value_or(true) && input.numel() > 0;
  auto mask = at::empty_like(input, input.options().dtype(at::kBool));
  drops ? mask.bernoulli_(keep, generator) : mask.fill_(true);
  const auto scale = keep == 0 ? 0. : 1. / keep;
  stack.emplace_back(drops ? input.mul(mask).mul_(scale) : input.clone());
  stack.emplace_back(mask);
}

class Call {
 public:
  Call(const c10::OperatorHandle& asked, Stack& stack)
      : op_(overridden(asked, stack)), stack_(stack) {
    begin_ = stack.size() - schema().arguments().size();
    given_.assign(stack.begin() + begin_, stack.end());
    find_device();
    for (const auto& value : given_) {
      kernel_.push_back(value.isDevice()
                            ? IValue(Device(at::kCPU))
                            : with_tensors(value, [this](auto& t) { return argument(t); }));
    }
  }

  void run() {
    c10::DeviceGuard here(Device(kType, device_));
    draw();
    find_aliases();
    Stack results;
    if (is_view()) {
      results.emplace_back(view());
    } else if (auto shapes = find_shapes()) {
      results = queue(*shapes);
    } else {
      results = run_at_once();
    }
    stack_.resize(begin_);
    for (auto& value : results) stack_.push_back(std::move(value));
  }

 private:
  const c10::FunctionSchema& schema() const { return op_.schema(); }
  const std::string& name() const { return schema().operator_name().name; }

  // The operator whose kernel on the CPU does it: torch asks devices like this one for convolutions
  // by names of their own.
  static c10::OperatorHandle overridden(const c10::OperatorHandle& asked, Stack& stack) {
    const auto& name = asked.schema().operator_name().name;
    auto find = [](const char* other) {
      return c10::Dispatcher::singleton().findSchemaOrThrow(other, "");
    };
    if (name == "aten::convolution_overrideable") return find("aten::convolution");
    if (name != "aten::convolution_backward_overrideable") return asked;
    // It lacks the argument bias_sizes, after the weight.
    const auto weight = stack[stack.size() - 8].toTensor();
    const bool transposed = stack[stack.size() - 4].toBool();
    const auto groups = stack[stack.size() - 2].toInt();
    const auto channels = transposed ? weight.size(1) * groups : weight.size(0);
    stack.insert(stack.end() - 7, IValue(std::vector<int64_t>{channels}));
    return find("aten::convolution_backward");
  }

  void find_device() {
    device_ = -1;
    for (const auto& value : given_) {
      if (value.isDevice() && value.toDevice().type() == kType && device_ < 0)
        device_ = index_of(value.toDevice());
      with_tensors(value, [this](const at::Tensor& tensor) {
        if (!ours(tensor)) return tensor;
        const auto index = tensor.device().index();
        TORCH_CHECK(device_ < 0 || device_ == index,
                    "Expected all tensors to be on the same device: ", name());
        device_ = index;
        return tensor;
      });
    }
    if (device_ < 0) device_ = current_device;
  }

  // What the kernel gets for a tensor. The host's are numbers of one element, and indices: their
  // values go with the kernel.
  at::Tensor argument(const at::Tensor& tensor) const {
    if (ours(tensor)) return seen(tensor);
    if (!tensor.defined()) return tensor;
    const bool indices = name().starts_with("aten::index") || name().starts_with("aten::_index");
    TORCH_CHECK(tensor.dim() == 0 || indices,
                "Expected all tensors to be on the same device: ", name());
    return tensor.detach().clone();
  }

  // Take the generator's numbers now, for the kernel to draw from later.
  void draw() {
    const auto& arguments = schema().arguments();
    auto at = std::find_if(arguments.begin(), arguments.end(),
                           [](auto& one) { return one.name() == "generator"; });
    const bool dropout = name() == "aten::native_dropout";
    if (!dropout && (at == arguments.end() || !op_.hasTag(at::Tag::nondeterministic_seeded)))
      return;
    auto generator = default_generator(device_);
    if (at != arguments.end()) {
      generator_at_ = at - arguments.begin();
      const auto& given = given_[*generator_at_];
      if (!given.isNone()) generator = given.toGenerator();
      kernel_[*generator_at_] = IValue();
    }
    seed_ = generator.get<Generator>()->next();
  }

  // Which argument each result is, if it is one.
  void find_aliases() {
    const auto& returns = schema().returns();
    aliases_.assign(returns.size(), std::nullopt);
    for (size_t r = 0; r < returns.size(); r++) {
      const auto* made = returns[r].alias_info();
      for (size_t i = 0; made != nullptr && i < given_.size(); i++) {
        const auto* from = schema().arguments()[i].alias_info();
        if (from != nullptr && from->beforeSets() == made->beforeSets()) aliases_[r] = i;
      }
    }
  }

  bool is_view() const {
    const auto& returns = schema().returns();
    return !returns.empty() && returns[0].alias_info() != nullptr &&
           !returns[0].alias_info()->isWrite();
  }

  at::Tensor view() {
    const auto base = given_[*aliases_[0]].toTensor();
    Stack made(kernel_.begin(), kernel_.end());
    op_.callBoxed(&made);
    const auto shape = made[0].toTensor();
    TORCH_CHECK_NOT_IMPLEMENTED(made.size() == 1 && shape.dtype() == base.dtype(),
                                "the fake accelerator lacks the view ", name());
    return base.as_strided(shape.sizes(), shape.strides(), shape.storage_offset());
  }

  // The results' shapes as meta tensors; nothing: they depend on values.
  std::optional<Stack> find_shapes() const {
    const auto& returns = schema().returns();
    if (returns.empty()) return Stack();
    auto of_tensors = [](auto& one) {
      return one.type()->template castRaw<c10::TensorType>() != nullptr;
    };
    if (!std::all_of(returns.begin(), returns.end(), of_tensors)) return {};
    Stack stack;
    for (size_t i = 0; i < given_.size(); i++) {
      const auto& value = given_[i];
      auto as_meta = [](const at::Tensor& t) {
        if (!ours(t)) return t;
        return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
      };
      if (value.isDevice())
        stack.emplace_back(Device(at::kMeta));
      else
        stack.push_back(generator_at_ == i ? IValue() : with_tensors(value, as_meta));
    }
    try {
      op_.callBoxed(&stack);
    } catch (const c10::Error&) {
      return {};  // and if the call is wrong, the kernel says so at once
    } catch (const py::error_already_set& error) {
      py::gil_scoped_acquire held;
      if (!error.matches(PyExc_Exception)) throw;  // an interrupt
      return {};
    }
    auto known = [](auto& one) { return !one.toTensor().defined() || one.toTensor().is_meta(); };
    if (!std::all_of(stack.begin(), stack.end(), known)) return {};
    return stack;
  }

  Stack queue(const Stack& shapes) {
    Stack results;
    std::vector<at::Tensor> targets(shapes.size());
    for (size_t r = 0; r < shapes.size(); r++) {
      const auto shape = shapes[r].toTensor();
      if (aliases_[r]) {
        const auto target = given_[*aliases_[r]].toTensor();
        if (ours(target) && target.sizes() != shape.sizes()) {
          at::native::resize_(target, shape.sizes(), std::nullopt);
          kernel_[*aliases_[r]] = seen(target);
        }
        results.emplace_back(target);
      } else if (shape.defined()) {
        const auto made = on_device(shape, device_);
        targets[r] = seen(made);
        results.emplace_back(made);
      } else {
        results.emplace_back(at::Tensor());
      }
    }
    const auto scratch = workspace(targets);  // freed when this ends: its stream comes first
    queue_here(device_).put([kernel = kernel(), arguments = std::move(kernel_), targets] {
      Stack stack(arguments.begin(), arguments.end());
      kernel(stack);
      for (size_t r = 0; r < targets.size(); r++)
        if (targets[r].defined()) targets[r].copy_(stack[r].toTensor());
    });
    return results;
  }

  // Convolutions need scratch memory, here as much as their first result takes.
  at::Tensor workspace(const std::vector<at::Tensor>& targets) const {
    if (!name().starts_with("aten::convolution") || !targets[0].defined()) return {};
    const auto bytes = static_cast<int64_t>(targets[0].nbytes());
    return at::empty({bytes}, at::TensorOptions(at::kByte).device(Device(kType, device_)));
  }

  Stack run_at_once() {
    {
      std::lock_guard lock(waiting().mutex);
      waiting().by_name[c10::toString(schema().operator_name())]++;
    }
    counts.waits++;
    queue_here(device_).wait();
    Stack stack(kernel_.begin(), kernel_.end());
    kernel()(stack);
    auto made = [this](const at::Tensor& value) {
      if (!value.defined()) return value;
      const auto target = on_device(value, device_);
      seen(target).copy_(value);
      return target;
    };
    for (size_t r = 0; r < stack.size(); r++)
      stack[r] = aliases_[r] ? given_[*aliases_[r]] : with_tensors(stack[r], made);
    return stack;
  }

  // The CPU's kernel, with a generator of its own if it draws.
  std::function<void(Stack&)> kernel() const {
    if (!seed_) return [op = op_](Stack& stack) { op.callBoxed(&stack); };
    return [op = op_, seed = *seed_, at = generator_at_](Stack& stack) {
      auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
      if (!at) return dropout(stack, generator);
      stack[*at] = generator;
      op.callBoxed(&stack);
    };
  }

  c10::OperatorHandle op_;
  Stack& stack_;
  size_t begin_;
  DeviceIndex device_;
  std::vector<IValue> given_, kernel_;
  std::vector<std::optional<size_t>> aliases_;
  std::optional<size_t> generator_at_;
  std::optional<uint64_t> seed_;
};

inline void run(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Call(op, *stack).run();
}

}  // namespace accelerator
