// bfloat16 in plain operations, of internal linkage: each file's compiler flags make its own of them.
#pragma once

#include <cstdint>

namespace trinity {

using Bf16 = uint16_t;

namespace {

inline float widened(Bf16 value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float found;
    __builtin_memcpy(&found, &bits, 4);
    return found;
}

// To the nearest, ties to even; a NaN stays one.
inline Bf16 narrowed(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    const uint32_t kept = bits >> 16 | 0x40, nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return static_cast<Bf16>((bits & 0x7fffffffU) > 0x7f800000U ? kept : nearest);
}

inline void put(float *out, float value) { *out = value; }
inline void put(Bf16 *out, float value) { *out = narrowed(value); }
inline float get(float value) { return value; }
inline float get(Bf16 value) { return widened(value); }

} // namespace
} // namespace trinity
