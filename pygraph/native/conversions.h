// Python objects as C++ values, and exceptions of one language as exceptions of the other.
//
// Headers of this folder are parts of one translation unit. Their functions lie in an unnamed namespace, so that the
// compiler sees all callers and inlines across headers.
#pragma once

#include <Python.h>
#include <torch/csrc/Exceptions.h>

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

namespace pygraph {
namespace {

struct PythonError {};  // thrown while an exception of Python is set

PyObject* checked(PyObject* object) {
  if (object == nullptr) throw PythonError();
  return object;
}

int64_t to_int(PyObject* object) {
  int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw PythonError();
  return value;
}

// Addresses and handles may use all 64 bits.
uint64_t to_word(PyObject* object) {
  uint64_t value = PyLong_AsUnsignedLongLongMask(object);
  if (value == static_cast<uint64_t>(-1) && PyErr_Occurred()) throw PythonError();
  return value;
}

std::string to_text(PyObject* object) {
  const char* text = PyUnicode_AsUTF8(object);
  if (text == nullptr) throw PythonError();
  return text;
}

PyObject* item(PyObject* tuple, Py_ssize_t index) {  // borrowed
  return checked(PyTuple_GetItem(tuple, index));
}

PyObject* field(PyObject* description, const char* name) {  // borrowed
  PyObject* value = PyDict_GetItemString(description, name);
  if (value == nullptr) {
    PyErr_SetString(PyExc_KeyError, name);
    throw PythonError();
  }
  return value;
}

bool flag(PyObject* description, const char* name) { return field(description, name) == Py_True; }

template <typename Visit>
void for_each(PyObject* tuple, Visit visit) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); ++i) visit(item(tuple, i));
  if (PyErr_Occurred()) throw PythonError();  // it is no tuple
}

std::vector<int64_t> to_ints(PyObject* tuple) {
  std::vector<int64_t> values;
  for_each(tuple, [&](PyObject* value) { values.push_back(to_int(value)); });
  return values;
}

std::vector<int> to_small_ints(PyObject* tuple) {
  std::vector<int> values;
  for_each(tuple, [&](PyObject* value) { values.push_back(static_cast<int>(to_int(value))); });
  return values;
}

// Objects that a plan refers to. All other pointers of the plan to them are borrowed.
struct References {
  PyObject* list = nullptr;  // owned; made with the plan

  void add(PyObject* object) {
    if (list == nullptr) list = checked(PyList_New(0));
    if (PyList_Append(list, object) < 0) throw PythonError();
  }
};

// Run `body`, and set its C++ exception as one of Python.
template <typename Body>
PyObject* translate_exceptions(Body body) {
  try {
    return body();
  } catch (const PythonError&) {
    return nullptr;
  } catch (python_error& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

}  // namespace
}  // namespace pygraph
