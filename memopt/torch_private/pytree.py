"""Nested values taken apart and put together, by torch's own functions."""

from __future__ import annotations

from memopt.torch_private.access import required

with required("torch.utils._pytree.tree_flatten"):
    from torch.utils._pytree import tree_flatten as tree_flatten
with required("torch.utils._pytree.tree_unflatten"):
    from torch.utils._pytree import tree_unflatten as tree_unflatten
with required("torch.utils._pytree.tree_leaves"):
    from torch.utils._pytree import tree_leaves as tree_leaves
with required("torch.utils._pytree.tree_structure"):
    from torch.utils._pytree import tree_structure as tree_structure
with required("torch.utils._pytree.tree_map"):
    from torch.utils._pytree import tree_map as tree_map
with required("torch.utils._pytree.tree_map_only"):
    from torch.utils._pytree import tree_map_only as tree_map_only
with required("torch.utils._pytree.TreeSpec"):
    from torch.utils._pytree import TreeSpec as TreeSpec
with required("torch.utils._pytree.register_pytree_node"):
    from torch.utils._pytree import register_pytree_node as register_pytree_node
