"""What the Hopper kernels share: layouts, PTX, mbarriers, matrix products, shuffles.

Pallas' own primitives are used wherever they fit. The modules here exist for the rest, each for
a reason that its docstring gives; everything in them is called while a kernel is being lowered.
"""
