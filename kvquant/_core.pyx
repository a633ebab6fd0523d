# cython: language_level=3, binding=True, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# cython: freethreading_compatible=True
# distutils: language = c++
"""Arguments to a request and its plan, a Status to an exception: nothing else happens here (no arithmetic, no loop over data)."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libcpp.atomic cimport atomic, memory_order_relaxed
cimport cython
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.object cimport PyObject, PyObject_TypeCheck, PyTypeObject
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.ref cimport Py_DECREF, Py_INCREF
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
cimport numpy as cnp

import os

import numpy as np

cnp.import_array()

cdef extern from *:
    """
    #if defined(__clang__)
    #define KVQUANT_COMPILER "clang " __clang_version__
    #else
    #define KVQUANT_COMPILER "gcc " __VERSION__
    #endif
    #include <cstdlib>
    // Workspace beyond what each thread keeps; aligned as prepare wants it.
    static inline void* kvquant_allocate(std::size_t bytes) { return std::aligned_alloc(64, (bytes + 63) / 64 * 64); }
    """
    const char* KVQUANT_COMPILER
    void* kvquant_allocate(size_t) noexcept nogil

cdef extern from "kvquant/kvquant.hpp" namespace "kvquant" nogil:
    cdef enum class DType(int32_t):
        none, int8, int32, int64, float16, bfloat16, float32, boolean
        uint8, int16, uint16, uint32, uint64, float64, complex64, complex128, other
    cdef enum class Argument(int32_t):
        x, cos, sin, k_cache, v_cache, indices, scale_k, scale_v, offset_k, offset_v
        weight_scale, activation_scale, bias, positions, q, k, v, size_splits, isa
    cdef int kOperandCount
    cdef enum class CacheMode(int32_t):
        contiguous, page
    cdef enum class Numerics(int32_t):
        fp32, ascend
    cdef enum class Code(int32_t):
        ok, missing, dtype, vendor_dtype, index, isa_unknown, isa_unavailable
    cdef cppclass View:
        void* data
        DType dtype
        int32_t ndim
        int64_t[4] shape
        int64_t[4] strides
        bint read_only
    cdef cppclass Operands:
        View[20] view
        int64_t[3] size_splits
    cdef cppclass Options:
        CacheMode cache_mode
        Numerics numerics
        bint kv_output, skip_padding, allow_duplicates, vendor_limits
        const char* isa
    cdef cppclass Status:
        Code code
        Argument argument
        int64_t got
    cdef cppclass CorePlan "kvquant::Plan":
        Operands operands
        Options options
        int64_t batch, sequence, heads_q, heads_kv, dim
        bint three_d, integer_x
    cdef cppclass Call:
        int64_t batch, sequence
        void* data[20]
        int threads
        bint kept
    cdef cppclass Prepared:
        Call call
        int64_t tokens
    Status make_plan(const Operands&, const Options&, CorePlan&) noexcept
    size_t message(const Status&, char*, size_t) noexcept
    const char* name(Argument) noexcept
    size_t workspace_size(const CorePlan&, int64_t) noexcept
    Status prepare(const CorePlan&, const Call&, void*, size_t, Prepared&) noexcept
    void run(const CorePlan&, const Prepared&, int64_t, int64_t) noexcept
    int target_count() noexcept
    const char* target_name(int) noexcept
    const char* target_missing(int) noexcept
    uint64_t target_rows(int) noexcept
    Status active_target(int&) noexcept

cdef extern from "pool.hpp" namespace "kvquant::pool" nogil:
    int thread_limit() noexcept
    int choose_threads(int, int64_t, int64_t) noexcept
    void run_parallel(const CorePlan&, const Prepared&, int) noexcept
    int worker_count() noexcept
    void refuse_starts(bint) noexcept
    void always_wake(bint) noexcept
    void hold_locks(int) noexcept


cdef extern from "request.hpp" namespace "kvquant" nogil:
    cdef cppclass Made:
        CorePlan plan
        uint32_t given
    cdef cppclass LastPlan:
        Made made
        bint valid
    cdef cppclass Request:
        PyObject* arrays[20]
        void* data[20]
        int64_t[3] size_splits
        Options options
        int threads
        bint tensors, direct
        const Made* made
        LastPlan* last
        Made own
    cdef cppclass Kept:
        Prepared prepared
        char* workspace
        size_t bytes
    Kept& kept_by_thread() noexcept
    uint32_t looked_at(const Request&, bint) noexcept
    bint same_metadata(const View&, const View&) noexcept
    bint same_options(const Request&, const CorePlan&) noexcept
    void borrow_last_plan(Request&) noexcept
    Made& new_plan(Request&) noexcept
    void keep_plan(Request&) noexcept


# ---- names and errors -----------------------------------------------------------------------------------------------

cdef str name_of(Argument argument):
    return name(argument).decode()


cdef int raise_status(const Status& status, object given) except -1:
    """Raises what I6 says for this status; `given` is the array at fault, if there is one."""
    cdef char[512] buffer
    message(status, buffer, sizeof(buffer))
    text = buffer.decode()
    if status.code == Code.dtype and <DType><int>status.got == DType.other and given is not None:
        text = text.replace("an unknown dtype", str(given.dtype))
    if status.code == Code.isa_unknown:
        text += f", got {given!r}"
    if status.code == Code.missing or status.code == Code.dtype or status.code == Code.vendor_dtype:
        raise TypeError(text)
    if status.code == Code.index:
        raise IndexError(text)
    if status.code == Code.isa_unavailable:
        raise RuntimeError(text)
    raise ValueError(text)


include "_array.pxi"
include "_tensor.pxi"
include "_request.pxi"


# ---- one call -------------------------------------------------------------------------------------------------------

cdef object output(Request* r, Call* call, Argument argument):
    """The array for q, k or v: the caller's, a new one, or one of shape (0,)."""
    cdef View none
    cdef cnp.npy_intp[4] shape
    cdef int i = <int>argument, axis
    if r.arrays[i] != NULL:
        call.data[i] = r.data[i]
        return <object>r.arrays[i]
    cdef const View* view = &r.made.plan.operands.view[i]
    cdef bint wanted = argument == Argument.q or r.options.kv_output
    cdef PyObject* like = r.arrays[<int>Argument.cos]
    if r.tensors:
        none.ndim = 1
        return empty_tensor(<object>like, r.made.plan.operands.view[<int>Argument.cos].dtype, view[0] if wanted else none,
                            &call.data[i])
    if not wanted:
        return new_array(<PyArrayObject*>like, 1, &no_elements, &nothing)
    cdef size_t bytes = PyArray_ITEMSIZE(<PyArrayObject*>like)  # modulo 2^64: NumPy itself refuses arrays that are too large
    if dtype_of(<PyArrayObject*>like) != r.made.plan.operands.view[<int>Argument.cos].dtype:
        raise TypeError("cos: its dtype was changed during the call")
    for axis in range(view.ndim):
        shape[axis] = view.shape[axis]
        bytes *= shape[axis]
    if 65536 <= bytes < <size_t>1 << 47:
        array = aligned_array(<PyArrayObject*>like, view.ndim, shape, bytes)
    else:
        array = new_array(<PyArrayObject*>like, view.ndim, shape, NULL)
    call.data[i] = PyArray_DATA(<PyArrayObject*>array)
    return array


cdef object execute(Request* r, void* indices=NULL):
    """prepare and run a checked request, with other indices if any; returns (q, k, v, k_cache, v_cache), PyTorch's op (q, k, v)."""
    cdef const CorePlan* plan = &r.made.plan
    cdef Kept* kept = &kept_by_thread()
    cdef void* workspace = kept.workspace
    cdef Call call
    cdef Status status
    cdef int64_t tokens = plan.batch * plan.sequence, elements = tokens * (plan.heads_q + 2 * plan.heads_kv) * plan.dim
    cdef int threads = choose_threads(r.threads, tokens, elements)
    cdef int i
    cdef size_t bytes
    q = output(r, &call, Argument.q)
    k = output(r, &call, Argument.k)
    # Without kv_output one array of shape (0,) stands for both; PyTorch's results must not alias.
    v = output(r, &call, Argument.v) if r.options.kv_output or r.tensors else k
    for i in range(<int>Argument.q):
        call.data[i] = r.data[i]
    if indices != NULL:
        call.data[<int>Argument.indices] = indices
    call.batch = plan.batch
    call.sequence = plan.sequence
    call.threads = threads

    bytes = workspace_size(plan[0], tokens)
    call.kept = bytes <= kept.bytes
    if not call.kept:
        workspace = kvquant_allocate(bytes)
        if workspace == NULL:
            raise MemoryError(f"kvquant: no memory for a workspace of {bytes} bytes")
    # Other threads may run meanwhile where that is worth the switch; the caller's references keep every array alive.
    if r.threads > 1 or elements >= 65536:
        with nogil:
            status = prepare(plan[0], call, workspace, bytes, kept.prepared)
            if r.threads == 1:
                run(plan[0], kept.prepared, 0, kept.prepared.tokens)
            else:
                run_parallel(plan[0], kept.prepared, threads)
    else:
        status = prepare(plan[0], call, workspace, bytes, kept.prepared)
        run(plan[0], kept.prepared, 0, kept.prepared.tokens)
    if not call.kept:
        free(workspace)
    if status.code != Code.ok:
        raise_status(status, None)
    k_cache, v_cache = <object>r.arrays[<int>Argument.k_cache], <object>r.arrays[<int>Argument.v_cache]
    if not r.tensors:
        return q, k, v, k_cache, v_cache
    # Autograd then knows that what it saved of these has changed; of new tensors it has saved nothing.
    increment_version((q, k, v, k_cache, v_cache) if r.arrays[<int>Argument.q] or r.arrays[<int>Argument.k]
                      or r.arrays[<int>Argument.v] else (k_cache, v_cache))
    return (q, k, v, k_cache, v_cache) if r.direct else (q, k, v)


def dequant_rope_quant_kvcache(x, cos, sin, k_cache, v_cache, indices, scale_k, scale_v, size_splits, *, offset_k=None,
                               offset_v=None, weight_scale=None, activation_scale=None, bias=None, positions=None,
                               quant_mode=0, input_layout="BSND", kv_output=False, cache_mode="contiguous", numerics="fp32",
                               padding_index=None, allow_duplicates=False, vendor_limits=False, out=None,
                               num_threads=None, isa=None):
    """Dequantise, split into Q, K and V, rotate Q and K, quantise K and V to int8 and write them to their cache rows.

    T = B*S tokens, H = (Nq + 2*Nkv)*D columns. "Output type" is the dtype of cos: float16, bfloat16 (of ml_dtypes) or
    float32. The arithmetic, rounding by rounding, is docs/contract.md (C1-C8); the index and memory rules are I1-I10 there.

    Parameters
    ----------
    x : ndarray [B, S, H] or [B, H] (then S = 1), int32 or the output type
    cos, sin : ndarray [B, S, 1, D] or, for [B, H], [B, D]; the output type
        Rotation in halves: o[j] = x[j]*cos[j] - x[j+D/2]*sin[j], o[j+D/2] = x[j+D/2]*cos[j+D/2] + x[j]*sin[j+D/2].
        With `positions`: tables [P, D], or [P, D/2] whose values serve both halves.
    k_cache, v_cache : ndarray [C1, C2, Nkv, D], int8, written in place
    indices : ndarray, int32 or int64
        cache_mode "contiguous": [B]; token s of batch b goes to cache[b, indices[b] + s].
        cache_mode "page": [B*S]; token t goes to row indices[t] of cache.reshape(-1, Nkv, D).
    scale_k, scale_v : ndarray [Nkv, D], [Nkv*D], [Nkv, 1], [1] or 0-d, float32, finite and not zero
        Stored is clamp(rint(value / scale + offset), -128, 127); NaN stores 0.
    size_splits : three integers, (Nq*D, Nkv*D, Nkv*D)
    offset_k, offset_v : like the scales, finite; each may come alone
    weight_scale : ndarray [H], float32; required for int32 x
    activation_scale : ndarray [B*S], float32
    bias : ndarray [H]; int32 (added to x before scaling, wrapping), float32, float16 or bfloat16 (added after)
        These three have no effect for float x and are then not looked at.
    positions : ndarray [B*S], int32 or int64, 0 <= position < P
        Token t takes row positions[t] of the tables cos and sin; the bytes are those of gathered cos and sin (I10).
    quant_mode : 0 or "static"
    input_layout : "BSND"
    kv_output : bool
        Return the rotated k and the v as well.
    numerics : "fp32" or "ascend" (the roundings of the NPU kernel for float16 output, C7)
    padding_index : None or -1
        With -1, rows whose index is -1 are computed but not cached.
    allow_duplicates : bool
        With True, the last of several tokens with the same index wins; otherwise they are an error ("page" only).
    vendor_limits : bool
        Also refuse what the NPU operator refuses (I8).
    out : None or (q, k, v)
        Arrays to write to; None for those to allocate, and for k and v without kv_output.
    num_threads : None or int >= 1
        Threads to share the call, this one included. None: as many as it feeds, within the CPU affinity of the calling
        thread. KVQUANT_NUM_THREADS caps both. The bytes are the same for every number; see docs/threads.md.
    isa : None or str
        The target for this call; see kvquant.isa.available(). None: KVQUANT_ISA, else the best.

    Returns
    -------
    (q, k, v, k_cache, v_cache)
        q [B, S, Nq, D] or [B, Nq, D]; k and v [B, S, Nkv, D] or [B, Nkv, D], or shape (0,) without kv_output; the output
        type. The caches are the objects passed in. New arrays of 64 KiB and more are views of memory that is aligned to cache
        lines: their `base` owns it.

    Raises
    ------
    TypeError, ValueError, IndexError
        Before anything is written; the message names the argument, what was expected and what came (I4, I6).
    RuntimeError
        isa or KVQUANT_ISA names a target that this machine can't run.
    MemoryError
        No memory for the results or the workspace; nothing was written.
    """
    cdef Request r
    out = frozen(out)
    fill_request(&r, x, cos, sin, k_cache, v_cache, indices, scale_k, scale_v, size_splits, offset_k, offset_v, weight_scale,
                 activation_scale, bias, positions, quant_mode, input_layout, kv_output, cache_mode, numerics, padding_index,
                 allow_duplicates, vendor_limits, out, num_threads, isa)
    check_plan(&r)
    return execute(&r)


cdef class Plan:
    """The arguments of a call, checked as far as metadata goes; made by kvquant.plan(...). May be shared by threads."""
    cdef Request bound
    cdef tuple given  # keeps alive what `bound` borrows: the operands in the order of Argument, then isa

    def __init__(self, *args, **kwargs):
        raise TypeError("a Plan is made by kvquant.plan(...)")

    # Without binding, CPython checks the type of self: Plan.run(None) is a TypeError.
    @cython.binding(False)
    def run(self, indices=None, *, x=None, cos=None, sin=None, k_cache=None, v_cache=None, scale_k=None, scale_v=None,
            offset_k=None, offset_v=None, weight_scale=None, activation_scale=None, bias=None, positions=None, out=None,
            num_threads=None):
        """Run the call; returns (q, k, v, k_cache, v_cache).

        An operand given here takes the place of the plan's for this run only and may differ from it in shape, strides and
        dtype. All values, and the arrays' shapes, are read anew. Errors as in kvquant.dequant_rope_quant_kvcache.
        """
        self.check_made()
        if (x is None and cos is None and sin is None and k_cache is None and v_cache is None and scale_k is None
                and scale_v is None and offset_k is None and offset_v is None and weight_scale is None
                and activation_scale is None and bias is None and positions is None and out is None and num_threads is None
                and self.is_unchanged(indices)):
            return execute(&self.bound, NULL if indices is None else PyArray_DATA(<PyArrayObject*>indices))
        return self.run_with(indices, x, cos, sin, k_cache, v_cache, scale_k, scale_v, offset_k, offset_v, weight_scale,
                             activation_scale, bias, positions, out, num_threads)

    cdef object run_with(self, indices, x, cos, sin, k_cache, v_cache, scale_k, scale_v, offset_k, offset_v, weight_scale,
                         activation_scale, bias, positions, out, num_threads):
        """run with other operands, or with arrays that have changed."""
        cdef Request r
        cdef tuple others = (x, cos, sin, k_cache, v_cache, indices, scale_k, scale_v, offset_k, offset_v, weight_scale,
                             activation_scale, bias, positions)
        cdef int i
        r.tensors = r.direct = self.bound.tensors
        r.size_splits = self.bound.size_splits
        r.options = self.bound.options
        for i in range(<int>Argument.q):
            r.arrays[i] = self.bound.arrays[i] if others[i] is None else <PyObject*>others[i]
        out = self.given[14] if out is None else frozen(out)
        set_out(&r, out)
        if num_threads is None:
            r.threads = self.bound.threads
        else:
            set_threads(&r, num_threads)
        if is_made_of(&r, &self.bound.own):
            r.made = self.bound.made
        check_plan(&r)
        return execute(&r)

    cdef bint is_unchanged(self, indices):
        """Whether no bound array has moved or changed its form, and `indices`, if given, have that of the bound ones."""
        cdef PyArrayObject* array
        cdef int i
        if self.bound.tensors or not (indices is None or cnp.PyArray_CheckExact(indices)):
            return False
        for i in range(kOperandCount):
            if not self.bound.made.given >> i & 1:
                continue
            if i == <int>Argument.indices and indices is not None:
                if not is_like(&self.bound.made.plan.operands.view[i], <PyArrayObject*>indices):
                    return False
                continue
            array = <PyArrayObject*>self.bound.arrays[i]
            if PyArray_DATA(array) != self.bound.data[i] or not is_like(&self.bound.made.plan.operands.view[i], array):
                return False
        return True

    def __copy__(self):
        return self  # nothing of a plan can change

    def __reduce__(self):
        raise TypeError("a Plan refers to the memory of its operands and can be neither pickled nor deep-copied; make a new one")

    cdef int check_made(self) except -1:
        if self.given is None:  # Plan.__new__(Plan)
            raise TypeError("a Plan is made by kvquant.plan(...)")
        return 0

    @cython.binding(False)
    def describe(self):
        """One readable paragraph: shapes and dtypes, the path of a token, ISA, threads and the bytes of one run."""
        self.check_made()
        cdef const CorePlan* made = &self.bound.made.plan
        cdef int64_t tokens = made.batch * made.sequence, q = made.heads_q * made.dim, kv = made.heads_kv * made.dim
        x, cos, k_cache, isa = self.given[0], self.given[1], self.given[3], self.given[15]
        cdef const Options* options = &self.bound.options
        read = tokens * ((q + 2 * kv) * x.dtype.itemsize + 2 * cos.shape[cos.ndim - 1] * cos.dtype.itemsize)
        written = tokens * ((q + (2 * kv if options.kv_output else 0)) * cos.dtype.itemsize + 2 * kv)
        mode = "page" if options.cache_mode == CacheMode.page else "contiguous"
        bias = f"{self.given[12].dtype} bias" if made.integer_x and self.given[12] is not None else "no bias"
        path = [f"dequantise with {bias}"] if made.integer_x else []
        path += ["rotate by rows of each token" if self.given[13] is None else "rotate by rows of tables at positions",
                 f"quantise ({'ascend' if options.numerics == Numerics.ascend else 'fp32'} numerics)",
                 f"{mode} cache {list(k_cache.shape)}" + (" except index -1" if options.skip_padding else "")]
        return (f"kvquant plan: {x.dtype} x to {cos.dtype} {'q, k and v' if options.kv_output else 'q'}, "
                f"B={made.batch} S={made.sequence} Nq={made.heads_q} Nkv={made.heads_kv} D={made.dim}; "
                f"path: {', '.join(path)}; isa {isa or active()}, threads {self.bound.threads or 'auto'}; "
                f"a run reads {read} bytes of x, cos and sin and writes {written} bytes")


def plan(x, cos, sin, k_cache, v_cache, indices, scale_k, scale_v, size_splits, *, offset_k=None, offset_v=None,
         weight_scale=None, activation_scale=None, bias=None, positions=None, quant_mode=0, input_layout="BSND",
         kv_output=False, cache_mode="contiguous", numerics="fp32", padding_index=None, allow_duplicates=False,
         vendor_limits=False, out=None, num_threads=None, isa=None):
    """Check the metadata of a call (see dequant_rope_quant_kvcache) and bind its arrays: returns a Plan.

    Reads no values and writes nothing; errors in shapes, dtypes, strides and options are raised here.
    """
    return make_plan_object(False, x, cos, sin, k_cache, v_cache, indices, scale_k, scale_v, size_splits, offset_k, offset_v,
                            weight_scale, activation_scale, bias, positions, quant_mode, input_layout, kv_output, cache_mode,
                            numerics, padding_index, allow_duplicates, vendor_limits, out, num_threads, isa)


cdef Plan make_plan_object(bint tensors, x, cos, sin, k_cache, v_cache, indices, scale_k, scale_v, size_splits, offset_k, offset_v,
                           weight_scale, activation_scale, bias, positions, quant_mode, input_layout, kv_output, cache_mode,
                           numerics, padding_index, allow_duplicates, vendor_limits, out, num_threads, isa):
    cdef Plan result = Plan.__new__(Plan)
    result.bound.tensors = result.bound.direct = tensors
    out = frozen(out)
    fill_request(&result.bound, x, cos, sin, k_cache, v_cache, indices, scale_k, scale_v, size_splits, offset_k, offset_v,
                 weight_scale, activation_scale, bias, positions, quant_mode, input_layout, kv_output, cache_mode, numerics,
                 padding_index, allow_duplicates, vendor_limits, out, num_threads, isa)
    check_plan(&result.bound)
    keep_plan(result.bound)
    # The last, as it says that the plan is made.
    result.given = (x, cos, sin, k_cache, v_cache, indices, scale_k, scale_v, offset_k, offset_v, weight_scale,
                    activation_scale, bias, positions, out, isa)
    return result


# ---- targets; kvquant.isa is the public face ------------------------------------------------------------------------

def target_names():
    return [target_name(i).decode() for i in range(target_count())]


def missing_features():
    return [target_missing(i).decode() if target_missing(i) != NULL else None for i in range(target_count())]


def active():
    cdef int index = 0
    cdef Status status = active_target(index)
    if status.code != Code.ok:
        raise_status(status, os.environ.get("KVQUANT_ISA"))
    return target_name(index).decode()


def rows_written():
    """Cache rows (K and V counted apart) that each target's kernels have written in this process: name to count."""
    return {target_name(i).decode(): target_rows(i) for i in range(target_count())}


# ---- for the tests of the thread pool ------------------------------------------------------------------------------

def pool_workers():
    """Threads that the pool has started in this process."""
    return worker_count()


def pool_refuse_starts(bint refuse):
    """With True, behave as if the system refused to start a thread."""
    refuse_starts(refuse)


def pool_always_wake(bint always):
    """With True, share a call among threads however small it is and however long ago the last one was."""
    always_wake(always)


def pool_hold_locks(int milliseconds):
    """Hold every lock of the pool for this long."""
    with nogil:
        hold_locks(milliseconds)


compiler = KVQUANT_COMPILER.decode()
