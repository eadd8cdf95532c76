"""The C++ kernels: finds a toolkit, compiles csrc/fa3_a2a into the user's cache, loads. Importing costs nothing."""
