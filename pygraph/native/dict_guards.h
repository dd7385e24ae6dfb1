// Guards on dicts: of modules, of attributes, and others that a function reads.
//
// A dict that did not change costs next to nothing: from Python 3.12 on, dict watchers report changes; in 3.11, the
// version tag of a dict is compared. The guarded entries of a dict that changed are compared again. From 3.13 on
// watchers miss stores to attributes of objects (an object's values lie in the object itself, its dict notwithstanding;
// seen with 3.13.0), so that only the dicts of modules are watched, and others compared at every call.
#pragma once

#include "guarded_values.h"

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace pygraph {
namespace {

#define PYGRAPH_WATCHERS (PY_VERSION_HEX >= 0x030C0000)
#define PYGRAPH_TAGS (PY_VERSION_HEX < 0x030C0000)

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

// ---- watchers ------------------------------------------------------------------------------------------------------

#if PYGRAPH_WATCHERS
std::unordered_map<PyObject*, std::vector<DictGuard*>>& watched_dicts() {
  static auto* map = new std::unordered_map<PyObject*, std::vector<DictGuard*>>();
  return *map;
}

int& watcher_id() {
  static int id = -1;
  return id;
}

int on_dict_event(PyDict_WatchEvent, PyObject* dict, PyObject*, PyObject*) {
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

// Whether changes of the guard's dict are reported from now on.
bool watch(DictGuard* guard) {
  if (watcher_id() < 0 || PyDict_Watch(watcher_id(), guard->dict) != 0) {
    PyErr_Clear();
    return false;
  }
  watched_dicts()[guard->dict].push_back(guard);
  return guard->watched = true;
}

void unwatch(DictGuard* guard) {
  if (!guard->watched) return;
  auto found = watched_dicts().find(guard->dict);
  auto& guards = found->second;
  guards.erase(std::find(guards.begin(), guards.end(), guard));
  if (guards.empty()) {
    watched_dicts().erase(found);
    if (PyDict_Unwatch(watcher_id(), guard->dict) < 0) PyErr_Clear();
  }
}
#endif

// Get a watcher for this process; where none is left, guards compare every time.
void prepare_watchers() {
#if PYGRAPH_WATCHERS
  if (watcher_id() < 0) {
    watcher_id() = PyDict_AddWatcher(on_dict_event);
    if (watcher_id() < 0) PyErr_Clear();
  }
#endif
}

// ---- the guards ----------------------------------------------------------------------------------------------------

class DictGuards {
 public:
  std::vector<DictGuard*> all;  // owned

  // Start to watch; every guard is compared at the first check.
  void arm() {
#if PYGRAPH_WATCHERS
    for (DictGuard* guard : all) {
      guard->queue = &dirty_;
      if (PY_VERSION_HEX >= 0x030D0000 && !guard->module) {
        unwatched_.push_back(guard);
        continue;
      }
      dirty_.push_back(guard);
      if (!watch(guard)) unwatched_.push_back(guard);
    }
#elif PYGRAPH_TAGS
    for (DictGuard* guard : all) tags_.push_back({reinterpret_cast<PyDictObject*>(guard->dict), 0});
#endif
  }

  bool hold(PyObject* same) {
#if PYGRAPH_WATCHERS
    while (!dirty_.empty()) {
      // It stays in the list while it is compared, which may run Python code: another thread that comes meanwhile must
      // compare it too, and a change meanwhile must not be lost.
      DictGuard* guard = dirty_.back();
      const uint64_t events = guard->events;
      if (!holds(*guard, same)) return false;
      auto found = std::find(dirty_.begin(), dirty_.end(), guard);
      if (guard->events == events && found != dirty_.end()) {
        dirty_.erase(found);
        guard->dirty = false;
      }
    }
    for (DictGuard* guard : unwatched_) {
      if (!holds(*guard, same)) return false;
    }
#elif PYGRAPH_TAGS
    for (size_t i = 0; i < tags_.size(); ++i) {
      const uint64_t version = tags_[i].dict->ma_version_tag;
      if (version == tags_[i].version) continue;
      if (!holds(*all[i], same)) return false;
      tags_[i].version = version;
    }
#endif
    return true;
  }

  int traverse(visitproc visit, void* arg) {
    for (DictGuard* guard : all) {
      Py_VISIT(guard->dict);
      for (Expected& entry : guard->entries) Py_VISIT(entry.value);
    }
    return 0;
  }

  // Remove all guards; their references go to `removed`.
  void clear(std::vector<PyObject*>& removed) {
    for (DictGuard* guard : all) {
#if PYGRAPH_WATCHERS
      unwatch(guard);
#endif
      removed.push_back(guard->dict);
      for (Expected& entry : guard->entries) removed.push_back(entry.value);
      delete guard;
    }
    all.clear();
#if PYGRAPH_WATCHERS
    dirty_.clear();
    unwatched_.clear();
#elif PYGRAPH_TAGS
    tags_.clear();
#endif
  }

 private:
#if PYGRAPH_WATCHERS
  std::vector<DictGuard*> dirty_;
  std::vector<DictGuard*> unwatched_;
#elif PYGRAPH_TAGS
  struct Tag {
    PyDictObject* dict;       // of the guard at the same position
    uint64_t version;         // when it was compared last; 0 is no version
  };
  std::vector<Tag> tags_;
#endif

  static bool holds(DictGuard& guard, PyObject* same) {
    if (guard.length >= 0 && PyDict_GET_SIZE(guard.dict) != guard.length) return false;
    if (guard.ordered) return holds_in_order(guard, same);
    for (Expected& entry : guard.entries) {
      PyObject* value = PyDict_GetItemWithError(guard.dict, entry.key);
      if (value == nullptr) {
        PyErr_Clear();
        if (entry.value != nullptr) return false;
      } else if (entry.value == nullptr || !is_expected(value, entry, same)) {
        return false;
      }
    }
    return true;
  }

  static bool holds_in_order(DictGuard& guard, PyObject* same) {
    Py_ssize_t cursor = 0;
    size_t count = 0;
    PyObject *key, *value;
    while (PyDict_Next(guard.dict, &cursor, &key, &value)) {
      if (count == guard.entries.size()) return false;
      Expected& entry = guard.entries[count++];
      if (key != entry.key && !is_equal_key(key, entry.key)) return false;
      if (!is_expected(value, entry, same)) return false;
    }
    return count == guard.entries.size();
  }

  // Whether two keys are equal that no Python code compares.
  static bool is_equal_key(PyObject* key, PyObject* expected) {
    if (Py_TYPE(key) != Py_TYPE(expected) || !(PyUnicode_CheckExact(key) || PyLong_CheckExact(key))) return false;
    int equal = PyObject_RichCompareBool(key, expected, Py_EQ);
    if (equal < 0) PyErr_Clear();
    return equal == 1;
  }
};

}  // namespace
}  // namespace pygraph
