"""Triton's interpreter as the tests need it: three times as fast, products that round alike at every place,
fused multiply-adds that round once.

Written for Triton 3.6 to 3.9, whose interpreter is the same in what is touched here.
"""

from __future__ import annotations

import dataclasses
import os

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


def choose_products() -> None:
    """The interpreter's products are NumPy's, and OpenBLAS's routine for AVX2 rounds a row by its place in
    the tile, as no GPU does; another one lets tests ask for equal bits. Call before NumPy is imported.
    """
    os.environ.setdefault("OPENBLAS_CORETYPE", "Sandybridge")


def quicken() -> None:
    """Leave out what took two thirds of the time: the language patched anew at every call of a device
    function, and a check of every sum and product of integers that says nothing outside of debug mode.
    """
    import numpy
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

    interpreter._patch_lang = patch_once_a_launch
    interpreter.InterpreterBuilder.create_fma = fma  # before 3.9 it rounds twice
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
