// Guards on Python's state: whether dicts, containers and code are still as when a trace read them.
#pragma once

#include "code_guards.h"
#include "container_guards.h"
#include "conversions.h"
#include "dict_guards.h"

#include <Python.h>

#include <vector>

namespace pygraph {
namespace {

class Environment {
 public:
  DictGuards dicts;
  ContainerGuards containers;
  CodeGuards code;
  PyObject* same = nullptr;  // owned: same(value, expected) of pygraph.guards.values

  ~Environment() { clear(); }

  // Start to watch; every guard is compared at the first check.
  void arm() {
    code.arm();
    dicts.arm();
  }

  // Whether all guards hold. No exception is left set.
  bool is_current() { return dicts.hold(same) && code.hold() && containers.hold(same); }

  int traverse(visitproc visit, void* arg) {
    if (int stop = dicts.traverse(visit, arg)) return stop;
    if (int stop = containers.traverse(visit, arg)) return stop;
    if (int stop = code.traverse(visit, arg)) return stop;
    Py_VISIT(same);
    return 0;
  }

  void clear() {
    // Releasing an object may run any code, so the guards are removed first.
    std::vector<PyObject*> removed;
    dicts.clear(removed);
    containers.clear(removed);
    code.clear(removed);
    removed.push_back(same);
    same = nullptr;
    for (PyObject* object : removed) Py_XDECREF(object);
  }
};

// ---- their description, see pygraph/guards/native_description.py ---------------------------------------------------

// An expected value: (key, value, by_value), or (key,) if there must be nothing.
Expected describe_expected(References& references, PyObject* entry) {
  PyObject* key = item(entry, 0);
  references.add(key);
  if (PyTuple_Size(entry) == 1) return {key, nullptr, false};
  PyObject* value = item(entry, 1);
  return {key, Py_NewRef(value), item(entry, 2) == Py_True};
}

void describe_dict(Environment& environment, References& references, PyObject* description) {
  auto* guard = new DictGuard();
  guard->dict = Py_NewRef(item(description, 0));
  environment.dicts.all.push_back(guard);
  guard->length = to_int(item(description, 1));
  for_each(item(description, 2), [&](PyObject* entry) {
    guard->entries.push_back(describe_expected(references, entry));
  });
  guard->ordered = item(description, 3) == Py_True;
  guard->module = item(description, 4) == Py_True;
}

void describe_list(Environment& environment, References& references, PyObject* description) {
  environment.containers.lists.emplace_back();
  ListGuard& guard = environment.containers.lists.back();
  guard.list = Py_NewRef(item(description, 0));
  guard.length = to_int(item(description, 1));
  for_each(item(description, 2), [&](PyObject* entry) {
    guard.entries.emplace_back(to_int(item(entry, 0)), describe_expected(references, entry));
  });
}

void describe_set(Environment& environment, References& references, PyObject* description) {
  environment.containers.sets.push_back({Py_NewRef(item(description, 0)), {}});
  SetGuard& guard = environment.containers.sets.back();
  for_each(item(description, 1), [&](PyObject* member) {
    guard.members.push_back(describe_expected(references, member));
  });
}

PyTypeObject* to_type(PyObject* object) {
  if (!PyType_Check(object)) {
    PyErr_SetString(PyExc_TypeError, "expected a class");
    throw PythonError();
  }
  return reinterpret_cast<PyTypeObject*>(object);
}

void describe_function(CodeGuards& code, PyObject* description) {
  auto part = [&](Py_ssize_t index) {
    PyObject* object = item(description, index);
    return object == Py_None ? nullptr : object;
  };
  PyObject* function = item(description, 0);
  if (!PyFunction_Check(function)) {
    PyErr_SetString(PyExc_TypeError, "expected a function");
    throw PythonError();
  }
  code.add_function(function, item(description, 1), part(2), part(3));
}

// (types, functions, classes of objects, partial functions, classes_hold)
void describe_code(CodeGuards& code, PyObject* description) {
  for_each(item(description, 0), [&](PyObject* object) {
    PyTypeObject* type = to_type(object);
    Py_INCREF(type);
    code.types.push_back({type});
  });
  for_each(item(description, 1), [&](PyObject* function) { describe_function(code, function); });
  for_each(item(description, 2), [&](PyObject* entry) { code.add_class(item(entry, 0), to_type(item(entry, 1))); });
  for_each(item(description, 3), [&](PyObject* entry) {
    code.partials.push_back({Py_NewRef(item(entry, 0)), Py_NewRef(item(entry, 1))});
  });
  code.classes_hold = Py_NewRef(item(description, 4));
}

// (dicts, lists, cells, items, same, sets, code, attributes, hooks)
void describe_environment(Environment& environment, References& references, PyObject* description) {
  environment.same = Py_NewRef(item(description, 4));
  for_each(item(description, 0), [&](PyObject* dict) { describe_dict(environment, references, dict); });
  for_each(item(description, 1), [&](PyObject* list) { describe_list(environment, references, list); });
  for_each(item(description, 2), [&](PyObject* cell) {
    environment.containers.cells.push_back({Py_NewRef(item(cell, 0)), describe_expected(references, cell)});
  });
  for_each(item(description, 3), [&](PyObject* entry) {
    environment.containers.items.push_back(
        {Py_NewRef(item(entry, 0)), describe_expected(references, item(entry, 1))});
  });
  for_each(item(description, 5), [&](PyObject* set) { describe_set(environment, references, set); });
  for_each(item(description, 7), [&](PyObject* entry) {
    environment.code.add_attributes(item(entry, 0), item(entry, 1));
  });
  for_each(item(description, 8), [&](PyObject* entry) {
    environment.code.add_hooks(item(entry, 0), item(entry, 1), item(entry, 2));
  });
  describe_code(environment.code, item(description, 6));
}

}  // namespace
}  // namespace pygraph
