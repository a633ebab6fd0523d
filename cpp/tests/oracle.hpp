// The operator a second time, as one slow scalar loop written from docs/contract.md (C1-C8, I1-I3) alone.
// It takes the public views and shares no code with the library: conversions and rounding are integer arithmetic.
// Operands must be valid (nothing is checked) and the caller's floating-point state must be the default one.
#pragma once

#include <cstdint>

#include "kvquant/kvquant.hpp"

namespace oracle {

// Computes all tokens in order and writes q, k, v (with kv_output) and both caches.
void dequant_rope_quant_kvcache(const kvquant::Operands& operands, const kvquant::Options& options);

// Tokens of the call, and how many of its cache rows (K and V counted apart) hold a value of this call afterwards.
std::int64_t tokens(const kvquant::Operands& operands);
std::int64_t cache_rows(const kvquant::Operands& operands, const kvquant::Options& options);

std::uint16_t to_float16(float value);   // nearest even, NaN becomes 7E00
std::uint16_t to_bfloat16(float value);  // nearest even, NaN becomes 7FC0
float from_float16(std::uint16_t bits);
float from_bfloat16(std::uint16_t bits);
float from_int32(std::int32_t value);    // nearest even
std::int8_t quantize(float value, float scale, float offset);  // C6; offset 0 stands for an absent one

float from_bits(std::uint32_t bits);
std::uint32_t to_bits(float value);

}  // namespace oracle
