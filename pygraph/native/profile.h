// Times of the parts of a call, measured on request only.
#pragma once

#include <array>
#include <chrono>

namespace pygraph {
namespace {

using Clock = std::chrono::steady_clock;

struct Profile {
  enum Part { Guards, Lock, Allocation, Patches, Launch };

  bool on = false;
  std::array<double, 5> nanoseconds{};  // by part
};

// Adds the time since the last lap to a part.
class Stopwatch {
 public:
  explicit Stopwatch(Profile& profile) : profile_(profile) {
    if (profile.on) last_ = Clock::now();
  }

  void lap(Profile::Part part) {
    if (!profile_.on) return;
    auto now = Clock::now();
    profile_.nanoseconds[part] += std::chrono::duration<double, std::nano>(now - last_).count();
    last_ = now;
  }

 private:
  Profile& profile_;
  Clock::time_point last_;
};

}  // namespace
}  // namespace pygraph
