// Guards on lists, closed-over variables, sets, and items of other containers, which are compared at every call.
#pragma once

#include "guarded_values.h"

#include <Python.h>

#include <utility>
#include <vector>

namespace pygraph {
namespace {

struct ListGuard {
  PyObject* list = nullptr;   // owned
  Py_ssize_t length = -1;     // not guarded if negative
  std::vector<std::pair<Py_ssize_t, Expected>> entries;

  bool holds(PyObject* same) {
    if (length >= 0 && PyList_GET_SIZE(list) != length) return false;
    for (auto& [index, expected] : entries) {
      if (index >= PyList_GET_SIZE(list)) return false;
      if (!is_expected(PyList_GET_ITEM(list, index), expected, same)) return false;
    }
    return true;
  }
};

struct CellGuard {
  PyObject* cell;             // owned
  Expected expected;

  bool holds(PyObject* same) {
    PyObject* value = PyCell_GET(cell);
    return value != nullptr && is_expected(value, expected, same);
  }
};

struct SetGuard {
  PyObject* set;              // owned; a set itself, not one of a class that may iterate in its own way
  std::vector<Expected> members;  // in order; without keys

  bool holds(PyObject* same) {
    if (PySet_GET_SIZE(set) != static_cast<Py_ssize_t>(members.size())) return false;
    if (members.empty()) return true;
    PyObject* iterator = PyObject_GetIter(set);
    bool fits = iterator != nullptr;
    for (size_t i = 0; fits && i < members.size(); ++i) {
      PyObject* member = PyIter_Next(iterator);  // an error if another thread has changed the set
      fits = member != nullptr && is_expected(member, members[i], same);
      Py_XDECREF(member);
    }
    Py_XDECREF(iterator);
    if (!fits) PyErr_Clear();
    return fits;
  }
};

struct ItemGuard {
  PyObject* container;        // owned; anything that has items
  Expected expected;

  bool holds(PyObject* same) {
    PyObject* value = PyObject_GetItem(container, expected.key);
    if (value == nullptr) {
      PyErr_Clear();
      return false;
    }
    bool fits = is_expected(value, expected, same);
    Py_DECREF(value);
    return fits;
  }
};

class ContainerGuards {
 public:
  std::vector<ListGuard> lists;
  std::vector<CellGuard> cells;
  std::vector<SetGuard> sets;
  std::vector<ItemGuard> items;

  bool hold(PyObject* same) {
    return all_hold(lists, same) && all_hold(cells, same) && all_hold(sets, same) && all_hold(items, same);
  }

  int traverse(visitproc visit, void* arg) {
    for (ListGuard& guard : lists) {
      Py_VISIT(guard.list);
      for (auto& entry : guard.entries) Py_VISIT(entry.second.value);
    }
    for (CellGuard& guard : cells) {
      Py_VISIT(guard.cell);
      Py_VISIT(guard.expected.value);
    }
    for (SetGuard& guard : sets) {
      Py_VISIT(guard.set);
      for (Expected& member : guard.members) Py_VISIT(member.value);
    }
    for (ItemGuard& guard : items) {
      Py_VISIT(guard.container);
      Py_VISIT(guard.expected.value);
    }
    return 0;
  }

  // Remove all guards; their references go to `removed`.
  void clear(std::vector<PyObject*>& removed) {
    for (ListGuard& guard : lists) {
      removed.push_back(guard.list);
      for (auto& entry : guard.entries) removed.push_back(entry.second.value);
    }
    for (CellGuard& guard : cells) removed.insert(removed.end(), {guard.cell, guard.expected.value});
    for (SetGuard& guard : sets) {
      removed.push_back(guard.set);
      for (Expected& member : guard.members) removed.push_back(member.value);
    }
    for (ItemGuard& guard : items) removed.insert(removed.end(), {guard.container, guard.expected.value});
    lists.clear();
    cells.clear();
    sets.clear();
    items.clear();
  }

 private:
  template <typename Guard>
  static bool all_hold(std::vector<Guard>& guards, PyObject* same) {
    for (Guard& guard : guards) {
      if (!guard.holds(same)) return false;
    }
    return true;
  }
};

}  // namespace
}  // namespace pygraph
