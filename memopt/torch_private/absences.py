"""Records what a trace looks for and does not find. Dynamo makes no guard for a missing key or
attribute if the code goes on (`except KeyError`), for a `__dict__`, or for a global of the standard
library, such as what `os.getenv` reads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from memopt.torch_private.access import known, patched, private

_ERROR = "torch._dynamo.exc.ObservedAttributeError"
_HANDLED = "torch._dynamo.exc.handle_observed_exception"
_STANDARD = "torch._dynamo.symbolic_convert.is_stdlib"
_NAME = "torch._dynamo.symbolic_convert.InstructionTranslatorBase.load_builtin_from_argval"
_REFUSE = "torch._dynamo.exc.unimplemented"
_LOAD = "torch._dynamo.symbolic_convert.InstructionTranslatorBase._load_attr"
_GETATTR = "torch._dynamo.variables.builtin.GetAttrBuiltinVariable.call_function"
_BUILTIN = "torch._dynamo.variables.BuiltinVariable.call_function"
_MODULE = "torch._dynamo.variables.PythonModuleVariable.call_obj_hasattr"
_ITEM = "torch._dynamo.variables.ConstDictVariable.getitem_const_raise_exception_if_absent"
_OBJECT = "torch._dynamo.variables.dicts.DunderDictVariable"
_HAS = "torch._dynamo.variables.UserDefinedObjectVariable.has_key_in_generic_dict"
_KEY, _KEYS = f"{_OBJECT}.install_dict_contains_guard", f"{_OBJECT}.install_dict_keys_match_guard"

Hear = Callable[[str, Any, Any], None]


@contextlib.contextmanager
def absences_heard(hear: Hear) -> Iterator[None]:
    """Call `hear` for everything that traces inside look for, with the kind of the missing guard,
    the source of the object, and the attribute or key."""
    standard = private(_STANDARD)
    with (
        patched(_STANDARD, lambda module: module is not os and standard(module)),
        _attributes_heard(hear),
        _items_heard(hear),
        _globals_demanded(),
    ):
        yield


@contextlib.contextmanager
def _globals_demanded() -> Iterator[None]:
    """Refuse names that are no globals, as torch does up to 2.13: later ones trace a NameError, and
    make no guard for it."""
    load, refuse = private(_NAME), private(_REFUSE)

    def loaded(translator: Any, name: str) -> Any:
        if name not in translator.f_builtins:
            what = "failed to find name in frame builtins"
            refuse(gb_type=what, context=name, explanation=f"{name} is no global", hints=[])
        return load(translator, name)

    with patched(_NAME, loaded):
        yield


@contextlib.contextmanager
def _attributes_heard(hear: Hear) -> Iterator[None]:
    load, error, has = private(_LOAD), private(_ERROR), private(_MODULE)
    call = _GETATTR if known(_GETATTR) else _BUILTIN
    get = private(call)

    def told(owner: Any, name: str) -> None:
        if (source := owner.realize().source) is not None:
            hear("HASATTR", source, name)

    def loaded(translator: Any, name: str) -> None:
        owner = translator.stack[-1]
        try:
            load(translator, name)
        except error:
            told(owner, name)
            raise

    def got(variable: Any, translator: Any, given: Any, keywords: Any) -> Any:
        asked = call == _GETATTR or variable.fn is getattr
        computed = asked and len(given) > 2 and _is_computed(*given[:2])
        try:
            return get(variable, translator, given[:2] if computed else given, keywords)
        except error:
            if asked:
                told(given[0], given[1].as_python_constant())
            if computed:
                private(_HANDLED)(translator)
                return given[2]
            raise

    def has_attribute(module: Any, translator: Any, name: str) -> Any:
        told(module, name)
        return has(module, translator, name)

    with patched(_LOAD, loaded), patched(call, got), patched(_MODULE, has_attribute):
        yield


def _is_computed(owner: Any, name: Any) -> bool:
    """Whether a property of Python's computes an attribute. Dynamo would compute it twice where
    there is a default: once to see whether it is there."""
    try:
        kind = owner.realize().python_type()
    except NotImplementedError:
        return False
    known_name = name.is_python_constant()
    return known_name and isinstance(getattr(kind, name.as_python_constant(), None), property)


@contextlib.contextmanager
def _items_heard(hear: Hear) -> Iterator[None]:
    item = private(_ITEM)

    def looked(variable: Any, translator: Any, key: Any) -> None:
        if variable.source is None or translator.output.side_effects.is_modified(variable):
            return
        if key.is_python_constant():
            kind = "DICT_CONTAINS" if key in variable else "DICT_NOT_CONTAINS"
            hear(kind, variable.source, key.as_python_constant())
        else:
            hear("DICT_KEYS_MATCH", variable.source, None)

    def got(variable: Any, translator: Any, key: Any) -> Any:
        if key not in variable:
            looked(variable, translator, key)
        return item(variable, translator, key)

    def all_keys(variable: Any) -> None:
        if variable.source is not None:
            hear("DICT_KEYS_MATCH", variable.source, None)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(_ITEM, got))
        if known(_KEY):
            stack.enter_context(patched(_KEY, lambda own, tx, keys: looked(own, tx, keys[0])))
            stack.enter_context(patched(_KEYS, all_keys))
        else:
            has = private(_HAS)

            def has_key(variable: Any, translator: Any, key: str) -> Any:
                if variable.source is not None:
                    hear("NOT_PRESENT_IN_GENERIC_DICT", variable.source, key)
                return has(variable, translator, key)

            stack.enter_context(patched(_HAS, has_key))
        yield
