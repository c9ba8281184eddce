"""Triton's interpreter as the tests need it: four times as fast, products that round alike at every place,
fused multiply-adds that round once.

Written for Triton 3.6 to 3.9, whose interpreter is the same in what is touched here.
"""

from __future__ import annotations

import dataclasses
import functools
import os

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


def choose_products() -> None:
    """The interpreter's products are NumPy's, and OpenBLAS's routine for AVX2 rounds a row by its place in
    the tile, as no GPU does; another one lets tests ask for equal bits. Call before NumPy is imported.
    """
    os.environ.setdefault("OPENBLAS_CORETYPE", "Sandybridge")


def quicken() -> None:
    """Leave out what took three quarters of the time: the language patched anew at every call of a device
    function, a check of every sum and product of integers that says nothing outside of debug mode, and the
    types of values and their shapes made anew for every value.
    """
    import numpy
    import triton.language.core as language
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_once_a_launch(fn):
        if id(fn.__globals__) in patched:
            return None  # within a launch; only the launch itself asks for the scope
        scope = patch(fn)
        restore = scope.restore

        def restore_and_forget():
            patched.clear()
            restore()

        patched.add(id(fn.__globals__))
        scope.restore = restore_and_forget
        return scope

    def fma(builder, x, y, z):
        exact = x.data.astype(numpy.float64) * y.data + z.data
        return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    def by_name(function):
        """A function of types, and what it gave: to compare types is slow, their names say all."""
        known = {}

        @functools.wraps(function)
        def lookup(*types):
            key = tuple(type.name for type in types)
            if key not in known:
                known[key] = function(*types)
            return known[key]

        return lookup

    init, shapes = language.tensor.__init__, {}

    def init_tensor(self, handle, type):
        if type.name in shapes:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = shapes[type.name]
        else:
            init(self, handle, type)
            shapes[type.name] = self.shape, self.numel

    interpreter._patch_lang = patch_once_a_launch
    interpreter.InterpreterBuilder.create_fma = fma  # before 3.9 it rounds twice
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    interpreter._get_np_dtype = by_name(interpreter._get_np_dtype)
    language.block_type.with_element_ty = by_name(language.block_type.with_element_ty)
    language.tensor.__init__ = init_tensor
