// The range of a replay in torch's profiler, which writes it to NVTX as well if asked to (emit_nvtx).
#pragma once

#include <ATen/record_function.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace pygraph {
namespace {

// Open as long as the object lives. Without a profiler that is a look at two lists of callbacks, which are empty.
class ProfilerRange {
 public:
  explicit ProfilerRange(const std::string& name) {
    if (name.empty()) return;  // of a part of a call
    auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (!callbacks) return;
    range_.emplace(std::move(*callbacks));
    range_->before(std::string_view(name));
  }

 private:
  std::optional<at::RecordFunction> range_;
};

}  // namespace
}  // namespace pygraph
