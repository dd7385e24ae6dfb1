// The call path of a transformed function that has been called like this before, and the module that holds it.
//
//   dispatcher.h       a call: no mode is active, no call is around it; which plan matches; the function's lock
//   plan.h             what must match, in this order:
//     torch_settings.h   torch's settings, autocast
//     arguments.h        structure, leaves, layout and alignment of tensors (pytree.h, tensors.h, gradients.h)
//     sharing.h          memory that tensors share
//     captured.h         captured tensors
//     guards.h           Python's state (dict_guards.h, code_guards.h, container_guards.h, guarded_values.h)
//   running.h          the call, if one matched: arguments that it releases, memory for results, then
//     profiler_range.h   the range that profilers show
//     replay.h           stream and launch
//     node_parameters.h  addresses and numbers in the graph's nodes
//     results.h          results
//   operation.h        a call under autograd (flat_result.h, operation_backward.h, operation_type.h, result_link.h)
//   plan_type.h        a plan, made of the description that pygraph/calls/plan_description.py writes
//
// A call that no plan matches is a miss, and Python serves it.
#include "dispatcher.h"
#include "objects.h"
#include "operation_type.h"
#include "result_link.h"

namespace pygraph {
namespace {

PyMethodDef functions[] = {
    {"referrers_of", referrers_of, METH_VARARGS, "Objects that refer to one of the arguments."},
    {"references_leading_to", references_leading_to, METH_VARARGS,
     "The references on all ways to a list's items, by way of these ids and not of those."},
    {"classes_of_objects", classes_of_objects, METH_NOARGS, "The classes of all objects that the collector knows."},
    {"objects_of", objects_of, METH_VARARGS, "All objects of these classes that the collector knows."},
    {"link_results", link_results, METH_VARARGS, "Give results nodes of their own in the graph of autograd."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "pygraph_native", "The call path in C++; see pygraph.native.", -1,
    functions, nullptr, nullptr, nullptr, nullptr,
};

PyObject* make_module() {
  PyObject* module = PyModule_Create(&module_definition);
  if (module == nullptr) return nullptr;
  prepare_watchers();
  inside_name = PyUnicode_InternFromString("inside");
  layout_name = PyUnicode_InternFromString("layout");
  values_name = PyUnicode_InternFromString("values");
  PyObject* plan = PyType_FromSpec(&plan_spec);
  PyObject* dispatcher = PyType_FromSpec(&dispatcher_spec);
  PyObject* gradients = PyType_FromSpec(&gradients_spec);
  miss = PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type));
  if (inside_name == nullptr || layout_name == nullptr || values_name == nullptr) return nullptr;
  if (plan == nullptr || dispatcher == nullptr || gradients == nullptr || miss == nullptr) return nullptr;
  plan_type = reinterpret_cast<PyTypeObject*>(plan);
  gradients_type = reinterpret_cast<PyTypeObject*>(gradients);
  if (PyModule_AddObjectRef(module, "Gradients", gradients) < 0 ||
      PyModule_AddObjectRef(module, "Plan", plan) < 0 || PyModule_AddObjectRef(module, "Dispatcher", dispatcher) < 0 ||
      PyModule_AddObjectRef(module, "MISS", miss) < 0 || !add_operations(module, dispatcher)) {
    return nullptr;
  }
  return module;
}

}  // namespace
}  // namespace pygraph

PyMODINIT_FUNC PyInit_pygraph_native() { return pygraph::make_module(); }
