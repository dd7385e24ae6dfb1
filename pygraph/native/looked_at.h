// Whether gradients are looked at in the backward that runs; see pygraph/autograd/result_links.py.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <Python.h>

#include <unordered_set>

namespace pygraph {
namespace {

// Checked with torch 2.11 and 2.13: hooks run before a node does, and gradients are captured on the way into it.
bool is_looked_at(torch::autograd::Node& node, uint32_t output) {
  if (!node.tensor_pre_hooks().empty() || !node.pre_hooks().empty() || !node.retains_grad_hooks().empty()) return true;
  const auto* execution = torch::autograd::get_current_graph_task_exec_info();
  if (execution == nullptr) return true;
  const auto found = execution->find(&node);
  if (found == execution->end() || !found->second.captures_) return false;
  for (const auto& capture : *found->second.captures_) {
    if (capture.input_idx_ == static_cast<int>(output)) return true;
  }
  return false;
}

// Whether the gradient of a result is looked at that a link leads to, by way of others or not. A link's first edge is
// to the call, to which the edges of results lead that depend on no others.
bool leads_to_looked_at(torch::autograd::Node& link, std::unordered_set<torch::autograd::Node*>& seen) {
  torch::autograd::Node* call = link.next_edge(0).function.get();
  for (uint32_t i = 1; i < link.num_outputs(); ++i) {
    const torch::autograd::Edge& edge = link.next_edge(i);
    torch::autograd::Node* node = edge.function.get();
    if (node == nullptr) continue;
    if (node == call) {
      if (is_looked_at(*node, edge.input_nr)) return true;
      continue;
    }
    const bool is_link = node->num_outputs() > 0 && node->next_edge(0).function.get() == call;
    if (!is_link || !seen.insert(node).second) continue;
    if (is_looked_at(*node, 0) || leads_to_looked_at(*node, seen)) return true;
  }
  return false;
}

PyObject* is_gradient_looked_at(PyObject*, PyObject*) {
  const auto link = torch::autograd::get_current_node();
  if (!link) {
    PyErr_SetString(PyExc_RuntimeError, "no backward runs");
    return nullptr;
  }
  std::unordered_set<torch::autograd::Node*> seen;
  return PyBool_FromLong(leads_to_looked_at(*link, seen));
}

}  // namespace
}  // namespace pygraph
