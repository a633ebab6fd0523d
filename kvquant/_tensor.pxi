# Included by _core.pyx: torch tensors to operand views, and back for results. PyTorch is neither compiled against nor imported:
# kvquant/torch.py hands over what is needed (use_tensors). Tensors are read through DLPack's exchange API, a table of C functions
# that newer versions of torch.Tensor carry, 36 ns each; else by their attributes, which takes more than ten times as long.

cdef extern from *:
    """
    // The parts of DLPack 1.x (github.com/dmlc/dlpack, dlpack.h) that are read here; their layout is stable within version 1.
    struct KvquantDLTensor {
      void* data;
      std::int32_t device_type, device_id;
      std::int32_t ndim;
      std::uint8_t code, bits;
      std::uint16_t lanes;
      std::int64_t *shape, *strides;  // owned by the tensor; strides in elements
      std::uint64_t byte_offset;
    };
    struct KvquantDLManaged {
      std::uint32_t major, minor;
      void* context;
      void (*deleter)(KvquantDLManaged* self);
      std::uint64_t flags;
      KvquantDLTensor tensor;
    };
    struct KvquantDLExchange {
      std::uint32_t major, minor;
      KvquantDLExchange* previous;
      void *allocate, *export_managed;
      int (*object_from_managed)(KvquantDLManaged* stolen, void** object);  // this and the next: -1 with a Python exception set
      int (*dltensor_from_object)(void* object, KvquantDLTensor* out);
      void* current_stream;
    };
    // A result: what DLPack says of it, followed by its elements. One allocation, which the tensor made of it frees.
    struct KvquantResult {
      KvquantDLManaged managed;
      std::int64_t shape[4], strides[4];
      static void release(KvquantDLManaged* self) { std::free(self); }
    };
    """
    cdef struct KvquantDLTensor:
        void* data
        int32_t device_type, device_id
        int32_t ndim
        uint8_t code, bits
        uint16_t lanes
        int64_t* shape
        int64_t* strides
        uint64_t byte_offset
    cdef struct KvquantDLManaged:
        uint32_t major, minor
        void* context
        void (*deleter)(KvquantDLManaged*) noexcept nogil
        uint64_t flags
        KvquantDLTensor tensor
    cdef struct KvquantDLExchange:
        uint32_t major
        KvquantDLExchange* previous
        int (*object_from_managed)(KvquantDLManaged*, void**) except -1
        int (*dltensor_from_object)(void*, KvquantDLTensor*) except -1
    cdef cppclass KvquantResult:
        KvquantDLManaged managed
        int64_t[4] shape
        int64_t[4] strides
        @staticmethod
        void release(KvquantDLManaged*) noexcept nogil

cdef enum:
    kDLCPU = 1
    kDLInt = 0
    kDLUInt = 1
    kDLFloat = 2
    kDLBfloat = 4
    kDLBool = 6

cdef object tensor_type = None  # torch.Tensor
cdef object grad_enabled = None  # torch.is_grad_enabled
cdef object forward_ad = None  # torch.autograd.forward_ad
cdef object increment_version = None  # torch.autograd.graph.increment_version
cdef dict tensor_dtypes = {}  # torch.dtype -> number of DType, for the slow way
cdef KvquantDLExchange* exchange = NULL


def use_tensors(type_, is_grad_enabled, forward, increment, dtypes, capsule):
    """Called once by kvquant.torch. capsule: torch.Tensor's __dlpack_c_exchange_api__, or None to read attributes."""
    global tensor_type, grad_enabled, forward_ad, increment_version, tensor_dtypes, exchange
    cdef KvquantDLExchange* found = NULL
    if capsule is not None:
        found = <KvquantDLExchange*>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
        while found != NULL and (found.major != 1 or found.dltensor_from_object == NULL):
            found = found.previous
    tensor_type, grad_enabled, forward_ad, increment_version, exchange = type_, is_grad_enabled, forward, increment, found
    codes = {"int8": <int>DType.int8, "int32": <int>DType.int32, "int64": <int>DType.int64, "float16": <int>DType.float16,
             "bfloat16": <int>DType.bfloat16, "float32": <int>DType.float32, "float64": <int>DType.float64,
             "bool": <int>DType.boolean, "uint8": <int>DType.uint8, "int16": <int>DType.int16}
    tensor_dtypes = {dtype: codes[name] for name, dtype in dtypes.items() if name in codes}
    return found != NULL


cdef DType dtype_of_tensor(const KvquantDLTensor& t) noexcept:
    if t.lanes != 1:
        return DType.other
    if t.code == kDLFloat:
        return DType.float32 if t.bits == 32 else DType.float16 if t.bits == 16 else DType.float64 if t.bits == 64 else DType.other
    if t.code == kDLBfloat:
        return DType.bfloat16
    if t.code == kDLInt:
        return (DType.int8 if t.bits == 8 else DType.int32 if t.bits == 32 else DType.int64 if t.bits == 64
                else DType.int16 if t.bits == 16 else DType.other)
    if t.code == kDLUInt:
        return (DType.uint8 if t.bits == 8 else DType.uint16 if t.bits == 16 else DType.uint32 if t.bits == 32
                else DType.uint64 if t.bits == 64 else DType.other)
    return DType.boolean if t.code == kDLBool else DType.other


cdef object refuse_tensor(Argument argument, given, error):
    """What is wrong with a tensor that can't be read."""
    if not given.is_cpu:
        return ValueError(f"{name_of(argument)}: expected a CPU tensor, got one on {given.device}")
    return TypeError(f"{name_of(argument)}: expected a strided tensor, got one that can't be read: {str(error).splitlines()[0]}")


cdef int fill_tensor(View* view, object given, Argument argument, bint direct) except -1:
    """The view of one tensor, or TypeError or ValueError; never a copy.

    direct: the call did not come through PyTorch's dispatcher, which would have resolved a lazy negation (and a zero tensor).
    """
    cdef KvquantDLTensor t
    cdef int64_t item
    cdef int i
    if type(given) is not tensor_type and not isinstance(given, tensor_type):
        raise TypeError(f"{name_of(argument)}: expected a torch.Tensor, got {type(given).__name__}")
    if exchange == NULL:
        fill_from_attributes(view, given, argument)
    else:
        try:
            exchange.dltensor_from_object(<void*>given, &t)
        except Exception as error:
            raise refuse_tensor(argument, given, error) from None
        if t.device_type != kDLCPU and not given.is_cpu:
            raise refuse_tensor(argument, given, None)
        item = t.bits // 8
        view.data = <char*>t.data + t.byte_offset
        view.dtype = dtype_of_tensor(t)
        view.ndim = t.ndim
        for i in range(t.ndim if t.ndim < 4 else 4):
            view.shape[i] = t.shape[i]
            view.strides[i] = t.strides[i] * item
    view.read_only = False
    if <uintptr_t>view.data < <uintptr_t>1 << 40:
        need_memory(given, argument)
    if view.dtype == DType.int8 or view.dtype == DType.int32 or view.dtype == DType.int64:
        return 0  # integers have no lazy negation
    if direct and given.is_neg():
        raise ValueError(f"{name_of(argument)}: expected a tensor without lazy negation, got is_neg() (use resolve_neg())")
    return 0


cdef int need_memory(object given, Argument argument) except -1:
    """ValueError for a tensor without memory, whose address is no more than its offset; memory so far down is rare."""
    cdef bint found
    if given.numel() == 0:
        return 0
    if given._is_zerotensor():
        raise ValueError(f"{name_of(argument)}: expected a tensor with memory, got a zero tensor (use clone())")
    try:
        found = given.untyped_storage().data_ptr() != 0
    except Exception:  # what stands for a tensor while it is traced
        found = False
    if not found:
        raise ValueError(f"{name_of(argument)}: expected a tensor with memory, got {type(given).__name__} without (traced, or freed)")
    return 0


cdef int refuse_gradients(Request* r) except -1:
    """ValueError if an operand requires gradients while they are enabled, or has a tangent (forward-mode differentiation)."""
    cdef const View* view
    cdef int i
    if getattr(forward_ad, "_current_level", -1) >= 0:
        for i in range(kOperandCount):
            if r.made.given >> i & 1 and forward_ad.unpack_dual(<object>r.arrays[i]).tangent is not None:
                raise ValueError(f"{name_of(<Argument>i)}: expected a tensor without a tangent, as there is no derivative")
    if not grad_enabled():
        return 0
    for i in range(kOperandCount):
        view = &r.made.plan.operands.view[i]
        if not r.made.given >> i & 1 or view.dtype == DType.int8 or view.dtype == DType.int32 or view.dtype == DType.int64:
            continue  # integers have no gradients
        if (<object>r.arrays[i]).requires_grad:
            raise ValueError(f"{name_of(<Argument>i)}: expected a tensor that requires no grad, as there is no backward pass; "
                             "got requires_grad=True (detach it, or call under torch.no_grad())")
    return 0


cdef int fill_from_attributes(View* view, object given, Argument argument) except -1:
    cdef int64_t item
    cdef int i
    if not given.is_cpu:
        raise refuse_tensor(argument, given, None)
    try:
        view.data = <void*><uintptr_t>given.data_ptr()
        shape, strides, item = given.shape, given.stride(), given.element_size()
    except Exception as error:
        raise refuse_tensor(argument, given, error) from None
    view.dtype = <DType><int>tensor_dtypes.get(given.dtype, <int>DType.other)
    view.ndim = len(shape)
    for i in range(view.ndim if view.ndim < 4 else 4):
        view.shape[i] = shape[i]
        view.strides[i] = strides[i] * item
    return 0


cdef object empty_tensor(object like, DType dtype, const View& view, void** data):
    """A new contiguous tensor of `dtype`, that of `like`, and the shape of `view`; `data` becomes its address."""
    cdef View made
    if exchange != NULL:
        return import_tensor(dtype, view, data)
    result = like.new_empty([view.shape[i] for i in range(view.ndim)])
    fill_tensor(&made, result, Argument.q, False)
    data[0] = made.data
    return result


cdef object import_tensor(DType dtype, const View& view, void** data):
    """empty_tensor with memory that is ours until PyTorch frees the tensor: half the time of new_empty."""
    cdef int64_t item = 4 if dtype == DType.float32 else 2, stride = 1
    cdef double bytes = item
    cdef int i
    cdef void* made = NULL
    for i in range(view.ndim):
        bytes *= view.shape[i]
    # malloc, as glibc's aligned_alloc takes ten times as long; PyTorch's own tensors start at multiples of 64, too.
    cdef KvquantResult* result = <KvquantResult*>(malloc(sizeof(KvquantResult) + 63 + <size_t>bytes) if bytes < 2.0**60 else NULL)
    if result == NULL:
        raise MemoryError(f"kvquant: no memory for a result of {bytes:.0f} bytes")
    data[0] = <void*>((<uintptr_t>(result + 1) + 63) // 64 * 64) if bytes else NULL
    result.managed.major, result.managed.minor, result.managed.flags = 1, 0, 0
    result.managed.context, result.managed.deleter = NULL, KvquantResult.release
    cdef KvquantDLTensor* t = &result.managed.tensor
    t.data, t.byte_offset, t.device_type, t.device_id = data[0], 0, kDLCPU, 0
    t.code, t.bits, t.lanes = kDLBfloat if dtype == DType.bfloat16 else kDLFloat, <uint8_t>(8 * item), 1
    t.ndim, t.shape, t.strides = view.ndim, result.shape, result.strides
    for i in range(view.ndim - 1, -1, -1):
        result.shape[i], result.strides[i] = view.shape[i], stride
        stride *= view.shape[i] if view.shape[i] > 1 else 1
    exchange.object_from_managed(&result.managed, &made)
    tensor = <object>made
    Py_DECREF(tensor)  # `made` came with a reference
    return tensor


def tensor_call(x, cos, sin, k_cache, v_cache, indices, scale_k, scale_v, size_splits, offset_k=None, offset_v=None,
                weight_scale=None, activation_scale=None, bias=None, quant_mode=0, input_layout="BSND", kv_output=False,
                cache_mode="contiguous", numerics="fp32", positions=None, padding_index=None, allow_duplicates=False,
                vendor_limits=False, num_threads=None, isa=None):
    """dequant_rope_quant_kvcache over torch tensors in the order of the op's schema; returns (q, k, v), new tensors."""
    cdef Request r
    r.tensors = True
    fill_request(&r, x, cos, sin, k_cache, v_cache, indices, scale_k, scale_v, size_splits, offset_k, offset_v, weight_scale,
                 activation_scale, bias, positions, quant_mode, input_layout, kv_output, cache_mode, numerics, padding_index,
                 allow_duplicates, vendor_limits, None, num_threads, isa)
    check_plan(&r)
    return execute(&r)


def tensor_plan(x, cos, sin, k_cache, v_cache, indices, scale_k, scale_v, size_splits, *, offset_k=None, offset_v=None,
                weight_scale=None, activation_scale=None, bias=None, positions=None, quant_mode=0, input_layout="BSND",
                kv_output=False, cache_mode="contiguous", numerics="fp32", padding_index=None, allow_duplicates=False,
                vendor_limits=False, out=None, num_threads=None, isa=None):
    """plan over torch tensors; see kvquant.torch.plan."""
    return make_plan_object(True, x, cos, sin, k_cache, v_cache, indices, scale_k, scale_v, size_splits, offset_k, offset_v,
                            weight_scale, activation_scale, bias, positions, quant_mode, input_layout, kv_output, cache_mode,
                            numerics, padding_index, allow_duplicates, vendor_limits, out, num_threads, isa)
