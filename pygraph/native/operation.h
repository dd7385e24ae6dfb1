// The Python types `Operation` and `SavedTensors`: a call that autograd differentiates once, from outside, natively.
//
// `pygraph.autograd.native_operation` makes an `Operation` of a call that the path in Python has served, and the plans
// of its forward and its backward. Both plans are matched as for any call; what is special is a miss, before anything
// has run, and Python serves it: hooks on saved tensors, derivatives of gradients, missing gradients, updated tensors.
#pragma once

#include "dispatcher.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_map>
#include <vector>

namespace pygraph {
namespace {

PyObject* no_kwargs = nullptr;  // {}
PyTypeObject* saved_type = nullptr;

// The calls of an engine that one plan serves.
struct PlannedFunction {
  DispatcherObject* dispatcher = nullptr;  // borrowed from the operation
  PlanObject* plan = nullptr;              // borrowed from the operation

  bool is_dead() const { return plan == nullptr || plan->state->dead; }
};

// A tensor that a backward takes with the strides that it was traced for.
struct StridedArgument {
  int index;
  std::vector<int64_t> sizes, strides;
};

struct BackwardCall {
  PlannedFunction function;
  std::vector<int> cotangents;           // the results whose cotangents it takes
  std::vector<int> positions;            // of its arguments among saved tensors, cotangents and numbers
  std::vector<StridedArgument> strided;  // arguments that were not saved as they must be
  std::vector<int> gradients;            // by result of the function: the tensor whose gradient it is
};

struct OperationState {
  References references;
  Tree arguments;                     // the structure of (args, kwargs)
  std::vector<int> tensors, numbers;  // leaves that are passed
  std::vector<PyObject*> lifted;      // the tensors that are passed after these
  PlannedFunction forward;
  std::vector<int> passed;            // the tensors that the forward takes
  std::vector<int> unread;            // the tensors that the backward does not read
  std::vector<int> returned;          // the results that it reads
  std::vector<PyObject*> watched;     // other tensors that it reads
  std::vector<bool> mask;             // the tensors that have gradients
  Tree result;                        // of the function
  std::vector<bool> is_tensor;        // by leaf of that
  PyObject* flatten = nullptr;        // returns the tensors of a result that is no such tree, and its spec
  PyObject* apply = nullptr;          // applies the autograd.Function
  PyObject* preserve = nullptr;       // copies the state that a second run needs; nullptr if there is none
  PyObject* context = nullptr;        // what Python needs besides
  std::optional<BackwardCall> backward;
};

struct OperationObject {
  PyObject_HEAD
  OperationState* state;  // owned
};

// The tensors that one call has saved, with their versions.
struct SavedObject {
  PyObject_HEAD
  OperationObject* operation;       // owned
  PyObject* row;                    // owned tuple: tensors of the function, saved ones, results; nullptr when freed
  PyObject* numbers;                // owned tuple
  PyObject* before;                 // owned: the state before the call, or None
  std::vector<uint32_t>* versions;  // owned: of the row, then of watched tensors
  bool in_python;                   // whether Python has taken over
};

// ---- tensors -------------------------------------------------------------------------------------------------------

using Owned = c10::SmallVector<PyObject*, 64>;

const at::Tensor& tensor_of(PyObject* object) { return THPVariable_Unpack(object); }

uint32_t version_of(PyObject* object) {
  return tensor_of(object).unsafeGetTensorImpl()->version_counter().current_version();
}

PyObject* detached(PyObject* object) {
  const at::Tensor& tensor = tensor_of(object);
  return tensor.requires_grad() ? checked(THPVariable_Wrap(tensor.detach())) : Py_NewRef(object);
}

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

// A reference that is dropped at the end of a scope.
class Reference {
 public:
  explicit Reference(PyObject* object) : object_(checked(object)) {}
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  ~Reference() { Py_DECREF(object_); }
  PyObject* get() const { return object_; }

 private:
  PyObject* object_;
};

// As `pygraph.autograd.input_aliases.without_bases`: of a tuple of new tensors and None, replace the views that share
// memory with no other tensor. `operands` are tuples.
void remove_bases(PyObject* results, std::initializer_list<PyObject*> operands) {
  auto each = [](PyObject* row, auto visit) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(row); ++i) {
      PyObject* object = PyTuple_GET_ITEM(row, i);
      if (THPVariable_Check(object)) visit(i, tensor_of(object));
    }
  };
  bool any = false;
  each(results, [&](Py_ssize_t, const at::Tensor& tensor) { any = any || tensor.is_view(); });
  if (!any) return;
  std::unordered_map<const c10::StorageImpl*, int> count;
  auto add = [&](Py_ssize_t, const at::Tensor& tensor) {
    if (tensor.has_storage()) ++count[tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()];
  };
  each(results, add);
  for (PyObject* row : operands) each(row, add);
  each(results, [&](Py_ssize_t index, const at::Tensor& tensor) {
    if (!tensor.is_view()) return;
    if (count[tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()] != 1) return;
    PyObject* plain = checked(THPVariable_Wrap(tensor.variable_data()));
    Py_DECREF(PyTuple_GET_ITEM(results, index));
    PyTuple_SET_ITEM(results, index, plain);
  });
}

// ---- structures ----------------------------------------------------------------------------------------------------

// Append the leaves of an object, borrowed; false if its structure is another.
bool collect_leaves(const Tree& tree, size_t& position, PyObject* object, Owned& leaves) {
  const TreeNode& node = tree[position++];
  switch (node.kind) {
    case TreeNode::Leaf:
      leaves.push_back(object);
      return true;
    case TreeNode::Tuple:
    case TreeNode::List:
      if (Py_TYPE(object) != (node.kind == TreeNode::Tuple ? &PyTuple_Type : &PyList_Type)) return false;
      if (PySequence_Fast_GET_SIZE(object) != node.size) return false;
      for (Py_ssize_t i = 0; i < node.size; ++i) {
        if (!collect_leaves(tree, position, PySequence_Fast_GET_ITEM(object, i), leaves)) return false;
      }
      return true;
    case TreeNode::Dict: {
      if (Py_TYPE(object) != &PyDict_Type || PyDict_GET_SIZE(object) != node.size) return false;
      Py_ssize_t cursor = 0;
      PyObject *key, *value;
      while (PyDict_Next(object, &cursor, &key, &value)) {
        if (!collect_leaves(tree, position, value, leaves)) return false;
      }
      return true;
    }
  }
  return false;
}

// A result of the function: its tensors, and the other leaves, as numbers, which may be others in each call.
class FlatResult {
 public:
  FlatResult(const OperationState& state, PyObject* result) : state_(state) {
    if (state.flatten != nullptr) {
      Reference pair(PyObject_CallOneArg(state.flatten, result));  // (list of tensors, spec)
      spec_.emplace(Py_NewRef(item(pair.get(), 1)));
      tensors_.emplace(PyList_AsTuple(item(pair.get(), 0)));
      return;
    }
    result_.emplace(Py_NewRef(result));
    size_t position = 0;
    if (!collect_leaves(state.result, position, result, leaves_)) {
      PyErr_SetString(PyExc_RuntimeError, "pygraph: a graph's result has another structure than before");
      throw PythonError();
    }
    tensors_.emplace(PyTuple_New(std::count(state.is_tensor.begin(), state.is_tensor.end(), true)));
    Py_ssize_t next = 0;
    for (size_t i = 0; i < leaves_.size(); ++i) {
      if (state.is_tensor[i]) PyTuple_SET_ITEM(tensors_->get(), next++, Py_NewRef(leaves_[i]));
    }
  }

  PyObject* tensors() const { return tensors_->get(); }  // borrowed, a tuple

  // The result with other tensors, a tuple.
  PyObject* with(PyObject* tensors) const {
    if (spec_) return checked(PyObject_CallMethod(spec_->get(), "unflatten", "(O)", tensors));
    OwnedObjects leaves(leaves_.size());
    Py_ssize_t next = 0;
    for (size_t i = 0; i < leaves_.size(); ++i) {
      leaves.objects[i] = Py_NewRef(state_.is_tensor[i] ? item(tensors, next++) : leaves_[i]);
    }
    size_t node = 0, leaf = 0;
    return checked(unflatten(state_.result, node, leaves.objects, leaf));
  }

 private:
  const OperationState& state_;
  std::optional<Reference> result_, spec_, tensors_;
  Owned leaves_;  // borrowed from the result
};

// ---- forward -------------------------------------------------------------------------------------------------------

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

// The tensors of the function in a call with these leaves, as a new tuple.
PyObject* tensors_of_call(const OperationState& state, const Owned& leaves) {
  PyObject* row = checked(PyTuple_New(state.tensors.size() + state.lifted.size()));
  Py_ssize_t next = 0;
  for (int leaf : state.tensors) PyTuple_SET_ITEM(row, next++, Py_NewRef(leaves[leaf]));
  for (PyObject* tensor : state.lifted) PyTuple_SET_ITEM(row, next++, Py_NewRef(tensor));
  return row;
}

PyObject* numbers_of_call(const OperationState& state, const Owned& leaves) {
  PyObject* numbers = checked(PyTuple_New(state.numbers.size()));
  for (size_t i = 0; i < state.numbers.size(); ++i) {
    PyTuple_SET_ITEM(numbers, i, Py_NewRef(leaves[state.numbers[i]]));
  }
  return numbers;
}

// The arguments of the forward: some tensors, one without history for each object, and numbers.
PyObject* forward_arguments(const OperationState& state, PyObject* tensors, PyObject* numbers) {
  const size_t count = state.passed.size();
  Reference args(PyTuple_New(count + PyTuple_GET_SIZE(numbers)));
  for (size_t i = 0; i < count; ++i) {
    PyObject* tensor = PyTuple_GET_ITEM(tensors, state.passed[i]);
    PyObject* plain = nullptr;
    for (size_t j = 0; j < i && plain == nullptr; ++j) {
      if (PyTuple_GET_ITEM(tensors, state.passed[j]) == tensor) plain = Py_NewRef(PyTuple_GET_ITEM(args.get(), j));
    }
    PyTuple_SET_ITEM(args.get(), i, plain != nullptr ? plain : detached(tensor));
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(numbers); ++i) {
    PyTuple_SET_ITEM(args.get(), count + i, Py_NewRef(PyTuple_GET_ITEM(numbers, i)));
  }
  return Py_NewRef(args.get());
}

// The tensors that a call saves: those of the function, those that the forward has saved, and results.
PyObject* saved_row(const OperationState& state, PyObject* tensors, PyObject* saved, PyObject* outputs) {
  const Py_ssize_t arity = PyTuple_GET_SIZE(tensors), count = PyTuple_GET_SIZE(saved);
  Reference row(PyTuple_New(arity + count + state.returned.size()));
  for (Py_ssize_t i = 0; i < arity; ++i) PyTuple_SET_ITEM(row.get(), i, Py_NewRef(PyTuple_GET_ITEM(tensors, i)));
  for (int index : state.unread) {
    PyObject* alias = alias_with_history(PyTuple_GET_ITEM(tensors, index));
    Py_DECREF(PyTuple_GET_ITEM(row.get(), index));
    PyTuple_SET_ITEM(row.get(), index, alias);
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyTuple_SET_ITEM(row.get(), arity + i, Py_NewRef(PyTuple_GET_ITEM(saved, i)));
  }
  for (size_t i = 0; i < state.returned.size(); ++i) {  // aliases: a result refers to what it saves
    const at::Tensor& output = tensor_of(item(outputs, state.returned[i]));
    PyTuple_SET_ITEM(row.get(), arity + count + i, checked(THPVariable_Wrap(output.detach())));
  }
  return Py_NewRef(row.get());
}

std::vector<uint32_t>* current_versions(const OperationState& state, PyObject* row) {
  auto* versions = new std::vector<uint32_t>();
  versions->reserve(PyTuple_GET_SIZE(row) + state.watched.size());
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(row); ++i) versions->push_back(version_of(PyTuple_GET_ITEM(row, i)));
  for (PyObject* tensor : state.watched) versions->push_back(version_of(tensor));
  return versions;
}

PyObject* make_saved(OperationObject* operation, PyObject* row, PyObject* numbers, PyObject* before) {
  auto* saved = reinterpret_cast<SavedObject*>(checked(saved_type->tp_alloc(saved_type, 0)));
  saved->operation = reinterpret_cast<OperationObject*>(Py_NewRef(reinterpret_cast<PyObject*>(operation)));
  saved->row = Py_NewRef(row);
  saved->numbers = Py_NewRef(numbers);
  saved->before = Py_NewRef(before);
  saved->versions = current_versions(*operation->state, row);
  saved->in_python = false;
  return reinterpret_cast<PyObject*>(saved);
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

PyObject* call_operation(OperationObject* self, PyObject* args) {
  const OperationState& state = *self->state;
  if (state.forward.is_dead() || at::SavedTensorDefaultHooks::get_hooks().has_value()) return Py_NewRef(miss);
  Owned leaves;
  size_t position = 0;
  if (!collect_leaves(state.arguments, position, args, leaves)) return Py_NewRef(miss);
  Reference tensors(tensors_of_call(state, leaves));
  Reference numbers(numbers_of_call(state, leaves));
  Reference before(state.preserve == nullptr ? Py_NewRef(Py_None) : PyObject_CallOneArg(state.preserve, tensors.get()));
  std::optional<Reference> saved;
  std::optional<FlatResult> result;
  {
    c10::AutoGradMode no_grad(false);
    Reference given(forward_arguments(state, tensors.get(), numbers.get()));
    Reference found(dispatch_to(state.forward, given.get()));
    if (found.get() == miss) return Py_NewRef(miss);
    result.emplace(state, item(found.get(), 0));  // of (result, saved, pullback)
    remove_bases(result->tensors(), {tensors.get()});
    Reference row(saved_row(state, tensors.get(), item(found.get(), 1), result->tensors()));
    saved.emplace(make_saved(self, row.get(), numbers.get(), before.get()));
  }
  Reference results(apply_function(state, saved->get(), result->tensors(), tensors.get()));
  return result->with(results.get());
}

// ---- backward ------------------------------------------------------------------------------------------------------

// Whether the gradients that are wanted are those of all tensors that have one; `needed` begins with what is no tensor.
bool needs_all(const OperationState& state, PyObject* needed) {
  if (!PyTuple_Check(needed) || PyTuple_GET_SIZE(needed) != static_cast<Py_ssize_t>(state.mask.size()) + 2) return false;
  for (size_t i = 0; i < state.mask.size(); ++i) {
    if ((PyTuple_GET_ITEM(needed, i + 2) == Py_True) != state.mask[i]) return false;
  }
  return true;
}

bool are_given(const BackwardCall& backward, PyObject* cotangents) {
  for (int index : backward.cotangents) {
    PyObject* cotangent = PyTuple_GetItem(cotangents, index);
    if (cotangent == nullptr) throw PythonError();
    if (Py_TYPE(cotangent) != reinterpret_cast<PyTypeObject*>(THPVariableClass)) return false;
  }
  return true;
}

// Whether no tensor that a backward may read has been updated since it was saved.
bool are_versions_current(const SavedObject* self, PyObject* row) {
  const std::vector<uint32_t>& versions = *self->versions;
  size_t next = 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(row); ++i) {
    if (version_of(PyTuple_GET_ITEM(row, i)) != versions[next++]) return false;
  }
  for (PyObject* tensor : self->operation->state->watched) {
    if (version_of(tensor) != versions[next++]) return false;
  }
  return true;
}

// A tensor without history and with these strides; nullptr if it is of another shape.
PyObject* with_strides(PyObject* object, const StridedArgument& spec) {
  const at::Tensor& tensor = tensor_of(object);
  if (tensor.layout() != at::kStrided || !is_equal(tensor.sizes(), spec.sizes)) return nullptr;
  if (is_equal(tensor.strides(), spec.strides) || tensor.numel() == 0) return detached(object);
  at::Tensor copy = at::empty_strided(spec.sizes, spec.strides, tensor.options());
  copy.copy_(tensor);
  return checked(THPVariable_Wrap(copy));
}

// The arguments of the backward; nullptr if a tensor is of another shape.
PyObject* backward_arguments(const BackwardCall& backward, size_t arity, PyObject* row, PyObject* cotangents,
                             PyObject* numbers) {
  const size_t first_extra = arity + backward.cotangents.size();
  const size_t first_number = first_extra + PyTuple_GET_SIZE(row) - arity;
  Reference args(PyTuple_New(backward.positions.size()));
  for (size_t i = 0; i < backward.positions.size(); ++i) {
    const size_t position = backward.positions[i];
    PyObject* value = position < arity ? item(row, position)
        : position < first_extra       ? item(cotangents, backward.cotangents[position - arity])
        : position < first_number      ? item(row, position - backward.cotangents.size())
                                       : item(numbers, position - first_number);
    PyTuple_SET_ITEM(args.get(), i, Py_NewRef(value));
  }
  for (const StridedArgument& spec : backward.strided) {
    PyObject* before = PyTuple_GET_ITEM(args.get(), spec.index);
    PyObject* value = with_strides(before, spec);
    if (value == nullptr) return nullptr;
    PyTuple_SET_ITEM(args.get(), spec.index, value);
    Py_DECREF(before);
  }
  return Py_NewRef(args.get());
}

// The gradients of the function's arguments, after two that are no tensors.
PyObject* gradients_of(const OperationState& state, const BackwardCall& backward, PyObject* found) {
  Reference gradients(PyTuple_New(2 + state.mask.size()));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(gradients.get()); ++i) {
    PyTuple_SET_ITEM(gradients.get(), i, Py_NewRef(Py_None));
  }
  for (size_t i = 0; i < backward.gradients.size(); ++i) {
    const int index = 2 + backward.gradients[i];
    Py_DECREF(PyTuple_GET_ITEM(gradients.get(), index));
    PyTuple_SET_ITEM(gradients.get(), index, Py_NewRef(item(found, i)));
  }
  return Py_NewRef(gradients.get());
}

// The gradients of a call, or `miss` if Python must find them.
PyObject* call_backward(SavedObject* self, PyObject* needed, PyObject* cotangents) {
  const OperationState& state = *self->operation->state;
  if (!state.backward || self->in_python || self->row == nullptr || c10::GradMode::is_enabled()) return Py_NewRef(miss);
  const BackwardCall& backward = *state.backward;
  Reference row(Py_NewRef(self->row));  // another thread may differentiate the call meanwhile, and free it
  if (backward.function.is_dead() || !needs_all(state, needed) || !are_given(backward, cotangents) ||
      !are_versions_current(self, row.get())) {
    return Py_NewRef(miss);
  }
  PyObject* arguments = backward_arguments(backward, state.mask.size(), row.get(), cotangents, self->numbers);
  if (arguments == nullptr) return Py_NewRef(miss);
  Reference args(arguments);
  Reference found(dispatch_to(backward.function, args.get()));
  if (found.get() == miss) return Py_NewRef(miss);
  Reference gradients(gradients_of(state, backward, found.get()));
  remove_bases(gradients.get(), {row.get(), cotangents});
  if (!torch::autograd::get_current_graph_task_keep_graph()) {
    Py_CLEAR(self->row);
    Py_SETREF(self->before, Py_NewRef(Py_None));
  }
  return Py_NewRef(gradients.get());
}

}  // namespace
}  // namespace pygraph
