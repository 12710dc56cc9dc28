// The loops of elementwise/rows.hpp for any processor.
#include "elementwise/rows.hpp"

namespace trinity {

const Elementwise &elementwise_portable(bool bf16) { return bf16 ? LOOPS<Bf16> : LOOPS<float>; }

} // namespace trinity
