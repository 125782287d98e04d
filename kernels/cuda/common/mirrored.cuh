// Structs that the launchers fill in: src/cuda/*/raw.rs declares them for Rust. PAGODA_MIRRORED(family, name) behind
// the declaration compares size and offsets with those of Rust, which kernels/build.rs writes into pagoda_layouts.h.
#pragma once

#include <pagoda_layouts.h>

#define PAGODA_MIRRORED(FAMILY, NAME) PAGODA_LAYOUT_##FAMILY##_##NAME
