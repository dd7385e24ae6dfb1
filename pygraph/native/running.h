// Running a call that a plan matches: as a replay, through the executable in Python, or as the function itself.
#pragma once

#include "plan.h"
#include "profiler_range.h"

#include <c10/core/GradMode.h>

namespace pygraph {
namespace {

// Release arguments that nothing reads any more, so that results can have their memory. The caller cannot make the same
// call again: from here on it ends in a result or in an error.
void release_arguments(const PlanState& plan, Call& call, PyObject* args) {
  if (call.gradients != nullptr) return;  // which `replace_gradients` takes
  // In reverse: an allocator that hands out first what came back last gives a result the same address again.
  for (auto index = plan.released.rbegin(); index != plan.released.rend(); ++index) {
    Py_SETREF(call.leaves[*index], Py_NewRef(Py_None));
    if (PyList_SetItem(PyTuple_GET_ITEM(args, 0), *index, Py_NewRef(Py_None)) < 0) throw PythonError();
  }
}

// Whether the gradients are those that the call has been matched with: Python code may have run meanwhile.
bool are_gradients_current(const Call& call) {
  for (size_t i = 0; i < call.found.size(); ++i) {
    if (!call.found[i].is_same((*call.gradients->tensors)[i].gradient())) return false;
  }
  return true;
}

// Take gradients that nothing reads any more from their tensors; returns those whose memory the next ones can have, by
// that memory, and frees the others.
std::vector<at::Tensor> replace_gradients(const PlanState& plan, Call& call, uint64_t stream) {
  if (plan.released.empty()) return {};
  const Results& results = plan.replay->results;
  const bool filled = fills_memory();
  std::vector<at::Tensor> replaced(results.memory.size());
  for (int index : plan.released) (*call.gradients->tensors)[index].gradient().reset();
  for (auto index = plan.released.rbegin(); index != plan.released.rend(); ++index) {
    const Differentiated& tensor = (*call.gradients->tensors)[*index];
    at::Tensor old = std::move(call.found[*index]);  // freed here, if it does not stay
    const int its = results.leaves[*index].memory;
    if (filled || its < 0 || !tensor.has_made(old, stream)) continue;
    if (is_unshared(old, results.memory[its]) && fits_as_result(old, results.memory[its])) replaced[its] = std::move(old);
  }
  return replaced;
}

// The memory of the results; nothing if there is none left, and Python is to meet the same error and raise it.
std::optional<std::vector<at::Tensor>> try_allocate(
    PlanState& plan, uint64_t stream, std::vector<at::Tensor>& replaced) {
  try {
    return allocate(plan.replay->results, stream, replaced);
  } catch (const std::exception&) {
    if (!plan.released.empty()) {
      torch::translate_exception_to_python(std::current_exception());
      throw PythonError();
    }
    PyErr_Clear();
    return std::nullopt;
  }
}

struct Replayed {
  std::vector<at::Tensor> outputs;
  uint64_t stream;
};

// The outputs, or nothing, without an exception, if Python must serve the call. From the first patch to the launch no
// Python code runs, so that nothing can come between.
std::optional<Replayed> replay_outputs(PlanState& plan, Call& call, PyObject* args, Stopwatch& watch) {
  Replay& replay = *plan.replay;
  auto stream = replay_stream(*plan.stream);
  if (!stream) return std::nullopt;
  if (replay.ready != nullptr && (!is_true(replay.ready) || plan.dead)) return std::nullopt;
  if (!compute_numbers(replay.host_work, call) || plan.dead) return std::nullopt;
  watch.lap(Profile::Lock);
  const bool takes_gradients = call.gradients != nullptr;
  if (takes_gradients && !(are_gradients_current(call) && begin_with_gradients(replay.results, call.found.size()))) {
    return std::nullopt;
  }
  const ProfilerRange range(replay.range);
  c10::AutoGradMode no_grad(false);
  release_arguments(plan, call, args);
  std::vector<at::Tensor> replaced;
  if (takes_gradients) replaced = replace_gradients(plan, call, *stream);
  auto refused = [&](const char* problem) -> std::optional<Replayed> {
    if (plan.released.empty()) return std::nullopt;
    PyErr_Format(PyExc_RuntimeError, "pygraph: %s, after the call had released tensors that it replaces", problem);
    throw PythonError();
  };
  const auto memory = try_allocate(plan, *stream, replaced);
  if (!memory) return std::nullopt;
  // A device whose allocator is written in Python may do anything.
  if (plan.dead) return refused("the graph was released while memory for its results was allocated");
  watch.lap(Profile::Allocation);
  if (!patch(replay.parameters, call, plan.captured, *memory, plan.patches)) {
    return refused("the driver refused to update a node of the graph");
  }
  watch.lap(Profile::Patches);
  if (!launch(replay, *stream)) return refused("the graph could not be launched");
  watch.lap(Profile::Launch);
  for (int tensor : replay.updated) increment_version(call.tensors[tensor]);
  for (int index : replay.updated_captured) increment_version(plan.captured[index].now());
  return Replayed{outputs_in(replay.results, *memory), *stream};
}

// The result, or nullptr without an exception if Python must serve the call.
PyObject* run_replay(PlanState& plan, Call& call, PyObject* args, Stopwatch& watch) {
  const auto replayed = replay_outputs(plan, call, args, watch);
  if (!replayed) return nullptr;
  const Results& results = plan.replay->results;
  if (call.gradients == nullptr) return assemble(results, call, replayed->outputs);
  store_gradients(results, call, replayed->outputs, replayed->stream);
  return assemble_rest(results, call, replayed->outputs);
}

PyObject* call_executable(PlanState& plan, const Call& call) {
  PyObject* leaves = checked(PyList_New(call.leaves.size()));
  for (size_t i = 0; i < call.leaves.size(); ++i) PyList_SET_ITEM(leaves, i, Py_NewRef(call.leaves[i]));
  PyObject* result = PyObject_CallOneArg(plan.callable, leaves);
  Py_DECREF(leaves);
  return checked(result);
}

}  // namespace
}  // namespace pygraph
