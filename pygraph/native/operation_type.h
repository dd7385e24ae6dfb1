// The Python types `Operation` and `SavedTensors`: their descriptions, and what Python sees of them.
#pragma once

#include "operation_backward.h"

namespace pygraph {
namespace {

PyTypeObject* dispatcher_type = nullptr;

// ---- descriptions --------------------------------------------------------------------------------------------------

PyObject* optional_field(References& references, PyObject* description, const char* name) {
  PyObject* value = field(description, name);
  references.add(value);
  return value == Py_None ? nullptr : value;
}

std::vector<PyObject*> object_list(References& references, PyObject* tuple) {
  std::vector<PyObject*> objects;
  references.add(tuple);
  for_each(tuple, [&](PyObject* object) { objects.push_back(object); });
  return objects;
}

// (dispatcher, plan)
PlannedFunction describe_function(References& references, PyObject* description) {
  references.add(description);
  if (Py_TYPE(item(description, 0)) != dispatcher_type || Py_TYPE(item(description, 1)) != plan_type) {
    PyErr_SetString(PyExc_TypeError, "expected (Dispatcher, Plan)");
    throw PythonError();
  }
  auto* plan = reinterpret_cast<PlanObject*>(item(description, 1));
  return {reinterpret_cast<DispatcherObject*>(item(description, 0)), plan};
}

// Whether a plan is a replay, and a result is one of its outputs or what is none of its arguments.
bool makes_outputs(const PlanState& plan, size_t first_output) {
  if (plan.way != Way::Replay || !plan.released.empty()) return false;
  const auto& leaves = plan.replay->results.leaves;
  for (size_t i = 0; i < leaves.size(); ++i) {
    const bool is_output = leaves[i].kind == ResultLeaf::FromOutput;
    if (leaves[i].kind == ResultLeaf::Argument || (i >= first_output && i + 1 < leaves.size() && !is_output)) return false;
  }
  return true;
}

void describe_operation(OperationState& state, PyObject* description) {
  References& references = state.references;
  PyObject* call = field(description, "call");  // (args, kwargs)
  describe_tree(state.arguments, call, [](PyObject*) {});
  for (const TreeNode& node : state.arguments) {
    for (PyObject* key : node.keys) references.add(key);
  }
  state.tensors = to_small_ints(field(description, "tensors"));
  state.numbers = to_small_ints(field(description, "numbers"));
  state.lifted = object_list(references, field(description, "lifted"));
  state.forward = describe_function(references, field(description, "forward"));
  describe_structure(state.result, references, description);
  // After the leaves of the result come saved tensors, and then the pull-back.
  state.forward.makes_outputs = makes_outputs(state.forward.state(), state.result.is_tensor.size());
  state.passed = to_small_ints(field(description, "passed"));
  state.unread = to_small_ints(field(description, "unread"));
  state.returned = to_small_ints(field(description, "returned"));
  state.watched = object_list(references, field(description, "watched"));
  for_each(field(description, "mask"), [&](PyObject* one) { state.mask.push_back(one == Py_True); });
  state.apply = optional_field(references, description, "apply");
  state.preserve = optional_field(references, description, "preserve");
  state.kind = optional_field(references, description, "kind");
}

void describe_backward(OperationState& state, PyObject* description) {
  auto made = std::make_shared<BackwardCall>();
  BackwardCall& backward = *made;
  backward.function = describe_function(state.references, field(description, "backward"));
  backward.function.makes_outputs = makes_outputs(backward.function.state(), SIZE_MAX);
  backward.cotangents = to_small_ints(field(description, "cotangents"));
  backward.absent = to_small_ints(field(description, "absent"));
  backward.read = to_small_ints(field(description, "read"));
  backward.positions = to_small_ints(field(description, "positions"));
  backward.gradients = to_small_ints(field(description, "gradients"));
  for_each(field(description, "strided"), [&](PyObject* one) {  // (argument, sizes, strides)
    backward.strided.push_back({static_cast<int>(to_int(item(one, 0))), to_ints(item(one, 1)), to_ints(item(one, 2))});
  });
  state.backward = std::move(made);
}

// ---- operations ----------------------------------------------------------------------------------------------------

OperationState& operation_of(PyObject* object) { return *reinterpret_cast<OperationObject*>(object)->state; }

PyObject* operation_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject* description;
  if (!PyArg_ParseTuple(arguments, "O!", &PyDict_Type, &description)) return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  reinterpret_cast<OperationObject*>(self)->state = new OperationState();
  PyObject* made = translate_exceptions([&] {
    describe_operation(operation_of(self), description);
    return self;
  });
  if (made == nullptr) Py_DECREF(self);
  return made;
}

int operation_traverse(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<OperationObject*>(object);
  Py_VISIT(Py_TYPE(object));
  if (self->state != nullptr) Py_VISIT(self->state->references.list);
  return 0;
}

// What has been cleared is never called: its plans count as dead.
int operation_clear(PyObject* object) {
  auto* self = reinterpret_cast<OperationObject*>(object);
  if (self->state == nullptr) return 0;
  self->state->forward = {};
  self->state->backward.reset();
  self->state->watched.clear();
  Py_CLEAR(self->state->references.list);
  return 0;
}

void operation_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  operation_clear(object);
  delete reinterpret_cast<OperationObject*>(object)->state;
  type->tp_free(object);
  Py_DECREF(type);
}

PyObject* operation_call(PyObject* object, PyObject* args) {
  return translate_exceptions([&] { return call_operation(reinterpret_cast<OperationObject*>(object), args); });
}

PyObject* operation_plan_backward(PyObject* object, PyObject* description) {
  return translate_exceptions([&] {
    describe_backward(operation_of(object), description);
    return Py_NewRef(Py_None);
  });
}

PyObject* operation_is_dead(PyObject* object, void*) { return PyBool_FromLong(operation_of(object).forward.is_dead()); }

PyObject* operation_backward_plan(PyObject* object, void*) {
  const auto& backward = operation_of(object).backward;
  if (backward == nullptr || backward->function.is_dead()) Py_RETURN_NONE;
  return Py_NewRef(reinterpret_cast<PyObject*>(backward->function.plan));
}

PyMethodDef operation_methods[] = {
    {"call", operation_call, METH_O, "The result of a call, (args, kwargs), or MISS."},
    {"plan_backward", operation_plan_backward, METH_O, "Have backwards run as described from now on."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef operation_fields[] = {
    {"is_dead", operation_is_dead, nullptr, "Whether the plan of its forward is gone.", nullptr},
    {"backward_plan", operation_backward_plan, nullptr, "The plan that backwards run by, or None.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot operation_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(operation_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(operation_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(operation_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(operation_clear)},
    {Py_tp_methods, operation_methods},
    {Py_tp_getset, operation_fields},
    {0, nullptr},
};

PyType_Spec operation_spec = {
    "pygraph_native.Operation", sizeof(OperationObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE, operation_slots,
};

// ---- saved tensors -------------------------------------------------------------------------------------------------

SavedObject* saved_of(PyObject* object) { return reinterpret_cast<SavedObject*>(object); }

int saved_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(reinterpret_cast<PyObject*>(saved_of(object)->operation));
  Py_VISIT(saved_of(object)->tensors);
  Py_VISIT(saved_of(object)->numbers);
  Py_VISIT(saved_of(object)->before);
  return 0;
}

// An operation stays: a backward that comes all the same needs it to say that its tensors are gone.
int saved_clear(PyObject* object) {
  Py_CLEAR(saved_of(object)->tensors);
  Py_CLEAR(saved_of(object)->before);
  return 0;
}

void saved_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  saved_clear(object);
  Py_CLEAR(saved_of(object)->numbers);
  Py_XDECREF(reinterpret_cast<PyObject*>(saved_of(object)->operation));
  delete saved_of(object)->extras;
  delete saved_of(object)->versions;
  delete saved_of(object)->freed_by;
  type->tp_free(object);
  Py_DECREF(type);
}

PyObject* saved_backward(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2 || !PyTuple_Check(arguments[1])) {
    PyErr_SetString(PyExc_TypeError, "expected (needs_input_grad: tuple, cotangents: tuple)");
    return nullptr;
  }
  return translate_exceptions([&] { return call_backward(saved_of(object), arguments[0], arguments[1]); });
}

// All tensors that a call has saved as one list, None for one that has been freed; or None when all have been.
PyObject* saved_row(const SavedObject* self) {
  if (self->tensors == nullptr) return Py_NewRef(Py_None);
  Reference row(PySequence_List(self->tensors));
  for (const at::Tensor& tensor : *self->extras) {
    Reference object(tensor.defined() ? THPVariable_Wrap(tensor) : Py_NewRef(Py_None));
    if (PyList_Append(row.get(), object.get()) < 0) throw PythonError();
  }
  return Py_NewRef(row.get());
}

PyObject* saved_versions(const SavedObject* self) {
  Reference versions(PyList_New(self->versions->size()));
  for (size_t i = 0; i < self->versions->size(); ++i) {
    PyList_SET_ITEM(versions.get(), i, checked(PyLong_FromUnsignedLong((*self->versions)[i])));
  }
  return Py_NewRef(versions.get());
}

// The results that have been differentiated, which have freed what they read.
PyObject* saved_differentiated(const SavedObject* self) {
  const auto& freed_by = *self->freed_by;
  Reference results(PyList_New(0));
  for (int index : freed_by == nullptr ? std::vector<int>() : freed_by->cotangents) {
    Reference number(PyLong_FromLong(index));
    if (PyList_Append(results.get(), number.get()) < 0) throw PythonError();
  }
  return Py_NewRef(results.get());
}

// From here on, all backwards of the call are Python's.
PyObject* saved_take(PyObject* object, PyObject*) {
  return translate_exceptions([&] {
    SavedObject* self = saved_of(object);
    Reference row(saved_row(self)), versions(saved_versions(self)), differentiated(saved_differentiated(self));
    PyObject* before = self->before == nullptr ? Py_None : self->before;
    PyObject* all = checked(
        Py_BuildValue("(OOOOO)", row.get(), versions.get(), self->numbers, before, differentiated.get()));
    self->in_python = true;
    Py_CLEAR(self->tensors);
    self->extras->clear();
    Py_CLEAR(self->before);
    return all;
  });
}

PyObject* saved_operation(PyObject* object, void*) {
  return Py_NewRef(reinterpret_cast<PyObject*>(saved_of(object)->operation));
}

PyObject* saved_kind(PyObject* object, void*) {
  return Py_NewRef(saved_of(object)->operation->state->kind);
}

PyMethodDef saved_methods[] = {
    {"backward", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(saved_backward)), METH_FASTCALL,
     "The gradients of the call, or MISS."},
    {"take", saved_take, METH_NOARGS,
     "(row, versions, numbers, state before the call, results that freed theirs), and leave all that to Python."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef saved_fields[] = {
    {"operation", saved_operation, nullptr, "The operation.", nullptr},
    {"kind", saved_kind, nullptr, "What Python needs besides.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot saved_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(saved_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(saved_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(saved_clear)},
    {Py_tp_methods, saved_methods},
    {Py_tp_getset, saved_fields},
    {0, nullptr},
};

PyType_Spec saved_spec = {
    "pygraph_native.SavedTensors", sizeof(SavedObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION, saved_slots,
};

// ---- the module ----------------------------------------------------------------------------------------------------

// Add both types to the module; false with an exception.
bool add_operations(PyObject* module, PyObject* dispatchers) {
  dispatcher_type = reinterpret_cast<PyTypeObject*>(dispatchers);
  no_kwargs = PyDict_New();
  PyObject* operations = PyType_FromSpec(&operation_spec);
  PyObject* saved = PyType_FromSpec(&saved_spec);
  if (no_kwargs == nullptr || operations == nullptr || saved == nullptr) return false;
  saved_type = reinterpret_cast<PyTypeObject*>(saved);
  return PyModule_AddObjectRef(module, "Operation", operations) == 0;
}

}  // namespace
}  // namespace pygraph
