"""Transformed functions inside torch.func's transforms and under autograd.

- A call: `composition`, `lookup` (`sites`, `site`; at first `discovery`, `probe`), then `operation`.
- Functions that it derives: `flat_function`, `primal`, `derived` (vmap, vjp, jvp), `forward`, `pullback`, `backward`.
- One trace of results and gradients: `joint_function`, `partition` (`joint_graph`, `forward_graph`, `backward_graph`).
- Tensors between a call and its derivatives: `saved_tensors`, `input_aliases`, `preserved_state`.
"""
