//! Derived chunks: the base's numbers, rounded. Trainers often save 16-bit weights that are the rounded 32-bit master weights.
//!
//! ```text
//! rule (1):  1: each `F32` of the base, rounded to the nearest `BF16`, ties to even; any NaN becomes 0x7fc0
//! ```

/// The only rule, as stored.
pub(super) const FRAME: &[u8] = &[1];

/// Roundings of a chunk of `F32`s to `BF16`s; empty if its length is not a whole number of them.
#[must_use]
pub fn rounded(master: &[u8]) -> Vec<u8> {
    let mut out = vec![0; master.len() / 2];
    round(master, &mut out).map_or_else(Vec::new, |()| out)
}

/// Decodes a stored chunk of `plain.len()` bytes; none if it is invalid.
pub(super) fn decode(stored: &[u8], base: &[u8], plain: &mut [u8]) -> Option<()> {
    (stored == FRAME).then_some(())?;
    round(base, plain)
}

fn round(master: &[u8], out: &mut [u8]) -> Option<()> {
    let ((masters, []), (out, [])) = (master.as_chunks::<4>(), out.as_chunks_mut::<2>()) else { return None };
    if masters.len() != out.len() {
        return None;
    }
    for (out, master) in out.iter_mut().zip(masters) {
        *out = bf16(u32::from_le_bytes(*master)).to_le_bytes();
    }
    Some(())
}

/// Rounds like `PyTorch`: <https://github.com/pytorch/pytorch/blob/main/torch/headeronly/util/BFloat16.h>,
/// `round_to_nearest_even`.
fn bf16(bits: u32) -> u16 {
    let (exponent_and_mantissa, even) = (bits & 0x7fff_ffff, bits >> 16 & 1);
    let nearest = (bits.wrapping_add(0x7fff + even) >> 16) as u16;
    if exponent_and_mantissa > 0x7f80_0000 { 0x7fc0 } else { nearest }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_to_the_nearest_and_to_even() {
        let cases: [(u32, u16); 9] = [
            (0x3f80_0000, 0x3f80),
            (0x3f80_8000, 0x3f80), // a tie, down to even
            (0x3f81_8000, 0x3f82), // a tie, up to even
            (0x3f80_8001, 0x3f81),
            (0x8000_0000, 0x8000), // -0.0
            (0x7f7f_ffff, 0x7f80), // beyond the largest: infinity
            (0xff80_0000, 0xff80), // -infinity
            (0x7f80_0001, 0x7fc0), // NaN
            (0xffc1_2345, 0x7fc0), // NaN with a sign and a payload
        ];
        for (master, wanted) in cases {
            assert_eq!(rounded(&master.to_le_bytes()), wanted.to_le_bytes(), "{master:#x}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert_eq!(decode(FRAME, &[0; 8], &mut [0; 4]), Some(()));
        assert_eq!(decode(FRAME, &[0; 8], &mut [0; 2]), None);
        assert_eq!(decode(FRAME, &[0; 7], &mut [0; 3]), None);
        assert_eq!(decode(&[2], &[0; 8], &mut [0; 4]), None);
        assert!(rounded(&[0; 7]).is_empty());
    }
}
