"""Forty faults that a change could bring in, and the tests that have to notice them.

A fault replaces a text in a file of remat by another one. The text occurs there once,
which `whole/test_repository.py` checks, so that the list follows the code.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A text to replace, and where a test fails then.

    Attributes:
        name: what goes wrong.
        file: below the repository's root.
        sound: the text.
        faulty: what stands in its place.
        tests: what is run.
    """

    name: str
    file: str
    sound: str
    faulty: str
    tests: tuple[str, ...]

    def plant(self, text: str) -> str:
        """Return the text of the file with the fault.

        Raises:
            ValueError: the sound text is not there once.
        """
        if text.count(self.sound) != 1:
            raise ValueError(f"{self.file}: {text.count(self.sound)} of {self.sound!r}")
        return text.replace(self.sound, self.faulty)


TRANSFORM = "remat/_transform/"
PARTIAL, REPORT, FIT = "remat/_partial/", "remat/_report/", "remat/_fit/"

FAULTS = [
    Fault(
        "a recompute runs to its end",
        TRANSFORM + "saved.py",
        "        self.left -= 1\n        if not self.left and",
        "        self.left -= 0.5\n        if not self.left and",
        ("tests/parity/test_golden.py",),
    ),
    Fault(
        "a recompute that saves something else is not noticed",
        TRANSFORM + "saved.py",
        "if then is None or meta[:2] != then[:2]:\n            return True",
        "if then is None or meta[:2] != then[:2]:\n            return False",
        ("tests/transform/test_recompute_error.py",),
    ),
    Fault(
        "forward mode is lowered to handles",
        TRANSFORM + "lowering.py",
        "if options.higher_order or is_differentiated or dual_level_active():",
        "if options.higher_order or is_differentiated:",
        ("tests/transform/test_every_transform.py", "tests/transform/test_outputs.py"),
    ),
    Fault(
        "higher_order is ignored",
        TRANSFORM + "lowering.py",
        "if options.higher_order or is_differentiated or dual_level_active():",
        "if is_differentiated or dual_level_active():",
        ("tests/transform/test_memory.py", "tests/transform/test_every_transform.py"),
    ),
    Fault(
        "an input that changed before the backward is read",
        "remat/_base/tensors.py",
        "if type(t) not in others and version_of(t) != v]",
        "if False]",
        ("tests/transform/test_mutation.py",),
    ),
    Fault(
        "a buffer is updated by each recompute",
        TRANSFORM + "inputs.py",
        "tensors.append(value.clone())",
        "tensors.append(value)",
        ("tests/capture/test_buffers.py",),
    ),
    Fault(
        "gradients that the backward of a call gives go to other inputs",
        TRANSFORM + "function.py",
        "        return (None, *found)\n\n\n_apply",
        "        return (None, *[*found][::-1])\n\n\n_apply",
        ("tests/transform/test_outputs.py", "tests/transform/test_every_transform.py"),
    ),
    Fault(
        "views that a call returns have no graph at the levels below",
        TRANSFORM + "function.py",
        "with torch.set_grad_enabled(not request.at_base):",
        "with torch.no_grad():",
        ("tests/transform/test_outputs.py",),
    ),
    Fault(
        "a method of a class is not bound",
        TRANSFORM + "rematerialized.py",
        "if instance is None or not _binds(type(self.__wrapped__)):",
        "if True:",
        ("tests/transform/test_decorator.py",),
    ),
    Fault(
        "a list that was passed is not copied",
        "remat/_live/boxes.py",
        "self.keys, self.items = how.held(value)",
        "self.keys, self.items = how.held(value)[0], value if type(value) is list else how.held(value)[1]",
        ("tests/transform/test_adversarial.py",),
    ),
    Fault(
        "what stands in for a tensor stays in its holder",
        "remat/_live/lifted.py",
        "self._written.pop().end()",
        "self._written.pop()",
        ("tests/capture/test_capture.py", "tests/capture/test_objects.py"),
    ),
    Fault(
        "what changed since a call is taken for the same",
        "remat/_live/roots.py",
        "        if contents.are_in(taken):",
        "        if taken:",
        ("tests/live/test_layouts.py", "tests/capture/test_module_changes.py"),
    ),
    Fault(
        "autocast is not restored",
        "remat/_ambient/ambient.py",
        "stack.enter_context(context)",
        "del context",
        ("tests/ambient/test_settings.py",),
    ),
    Fault(
        "a stream is not set back for a recompute",
        "remat/_ambient/ambient.py",
        "    for s, state in states:\n        set_state(s, state)\n",
        "",
        ("tests/ambient/test_global_streams.py",),
    ),
    Fault(
        "a stream stays where a recompute left it",
        "remat/_ambient/ambient.py",
        "stack.callback(set_state, now, state_of(now))",
        "stack.callback(state_of, now)",
        ("tests/ambient/test_global_streams.py",),
    ),
    Fault(
        "prune=True is taken for prune=False",
        PARTIAL + "decide.py",
        'if prune is False:\n        return "prune=False"\n    hidden',
        'if prune is not None:\n        return "prune=False"\n    hidden',
        ("tests/partial/test_pruning_calls.py", "tests/parity/test_golden.py"),
    ),
    Fault(
        "a draw that nothing reads is left out",
        PARTIAL + "plan.py",
        "if step.always_runs or step.draws or (step.on_subclass",
        "if step.always_runs or (step.on_subclass",
        ("tests/partial/test_plan.py", "tests/partial/test_pruning_draws.py"),
    ),
    Fault(
        "a name is given to no value",
        PARTIAL + "names.py",
        "for listener in here().listeners:",
        "for listener in here().listeners[:0]:",
        ("tests/policies/test_names.py",),
    ),
    Fault(
        "either of two policies is both",
        "remat/policies/_policy.py",
        "return self.left(op) | self.right(op)",
        "return self.left(op) & self.right(op)",
        ("tests/policies/test_policies.py",),
    ),
    Fault(
        "matmuls are no dots",
        "remat/policies/_dots.py",
        "mm addmm _addmm_activation",
        "addmm _addmm_activation",
        ("tests/policies/test_policies_dots.py", "tests/parity/test_golden.py"),
    ),
    Fault(
        "a policy that offloads saves in memory",
        "remat/_offload/offload.py",
        "        return typed(storage, tensor, stride)\n\n\ndef _has_data",
        "        return tensor\n\n\ndef _has_data",
        ("tests/offload", "tests/parity/test_policy_residuals.py"),
    ),
    Fault(
        "fold_in gives one key for all numbers",
        "remat/random/_ops.py",
        "return _philox.split(data.reshape(-1, 2), 1, value).view(data.shape)",
        "return _philox.split(data.reshape(-1, 2), 1, 0).view(data.shape)",
        ("tests/random/test_random_keys.py",),
    ),
    Fault(
        "dropout does not scale",
        "remat/random/_dropout.py",
        "scale = 1 / (1 - p) if p < 1 else 1.0",
        "scale = 1.0",
        ("tests/random/test_random_dropout.py",),
    ),
    Fault(
        "two draws in a block of bind are of one key",
        "remat/random/_bind.py",
        "self.count += 1",
        "self.count += 0",
        ("tests/random/test_random_bind.py",),
    ),
    Fault(
        "a key that is used twice is not found",
        "remat/random/_reuse.py",
        "if row not in ledger.used:",
        "if row is not None:",
        ("tests/random/test_random_reuse.py",),
    ),
    Fault(
        "a report counts a storage for each tensor in it",
        REPORT + "inputs.py",
        "entry = self.entries.get(storage_id(part))\n            if entry is None:\n                meta",
        "entry = None\n            if entry is None:\n                meta",
        ("tests/report",),
    ),
    Fault(
        "check_replay compares no values",
        REPORT + "check_replay.py",
        '    if not count:\n        return ""\n',
        '    return ""\n',
        ("tests/testing",),
    ),
    Fault(
        "assert_same takes every value for the same",
        "remat/testing/_equality.py",
        "wrong = ~_equal(actual, expected)",
        "wrong = ~_equal(actual, actual)",
        ("tests/testing",),
    ),
    Fault(
        "the peak is what is alive in the end",
        REPORT + "timeline.py",
        "return max(self.bytes, default=0)",
        "return (self.bytes or (0,))[-1]",
        ("tests/testing/test_measures.py",),
    ),
    Fault(
        "remat's own frames are shown",
        "remat/_base/tracebacks.py",
        "if not traceback.tb_frame.f_code.co_filename.startswith(OURS):",
        "if traceback is not None:",
        ("tests/transform/test_tracebacks.py",),
    ),
    # Capture.
    Fault(
        "what a forward assigns under torch.func does not reach the user's objects",
        "remat/_live/lifted.py",
        "                    self.values = self._owned(values, then, self.values)",
        "                    del values",
        ("tests/capture/test_state.py", "tests/capture/test_objects.py"),
    ),
    Fault(
        "a new list that a forward assigns holds tensors of a level",
        "remat/_live/lifted.py",
        "        if not new:\n            return owned",
        "        if new is not None:\n            return owned",
        ("tests/capture/test_state.py", "tests/capture/test_objects.py"),
    ),
    # Duals.
    Fault(
        "a tangent that changed before the backward is read",
        TRANSFORM + "levels.py",
        "                raise MutationError(_CHANGED)\n",
        "                pass\n",
        ("tests/transform/test_levels.py", "tests/transform/test_orders.py"),
    ),
    Fault(
        "gradients of tangents have no tangents",
        TRANSFORM + "function.py",
        "    saved = [*inputs, *duals.tangents]  # so that",
        "    saved = flat  # so that",
        ("tests/transform/test_orders.py", "tests/transform/test_levels.py"),
    ),
    # The cache of compiled code.
    Fault(
        "two policies share compiled code",
        TRANSFORM + "traced.py",
        "text = repr((name, where, policy, flags, _sources()))",
        "text = repr((name, where, flags, _sources()))",
        ("tests/transform/test_traced_cache.py",),
    ),
    Fault(
        "compiled code outlives the code of remat that made it",
        TRANSFORM + "traced.py",
        "text = repr((name, where, policy, flags, _sources()))",
        "text = repr((name, where, policy, flags))",
        ("tests/transform/test_traced_cache.py",),
    ),
    Fault(
        "what a cache cannot tell is cached",
        "remat/_torch/nodes.py",
        "    if OF_THIS_PROCESS in key or not _is_cacheable(graph):",
        "    if OF_THIS_PROCESS in key:",
        ("tests/transform/test_traced_cache.py",),
    ),
    # Plans for a whole step.
    Fault(
        "a walk never frees what it recomputed",
        FIT + "walk.py",
        "            self._alive.discard(number)\n            self.live -= size",
        "            self._alive.discard(number)",
        ("tests/fit/test_step_plans.py", "tests/fit/test_fit.py"),
    ),
    Fault(
        "a plan saves what it recomputes",
        "remat/_scope/following.py",
        "        if placed.saves[at]:",
        "        if not placed.saves[at]:",
        ("tests/fit/test_step_plans.py",),
    ),
]
