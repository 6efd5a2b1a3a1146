"""What the Hopper kernels share: the online softmax, matrix products, barriers, layouts, PTX.

Pallas' own primitives are used wherever they fit. The modules here exist for the rest, each for
a reason that its docstring gives; everything in them is called while a kernel is being lowered.
"""
