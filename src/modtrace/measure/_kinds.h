/* The kinds of numbers in memory that the compiled kernels read, as in dtypes.py. */

#pragma once

enum { FLOAT32, BFLOAT16, FLOAT16, FLOAT64, KINDS };
