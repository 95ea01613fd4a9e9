//! Element types of tensors, with their safetensors names; further types of `PyTorch` have names in the same style.

use std::fmt;

use crate::codec::{Element, Width};

/// Declares the known types with their names and widths in one table.
macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $word:literal, $bits:literal;)*) => {
        /// The type of a tensor's elements. Ordered as safetensors orders them.
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Dtype {
            $($(#[$doc])* $variant,)*
            /// A type unknown to this version, by its name: its bytes are stored without interpretation.
            Other(Box<str>),
        }

        impl Dtype {
            /// Type with the name `word`.
            #[must_use]
            pub fn from_word(word: &str) -> Self {
                match word {
                    $($word => Self::$variant,)*
                    _ => Self::Other(word.into()),
                }
            }

            /// Name, as written in a header.
            #[must_use]
            pub fn word(&self) -> &str {
                match self {
                    $(Self::$variant => $word,)*
                    Self::Other(word) => word,
                }
            }

            /// Bits in an element; none for an unknown type.
            #[must_use]
            pub const fn bits(&self) -> Option<u32> {
                match self {
                    $(Self::$variant => Some($bits),)*
                    Self::Other(_) => None,
                }
            }

            #[cfg(test)]
            const KNOWN: &[Self] = &[$(Self::$variant),*];
        }
    };
}

// The names and widths of `Dtype` in <https://github.com/huggingface/safetensors>, safetensors/src/tensor.rs; the last five,
// which it lacks, are `PyTorch`'s complex32, complex128, qint8, quint8 and qint32.
dtypes! {
    /// One byte, 0 or 1.
    Bool = "BOOL", 8;
    /// MX float of 4 bits, two to a byte.
    F4 = "F4", 4;
    /// MX float of 6 bits: 2 of exponent, 3 of mantissa.
    F6E2M3 = "F6_E2M3", 6;
    /// MX float of 6 bits: 3 of exponent, 2 of mantissa.
    F6E3M2 = "F6_E3M2", 6;
    /// Unsigned byte.
    U8 = "U8", 8;
    /// Signed byte.
    I8 = "I8", 8;
    /// Float of 8 bits: 5 of exponent, 2 of mantissa.
    F8E5M2 = "F8_E5M2", 8;
    /// Float of 8 bits: 4 of exponent, 3 of mantissa.
    F8E4M3 = "F8_E4M3", 8;
    /// Float of 8 bits, exponent only: a scale.
    F8E8M0 = "F8_E8M0", 8;
    /// `F8_E4M3` without infinities or a negative zero.
    F8E4M3Fnuz = "F8_E4M3FNUZ", 8;
    /// `F8_E5M2` without infinities or a negative zero.
    F8E5M2Fnuz = "F8_E5M2FNUZ", 8;
    /// Signed, 16 bits.
    I16 = "I16", 16;
    /// Unsigned, 16 bits.
    U16 = "U16", 16;
    /// IEEE half precision.
    F16 = "F16", 16;
    /// The upper half of an `F32`.
    BF16 = "BF16", 16;
    /// Signed, 32 bits.
    I32 = "I32", 32;
    /// Unsigned, 32 bits.
    U32 = "U32", 32;
    /// IEEE single precision.
    F32 = "F32", 32;
    /// Complex: two `F32`.
    C64 = "C64", 64;
    /// IEEE double precision.
    F64 = "F64", 64;
    /// Signed, 64 bits.
    I64 = "I64", 64;
    /// Unsigned, 64 bits.
    U64 = "U64", 64;
    /// Complex: two `F16`.
    C32 = "C32", 32;
    /// Complex: two `F64`.
    C128 = "C128", 128;
    /// Signed byte, quantised with a scale and a zero point.
    QI8 = "QI8", 8;
    /// Unsigned byte, quantised with a scale and a zero point.
    QU8 = "QU8", 8;
    /// Signed, 32 bits, quantised with a scale.
    QI32 = "QI32", 32;
}

impl Dtype {
    /// Bytes in an element; none if that is unknown or no whole number.
    #[must_use]
    pub const fn whole_bytes(&self) -> Option<u32> {
        match self.bits() {
            Some(bits) if bits % 8 == 0 => Some(bits / 8),
            _ => None,
        }
    }

    /// True if safetensors has this type; unknown ones count, because they came from such a file.
    #[must_use]
    pub const fn in_safetensors(&self) -> bool {
        !matches!(self, Self::C32 | Self::C128 | Self::QI8 | Self::QU8 | Self::QI32)
    }

    /// Element type of its numbers; none for an unknown type. Numbers packed within bytes count as bytes.
    #[must_use]
    pub const fn number(&self) -> Option<Element> {
        Some(match self {
            Self::F16 | Self::BF16 | Self::C32 => Element::Float(Width::W2),
            Self::F32 | Self::C64 => Element::Float(Width::W4),
            Self::F64 | Self::C128 => Element::Float(Width::W8),
            Self::I16 | Self::U16 => Element::Integer(Width::W2),
            Self::I32 | Self::U32 | Self::QI32 => Element::Integer(Width::W4),
            Self::I64 | Self::U64 => Element::Integer(Width::W8),
            Self::F8E5M2 | Self::F8E4M3 | Self::F8E8M0 | Self::F8E4M3Fnuz | Self::F8E5M2Fnuz => {
                Element::Float(Width::W1)
            }
            Self::Bool | Self::F4 | Self::F6E2M3 | Self::F6E3M2 | Self::U8 | Self::I8 | Self::QU8 | Self::QI8 => {
                Element::Integer(Width::W1)
            }
            Self::Other(_) => return None,
        })
    }

    /// Bytes of a tensor of this type and `shape`; none for an unknown type, for a partial byte, or on overflow.
    #[must_use]
    pub fn tensor_len(&self, shape: &[u64]) -> Option<u64> {
        // A zero anywhere makes the tensor empty, however large the other dimensions.
        let elements =
            if shape.contains(&0) { 0 } else { shape.iter().try_fold(1_u64, |all, &dim| all.checked_mul(dim))? };
        let bits = u128::from(elements) * u128::from(self.bits()?);
        if bits % 8 == 0 { u64::try_from(bits / 8).ok() } else { None }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_and_unknown_ones_stay_as_written() {
        for dtype in Dtype::KNOWN {
            assert_eq!(Dtype::from_word(dtype.word()), *dtype);
        }
        assert_eq!(Dtype::from_word("bf16").word(), "bf16");
        assert_eq!(Dtype::from_word("bf16").bits(), None);
    }

    #[test]
    fn lengths_count_bits_and_refuse_what_does_not_fit() {
        assert_eq!(Dtype::F32.tensor_len(&[]), Some(4));
        assert_eq!(Dtype::F4.tensor_len(&[3, 2]), Some(3));
        assert_eq!(Dtype::F4.tensor_len(&[3]), None);
        assert_eq!(Dtype::F6E2M3.tensor_len(&[4]), Some(3));
        assert_eq!(Dtype::U8.tensor_len(&[u64::MAX, 2]), None);
        assert_eq!(Dtype::F64.tensor_len(&[u64::MAX]), None);
        assert_eq!(Dtype::F64.tensor_len(&[u64::MAX, u64::MAX, 0]), Some(0));
    }
}
