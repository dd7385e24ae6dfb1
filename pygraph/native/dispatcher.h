// The Python type `Dispatcher`: finds the plan that a call matches and runs the call under the function's lock.
#pragma once

#include "plan_type.h"
#include "running.h"

#include <algorithm>
#include <vector>

namespace pygraph {
namespace {

PyObject* inside_name = nullptr;  // "inside"

struct DispatcherObject {
  PyObject_HEAD
  PyObject* acquire;                // of the function's lock
  PyObject* release;
  PyObject* here;                   // pygraph.process.reentrancy.here
  std::vector<PlanObject*>* plans;  // owned; most recently used first
  int64_t clock;                    // counts calls
  Profile* profile;                 // owned
};

// ---- a call --------------------------------------------------------------------------------------------------------

// The function's lock, if no other thread has it, and the mark that this thread is inside a call.
class FunctionLock {
 public:
  explicit FunctionLock(DispatcherObject* dispatcher) : dispatcher_(dispatcher) {
    PyObject* got = checked(PyObject_CallOneArg(dispatcher->acquire, Py_False));
    taken = got == Py_True;
    Py_DECREF(got);
  }

  // Mark the thread as inside a call, wherever Python code may run.
  void mark() {
    if (PyObject_SetAttr(dispatcher_->here, inside_name, Py_True) < 0) throw PythonError();
    marked_ = true;
  }

  ~FunctionLock() {
    if (!taken) return;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (marked_ && PyObject_SetAttr(dispatcher_->here, inside_name, Py_False) < 0) PyErr_WriteUnraisable(nullptr);
    PyObject* done = PyObject_CallNoArgs(dispatcher_->release);
    if (done == nullptr) PyErr_WriteUnraisable(nullptr);
    Py_XDECREF(done);
    PyErr_Restore(type, value, trace);
  }

  bool taken;

 private:
  DispatcherObject* dispatcher_;
  bool marked_ = false;
};

bool is_inside(DispatcherObject* self) {
  PyObject* inside = checked(PyObject_GetAttr(self->here, inside_name));
  bool answer = inside != Py_False;
  Py_DECREF(inside);
  return answer;
}

// The plan that a call matches, in a new reference; nullptr if there is none.
PlanObject* find(DispatcherObject* self, PyObject* args, PyObject* kwargs, Call& call) {
  if (self->plans->empty() || is_under_mode()) return nullptr;
  Settings settings = current_settings();
  // By position: a guard may run code that changes the list.
  for (size_t i = 0; i < self->plans->size(); ++i) {
    PlanObject* plan = (*self->plans)[i];
    Py_INCREF(plan);
    call.clear();
    bool fits = false;
    try {
      fits = matches(*plan->state, args, kwargs, settings, call);
    } catch (const std::exception&) {  // a tensor that has no address, for one
    }
    if (fits) {
      if (i != 0 && i < self->plans->size() && (*self->plans)[i] == plan) {
        std::rotate(self->plans->begin(), self->plans->begin() + i, self->plans->begin() + i + 1);
      }
      return plan;
    }
    Py_DECREF(plan);
  }
  return nullptr;
}

void count(DispatcherObject* self, PlanState& plan) {
  ++plan.hits;
  plan.stamp = ++self->clock;
}

// Make way for a replay under the function's lock.
void enter_replay(FunctionLock& lock, PlanObject* plan) {
  const Replay& replay = *plan->state->replay;
  const bool must_keep = replay.results.kept.must_keep();
  const bool runs_python = replay.launcher != nullptr || replay.host_work.function != nullptr;
  if (runs_python || !plan->state->released.empty() || must_keep) lock.mark();
  begin_to_keep(replay.results.kept);
}

PyObject* run_plan(DispatcherObject* self, PlanObject* found, Call& call, PyObject* args, PyObject* kwargs,
                   Stopwatch& watch) {
  PlanState& plan = *found->state;
  if (call.gradients != nullptr && plan.way != Way::Replay) return Py_NewRef(miss);  // their objects are to be passed
  if (plan.way == Way::Function) {
    count(self, plan);
    return checked(PyObject_Call(plan.callable, args, kwargs));
  }
  FunctionLock lock(self);
  if (!lock.taken || plan.dead) return Py_NewRef(miss);
  if (plan.way == Way::Replay) {
    enter_replay(lock, found);
    PyObject* result = run_replay(plan, call, args, watch);
    if (result == nullptr) return Py_NewRef(miss);
    count(self, plan);
    return result;
  }
  if (plan.stream && !replay_stream(*plan.stream)) return Py_NewRef(miss);
  lock.mark();
  release_arguments(plan, call, args);
  PyObject* result = call_executable(plan, call);
  count(self, plan);
  return result;
}

bool takes_call(PyObject* const* arguments, Py_ssize_t count) {
  if (count == 2 && PyTuple_Check(arguments[0]) && PyDict_Check(arguments[1])) return true;
  PyErr_SetString(PyExc_TypeError, "expected (args: tuple, kwargs: dict)");
  return false;
}

PyObject* dispatcher_dispatch(PyObject* object, PyObject* const* arguments, Py_ssize_t nargs) {
  auto* self = reinterpret_cast<DispatcherObject*>(object);
  if (!takes_call(arguments, nargs)) return nullptr;
  return translate_exceptions([&]() -> PyObject* {
    if (self->plans->empty() || is_inside(self)) return Py_NewRef(miss);
    Stopwatch watch(*self->profile);
    Call call;
    PlanObject* plan = find(self, arguments[0], arguments[1], call);
    if (plan == nullptr) return Py_NewRef(miss);
    watch.lap(Profile::Guards);
    PyObject* result = nullptr;
    try {
      result = run_plan(self, plan, call, arguments[0], arguments[1], watch);
    } catch (...) {
      Py_DECREF(plan);
      throw;
    }
    Py_DECREF(plan);
    return result;
  });
}

PyObject* dispatcher_match(PyObject* object, PyObject* const* arguments, Py_ssize_t nargs) {
  auto* self = reinterpret_cast<DispatcherObject*>(object);
  if (!takes_call(arguments, nargs)) return nullptr;
  return translate_exceptions([&]() -> PyObject* {
    Call call;
    PlanObject* plan = find(self, arguments[0], arguments[1], call);
    if (plan == nullptr) return Py_NewRef(Py_None);
    return reinterpret_cast<PyObject*>(plan);
  });
}

// ---- the plans -----------------------------------------------------------------------------------------------------

void remove_plans(DispatcherObject* self) {
  std::vector<PlanObject*> plans;
  plans.swap(*self->plans);
  for (PlanObject* plan : plans) {
    plan->state->dead = true;
    Py_DECREF(plan);
  }
}

PyObject* dispatcher_add(PyObject* object, PyObject* plan) {
  if (Py_TYPE(plan) != plan_type) {
    PyErr_SetString(PyExc_TypeError, "expected a Plan");
    return nullptr;
  }
  auto& plans = *reinterpret_cast<DispatcherObject*>(object)->plans;
  plans.insert(plans.begin(), reinterpret_cast<PlanObject*>(Py_NewRef(plan)));
  Py_RETURN_NONE;
}

PyObject* dispatcher_remove(PyObject* object, PyObject* plan) {
  auto& plans = *reinterpret_cast<DispatcherObject*>(object)->plans;
  auto found = std::find(plans.begin(), plans.end(), reinterpret_cast<PlanObject*>(plan));
  if (found != plans.end()) {
    plans.erase(found);
    reinterpret_cast<PlanObject*>(plan)->state->dead = true;
    Py_DECREF(plan);
  }
  Py_RETURN_NONE;
}

PyObject* dispatcher_remove_all(PyObject* object, PyObject*) {
  remove_plans(reinterpret_cast<DispatcherObject*>(object));
  Py_RETURN_NONE;
}

PyObject* dispatcher_tick(PyObject* object, PyObject*) {
  return PyLong_FromLongLong(++reinterpret_cast<DispatcherObject*>(object)->clock);
}

PyObject* dispatcher_profile(PyObject* object, PyObject* on) {
  Profile& profile = *reinterpret_cast<DispatcherObject*>(object)->profile;
  auto& parts = profile.nanoseconds;
  PyObject* result = Py_BuildValue("(ddddd)", parts[0], parts[1], parts[2], parts[3], parts[4]);
  parts.fill(0);
  profile.on = on == Py_True;
  return result;
}

// ---- the type ------------------------------------------------------------------------------------------------------

PyObject* dispatcher_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *acquire, *release, *here;
  if (!PyArg_ParseTuple(arguments, "OOO", &acquire, &release, &here)) return nullptr;
  auto* self = reinterpret_cast<DispatcherObject*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->acquire = Py_NewRef(acquire);
  self->release = Py_NewRef(release);
  self->here = Py_NewRef(here);
  self->plans = new std::vector<PlanObject*>();
  self->clock = 0;
  self->profile = new Profile();
  return reinterpret_cast<PyObject*>(self);
}

int dispatcher_traverse(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<DispatcherObject*>(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->acquire);
  Py_VISIT(self->release);
  Py_VISIT(self->here);
  if (self->plans != nullptr) {
    for (PlanObject* plan : *self->plans) Py_VISIT(reinterpret_cast<PyObject*>(plan));
  }
  return 0;
}

int dispatcher_clear(PyObject* object) {
  auto* self = reinterpret_cast<DispatcherObject*>(object);
  if (self->plans != nullptr) remove_plans(self);
  Py_CLEAR(self->acquire);
  Py_CLEAR(self->release);
  Py_CLEAR(self->here);
  return 0;
}

void dispatcher_dealloc(PyObject* object) {
  auto* self = reinterpret_cast<DispatcherObject*>(object);
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  dispatcher_clear(object);
  delete self->plans;
  delete self->profile;
  type->tp_free(object);
  Py_DECREF(type);
}

PyMethodDef dispatcher_methods[] = {
    {"dispatch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(dispatcher_dispatch)), METH_FASTCALL,
     "The result of a call, or MISS."},
    {"match", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(dispatcher_match)), METH_FASTCALL,
     "The plan that a call matches, or None; nothing is run."},
    {"add", dispatcher_add, METH_O, "Try this plan before the others."},
    {"remove", dispatcher_remove, METH_O, "Remove a plan, if it is here."},
    {"clear", dispatcher_remove_all, METH_NOARGS, "Remove all plans."},
    {"tick", dispatcher_tick, METH_NOARGS, "Advance the clock that stamps plans, and read it."},
    {"profile", dispatcher_profile, METH_O,
     "Nanoseconds in guards, lock, allocation, patches and launches since the last time; True starts measuring."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot dispatcher_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(dispatcher_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dispatcher_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(dispatcher_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(dispatcher_clear)},
    {Py_tp_methods, dispatcher_methods},
    {0, nullptr},
};

PyType_Spec dispatcher_spec = {
    "pygraph_native.Dispatcher", sizeof(DispatcherObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE, dispatcher_slots,
};

}  // namespace
}  // namespace pygraph
