// Searches among all objects that Python's garbage collector knows.
//
// Another thread may be filling a tuple of unknown length, which fails if anybody else refers to that tuple when it
// grows. Here everything is referred to by a list for a moment; so no other thread may run before that list is gone.
// Nothing that may run Python code is called meanwhile, not even `id` or functions of `gc`, which call audit hooks.
#pragma once

#include <Python.h>

#include <bitset>
#include <cstdint>
#include <unordered_set>

namespace pygraph {

using Objects = std::unordered_set<PyObject*>;

// A new list of all objects; audit hooks are called before it is made.
inline PyObject* all_objects() {
  PyObject* gc = PyImport_ImportModule("gc");
  if (gc == nullptr) return nullptr;
  PyObject* objects = PyObject_CallMethod(gc, "get_objects", nullptr);
  Py_DECREF(gc);
  return objects;
}

inline bool append_all(PyObject* list, const Objects& objects) {
  for (PyObject* object : objects) {
    if (PyList_Append(list, object) < 0) return false;
  }
  return true;
}

// Objects to look for. A few bits of the address rule out nearly all others.
class Wanted {
 public:
  explicit Wanted(const Objects& objects) : objects_(objects) {
    for (PyObject* object : objects) bits_.set(bit(object));
  }
  bool has(PyObject* object) const { return bits_.test(bit(object)) && objects_.count(object) != 0; }

 private:
  static std::size_t bit(PyObject* object) { return reinterpret_cast<std::uintptr_t>(object) / 16 % 8192; }

  const Objects& objects_;
  std::bitset<8192> bits_;
};

struct Search {
  const Wanted& wanted;
  Objects found;
};

inline int visit_referent(PyObject* object, void* argument) {
  Search& search = *static_cast<Search*>(argument);
  if (search.wanted.has(object)) search.found.insert(object);
  return 0;
}

// The wanted objects that an object refers to.
inline Objects referents_among(PyObject* object, const Wanted& wanted) {
  Search search{wanted, {}};
  Py_TYPE(object)->tp_traverse(object, visit_referent, &search);
  return search.found;
}

// A new list, which ``choose`` fills from a list of all objects; null with an error set.
template <typename Choose>
PyObject* list_of(Choose choose) {
  PyObject* result = PyList_New(0);
  PyObject* objects = result == nullptr ? nullptr : all_objects();
  const bool done = objects != nullptr && choose(objects, result);
  Py_XDECREF(objects);
  if (!done) Py_CLEAR(result);
  return result;
}

inline Objects items_of(PyObject* tuple) {
  Objects items;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) items.insert(PyTuple_GET_ITEM(tuple, i));
  return items;
}

// Objects that refer to one of the arguments, but no tuple that nothing refers to: somebody may be filling it.
inline PyObject* referrers_of(PyObject*, PyObject* values) {
  const Objects items = items_of(values);
  const Wanted wanted(items);
  return list_of([&](PyObject* objects, PyObject* result) {
    Objects found, tuples;
    const Py_ssize_t count = PyList_GET_SIZE(objects);
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* object = PyList_GET_ITEM(objects, i);
      if (object == values || referents_among(object, wanted).empty()) continue;
      (PyTuple_CheckExact(object) ? tuples : found).insert(object);
    }
    const Wanted owned(tuples);
    for (Py_ssize_t i = 0; !tuples.empty() && i < count; ++i) {
      found.merge(referents_among(PyList_GET_ITEM(objects, i), owned));
    }
    return append_all(result, found);
  });
}

inline PyObject* classes_of_objects(PyObject*, PyObject*) {
  return list_of([](PyObject* objects, PyObject* result) {
    Objects found;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects); ++i) {
      found.insert(reinterpret_cast<PyObject*>(Py_TYPE(PyList_GET_ITEM(objects, i))));
    }
    return append_all(result, found);
  });
}

// All objects of the classes that are the arguments, of which none is `tuple`.
inline PyObject* objects_of(PyObject*, PyObject* classes) {
  const Objects wanted = items_of(classes);
  return list_of([&](PyObject* objects, PyObject* result) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects); ++i) {
      PyObject* object = PyList_GET_ITEM(objects, i);
      if (wanted.count(reinterpret_cast<PyObject*>(Py_TYPE(object))) == 0) continue;
      if (PyList_Append(result, object) < 0) return false;
    }
    return true;
  });
}

}  // namespace pygraph
