// The Python types `Operation` and `SavedTensors` of operation.h: their descriptions, and what Python sees of them.
#pragma once

#include "operation.h"

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
  return {reinterpret_cast<DispatcherObject*>(item(description, 0)), reinterpret_cast<PlanObject*>(item(description, 1))};
}

// The structure of the function's result: an example, whose leaves are whether they are tensors, or else a function that
// flattens it.
void describe_function_result(OperationState& state, PyObject* description) {
  state.flatten = optional_field(state.references, description, "flatten");
  if (state.flatten != nullptr) return;
  describe_tree(state.result, field(description, "example"), [&](PyObject* leaf) {
    state.is_tensor.push_back(leaf == Py_True);
  });
  for (const TreeNode& node : state.result) {
    for (PyObject* key : node.keys) state.references.add(key);
  }
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
  state.passed = to_small_ints(field(description, "passed"));
  state.unread = to_small_ints(field(description, "unread"));
  state.returned = to_small_ints(field(description, "returned"));
  state.watched = object_list(references, field(description, "watched"));
  for_each(field(description, "mask"), [&](PyObject* one) { state.mask.push_back(one == Py_True); });
  state.apply = optional_field(references, description, "apply");
  state.preserve = optional_field(references, description, "preserve");
  state.context = optional_field(references, description, "context");
  describe_function_result(state, description);
}

void describe_backward(OperationState& state, PyObject* description) {
  BackwardCall backward;
  backward.function = describe_function(state.references, field(description, "backward"));
  backward.cotangents = to_small_ints(field(description, "cotangents"));
  backward.positions = to_small_ints(field(description, "positions"));
  backward.gradients = to_small_ints(field(description, "gradients"));
  for_each(field(description, "strided"), [&](PyObject* one) {  // (argument, sizes, strides)
    backward.strided.push_back({static_cast<int>(to_int(item(one, 0))), to_ints(item(one, 1)), to_ints(item(one, 2))});
  });
  state.backward = std::move(backward);
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

PyObject* operation_has_backward(PyObject* object, void*) {
  const auto& backward = operation_of(object).backward;
  return PyBool_FromLong(backward.has_value() && !backward->function.is_dead());
}

PyMethodDef operation_methods[] = {
    {"call", operation_call, METH_O, "The result of a call, (args, kwargs), or MISS."},
    {"plan_backward", operation_plan_backward, METH_O, "Have backwards run as described from now on."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef operation_fields[] = {
    {"is_dead", operation_is_dead, nullptr, "Whether the plan of its forward is gone.", nullptr},
    {"has_backward", operation_has_backward, nullptr, "Whether it has a plan of its backward.", nullptr},
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
  Py_VISIT(saved_of(object)->row);
  Py_VISIT(saved_of(object)->numbers);
  Py_VISIT(saved_of(object)->before);
  return 0;
}

// An operation stays: a backward that comes all the same needs it to say that its tensors are gone.
int saved_clear(PyObject* object) {
  Py_CLEAR(saved_of(object)->row);
  Py_CLEAR(saved_of(object)->before);
  return 0;
}

void saved_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  saved_clear(object);
  Py_CLEAR(saved_of(object)->numbers);
  Py_XDECREF(reinterpret_cast<PyObject*>(saved_of(object)->operation));
  delete saved_of(object)->versions;
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

// From here on, all backwards of the call are Python's.
PyObject* saved_take(PyObject* object, PyObject*) {
  SavedObject* self = saved_of(object);
  self->in_python = true;
  PyObject* versions = PyList_New(0);
  if (versions == nullptr) return nullptr;
  for (uint32_t version : *self->versions) {
    PyObject* number = PyLong_FromUnsignedLong(version);
    if (number == nullptr || PyList_Append(versions, number) < 0) {
      Py_XDECREF(number);
      Py_DECREF(versions);
      return nullptr;
    }
    Py_DECREF(number);
  }
  PyObject* row = std::exchange(self->row, nullptr);
  if (row == nullptr) row = Py_NewRef(Py_None);
  PyObject* before = self->before == nullptr ? Py_NewRef(Py_None) : std::exchange(self->before, nullptr);
  return Py_BuildValue("(NNON)", row, versions, self->numbers, before);
}

PyObject* saved_operation(PyObject* object, void*) {
  return Py_NewRef(reinterpret_cast<PyObject*>(saved_of(object)->operation));
}

PyObject* saved_context(PyObject* object, void*) {
  PyObject* context = saved_of(object)->operation->state->context;
  return Py_NewRef(context == nullptr ? Py_None : context);
}

PyMethodDef saved_methods[] = {
    {"backward", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(saved_backward)), METH_FASTCALL,
     "The gradients of the call, or MISS."},
    {"take", saved_take, METH_NOARGS, "(row, versions, numbers, state before the call), and leave all that to Python."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef saved_fields[] = {
    {"operation", saved_operation, nullptr, "The operation.", nullptr},
    {"context", saved_context, nullptr, "What Python needs besides.", nullptr},
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
