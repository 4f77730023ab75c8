"""Explains which Python in a forward no graph holds, and what to do instead."""

from __future__ import annotations

_OF_A_GRADIENT = (
    "add a tensor of zeros that requires a gradient there (h + zeros, an input of the model): "
    "after the backward its .grad is the gradient of h"
)

SAID_OF_PYTHON: tuple[tuple[str, str], ...] = (
    (
        r"Tensor\.retain_grad\(\)",
        "it calls retain_grad() on a tensor that a planned step does not hand out: "
        + _OF_A_GRADIENT,
    ),
    (
        r"variable for register_hook",
        "it sets a hook on a tensor, which memopt cannot read in the graphs that torch.compile "
        "hands over: call memopt.wrap(model, budget=...) instead, which takes such hooks",
    ),
    (
        r"(Unsafe|Non-nullified) side effect[^\0]*Higher Order Operator: torch\.utils\.checkpoint",
        "a checkpointed block changes a Python object outside of it, and how often it runs is for "
        "the plan to decide: do that outside of the block, or call it without checkpoint(), which "
        "memopt replaces",
    ),
    (
        r"Unsafe side effect[^\0]*Higher Order Operator: autograd\.Function",
        "an autograd.Function changes a Python object outside of it (a list, a count), which a "
        "planned step would not: change it in the forward, outside of the function. To see a "
        f"gradient, {_OF_A_GRADIENT}",
    ),
    (
        r"Unsafe side effect[^\0]*Higher Order Operator: (?P<what>[\w.]+)",
        "a function that is given to {what} changes a Python object outside of it, which no graph "
        "holds: return the value from the function, and change the object after {what}",
    ),
    (
        r"Unsafe side effect",
        "a hook that it sets on a tensor changes a Python object outside of it (a list, a count), "
        f"which a planned step would not: {_OF_A_GRADIENT}",
    ),
    (
        r"failed to find name in frame builtins",
        "it reads a global that does not exist, which torch's tracer takes for no NameError that "
        "the forward could catch: assign it before the call (NAME = None), and compare with that",
    ),
    (
        r"builtin operator `(?P<what>globals|locals|vars|dir)`",
        "it looks names up by {what}(), which torch's tracer does not follow: read the name itself",
    ),
    (
        r"torch\.jit\.script/freeze",
        "it is, or calls, a module of torch.jit.script, whose code no graph holds: use the Python "
        "module that this was made of",
    ),
    (
        r"(saved_tensors_hooks|save_on_cpu)\.__init__",
        "it enters torch.autograd.graph's saved-tensor hooks (saved_tensors_hooks, save_on_cpu), "
        "which a planned step would not call: leave them out, since memopt decides what is kept, "
        "and where",
    ),
    (
        r"`posix\.(un)?(put|set)env|`nt\.(un)?putenv",
        "it sets an environment variable (os.environ), which a planned step would not: set it "
        "outside of the model, before the call",
    ),
    (
        r'/threading\.py", line|`_thread\.',
        "it uses a thread, or something of threads (a lock, an event), which no graph holds: do "
        "that outside of the model",
    ),
    (
        r'functools\.py", line \d+, in __get__',
        "it reads a functools.cached_property that has no value yet, and this Python makes one "
        "behind a lock that no graph holds: read the property once before planning, or make the "
        "value in __init__",
    ),
    (
        r"enter a `(?P<what>R?[lL]ock|Condition|Semaphore|BoundedSemaphore)` context",
        "it takes a {what}, which no graph holds: take it around the call of the model",
    ),
    (
        r"enter a `(?P<what>\w+)` context",
        "it enters a {what} that was made before, which no graph holds: enter it around the call "
        "of the model",
    ),
    (
        r"method `(acquire|release)` of class `R?[lL]ock`",
        "it takes a lock, which no graph holds: take it around the call of the model",
    ),
    (
        r"of class `ContextVar`|ContextVar mutation",
        "it reads or sets a ContextVar, of which a planned step sees no change: read it outside of "
        "the model, and pass the value as an argument",
    ),
    (
        r"tp_iternext|next\(generator\)|call_method on generator|"
        r"wrap <class '\w*(iterator|generator)'>",
        "it takes the next value of a generator, which a planned step would not: take it outside "
        "of the model, and pass the value as a tensor",
    ),
    (
        r"setattr\(\) is not supported on type function|`setattr` with argument types \['function'",
        "it sets an attribute of a function, which a planned step would not: return such values as "
        "outputs, count outside of the forward or in a buffer that is updated in place "
        "(self.count.add_(1))",
    ),
    (
        r"builtin `time\.|method `(now|utcnow|today)` of class|`<unknown module>\.datetime",
        "it asks for the time, which a graph would hold as a constant: take times around the call "
        "of the model, or look at a step with torch.profiler",
    ),
    (
        r'builtin operator `open`|/pathlib(/\w+)?\.py", line',
        "it opens a file, or asks for one, which no graph does: do that outside of the model, with "
        "what it returns",
    ),
    (
        r"builtin operator `(str|repr|format)` with argument types \['Tensor|repr\(\) on tensor",
        "it makes a text of a tensor's values, which no graph holds: do that outside of the model, "
        "with what it returns",
    ),
    (
        r"copy\.deepcopy a tensor",
        "it copies a tensor by copy.deepcopy: use clone()",
    ),
    (
        r"Tensor with grad_fn\(\)",
        "it reads .grad_fn of a tensor, which has none of its own in a planned step: look at that "
        "in a call without a plan",
    ),
    (
        r'utils/hooks\.py", line \d+, in __init__|in register_multi_grad_hook',
        "it sets a hook on a module or on several tensors, which a planned step would not: set it "
        "once, before planning",
    ),
    (
        r"op returned non-Tensor[^\0]*target: <(?:built-in )?(?:method|function) (?P<what>[\w.]+)",
        "it calls {what}(), which gives no tensor, so that no graph holds it: take it out of the "
        "forward",
    ),
    (
        r"Skip (?:inlining|calling) function `?<(?:bound method|function) (?P<what>[^ >]+)",
        "it calls {what}(), which torch.compiler.disable keeps out of every graph: remove that; "
        "make it one operator (memopt.opaque); or "
        'torch.compile(model, backend="memopt", options={{"budget": ...}}) plans the parts around '
        "it",
    ),
    (
        r"making fake tensor call[^\0]*?: got \w+\((?P<what>.*)\)",
        "an operator fails there: {what}. If the model runs without memopt, its trace takes "
        "another way than its step, as where a step leaves out an attention mask that masks "
        "nothing: call it without the mask, or plan the sub-modules around it",
    ),
    (
        r"method `__enter__` of class `record_function`|function `record_function\.__enter__`"
        r"|ProfilerRecordFunctionContextVariable\(\) __enter__",
        "it calls __enter__() of a record_function, which torch.compile puts into no graph: write "
        "`with record_function(...):`. Lightning's profiler calls it in hooks, which "
        "PyTorchProfiler(record_module_names=False) leaves out",
    ),
    (
        r"trace the builtin `(?P<what>[\w.]+?)\.?`",
        "it calls {what}(), which is neither Python code nor an operator of torch's, so that no "
        "graph holds it: take it out of the forward, or, where it computes tensors, make an "
        "operator of it (torch.library.custom_op)",
    ),
    (
        r"marked that the function `isinstance` in file `[^`]*\bjit\b",
        "it calls torch.jit.isinstance, which torch.compile puts into no graph: write it with "
        "Python's isinstance",
    ),
    (
        r"marked that the function `(?P<what>[\w.]+)`",
        "it calls {what}(), which torch.compile puts into no graph: take it out of the forward, or "
        "plan the sub-modules around it",
    ),
)
"""Pattern in an error's message → the cause and the remedy, see `memopt.capture.remedies`."""
