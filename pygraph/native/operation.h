// A call that autograd differentiates once, from outside: its forward, and the tensors that it saves.
//
// `pygraph.autograd.native_operation` describes such calls, when Python has served one, and the plans of its forward and
// its backward. Both plans are matched as for any call. What is special is a miss, before anything has run, and Python
// serves it: hooks on saved tensors, derivatives of gradients, missing cotangents, updated tensors.
#pragma once

#include "flat_result.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <optional>
#include <vector>

namespace pygraph {
namespace {

PyObject* no_kwargs = nullptr;  // {}
PyTypeObject* saved_type = nullptr;

// The calls of an engine that one plan serves.
struct PlannedFunction {
  DispatcherObject* dispatcher = nullptr;  // borrowed from the operation
  PlanObject* plan = nullptr;              // borrowed from the operation
  bool makes_outputs = false;              // whether it is a replay whose results are its outputs

  bool is_dead() const { return plan == nullptr || plan->state->dead; }
  PlanState& state() const { return *plan->state; }
};

// A tensor that a backward takes with the strides that it was traced for.
struct StridedArgument {
  int index;
  std::vector<int64_t> sizes, strides;
};

struct BackwardCall {
  PlannedFunction function;
  std::vector<int> cotangents;           // the results whose cotangents it takes
  std::vector<int> absent;               // the results that have a gradient, and no cotangent
  std::vector<int> read;                 // the extra tensors that it reads
  std::vector<int> positions;            // of its arguments among saved tensors, cotangents and numbers
  std::vector<StridedArgument> strided;  // arguments that were not saved as they must be
  std::vector<int> gradients;            // by result of the plan: the tensor whose gradient it is
};

struct OperationState {
  References references;
  Tree arguments;                     // the structure of (args, kwargs)
  std::vector<int> tensors, numbers;  // leaves that are passed
  std::vector<PyObject*> lifted;      // the tensors that are passed after these
  PlannedFunction forward;
  std::vector<int> passed;            // the tensors that the forward takes
  ResultStructure result;             // of the function
  std::vector<int> unread;            // the tensors that the backward does not read
  std::vector<int> returned;          // the results that it reads
  std::vector<PyObject*> watched;     // other tensors that it reads
  std::vector<bool> mask;             // the tensors that have gradients
  PyObject* apply = nullptr;          // applies the autograd.Function
  PyObject* preserve = nullptr;       // copies the state that a second run needs; nullptr if there is none
  PyObject* kind = nullptr;           // what Python needs besides
  std::shared_ptr<const BackwardCall> backward;  // which a thread that runs it holds: Python may plan another
};

struct OperationObject {
  PyObject_HEAD
  OperationState* state;  // owned
};

// The tensors that one call has saved, with their versions. Those that users may refer to are objects, which Python's
// garbage collector sees.
struct SavedObject {
  PyObject_HEAD
  OperationObject* operation;       // owned
  PyObject* tensors;                // owned tuple, of the function; nullptr when freed
  std::vector<at::Tensor>* extras;  // owned: what the forward saves, then results
  PyObject* numbers;                // owned tuple
  PyObject* before;                 // owned: the state before the call, or None
  std::vector<uint32_t>* versions;  // owned: of tensors, extras, and watched tensors
  // owned: the backward of some results that has freed the extra tensors that it reads, or nullptr
  std::shared_ptr<const BackwardCall>* freed_by;
  bool in_python;                   // whether Python has taken over
};

// ---- tensors -------------------------------------------------------------------------------------------------------

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

at::Tensor without_history(const at::Tensor& tensor) { return tensor.requires_grad() ? tensor.detach() : tensor; }

// As `pygraph.autograd.placeholders.alias_with_history`.
PyObject* alias_with_history(PyObject* object) {
  const at::Tensor& tensor = tensor_of(object);
  if (tensor.requires_grad() && tensor.is_leaf()) return Py_NewRef(object);
  at::Tensor alias = tensor.detach();
  if (tensor.requires_grad()) {
    torch::autograd::impl::set_gradient_edge(alias, torch::autograd::impl::gradient_edge(tensor));
  }
  return checked(THPVariable_Wrap(alias));
}

// Call `visit` with the versions of all tensors that a call has saved, or that its backward reads elsewhere.
template <typename Visit>
void visit_versions(const OperationState& state, PyObject* tensors, const std::vector<at::Tensor>& extras, Visit visit) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); ++i) visit(version_of(tensor_of(PyTuple_GET_ITEM(tensors, i))));
  for (const at::Tensor& tensor : extras) visit(version_of(tensor));
  for (PyObject* tensor : state.watched) visit(version_of(tensor_of(tensor)));
}

// ---- a call --------------------------------------------------------------------------------------------------------

// The result of a call that this very plan serves, or `miss`.
PyObject* dispatch_to(const PlannedFunction& function, PyObject* args) {
  DispatcherObject* dispatcher = function.dispatcher;
  if (function.is_dead() || is_inside(dispatcher)) return Py_NewRef(miss);
  Stopwatch watch(*dispatcher->profile);
  Call call;
  PlanObject* plan = find(dispatcher, args, no_kwargs, call);
  if (plan == nullptr) return Py_NewRef(miss);
  Reference owner(reinterpret_cast<PyObject*>(plan));
  if (plan != function.plan) return Py_NewRef(miss);
  watch.lap(Profile::Guards);
  return run_plan(dispatcher, plan, call, args, no_kwargs, watch);
}

// An argument of a plan: a tensor, or a number.
struct Value {
  at::Tensor tensor;
  PyObject* number = nullptr;  // borrowed
};

using Values = std::vector<Value>;

PyObject* as_tuple(const Values& values) {
  Reference args(PyTuple_New(values.size()));
  for (size_t i = 0; i < values.size(); ++i) {
    PyObject* number = values[i].number;
    PyTuple_SET_ITEM(args.get(), i, number != nullptr ? Py_NewRef(number) : checked(THPVariable_Wrap(values[i].tensor)));
  }
  return Py_NewRef(args.get());
}

bool matches_values(PlanState& plan, const Values& values, const Settings& settings, Call& call) {
  const ArgumentSpec& spec = plan.arguments;
  if (plan.dead || !plan.settings.holds(settings) || spec.leaves.size() != values.size()) return false;
  for (size_t i = 0; i < values.size(); ++i) {
    const LeafSpec& leaf = spec.leaves[i];
    if (values[i].number != nullptr) {
      if (!match_leaf(spec, leaf, values[i].number, call)) return false;
    } else if (leaf.kind != LeafSpec::Tensor ||
               !match_tensor(spec.tensors[leaf.index], values[i].tensor.unsafeGetTensorImpl(), call)) {
      return false;
    }
  }
  return is_current(plan, call);
}

// The outputs of a replay with plain tensors as arguments, none of which becomes an object; nothing if it is a miss.
std::optional<std::vector<at::Tensor>> replay_values(const PlannedFunction& function, const Values& values, Call& call) {
  DispatcherObject* dispatcher = function.dispatcher;
  if (function.is_dead() || is_inside(dispatcher) || is_under_mode()) return std::nullopt;
  Reference owner(Py_NewRef(reinterpret_cast<PyObject*>(function.plan)));
  Stopwatch watch(*dispatcher->profile);
  try {
    if (!matches_values(function.state(), values, current_settings(), call)) return std::nullopt;
  } catch (const std::exception&) {  // a tensor that has no address, for one
    return std::nullopt;
  }
  watch.lap(Profile::Guards);
  FunctionLock lock(dispatcher);
  if (!lock.taken || function.is_dead()) return std::nullopt;
  enter_replay(lock, function.plan);
  auto replayed = replay_outputs(function.state(), call, nullptr, watch);
  if (!replayed) return std::nullopt;
  count(dispatcher, function.state());
  return std::move(replayed->outputs);
}

// ---- a forward -----------------------------------------------------------------------------------------------------

// The tensors of the function in a call with these leaves, as a new tuple.
PyObject* tensors_of_call(const OperationState& state, const Borrowed& leaves) {
  PyObject* tensors = checked(PyTuple_New(state.tensors.size() + state.lifted.size()));
  Py_ssize_t next = 0;
  for (int leaf : state.tensors) PyTuple_SET_ITEM(tensors, next++, Py_NewRef(leaves[leaf]));
  for (PyObject* tensor : state.lifted) PyTuple_SET_ITEM(tensors, next++, Py_NewRef(tensor));
  return tensors;
}

PyObject* numbers_of_call(const OperationState& state, const Borrowed& leaves) {
  PyObject* numbers = checked(PyTuple_New(state.numbers.size()));
  for (size_t i = 0; i < state.numbers.size(); ++i) {
    PyTuple_SET_ITEM(numbers, i, Py_NewRef(leaves[state.numbers[i]]));
  }
  return numbers;
}

// The arguments of the forward: some tensors, one without history for each object, and numbers.
Values forward_values(const OperationState& state, PyObject* tensors, PyObject* numbers) {
  Values values;
  values.reserve(state.passed.size() + PyTuple_GET_SIZE(numbers));
  for (size_t i = 0; i < state.passed.size(); ++i) {
    PyObject* tensor = PyTuple_GET_ITEM(tensors, state.passed[i]);
    size_t first = 0;
    while (first < i && PyTuple_GET_ITEM(tensors, state.passed[first]) != tensor) ++first;
    values.push_back({first < i ? values[first].tensor : without_history(tensor_of(tensor))});
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(numbers); ++i) values.push_back({{}, PyTuple_GET_ITEM(numbers, i)});
  return values;
}

// What a forward returns: the function's result, and the tensors that it saves.
struct Found {
  std::optional<FlatResult> result;
  std::vector<at::Tensor> saved;
};

// Run the forward; false if it is a miss.
bool run_forward(const OperationState& state, const Values& values, Found& found) {
  if (!state.forward.makes_outputs) {
    Reference args(as_tuple(values));
    Reference returned(dispatch_to(state.forward, args.get()));  // (result, saved, pullback)
    if (returned.get() == miss) return false;
    for_each(item(returned.get(), 1), [&](PyObject* tensor) { found.saved.push_back(tensor_of(tensor)); });
    found.result.emplace(state.result, item(returned.get(), 0));
    return true;
  }
  Call call;
  const auto outputs = replay_values(state.forward, values, call);
  if (!outputs) return false;
  const Results& results = state.forward.state().replay->results;
  const size_t first = state.result.is_tensor.size(), last = results.leaves.size() - 1;  // which is the pull-back
  found.saved.reserve(last - first);
  for (size_t i = first; i < last; ++i) found.saved.push_back((*outputs)[results.leaves[i].index]);
  found.result.emplace(state.result, results, call, *outputs);
  return true;
}

SavedObject* make_saved(OperationObject* operation, PyObject* tensors, Found& found, PyObject* numbers,
                        PyObject* before) {
  const OperationState& state = *operation->state;
  auto* saved = reinterpret_cast<SavedObject*>(checked(saved_type->tp_alloc(saved_type, 0)));
  Reference owner(reinterpret_cast<PyObject*>(saved));
  saved->operation = reinterpret_cast<OperationObject*>(Py_NewRef(reinterpret_cast<PyObject*>(operation)));
  saved->numbers = Py_NewRef(numbers);
  saved->before = Py_NewRef(before);
  saved->extras = new std::vector<at::Tensor>(std::move(found.saved));
  saved->versions = new std::vector<uint32_t>();
  saved->freed_by = new std::shared_ptr<const BackwardCall>();
  saved->tensors = checked(PyTuple_New(PyTuple_GET_SIZE(tensors)));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); ++i) {
    PyTuple_SET_ITEM(saved->tensors, i, Py_NewRef(PyTuple_GET_ITEM(tensors, i)));
  }
  for (int index : state.unread) {
    PyObject* alias = alias_with_history(PyTuple_GET_ITEM(tensors, index));
    PyTuple_SET_ITEM(saved->tensors, index, alias);
    Py_DECREF(PyTuple_GET_ITEM(tensors, index));
  }
  for (int index : state.returned) {  // aliases: a result refers to what it saves
    saved->extras->push_back(tensor_of(item(found.result->tensors(), index)).detach());
  }
  saved->versions->reserve(state.mask.size() + saved->extras->size() + state.watched.size());
  visit_versions(state, saved->tensors, *saved->extras, [&](uint32_t one) { saved->versions->push_back(one); });
  return reinterpret_cast<SavedObject*>(Py_NewRef(owner.get()));
}

// The results of the autograd.Function, a tuple.
PyObject* apply_function(const OperationState& state, PyObject* saved, PyObject* outputs, PyObject* tensors) {
  const Py_ssize_t arity = PyTuple_GET_SIZE(tensors);
  Reference args(PyTuple_New(2 + arity));
  PyTuple_SET_ITEM(args.get(), 0, Py_NewRef(saved));
  PyTuple_SET_ITEM(args.get(), 1, Py_NewRef(outputs));
  for (Py_ssize_t i = 0; i < arity; ++i) PyTuple_SET_ITEM(args.get(), 2 + i, Py_NewRef(PyTuple_GET_ITEM(tensors, i)));
  return checked(PyObject_Call(state.apply, args.get(), nullptr));
}

// The result of a call, or `miss`.
PyObject* call_operation(OperationObject* self, PyObject* args) {
  const OperationState& state = *self->state;
  if (state.forward.is_dead() || at::SavedTensorDefaultHooks::get_hooks().has_value()) return Py_NewRef(miss);
  Borrowed leaves;
  size_t position = 0;
  if (!collect_leaves(state.arguments, position, args, leaves)) return Py_NewRef(miss);
  Reference tensors(tensors_of_call(state, leaves));
  Reference numbers(numbers_of_call(state, leaves));
  Reference before(state.preserve == nullptr ? Py_NewRef(Py_None) : PyObject_CallOneArg(state.preserve, tensors.get()));
  Found found;
  std::optional<Reference> saved;
  {
    c10::AutoGradMode no_grad(false);
    const Values values = forward_values(state, tensors.get(), numbers.get());
    if (!run_forward(state, values, found)) return Py_NewRef(miss);
    remove_bases(found.result->tensors(), [&](auto visit) {
      for_each(tensors.get(), [&](PyObject* tensor) { visit(tensor_of(tensor)); });
    });
    SavedObject* made = make_saved(self, tensors.get(), found, numbers.get(), before.get());
    saved.emplace(reinterpret_cast<PyObject*>(made));
  }
  Reference results(apply_function(state, saved->get(), found.result->tensors(), tensors.get()));
  return found.result->with(results.get());
}

}  // namespace
}  // namespace pygraph
