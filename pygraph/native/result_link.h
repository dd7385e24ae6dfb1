// Links: nodes of autograd's graph before results of a call, with edges to the call, and to what a result depends on;
// see pygraph/autograd/result_links.py.
#pragma once

#include "flat_result.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_cpp_function.h>

#include <memory>
#include <type_traits>
#include <unordered_set>

namespace pygraph {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;

// Checked with torch 2.11 and 2.13: hooks run before a node does, and gradients are captured on the way into it.
bool is_looked_at(Node& link) {
  if (!link.tensor_pre_hooks().empty() || !link.pre_hooks().empty() || !link.retains_grad_hooks().empty()) return true;
  const auto* execution = torch::autograd::get_current_graph_task_exec_info();
  if (execution == nullptr) return true;
  const auto found = execution->find(&link);
  return found != execution->end() && found->second.captures_ && !found->second.captures_->empty();
}

// Whether the gradient of a result is looked at that a link leads to, by way of others or not.
bool leads_to_looked_at(Node& link, std::unordered_set<Node*>& seen) {
  Node* call = link.next_edge(0).function.get();
  for (uint32_t i = 1; i < link.num_outputs(); ++i) {
    Node* node = link.next_edge(i).function.get();
    const bool is_link = node != nullptr && node->num_outputs() > 0 && node->next_edge(0).function.get() == call;
    if (!is_link || !seen.insert(node).second) continue;
    if (is_looked_at(*node) || leads_to_looked_at(*node, seen)) return true;
  }
  return false;
}

class ResultLink : public Node {
 public:
  ResultLink(int64_t number, PyObject* gradients) : number_(number), gradients_(gradients) {}

  std::string name() const override { return "ResultLinkBackward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& cotangents) override {
    torch::autograd::variable_list found(num_outputs());
    std::unordered_set<Node*> seen;
    if (!cotangents[0].defined()) return found;
    if (num_outputs() == 1 || !leads_to_looked_at(*this, seen)) {
      found[0] = std::move(cotangents[0]);
      return found;
    }
    const PyGILState_STATE state = PyGILState_Ensure();
    const bool done = compute(cotangents[0], found);
    python_error error;
    if (!done) error.persist();
    PyGILState_Release(state);
    if (!done) throw std::move(error);
    return found;
  }

 private:
  bool compute(const at::Tensor& cotangent, torch::autograd::variable_list& found) {
    PyObject* call = torch::autograd::functionToPyObject(next_edge(0).function);
    PyObject* given = call == nullptr ? nullptr : THPVariable_Wrap(cotangent);
    PyObject* gradients =
        given == nullptr ? nullptr : PyObject_CallFunction(gradients_, "OLO", call, (long long)number_, given);
    Py_XDECREF(given);
    Py_XDECREF(call);
    if (gradients == nullptr) return false;
    for (size_t i = 1; i < found.size(); ++i) {
      PyObject* gradient = PyList_GET_ITEM(gradients, i - 1);
      if (gradient != Py_None) found[i] = tensor_of(gradient);
    }
    Py_DECREF(gradients);
    return true;
  }

  int64_t number_;       // of the result
  PyObject* gradients_;  // (the call's node, a number, a cotangent) -> the gradients of what the result depends on;
                         // borrowed, as it is a function of a module
};

// Nodes have been of another kind of pointer since torch 2.13. Of the earlier kind, long chains are deleted one by one.
template <typename Pointer, typename Link>
Pointer new_link(int64_t number, PyObject* gradients) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return Pointer(new Link(number, gradients), [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Link>(number, gradients);
  }
}

// Give a result a link with these edges.
void give_link(const at::Tensor& result, int64_t number, PyObject* gradients, torch::autograd::edge_list edges) {
  auto made = new_link<decltype(Edge::function), ResultLink>(number, gradients);
  made->set_next_edges(std::move(edges));
  made->add_input_metadata(result);
  torch::autograd::impl::set_gradient_edge(result, Edge(std::move(made), 0));
}

// (results, those of the call's node, the call's tensors, dependencies, gradients); each dependency is (number of the
// result, numbers of the results that it depends on, numbers of the tensors), behind those that it depends on.
PyObject* link_results(PyObject*, PyObject* arguments) {
  return translate_exceptions([&] {
    PyObject *results = item(arguments, 0), *made = item(arguments, 1), *tensors = item(arguments, 2);
    for_each(item(arguments, 3), [&](PyObject* dependency) {
      const int64_t number = to_int(item(dependency, 0));
      torch::autograd::edge_list edges{torch::autograd::impl::gradient_edge(tensor_of(item(made, number)))};
      if (!edges.front().is_valid()) return;  // the call has no history
      const auto add = [&](PyObject* numbers, PyObject* among) {
        for_each(numbers, [&](PyObject* one) {
          edges.push_back(torch::autograd::impl::gradient_edge(tensor_of(item(among, to_int(one)))));
        });
      };
      add(item(dependency, 1), results);
      add(item(dependency, 2), tensors);
      give_link(tensor_of(item(results, number)), number, item(arguments, 4), std::move(edges));
    });
    return Py_NewRef(Py_None);
  });
}

}  // namespace
}  // namespace pygraph
