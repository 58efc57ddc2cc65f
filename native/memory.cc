#include <cstdlib>

#include "workspace.h"

void* unrolled::allocate(size_t bytes) { return std::aligned_alloc(64, bytes); }
