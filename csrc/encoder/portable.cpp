// The loops of encoder/rows.hpp for any processor.
#include "encoder/rows.hpp"

namespace trinity {

const Encoder &encoder_portable(bool bf16) { return bf16 ? ENCODER<Bf16> : ENCODER<float>; }

} // namespace trinity
