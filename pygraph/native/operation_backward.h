// The backward of an operation: the gradients of a call that has saved its tensors.
#pragma once

#include "operation.h"

#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/graph_task.h>

#include <vector>

namespace pygraph {
namespace {

// Whether the gradients that are wanted are those of all tensors that have one; `needed` begins with what is no tensor.
bool needs_all(const OperationState& state, PyObject* needed) {
  if (!PyTuple_Check(needed) || PyTuple_GET_SIZE(needed) != static_cast<Py_ssize_t>(state.mask.size()) + 2) return false;
  for (size_t i = 0; i < state.mask.size(); ++i) {
    if ((PyTuple_GET_ITEM(needed, i + 2) == Py_True) != state.mask[i]) return false;
  }
  return true;
}

// Whether there are the cotangents that a backward takes, and no others.
bool are_given(const BackwardCall& backward, PyObject* cotangents) {
  for (int index : backward.absent) {
    if (item(cotangents, index) != Py_None) return false;
  }
  for (int index : backward.cotangents) {
    if (Py_TYPE(item(cotangents, index)) != reinterpret_cast<PyTypeObject*>(THPVariableClass)) return false;
  }
  return true;
}

// Whether no tensor that a backward may read has been updated since it was saved.
bool are_versions_current(const SavedObject* self, PyObject* tensors, const std::vector<at::Tensor>& extras) {
  const uint32_t* expected = self->versions->data();
  bool current = true;
  visit_versions(*self->operation->state, tensors, extras, [&](uint32_t one) { current = (one == *expected++) && current; });
  return current;
}

// Have an argument be without history and with the strides that it must have; false if it is of another shape.
bool set_strides(at::Tensor& tensor, const StridedArgument& spec) {
  if (tensor.layout() != at::kStrided || !is_equal(tensor.sizes(), spec.sizes)) return false;
  if (is_equal(tensor.strides(), spec.strides) || tensor.numel() == 0) {
    tensor = without_history(tensor);
    return true;
  }
  at::Tensor copy = at::empty_strided(spec.sizes, spec.strides, tensor.options());
  copy.copy_(tensor);
  tensor = std::move(copy);
  return true;
}

// The arguments of the backward; nothing if a tensor is of another shape.
std::optional<Values> backward_values(const BackwardCall& backward, PyObject* tensors, PyObject* cotangents,
                                      const std::vector<at::Tensor>& extras, PyObject* numbers) {
  const size_t first_cotangent = PyTuple_GET_SIZE(tensors);
  const size_t first_extra = first_cotangent + backward.cotangents.size();
  const size_t first_number = first_extra + extras.size();
  Values values;
  values.reserve(backward.positions.size());
  for (const size_t position : backward.positions) {
    if (position < first_cotangent) values.push_back({tensor_of(item(tensors, position))});
    else if (position < first_extra) {
      values.push_back({tensor_of(item(cotangents, backward.cotangents[position - first_cotangent]))});
    } else if (position < first_number) values.push_back({extras[position - first_extra]});
    else values.push_back({{}, item(numbers, position - first_number)});
  }
  for (const StridedArgument& spec : backward.strided) {
    if (!set_strides(values[spec.index].tensor, spec)) return std::nullopt;
  }
  return values;
}

// Put a gradient where the one of the tensor is expected, after two that are no tensors; takes the reference.
void put_gradient(PyObject* gradients, const BackwardCall& backward, size_t number, PyObject* gradient) {
  const int index = 2 + backward.gradients[number];
  PyObject* before = PyTuple_GET_ITEM(gradients, index);
  PyTuple_SET_ITEM(gradients, index, checked(gradient));
  Py_DECREF(before);
}

// Run the backward, and put the gradients into a tuple of None; false if it is a miss.
bool run_backward(const BackwardCall& backward, const Values& values, PyObject* gradients) {
  const size_t count = backward.gradients.size();
  if (!backward.function.makes_outputs) {
    Reference args(as_tuple(values));
    Reference found(dispatch_to(backward.function, args.get()));
    if (found.get() == miss) return false;
    for (size_t i = 0; i < count; ++i) put_gradient(gradients, backward, i, Py_NewRef(item(found.get(), i)));
    return true;
  }
  Call call;
  const auto outputs = replay_values(backward.function, values, call);
  if (!outputs) return false;
  const Results& results = backward.function.state().replay->results;
  for (size_t i = 0; i < count; ++i) put_gradient(gradients, backward, i, wrap(results, i, call, *outputs));
  return true;
}

// Free what a backward has read, as it is not to be repeated: all tensors once all results have been differentiated.
void free_saved(SavedObject* self, const std::shared_ptr<const BackwardCall>& backward) {
  if (!backward->absent.empty()) {
    // In eager, each operation that takes one of the function's tensors saves it for itself.
    for (int index : backward->read) (*self->extras)[index].reset();
    *self->freed_by = backward;
    return;
  }
  Py_CLEAR(self->tensors);
  self->extras->clear();
  Py_SETREF(self->before, Py_NewRef(Py_None));
}

// The gradients of a call, or `miss` if Python must find them.
PyObject* call_backward(SavedObject* self, PyObject* needed, PyObject* cotangents) {
  const OperationState& state = *self->operation->state;
  const bool is_whole = self->tensors != nullptr && *self->freed_by == nullptr;
  if (!state.backward || self->in_python || !is_whole || c10::GradMode::is_enabled()) return Py_NewRef(miss);
  const std::shared_ptr<const BackwardCall> planned = state.backward;
  const BackwardCall& backward = *planned;
  // Another thread may differentiate the call meanwhile, and free them.
  Reference tensors(Py_NewRef(self->tensors));
  const std::vector<at::Tensor> extras = *self->extras;
  if (backward.function.is_dead() || !needs_all(state, needed) || !are_given(backward, cotangents) ||
      !are_versions_current(self, tensors.get(), extras)) {
    return Py_NewRef(miss);
  }
  const auto values = backward_values(backward, tensors.get(), cotangents, extras, self->numbers);
  if (!values) return Py_NewRef(miss);
  Reference gradients(PyTuple_New(2 + state.mask.size()));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(gradients.get()); ++i) {
    PyTuple_SET_ITEM(gradients.get(), i, Py_NewRef(Py_None));
  }
  if (!run_backward(backward, *values, gradients.get())) return Py_NewRef(miss);
  remove_bases(gradients.get(), [&](auto visit) {
    for_each(tensors.get(), [&](PyObject* tensor) { visit(tensor_of(tensor)); });
    for (const at::Tensor& tensor : extras) visit(tensor);
    for (int index : backward.cotangents) visit(tensor_of(item(cotangents, index)));
  });
  if (!torch::autograd::get_current_graph_task_keep_graph()) free_saved(self, planned);
  return Py_NewRef(gradients.get());
}

}  // namespace
}  // namespace pygraph
