// The 16-lane block in plain C++: what a CPU without a vector target runs, and what the vector targets are compared with.
// Knows no operator. Included inside an anonymous namespace.

constexpr int kWide = 1;
constexpr int kWideRow = 1;
constexpr bool kFixedPoint = false;
constexpr int kBlock = 1;  // tokens that share the column vectors where rows are long: nothing stays in registers here
struct F {
  float lane[kLanes];
};
struct Pair {
  F a, b;  // columns j and j + dim/2 of one head
};

template <class Function>
inline F each(Function function) {
  F result;
  for (int i = 0; i < kLanes; ++i) result.lane[i] = function(i);
  return result;
}
template <class Word>
inline Word read(const char* p, int i) {
  Word word;
  __builtin_memcpy(&word, p + i * static_cast<int>(sizeof(Word)), sizeof(Word));
  return word;
}
template <class Word>
inline void write(char* p, int i, Word word) {
  __builtin_memcpy(p + i * static_cast<int>(sizeof(Word)), &word, sizeof(Word));
}

inline F broadcast(float value) {
  return each([&](int) { return value; });
}
inline F add(F a, F b) {
  return each([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline F sub(F a, F b) {
  return each([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline F mul(F a, F b) {
  return each([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline F div(F a, F b) {
  return each([&](int i) { return a.lane[i] / b.lane[i]; });
}
// For exact products only; separate rounding gives the bits that a fused operation gives there.
inline F multiply_add(F a, F b, F c) { return add(mul(a, b), c); }
inline F multiply_subtract(F a, F b, F c) { return sub(mul(a, b), c); }
inline F round_float16(F a) {
  return each([&](int i) { return float_of(widen_float16(narrow_float16(bits_of(a.lane[i])))); });
}

inline F load(Float32, const char* p) {
  return each([&](int i) { return read<float>(p, i); });
}
inline F load(Int32, const char* p) {
  return each([&](int i) { return static_cast<float>(read<std::int32_t>(p, i)); });
}
inline F load(Float16, const char* p) {
  return each([&](int i) { return float_of(widen_float16(read<std::uint16_t>(p, i))); });
}
inline F load(Bfloat16, const char* p) {
  return each([&](int i) { return float_of(static_cast<std::uint32_t>(read<std::uint16_t>(p, i)) << 16); });
}
// float32(x + bias); the sum wraps (C2), so it is formed unsigned.
inline F load_sum(const char* x, const char* bias) {
  return each([&](int i) {
    return static_cast<float>(static_cast<std::int32_t>(read<std::uint32_t>(x, i) + read<std::uint32_t>(bias, i)));
  });
}

inline void store(Float32, char* p, F a) {
  for (int i = 0; i < kLanes; ++i) {
    const std::uint32_t bits = bits_of(a.lane[i]);
    write(p, i, (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u : bits);
  }
}
inline void store(Float16, char* p, F a) {
  for (int i = 0; i < kLanes; ++i) write(p, i, static_cast<std::uint16_t>(narrow_float16(bits_of(a.lane[i]))));
}
inline void store(Bfloat16, char* p, F a) {
  for (int i = 0; i < kLanes; ++i) write(p, i, static_cast<std::uint16_t>(narrow_bfloat16(bits_of(a.lane[i]))));
}
inline void store_raw(char* p, F a) { __builtin_memcpy(p, a.lane, sizeof(a.lane)); }


struct Words {
  std::int8_t lane[kLanes];
};
// C6: clamp, rint, NaN to 0 (scaled is NaN where the value is, and in unused lanes, whose scale is 0). Adding and subtracting
// 1.5 * 2^23 rounds to an integer, ties to even, for |v| < 2^22; clamping first gives the same as clamping last because the
// limits are integers.
inline Words whole(F, F scaled) {
  Words words;
  for (int i = 0; i < kLanes; ++i) {
    const float v = scaled.lane[i];
    const float clamped = v != v ? 0.0f : v > 127.0f ? 127.0f : v < -128.0f ? -128.0f : v;
    const float whole = (clamped + 12582912.0f) - 12582912.0f;
    words.lane[i] = static_cast<std::int8_t>(static_cast<std::int32_t>(whole));
  }
  return words;
}
inline Words narrow(Words a) { return a; }
inline void store(Int8, char* p, Words bytes) { __builtin_memcpy(p, bytes.lane, sizeof(bytes.lane)); }
// Streaming is a hint; the baseline has no use for it.
template <class T, class Value>
inline void stream(T type, char* p, Value value) {
  store(type, p, value);
}
