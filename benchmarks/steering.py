"""Experiment: steer torch's CPU allocator instead of writing with `out=` (OLLA §3.5).

    python -m benchmarks.steering [family]

Needs g++. An allocator that is told "the k-th request of this call goes there" replaces torch's.
For every kernel call of a step, on stand-in data: is the sequence of requests the same each time,
which request becomes which result, and are the results, at given addresses, the same bits?
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from memopt.profiler.baseline import Loss
from memopt.profiler.inputs import to_call
from memopt.profiler.signature import Signature, StandIns, signature
from memopt.profiler.step_capture import capture_step
from tests.zoo import get

ARENA_BYTES = 1 << 28
STRIDE_BYTES = 1 << 24
SOURCE = r"""
#include <c10/core/Allocator.h>
#include <utility>
#include <vector>
static c10::Allocator* real = nullptr;
static thread_local int64_t count = -1;  // requests of the call under way; -1: not steering
static thread_local std::vector<std::pair<int64_t, void*>> plan;
static thread_local std::vector<size_t> asked;
static char *lo = nullptr, *hi = nullptr;
// oneDNN gives memory back through raw_deleter(), so the deleter must know the arena.
static void release(void* p) {
  if ((char*)p < lo || (char*)p >= hi) real->raw_deleter()(p);
}
struct Steered final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (count >= 0) {
      int64_t k = count++;
      asked.push_back(n);
      for (auto& p : plan)
        if (p.first == k) return {p.second, p.second, &release, c10::Device(c10::kCPU)};
    }
    return real->allocate(n);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* d, const void* s, std::size_t n) const override { real->copy_data(d, s, n); }
};
static Steered steered;
extern "C" void install(int64_t a, int64_t b) {
  lo = (char*)a;
  hi = (char*)b;
  real = c10::GetAllocator(c10::kCPU);
  c10::SetAllocator(c10::kCPU, &steered, 255);
}
extern "C" void arm(const int64_t* k, const int64_t* p, int64_t n) {
  plan.clear();
  for (int64_t i = 0; i < n; i++) plan.push_back({k[i], (void*)p[i]});
  count = 0;
  asked.clear();
}
extern "C" int64_t disarm(int64_t* out, int64_t room) {
  count = -1;
  for (int64_t i = 0; i < (int64_t)asked.size() && i < room; i++) out[i] = asked[i];
  return asked.size();
}
"""


class Steering:
    """Torch's CPU allocator, replaced for the rest of this process."""

    def __init__(self) -> None:
        home = Path(torch.__file__).parent
        folder = Path(tempfile.mkdtemp())
        (folder / "steer.cpp").write_text(SOURCE)
        subprocess.run(
            ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", f"-I{home}/include", f"-L{home}/lib",
             "-o", str(folder / "libsteer.so"), str(folder / "steer.cpp"), "-lc10"],
            check=True,
        )  # fmt: skip
        self.library = ctypes.CDLL(str(folder / "libsteer.so"))
        self.library.disarm.restype = ctypes.c_int64
        self.arena = torch.empty(ARENA_BYTES, dtype=torch.uint8)
        self.base = self.arena.data_ptr()
        ends = ctypes.c_int64(self.base), ctypes.c_int64(self.base + ARENA_BYTES)
        self.library.install(*ends)

    def run(
        self, call: Signature, data: Any, places: dict[int, int]
    ) -> tuple[list[Any], list[int]]:
        """(results, sizes asked for) of a call whose k-th request goes to `places[k]`."""
        keys = (ctypes.c_int64 * max(1, len(places)))(*places)
        values = (ctypes.c_int64 * max(1, len(places)))(*places.values())
        room = (ctypes.c_int64 * 4096)()
        args, kwargs = data
        torch.manual_seed(5)
        self.library.arm(keys, values, ctypes.c_int64(len(places)))
        result = call.target(*args, **kwargs)
        count = self.library.disarm(room, ctypes.c_int64(4096))
        results = result if isinstance(result, (tuple, list)) else [result]
        return [v for v in results if isinstance(v, torch.Tensor)], list(room[:count])


def bits(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's elements."""
    return value.contiguous().reshape(-1).view(torch.uint8)


def examine(steering: Steering, call: Signature, data: Any) -> tuple[bool, bool, bool]:
    """(same requests each time, all results steered, same bits)."""
    plain, asked = steering.run(call, data, {})
    _, again = steering.run(call, data, {})
    spread, offset = {}, 0
    for request, size in enumerate(asked):
        spread[request] = steering.base + offset
        offset += -(-size // 64) * 64
    if offset > ARENA_BYTES:
        return asked == again, False, True
    by_address = {address: request for request, address in spread.items()}
    found, _ = steering.run(call, data, spread)
    requests = [by_address.get(v.untyped_storage().data_ptr()) for v in found]
    del found
    chosen = [request for request in requests if request is not None]
    places = {r: steering.base + i * STRIDE_BYTES for i, r in enumerate(chosen)}
    steered, _ = steering.run(call, data, places)
    inside = all(0 <= v.data_ptr() - steering.base < ARENA_BYTES or v.numel() == 0 for v in steered)
    same = all(torch.equal(bits(a), bits(b)) for a, b in zip(plain, steered, strict=True))
    return asked == again, inside, same


def main() -> int:
    """Examine a family; 1 if a steered result differs."""
    name = sys.argv[1] if len(sys.argv) > 1 else "resnet50"
    family = get(name)
    model = family.build("tiny")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call = to_call(family.inputs("tiny"))
    parts = capture_step(model, call, Loss(family.loss), optimizer, 1)
    graph = parts.lowering.graph
    written: Counter[str] = Counter()
    calls = {}
    for operator, node in zip(graph.operators, parts.lowering.nodes, strict=True):
        one = signature(node)
        calls[one.text] = one
        written[one.text] += sum(graph.tensors[t].size_bytes for t in operator.writes)
    stand_ins = StandIns(torch.device("cpu"))
    data = {text: stand_ins.arguments(one) for text, one in calls.items()}
    steering = Steering()
    with torch.no_grad():
        seen = {text: examine(steering, one, data[text]) for text, one in calls.items()}
    share = sum(written[text] for text, found in seen.items() if found[1]) / written.total()
    unstable = sum(not found[0] for found in seen.values())
    differing = sum(not found[2] for found in seen.values())
    print(
        f"{name}: {len(seen)} distinct calls, {share:.1%} of the bytes steered, {unstable} "
        f"with changing requests, {differing} with other bits"
    )
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
