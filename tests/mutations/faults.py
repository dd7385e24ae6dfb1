"""The faults: mistakes that somebody could make in each part of the package.

A fault is found by the text that it replaces, wherever that lies, so that a file may be moved. Whoever rewrites the
text writes the fault anew; `test_mutations.py` says which are not found.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Fault:
    """A mistake in one place.

    Attributes:
        name: A short name, for ``--only``.
        bug: What is wrong with it.
        text: What is replaced; it occurs once in the package.
        replacement: By what.
    """

    name: str
    bug: str
    text: str
    replacement: str


FAULTS = (
    # -- runtime: pointers, discovery, proof, replays -----------------------------------------------------------------
    Fault(
        "layouts-as-described",
        "Kernels read results of operations in the strides that PyTorch describes, whatever the device has made.",
        "    return laid_out.copy_(value)\n",
        "    return value\n",
    ),
    Fault(
        "launches-as-described",
        "Ordinary launches of kernels do not ask how results of operations lie in memory.",
        " if node in body.layouts else []\n",
        " if False else []\n",
    ),
    Fault(
        "backward-planned-once",
        "Further backwards keep the plan of the first one, though it is not for calls like them.",
        'description["backward"][1] is not operation.backward_plan:',
        "operation.backward_plan is None:",
    ),
    Fault(
        "all-freed-by-one",
        "The backward of one result of several frees what the others need as well.",
        "  if (!backward->absent.empty()) {\n",
        "  if (false) {\n",
    ),
    Fault(
        "versions-of-a-trace",
        "A trace leaves tensors that it has recorded updates of with higher versions.",
        "        self.operations.restore_versions()\n",
        "",
    ),
    Fault(
        "sizes-of-one-mask",
        "Only that result of a mask has the size that was asked for which the question was about.",
        "is_of_data=has_sizes_of_data(func, args)",
        "is_of_data=False",
    ),
    Fault(
        "as-far-as-another",
        "Inputs that share memory may be as far from where they are recorded as others are.",
        "        distances.add(address - start)\n",
        "",
    ),
    Fault(
        "statistics-that-are-read",
        "The backward of batch norm takes no running statistics in evaluation either, where it reads them.",
        "    training = operation is aten.cudnn_batch_norm_backward or node.args[7] is True\n",
        "    training = True\n",
    ),
    Fault(
        "trial-on-the-caller-s-tensors",
        "Regions that run so that the next one can be recorded update the arguments of the call.",
        "            with self._trial(leaves, runs=self.regions[:-1]) as env:\n                for bound",
        "            with self._trial(leaves, runs=()) as env:\n                for bound",
    ),
    Fault(
        "part-of-what-is-written",
        "Trials read arguments where they are which share memory with one that is updated.",
        " if not watched.keys() >= {*group}]",
        " if watched.keys().isdisjoint(group)]",
    ),
    Fault(
        "faster-once",
        "A region leaves its graph for launches that were faster in one round.",
        "LOOKS = (7, 11, 16, 24, 36, 54)\n",
        "LOOKS = (1, 11, 16, 24, 36, 54)\nCONFIDENCE = 0.0\n",
    ),
    Fault(
        "company-unnoticed",
        "What was measured beside other work decides for good.",
        "    if provisional is not None:\n        chosen = for_now",
        "    if False:\n        chosen = for_now",
    ),
    Fault(
        "launched-for-now",
        "While other work keeps the device busy, a region is launched for good.",
        "for_now = self._default if preferred == LAUNCH else preferred",
        "for_now = preferred",
    ),
    Fault(
        "all-new-kinds-recorded",
        "Calls whose sizes never come again are recorded.",
        "        if waiting is None and not self._is_allowed_at_once(entries):\n",
        "        if False:\n",
    ),
    Fault(
        "views-of-other-layouts",
        "A view in a fused run fails where a decomposition lays its argument out otherwise than eager.",
        "            node.target = aten.reshape.default",
        "            pass",
    ),
    Fault(
        "selections-of-other-programs",
        "Selections that are remembered are those of the first Program with as many regions.",
        "policy.objective, str(program)]",
        "policy.objective]",
    ),
    Fault(
        "reviews-never-due",
        "In C++ a plan serves all calls of a provisional selection, which is never measured again.",
        "plan.hits == plan.most_hits || ",
        "",
    ),
    Fault(
        "arithmetic-that-is-not-exact",
        "The device computes an exponential that the host rounds otherwise, and one that the call returns.",
        "if node in found and not all(_takes_on_device",
        "if node in found and not any(_takes_on_device",
    ),
    Fault(
        "generator-not-advanced",
        "A replay draws from a caller's generator, and the next call draws the same numbers again.",
        "        put_back(self.original, self.own.get_state())\n",
        "        pass\n",
    ),
    Fault(
        "saved-tensors-that-overlap",
        "Saved tensors begin with the memory of the recording, where others were recorded too.",
        "                usable = self._own - region.overlapping\n",
        "                usable = self._own\n",
    ),
    Fault(
        "copied-from-where-others-are",
        "What must be copied from where the graph was recorded is recorded in the same memory as others.",
        "        self.together |= {len(self.slots) + number for number in self.overlapping}\n",
        "        pass\n",
    ),
    Fault(
        "lent-and-still-used",
        "A call gets a saved tensor of the last one, whose backward is still to come.",
        "        Owners(last) == alone && is_as_made(tensor, memory);\n",
        "        is_as_made(tensor, memory);\n",
    ),
    Fault(
        "pointer-one-past-the-end",
        "A word that points right behind a slot's memory counts as a pointer into it.",
        "in_range = delta < extent.size\n",
        "in_range = delta <= extent.size\n",
    ),
    Fault(
        "pointer-without-moving",
        "A word counts as a pointer though it did not move along with the memory in the second recording.",
        "moved_along = int(values_b[word]) - extents_second[slot].start == delta",
        "moved_along = True",
    ),
    Fault(
        "pointer-before-its-memory-was-allocated",
        "Words of nodes before the operation that allocated a result count as pointers to the result.",
        " and (op >= extent.first_op or extent.first_op == 0):",
        ":",
    ),
    Fault(
        "pointer-without-its-offset",
        "A patched pointer points to the start of the memory instead of where it pointed to when it was recorded.",
        "                    cell.value = address + delta\n",
        "                    cell.value = address\n",
    ),
    Fault(
        "patch-taken-for-sent",
        "After a patch that failed or was interrupted, the graph is taken to have what the cells hold.",
        "self.synced.value = 0  # what an interruption in the middle leaves is not known",
        "pass",
    ),
    Fault(
        "zero-that-keeps-its-sign",
        "Numbers are compared as numbers before they are sent, so that -0.0 is not sent after 0.0.",
        "if not synced or cell.raw != encoded:",
        "if not synced or ctype.from_buffer_copy(cell.raw).value != ctype.from_buffer_copy(encoded).value:",
    ),
    Fault(
        "replays-that-do-not-wait",
        "A replay does not wait for what uses the pool on another stream or thread.",
        "        self.pool.order()\n        addresses = [",
        "        addresses = [",
    ),
    Fault(
        "written-tensors-that-tell-nobody",
        "A replay does not move the versions of the arguments that it updates, so that autograd uses saved tensors.",
        "*(self._reused_memory or ()), *(inputs[i] for i in self.body.updated), *self.body.versioned_statics]",
        "*(self._reused_memory or ()), *self.body.versioned_statics]",
    ),
    Fault(
        "results-at-the-start-of-their-memory",
        "Results that share memory all begin where it begins.",
        "found = [fresh[number].as_strided(spec.shape, spec.stride, spec.offset) for number, spec in self.views]",
        "found = [fresh[number].as_strided(spec.shape, spec.stride, 0) for number, spec in self.views]",
    ),
    Fault(
        "a-poison-of-nothing",
        "The proof leaves the recorded buffers as they are, so that it cannot see who still reads them.",
        '        flat.fill_(float("nan"))\n',
        "        pass\n",
    ),
    Fault(
        "trials-that-draw",
        "Trials move the random generator, and the first call draws other numbers than eager does.",
        "        self._put_generators_back()\n        if self._state is not None:",
        "        if self._state is not None:",
    ),
    Fault(
        "trials-that-update",
        "Trials leave their updates in captured tensors, as if the function had run several times.",
        "            self._state.put_back()\n",
        "            pass\n",
    ),
    Fault(
        "arguments-left-as-trials-leave-them",
        "Trials update large arguments where they are, and do not put them back.",
        "        self._hosted += [(copy, inputs[i].data) for i, copy in written.items() if copy is not None]\n",
        "",
    ),
    Fault(
        "gaps-of-what-holds-zeros",
        "Bytes that an operation writes zeros to are taken for bytes that it does not write to.",
        "        return left[0] & left[1]\n",
        "        return left[0] | left[1]\n",
    ),
    Fault(
        "temporaries-in-what-a-view-shows",
        "A temporary lies in a saved tensor that a view of it is still to be read from.",
        "        for argument in argument_nodes(node):\n            last[root(argument)] = node\n",
        "        for argument in argument_nodes(node):\n            last[argument] = node\n",
    ),
    Fault(
        "spent-memory-that-is-shared",
        "A temporary lies in a saved tensor whose memory is another input's, too.",
        "for index in self._graph.spent - shared if",
        "for index in self._graph.spent if",
    ),
    Fault(
        "copies-that-stop-short",
        "Copies of tensors with gaps miss the last element.",
        "        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))",
        "        return max(sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True)), 1)",
    ),
    Fault(
        "adopted-while-it-is-read",
        "A result takes over a donated argument's memory though the last kernel that reads it also writes the result.",
        "        if max(reads) < first:\n",
        "        if max(reads) <= first:\n",
    ),
    Fault(
        "adopted-memory-with-another-owner",
        "A result takes over a donated argument's memory although a view of it is held elsewhere.",
        "    if not is_sole_owner(tensor):\n",
        "    if False:\n",
    ),
    Fault(
        "captured-tensors-that-moved",
        "Graphs are replayed though a tensor that they read has other memory by now.",
        "            if address is not None and tensor.data_ptr() != address:\n",
        "            if False:\n",
    ),
    Fault(
        "repeated-results-apart",
        "A tensor that is returned twice comes back as None in its second place.",
        "        for leaf, earlier in self.repeats:\n            out[leaf] = out[earlier]\n",
        "",
    ),
    Fault(
        "views-that-are-taken-for-memory-of-their-own",
        "An operation that returns its argument makes a result in the argument's memory.",
        "            if first < end and start < first + other.nbytes():\n",
        "            if first < start and start < first + other.nbytes():\n",
    ),
    Fault(
        "reused-memory-that-is-overwritten",
        "With reuse_outputs an argument that is a result of an earlier call is read while it is overwritten.",
        "inside = {index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and meet(leaf)}",
        "inside = set[int]()",
    ),
    Fault(
        "alignment-that-is-forgotten",
        "A region runs on an argument that is placed in another way than the kernels were chosen for.",
        " and is_aligned(tensor.data_ptr(), self._alignments[position])",
        "",
    ),
    Fault(
        "large-tensors-left-as-trials-leave-them",
        "Large tensors that a region updates are not put back after its trials.",
        "        for copy, tensor in self._hosted:\n            copy.write(tensor)\n",
        "",
    ),
    Fault(
        "positions-that-go-on",
        "Runs that are timed go on from the large positions that the last one has left behind.",
        "[(copy, tensor) for copy, tensor in self._hosted if self._indexing.meet(tensor)]",
        "[(copy, tensor) for copy, tensor in self._hosted[:0] if self._indexing.meet(tensor)]",
    ),
    Fault(
        "addresses-of-stored-values",
        "What a kernel stores, and loads again as an index, is not followed back.",
        "            waiting |= (self._made_of[name] | self._stored[name]) - reached\n",
        "            waiting |= self._made_of[name] - reached\n",
    ),
    Fault(
        "kernels-of-users-are-inductors",
        "Kernels of users that Inductor has wrapped are trusted to assert that their indices are in range.",
        '    return hasattr(kernel, "inductor_meta") and heuristic != "USER_AUTOTUNE"\n',
        '    return hasattr(kernel, "inductor_meta")\n',
    ),
    # -- the call path: keys, entries, native, steps, donation --------------------------------------------------------
    Fault(
        "key-without-strides",
        "Calls with transposed tensors run what was made for contiguous ones.",
        "keys.append((leaf.__class__, leaf.shape, leaf.stride(), leaf.dtype, leaf.device, placed, *flags))",
        "keys.append((leaf.__class__, leaf.shape, leaf.dtype, leaf.device, placed, *flags))",
    ),
    Fault(
        "key-without-placement",
        "Calls with a tensor at an odd address run kernels that were chosen for an aligned one.",
        "            placed = ALIGNMENT if address % ALIGNMENT == 0 else alignment_of(address)\n",
        "            placed = ALIGNMENT\n",
    ),
    Fault(
        "key-of-equal-numbers",
        "1.0 and True, or 0.0 and -0.0, as static arguments run the same trace.",
        "        return (kind, text(value))\n",
        "        return (kind, value)\n",
    ),
    Fault(
        "key-of-equal-objects",
        "Objects that their class calls equal run the same trace, whatever it read of them.",
        "        return mine is not None and mine is other._value()\n",
        "        return mine is not None and mine == other._value()\n",
    ),
    Fault(
        "keys-of-dicts-unguarded",
        "An attribute of an object that is a key of a dict is baked in for ever.",
        "            if not isinstance(key, _KEYS):\n",
        "            if False:\n",
    ),
    Fault(
        "key-without-overlap",
        "Calls whose arguments share memory run what was made for arguments that do not.",
        "    if len(tensors) < 2 or are_disjoint(tensors) or not (groups := overlap_groups(leaves)):\n",
        "    if len(tensors) < 3 or are_disjoint(tensors) or not (groups := overlap_groups(leaves)):\n",
    ),
    Fault(
        "key-without-the-default-dtype",
        "Calls after torch.set_default_dtype run what was made for another one.",
        "torch.set_default_dtype, in_key=True)",
        "torch.set_default_dtype)",
    ),
    Fault(
        "touching-memory-is-apart",
        "Two storages that overlap are told apart if the second begins where another inside the first ends.",
        "        reach = start + size\n    return True\n",
        "        reach = start + size // 2\n    return True\n",
    ),
    Fault(
        "entries-that-are-never-outdated",
        "A trace is used although what the function read besides its arguments has changed.",
        "        if self.environment is not None and not self.environment.is_current():\n            return False\n",
        "",
    ),
    Fault(
        "arguments-in-captured-memory",
        "A call runs graphs although it is passed memory that the graphs write to as a captured tensor.",
        "        return any(isinstance(leaf, torch.Tensor) and owned.meet(leaf) for leaf in leaves)\n",
        "        return False\n",
    ),
    Fault(
        "the-least-recent-is-kept",
        "The cache drops what was used last instead of what was not used for longest.",
        "        self._keys.move_to_end(value)\n",
        "        self._keys.move_to_end(value, last=False)\n",
    ),
    Fault(
        "native-numbers-that-stay",
        "In C++ a number is sent with the first replay of a graph and never again.",
        "      if (store_number(cell, dtype, slot.real, number) || !synced) {",
        "      if (store_number(cell, dtype, slot.real, number) && !synced) {",
    ),
    Fault(
        "native-pointers-by-the-first-input",
        "In C++ the pointers of every input are set to the first input's address.",
        "        ? call.addresses[parameters.inputs[i]]",
        "        ? call.addresses[parameters.inputs[0]]",
    ),
    Fault(
        "native-layouts-without-strides",
        "In C++ a transposed tensor matches a plan for a contiguous one.",
        "        tensor.device() == device && is_equal(tensor.sizes(), sizes) && is_equal(tensor.strides(), strides);",
        "        tensor.device() == device && is_equal(tensor.sizes(), sizes);",
    ),
    Fault(
        "native-sharing-at-any-distance",
        "In C++ arguments that overlap at another distance match a plan.",
        "  bool operator==(const Sharing&) const = default;",
        "  bool operator==(const Sharing& other) const { return first == other.first && same == other.same; }",
    ),
    Fault(
        "native-storages-that-overlap-unseen",
        "In C++ storages that begin at different addresses are never seen to overlap.",
        "    if (range.first < last.second && range.first != last.first) return true;",
        "    if (range.first < last.second && range.first == last.first) return true;",
    ),
    Fault(
        "native-versions-that-stay",
        "In C++ a replay does not move the versions of the tensors that it updates.",
        "  if (!tensor->is_inference()) tensor->bump_version();",
        "  if (tensor->is_inference()) tensor->bump_version();",
    ),
    Fault(
        "native-captured-tensors-that-moved",
        "In C++ a plan matches though a captured tensor has other memory by now.",
        "    return !has_address || address_of(*impl) == address;",
        "    return true;",
    ),
    Fault(
        "native-settings-ignored",
        "In C++ a plan matches under other global settings of torch.",
        " || !plan.settings.holds(settings)) return false;",
        ") return false;",
    ),
    Fault(
        "steps-that-drop-gradients-on-errors",
        "A step that fails after gradients were given up leaves none behind.",
        "            for tensor, gradient in zip(tensors, before, strict=True):\n"
        "                tensor.grad = gradient\n"
        "            raise\n",
        "            raise\n",
    ),
    Fault(
        "steps-of-other-rates",
        "A step is run though the optimizer has other groups of parameters than when it was traced.",
        "        if self._state.learning_rates and not _are_same(now.rates, function.groups):\n"
        "            raise OutdatedError\n",
        "",
    ),
    Fault(
        "donated-but-not-consumed",
        "A donated argument can still be used after the call.",
        "            consume(tensor, Consumed(self._name, label, part, tree, source, TensorSpec.of(tensor)))\n",
        "            del label, part, tree\n",
    ),
    # -- guards -------------------------------------------------------------------------------------------------------
    Fault(
        "guard-lists-by-length-at-most",
        "In C++ a list that has become shorter holds.",
        "    if (length >= 0 && PyList_GET_SIZE(list) != length) return false;\n",
        "    if (length >= 0 && PyList_GET_SIZE(list) > length) return false;\n",
    ),
    Fault(
        "guard-dicts-in-any-order",
        "In C++ a dict holds where its order counts and is another.",
        "      if (key != entry.key && !is_equal_key(key, entry.key)) return false;\n",
        "",
    ),
    Fault(
        "guard-cells-ignored",
        "In C++ a variable that a function closes over may have any value.",
        "    return value != nullptr && is_expected(value, expected, same);",
        "    return value != nullptr;",
    ),
    Fault(
        "guard-code-ignored",
        "In C++ functions whose code was replaced, and objects that have become of another class, hold.",
        "    if (differences != 0) return false;\n",
        "    if (differences == 1) return false;\n",
    ),
    # -- tracing ------------------------------------------------------------------------------------------------------
    Fault(
        "view-at-the-wrong-place",
        "A result that is a view of an argument in the middle of a storage begins too late.",
        "        start = source.storage_offset() - (layout.offset if layout is not None else 0)\n",
        "        start = 0\n",
    ),
    Fault(
        "base-that-is-too-short",
        "The memory that stands for overlapping arguments ends where the first one ends.",
        "    size = max(spec.offset - start + spec.span for spec in specs.values())\n",
        "    size = specs[first].span\n",
    ),
    Fault(
        "base-of-the-last",
        "The view of each of several overlapping arguments begins where the first one given begins.",
        "    first = min(group, key=lambda member: values[member].storage_offset())\n",
        "    first = group[0]\n",
    ),
    Fault(
        "seeds-that-nobody-notices",
        "A function that seeds a generator is a graph, which does not seed it.",
        "            self._seeded.add(generator)\n",
        "            pass\n",
    ),
    Fault(
        "settings-that-stay",
        "What a trace changes in torch's settings is left so.",
        "                setting.write(then)\n",
        "                pass\n",
    ),
    Fault(
        "leaks-that-are-left",
        "A fake tensor that a traced function has stored somewhere stays there.",
        "    if _are_gone(made):\n        return None\n    young =",
        "    if made is not None:\n        return None\n    young =",
    ),
    Fault(
        "writes-that-cross",
        "A write to memory that is read at another place is traced as if the two were apart.",
        "        if may_overlap(target, source) and not (in_turn and _is_same_memory(target, source)):\n",
        "        if may_overlap(target, source) and not in_turn:\n",
    ),
    Fault(
        "answers-unchecked",
        "A call goes on with the trace of another answer than it gives.",
        "        if bool(value) is not answer:\n",
        "        if False:\n",
    ),
    Fault(
        "looked-up-in-place",
        "What a function updates before it asks is updated while the answer is looked up.",
        "        copies = {one._cdata: _copy_of(one) for one in storages if one._cdata in self._outside}\n",
        "        copies = dict[int, torch.UntypedStorage]()\n",
    ),
    Fault(
        "looked-up-draws",
        "What is drawn while an answer is looked up is drawn by the call, too.",
        "            failed.append(error)\n        finally:\n            restore()\n",
        "            failed.append(error)\n",
    ),
    Fault(
        "one-exception",
        "Calls are expected to go another way after a single exception.",
        "(expected, False) if was_right else (path, False)",
        "(path, False)",
    ),
    # -- transforms ---------------------------------------------------------------------------------------------------
    Fault(
        "results-that-are-stored-at-an-offset",
        "The slot of a result that is a view keeps the view's offset in memory of its own.",
        'slots.append(Slot("result", descriptor, dataclasses.replace(spec, offset=0)))',
        'slots.append(Slot("result", descriptor, spec))',
    ),
    Fault(
        "aliases-of-the-wrong-input",
        "After indirect a result that is an argument's memory is another argument's.",
        "        return 1 + len(self.inputs) + self.slot_of[index]",
        "        return len(self.inputs) + self.slot_of[index]",
    ),
    Fault(
        "writes-before-their-readers",
        "A node that writes memory may be moved before the nodes that read what was there.",
        "            needs[node].update(reader for reader in readers.get(origin, ()) if reader is not node)\n",
        "",
    ),
    Fault(
        "reads-before-their-writer",
        "A node that reads memory may be moved before the node that writes it.",
        "            if origin in writer:\n                needs[node].add(writer[origin])\n",
        "            pass\n",
    ),
    Fault(
        "draws-in-any-order",
        "Random draws may change places.",
        "            needs[node].update(one for kind in kinds for one in last[kind])\n",
        "",
    ),
    Fault(
        "results-that-are-views-of-arguments",
        "A result that is an argument's memory for evaluate, and must be cloned, is returned as it is.",
        "out[leaf] = clone_strided(values[node]) if foreign else values[node]",
        "out[leaf] = values[node]",
    ),
    # -- autograd -----------------------------------------------------------------------------------------------------
    Fault(
        "saved-after-it-was-written",
        "The backward takes an argument as it finds it, although the forward updates it.",
        "        if descriptor is not None and joint.input_number[node] not in joint.written:\n",
        "        if descriptor is not None:\n",
    ),
    Fault(
        "draws-made-again",
        "The backward draws random numbers again instead of taking the ones that the forward has drawn.",
        "    return not any(map(_has_tensors, node.all_input_nodes)) and not is_random(node)\n",
        "    return not any(map(_has_tensors, node.all_input_nodes))\n",
    ),
    Fault(
        "gradients-that-are-views",
        "A gradient is the memory of what the backward was given.",
        "    if root(value) not in given:\n        return mapping[value]\n",
        "    if root(value) is not None:\n        return mapping[value]\n",
    ),
    Fault(
        "duplicate-results-apart",
        "A tensor that a function returns twice is no longer one tensor when it is differentiated.",
        "    for index, first in outcome.duplicates.items():\n        results[index] = results[first]\n",
        "",
    ),
    Fault(
        "detached-views-with-a-history",
        "A detached view of an argument has the argument's history.",
        "        return replay(tensor.detach() if self.is_detached else tensor)\n",
        "        return replay(tensor)\n",
    ),
    Fault(
        "twins-that-write-to-the-original",
        "The functional form of a custom operation writes to its argument instead of to a copy.",
        "        copy = pytree.tree_map_only(torch.Tensor, clone_strided, value)\n",
        "        copy = value\n",
    ),
    Fault(
        "parts-that-are-copies",
        "A result that is a part of another one, of a size that data decides, has memory of its own.",
        "            decisions.views.check_results(result)\n",
        "",
    ),
    Fault(
        "draws-put-back-by-a-question",
        "A look at a value on the device, while a function is traced, puts the generators of Python and NumPy back.",
        "            drawn.restore()\n",
        "",
    ),
    Fault(
        "gradients-of-results-counted-twice",
        "The part of a backward from one result to another goes on behind that, as does the backward of that one.",
        "            with stopping_at(ends):\n",
        "            if ends:\n",
    ),
    Fault(
        "attributes-of-others-by-text",
        "Code that reads attributes of any object by text counts as reading those of its own object alone.",
        "        return _OWN if own is not None and own in before else _ANY\n",
        "        return _OWN\n",
    ),
    Fault(
        "replaced-containers-whose-identity-is-asked",
        "A container that is replaced is an input also where the function asks which object it is.",
        "        return [] if is_asked else self.guards.replaced_containers()\n",
        "        return self.guards.replaced_containers()\n",
    ),
    Fault(
        "momenta-of-one",
        "Batch normalization with a live momentum replaces its running statistics by those of the batch.",
        "            old.mul_(1.0 - momentum).add_(new * momentum)\n",
        "            old.copy_(new)\n",
    ),
    Fault(
        "modules-inside-of-themselves",
        "A module of objects that are taken apart is served as one that it calls.",
        "    while isinstance(fn, Renaming):\n",
        "    while False:\n",
    ),
)
