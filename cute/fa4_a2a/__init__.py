"""CuTe-DSL kernels of fa_a2a, on flash-attn-4. Importing this package costs nothing: no torch, no cutlass.

cache      compiled kernels of this user, one shared object each; loads without importing cutlass
toolchain  compiles for a named architecture, with or without a GPU in the machine
ptx        the PTX instructions the DSL has no exact word for
forward    flash-attn-4's attention with every extent and stride left open
persistent the same as a persistent kernel: staging for O, paced stores, own chunk last, release inside
overlap    the whole layer as one kernel: the persistent one, which also sends q, k, v and waits part by part
scatter    the exchange before attention: stores into the peers' Q, K and V, and publishes; scatter_unequal where
           ranks differ
signal     the completion kernel: publish and await epochs across ranks
litmus     does a system fence cover bulk stores to a peer?
burst      the microbenchmark: bursts of remote stores, timed
build      ahead-of-time compile of all of them
"""
