// Guards on dicts, lists, cells and code: whether what a trace baked in is still there.
//
// Only CPython is needed here. A dict that nobody has touched costs next to nothing: from Python 3.12 on, dict watchers
// report changes; in 3.11, a dict's version tag is compared. A dict that was touched has its guarded entries compared
// again. From 3.13 on watchers miss stores to attributes of objects (an object's values lie in the object itself, its dict
// notwithstanding; seen with 3.13.0), so that only the dicts of modules are watched, and others compared at every call.
//
// A class has a version tag in all of them, which changes with the class and its bases. Where one is another, Python
// compares what the classes hold: tags also change where a trace elsewhere patches nn.Module for a while. Watchers of
// classes would say no more, and nothing of a class that has run out of tags (a thousand changes, from 3.13 on).
#pragma once

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace pygraph {

#define PYGRAPH_WATCHERS (PY_VERSION_HEX >= 0x030C0000)
#define PYGRAPH_TAGS (PY_VERSION_HEX < 0x030C0000)

struct Expected {
  PyObject* key;     // borrowed from the plan
  PyObject* value;   // owned; nullptr if there must be nothing
  bool by_value;     // an equal value of the same immutable type will do
};

struct DictGuard {
  PyObject* dict = nullptr;   // owned
  Py_ssize_t length = -1;     // not guarded if negative
  std::vector<Expected> entries;
  bool ordered = false;       // whether the entries are all there are, in this order
  bool module = false;        // whether it holds the variables of a module
  bool dirty = true;
#if PYGRAPH_WATCHERS
  bool watched = false;
  uint64_t events = 0;                       // how often it has changed
  std::vector<DictGuard*>* queue = nullptr;  // where to report a change
#endif
};

struct ListGuard {
  PyObject* list = nullptr;   // owned
  Py_ssize_t length = -1;
  std::vector<std::pair<Py_ssize_t, Expected>> entries;
};

struct CellGuard {
  PyObject* cell;             // owned
  Expected expected;
};

struct SetGuard {
  PyObject* set;              // owned; a set itself, not one of a class that may iterate in its own way
  std::vector<Expected> members;  // in order; without keys
};

struct ItemGuard {
  PyObject* container;        // owned; anything that has items
  Expected expected;
};

struct TypeGuard {
  PyTypeObject* type;         // owned
  unsigned int version = 0;   // when what it holds was compared last; 0 is no version
};

// A pointer that lies in an object: its class, where its attributes are, the code of a function.
struct PointerGuard {
  const void* place;
  uintptr_t expected;
};

struct AttributesGuard {
  PyObject* object;           // owned; it alone can tell where its dict lies
  PyObject* dict;             // owned
};

struct PartialGuard {
  PyObject* partial;          // owned
  PyObject* parts;            // owned tuple: func, args, keywords
};

#if PYGRAPH_WATCHERS
inline std::unordered_map<PyObject*, std::vector<DictGuard*>>& watched_dicts() {
  static auto* map = new std::unordered_map<PyObject*, std::vector<DictGuard*>>();
  return *map;
}

inline int& watcher_id() {
  static int id = -1;
  return id;
}

inline int on_dict_event(PyDict_WatchEvent, PyObject* dict, PyObject*, PyObject*) {
  auto found = watched_dicts().find(dict);
  if (found != watched_dicts().end()) {
    for (DictGuard* guard : found->second) {
      ++guard->events;
      if (!guard->dirty) {
        guard->dirty = true;
        guard->queue->push_back(guard);
      }
    }
  }
  return 0;
}
#endif

// Get a watcher for this process; where none is left, guards compare every time.
inline void prepare_guards() {
#if PYGRAPH_WATCHERS
  if (watcher_id() < 0) {
    watcher_id() = PyDict_AddWatcher(on_dict_event);
    if (watcher_id() < 0) PyErr_Clear();
  }
#endif
}

class Environment {
 public:
  std::vector<DictGuard*> dicts;
  std::vector<ListGuard> lists;
  std::vector<CellGuard> cells;
  std::vector<SetGuard> sets;
  std::vector<ItemGuard> items;
  std::vector<TypeGuard> types;
  std::vector<PointerGuard> pointers;
  std::vector<PyObject*> pointed;  // owned: the objects that pointers lie in, and what they must point to
  std::vector<AttributesGuard> attributes;
  std::vector<PartialGuard> partials;
  PyObject* same = nullptr;  // owned: same(value, expected) of pygraph.guards.values
  PyObject* classes_hold = nullptr;  // owned: whether what classes hold is what it was

  ~Environment() { clear(); }

  // Guard which class an object is of.
  void add_kind(PyObject* object, PyTypeObject* type) {
    add_pointer(object, &object->ob_type, reinterpret_cast<PyObject*>(type));
  }

  // Guard which dict holds the attributes of an object.
  void add_attributes(PyObject* object, PyObject* dict) {
    PyObject** slot = _PyObject_GetDictPtr(object);  // CPython 3.11 to 3.14
    if (slot != nullptr && *slot == dict) {
      add_pointer(object, slot, dict);
    } else {
      attributes.push_back({Py_NewRef(object), Py_NewRef(dict)});
    }
  }

  // Guard the code of a function and its defaults, which are nullptr if there are none.
  void add_function(PyObject* object, PyObject* code, PyObject* defaults, PyObject* keywords) {
    auto* function = reinterpret_cast<PyFunctionObject*>(object);
    add_pointer(object, &function->func_code, code);
    add_pointer(object, &function->func_defaults, defaults);
    add_pointer(object, &function->func_kwdefaults, keywords);
  }

  // Start to watch; every guard is compared at the first check.
  void arm() {
    std::sort(pointers.begin(), pointers.end(), [](const PointerGuard& a, const PointerGuard& b) {
      return std::less<const void*>()(a.place, b.place);  // as they lie in memory, the processor reads them fastest
    });
#if PYGRAPH_WATCHERS
    for (DictGuard* guard : dicts) {
      guard->queue = &dirty_;
      if (PY_VERSION_HEX >= 0x030D0000 && !guard->module) {
        unwatched_.push_back(guard);
        continue;
      }
      dirty_.push_back(guard);
      if (watcher_id() >= 0 && PyDict_Watch(watcher_id(), guard->dict) == 0) {
        watched_dicts()[guard->dict].push_back(guard);
        guard->watched = true;
      } else {
        PyErr_Clear();
        unwatched_.push_back(guard);
      }
    }
#elif PYGRAPH_TAGS
    for (DictGuard* guard : dicts) tags_.push_back({reinterpret_cast<PyDictObject*>(guard->dict), 0});
#endif
  }

  // Whether all is as it was. No exception is left set.
  bool current() {
#if PYGRAPH_WATCHERS
    while (!dirty_.empty()) {
      // It stays in the list while it is compared, which may run Python code: another thread that comes meanwhile must
      // compare it too, and a change meanwhile must not be lost.
      DictGuard* guard = dirty_.back();
      const uint64_t events = guard->events;
      if (!holds(*guard)) return false;
      auto place = std::find(dirty_.begin(), dirty_.end(), guard);
      if (guard->events == events && place != dirty_.end()) {
        dirty_.erase(place);
        guard->dirty = false;
      }
    }
    for (DictGuard* guard : unwatched_) {
      if (!holds(*guard)) return false;
    }
#elif PYGRAPH_TAGS
    for (size_t i = 0; i < tags_.size(); ++i) {
      const uint64_t version = tags_[i].dict->ma_version_tag;
      if (version == tags_[i].version) continue;
      if (!holds(*dicts[i])) return false;
      tags_[i].version = version;
    }
#else
    for (DictGuard* guard : dicts) {
      if (!holds(*guard)) return false;
    }
#endif
    if (!code_holds()) return false;
    for (ListGuard& guard : lists) {
      if (guard.length >= 0 && PyList_GET_SIZE(guard.list) != guard.length) return false;
      for (auto& [index, expected] : guard.entries) {
        if (index >= PyList_GET_SIZE(guard.list)) return false;
        if (!is_expected(PyList_GET_ITEM(guard.list, index), expected)) return false;
      }
    }
    for (CellGuard& guard : cells) {
      PyObject* value = PyCell_GET(guard.cell);
      if (value == nullptr || !is_expected(value, guard.expected)) return false;
    }
    for (SetGuard& guard : sets) {
      if (!holds(guard)) return false;
    }
    for (ItemGuard& guard : items) {
      PyObject* value = PyObject_GetItem(guard.container, guard.expected.key);
      if (value == nullptr) {
        PyErr_Clear();
        return false;
      }
      bool fits = is_expected(value, guard.expected);
      Py_DECREF(value);
      if (!fits) return false;
    }
    return true;
  }

  int traverse(visitproc visit, void* arg) {
    for (DictGuard* guard : dicts) {
      Py_VISIT(guard->dict);
      for (Expected& entry : guard->entries) Py_VISIT(entry.value);
    }
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
    for (TypeGuard& guard : types) Py_VISIT(reinterpret_cast<PyObject*>(guard.type));
    for (PyObject* object : pointed) Py_VISIT(object);
    for (AttributesGuard& guard : attributes) {
      Py_VISIT(guard.object);
      Py_VISIT(guard.dict);
    }
    for (PartialGuard& guard : partials) {
      Py_VISIT(guard.partial);
      Py_VISIT(guard.parts);
    }
    Py_VISIT(same);
    Py_VISIT(classes_hold);
    return 0;
  }

  void clear() {
    // What is let go may run any code, so the guards are taken away first.
    std::vector<PyObject*> drop;
    for (DictGuard* guard : dicts) {
#if PYGRAPH_WATCHERS
      if (guard->watched) {
        auto found = watched_dicts().find(guard->dict);
        auto& guards = found->second;
        guards.erase(std::find(guards.begin(), guards.end(), guard));
        if (guards.empty()) {
          watched_dicts().erase(found);
          if (PyDict_Unwatch(watcher_id(), guard->dict) < 0) PyErr_Clear();
        }
      }
#endif
      drop.push_back(guard->dict);
      for (Expected& entry : guard->entries) drop.push_back(entry.value);
      delete guard;
    }
    dicts.clear();
#if PYGRAPH_WATCHERS
    dirty_.clear();
    unwatched_.clear();
#elif PYGRAPH_TAGS
    tags_.clear();
#endif
    for (ListGuard& guard : lists) {
      drop.push_back(guard.list);
      for (auto& entry : guard.entries) drop.push_back(entry.second.value);
    }
    lists.clear();
    for (CellGuard& guard : cells) {
      drop.push_back(guard.cell);
      drop.push_back(guard.expected.value);
    }
    cells.clear();
    for (SetGuard& guard : sets) {
      drop.push_back(guard.set);
      for (Expected& member : guard.members) drop.push_back(member.value);
    }
    sets.clear();
    for (ItemGuard& guard : items) {
      drop.push_back(guard.container);
      drop.push_back(guard.expected.value);
    }
    items.clear();
    for (TypeGuard& guard : types) drop.push_back(reinterpret_cast<PyObject*>(guard.type));
    types.clear();
    pointers.clear();
    drop.insert(drop.end(), pointed.begin(), pointed.end());
    pointed.clear();
    for (AttributesGuard& guard : attributes) drop.insert(drop.end(), {guard.object, guard.dict});
    attributes.clear();
    for (PartialGuard& guard : partials) drop.insert(drop.end(), {guard.partial, guard.parts});
    partials.clear();
    drop.insert(drop.end(), {same, classes_hold});
    same = classes_hold = nullptr;
    for (PyObject* object : drop) Py_XDECREF(object);
  }

 private:
#if PYGRAPH_WATCHERS
  std::vector<DictGuard*> dirty_;
  std::vector<DictGuard*> unwatched_;
#elif PYGRAPH_TAGS
  struct Tag {
    PyDictObject* dict;       // of the guard at the same place
    uint64_t version;         // when it was compared last; 0 is no version
  };
  std::vector<Tag> tags_;
#endif

  void add_pointer(PyObject* object, const void* place, PyObject* expected) {
    pointers.push_back({place, reinterpret_cast<uintptr_t>(expected)});
    pointed.push_back(Py_NewRef(object));
    pointed.push_back(Py_XNewRef(expected));
  }

  bool holds(DictGuard& guard) {
    if (guard.length >= 0 && PyDict_GET_SIZE(guard.dict) != guard.length) return false;
    if (guard.ordered) return holds_in_order(guard);
    for (Expected& entry : guard.entries) {
      PyObject* value = PyDict_GetItemWithError(guard.dict, entry.key);
      if (value == nullptr) {
        PyErr_Clear();
        if (entry.value != nullptr) return false;
      } else if (entry.value == nullptr || !is_expected(value, entry)) {
        return false;
      }
    }
    return true;
  }

  bool holds_in_order(DictGuard& guard) {
    Py_ssize_t cursor = 0;
    size_t count = 0;
    PyObject *key, *value;
    while (PyDict_Next(guard.dict, &cursor, &key, &value)) {
      if (count == guard.entries.size()) return false;
      Expected& entry = guard.entries[count++];
      if (key != entry.key && !is_equal_key(key, entry.key)) return false;
      if (!is_expected(value, entry)) return false;
    }
    return count == guard.entries.size();
  }

  // Whether two keys of which no comparison runs anybody's code are equal.
  static bool is_equal_key(PyObject* key, PyObject* expected) {
    if (Py_TYPE(key) != Py_TYPE(expected) || !(PyUnicode_CheckExact(key) || PyLong_CheckExact(key))) return false;
    int equal = PyObject_RichCompareBool(key, expected, Py_EQ);
    if (equal < 0) PyErr_Clear();
    return equal == 1;
  }

  bool code_holds() {
    uintptr_t differences = 0;
    for (const PointerGuard& guard : pointers) {
      uintptr_t now;
      std::memcpy(&now, guard.place, sizeof now);  // a pointer of any type
      differences |= now ^ guard.expected;         // no branch for each of thousands
    }
    if (differences != 0) return false;
    for (const AttributesGuard& guard : attributes) {
      if (!has_attributes(guard)) return false;
    }
    for (const PartialGuard& guard : partials) {
      const char* names[] = {"func", "args", "keywords"};
      for (int i = 0; i < 3; ++i) {
        PyObject* part = PyObject_GetAttrString(guard.partial, names[i]);
        Py_XDECREF(part);  // the partial function has it
        if (part == nullptr) PyErr_Clear();
        if (part != PyTuple_GET_ITEM(guard.parts, i)) return false;
      }
    }
    for (const TypeGuard& guard : types) {
      if (guard.type->tp_version_tag != guard.version || guard.version == 0) return compare_classes();
    }
    return true;
  }

  static bool has_attributes(const AttributesGuard& guard) {
    PyObject* dict = PyObject_GetAttrString(guard.object, "__dict__");
    Py_XDECREF(dict);  // the object has it
    if (dict == nullptr) PyErr_Clear();
    return dict == guard.dict;
  }

  // Compare what classes hold, and note the versions that they had before.
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

  bool holds(SetGuard& guard) {
    if (PySet_GET_SIZE(guard.set) != static_cast<Py_ssize_t>(guard.members.size())) return false;
    if (guard.members.empty()) return true;
    PyObject* iterator = PyObject_GetIter(guard.set);
    bool fits = iterator != nullptr;
    for (size_t i = 0; fits && i < guard.members.size(); ++i) {
      PyObject* member = PyIter_Next(iterator);  // an error if another thread has changed the set
      fits = member != nullptr && is_expected(member, guard.members[i]);
      Py_XDECREF(member);
    }
    Py_XDECREF(iterator);
    if (!fits) PyErr_Clear();
    return fits;
  }

  bool is_expected(PyObject* value, Expected& expected) {
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
};

}  // namespace pygraph
