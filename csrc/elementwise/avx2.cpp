// The loops of elementwise/rows.hpp compiled for AVX2 and FMA, used where the processor has them.
#include "elementwise/elementwise.hpp"

#if defined(__AVX2__) && defined(__FMA__)
#include "elementwise/rows.hpp"
#include "instructions.hpp"

namespace trinity {

const Elementwise *elementwise_avx2(bool bf16) {
    if (!has_avx2()) return nullptr;
    return bf16 ? &LOOPS<Bf16> : &LOOPS<float>;
}

} // namespace trinity
#else
namespace trinity {
const Elementwise *elementwise_avx2(bool) { return nullptr; }
} // namespace trinity
#endif
