// Nested tuples, lists, dicts, sizes, and objects that were taken apart (pygraph/guards/opened.py): described by an
// example of them; tuples, lists and dicts are also built of leaves.
#pragma once

#include <Python.h>

#include <torch/csrc/Size.h>

#include <utility>
#include <vector>

namespace pygraph {
namespace {

struct TreeNode {
  enum Kind { Tuple, List, Dict, Size, Opened, Leaf } kind;
  Py_ssize_t size = 0;
  std::vector<PyObject*> keys;  // of a dict, in order, or the layout of an opened object; borrowed from the plan
};

// The class of objects that were taken apart, and the names of their layout and their leaves.
PyTypeObject* opened_type = nullptr;
PyObject* layout_name = nullptr;
PyObject* values_name = nullptr;

// The layout and the list of leaves of an object that was taken apart.
struct OpenedParts {
  PyObject* layout;
  PyObject* values;

  explicit OpenedParts(PyObject* object)
      : layout(PyObject_GetAttr(object, layout_name)), values(PyObject_GetAttr(object, values_name)) {
    if (layout == nullptr || values == nullptr) PyErr_Clear();
  }
  OpenedParts(const OpenedParts&) = delete;
  OpenedParts& operator=(const OpenedParts&) = delete;
  ~OpenedParts() {
    Py_XDECREF(layout);
    Py_XDECREF(values);
  }

  bool are_there() const { return layout != nullptr && values != nullptr && PyList_CheckExact(values); }
};

// The class of tuples, lists or sizes, of which `PySequence_Fast` reads the items.
inline PyTypeObject* sequence_type(TreeNode::Kind kind) {
  return kind == TreeNode::Tuple ? &PyTuple_Type : kind == TreeNode::List ? &PyList_Type : &THPSizeType;
}

using Tree = std::vector<TreeNode>;  // each node before its children

// Append the nodes of a container, whose keys the caller refers to, and call `add` with each leaf.
template <typename Add>
void describe_tree(Tree& tree, PyObject* object, Add add) {
  PyTypeObject* type = Py_TYPE(object);
  if (type == &PyTuple_Type || type == &PyList_Type || type == &THPSizeType) {
    Py_ssize_t size = PySequence_Fast_GET_SIZE(object);
    const auto kind = type == &PyTuple_Type ? TreeNode::Tuple : type == &PyList_Type ? TreeNode::List : TreeNode::Size;
    tree.push_back({kind, size, {}});
    for (Py_ssize_t i = 0; i < size; ++i) describe_tree(tree, PySequence_Fast_GET_ITEM(object, i), add);
  } else if (type == &PyDict_Type) {
    TreeNode node{TreeNode::Dict, PyDict_GET_SIZE(object), {}};
    Py_ssize_t cursor = 0;
    PyObject *key, *value;
    while (PyDict_Next(object, &cursor, &key, &value)) node.keys.push_back(key);
    tree.push_back(std::move(node));
    cursor = 0;
    while (PyDict_Next(object, &cursor, &key, &value)) describe_tree(tree, value, add);
  } else if (type == opened_type) {
    OpenedParts parts(object);
    if (!parts.are_there()) {
      tree.push_back({TreeNode::Leaf, 0, {}});
      add(object);
      return;
    }
    const Py_ssize_t size = PyList_GET_SIZE(parts.values);
    tree.push_back({TreeNode::Opened, size, {parts.layout}});
    for (Py_ssize_t i = 0; i < size; ++i) describe_tree(tree, PyList_GET_ITEM(parts.values, i), add);
  } else {
    tree.push_back({TreeNode::Leaf, 0, {}});
    add(object);
  }
}

// The container at a node, whose leaves are moved out of `leaves`; nullptr with an exception.
PyObject* unflatten(const Tree& tree, size_t& position, std::vector<PyObject*>& leaves, size_t& leaf) {
  const TreeNode& node = tree[position++];
  if (node.kind == TreeNode::Leaf) return std::exchange(leaves[leaf++], nullptr);
  PyObject* made = node.kind == TreeNode::Tuple ? PyTuple_New(node.size)
      : node.kind == TreeNode::List             ? PyList_New(node.size)
                                                : PyDict_New();
  if (made == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < node.size; ++i) {
    PyObject* child = unflatten(tree, position, leaves, leaf);
    bool added = child != nullptr;
    if (added && node.kind == TreeNode::Dict) {
      added = PyDict_SetItem(made, node.keys[i], child) == 0;
      Py_DECREF(child);
    } else if (added && node.kind == TreeNode::Tuple) {
      PyTuple_SET_ITEM(made, i, child);
    } else if (added) {
      PyList_SET_ITEM(made, i, child);
    }
    if (!added) {
      Py_DECREF(made);
      return nullptr;
    }
  }
  return made;
}

}  // namespace
}  // namespace pygraph
