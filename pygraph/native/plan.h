// A plan: one kind of call that is known exactly, how to run it, and the comparison of a call with it.
//
// A plan may be stricter than it must be, never laxer.
#pragma once

#include "arguments.h"
#include "captured.h"
#include "guards.h"
#include "profile.h"
#include "replay.h"
#include "sharing.h"
#include "torch_settings.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

namespace pygraph {
namespace {

PyObject* miss = nullptr;  // the result of a call that no plan serves

enum class Way { Replay, Executable, Function };

struct PlanState {
  References references;
  bool dead = false;                  // its graph is released, or may be at any time
  SettingsGuard settings;
  ArgumentSpec arguments;
  SharingGuard sharing;
  std::vector<CapturedTensor> captured;
  Environment environment;

  Way way;
  PyObject* callable = nullptr;       // borrowed: the executable or the function
  std::optional<LastStream> stream;
  std::optional<Replay> replay;
  std::vector<int> released;          // leaves that nothing reads later: items of the list that is the first argument
  bool is_eager = false;              // whether the function itself runs, which is right whatever the guards say
  Clock::time_point next_comparison;  // of the guards of a function that runs in eager, see `is_environment_current`
  int64_t hits = 0, stamp = 0, patches = 0;
  int64_t most_hits = -1;             // after which Python serves a call; negative for no limit
};

// An object of Python that owns a plan.
struct PlanObject {
  PyObject_HEAD
  PlanState* state;
};

// The guards of many modules must not cost every eager call their time: after some calls, comparing them may take a
// thousandth of the time, and they are compared again within a second, since the function may be a graph by now. Cheap
// ones are always compared.
constexpr int64_t kComparedHits = 32;
constexpr auto kCheap = std::chrono::microseconds(2);
constexpr auto kLongest = std::chrono::milliseconds(1);

bool is_environment_current(PlanState& plan) {
  if (!plan.is_eager || plan.hits < kComparedHits) return plan.environment.is_current();
  const auto begin = Clock::now();
  if (begin < plan.next_comparison) return true;
  const bool current = plan.environment.is_current();
  const auto end = Clock::now();
  const Clock::duration spent = end - begin;
  if (spent > kCheap) plan.next_comparison = end + 1000 * std::min<Clock::duration>(spent, kLongest);
  return current;
}

// Whether all is as it was besides the leaves of a call, which have been matched.
bool is_current(PlanState& plan, const Call& call) {
  if (!plan.sharing.holds(plan.arguments, call)) return false;
  if (!hold(plan.captured)) return false;
  return plan.settings.is_device_current() && is_environment_current(plan);
}

// Whether a call is of the plan's kind; its leaves are collected in `call`.
bool matches(PlanState& plan, PyObject* args, PyObject* kwargs, const Settings& settings, Call& call) {
  if (plan.dead || plan.hits == plan.most_hits || !plan.settings.holds(settings)) return false;
  size_t position = 0;
  if (!match_tree(plan.arguments, position, args, call) || !match_tree(plan.arguments, position, kwargs, call)) {
    return false;
  }
  return is_current(plan, call);
}

}  // namespace
}  // namespace pygraph
