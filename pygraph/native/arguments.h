// Arguments of a call, matched with those of the planned call: their structure, the kind of every leaf, and the layout,
// alignment and gradient of every tensor. Tensors, addresses and numbers of a call are collected on the way.
#pragma once

#include "conversions.h"
#include "gradients.h"
#include "pytree.h"
#include "tensors.h"

#include <c10/util/SmallVector.h>

#include <cmath>
#include <cstring>

namespace pygraph {
namespace {

struct LeafSpec {
  enum Kind { Tensor, Integer, Float, Same, Equal, EqualFloat } kind;
  PyTypeObject* type;         // borrowed from the plan
  PyObject* value = nullptr;  // of a static leaf; borrowed from the plan
  uint64_t bits = 0;          // of a static float
  int index = 0;              // among tensors, or among numbers that are read at every call
};

struct TensorSpec {
  Layout layout;
  bool requires_grad;  // matters under no_grad too: a function may ask for it, or enable gradients inside
  bool host;           // graphs read it through a copy: its alignment does not matter
  bool empty;          // has no memory
  c10::DeleterFnPtr deleter = nullptr;  // of its device's allocator
  uint64_t alignment;

  explicit TensorSpec(const c10::TensorImpl& tensor) : layout(tensor) {}
};

struct ArgumentSpec {
  Tree tree;  // of args, then of kwargs
  std::vector<LeafSpec> leaves;
  std::vector<TensorSpec> tensors;
  int numbers = 0;
};

union Number {
  int64_t integer;
  double real;
};

// Leaves of the call that is being matched.
struct Call {
  c10::SmallVector<PyObject*, 40> leaves;    // owned: while Python code runs, a list may lose its items
  c10::SmallVector<c10::TensorImpl*, 40> tensors;
  c10::SmallVector<uint64_t, 40> addresses;  // by tensor
  c10::SmallVector<const void*, 40> storages;
  bool foreign = false;  // whether storages may overlap that begin at different addresses
  c10::SmallVector<Number, 8> numbers;
  GradientsObject* gradients = nullptr;  // the first argument, if it is such; its leaves are None above
  std::vector<at::Tensor> found;         // the gradients, as the arguments have been matched with them

  Call() = default;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() { clear(); }

  void add(PyObject* leaf) {
    Py_INCREF(leaf);
    leaves.push_back(leaf);
  }

  void clear() {
    tensors.clear();
    addresses.clear();
    storages.clear();
    foreign = false;
    numbers.clear();
    gradients = nullptr;
    found.clear();
    for (PyObject* leaf : leaves) Py_DECREF(leaf);
    leaves.clear();
  }
};

// The object of an argument's leaf, in a new reference.
PyObject* argument_object(const Call& call, size_t leaf) {
  if (leaf < call.found.size() && call.found[leaf].defined()) return checked(THPVariable_Wrap(call.found[leaf]));
  return Py_NewRef(call.leaves[leaf]);
}

// The tensor of an argument's leaf.
at::Tensor argument_tensor(const Call& call, size_t leaf) {
  return leaf < call.found.size() ? call.found[leaf] : THPVariable_Unpack(call.leaves[leaf]);
}

// mutable_data also gives a lazily cloned tensor memory of its own, as Tensor.data_ptr() does.
uint64_t argument_address(const TensorSpec& spec, c10::TensorImpl* tensor) {
  return spec.empty ? 0 : reinterpret_cast<uint64_t>(spec.host ? tensor->data() : tensor->mutable_data());
}

// ---- matching ------------------------------------------------------------------------------------------------------

bool match_tensor(const TensorSpec& spec, c10::TensorImpl* tensor, Call& call) {
  if (!spec.layout.fits(*tensor) || requires_grad(*tensor) != spec.requires_grad) return false;
  if (spec.requires_grad && may_have_hooks(*tensor)) return false;  // the path in Python sees which there are
  const uint64_t address = argument_address(spec, tensor);
  if (!spec.host && alignment_of(address) != spec.alignment) return false;
  call.tensors.push_back(tensor);
  call.addresses.push_back(address);
  call.storages.push_back(storage_of(*tensor));
  if (!spec.empty && is_foreign(*tensor, spec.deleter)) call.foreign = true;
  return true;
}

bool read_integer(PyObject* object, Call& call) {
  int overflow = 0;
  Number number;
  if (PyLong_Check(object)) {
    number.integer = PyLong_AsLongLongAndOverflow(object, &overflow);
  } else {
    PyObject* index = PyNumber_Index(object);
    if (index == nullptr) {
      PyErr_Clear();
      return false;
    }
    number.integer = PyLong_AsLongLongAndOverflow(index, &overflow);
    Py_DECREF(index);
  }
  if (overflow != 0) return false;
  call.numbers.push_back(number);
  return true;
}

bool read_float(PyObject* object, Call& call) {
  Number number;
  number.real = PyFloat_AsDouble(object);
  if (number.real == -1.0 && PyErr_Occurred()) {
    PyErr_Clear();
    return false;
  }
  if (!std::isfinite(number.real)) return false;
  call.numbers.push_back(number);
  return true;
}

// Whether an object is the static one or equal to it. Both are int or both str, exactly: no Python code compares them.
bool match_equal(const LeafSpec& leaf, PyObject* object) {
  if (object == leaf.value) return true;
  if (Py_TYPE(object) != leaf.type) return false;
  int equal = PyObject_RichCompareBool(object, leaf.value, Py_EQ);
  if (equal < 0) PyErr_Clear();
  return equal == 1;
}

bool match_bits(const LeafSpec& leaf, PyObject* object) {
  double value = PyFloat_AS_DOUBLE(object);
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits == leaf.bits;
}

bool match_leaf(const ArgumentSpec& spec, const LeafSpec& leaf, PyObject* object, Call& call) {
  bool fits = false;
  switch (leaf.kind) {
    case LeafSpec::Tensor:
      fits = Py_TYPE(object) == leaf.type &&
          match_tensor(spec.tensors[leaf.index], THPVariable_Unpack(object).unsafeGetTensorImpl(), call);
      break;
    case LeafSpec::Integer:
      fits = Py_TYPE(object) == leaf.type && read_integer(object, call);
      break;
    case LeafSpec::Float:
      fits = Py_TYPE(object) == leaf.type && read_float(object, call);
      break;
    case LeafSpec::Same:
      fits = object == leaf.value;
      break;
    case LeafSpec::Equal:
      fits = match_equal(leaf, object);
      break;
    case LeafSpec::EqualFloat:
      fits = Py_TYPE(object) == leaf.type && match_bits(leaf, object);
      break;
  }
  if (fits) call.add(object);
  return fits;
}

// Whether a gradient is of a class of Python; one that only its tensor refers to has never been an object there.
bool has_class(const at::Tensor& gradient, PyTypeObject* type) {
  if (gradient.use_count() == 1) return type == reinterpret_cast<PyTypeObject*>(THPVariableClass);
  PyObject* object = checked(THPVariable_Wrap(gradient));
  const bool has = Py_TYPE(object) == type;
  Py_DECREF(object);
  return has;
}

// Match gradients with a list of leaves.
bool match_gradients(const ArgumentSpec& spec, size_t& position, Py_ssize_t size, GradientsObject* object, Call& call) {
  const auto& tensors = *object->tensors;
  if (static_cast<Py_ssize_t>(tensors.size()) != size || !call.leaves.empty()) return false;
  call.gradients = object;
  call.found.reserve(size);
  for (const Differentiated& one : tensors) {
    if (spec.tree[position++].kind != TreeNode::Leaf) return false;
    const LeafSpec& leaf = spec.leaves[call.leaves.size()];
    const at::Tensor& gradient = one.gradient();
    if (!gradient.defined()) {
      if (leaf.kind != LeafSpec::Same || leaf.value != Py_None) return false;
    } else if (leaf.kind != LeafSpec::Tensor || !has_class(gradient, leaf.type) ||
               !match_tensor(spec.tensors[leaf.index], gradient.unsafeGetTensorImpl(), call)) {
      return false;
    }
    call.found.push_back(gradient);
    call.add(Py_None);
  }
  return true;
}

// Match an object with the node at `position` and the nodes below it.
bool match_tree(const ArgumentSpec& spec, size_t& position, PyObject* object, Call& call) {
  const TreeNode& node = spec.tree[position++];
  switch (node.kind) {
    case TreeNode::Leaf:
      return match_leaf(spec, spec.leaves[call.leaves.size()], object, call);
    case TreeNode::Tuple:
    case TreeNode::List:
    case TreeNode::Size:
      if (GradientsObject* gradients = as_gradients(object)) {
        return node.kind == TreeNode::List && match_gradients(spec, position, node.size, gradients, call);
      }
      if (Py_TYPE(object) != sequence_type(node.kind)) return false;
      if (PySequence_Fast_GET_SIZE(object) != node.size) return false;
      for (Py_ssize_t i = 0; i < node.size; ++i) {
        if (i >= PySequence_Fast_GET_SIZE(object)) return false;  // a list may change while a number is read
        if (!match_tree(spec, position, PySequence_Fast_GET_ITEM(object, i), call)) return false;
      }
      return true;
    case TreeNode::Dict: {
      if (Py_TYPE(object) != &PyDict_Type || PyDict_GET_SIZE(object) != node.size) return false;
      Py_ssize_t cursor = 0, index = 0;
      PyObject *key, *value;
      while (PyDict_Next(object, &cursor, &key, &value)) {
        if (index >= node.size) return false;
        PyObject* expected = node.keys[index++];
        bool same = key == expected ||
            (PyUnicode_CheckExact(key) && PyUnicode_CheckExact(expected) && PyUnicode_Compare(key, expected) == 0);
        if (!same || !match_tree(spec, position, value, call)) return false;
      }
      return index == node.size;
    }
    case TreeNode::Opened: {
      if (Py_TYPE(object) != opened_type) return false;
      OpenedParts parts(object);
      if (!parts.are_there() || parts.layout != node.keys[0] || PyList_GET_SIZE(parts.values) != node.size) return false;
      for (Py_ssize_t i = 0; i < node.size; ++i) {
        if (i >= PyList_GET_SIZE(parts.values)) return false;
        if (!match_tree(spec, position, PyList_GET_ITEM(parts.values, i), call)) return false;
      }
      return true;
    }
  }
  return false;
}

// ---- the planned call ----------------------------------------------------------------------------------------------

void describe_tensor(ArgumentSpec& spec, PyObject* object, Call& call) {
  c10::TensorImpl* tensor = THPVariable_Unpack(object).unsafeGetTensorImpl();
  TensorSpec one(*tensor);
  one.requires_grad = tensor->requires_grad();
  one.host = tensor->is_cpu();
  one.empty = tensor->numel() == 0;
  const uint64_t address = argument_address(one, tensor);
  one.alignment = alignment_of(address);
  one.deleter = deleter_of(tensor->device_type());
  spec.tensors.push_back(one);
  call.tensors.push_back(tensor);
  call.addresses.push_back(address);
  call.storages.push_back(storage_of(*tensor));
}

// Describe a leaf of (args, kwargs); `live` are the positions of numbers that are read at every call.
void describe_leaf(ArgumentSpec& spec, References& references, PyObject* object, PyObject* live, Call& call) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject* position = checked(PyLong_FromSize_t(call.leaves.size()));
  int is_live = PySet_Contains(live, position);
  Py_DECREF(position);
  if (is_live < 0) throw PythonError();
  LeafSpec leaf{LeafSpec::Same, type};
  references.add(reinterpret_cast<PyObject*>(type));
  if (THPVariable_Check(object)) {
    leaf.kind = LeafSpec::Tensor;
    leaf.index = static_cast<int>(call.tensors.size());
    describe_tensor(spec, object, call);
  } else if (is_live) {
    leaf.kind = PyFloat_Check(object) || !PyIndex_Check(object) ? LeafSpec::Float : LeafSpec::Integer;
    leaf.index = spec.numbers++;
  } else {
    leaf.value = object;
    references.add(object);
    if (type == &PyFloat_Type) {
      leaf.kind = LeafSpec::EqualFloat;
      double value = PyFloat_AS_DOUBLE(object);
      std::memcpy(&leaf.bits, &value, sizeof(value));
    } else if (type == &PyLong_Type || type == &PyUnicode_Type) {
      leaf.kind = LeafSpec::Equal;
    }
  }
  spec.leaves.push_back(leaf);
  call.add(object);
}

// Describe the arguments of a call, and collect them in `call`.
void describe_arguments(ArgumentSpec& spec, References& references, PyObject* args, PyObject* kwargs, PyObject* live,
                        Call& call) {
  auto add = [&](PyObject* leaf) { describe_leaf(spec, references, leaf, live, call); };
  describe_tree(spec.tree, args, add);
  describe_tree(spec.tree, kwargs, add);
  for (const TreeNode& node : spec.tree) {
    for (PyObject* key : node.keys) references.add(key);
  }
}

}  // namespace
}  // namespace pygraph
