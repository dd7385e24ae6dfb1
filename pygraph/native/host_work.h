// Work of the host that computes numbers before a replay, by a function of Python's: HostWork in
// pygraph/runtime/host_work.py. The numbers follow those that the call has been passed.
#pragma once

#include "arguments.h"
#include "conversions.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/python_variable.h>

#include <vector>

namespace pygraph {
namespace {

struct HostWork {
  PyObject* function = nullptr;  // borrowed from the plan; there may be none
  std::vector<LeafSpec> taken;   // leaves that it takes
  std::vector<bool> real;        // by number
};

// An argument of the function, in a new reference.
PyObject* host_argument(const LeafSpec& leaf, const Call& call) {
  if (leaf.kind == LeafSpec::Tensor) {
    auto tensor = c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(call.tensors[leaf.index]);
    return checked(THPVariable_Wrap(at::Tensor(std::move(tensor))));
  }
  const Number number = call.numbers[leaf.index];
  return checked(leaf.kind == LeafSpec::Float ? PyFloat_FromDouble(number.real) : PyLong_FromLongLong(number.integer));
}

// Collect a number in `call`; false if it is of another type than when the plan was made.
bool add_number(PyObject* object, bool real, Call& call) {
  if (real) return PyFloat_Check(object) && (call.numbers.push_back({.real = PyFloat_AS_DOUBLE(object)}), true);
  return PyLong_Check(object) && read_integer(object, call);
}

// Compute the numbers. False if Python must serve the call, also if it is to meet an error there.
bool compute_numbers(const HostWork& work, Call& call) {
  if (work.function == nullptr) return true;
  c10::SmallVector<PyObject*, 16> arguments;
  PyObject* numbers = nullptr;
  for (const LeafSpec& leaf : work.taken) arguments.push_back(host_argument(leaf, call));
  {
    c10::AutoGradMode no_grad(false);
    numbers = PyObject_Vectorcall(work.function, arguments.data(), arguments.size(), nullptr);
  }
  for (PyObject* argument : arguments) Py_DECREF(argument);
  if (numbers == nullptr) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) throw PythonError();  // an interruption
    PyErr_Clear();
    return false;
  }
  bool fits = PyTuple_GET_SIZE(numbers) == static_cast<Py_ssize_t>(work.real.size());
  for (size_t i = 0; fits && i < work.real.size(); ++i) {
    fits = add_number(PyTuple_GET_ITEM(numbers, i), work.real[i], call);
  }
  Py_DECREF(numbers);
  return fits;
}

// Describe (function, leaves, whether each number is real), or None.
HostWork describe_host_work(const ArgumentSpec& arguments, PyObject* description) {
  HostWork work;
  if (description == Py_None) return work;
  work.function = item(description, 0);
  for (int64_t leaf : to_ints(item(description, 1))) work.taken.push_back(arguments.leaves.at(leaf));
  for_each(item(description, 2), [&](PyObject* real) { work.real.push_back(real == Py_True); });
  return work;
}

}  // namespace
}  // namespace pygraph
