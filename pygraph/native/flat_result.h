// Results of a function as flat lists: leaves of its structure, and tensors that share memory with no others.
#pragma once

#include "dispatcher.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <vector>

namespace pygraph {
namespace {

using Borrowed = c10::SmallVector<PyObject*, 64>;

const at::Tensor& tensor_of(PyObject* object) { return THPVariable_Unpack(object); }

// A reference that is dropped at the end of a scope.
class Reference {
 public:
  explicit Reference(PyObject* object) : object_(checked(object)) {}
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  ~Reference() { Py_DECREF(object_); }
  PyObject* get() const { return object_; }

 private:
  PyObject* object_;
};

// Append the leaves of an object; false if its structure is another.
bool collect_leaves(const Tree& tree, size_t& position, PyObject* object, Borrowed& leaves) {
  const TreeNode& node = tree[position++];
  switch (node.kind) {
    case TreeNode::Leaf:
      leaves.push_back(object);
      return true;
    case TreeNode::Tuple:
    case TreeNode::List:
    case TreeNode::Size:
      if (Py_TYPE(object) != sequence_type(node.kind)) return false;
      if (PySequence_Fast_GET_SIZE(object) != node.size) return false;
      for (Py_ssize_t i = 0; i < node.size; ++i) {
        if (!collect_leaves(tree, position, PySequence_Fast_GET_ITEM(object, i), leaves)) return false;
      }
      return true;
    case TreeNode::Dict: {
      if (Py_TYPE(object) != &PyDict_Type || PyDict_GET_SIZE(object) != node.size) return false;
      Py_ssize_t cursor = 0;
      PyObject *key, *value;
      while (PyDict_Next(object, &cursor, &key, &value)) {
        if (!collect_leaves(tree, position, value, leaves)) return false;
      }
      return true;
    }
    case TreeNode::Opened: {
      if (Py_TYPE(object) != opened_type) return false;
      OpenedParts parts(object);
      if (!parts.are_there() || PyList_GET_SIZE(parts.values) != node.size) return false;
      for (Py_ssize_t i = 0; i < node.size; ++i) {
        if (!collect_leaves(tree, position, PyList_GET_ITEM(parts.values, i), leaves)) return false;
      }
      return true;
    }
  }
  return false;
}

// As `pygraph.autograd.input_aliases.without_bases`: of a tuple of new tensors and None, replace the views that share
// memory with no other tensor. `each_operand` calls its argument with every tensor that was passed.
template <typename EachOperand>
void remove_bases(PyObject* results, EachOperand each_operand) {
  auto storage = [](const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(); };
  auto each_result = [&](auto visit) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(results); ++i) {
      PyObject* object = PyTuple_GET_ITEM(results, i);
      if (THPVariable_Check(object)) visit(i, tensor_of(object));
    }
  };
  bool any = false;
  each_result([&](Py_ssize_t, const at::Tensor& tensor) { any = any || tensor.is_view(); });
  if (!any) return;
  std::unordered_map<const c10::StorageImpl*, int> count;
  each_result([&](Py_ssize_t, const at::Tensor& tensor) { ++count[storage(tensor)]; });
  each_operand([&](const at::Tensor& tensor) { ++count[storage(tensor)]; });
  each_result([&](Py_ssize_t index, const at::Tensor& tensor) {
    if (!tensor.is_view() || count[storage(tensor)] != 1) return;
    PyObject* plain = checked(THPVariable_Wrap(tensor.variable_data()));
    PyObject* before = PyTuple_GET_ITEM(results, index);
    PyTuple_SET_ITEM(results, index, plain);
    Py_DECREF(before);
  });
}

// The structure of results of a function.
struct ResultStructure {
  Tree tree;
  std::vector<bool> is_tensor;    // by leaf
  PyObject* flatten = nullptr;    // makes a list of the leaves of a result that is no such tree
  PyObject* unflatten = nullptr;  // makes a result of such a list
};

// A result: its tensors, and the other leaves, as numbers, which may be others in each call.
class FlatResult {
 public:
  FlatResult(const ResultStructure& structure, PyObject* result)
      : structure_(structure), leaves_(structure.is_tensor.size()) {
    if (structure.flatten != nullptr) {
      Reference list(PyObject_CallOneArg(structure.flatten, result));
      if (!PyList_Check(list.get()) || PyList_GET_SIZE(list.get()) != static_cast<Py_ssize_t>(leaves_.objects.size())) {
        fail();
      }
      for (size_t i = 0; i < leaves_.objects.size(); ++i) {
        leaves_.objects[i] = Py_NewRef(PyList_GET_ITEM(list.get(), i));
      }
    } else {
      Borrowed found;
      size_t position = 0;
      if (!collect_leaves(structure.tree, position, result, found)) fail();
      for (size_t i = 0; i < found.size(); ++i) leaves_.objects[i] = Py_NewRef(found[i]);
    }
    collect_tensors();
  }

  // The result that is the first leaves of what a replay returns.
  FlatResult(const ResultStructure& structure, const Results& results, const Call& call,
             const std::vector<at::Tensor>& outputs)
      : structure_(structure), leaves_(structure.is_tensor.size()) {
    for (size_t i = 0; i < leaves_.objects.size(); ++i) leaves_.objects[i] = wrap(results, i, call, outputs);
    collect_tensors();
  }

  PyObject* tensors() const { return tensors_->get(); }  // borrowed, a tuple

  // The result with other tensors, a tuple.
  PyObject* with(PyObject* tensors) {
    Py_ssize_t next = 0;
    for (size_t i = 0; i < leaves_.objects.size(); ++i) {
      if (structure_.is_tensor[i]) Py_SETREF(leaves_.objects[i], Py_NewRef(item(tensors, next++)));
    }
    if (structure_.unflatten == nullptr) {
      size_t node = 0, leaf = 0;
      return checked(unflatten(structure_.tree, node, leaves_.objects, leaf));
    }
    Reference list(PyList_New(leaves_.objects.size()));
    for (size_t i = 0; i < leaves_.objects.size(); ++i) {
      PyList_SET_ITEM(list.get(), i, std::exchange(leaves_.objects[i], nullptr));
    }
    return checked(PyObject_CallOneArg(structure_.unflatten, list.get()));
  }

 private:
  void collect_tensors() {
    const auto& is_tensor = structure_.is_tensor;
    tensors_.emplace(PyTuple_New(std::count(is_tensor.begin(), is_tensor.end(), true)));
    Py_ssize_t next = 0;
    for (size_t i = 0; i < is_tensor.size(); ++i) {
      if (is_tensor[i]) PyTuple_SET_ITEM(tensors_->get(), next++, Py_NewRef(leaves_.objects[i]));
    }
  }

  [[noreturn]] static void fail() {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "pygraph: a result has another structure than before");
    throw PythonError();
  }

  const ResultStructure& structure_;
  OwnedObjects leaves_;
  std::optional<Reference> tensors_;
};

// ---- their description ---------------------------------------------------------------------------------------------

// An example, whose leaves are whether they are tensors; or else such a list of leaves, and functions.
void describe_structure(ResultStructure& structure, References& references, PyObject* description) {
  PyObject* example = field(description, "example");
  references.add(example);
  describe_tree(structure.tree, example, [&](PyObject* leaf) { structure.is_tensor.push_back(leaf == Py_True); });
  for (const TreeNode& node : structure.tree) {
    for (PyObject* key : node.keys) references.add(key);
  }
  if (field(description, "flatten") == Py_None) return;
  structure.flatten = field(description, "flatten");
  structure.unflatten = field(description, "unflatten");
  references.add(structure.flatten);
  references.add(structure.unflatten);
}

}  // namespace
}  // namespace pygraph
