/* DLPack's exchange of tensors (dlpack 1.3), which reads a tensor's properties in one call without a Python object.

   torch >= 2.11 offers it as `Tensor.__dlpack_c_exchange_api__`. Without it, or for a class of tensors that may answer
   otherwise in Python, attributes are asked one by one, which takes 0.3 us more.

   Nothing is exported or kept. A copy-on-write tensor gets memory of its own by it; there are none unless somebody
   calls the private `torch._lazy_clone`. */

#ifndef MODTRACE_EXCHANGE_H
#define MODTRACE_EXCHANGE_H

#include <stdint.h>

/* DLTensor. Shape and strides are the tensor's own. */
typedef struct {
    void *data;
    int32_t device_type, device_index, dimensions;
    uint8_t dtype_code, dtype_bits;
    uint16_t dtype_lanes;
    const int64_t *shape, *strides;
    uint64_t offset_bytes;
} Exchanged;

/* 0, or -1 with an exception. */
typedef int (*ExchangeFunction)(void *tensor, Exchanged *out);

/* DLPackExchangeAPI. */
typedef struct {
    uint32_t major, minor;
    void *previous;
    void *allocate, *from_tensor, *to_tensor;
    ExchangeFunction exchange; /* may be NULL */
    void *stream;
} ExchangeTable;

#endif
