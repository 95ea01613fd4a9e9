//! Reader and writer for all stored structures.
//!
//! Integers are little-endian where fixed, LEB128 where variable (at most 10 bytes, no needless zero continuation);
//! byte strings are a variable length and the bytes.

use thiserror::Error;

use crate::error::Error as PublicError;

/// Bytes that do not follow the format.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{what} at byte {offset}")]
pub struct Malformed {
    /// Fault.
    pub what: &'static str,
    /// Offset from the start of the structure.
    pub offset: usize,
}

/// Message of [`Malformed`] for a structure that is larger than its memory limit.
const TOO_LARGE: &str = "structure needs more memory than it may take";

impl Malformed {
    /// True if decoding would need more memory than [`Reader::within`] allows; the bytes may be valid.
    #[must_use]
    pub fn is_too_large(&self) -> bool {
        self.what == TOO_LARGE
    }
}

impl From<Malformed> for PublicError {
    fn from(malformed: Malformed) -> Self {
        if malformed.is_too_large() {
            return too_large().source(malformed);
        }
        Self::damaged("stored bytes do not follow the format").source(malformed)
    }
}

/// Error: a structure exceeds its memory limit.
pub(crate) fn too_large() -> PublicError {
    PublicError::exhausted("stored structure does not fit the memory budget")
        .help("raise --memory, if you trust who wrote it: a small object can stand for a very large one")
}

/// Result of reading stored bytes.
pub type Read<T> = Result<T, Malformed>;

/// Reads a structure front to back.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Bytes of memory that may still be kept.
    memory: u64,
}

impl<'a> Reader<'a> {
    /// Creates a reader of `bytes`, for a structure whose memory is about the length of its bytes.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self::within(bytes, u64::MAX)
    }

    /// Creates a reader of `bytes` with a limit of `memory` bytes of memory: see [`Reader::keep`].
    pub fn within(bytes: &'a [u8], memory: u64) -> Self {
        Self { bytes, at: 0, memory }
    }

    /// Counts `bytes` of memory for decoded values.
    ///
    /// # Errors
    /// See [`Malformed::is_too_large`].
    pub fn keep(&mut self, bytes: usize) -> Read<()> {
        self.memory = self.memory.checked_sub(bytes as u64).ok_or_else(|| self.malformed(TOO_LARGE))?;
        Ok(())
    }

    /// Counts the memory of `count` values of type `T`.
    ///
    /// # Errors
    /// As [`Reader::keep`].
    pub fn keep_all<T>(&mut self, count: usize) -> Read<()> {
        self.keep(count.saturating_mul(size_of::<T>()))
    }

    /// Reads `bytes`, a part of this structure, with the same limit of memory.
    pub fn nested<T, E>(&mut self, bytes: &'a [u8], read: impl FnOnce(&mut Self) -> Result<T, E>) -> Result<T, E> {
        let mut reader = Self::within(bytes, self.memory);
        let value = read(&mut reader)?;
        self.memory = reader.memory;
        Ok(value)
    }

    /// An error at the present position.
    pub fn malformed(&self, what: &'static str) -> Malformed {
        Malformed { what, offset: self.at }
    }

    /// Bytes not read yet.
    pub fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The next `n` bytes.
    pub fn take(&mut self, n: usize) -> Read<&'a [u8]> {
        let end = self.at.checked_add(n).ok_or_else(|| self.malformed("length overflows"))?;
        let found = self.bytes.get(self.at..end).ok_or_else(|| self.malformed("bytes end too early"))?;
        self.at = end;
        Ok(found)
    }

    /// The next `N` bytes as an array.
    pub fn array<const N: usize>(&mut self) -> Read<[u8; N]> {
        let bytes = self.take(N)?;
        bytes.try_into().map_err(|_| self.malformed("bytes end too early"))
    }

    /// One byte.
    pub fn u8(&mut self) -> Read<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    /// One byte that is 0 or 1.
    pub fn flag(&mut self) -> Read<bool> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(self.malformed("flag is neither 0 nor 1")),
        }
    }

    /// Four bytes, little-endian.
    pub fn u32(&mut self) -> Read<u32> {
        self.array().map(u32::from_le_bytes)
    }

    /// Eight bytes, little-endian.
    pub fn u64(&mut self) -> Read<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// A variable-length unsigned integer.
    pub fn varint(&mut self) -> Read<u64> {
        let mut value = 0u64;
        for shift in (0..70).step_by(7) {
            let byte = self.u8()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                return Err(self.malformed("integer overflows"));
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return match byte {
                    0 if shift > 0 => Err(self.malformed("integer has a needless byte")),
                    _ => Ok(value),
                };
            }
        }
        Err(self.malformed("integer is too long"))
    }

    /// A variable-length integer that must fit 32 bits.
    pub fn varint32(&mut self) -> Read<u32> {
        let value = self.varint()?;
        u32::try_from(value).map_err(|_| self.malformed("integer is too large"))
    }

    /// A zigzag variable-length signed integer.
    pub fn signed(&mut self) -> Read<i64> {
        let zigzag = self.varint()?;
        Ok((zigzag >> 1).cast_signed() ^ -(zigzag & 1).cast_signed())
    }

    /// Reads a count of items of at least `least` bytes each. It is limited by the remaining bytes, so that no allocation is
    /// larger than the input.
    pub fn count(&mut self, least: usize) -> Read<usize> {
        let count = self.varint()?;
        let most = self.remaining() / least.max(1);
        usize::try_from(count).ok().filter(|&n| n <= most).ok_or_else(|| self.malformed("count is impossible"))
    }

    /// A byte string of at most `limit` bytes.
    pub fn string(&mut self, limit: usize) -> Read<&'a [u8]> {
        let len = self.count(1)?;
        if len > limit {
            return Err(self.malformed("string is too long"));
        }
        self.take(len)
    }

    /// A byte string of at most `limit` bytes that is kept.
    pub fn kept_string(&mut self, limit: usize) -> Read<Vec<u8>> {
        let bytes = self.string(limit)?;
        self.keep(bytes.len())?;
        Ok(bytes.to_vec())
    }

    /// A UTF-8 string of at most `limit` bytes that is kept.
    pub fn kept_text(&mut self, limit: usize) -> Read<String> {
        let text = self.text(limit)?;
        self.keep(text.len())?;
        Ok(text.to_owned())
    }

    /// Reads `count` values; their memory is counted before any is read.
    pub fn kept_list<T, E: From<Malformed>>(
        &mut self,
        count: usize,
        mut read: impl FnMut(&mut Self) -> Result<T, E>,
    ) -> Result<Vec<T>, E> {
        self.keep_all::<T>(count)?;
        let mut list = Vec::with_capacity(count);
        for _ in 0..count {
            list.push(read(self)?);
        }
        Ok(list)
    }

    /// A UTF-8 string of at most `limit` bytes.
    pub fn text(&mut self, limit: usize) -> Read<&'a str> {
        let bytes = self.string(limit)?;
        std::str::from_utf8(bytes).map_err(|_| self.malformed("text is not UTF-8"))
    }

    /// Checks that nothing is left.
    pub fn finish(self) -> Read<()> {
        self.done()
    }

    /// Checks that nothing is left, without ending the reader.
    pub fn done(&self) -> Read<()> {
        if self.remaining() == 0 { Ok(()) } else { Err(self.malformed("bytes are left over")) }
    }
}

/// Writes what [`Reader`] reads.
#[derive(Clone, Debug, Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes that were written.
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    /// Bytes written so far.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True if nothing was written yet.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Raw bytes.
    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// One byte.
    pub fn u8(&mut self, value: u8) -> &mut Self {
        self.bytes(&[value])
    }

    /// Four bytes, little-endian.
    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Eight bytes, little-endian.
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    /// A variable-length unsigned integer.
    pub fn varint(&mut self, mut value: u64) -> &mut Self {
        while value >= 0x80 {
            self.0.push((value & 0x7f) as u8 | 0x80);
            value >>= 7;
        }
        self.0.push((value & 0x7f) as u8);
        self
    }

    /// A length or count.
    pub fn count(&mut self, value: usize) -> &mut Self {
        self.varint(value as u64)
    }

    /// A zigzag variable-length signed integer.
    pub fn signed(&mut self, value: i64) -> &mut Self {
        self.varint(((value << 1) ^ (value >> 63)).cast_unsigned())
    }

    /// Each of `items`, in order.
    pub fn each<T>(&mut self, items: &[T], write: impl for<'w> Fn(&'w mut Self, &T) -> &'w mut Self) -> &mut Self {
        for item in items {
            write(self, item);
        }
        self
    }

    /// A byte string.
    pub fn string(&mut self, bytes: &[u8]) -> &mut Self {
        self.count(bytes.len()).bytes(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn integers_survive(value in any::<u64>(), signed in any::<i64>()) {
            let mut writer = Writer::new();
            writer.varint(value).signed(signed).u64(value);
            let bytes = writer.into_bytes();
            let mut reader = Reader::new(&bytes);
            prop_assert_eq!(reader.varint().unwrap(), value);
            prop_assert_eq!(reader.signed().unwrap(), signed);
            prop_assert_eq!(reader.u64().unwrap(), value);
            reader.finish().unwrap();
        }
    }

    #[test]
    fn impossible_counts_are_refused_before_allocating() {
        let mut writer = Writer::new();
        writer.varint(1 << 40);
        assert_eq!(Reader::new(&writer.into_bytes()).count(32).unwrap_err().what, "count is impossible");
    }

    #[test]
    fn memory_is_counted_before_it_is_taken() {
        let bytes = [3, 1, 2, 3, 1, b'x'];
        let read = |memory| {
            let mut reader = Reader::within(&bytes, memory);
            let count = reader.count(1)?;
            let list: Vec<u64> = reader.kept_list(count, Reader::varint)?;
            Ok::<_, Malformed>((list, reader.kept_string(9)?))
        };
        assert_eq!(read(25).unwrap(), (vec![1, 2, 3], b"x".to_vec()));
        let refused = read(24).unwrap_err();
        assert!(refused.is_too_large());
        assert_eq!(PublicError::from(refused).kind(), crate::error::ErrorKind::Exhausted);
        assert!(read(23).unwrap_err().is_too_large());
    }

    #[test]
    fn one_integer_has_one_spelling() {
        assert!(Reader::new(&[0x80, 0x00]).varint().is_err());
        assert!(Reader::new(&[0xff; 11]).varint().is_err());
        assert_eq!(Reader::new(&[0x80, 0x01]).varint(), Ok(128));
    }
}
