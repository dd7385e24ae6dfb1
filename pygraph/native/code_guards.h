// Guards on the code that objects run: classes of objects, code of functions, dicts of attributes, partial functions,
// hooks of tensors.
//
// A class has a version tag in all versions of CPython, which changes with the class and its bases. Where a tag is
// another, Python compares the contents of the classes: tags also change where a trace elsewhere patches nn.Module for
// a while. Watchers of classes would report no more, and nothing of a class that has run out of tags (a thousand
// changes, from 3.13 on).
#pragma once

#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

namespace pygraph {
namespace {

struct TypeGuard {
  PyTypeObject* type;         // owned
  unsigned int version = 0;   // when its contents were compared last; 0 is no version
};

// A pointer in memory of an object: its class, where its attributes are, the code of a function.
struct PointerGuard {
  const void* location;
  uintptr_t expected;
};

struct AttributesGuard {
  PyObject* object;           // owned; it alone can say where its dict is
  PyObject* dict;             // owned
};

struct PartialGuard {
  PyObject* partial;          // owned
  PyObject* parts;            // owned tuple: func, args, keywords
};

class CodeGuards {
 public:
  std::vector<TypeGuard> types;
  std::vector<PartialGuard> partials;
  PyObject* classes_hold = nullptr;  // owned: a function that says whether the contents of classes are as they were

  // Guard the class of an object.
  void add_class(PyObject* object, PyTypeObject* type) {
    add_pointer(object, &object->ob_type, reinterpret_cast<PyObject*>(type));
  }

  // Guard which dict holds the attributes of an object.
  void add_attributes(PyObject* object, PyObject* dict) {
    PyObject** slot = _PyObject_GetDictPtr(object);  // CPython 3.11 to 3.14
    if (slot != nullptr && *slot == dict) {
      add_pointer(object, slot, dict);
    } else {
      attributes_.push_back({Py_NewRef(object), Py_NewRef(dict)});
    }
  }

  // Guard which dicts hold the hooks of a tensor; None if it has never had any.
  void add_hooks(PyObject* object, PyObject* backward, PyObject* accumulation) {
    auto* variable = reinterpret_cast<THPVariable*>(object);
    add_pointer(object, &variable->backward_hooks, backward == Py_None ? nullptr : backward);
    add_pointer(object, &variable->post_accumulate_grad_hooks, accumulation == Py_None ? nullptr : accumulation);
  }

  // Guard the code of a function and its defaults, which are nullptr if there are none.
  void add_function(PyObject* object, PyObject* code, PyObject* defaults, PyObject* keywords) {
    auto* function = reinterpret_cast<PyFunctionObject*>(object);
    add_pointer(object, &function->func_code, code);
    add_pointer(object, &function->func_defaults, defaults);
    add_pointer(object, &function->func_kwdefaults, keywords);
  }

  void arm() {
    std::sort(pointers_.begin(), pointers_.end(), [](const PointerGuard& a, const PointerGuard& b) {
      return std::less<const void*>()(a.location, b.location);  // read fastest in the order of memory
    });
  }

  bool hold() {
    uintptr_t differences = 0;
    for (const PointerGuard& guard : pointers_) {
      uintptr_t now;
      std::memcpy(&now, guard.location, sizeof now);  // a pointer of any type
      differences |= now ^ guard.expected;            // no branch for each of thousands
    }
    if (differences != 0) return false;
    for (const AttributesGuard& guard : attributes_) {
      if (!holds(guard)) return false;
    }
    for (const PartialGuard& guard : partials) {
      if (!holds(guard)) return false;
    }
    for (const TypeGuard& guard : types) {
      if (guard.type->tp_version_tag != guard.version || guard.version == 0) return compare_classes();
    }
    return true;
  }

  int traverse(visitproc visit, void* arg) {
    for (TypeGuard& guard : types) Py_VISIT(reinterpret_cast<PyObject*>(guard.type));
    for (PyObject* object : pointed_) Py_VISIT(object);
    for (AttributesGuard& guard : attributes_) {
      Py_VISIT(guard.object);
      Py_VISIT(guard.dict);
    }
    for (PartialGuard& guard : partials) {
      Py_VISIT(guard.partial);
      Py_VISIT(guard.parts);
    }
    Py_VISIT(classes_hold);
    return 0;
  }

  // Remove all guards; their references go to `removed`.
  void clear(std::vector<PyObject*>& removed) {
    for (TypeGuard& guard : types) removed.push_back(reinterpret_cast<PyObject*>(guard.type));
    types.clear();
    pointers_.clear();
    removed.insert(removed.end(), pointed_.begin(), pointed_.end());
    pointed_.clear();
    for (AttributesGuard& guard : attributes_) removed.insert(removed.end(), {guard.object, guard.dict});
    attributes_.clear();
    for (PartialGuard& guard : partials) removed.insert(removed.end(), {guard.partial, guard.parts});
    partials.clear();
    removed.push_back(classes_hold);
    classes_hold = nullptr;
  }

 private:
  std::vector<PointerGuard> pointers_;
  std::vector<PyObject*> pointed_;  // owned: the objects that pointers lie in, and those that they must point to
  std::vector<AttributesGuard> attributes_;

  void add_pointer(PyObject* object, const void* location, PyObject* expected) {
    pointers_.push_back({location, reinterpret_cast<uintptr_t>(expected)});
    pointed_.push_back(Py_NewRef(object));
    pointed_.push_back(Py_XNewRef(expected));
  }

  static bool holds(const AttributesGuard& guard) {
    PyObject* dict = PyObject_GetAttrString(guard.object, "__dict__");
    Py_XDECREF(dict);  // the object has it
    if (dict == nullptr) PyErr_Clear();
    return dict == guard.dict;
  }

  static bool holds(const PartialGuard& guard) {
    const char* names[] = {"func", "args", "keywords"};
    for (int i = 0; i < 3; ++i) {
      PyObject* part = PyObject_GetAttrString(guard.partial, names[i]);
      Py_XDECREF(part);  // the partial function has it
      if (part == nullptr) PyErr_Clear();
      if (part != PyTuple_GET_ITEM(guard.parts, i)) return false;
    }
    return true;
  }

  // Compare the contents of classes, and store the versions that the classes had before that.
  bool compare_classes() {
    std::vector<unsigned int> versions;
    for (const TypeGuard& guard : types) {
#if PY_VERSION_HEX >= 0x030C0000
      PyUnstable_Type_AssignVersionTag(guard.type);
#else
      _PyType_Lookup(guard.type, init_name());  // which gives it a version
#endif
      versions.push_back(guard.type->tp_version_tag);
    }
    PyObject* answer = PyObject_CallNoArgs(classes_hold);
    if (answer == nullptr) PyErr_Clear();
    Py_XDECREF(answer);
    if (answer != Py_True || versions.size() != types.size()) return false;
    for (size_t i = 0; i < types.size(); ++i) types[i].version = versions[i];
    return true;
  }

#if PY_VERSION_HEX < 0x030C0000
  static PyObject* init_name() {
    static PyObject* name = PyUnicode_InternFromString("__init__");
    return name;
  }
#endif
};

}  // namespace
}  // namespace pygraph
