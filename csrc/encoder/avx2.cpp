// The loops of encoder/rows.hpp compiled for AVX2 and FMA, used where the processor has them.
#include "encoder/encoder.hpp"

#if defined(__AVX2__) && defined(__FMA__)
#include "encoder/rows.hpp"
#include "instructions.hpp"

namespace trinity {

const Encoder *encoder_avx2(bool bf16) {
    if (!has_avx2()) return nullptr;
    return bf16 ? &ENCODER<Bf16> : &ENCODER<float>;
}

} // namespace trinity
#else
namespace trinity {
const Encoder *encoder_avx2(bool) { return nullptr; }
} // namespace trinity
#endif
