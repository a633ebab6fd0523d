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
    struct KvquantDLExchange {
      std::uint32_t major, minor;
      KvquantDLExchange* previous;
      void *allocate, *export_managed, *import_managed;
      int (*dltensor_from_object)(void* object, KvquantDLTensor* out);  // -1 with a Python exception set
      void* current_stream;
    };
    """
    cdef struct KvquantDLTensor:
        void* data
        int32_t device_type
        int32_t ndim
        uint8_t code, bits
        uint16_t lanes
        int64_t* shape
        int64_t* strides
        uint64_t byte_offset
    cdef struct KvquantDLExchange:
        uint32_t major
        KvquantDLExchange* previous
        int (*dltensor_from_object)(void*, KvquantDLTensor*) except -1

cdef enum:
    kDLCPU = 1
    kDLInt = 0
    kDLUInt = 1
    kDLFloat = 2
    kDLBfloat = 4
    kDLBool = 6

cdef object tensor_type = None  # torch.Tensor
cdef object grad_enabled = None  # torch.is_grad_enabled
cdef object increment_version = None  # torch.autograd.graph.increment_version
cdef dict tensor_dtypes = {}  # torch.dtype -> number of DType, for the slow way
cdef KvquantDLExchange* exchange = NULL


def use_tensors(type_, is_grad_enabled, increment, dtypes, capsule):
    """Called once by kvquant.torch. capsule: torch.Tensor's __dlpack_c_exchange_api__, or None to read attributes."""
    global tensor_type, grad_enabled, increment_version, tensor_dtypes, exchange
    cdef KvquantDLExchange* found = NULL
    if capsule is not None:
        found = <KvquantDLExchange*>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
        while found != NULL and (found.major != 1 or found.dltensor_from_object == NULL):
            found = found.previous
    tensor_type, grad_enabled, increment_version, exchange = type_, is_grad_enabled, increment, found
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
    if view.data == NULL and given._is_zerotensor():
        raise ValueError(f"{name_of(argument)}: expected a tensor with memory, got a zero tensor (use clone())")
    if view.dtype == DType.int8 or view.dtype == DType.int32 or view.dtype == DType.int64:
        return 0  # integers have neither gradients nor lazy negation
    if given.requires_grad and grad_enabled():
        raise ValueError(f"{name_of(argument)}: expected a tensor that requires no grad, as there is no backward pass; "
                         "got requires_grad=True (detach it, or call under torch.no_grad())")
    if direct and given.is_neg():
        raise ValueError(f"{name_of(argument)}: expected a tensor without lazy negation, got is_neg() (use resolve_neg())")
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


cdef object empty_tensor(object like, const View& view, Argument argument, void** data):
    """A new contiguous tensor of the dtype of `like` and the shape of `view`; `data` becomes its address."""
    cdef View made
    if view.ndim == 4:  # PyTorch parses a tuple more slowly than single integers
        result = like.new_empty(view.shape[0], view.shape[1], view.shape[2], view.shape[3])
    elif view.ndim == 3:
        result = like.new_empty(view.shape[0], view.shape[1], view.shape[2])
    else:
        result = like.new_empty(0)
    fill_tensor(&made, result, argument, False)
    data[0] = made.data
    return result


def tensor_call(x, cos, sin, k_cache, v_cache, indices, scale_k, scale_v, size_splits, *, offset_k=None, offset_v=None,
                weight_scale=None, activation_scale=None, bias=None, positions=None, quant_mode=0, input_layout="BSND",
                kv_output=False, cache_mode="contiguous", numerics="fp32", padding_index=None, allow_duplicates=False,
                vendor_limits=False, num_threads=None, isa=None):
    """dequant_rope_quant_kvcache over torch tensors; returns (q, k, v), new tensors. See kvquant.torch."""
    cdef Request r
    r.tensors = True
    fill_request(&r, x, cos, sin, k_cache, v_cache, indices, scale_k, scale_v, size_splits, offset_k, offset_v, weight_scale,
                 activation_scale, bias, positions, quant_mode, input_layout, kv_output, cache_mode, numerics, padding_index,
                 allow_duplicates, vendor_limits, None, num_threads, isa)
    check_plan(&r, False)
    return execute(&r)[:3]


def tensor_plan(x, cos, sin, k_cache, v_cache, indices, scale_k, scale_v, size_splits, *, offset_k=None, offset_v=None,
                weight_scale=None, activation_scale=None, bias=None, positions=None, quant_mode=0, input_layout="BSND",
                kv_output=False, cache_mode="contiguous", numerics="fp32", padding_index=None, allow_duplicates=False,
                vendor_limits=False, out=None, num_threads=None, isa=None):
    """plan over torch tensors; see kvquant.torch.plan."""
    return make_plan_object(True, x, cos, sin, k_cache, v_cache, indices, scale_k, scale_v, size_splits, offset_k, offset_v,
                            weight_scale, activation_scale, bias, positions, quant_mode, input_layout, kv_output, cache_mode,
                            numerics, padding_index, allow_duplicates, vendor_limits, out, num_threads, isa)
