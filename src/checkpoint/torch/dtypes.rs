//! The element types of `PyTorch`, by the names that files use for them.

use crate::checkpoint::Dtype;

/// The type called `torch.<name>`
/// (<https://github.com/pytorch/pytorch/blob/main/torch/csrc/utils/tensor_dtypes.cpp>), if it is known. Each
/// has elements of whole bytes.
pub(in crate::checkpoint) fn by_name(name: &str) -> Option<Dtype> {
    Some(match name {
        "float64" | "double" => Dtype::F64,
        "float32" | "float" => Dtype::F32,
        "float16" | "half" => Dtype::F16,
        "bfloat16" => Dtype::BF16,
        "float8_e4m3fn" => Dtype::F8E4M3,
        "float8_e5m2" => Dtype::F8E5M2,
        "float8_e4m3fnuz" => Dtype::F8E4M3Fnuz,
        "float8_e5m2fnuz" => Dtype::F8E5M2Fnuz,
        "float8_e8m0fnu" => Dtype::F8E8M0,
        "complex32" | "chalf" => Dtype::C32,
        "complex64" | "cfloat" => Dtype::C64,
        "complex128" | "cdouble" => Dtype::C128,
        "int64" | "long" => Dtype::I64,
        "int32" | "int" => Dtype::I32,
        "int16" | "short" => Dtype::I16,
        "int8" => Dtype::I8,
        "uint64" => Dtype::U64,
        "uint32" => Dtype::U32,
        "uint16" => Dtype::U16,
        "uint8" => Dtype::U8,
        "bool" => Dtype::Bool,
        "qint8" => Dtype::QI8,
        "quint8" => Dtype::QU8,
        "qint32" => Dtype::QI32,
        _ => return None,
    })
}

/// The type of a storage of the class `torch.<class>`
/// (<https://github.com/pytorch/pytorch/blob/main/torch/storage.py>, `_dtype_to_storage_type_map`).
pub(in crate::checkpoint) fn by_storage(class: &str) -> Option<Dtype> {
    by_name(match class {
        "DoubleStorage" => "float64",
        "FloatStorage" => "float32",
        "HalfStorage" => "float16",
        "BFloat16Storage" => "bfloat16",
        "ComplexFloatStorage" => "complex64",
        "ComplexDoubleStorage" => "complex128",
        "LongStorage" => "int64",
        "IntStorage" => "int32",
        "ShortStorage" => "int16",
        "CharStorage" => "int8",
        "ByteStorage" | "UntypedStorage" => "uint8",
        "BoolStorage" => "bool",
        "QInt8Storage" => "qint8",
        "QUInt8Storage" => "quint8",
        "QInt32Storage" => "qint32",
        _ => return None,
    })
}
