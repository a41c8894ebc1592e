#pragma once

#include <cstdint>

namespace zerooffload {

// Copies whose targets are not read again soon: past the cache, where the processor can (x86-64). An ordinary
// store reads the target's cache line from memory before it overwrites it, and drops others for it.
//
// Other threads see the copy once this one has called `order_streaming_copies` and then told them.
void streaming_copy(void* target, const void* source, std::int64_t nbytes);
void order_streaming_copies();

}  // namespace zerooffload
