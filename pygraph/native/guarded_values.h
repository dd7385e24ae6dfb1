// Values that a trace baked in, compared with those that are there now. Only CPython is needed here.
#pragma once

#include <Python.h>

namespace pygraph {
namespace {

struct Expected {
  PyObject* key;     // borrowed from the plan
  PyObject* value;   // owned; nullptr if there must be nothing
  bool by_value;     // an equal value of the same immutable type will do
};

// Whether a value is the expected one; `same` is that function of pygraph.guards.values. No exception is left set.
bool is_expected(PyObject* value, Expected& expected, PyObject* same) {
  if (value == expected.value) return true;
  if (!expected.by_value || Py_TYPE(value) != Py_TYPE(expected.value)) return false;
  Py_INCREF(value);
  PyObject* arguments[] = {value, expected.value};
  PyObject* answer = PyObject_Vectorcall(same, arguments, 2, nullptr);
  bool equal = answer == Py_True;
  Py_XDECREF(answer);
  if (answer == nullptr) PyErr_Clear();
  if (!equal) {
    Py_DECREF(value);
    return false;
  }
  Py_SETREF(expected.value, value);  // found by identity the next time
  return true;
}

}  // namespace
}  // namespace pygraph
