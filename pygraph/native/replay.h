// The replay of one graph: the stream that it may run on, its node parameters, its launch and its results.
#pragma once

#include "conversions.h"
#include "host_work.h"
#include "node_parameters.h"
#include "results.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace pygraph {
namespace {

// The stream of the last replay. On any other stream a replay may have to wait, which Python decides.
struct LastStream {
  int64_t* raw;
  uint64_t is_capturing;   // a function of the driver; 0 if there is none
  PyObject* current;       // borrowed from the plan; called with the device's index
  PyObject* device_index;  // borrowed from the plan
};

struct Replay {
  std::string range;                  // its name in profilers
  HostWork host_work;
  NodeParameters parameters;
  Results results;
  uint64_t launch = 0, executable = 0;
  PyObject* launcher = nullptr;       // borrowed from the plan; replays where torch prepares the replay, in Python
  PyObject* ready = nullptr;          // borrowed from the plan; whether the launcher would replay now
  std::vector<int> updated;           // tensors among the arguments whose version counters a replay increments
  std::vector<int> updated_captured;  // captured tensors whose version counters a replay increments
};

// The raw current stream; nothing if it is not that of the last replay, or is being captured.
std::optional<uint64_t> replay_stream(const LastStream& last) {
  PyObject* stream = PyObject_CallOneArg(last.current, last.device_index);
  if (stream == nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  uint64_t raw = PyLong_AsUnsignedLongLongMask(stream);
  Py_DECREF(stream);
  if (PyErr_Occurred()) {
    PyErr_Clear();
    return std::nullopt;
  }
  if (static_cast<int64_t>(raw) != *last.raw) return std::nullopt;
  if (last.is_capturing != 0) {
    int status = 0;
    if (reinterpret_cast<int (*)(uint64_t, int*)>(last.is_capturing)(raw, &status) != 0 || status != 0) {
      return std::nullopt;
    }
  }
  return raw;
}

bool is_true(PyObject* callable) {
  PyObject* answer = checked(PyObject_CallNoArgs(callable));
  Py_DECREF(answer);
  return answer == Py_True;
}

// Launch the graph; false if that was refused. In Python other code may run, as a collection, but the caller has the
// function's lock, and has marked the thread as inside a call.
bool launch(Replay& replay, uint64_t stream) {
  int64_t& synced = *replay.parameters.synced;
  const int64_t before = synced;
  synced = 0;  // until it is launched
  if (replay.launcher != nullptr) {
    if (!is_true(replay.launcher)) return false;
  } else {
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = reinterpret_cast<int (*)(uint64_t, uint64_t)>(replay.launch)(replay.executable, stream);
    Py_END_ALLOW_THREADS
    if (status != 0) return false;
  }
  synced = before;
  return true;
}

// Autograd must see that a tensor that it may have saved has another value now.
void increment_version(c10::TensorImpl* tensor) {
  if (!tensor->is_inference()) tensor->bump_version();
}

// ---- their description ---------------------------------------------------------------------------------------------

LastStream describe_stream(References& references, PyObject* description) {
  references.add(description);  // everything in it is borrowed
  return {
      reinterpret_cast<int64_t*>(to_word(field(description, "last_stream"))),
      to_word(field(description, "is_capturing")), field(description, "current_stream"),
      field(description, "device_index"),
  };
}

Replay describe_replay(const ArgumentSpec& arguments, const std::vector<CapturedTensor>& captured,
                       References& references, PyObject* description) {
  Replay replay;
  references.add(description);  // everything in it is borrowed
  replay.range = to_text(field(description, "range"));
  replay.host_work = describe_host_work(arguments, field(description, "host_work"));
  replay.parameters = describe_parameters(arguments, captured, description);
  replay.results = describe_results(description);
  PyObject* launch = field(description, "launch");  // (function, executable), or (ready, launcher) in Python
  if (PyLong_Check(item(launch, 0))) {
    replay.launch = to_word(item(launch, 0));
    replay.executable = to_word(item(launch, 1));
  } else {
    replay.ready = item(launch, 0);
    replay.launcher = item(launch, 1);
  }
  for (int64_t leaf : to_ints(field(description, "updated"))) {
    replay.updated.push_back(arguments.leaves.at(leaf).index);
  }
  replay.updated_captured = to_small_ints(field(description, "updated_captured"));
  return replay;
}

}  // namespace
}  // namespace pygraph
