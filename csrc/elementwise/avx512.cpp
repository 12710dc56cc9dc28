// The loops of elementwise/rows.hpp compiled for AVX-512, used where the processor has it.
#include "elementwise/elementwise.hpp"
#include "instructions.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "elementwise/rows.hpp"

namespace trinity {

const Elementwise *elementwise_avx512(bool bf16) {
    if (!has_avx512()) return nullptr;
    return bf16 ? &LOOPS<Bf16> : &LOOPS<float>;
}

} // namespace trinity
#else
namespace trinity {
const Elementwise *elementwise_avx512(bool) { return nullptr; }
} // namespace trinity
#endif
