// The vocabulary every target shares: tags for the element types in memory and their sizes. Included inside an anonymous
// namespace.

struct Float16 {};
struct Bfloat16 {};
struct Float32 {};
struct Int32 {};
struct Int8 {};

template <class T> constexpr std::int64_t kSize = 4;
template <> constexpr std::int64_t kSize<Float16> = 2;
template <> constexpr std::int64_t kSize<Bfloat16> = 2;
template <> constexpr std::int64_t kSize<Int8> = 1;

template <class A, class B> constexpr bool is_same = false;  // std's are weak symbols, shared with other targets
template <class A> constexpr bool is_same<A, A> = true;

constexpr int kLanes = 16;

template <bool kValue>
struct Flag {
  static constexpr bool value = kValue;
};

// What takes or returns registers is inlined by force where GCC would not: out of line, they go through memory.
#ifndef KVQUANT_INLINE
#define KVQUANT_INLINE __attribute__((always_inline)) inline
#endif

// Loops over tokens and blocks must be unrolled, or what they index stays in memory; GCC does that at -O3 only, which
// multiplies code elsewhere.
#if defined(__clang__)
#define KVQUANT_UNROLL _Pragma("unroll")
#define KVQUANT_ROLL _Pragma("nounroll")
#else
#define KVQUANT_UNROLL _Pragma("GCC unroll 4")
#define KVQUANT_ROLL _Pragma("GCC unroll 1")
#endif
