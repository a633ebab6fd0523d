// C6 in fixed point, for targets on which a division takes longer than the rest of a value's quantisation. Included inside an
// anonymous namespace.
//
// channels.cpp gives R = 2^16/scale, rounded, and O = 2^16 offset + 2^15 + 4, rounded, if |offset| <= 128 and
// 2^-110 <= |scale| < 2^96 (so that no reciprocal is infinite, and for what follows below). w is v*R + O, rounded once, as an int32: the code
// is its upper half, a number of 1/2^16 above the middle below that code its lower half. In such units, u, and for v/scale +
// offset between -129 and 129, the errors are
//   O: 1/2;  R: 257 * 2^16 * 2^-24 = 1.004;  v*R + O: 1/2;  its conversion: 1/2;  C6's division and sum: (257 + 129) / 2^8 = 1.51,
// together 4.02. So, if the lower half, which ought to be 4 more than it is in truth, is more than 8, the code is C6's; if not,
// all columns of the step are divided. Further out both saturate, and what no int32 holds, as NaN and infinity, becomes INT_MIN:
// its lower half is 0. So a NaN is not missed, whether in a code or in an output (C5).
constexpr int kDoubtful = 8;

// A rotation of bfloat16 values that only goes here may fuse its products and sums, since their 16 bits are exact in float32 but for
// - products below 2^-133, which may be rounded: only a v below 2^-108 can then differ, by one step of float32, which is 2^-131, and
//   w by 2^-131 * 2^126 = 1/32;
// - products of 2^128 and more: C4's result is infinite or a NaN, and so is the fused one, or it is at least 2^112, since a finite
//   product is that far below 2^128. w is then at least 2^112 * 2^16 / 2^96, which no int32 holds.
// Columns to be divided are rotated anew, as C4 is written.
