// Guards on dicts, lists and cells: whether what a trace baked in is still there.
//
// Only CPython is needed here. A dict that nobody has touched costs next to nothing: in Python 3.12, dict watchers report
// changes; in 3.11, a dict's version tag is compared. A dict that was touched has its guarded entries compared again.
// From 3.13 on there are no tags, and watchers miss stores to attributes of objects (an object's values lie in the
// object itself, its dict notwithstanding; seen with 3.13.0), so that every entry is compared at every call.
#pragma once

#include <Python.h>

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

namespace pygraph {

#define PYGRAPH_WATCHERS (PY_VERSION_HEX >= 0x030C0000 && PY_VERSION_HEX < 0x030D0000)
#define PYGRAPH_TAGS (PY_VERSION_HEX < 0x030C0000)

struct Expected {
  PyObject* key;     // borrowed from the plan
  PyObject* value;   // owned
  bool by_value;     // an equal value of the same immutable type will do
};

struct DictGuard {
  PyObject* dict = nullptr;   // owned
  Py_ssize_t length = -1;     // not guarded if negative
  std::vector<Expected> entries;
  bool dirty = true;
#if PYGRAPH_WATCHERS
  bool watched = false;
  uint64_t events = 0;                       // how often it has changed
  std::vector<DictGuard*>* queue = nullptr;  // where to report a change
#elif PYGRAPH_TAGS
  uint64_t version = 0;
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
  PyObject* same = nullptr;  // owned: same(value, expected) of pygraph.environment

  ~Environment() { clear(); }

  // Start to watch; every guard is compared at the first check.
  void arm() {
#if PYGRAPH_WATCHERS
    for (DictGuard* guard : dicts) {
      guard->queue = &dirty_;
      dirty_.push_back(guard);
      if (watcher_id() >= 0 && PyDict_Watch(watcher_id(), guard->dict) == 0) {
        watched_dicts()[guard->dict].push_back(guard);
        guard->watched = true;
      } else {
        PyErr_Clear();
        unwatched_.push_back(guard);
      }
    }
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
    for (DictGuard* guard : dicts) {
      uint64_t version = reinterpret_cast<PyDictObject*>(guard->dict)->ma_version_tag;
      if (version != guard->version) {
        if (!holds(*guard)) return false;
        guard->version = version;
      }
    }
#else
    for (DictGuard* guard : dicts) {
      if (!holds(*guard)) return false;
    }
#endif
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
    Py_VISIT(same);
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
    drop.push_back(same);
    same = nullptr;
    for (PyObject* object : drop) Py_XDECREF(object);
  }

 private:
#if PYGRAPH_WATCHERS
  std::vector<DictGuard*> dirty_;
  std::vector<DictGuard*> unwatched_;
#endif

  bool holds(DictGuard& guard) {
    if (guard.length >= 0 && PyDict_GET_SIZE(guard.dict) != guard.length) return false;
    for (Expected& entry : guard.entries) {
      PyObject* value = PyDict_GetItemWithError(guard.dict, entry.key);
      if (value == nullptr) {
        PyErr_Clear();
        return false;
      }
      if (!is_expected(value, entry)) return false;
    }
    return true;
  }

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
