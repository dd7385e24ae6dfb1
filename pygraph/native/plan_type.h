// The Python type `Plan`: made of a call and of the description that pygraph/calls/plan_description.py writes.
#pragma once

#include "plan.h"
#include "running.h"

namespace pygraph {
namespace {

PyTypeObject* plan_type = nullptr;

// ---- the description -----------------------------------------------------------------------------------------------

// Whether two flattenings of the arguments agree: that of C++, and that of Python.
bool has_leaves(const Call& call, PyObject* leaves) {
  if (PyList_GET_SIZE(leaves) != static_cast<Py_ssize_t>(call.leaves.size())) return false;
  for (size_t i = 0; i < call.leaves.size(); ++i) {
    if (PyList_GET_ITEM(leaves, i) != call.leaves[i]) return false;
  }
  return true;
}

// Describe all that a call must match by the planned call itself.
void describe_call(PlanState& plan, PyObject* args, PyObject* kwargs, PyObject* description, Call& call) {
  PyObject* opened = PyDict_GetItemString(description, "opened");  // a class that is never gone; none of a region
  if (opened != nullptr) opened_type = reinterpret_cast<PyTypeObject*>(opened);
  describe_arguments(plan.arguments, plan.references, args, kwargs, field(description, "live"), call);
  if (!has_leaves(call, field(description, "leaves")) || is_under_mode() || has_overlaps(plan.arguments, call)) {
    PyErr_SetString(PyExc_ValueError, "this kind of call cannot be planned");
    throw PythonError();
  }
  plan.sharing.describe(plan.arguments, call);
  PyObject* device = field(description, "device");
  if (device == Py_None) {
    plan.settings.set(std::nullopt);
  } else {
    const char* name = PyUnicode_AsUTF8(device);
    if (name == nullptr) throw PythonError();
    plan.settings.set(c10::Device(name).type());
  }
}

void describe_released(PlanState& plan, PyObject* args, PyObject* description, const Call& call) {
  plan.released = to_small_ints(field(description, "released"));
  for (int index : plan.released) {
    PyObject* first = item(args, 0);
    if (!PyList_CheckExact(first) || PyList_GetItem(first, index) != call.leaves.at(index)) {
      PyErr_Format(PyExc_ValueError, "item %d of the first argument is not leaf %d", index, index);
      throw PythonError();
    }
  }
}

void describe_way(PlanState& plan, PyObject* description) {
  plan.callable = field(description, "callable");
  plan.references.add(plan.callable);
  plan.is_eager = flag(description, "is_eager");
  PyObject* most_hits = field(description, "most_hits");
  if (most_hits != Py_None) plan.most_hits = to_word(most_hits);
  plan.way = flag(description, "is_executable") ? Way::Executable : Way::Function;
  PyObject* stream = field(description, "stream");
  if (stream != Py_None) plan.stream = describe_stream(plan.references, stream);
  PyObject* replay = field(description, "replay");
  if (replay != Py_None) {
    plan.replay = describe_replay(plan.arguments, plan.captured, plan.references, replay);
    plan.way = Way::Replay;
    plan.settings.device_index = static_cast<int>(to_int(plan.stream->device_index));
  }
}

void describe_plan(PlanState& plan, PyObject* args, PyObject* kwargs, PyObject* description) {
  Call call;
  describe_call(plan, args, kwargs, description, call);
  describe_released(plan, args, description, call);
  plan.captured = describe_captured(plan.references, field(description, "captured"));
  for_each(field(description, "owned"), [&](PyObject* range) {
    plan.sharing.owned.emplace_back(to_word(item(range, 0)), to_word(item(range, 1)));
  });
  describe_environment(plan.environment, plan.references, field(description, "environment"));
  describe_way(plan, description);
  plan.environment.arm();
}

// ---- the type ------------------------------------------------------------------------------------------------------

PlanState& state_of(PyObject* object) { return *reinterpret_cast<PlanObject*>(object)->state; }

PyObject* plan_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *args, *kwargs, *description;
  if (!PyArg_ParseTuple(
          arguments, "O!O!O!", &PyTuple_Type, &args, &PyDict_Type, &kwargs, &PyDict_Type, &description)) {
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  reinterpret_cast<PlanObject*>(self)->state = new PlanState();
  PyObject* made = translate_exceptions([&] {
    describe_plan(state_of(self), args, kwargs, description);
    return self;
  });
  if (made == nullptr) Py_DECREF(self);
  return made;
}

int plan_traverse(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<PlanObject*>(object);
  Py_VISIT(Py_TYPE(object));
  if (self->state == nullptr) return 0;
  Py_VISIT(self->state->references.list);
  return self->state->environment.traverse(visit, arg);
}

int plan_clear(PyObject* object) {
  auto* self = reinterpret_cast<PlanObject*>(object);
  if (self->state != nullptr) {
    self->state->dead = true;
    self->state->environment.clear();
    Py_CLEAR(self->state->references.list);
  }
  return 0;
}

void plan_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  plan_clear(object);
  delete reinterpret_cast<PlanObject*>(object)->state;
  type->tp_free(object);
  Py_DECREF(type);
}

// Replay within a call that Python serves, under the function's lock; what the call must match, Python has compared.
PyObject* plan_replay(PyObject* object, PyObject* args) {
  return translate_exceptions([&]() -> PyObject* {
    PlanState& plan = state_of(object);
    Call call;
    size_t position = 0;
    if (plan.dead || is_under_mode() || !plan.settings.is_device_current() ||
        !match_tree(plan.arguments, position, args, call)) {
      return Py_NewRef(miss);
    }
    begin_to_keep(plan.replay->results.kept);
    Profile unused;
    Stopwatch watch(unused);
    PyObject* result = run_replay(plan, call, args, watch);
    return result == nullptr ? Py_NewRef(miss) : result;
  });
}

PyObject* plan_end(PyObject* object, PyObject*) {
  state_of(object).dead = true;
  Py_RETURN_NONE;
}

PyObject* plan_hits(PyObject* object, void*) { return PyLong_FromLongLong(state_of(object).hits); }

PyObject* plan_stamp(PyObject* object, void*) { return PyLong_FromLongLong(state_of(object).stamp); }

PyObject* plan_patches(PyObject* object, void*) { return PyLong_FromLongLong(state_of(object).patches); }

PyObject* plan_way(PyObject* object, void*) {
  switch (state_of(object).way) {
    case Way::Replay: return PyUnicode_FromString("replay");
    case Way::Executable: return PyUnicode_FromString("executable");
    default: return PyUnicode_FromString("function");
  }
}

PyGetSetDef plan_fields[] = {
    {"hits", plan_hits, nullptr, "How many calls it ran.", nullptr},
    {"stamp", plan_stamp, nullptr, "When it ran last, by the dispatcher's clock.", nullptr},
    {"patches", plan_patches, nullptr, "How many nodes it sent to the driver.", nullptr},
    {"way", plan_way, nullptr, "How calls run: 'replay', 'executable' or 'function'.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef plan_methods[] = {
    {"replay", plan_replay, METH_O, "The result of a replay on a tuple of leaves, or MISS; of plans of one graph."},
    {"end", plan_end, METH_NOARGS, "Serve no call any more."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot plan_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(plan_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(plan_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(plan_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(plan_clear)},
    {Py_tp_getset, plan_fields},
    {Py_tp_methods, plan_methods},
    {0, nullptr},
};

PyType_Spec plan_spec = {
    "pygraph_native.Plan", sizeof(PlanObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE, plan_slots,
};

}  // namespace
}  // namespace pygraph
