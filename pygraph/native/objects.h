// Searches among all objects that Python's garbage collector knows.
//
// Another thread may be filling a tuple of unknown length, which fails if anybody else refers to that tuple when it
// grows. Here everything is referred to by a list for a moment; so no other thread may run before that list is gone.
// Nothing that may run Python code is called meanwhile, not even `id` or functions of `gc`, which call audit hooks.
#pragma once

#include <Python.h>

#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <vector>

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

// Objects to look for. A bit of the address rules out nearly all others.
class Wanted {
 public:
  explicit Wanted(const Objects& objects) : objects_(objects) {
    while (size_ < 64 * objects.size() && size_ < 1 << 22) size_ *= 2;
    bits_.resize(size_);
    for (PyObject* object : objects) bits_[bit(object)] = true;
  }
  bool has(PyObject* object) const { return bits_[bit(object)] && objects_.count(object) != 0; }

 private:
  std::size_t bit(PyObject* object) const { return reinterpret_cast<std::uintptr_t>(object) / 16 % size_; }

  const Objects& objects_;
  std::size_t size_ = 8192;
  std::vector<bool> bits_;
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

// Those of some tuples that anything refers to. Somebody may be filling the others.
inline Objects owned(const Objects& tuples, PyObject* objects) {
  const Wanted wanted(tuples);
  Objects found;
  for (Py_ssize_t i = 0; !tuples.empty() && i < PyList_GET_SIZE(objects); ++i) {
    found.merge(referents_among(PyList_GET_ITEM(objects, i), wanted));
  }
  return found;
}

// Objects that refer to one of the arguments, but no tuple that nothing refers to.
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
    found.merge(owned(tuples, objects));
    return append_all(result, found);
  });
}

// Adds the objects that a set of ids stands for; false with an error set.
inline bool add_by_ids(PyObject* ids, Objects& objects) {
  PyObject* iterator = PyObject_GetIter(ids);
  if (iterator == nullptr) return false;
  while (PyObject* id = PyIter_Next(iterator)) {
    objects.insert(static_cast<PyObject*>(PyLong_AsVoidPtr(id)));
    Py_DECREF(id);
  }
  Py_DECREF(iterator);
  return PyErr_Occurred() == nullptr;
}

// The references on all ways to a list's items that lead through objects whose ids are in one set and through none
// whose ids are in another: referrer and referent in turn. No referrer is a tuple that nothing refers to.
inline PyObject* references_leading_to(PyObject*, PyObject* arguments) {
  PyObject *values, *through_ids, *skipped_ids;
  if (!PyArg_UnpackTuple(arguments, "references_leading_to", 3, 3, &values, &through_ids, &skipped_ids)) return nullptr;
  Objects through, skipped, reached;
  if (!add_by_ids(through_ids, through) || !add_by_ids(skipped_ids, skipped)) return nullptr;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(values); ++i) reached.insert(PyList_GET_ITEM(values, i));
  Objects either(through);
  either.insert(reached.begin(), reached.end());
  const Wanted wanted(either);
  return list_of([&](PyObject* objects, PyObject* result) {
    std::unordered_map<PyObject*, std::vector<PyObject*>> referrers;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects); ++i) {
      PyObject* object = PyList_GET_ITEM(objects, i);
      if (skipped.count(object) != 0) continue;
      for (PyObject* referent : referents_among(object, wanted)) referrers[referent].push_back(object);
    }
    std::vector<PyObject*> on_the_way(reached.begin(), reached.end());
    Objects tuples;
    for (std::size_t next = 0; next < on_the_way.size(); ++next) {
      for (PyObject* referrer : referrers[on_the_way[next]]) {
        if (PyTuple_CheckExact(referrer)) tuples.insert(referrer);
        if (through.count(referrer) != 0 && reached.insert(referrer).second) on_the_way.push_back(referrer);
      }
    }
    const Objects whole = owned(tuples, objects);
    for (PyObject* referent : on_the_way) {
      for (PyObject* referrer : referrers[referent]) {
        if (PyTuple_CheckExact(referrer) && whole.count(referrer) == 0) continue;
        if (PyList_Append(result, referrer) < 0 || PyList_Append(result, referent) < 0) return false;
      }
    }
    return true;
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
