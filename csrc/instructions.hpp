// Which instructions kernels may use: what this processor has, up to what the environment's TRINITY_ISA allows.
#pragma once

namespace trinity {

// Throws std::invalid_argument where TRINITY_ISA is none of "amx", "avx512", "avx2" and "portable".
bool has_avx2();        // with FMA
bool has_avx512();      // F, BW, VL and DQ
bool has_avx512_bf16(); // and its dot products of bfloat16
bool may_use_amx();     // nothing forbids it; the processor and the system are asked in amx.hpp

// The widest of them, but for AMX: "avx512", "avx2" or "portable".
const char *instructions();

} // namespace trinity
