// Custom operations in C++, as an extension of a user's has them: with a derivative, an update, and a number.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace {

at::Tensor cube(const at::Tensor& x, double factor) { return x * x * x * factor; }

at::Tensor cube_meta(const at::Tensor& x, double) { return at::empty_like(x); }

void shift(at::Tensor& x, const at::Tensor& by) { x.add_(by); }

void shift_meta(at::Tensor&, const at::Tensor&) {}

// The derivative has another factor than that of the operations inside, so that it is seen to be used.
struct Cube : torch::autograd::Function<Cube> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, double factor) {
    at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({x});
    static auto operation = c10::Dispatcher::singleton()
                                .findSchemaOrThrow("pygraph_tests_cpp::cube", "")
                                .typed<at::Tensor(const at::Tensor&, double)>();
    return operation.call(x, factor);
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
    at::Tensor x = context->get_saved_variables()[0];
    return {gradients[0] * x * x * 5, at::Tensor()};
  }
};

at::Tensor cube_autograd(const at::Tensor& x, double factor) { return Cube::apply(x, factor); }

}  // namespace

TORCH_LIBRARY(pygraph_tests_cpp, library) {
  library.def("cube(Tensor x, float factor) -> Tensor", {at::Tag::pt2_compliant_tag});
  library.def("shift(Tensor(a!) x, Tensor by) -> ()", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(pygraph_tests_cpp, CompositeExplicitAutograd, library) {
  library.impl("cube", cube);
  library.impl("shift", shift);
}

TORCH_LIBRARY_IMPL(pygraph_tests_cpp, Meta, library) {
  library.impl("cube", cube_meta);
  library.impl("shift", shift_meta);
}

TORCH_LIBRARY_IMPL(pygraph_tests_cpp, Autograd, library) { library.impl("cube", cube_autograd); }
